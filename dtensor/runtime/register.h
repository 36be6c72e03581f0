#pragma once

#include <vector>

namespace c10 {
class DispatchKeySet;
class OperatorHandle;
struct IValue;
struct OperatorName;
}  // namespace c10

namespace dtensor {

// Makes libtorch send the operators of distributed tensors to us. Called before the first one is made.
void ensure_registered();

// Operators with a kernel of their own.
void register_composites();
void register_direct();
void register_nll_loss2d();
void register_own_kernels();
void register_random();
void register_reshape();
void register_styled();
bool has_direct_kernel(const c10::OperatorName& name);
bool has_nll_loss2d_kernel(const c10::OperatorName& name);
bool has_own_kernel(const c10::OperatorName& name);
bool has_random_kernel(const c10::OperatorName& name);

// libtorch's kernel of an operator that it makes of others, the same for every device.
void run_made_of_others(const c10::OperatorHandle& op, c10::DispatchKeySet keys, std::vector<c10::IValue>* stack);

}  // namespace dtensor
