#include "dtensor/runtime/tensor.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <mutex>
#include <ostream>
#include <set>
#include <utility>
#include <vector>

#include "dtensor/core/error.h"
#include "dtensor/core/text.h"
#include "dtensor/runtime/backward.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/one_model.h"
#include "dtensor/runtime/payload.h"
#include "dtensor/runtime/print_impl.h"
#include "dtensor/runtime/provenance.h"
#include "dtensor/runtime/redistribute.h"

namespace dtensor {
namespace {

Placements with_size(const DeviceMesh& mesh, const Placements& placements, std::string_view where) {
  // One Replicate stands for all mesh dims; one Shard does not say on which.
  if (placements.size() == 1 && placements[0].is_replicate()) {
    return Placements(static_cast<std::size_t>(mesh.ndim()), Replicate());
  }
  if (static_cast<std::int64_t>(placements.size()) != mesh.ndim()) {
    fail_invalid(where, {.what = "one placement per mesh dim is needed",
                         .got = to_string(placements) + " on " + mesh.to_string(),
                         .expected = std::to_string(mesh.ndim())});
  }
  return placements;
}

// The strides of a whole of this shape whose local tensors are all like this one: its dims in the same order. Row-major
// where the local tensor does not lie densely.
Dims stride_from_local(const at::Tensor& local, const Dims& shape) {
  if (local.is_contiguous()) return row_major_stride(shape);
  std::vector<std::size_t> order;  // innermost first
  for (std::size_t d = shape.size(); d-- > 0;) {
    if (shape[d] > 1) order.push_back(d);
  }
  const auto inside = [&](std::size_t a, std::size_t b) { return local.strides()[a] < local.strides()[b]; };
  if (local.numel() == 0 || !local.is_non_overlapping_and_dense() ||
      std::is_sorted(order.begin(), order.end(), inside)) {
    return row_major_stride(shape);
  }
  std::stable_sort(order.begin(), order.end(), inside);
  Dims stride(shape.size(), 1);
  std::int64_t next = 1;
  for (const std::size_t d : order) {
    stride[d] = next;
    next *= shape[d];
  }
  return stride;
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
  // Where the shape is given, local tensors may differ: one that is empty, or has one row, would say another order.
  const DType dtype = dtype_of(local.scalar_type());
  const Dims stride = options.stride  ? *options.stride
                      : options.shape ? row_major_stride(shape)
                                      : stride_from_local(local, shape);
  const TensorMeta meta(shape, stride, dtype);
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
    ctx->set_materialize_grads(false);
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

const std::string kFromLocal = "from_local";
const std::string kGradient = "the gradient of to_local";

// In the order of memory that the spec says; what is expanded stays so, and takes no memory. `call` is the program's.
at::Tensor shared_part(const at::Tensor& local, const Spec& spec, const std::shared_ptr<const DeviceMesh>& mesh,
                       const std::string& call) {
  const at::Tensor mine = local.tensor_data();
  const bool expanded = mesh->contains_me() && is_expanded(mine);
  const bool lies = !mesh->contains_me() || expanded;
  const at::Tensor part = lies ? mine : laid_out(mine, spec, *mesh->coordinate());
  at::Tensor result = wrap(part, spec, mesh, {.shared = true, .provenance = of_leaf(call, spec, *mesh, mine)});
  payload_of(result).expanded = expanded;
  return part.is_alias_of(mine) ? counted_with(std::move(result), local) : result;
}

struct FromLocal : torch::autograd::Function<FromLocal> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& local, const Spec* spec, const Spec* gradient,
                            const std::shared_ptr<const DeviceMesh>* mesh) {
    ctx->set_materialize_grads(false);  // libtorch would make plain zeros
    hold(ctx, *gradient, *mesh);
    return shared_part(local, *spec, *mesh, kFromLocal);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    at::Tensor gradient = gradients[0];
    if (gradient.defined()) {
      if (!has_payload(gradient)) gradient = distribute_plain_gradient(gradient, held(ctx).mesh);
      gradient = DTensor(redistribute(gradient, held(ctx).spec, held(ctx).mesh, {})).to_local();
    }
    return {gradient, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

bool needs_grad(const at::Tensor& tensor) { return tensor.requires_grad() && at::GradMode::is_enabled(); }

// The local gradient is each rank's part of the tensor's.
variable_list ToLocal::backward(AutogradContext* ctx, const variable_list& gradients) {
  if (!gradients[0].defined()) return {at::Tensor(), at::Tensor()};
  if (has_payload(gradients[0])) {
    fail_invalid("to_local", {.what = "the gradient of a local tensor is distributed",
                              .got = payload_of(gradients[0]).spec.to_string(),
                              .expected = "a plain tensor of this rank's shape",
                              .advice = "to_local() of the gradient, in the backward of the custom function"});
  }
  const at::Tensor gradient = is_expanded(gradients[0]) ? gradients[0].contiguous() : gradients[0];
  const Spec& spec = held(ctx).spec;
  const std::shared_ptr<const DeviceMesh>& mesh = held(ctx).mesh;
  if (!needs_grad(gradient)) return {shared_part(gradient, spec, mesh, kGradient), at::Tensor()};
  const Spec back = home_of(spec);
  return {FromLocal::apply(gradient, &spec, &back, &mesh), at::Tensor()};
}

}  // namespace

bool is_dtensor(const at::Tensor& tensor) { return has_payload(tensor); }

at::Tensor distribute_plain_gradient(const at::Tensor& gradient, const std::shared_ptr<const DeviceMesh>& mesh) {
  if (!needs_grad(gradient)) return as_replica(gradient, mesh);
  return from_local(gradient, *mesh, Placements(static_cast<std::size_t>(mesh->ndim()), Replicate()));
}

namespace {

Payload& payload_for_user(const DTensor& tensor) {
  if (!tensor.defined()) fail_invalid("DTensor", {.what = "the tensor is undefined"});
  return payload_for(tensor, GatherUnit::Use::kLayout);
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
  if (!needs_grad(local)) return shared_part(local, spec, shared, kFromLocal);
  Spec gradient = home_of(spec);
  if (options.grad_placements) {
    gradient = Spec::make(spec.meta(), mesh, with_size(mesh, *options.grad_placements, "from_local"));
  }
  return FromLocal::apply(local, &spec, &gradient, &shared);
}

namespace {

// What the source says of its tensor: this, and the sizes and strides behind it.
struct Header {
  enum : std::size_t { kDims, kType, kRequiresGrad, kCount };
};

// Shape, type and memory order of the source's tensor on every rank of the mesh.
struct Described {
  TensorMeta meta;
  bool requires_grad;
};
Described describe_source(const at::Tensor& full, const DeviceMesh& mesh, std::int64_t source) {
  if (!mesh.contains_me() || mesh.size() == 1 || !mesh.context()) {
    if (!full.defined()) {
      fail_invalid("distribute_tensor",
                   {.what = "the tensor is undefined",
                    .got = mesh.contains_me() ? "" : "on rank " + std::to_string(mesh.rank()) + ", outside the mesh",
                    .advice = mesh.contains_me() ? "" : "a tensor of the same shape and type, such as at::empty"});
    }
    return {dense_meta(full), full.requires_grad()};
  }
  constexpr std::size_t kMaxDims = 64;
  std::vector<std::int64_t> words(Header::kCount + 2 * kMaxDims, -1);
  const std::vector<std::int64_t> ranks = mesh.my_ranks();
  if (ranks[static_cast<std::size_t>(source)] == mesh.rank() && full.defined()) {
    const TensorMeta meta = dense_meta(full);
    words[Header::kDims] = full.dim();
    words[Header::kType] = static_cast<std::int64_t>(meta.dtype());
    words[Header::kRequiresGrad] = full.requires_grad() ? 1 : 0;
    std::copy(meta.shape().begin(), meta.shape().end(), words.begin() + Header::kCount);
    std::copy(meta.stride().begin(), meta.stride().end(), words.begin() + Header::kCount + full.dim());
  }
  words = broadcast_words(mesh, std::move(words), source);
  const std::int64_t dims = words[Header::kDims];
  if (dims < 0) {
    fail_invalid("distribute_tensor", {.what = "the tensor is undefined on the source",
                                       .got = "source " + std::to_string(source) + ", world rank " +
                                              std::to_string(ranks[static_cast<std::size_t>(source)]),
                                       .expected = "the tensor on the source; the others may leave theirs undefined"});
  }
  const auto shape = words.begin() + Header::kCount;
  return {TensorMeta(Dims(shape, shape + dims), Dims(shape + dims, shape + 2 * dims),
                     static_cast<DType>(words[Header::kType])),
          words[Header::kRequiresGrad] != 0};
}

// The source's values, of which each rank gets what it needs.
at::Tensor send_from(const at::Tensor& full, const Spec& to, const DeviceMesh& mesh, std::int64_t source) {
  const Provenance provenance = of_numbered_leaf(distribute_name(), to, mesh);
  at::Tensor local;
  if (mesh.contains_me()) {
    // This rank's row alone: the others have a source of their own.
    const std::vector<std::int64_t> ranks = mesh.my_ranks();
    const Mesh row = Mesh::from_ranks(mesh.shape(), ranks, mesh.names());
    const std::int64_t root = ranks[static_cast<std::size_t>(source)];
    const Spec from = Spec::make(to.meta(), Mesh::from_ranks({1}, {root}), {Replicate()});
    const Spec in_row = expect_spec(Spec::from_dims(to.meta(), row, to.dims(), to.partials()), "distribute_tensor");
    local = execute(mesh, make_plan(from, in_row), mesh.rank() == root ? full.detach() : at::Tensor(), provenance);
    const Dims& at = *mesh.coordinate();
    local = full.defined() && local.is_alias_of(full) ? copy_laid_out(local, to, at) : laid_out(local, to, at);
  }
  return wrap(std::move(local), to, std::make_shared<const DeviceMesh>(mesh), {.provenance = provenance});
}

// Once for each place in the program, on the first rank of the mesh.
void warn_different(const DeviceMesh& mesh, const std::vector<std::int64_t>& ranks, const std::source_location& where) {
  if (mesh.my_ranks()[0] != mesh.rank()) return;
  const std::string place = std::string(where.file_name()) + ":" + std::to_string(where.line());
  static std::mutex mutex;
  static auto* warned = new std::set<std::string>;
  {
    const std::lock_guard lock(mutex);
    if (!warned->insert(place).second) return;
  }
  TORCH_WARN("dtensor: distribute_tensor, called at ", place, ": rank", ranks.size() > 1 ? "s " : " ",
             join_numbers(ranks), " passed other values than rank ", mesh.rank(),
             ", and all ranks now have those of rank ", mesh.rank(),
             ". For a rank's own part of a tensor (its batch, for example) use from_local; where one rank's "
             "values are meant, say so: {.source = 0}");
}

}  // namespace

DTensor distribute_tensor(const at::Tensor& full, const DeviceMesh& mesh, const Placements& given,
                          const DistributeOptions& options, std::source_location where) {
  if (has_payload(full)) check_plain(full, "distribute_tensor");
  if (full.defined() && needs_grad(full) && !full.is_leaf()) {
    fail_invalid("distribute_tensor", {.what = "a tensor that was computed: its gradient would be lost",
                                       .got = meta_of(full).to_string(),
                                       .expected = "a leaf, or one that requires no gradient",
                                       .advice = "from_local of each rank's part, or detach()"});
  }
  const Placements placements = with_size(mesh, given, "distribute_tensor");
  check_source("distribute_tensor", mesh, options);
  if (options.source) {
    const Described source = describe_source(full, mesh, *options.source);
    at::Tensor result = send_from(full, Spec::make(source.meta, mesh, placements), mesh, *options.source);
    if (source.requires_grad) result.requires_grad_(true);
    return result;
  }
  std::vector<NamedTensor> values{{"tensor", full}};
  const std::vector<std::int64_t> differ = share_values("distribute_tensor", values, mesh, options);
  if (!differ.empty()) warn_different(mesh, differ, where);
  const at::Tensor value = std::exchange(values[0].tensor, {});
  at::Tensor result = distribute_replica(value, Spec::make(dense_meta(value), mesh, placements), mesh);
  if (full.requires_grad()) result.requires_grad_(true);
  return result;
}

std::ostream& operator<<(std::ostream& out, const DTensor& tensor) { return print_local(out, tensor); }

}  // namespace dtensor
