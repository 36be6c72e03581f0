#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dtensor/core/boxes.h"
#include "dtensor/runtime/tensor.h"
#include "tests/core/sweep.h"
#include "tests/runtime/helpers.h"

// Distributed results against what the whole gives.
namespace dtensor::testing {

inline at::Tensor integers(at::IntArrayRef sizes, std::int64_t below) {
  std::int64_t n = 1;
  for (const std::int64_t size : sizes) n *= size;
  return at::arange(n, at::kLong).mul(7).add(3).remainder(below).view(sizes);
}

inline bool same(const at::Tensor& a, const at::Tensor& b, double tolerance) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         at::allclose(a.to(at::kDouble), b.to(at::kDouble), tolerance, tolerance, true);
}

inline at::Tensor part_of(const at::Tensor& full, const Spec& spec, const DeviceMesh& mesh) {
  const sweep::Indices elements = sweep::elements_of(box_of(spec, *mesh.coordinate()), spec.meta().shape());
  return full.reshape({-1}).index_select(0, at::tensor(elements, at::kLong));
}

// Every rank's part against the whole, so that replicas are compared too.
inline void expect_parts(const at::Tensor& tensor, const at::Tensor& whole, double tolerance, const std::string& what) {
  const DTensor handle(tensor);
  const at::Tensor full = handle.full_tensor();
  ASSERT_TRUE(same(full, whole, tolerance)) << what << "\ngot " << full << "\nexpected " << whole;
  if (handle.spec().has_partial()) return;
  const at::Tensor mine = part_of(whole, handle.spec(), handle.mesh());
  ASSERT_TRUE(same(handle.to_local().reshape({-1}), mine, tolerance)) << what << " on this rank";
}

}  // namespace dtensor::testing
