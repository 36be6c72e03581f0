#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "dtensor/core/spec.h"

// A whole tensor and its parts, in one process and without ranks: for tests of rules and of programs.
namespace dtensor::testing {

// Every coordinate of a mesh, in its row-major order.
std::vector<Dims> coordinates_of(const Mesh& mesh);

// What each rank holds of a tensor, in the mesh's row-major order, each part in memory of its own. Partial parts are
// split unevenly, far from the value and from each other, some of them the reduction's identity, so that what is wrong
// for a Partial does not come out right by luck.
std::vector<at::Tensor> parts_of(const at::Tensor& whole, const Spec& spec, std::uint64_t seed);

// The whole that these parts are, or what is wrong with them: a shape or a type that is not the spec's, replicas that
// are not the same bit for bit.
OrReason<at::Tensor> whole_of(const Spec& spec, const std::vector<at::Tensor>& parts);

// What tells the two apart beyond rounding; empty when nothing does. NaNs are equal to each other.
std::string difference(const at::Tensor& got, const at::Tensor& expected);

// The same bytes, shape and type.
bool same_bits(const at::Tensor& a, const at::Tensor& b);

}  // namespace dtensor::testing
