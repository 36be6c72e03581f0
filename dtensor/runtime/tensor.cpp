#include "dtensor/runtime/tensor.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <ostream>

#include "dtensor/core/error.h"
#include "dtensor/core/text.h"
#include "dtensor/runtime/backward.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/payload.h"
#include "dtensor/runtime/redistribute.h"

namespace dtensor {
namespace {

Placements with_size(const DeviceMesh& mesh, const Placements& placements, std::string_view where) {
  if (static_cast<std::int64_t>(placements.size()) != mesh.ndim()) {
    fail_invalid(where, {.what = "one placement per mesh dim is needed",
                         .got = to_string(placements) + " on " + mesh.to_string(),
                         .expected = std::to_string(mesh.ndim())});
  }
  return placements;
}

Spec spec_of_local(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements,
                   const FromLocalOptions& options) {
  Dims shape(local.sizes().begin(), local.sizes().end());
  if (options.shape) {
    shape = *options.shape;
  } else {
    for (std::int64_t m = 0; m < mesh.ndim(); ++m) {
      if (!placements[m].is_shard()) continue;
      const std::int64_t d = placements[m].dim() < 0 ? placements[m].dim() + local.dim() : placements[m].dim();
      if (d >= 0 && d < local.dim()) shape[d] *= mesh.size(m);
    }
  }
  if (shape.size() != local.sizes().size()) {
    fail_invalid("from_local", {.what = "the global shape has another number of dims than the local tensor",
                                .got = std::to_string(shape.size()) + " and " + std::to_string(local.dim())});
  }
  // Never from the local strides: a rank with an empty part, or with one row, would read another order from them.
  const DType dtype = dtype_of(local.scalar_type());
  const TensorMeta meta = options.stride ? TensorMeta(shape, *options.stride, dtype) : TensorMeta(shape, dtype);
  const Spec spec = Spec::make(meta, mesh, placements);
  if (!mesh.contains_me()) return spec;
  const Dims expected = spec.local_shape(*mesh.coordinate());
  if (!std::equal(expected.begin(), expected.end(), local.sizes().begin(), local.sizes().end())) {
    fail_invalid("from_local", {.what = "the local tensor is not this rank's part",
                                .got = "[" + join_numbers(local.sizes()) + "]",
                                .expected = "[" + join_numbers(expected) + "] of " + spec.to_string(),
                                .advice = "FromLocalOptions::shape, for shards of different sizes"});
  }
  return spec;
}

struct Held : torch::CustomClassHolder {
  Held(Spec of_gradient, std::shared_ptr<const DeviceMesh> its_mesh)
      : spec(std::move(of_gradient)), mesh(std::move(its_mesh)) {}
  const Spec spec;  // of the gradient
  const std::shared_ptr<const DeviceMesh> mesh;
};

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

const Held& held(AutogradContext* ctx) {
  return *static_cast<const Held*>(ctx->saved_data.at("held").toCapsule().get());
}

void hold(AutogradContext* ctx, const Spec& spec, std::shared_ptr<const DeviceMesh> mesh) {
  ctx->saved_data["held"] = c10::IValue::make_capsule(c10::make_intrusive<Held>(spec, std::move(mesh)));
}

// The same memory, and one count of writes: autograd sees what is written through either.
at::Tensor sharing_writes(const at::Tensor& memory, const at::Tensor& other) {
  const c10::VariableVersion& writes = other.unsafeGetTensorImpl()->version_counter();
  if (!writes.enabled() || memory.is_inference()) return memory.tensor_data();
  return at::Tensor(memory.unsafeGetTensorImpl()->shallow_copy_and_detach(writes, true));
}

struct ToLocal : torch::autograd::Function<ToLocal> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& tensor, const Spec* gradient) {
    Payload& payload = payload_of(tensor);
    hold(ctx, *gradient, payload.mesh);
    return sharing_writes(payload.local(), tensor);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients);
};

bool is_expanded(const at::Tensor& tensor) {
  for (std::int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.stride(d) == 0 && tensor.size(d) > 1) return true;
  }
  return false;
}

