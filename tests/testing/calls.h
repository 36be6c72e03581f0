#pragma once

#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

// One table of calls, small and plain, for every operator that has a row: what the audit and the chains are fed with.
namespace dtensor::testing {

struct Call {
  std::string op;
  std::vector<c10::IValue> args;
  bool again = false;  // what it misses another call of the operator misses, too: not counted twice
};

// Of all rows that this libtorch knows. Operators with arguments of any shape and simple ones besides are called in a
// few ways that follow from their schema; the others are written out.
const std::vector<Call>& sample_calls();
// Those that are written out.
std::vector<Call> shaped_calls();

// Values that differ from each other and are short as binary fractions, so that sums of them are exact.
at::Tensor floats(std::vector<std::int64_t> sizes, double start = 0);
// Between 0 and 1.
at::Tensor positive(std::vector<std::int64_t> sizes);
at::Tensor complexes(std::vector<std::int64_t> sizes);
// From 0 to n-1, all of them where there is room.
at::Tensor indices(std::vector<std::int64_t> sizes, std::int64_t n);
at::Tensor bools(std::vector<std::int64_t> sizes);
// Symmetric and positive definite matrices.
at::Tensor definite(std::vector<std::int64_t> batch, std::int64_t n);

}  // namespace dtensor::testing
