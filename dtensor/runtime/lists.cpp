#include "dtensor/runtime/lists_impl.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <optional>
#include <set>

#include "dtensor/core/error.h"
#include "dtensor/runtime/dispatch_impl.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/provenance.h"
#include "dtensor/runtime/record.h"
#include "dtensor/runtime/redistribute.h"

namespace dtensor {
namespace {

using Tensors = std::vector<at::Tensor>;
using Use = GatherUnit::Use;

const std::string kReason = "it goes to where the first of its index lies";
const std::string kSameFound = "found_inf is the same on every rank";

[[noreturn]] void refuse_plain(const std::string& op, const at::Tensor& plain) {
  fail_invalid(op, {.what = "a plain tensor beside a distributed one",
                    .got = meta_of(plain).to_string(),
                    .expected = "tensors of one index that are all distributed, or all plain",
                    .advice = "distribute_tensor(tensor, mesh, placements)"});
}

// Where the values of a tensor are whole: as it lies, or reduced.
Spec settled(const Spec& spec) {
  return *Spec::from_dims(spec.meta(), spec.mesh(), spec.dims(),
                          Partials(static_cast<std::size_t>(spec.mesh().ndim()), std::nullopt));
}
Spec whole(const Spec& spec) {
  return Spec::make(spec.meta(), spec.mesh(), Placements(static_cast<std::size_t>(spec.mesh().ndim()), Replicate()));
}

// A tensor whose local part is used elsewhere, or in another order: what is written there goes back.
struct Guest {
  at::Tensor home;   // as the caller has it
  at::Tensor moved;  // laid out as wanted; undefined where it did not move
  at::Tensor local;  // what the kernel gets
};

// A call with its lists, and the locals for it.
class ListCall {
 public:
  ListCall(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : schema_(op.schema()),
        name_(schema_.name() + (schema_.overload_name().empty() ? "" : "." + schema_.overload_name())),
        args_(torch::jit::pop(stack, schema_.arguments().size())) {}

  const std::string& name() const { return name_; }
  const std::vector<c10::IValue>& args() const { return args_; }
  bool has(const std::string& arg) const {
    const auto i = schema_.argumentIndexWithName(arg);
    return i && args_[static_cast<std::size_t>(*i)].isTensor() &&
           args_[static_cast<std::size_t>(*i)].toTensor().defined();
  }
  bool is_list(std::size_t i) const { return args_[i].isTensorList(); }
  Tensors list(std::size_t i) const { return args_[i].toTensorVector(); }
  bool writes(std::size_t i) const {
    const c10::AliasInfo* alias = schema_.arguments()[i].alias_info();
    // Gradients are written only where they are scaled back.
    if (schema_.arguments()[i].name() == "grads" && !has("grad_scale")) return false;
    return alias && (alias->isWrite() || (alias->containedTypes().size() == 1 && alias->containedTypes()[0].isWrite()));
  }

  // This rank's part, laid out as `spec` says of a tensor of its shape; replicated where it has another one.
  Guest guest(const at::Tensor& tensor, const Spec& spec, const std::shared_ptr<const DeviceMesh>& mesh,
              bool written) const {
    if (!has_payload(tensor)) {
      if (tensor.numel() == 1) return {tensor, {}, tensor};
      const Guest replica = guest(as_replica(tensor, mesh), spec, mesh, written);
      return {tensor, replica.moved, replica.local};
    }
    Payload& payload = payload_for(tensor, written ? Use::kWrite : Use::kLook);
    const Spec& mine = payload.spec;
    const bool alike = mine.meta().shape() == spec.meta().shape();
    const Spec wanted = alike ? *Spec::from_dims(mine.meta(), spec.mesh(), spec.dims(), spec.partials()) : whole(mine);
    if (mine == wanted) return {tensor, {}, payload.local()};
    const at::Tensor moved = redistribute_now(tensor, wanted, alike ? mesh : payload.mesh, {});
    return {tensor, moved, payload_of(moved).local()};
  }

  // A single tensor is the same on every rank.
  at::Tensor number(const at::Tensor& tensor) const {
    if (!has_payload(tensor)) return tensor;
    Payload& payload = payload_for(tensor, Use::kLook);
    if (payload.spec == whole(payload.spec)) return payload.local();
    return payload_of(redistribute_now(tensor, whole(payload.spec), payload.mesh, {})).local();
  }

 private:
  const c10::FunctionSchema& schema_;
  const std::string name_;
  const std::vector<c10::IValue> args_;
};

// Kernels count in memory: all tensors of an index must lie in it alike, and without gaps.
at::Tensor laid_like(const at::Tensor& local, const at::Tensor& first) {
  const bool lies = local.strides() == first.strides() || local.sizes() != first.sizes();
  if (lies && local.is_non_overlapping_and_dense()) return local;
  const bool dense = first.is_non_overlapping_and_dense() && local.sizes() == first.sizes();
  const at::Tensor copy = dense ? at::empty_strided(first.sizes(), first.strides(), local.options())
                                : at::empty(local.sizes(), local.options());
  return copy.copy_(local);
}

// ---- optimizers: parameters, gradients and states, index by index

}  // namespace

void run_optimizer(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveUs);
  const ListCall call(op, *stack);
  const CommCause cause(call.name(), kReason);
  const Tensors params = call.list(0);
  const std::size_t num_args = call.args().size();
  for (std::size_t a = 0; a < num_args; ++a) {
    if (!call.is_list(a) || call.list(a).empty() || call.list(a).size() == params.size()) continue;
    fail_invalid(call.name(), {.what = "lists of different lengths",
                               .got = std::to_string(call.list(a).size()) + " tensors as argument \"" +
                                      op.schema().arguments()[a].name() + "\"",
                               .expected = std::to_string(params.size())});
  }
  std::vector<Tensors> locals(num_args);
  struct Written {
    at::Tensor home, moved, local, used;
  };
  std::vector<Written> written;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const bool plain = !has_payload(params[i]);
    std::optional<Spec> spec;
    std::shared_ptr<const DeviceMesh> mesh;
    if (!plain) {
      Payload& payload = payload_for(params[i], Use::kWrite);
      spec = settled(payload.spec);
      mesh = payload.mesh;
    }
    Provenance made{stable_hash(call.name()), {}};
    for (std::size_t a = 0; a < num_args; ++a) {
      if (!call.is_list(a)) made.made = mix(made.made, number_word(call.args()[a]));
      if (!call.is_list(a) || call.list(a).empty() || !has_payload(call.list(a)[i])) continue;
      made.mix_in(payload_of(call.list(a)[i]).provenance);
    }
    bool here = true;  // has this rank a part of it?
    at::Tensor first;
    for (std::size_t a = 0; a < num_args; ++a) {
      if (!call.is_list(a) || call.list(a).empty()) continue;
      const at::Tensor tensor = call.list(a)[i];
      if (plain && has_payload(tensor)) refuse_plain(call.name(), params[i]);
      const bool writes = call.writes(a);
      const Guest guest = plain ? Guest{tensor, {}, tensor} : call.guest(tensor, *spec, mesh, writes);
      if (a == 0) here = guest.local.defined() && guest.local.numel() > 0;
      const at::Tensor used = here ? laid_like(guest.local, a == 0 ? guest.local : first) : at::Tensor();
      if (a == 0) first = used;
      if (here) locals[a].push_back(used);
      if (writes && has_payload(tensor)) {
        made.made = mix(made.made, a);
        note_written(tensor, payload_of(tensor), made);
      }
      if (writes && (guest.moved.defined() || !used.is_same(guest.local))) {
        written.push_back({guest.home, guest.moved, guest.local, used});
      }
    }
  }
  torch::jit::Stack inner;
  for (std::size_t a = 0; a < num_args; ++a) {
    const c10::IValue& value = call.args()[a];
    if (call.is_list(a)) {
      inner.emplace_back(locals[a]);
    } else {
      inner.emplace_back(value.isTensor() && value.toTensor().defined() ? c10::IValue(call.number(value.toTensor()))
                                                                        : value);
    }
  }
  if (!locals[0].empty()) op.callBoxed(&inner);
  for (const Written& back : written) {
    if (back.used.defined() && !back.used.is_same(back.local)) back.local.copy_(back.used);
    if (back.moved.defined()) back.home.copy_(back.moved);
  }
}