// In the order of memory that the spec says; what is expanded stays so, and takes no memory.
at::Tensor shared_part(const at::Tensor& local, const Spec& spec, const std::shared_ptr<const DeviceMesh>& mesh) {
  const at::Tensor mine = local.tensor_data();
  const bool expanded = mesh->contains_me() && is_expanded(mine);
  const bool lies = !mesh->contains_me() || expanded;
  const at::Tensor part = lies ? mine : laid_out(mine, spec, *mesh->coordinate());
  at::Tensor result = wrap(part, spec, mesh, {.shared = true});
  payload_of(result).expanded = expanded;
  return part.is_alias_of(mine) ? counted_with(std::move(result), local) : result;
}

struct FromLocal : torch::autograd::Function<FromLocal> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& local, const Spec* spec, const Spec* gradient,
                            const std::shared_ptr<const DeviceMesh>* mesh) {
    hold(ctx, *gradient, *mesh);
    return shared_part(local, *spec, *mesh);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    at::Tensor gradient = gradients[0];
    if (gradient.defined()) {
      gradient = DTensor(redistribute(gradient, held(ctx).spec, held(ctx).mesh, {})).to_local();
    }
    return {gradient, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

TensorMeta by_rows(const at::Tensor& full) {
  return TensorMeta(Dims(full.sizes().begin(), full.sizes().end()), dtype_of(full.scalar_type()));
}

// With the order of memory that the whole has (channels_last, columns), as far as it has one.
TensorMeta dense_meta(const at::Tensor& full) {
  return full.is_contiguous() || !full.is_non_overlapping_and_dense() ? by_rows(full) : meta_of(full);
}

bool needs_grad(const at::Tensor& tensor) { return tensor.requires_grad() && at::GradMode::is_enabled(); }

// The local gradient is each rank's part of the tensor's.
variable_list ToLocal::backward(AutogradContext* ctx, const variable_list& gradients) {
  if (!gradients[0].defined()) return {at::Tensor(), at::Tensor()};
  const at::Tensor gradient = is_expanded(gradients[0]) ? gradients[0].contiguous() : gradients[0];
  const Spec& spec = held(ctx).spec;
  const std::shared_ptr<const DeviceMesh>& mesh = held(ctx).mesh;
  if (!needs_grad(gradient)) return {shared_part(gradient, spec, mesh), at::Tensor()};
  const Spec back = home_of(spec);
  return {FromLocal::apply(gradient, &spec, &back, &mesh), at::Tensor()};
}

}  // namespace

bool is_dtensor(const at::Tensor& tensor) { return has_payload(tensor); }

namespace {

Payload& payload_for_user(const DTensor& tensor) {
  if (!tensor.defined()) fail_invalid("DTensor", {.what = "the tensor is undefined"});
  return payload_of(tensor);
}

// What is to be distributed: a plain tensor.
void check_plain(const at::Tensor& tensor, std::string_view where) {
  if (!tensor.defined()) fail_invalid(where, {.what = "the tensor is undefined"});
  if (!has_payload(tensor)) return;
  fail_invalid(where, {.what = "the tensor is distributed already",
                       .got = payload_of(tensor).spec.to_string(),
                       .expected = "a plain tensor",
                       .advice = "redistribute(placements)"});
}

}  // namespace

DTensor::DTensor(at::Tensor tensor) : at::Tensor(std::move(tensor)) {
  if (!defined() || is_dtensor(*this)) return;
  fail_invalid("DTensor", {.what = "the tensor is not distributed",
                           .got = meta_of(*this).to_string() + " on " + device().str(),
                           .advice = "distribute_tensor or from_local"});
}

const DeviceMesh& DTensor::mesh() const { return *payload_for_user(*this).mesh; }
const Spec& DTensor::spec() const { return payload_for_user(*this).spec; }
const Placements& DTensor::placements() const { return spec().placements(); }

at::Tensor DTensor::to_local(const ToLocalOptions& options) const {
  check_alias(payload_for_user(*this), "to_local");
  const at::Tensor& local = payload_for(*this, GatherUnit::Use::kMemory).local();
  if (!local.defined()) return local;
  if (!needs_grad(*this)) return sharing_writes(local, *this);
  bring_gradient_home(*this, payload_of(*this));
  Spec gradient = home_of(spec());
  if (options.grad_placements) {
    gradient = Spec::make(spec().meta(), mesh(), with_size(mesh(), *options.grad_placements, "to_local"));
  }
  return ToLocal::apply(static_cast<const at::Tensor&>(*this), &gradient);  // autograd looks for exactly this type
}

at::Tensor DTensor::full_tensor() const {
  return redistribute(Placements(static_cast<std::size_t>(mesh().ndim()), Replicate())).to_local();
}

DTensor DTensor::redistribute(const Placements& placements, const RedistributeOptions& options) const {
  return redistribute(mesh(), placements, options);
}

DTensor DTensor::redistribute(const DeviceMesh& mesh, const Placements& placements,
                              const RedistributeOptions& options) const {
  static_cast<void>(payload_for_user(*this));
  const auto& mine = payload_for(*this, GatherUnit::Use::kMemory).mesh;
  const Spec to = Spec::make(spec().meta(), mesh, with_size(mesh, placements, "redistribute"));
  return dtensor::redistribute(*this, to, *mine == mesh ? mine : std::make_shared<const DeviceMesh>(mesh), options);
}

DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements,
                   const FromLocalOptions& options) {
  check_plain(local, "from_local");
  const Spec spec = spec_of_local(local, mesh, with_size(mesh, placements, "from_local"), options);
  if (options.check) check_agreement(mesh, spec, local);
  const auto shared = std::make_shared<const DeviceMesh>(mesh);
  if (!needs_grad(local)) return shared_part(local, spec, shared);
  Spec gradient = home_of(spec);
  if (options.grad_placements) {
    gradient = Spec::make(spec.meta(), mesh, with_size(mesh, *options.grad_placements, "from_local"));
  }
  return FromLocal::apply(local, &spec, &gradient, &shared);
}

