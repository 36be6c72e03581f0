#include "dtensor/runtime/module.h"

#include <ATen/core/grad_mode.h>

#include <set>
#include <utility>
#include <vector>

#include "dtensor/core/error.h"
#include "dtensor/runtime/buckets.h"
#include "dtensor/runtime/one_model.h"
#include "dtensor/runtime/payload.h"
#include "dtensor/runtime/redistribute.h"

namespace dtensor {
namespace {

// Each tensor once, under its first name.
std::vector<NamedTensor> tensors_of(const torch::nn::Module& module) {
  std::vector<NamedTensor> result;
  std::set<const c10::TensorImpl*> seen;
  const auto add = [&](const auto& named) {
    for (const auto& item : named) {
      const at::Tensor& tensor = item.value();
      if (tensor.defined() && seen.insert(tensor.unsafeGetTensorImpl()).second) result.push_back({item.key(), tensor});
    }
  };
  add(module.named_parameters());
  add(module.named_buffers());
  return result;
}

void check_mesh(const std::string& name, const at::Tensor& tensor, const DeviceMesh& mesh) {
  const DeviceMesh& other = *payload_of(tensor).mesh;
  if (other == mesh) return;
  fail_invalid("distribute_module", {.what = "a tensor that is distributed over another mesh",
                                     .got = "\"" + name + "\" on " + other.to_string(),
                                     .expected = mesh.to_string()});
}

}  // namespace

void distribute_in_place(const at::Tensor& tensor, const DeviceMesh& mesh, const Placements& placements,
                         const DistributeOptions& options) {
  distribute_all("distribute_in_place", {{"tensor", tensor, Spec::make(dense_meta(tensor), mesh, placements)}}, mesh,
                 options);
}

void redistribute_in_place(const at::Tensor& tensor, const Spec& spec) {
  const at::NoGradGuard no_grad;
  const std::shared_ptr<const DeviceMesh> mesh = payload_of(tensor).mesh;
  const std::shared_ptr<ParameterTraits> traits = payload_of(tensor).traits;
  const void* hooked = payload_of(tensor).hooked.load();
  const at::Tensor gradient = tensor.grad();
  const at::Tensor value = redistribute_now(tensor.detach(), spec, mesh, {});
  take_over(tensor, wrap(payload_of(value).local(), spec, mesh,
                         {.traits = traits, .provenance = payload_of(value).provenance}));
  payload_of(tensor).hooked = hooked;
  if (traits && hooked) traits->home = home_of(spec);
  if (gradient.defined()) tensor.mutable_grad() = redistribute_now(gradient, home_of(spec), mesh, {});
}

void distribute_module(torch::nn::Module& module, const DeviceMesh& mesh, const PlaceParameter& place,
                       const DistributeModuleOptions& options) {
  std::vector<ToDistribute> todo;
  for (const NamedTensor& named : tensors_of(module)) {
    if (is_dtensor(named.tensor)) {
      check_mesh(named.name, named.tensor, mesh);
      continue;
    }
    const Placements placements =
        place ? place(named.name, named.tensor) : Placements(static_cast<std::size_t>(mesh.ndim()), Replicate());
    todo.push_back({named.name, named.tensor, Spec::make(dense_meta(named.tensor), mesh, placements)});
  }
  distribute_all("distribute_module", todo, mesh, {.source = options.source, .equal_copies = options.equal_copies});
  std::vector<at::Tensor> leaves;
  for (const at::Tensor& parameter : module.parameters()) leaves.push_back(parameter);
  if (options.bucket_bytes > 0) make_buckets(leaves, options.bucket_bytes);
}

}  // namespace dtensor
