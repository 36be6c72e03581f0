#include "dtensor/runtime/redistribute.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include "dtensor/comm/world.h"
#include "dtensor/core/checksum.h"
#include "dtensor/core/error.h"
#include "dtensor/runtime/backward.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/payload.h"
#include "dtensor/runtime/sub_mesh.h"

namespace dtensor {
namespace {

struct Held : torch::CustomClassHolder {
  Held(Spec of_gradient, std::shared_ptr<const DeviceMesh> its_mesh, RedistributeOptions back)
      : home(std::move(of_gradient)), mesh(std::move(its_mesh)), options(std::move(back)) {}
  const Spec home;
  const std::shared_ptr<const DeviceMesh> mesh;
  const RedistributeOptions options;
};

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The gradient goes back to where the tensor came from.
struct Redistribute : torch::autograd::Function<Redistribute> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& tensor, const Spec* to,
                            const std::shared_ptr<const DeviceMesh>* mesh, const RedistributeOptions* options) {
    ctx->set_materialize_grads(false);  // libtorch would make plain zeros
    Payload& payload = payload_of(tensor);
    const RedistributeOptions back{.plan = options->plan,
                                   .async = options->async,
                                   .forward_dtype = options->backward_dtype,
                                   .backward_dtype = options->forward_dtype};
    ctx->saved_data["held"] =
        c10::IValue::make_capsule(c10::make_intrusive<Held>(home_of(payload.spec), payload.mesh, back));
    if (!(payload.spec == *to && *payload.mesh == **mesh)) return redistribute_now(tensor, *to, *mesh, *options);
    // The same memory: who writes to the one changes the other's version too, and autograd sees it.
    c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), false));
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto& held = *static_cast<const Held*>(ctx->saved_data.at("held").toCapsule().get());
    at::Tensor gradient = gradients[0];
    if (gradient.defined()) {
      if (!has_payload(gradient)) gradient = distribute_plain_gradient(gradient, held.mesh);
      // Laid out as the tensor was, in its own order of elements: that is nobody's business here.
      const Spec home = expect_spec(
          Spec::from_dims(payload_of(gradient).spec.meta(), held.home.mesh(), held.home.dims(), held.home.partials()),
          "redistribute");
      gradient = redistribute(gradient, home, held.mesh, held.options);
    }
    return {gradient, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

Spec with_dtype(const Spec& spec, c10::ScalarType type) {
  const TensorMeta meta(spec.meta().shape(), spec.meta().stride(), dtype_of(type));
  return expect_spec(Spec::from_dims(meta, spec.mesh(), spec.dims(), spec.partials()), "redistribute");
}

Spec home_of(const Spec& spec) {
  if (!spec.has_partial()) return spec;
  return expect_spec(Spec::from_dims(spec.meta(), spec.mesh(), spec.dims(), Partials(spec.partials().size())),
                     "home_of");
}

at::Tensor counted_with(at::Tensor result, const at::Tensor& source) {
  const c10::VariableVersion& writes = source.unsafeGetTensorImpl()->version_counter();
  if (writes.enabled() && !result.is_inference()) result.unsafeGetTensorImpl()->set_version_counter(writes);
  return result;
}

namespace {

// What lies where it should: only the order of its elements in memory may have to change with the strides.
at::Tensor in_order(Payload& payload, const Spec& to, std::shared_ptr<const DeviceMesh> mesh) {
  const at::Tensor& local = payload.local();
  if (!local.defined() || payload.spec.meta().stride() == to.meta().stride()) {
    return wrap(local, to, std::move(mesh), {.shared = true, .provenance = payload.provenance});
  }
  at::Tensor copy = copy_laid_out(local, to, *mesh->coordinate());
  return wrap(std::move(copy), to, std::move(mesh), {.provenance = payload.provenance});
}

}  // namespace

at::Tensor redistribute_now(const at::Tensor& tensor, const Spec& to, std::shared_ptr<const DeviceMesh> mesh,
                            const RedistributeOptions& options) {
  Payload& payload = payload_for(tensor, GatherUnit::Use::kLook);
  const Provenance provenance = payload.provenance;
  if (payload.spec == to) {
    return counted_with(wrap(payload.local(), to, std::move(mesh), {.shared = true, .provenance = provenance}), tensor);
  }
  if (!options.forward_dtype) {
    const Plan plan = make_plan(payload.spec, to, options.plan);
    if (plan.steps().empty()) return counted_with(in_order(payload, to, std::move(mesh)), tensor);
    at::Tensor local = payload.local();
    if (!options.async) {
      return wrap(execute(*payload.mesh, plan, local, provenance), to, std::move(mesh), {.provenance = provenance});
    }
    // A copy: the program may write to the tensor, or through data() to its memory, before all ranks have read it.
    if (local.defined()) local = local.clone();
    return wrap_pending(start(*payload.mesh, plan, std::move(local), provenance), to, std::move(mesh), provenance);
  }
  const Plan plan =
      make_plan(with_dtype(payload.spec, *options.forward_dtype), with_dtype(to, *options.forward_dtype), options.plan);
  at::Tensor local = payload.local();
  if (local.defined()) local = local.to(*options.forward_dtype);
  local = execute(*payload.mesh, plan, local, provenance);
  if (local.defined()) local = local.to(scalar_type_of(to.meta().dtype()));
  return wrap(local, to, std::move(mesh), {.shared = plan.steps().empty(), .provenance = provenance});
}

namespace {

// The gradient of a tensor on a sub-mesh that was used on the whole mesh: the sum over the other dims.
at::Tensor lower(const at::Tensor& gradient, const Spec& to, std::shared_ptr<const DeviceMesh> mesh,
                 const MeshDims& dims, const RedistributeOptions& options) {
  const Payload& payload = payload_of(gradient);
  const at::Tensor whole = redistribute(gradient, lift(to, *payload.mesh, dims), payload.mesh, options);
  Payload& lifted = payload_of(whole);
  return wrap(lifted.local(), to, std::move(mesh), {.shared = true, .provenance = {lifted.provenance.made, {}}});
}

}  // namespace

at::Tensor redistribute(const at::Tensor& tensor, const Spec& to, std::shared_ptr<const DeviceMesh> mesh,
                        const RedistributeOptions& options) {
  if (!(*mesh == *payload_of(tensor).mesh) && in_backward() && !tensor.requires_grad()) {
    if (const auto dims = dims_within(*mesh, *payload_of(tensor).mesh)) {
      return lower(tensor, to, std::move(mesh), *dims, options);
    }
  }
  check_alias(payload_of(tensor), "redistribute");
  if (const auto reason = why_not(payload_of(tensor).spec, to)) {
    fail_invalid("redistribute",
                 {.what = *reason, .got = "from " + payload_of(tensor).spec.to_string() + " to " + to.to_string()});
  }
  if (payload_of(tensor).spec == to && *payload_of(tensor).mesh == *mesh) return tensor;
  if (!tensor.requires_grad() || !at::GradMode::is_enabled())
    return redistribute_now(tensor, to, std::move(mesh), options);
  bring_gradient_home(tensor, payload_of(tensor));
  return Redistribute::apply(tensor, &to, &mesh, &options);
}

at::Tensor with_gradient_at_home(const at::Tensor& tensor) {
  if (!tensor.requires_grad() || !at::GradMode::is_enabled()) return tensor;
  const Payload& payload = payload_of(tensor);
  const Spec spec = payload.spec;
  const std::shared_ptr<const DeviceMesh> mesh = payload.mesh;
  const RedistributeOptions options;
  return Redistribute::apply(tensor, &spec, &mesh, &options);
}

void check_agreement(const DeviceMesh& mesh, const Spec& spec, const at::Tensor& local, const std::string& where) {
  if (!mesh.contains_me()) return;
  finish_earlier_plan(mesh);
  const auto group = group_of(mesh, mesh.my_ranks(), "mesh");
  // Of what the spec says, and of the bytes of those who hold the same.
  const at::Tensor dense = local.detach().resolve_conj().resolve_neg().contiguous().cpu();
  const std::uint64_t bytes = dense.nbytes() == 0 ? 0 : checksum(dense.data_ptr(), dense.nbytes());
  const at::Tensor mine = at::tensor({static_cast<std::int64_t>(mix(spec.stable_hash(), local.requires_grad() ? 1 : 0)),
                                      static_cast<std::int64_t>(bytes)},
                                     at::kLong)
                              .to(local.device());
  const at::Tensor all = at::empty({2 * mesh.size()}, mine.options());
  group->all_gather(all, mine, std::vector<std::int64_t>(static_cast<std::size_t>(mesh.size()), 2))->wait();
  const at::Tensor values = all.cpu();
  const auto* value = static_cast<const std::int64_t*>(values.data_ptr());
  const std::vector<std::int64_t> ranks = mesh.my_ranks();
  for (std::int64_t r = 0; r < mesh.size(); ++r) {
    if (value[2 * r] != value[0]) {
      fail_invalid(where, {.what = "the ranks disagree about the tensor",
                           .got = "another shape, type, placement or requires_grad on rank " +
                                  std::to_string(ranks[r]) + " than on rank " + std::to_string(ranks[0]),
                           .expected = "the same global shape, type, placements and requires_grad everywhere"});
    }
  }
  for (std::int64_t r = 0; r < mesh.size(); ++r) {
    const Dims at = *mesh.Mesh::coordinate(ranks[r]);
    if (spec.has_partial()) break;
    const std::int64_t first = replicas_of(spec, at, *mesh.row_of(mesh.rank()))[0];
    const auto other = std::find(ranks.begin(), ranks.end(), first) - ranks.begin();
    if (value[2 * r + 1] == value[2 * other + 1]) continue;
    fail_invalid(where, {.what = "replicas hold different values",
                         .got = "ranks " + std::to_string(first) + " and " + std::to_string(ranks[r]) + " with " +
                                spec.to_string(),
                         .expected = "the same bits where the mesh replicates"});
  }
}

}  // namespace dtensor
