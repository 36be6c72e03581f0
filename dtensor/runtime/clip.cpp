#include "dtensor/runtime/clip.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>

#include "dtensor/core/error.h"
#include "dtensor/runtime/payload.h"
#include "dtensor/runtime/tensor.h"

namespace dtensor {
namespace {

// Of one gradient, as a plain number: what a mesh says means nothing to another one.
at::Tensor norm_of(const at::Tensor& gradient, double norm_type) {
  if (!has_payload(gradient)) return at::linalg_vector_norm(gradient, norm_type);
  const Payload& payload = payload_of(gradient);
  if (!payload.mesh->contains_me()) {
    fail_invalid("clip_grad_norm_", {.what = "this rank is not in the mesh of a gradient, and cannot know its norm",
                                     .got = payload.spec.to_string(),
                                     .expected = "meshes that this rank is in"});
  }
  return DTensor(at::linalg_vector_norm(gradient, norm_type)).full_tensor();
}

}  // namespace

double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients, norms;
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.grad().defined()) continue;
    gradients.push_back(parameter.grad());
    const at::Tensor norm = norm_of(gradients.back(), norm_type);
    norms.push_back(norms.empty() ? norm : norm.to(norms.front().device()));
  }
  if (norms.empty()) return 0;
  // Together they are of the widest type. Of order 0 libtorch counts the gradients.
  const at::Tensor total = norm_type == 0 ? at::full({}, static_cast<double>(norms.size()), at::kDouble)
                                          : at::linalg_vector_norm(at::stack(norms), norm_type);
  const at::Tensor factor = total.add(1e-6).reciprocal_().mul_(max_norm).clamp_max_(1);
  for (const at::Tensor& gradient : gradients) gradient.mul_(factor.to(gradient.device(), gradient.scalar_type()));
  return total.item<double>();
}

}  // namespace dtensor
