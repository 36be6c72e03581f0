#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

// Operators on lists of tensors, of which each index is a tensor of its own: it may lie on a mesh of its own, and the
// operator runs where it lies.
namespace dtensor {

// aten::_fused_adam_ and its kin: parameters, gradients and states. One call for all parameters, on this rank's parts;
// what does not lie as its parameter is brought there, and what is written goes back. Errors: lists of different
// lengths, plain tensors beside a distributed parameter.
void run_optimizer(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// aten::_amp_foreach_non_finite_check_and_unscale_: found_inf says what any rank has found, on all of them: one
// all-reduce of it for each mesh whose tensors are cut.
void run_unscale(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace dtensor
