#pragma once

#include <functional>
#include <vector>

namespace c10 {
class OperatorHandle;
struct IValue;
struct OperatorName;
}  // namespace c10

namespace dtensor {

// Makes libtorch send the operators of distributed tensors to us. Called before the first one is made.
void ensure_registered();

// How any operator is run; for kernels that know a shorter way for some calls.
using GeneralWay = std::function<void(const c10::OperatorHandle& op, std::vector<c10::IValue>* stack)>;

// Operators with a kernel of their own.
void register_cat(GeneralWay way);
void register_nll_loss2d();
bool has_nll_loss2d_kernel(const c10::OperatorName& name);
void register_reshape();
void register_composites();
void register_own_kernels();
bool has_own_kernel(const c10::OperatorName& name);
void register_random();
void register_styled();
bool has_random_kernel(const c10::OperatorName& name);

}  // namespace dtensor
