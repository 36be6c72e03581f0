#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>

#include <exception>
#include <functional>
#include <string>

namespace dtensor::testing {

// Numbers that depend on nothing but the shape and where they start.
inline at::Tensor numbers(at::IntArrayRef sizes, double start = 0.1) {
  std::int64_t n = 1;
  for (const std::int64_t size : sizes) n *= size;
  return at::arange(n, at::kDouble).mul(0.37).add(start).sin().view(sizes).clone();
}

// What `call` throws, ours or libtorch's.
inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace dtensor::testing
