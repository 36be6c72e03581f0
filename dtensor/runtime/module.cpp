#include "dtensor/runtime/module.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>

#include <set>
#include <utility>
#include <vector>

#include "dtensor/core/error.h"
#include "dtensor/runtime/buckets.h"
#include "dtensor/runtime/factories.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/payload.h"
#include "dtensor/runtime/redistribute.h"

namespace dtensor {
namespace {

struct Named {
  std::string name;
  at::Tensor tensor;
};

// Each tensor once, under its first name.
std::vector<Named> tensors_of(const torch::nn::Module& module) {
  std::vector<Named> result;
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

void convert(const at::Tensor& tensor, const DeviceMesh& mesh, const Placements& placements,
             const DistributeOptions& options) {
  const at::NoGradGuard no_grad;
  const at::Tensor gradient = tensor.grad();
  // A tensor without data stays without: each rank has room for its part, which is then drawn or loaded.
  take_over(tensor, tensor.is_meta() ? empty(tensor.sizes(), mesh, placements, tensor.scalar_type())
                                     : distribute_tensor(tensor.detach(), mesh, placements, options));
  if (!gradient.defined()) return;
  Placements home = placements;
  for (Placement& placement : home) {
    if (placement.is_partial()) placement = Replicate();
  }
  tensor.mutable_grad() = distribute_tensor(gradient, mesh, home, options);
}

}  // namespace

void check_own_memory(std::string_view where, const std::string& name, const at::Tensor& tensor) {
  if (!tensor.is_view() && tensor.storage().use_count() == 1) return;
  fail_invalid(where,
               {.what = "a tensor that shares memory cannot be distributed in place: the others would keep the old one",
                .got = "\"" + name + "\", " + meta_of(tensor).to_string() + (tensor.is_view() ? ", a view" : ""),
                .expected = "a tensor of its own",
                .advice = "clone() it, or let go of its views and of tensors made from it by detach()"});
}

void distribute_in_place(const at::Tensor& tensor, const DeviceMesh& mesh, const Placements& placements,
                         const DistributeOptions& options) {
  check_own_memory("distribute_in_place", "tensor", tensor);
  convert(tensor, mesh, placements, options);
}

void distribute_in_place(const at::Tensor& tensor, const DeviceMesh& mesh, const Spec& spec) {
  const at::NoGradGuard no_grad;
  const auto shared = std::make_shared<const DeviceMesh>(mesh);
  const at::Tensor gradient = tensor.grad();
  if (tensor.is_meta()) {
    at::Tensor local;
    if (mesh.contains_me()) {
      const Dims shape = spec.local_shape(*mesh.coordinate()), stride = spec.local_stride(*mesh.coordinate());
      local = at::empty_strided({shape.data(), shape.size()}, {stride.data(), stride.size()},
                                tensor.options().device(mesh.device() == DeviceKind::kCuda ? at::kCUDA : at::kCPU));
    }
    take_over(tensor, wrap(local, spec, shared));
    return;
  }
  const auto laid_out = [&](const at::Tensor& value, const Spec& to) {
    const at::Tensor whole = has_payload(value) ? value : as_replica(value, shared);
    const at::Tensor result = redistribute_now(whole, to, shared, {});
    // Memory of its own: what it was made of is let go.
    return has_payload(value) || !mesh.contains_me() ? result : wrap(payload_of(result).local().clone(), to, shared);
  };
  if (!is_dtensor(tensor)) check_own_memory("distribute_in_place", "tensor", tensor);
  const std::shared_ptr<ParameterTraits> traits = has_payload(tensor) ? payload_of(tensor).traits : nullptr;
  const void* hooked = has_payload(tensor) ? payload_of(tensor).hooked.load() : nullptr;
  const at::Tensor value = laid_out(tensor.detach(), spec);
  take_over(tensor, wrap(payload_of(value).local(), spec, shared, {.traits = traits}));
  payload_of(tensor).hooked = hooked;
  if (traits && hooked) traits->home = home_of(spec);
  if (gradient.defined()) tensor.mutable_grad() = laid_out(gradient, home_of(spec));
}

void distribute_module(torch::nn::Module& module, const DeviceMesh& mesh, const PlaceParameter& place,
                       const DistributeModuleOptions& options) {
  const std::vector<Named> tensors = tensors_of(module);
  std::vector<std::pair<const Named*, Placements>> todo;
  for (const Named& named : tensors) {
    if (is_dtensor(named.tensor)) {
      check_mesh(named.name, named.tensor, mesh);
      continue;
    }
    check_own_memory("distribute_module", named.name, named.tensor);
    Placements placements =
        place ? place(named.name, named.tensor) : Placements(static_cast<std::size_t>(mesh.ndim()), Replicate());
    // Errors about them come before anything has changed.
    static_cast<void>(Spec::make(meta_of(named.tensor), mesh, placements));
    todo.emplace_back(&named, std::move(placements));
  }
  for (const auto& [named, placements] : todo) convert(named->tensor, mesh, placements, {.source = options.source});
  std::vector<at::Tensor> leaves;
  for (const at::Tensor& parameter : module.parameters()) leaves.push_back(parameter);
  if (options.bucket_bytes > 0) make_buckets(leaves, options.bucket_bytes);
}

}  // namespace dtensor