DTensor distribute_tensor(const at::Tensor& full, const DeviceMesh& mesh, const Placements& placements,
                          const DistributeOptions& options) {
  check_plain(full, "distribute_tensor");
  if (needs_grad(full) && !full.is_leaf()) {
    fail_invalid("distribute_tensor", {.what = "a tensor that was computed: its gradient would be lost",
                                       .got = meta_of(full).to_string(),
                                       .expected = "a leaf, or one that requires no gradient",
                                       .advice = "from_local of each rank's part, or detach()"});
  }
  const TensorMeta meta = options.source ? by_rows(full) : dense_meta(full);
  const Spec to = Spec::make(meta, mesh, with_size(mesh, placements, "distribute_tensor"));
  const auto shared = std::make_shared<const DeviceMesh>(mesh);
  const Mesh origin = options.source ? Mesh::from_ranks({1}, {*options.source}) : static_cast<const Mesh&>(mesh);
  const Spec from = Spec::make(meta, origin, Placements(static_cast<std::size_t>(origin.ndim()), Replicate()));
  const at::Tensor mine = origin.contains(mesh.rank()) ? full.detach() : at::Tensor();
  at::Tensor local = execute(mesh, make_plan(from, to), mine);
  if (local.defined()) {
    const Dims& at = *mesh.coordinate();
    local = local.is_alias_of(full) ? copy_laid_out(local, to, at) : laid_out(local, to, at);
  }
  at::Tensor result = wrap(std::move(local), to, shared);
  if (full.requires_grad()) result.requires_grad_(true);
  return result;
}

std::ostream& operator<<(std::ostream& out, const DTensor& tensor) {
  if (!tensor.defined()) return out << "DTensor (undefined)";
  out << "DTensor " << tensor.spec().to_string();
  const at::Tensor& local = payload_of(tensor).local();
  if (!local.defined()) return out << ", nothing of it on rank " << tensor.mesh().rank();
  return out << ", on rank " << tensor.mesh().rank() << '\n' << local;
}

}  // namespace dtensor
