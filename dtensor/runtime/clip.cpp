#include "dtensor/runtime/clip.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "dtensor/core/error.h"
#include "dtensor/runtime/payload.h"
#include "dtensor/runtime/tensor.h"

namespace dtensor {
namespace {

using Tensors = std::vector<at::Tensor>;

// What norms are put together from: sums of powers, or what is largest or least.
class Powers {
 public:
  explicit Powers(double p) : p_(p) {}

  ReduceOp op() const {
    if (std::isinf(p_)) return p_ > 0 ? ReduceOp::kMax : ReduceOp::kMin;
    return ReduceOp::kSum;
  }
  at::Tensor nothing(const c10::TensorOptions& options) const {
    const double none = op() == ReduceOp::kMin ? std::numeric_limits<double>::infinity() : 0;
    return at::full({}, none, options.dtype(at::kDouble));
  }
  // One number, in double: it overflows no sooner than the powers of the elements would.
  at::Tensor of(const at::Tensor& tensor) const {
    if (tensor.numel() == 0) return nothing(tensor.options());
    const at::Tensor norm = at::linalg_vector_norm(tensor, p_).to(at::kDouble);
    return has_root() ? norm.pow(p_) : norm;
  }
  // Of one for each gradient, which libtorch counts with p = 0.
  double norm(const at::Tensor& all) const {
    if (op() == ReduceOp::kMax) return all.max().item<double>();
    if (op() == ReduceOp::kMin) return all.min().item<double>();
    if (p_ == 0) return static_cast<double>(all.numel());
    return std::pow(all.sum().item<double>(), 1 / p_);
  }

 private:
  bool has_root() const { return p_ != 0 && !std::isinf(p_); }

  double p_;
};

// One number for each gradient, with one transfer: of what several ranks have alike the first one counts it.
at::Tensor on_mesh(const Powers& powers, const DeviceMesh& mesh, const Tensors& gradients) {
  std::vector<bool> cut(static_cast<std::size_t>(mesh.ndim()), false);
  const auto is_cut = [](const at::Tensor& gradient, std::size_t m) {
    return !payload_of(gradient).spec.placements()[m].is_replicate();
  };
  for (const at::Tensor& gradient : gradients) {
    for (std::size_t m = 0; m < cut.size(); ++m) cut[m] = cut[m] || is_cut(gradient, m);
  }
  Tensors mine;
  for (const at::Tensor& gradient : gradients) {
    bool is_first = true;
    for (std::size_t m = 0; m < cut.size(); ++m) {
      if (cut[m] && !is_cut(gradient, m)) is_first = is_first && (*mesh.coordinate())[m] == 0;
    }
    const at::Tensor local = payload_of(gradient).local();
    mine.push_back(is_first ? powers.of(local) : powers.nothing(local.options()));
  }
  Placements lies;
  for (const bool one : cut) lies.push_back(one ? Placement(Partial(powers.op())) : Placement(Replicate()));
  return from_local(at::stack(mine), mesh, lies).full_tensor();
}

// Sums come together first.
at::Tensor without_partials(const at::Tensor& gradient) {
  const Payload& payload = payload_of(gradient);
  if (!payload.mesh->contains_me()) {
    fail_invalid("clip_grad_norm_", {.what = "this rank is not in the mesh of a gradient, and cannot know its norm",
                                     .got = payload.spec.to_string(),
                                     .expected = "meshes that this rank is in"});
  }
  if (!payload.spec.has_partial()) return gradient;
  Placements whole = payload.spec.placements();
  for (Placement& one : whole) {
    if (one.is_partial()) one = Replicate();
  }
  return DTensor(gradient).redistribute(whole);
}

}  // namespace

double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type,
                       bool error_if_nonfinite) {
  const at::NoGradGuard no_grad;
  const Powers powers(norm_type);
  Tensors gradients, parts;
  std::vector<std::pair<std::shared_ptr<const DeviceMesh>, Tensors>> meshes;
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor gradient = parameter.grad();
    if (!gradient.defined()) continue;
    gradients.push_back(gradient);
    if (!has_payload(gradient)) {
      parts.push_back(powers.of(gradient).reshape({1}));
      continue;
    }
    const at::Tensor whole = without_partials(gradient);
    const auto& mesh = payload_of(whole).mesh;
    auto at = std::find_if(meshes.begin(), meshes.end(), [&](const auto& one) { return *one.first == *mesh; });
    if (at == meshes.end()) at = meshes.insert(at, {mesh, {}});
    at->second.push_back(whole);
  }
  for (const auto& [mesh, some] : meshes) parts.push_back(on_mesh(powers, *mesh, some));
  if (parts.empty()) return 0;
  for (at::Tensor& part : parts) part = part.to(parts.front().device());
  const double norm = powers.norm(at::cat(parts));
  if (error_if_nonfinite && !std::isfinite(norm)) {
    fail_invalid("clip_grad_norm_", {.what = "the norm of the gradients is no finite number",
                                     .got = std::to_string(norm) + " over " + std::to_string(gradients.size()),
                                     .advice = "a smaller learning rate, or leave out error_if_nonfinite"});
  }
  const double factor = max_norm / (norm + 1e-6);
  // A norm that is no number says so in every gradient.
  if (factor < 1 || std::isnan(factor)) {
    for (const at::Tensor& gradient : gradients) gradient.mul_(factor);
  }
  return norm;
}

}  // namespace dtensor
