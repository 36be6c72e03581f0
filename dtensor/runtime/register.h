#pragma once

namespace c10 {
struct OperatorName;
}  // namespace c10

namespace dtensor {

// Makes libtorch send the operators of distributed tensors to us. Called before the first one is made.
void ensure_registered();

// Operators with a kernel of their own.
void register_direct();
void register_nll_loss2d();
void register_reshape();
void register_composites();
void register_random();
void register_styled();
bool has_direct_kernel(const c10::OperatorName& name);
bool has_random_kernel(const c10::OperatorName& name);
bool takes_lists(const c10::OperatorName& name);  // one call for each of their tensors

}  // namespace dtensor