// ---- gradient scaling: found_inf is what any rank has found

namespace {

struct OnMesh {
  std::shared_ptr<const DeviceMesh> mesh;
  std::set<std::int64_t> cut;  // mesh dims along which ranks have different elements
  Tensors locals;
};

void note_cuts(const Spec& spec, std::set<std::int64_t>& cut) {
  for (const DimLayout& dim : spec.dims()) {
    for (const Factor& factor : dim) {
      for (const Cut& by : factor.cuts) {
        if (!by.is_virtual()) cut.insert(by.mesh_dim);
      }
    }
  }
}

}  // namespace

void run_unscale(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveUs);
  const ListCall call(op, *stack);
  const CommCause cause(call.name(), kSameFound);
  const at::Tensor found = call.args()[1].toTensor(), scale = call.number(call.args()[2].toTensor());
  std::vector<OnMesh> meshes;
  std::vector<Guest> moved;
  const auto on = [&](const std::shared_ptr<const DeviceMesh>& mesh) -> OnMesh& {
    for (OnMesh& known : meshes) {
      if (known.mesh == mesh || (known.mesh && mesh && *known.mesh == *mesh)) return known;
    }
    return meshes.emplace_back(OnMesh{mesh, {}, {}});
  };
  for (const at::Tensor& tensor : call.list(0)) {
    if (!has_payload(tensor)) {
      on(nullptr).locals.push_back(tensor);
      continue;
    }
    Payload& payload = payload_for(tensor, Use::kWrite);
    const Spec spec = settled(payload.spec);
    OnMesh& there = on(payload.mesh);
    note_cuts(spec, there.cut);
    const Guest guest = call.guest(tensor, spec, payload.mesh, true);
    if (guest.moved.defined()) moved.push_back(guest);
    if (guest.local.defined() && guest.local.numel() > 0) there.locals.push_back(guest.local);
  }
  // A rank that is not in its mesh has nothing of it.
  const at::Tensor before = call.number(found);
  at::Tensor total = before.defined() ? before.clone() : at::zeros(found.sizes(), found.options());
  for (const OnMesh& there : meshes) {
    const at::Tensor mine = at::zeros_like(total);
    if (!there.locals.empty()) {
      torch::jit::Stack inner = {there.locals, mine, scale};
      op.callBoxed(&inner);
    }
    at::Tensor all = mine;
    if (there.mesh && !there.cut.empty() && there.mesh->contains_me()) {
      Placements placements(static_cast<std::size_t>(there.mesh->ndim()), Replicate());
      for (const std::int64_t m : there.cut) placements[static_cast<std::size_t>(m)] = Partial(ReduceOp::kMax);
      const Spec spec = Spec::make(meta_of(mine), *there.mesh, placements);
      all = payload_of(redistribute_now(wrap(mine, spec, there.mesh), whole(spec), there.mesh, {})).local();
    }
    total = at::maximum(total, all);
  }
  for (const Guest& guest : moved) guest.home.copy_(guest.moved);
  found.copy_(has_payload(found) ? as_replica(total, payload_of(found).mesh) : total);
}

}  // namespace dtensor
