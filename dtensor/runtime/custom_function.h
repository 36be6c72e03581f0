#pragma once

// Lets torch::autograd::Function see that a DTensor argument is a tensor. Function::apply asks each argument for its
// exact type: without this header a DTensor, which is derived from at::Tensor, would count as a number, and no node
// would be made for it. Include it where DTensors go into a torch::autograd::Function; dtensor/dtensor.h does.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/version.h>

#include <optional>
#include <vector>

#include "dtensor/runtime/tensor.h"

namespace torch::autograd {

template <>
inline void ExtractVariables::operator()(const dtensor::DTensor& x) {
  (*this)(static_cast<const at::Tensor&>(x));
}

// Each item of a list is an input of its own, as the items of an at::TensorList are: `backward` returns a gradient for
// each.
template <>
inline void ExtractVariables::operator()(const c10::ArrayRef<dtensor::DTensor>& list) {
  for (const dtensor::DTensor& x : list) (*this)(static_cast<const at::Tensor&>(x));
}
template <>
inline void ExtractVariables::operator()(const std::vector<dtensor::DTensor>& list) {
  (*this)(c10::ArrayRef<dtensor::DTensor>(list));
}

template <>
inline void ExtractVariables::operator()(const c10::optional<dtensor::DTensor>& x) {
  (*this)(x ? c10::optional<at::Tensor>(*x) : c10::optional<at::Tensor>());
}
#if TORCH_VERSION_MAJOR < 2  // there it is another type
template <>
inline void ExtractVariables::operator()(const std::optional<dtensor::DTensor>& x) {
  (*this)(x ? c10::optional<at::Tensor>(*x) : c10::optional<at::Tensor>());
}
#endif

}  // namespace torch::autograd
