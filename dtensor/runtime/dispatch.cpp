// One kernel for every operator: find or make the decision, bring the operands where it wants them, run the operator on
// this rank's parts, wrap the results.
#include "dtensor/runtime/dispatch.h"

#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "dtensor/comm/fingerprint.h"
#include "dtensor/core/error.h"
#include "dtensor/runtime/backward.h"
#include "dtensor/runtime/compat_impl.h"
#include "dtensor/runtime/decisions_impl.h"
#include "dtensor/runtime/dispatch_impl.h"
#include "dtensor/runtime/identity.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/plain_impl.h"
#include "dtensor/runtime/provenance.h"
#include "dtensor/runtime/record.h"
#include "dtensor/runtime/redistribute.h"
#include "dtensor/runtime/register.h"

namespace dtensor {
namespace {

thread_local NoRule no_rule = NoRule::kReplicate;

// ---- decisions

std::shared_ptr<const Prepared> find_or_prepare(const LocalCall& call) {
  CallKey key(call.info, call.mesh->rank());
  for (const Operand& operand : call.operands) {
    if (operand.payload) {
      key.add_operand(operand.arg, operand.item, *operand.payload);
    } else {
      key.add_number(operand.arg, operand.item, operand.tensor);
    }
  }
  for (const std::size_t i : call.info.key_args) key.add_static(call.info.args[i].key, call.arg(i));
  const std::size_t hash = key.hash();
  Decisions& decisions = Decisions::of_this_thread();
  if (auto known = decisions.find(hash, key.words())) {
    decisions.count_found();
    return known;
  }
  decisions.count_made();
  auto prepared = prepare(call, key.words(), hash);  // copies the words: deciding calls operators, which make keys
  decisions.insert(prepared);
  return prepared;
}

// Some operators drop elements by themselves (attention, recurrent networks), and have no generator to show for it.
void refuse_hidden_dropout(const LocalCall& call) {
  double p = 0;
  for (std::size_t i = 0; i < call.info.args.size(); ++i) {
    const std::string& name = call.info.args[i].name;
    if (name == "train" && call.arg(i).isBool() && !call.arg(i).toBool()) return;
    if ((name == "dropout_p" || name == "dropout") && call.arg(i).isDouble()) p = call.arg(i).toDouble();
  }
  if (p == 0) return;
  fail_unsupported(call.info.name,
                   {.what = "the operator drops elements by itself: its ranks would drop different ones",
                    .got = "a probability of " + std::to_string(p),
                    .advice = "at::dropout, and 0 here"});
}

void say_no_rule(const LocalCall& call) {
  if (call.info.rule && call.info.rule->rule->kind == RuleKind::kReplicated) return;
  if (no_rule == NoRule::kRefuse) {
    fail_unsupported(call.info.name,
                     {.what = "the operator has no rule, and running it on replicated operands is refused",
                      .got = call.operands[0].payload ? call.operands[0].payload->spec.to_string() : "",
                      .advice = "NoRuleGuard(NoRule::kReplicate), or a rule for it"});
  }
  static std::mutex mutex;
  static std::unordered_map<const OpInfo*, bool> said;
  {
    const std::lock_guard lock(mutex);
    if (std::exchange(said[&call.info], true)) return;
  }
  TORCH_WARN("dtensor: ", call.info.name, " has no rule and runs on replicated operands");
}

// ---- running

using Locals = InlineVec<at::Tensor, 6>;

void set_tensor(LocalCall& call, const Operand& operand, at::Tensor local) {
  c10::IValue& value = call.arg(operand.arg);
  if (call.info.args[operand.arg].kind == OpInfo::ArgKind::kTensor) {
    value = std::move(local);
  } else if (value.isTensorList()) {
    if (operand.item == 0) value = value.toTensorList().copy();
    value.toTensorList().set(operand.item, local);
  } else {
    auto list = value.to<c10::List<c10::optional<at::Tensor>>>().copy();
    list.set(operand.item, local);
    value = std::move(list);
  }
}

at::Tensor local_for(const Operand& operand, const std::vector<Plan>& plans) {
  at::Tensor local = operand.payload->local();
  for (const Plan& plan : plans) local = execute(*operand.payload->mesh, plan, local, operand.payload->provenance);
  return local;
}

// Results of those who do not run the operator: nothing at all, the identity, or operand 0 as it is.
at::Tensor made_up(const Prepared& prepared, std::size_t output, const LocalCall& call) {
  if (!prepared.decision.outputs[output]) return {};
  const Spec& spec = *prepared.decision.outputs[output];
  const LocalWork& work = prepared.decision.local;
  if (!prepared.fills && work.others == LocalWork::Others::kKeep)
    return local_for(call.operands[0], prepared.plans[0]).clone();
  const Dims& shape = prepared.output_shapes[output];
  // The first operand may be a plain number.
  const auto lies =
      std::find_if(call.operands.begin(), call.operands.end(), [](const Operand& o) { return o.payload; });
  const Dims& strides = prepared.output_strides[output];
  const at::Tensor result =
      at::empty_strided({shape.data(), shape.size()}, {strides.data(), strides.size()},
                        lies->payload->local().options().dtype(scalar_type_of(spec.meta().dtype())));
  if (result.numel() > 0) fill_identity(result, prepared.fills ? *work.identity : work.others_op);
  return result;
}

class Results {
 public:
  Results(LocalCall& call, const Prepared& prepared, const Provenance& provenance)
      : call_(call), prepared_(prepared), provenance_(provenance) {}

  // The local results are on the stack; where an argument is returned, it is the caller's.
  void wrap_all() {
    const std::size_t first = call_.stack.size() - call_.info.returns.size();
    for (std::size_t r = 0; r < call_.info.returns.size(); ++r) {
      const OpInfo::Return& result = call_.info.returns[r];
      c10::IValue& value = call_.stack[first + r];
      if (result.written_arg >= 0) {
        next_ += value.isTensorList() ? value.toTensorList().size() : 1;
        value = written(static_cast<std::size_t>(result.written_arg));
      } else if (result.is_tensor) {
        value = wrap_one(value.toTensor());
      } else if (result.is_list) {
        std::vector<at::Tensor> list = value.toTensorVector();
        for (at::Tensor& tensor : list) tensor = wrap_one(tensor);
        value = std::move(list);
      }
    }
  }

 private:
  // The tensor, or the list, that was given as an argument.
  c10::IValue written(std::size_t arg) const {
    const bool one = call_.info.args[arg].kind == OpInfo::ArgKind::kTensor;
    std::vector<at::Tensor> list;
    for (const Operand& operand : call_.operands) {
      if (operand.arg != arg) continue;
      const at::Tensor& given = operand.plain.defined() ? operand.plain : operand.tensor;
      if (one) return given;
      list.push_back(given);
    }
    return list;
  }

  at::Tensor wrap_one(const at::Tensor& local) {
    const std::size_t output = next_++;
    const Decision& decision = prepared_.decision;
    if (prepared_.replicated) {
      if (!local.defined()) return local;
      // What was whole here already is shared, as it would be by a plain call.
      const bool view = call_.info.returns_alias && !prepared_.moves && !call_.copied && !call_.operands.empty() &&
                        call_.operands[0].payload && !call_.operands[0].payload->lost_alias;
      if (view) {
        const Placements whole(static_cast<std::size_t>(call_.mesh->ndim()), Replicate());
        const Operand& of = call_.operands[0];
        const std::int64_t within = local.storage_offset() - of.payload->local().storage_offset();
        return wrap(local, Spec::make(meta_of(local), *call_.mesh, whole), call_.mesh,
                    {.base = &of.tensor,
                     .provenance = of_output(provenance_, output),
                     .offset = of.tensor.storage_offset() + within});
      }
      if (!call_.info.returns_alias || !call_.operands[0].payload) {
        return as_replica(local, call_.mesh, of_output(provenance_, output));
      }
      const Placements whole(static_cast<std::size_t>(call_.mesh->ndim()), Replicate());
      at::Tensor result = wrap(local, Spec::make(meta_of(local), *call_.mesh, whole), call_.mesh,
                               {.base = &call_.operands[0].tensor, .provenance = of_output(provenance_, output)});
      lose_alias(result);
      return result;
    }
    if (output >= decision.outputs.size() || !decision.outputs[output]) return {};
    WrapOptions options;
    options.provenance = of_output(provenance_, output);
    // libtorch makes it a view of its operand, also where it is a copy.
    if (call_.info.returns_alias) options.base = &call_.operands[0].tensor;
    // An operator that was run as it is returns an alias of what lies here.
    const bool as_it_is = !prepared_.moves && decision.local.is_same() && !prepared_.other_op;
    const bool view = call_.info.returns_alias && (decision.alias || as_it_is) && !call_.copied;
    if (view) {
      options.base = &call_.operands[0].tensor;
      options.offset = options.base->storage_offset();
      if (output < prepared_.offsets.size()) options.offset += prepared_.offsets[output];
      const auto& traits = call_.operands[0].payload->traits;
      if (traits && traits->style) options.traits = traits;
    }
    const at::Tensor part = call_.info.returns_alias ? local : in_order(local, prepared_, output);
    at::Tensor result = wrap(part, *decision.outputs[output], call_.mesh, options);
    if (call_.info.returns_alias && (!view || call_.operands[0].payload->lost_alias)) lose_alias(result);
    if (view && call_.operands[0].payload->unit) payload_of(result).unit = call_.operands[0].payload->unit;
    return result;
  }

  // A view of what is a copy itself is no view of what that was taken from.
  void lose_alias(const at::Tensor& result) const {
    const Operand& of = call_.operands[0];
    payload_of(result).lost_alias = of.payload && of.payload->lost_alias
                                        ? of.payload->lost_alias
                                        : LostAlias(of.tensor, of.payload ? of.payload->local() : at::Tensor());
  }

  LocalCall& call_;
  const Prepared& prepared_;
  const Provenance& provenance_;
  std::size_t next_ = 0;
};

// From one spec to any other, a Partial included.
at::Tensor brought(const DeviceMesh& mesh, const Spec& from, const Spec& to, at::Tensor local,
                   const Provenance& provenance) {
  const Spec* at = &from;
  for (const Spec& stop : stops_between(from, to)) {
    local = execute(mesh, make_plan(*at, stop), local, provenance);
    at = &stop;
  }
  return local;
}

// The written arguments that were brought elsewhere for the operator: the result goes back to where they lie.
void write_back(const LocalCall& call, const Prepared& prepared, const Locals& locals, const Provenance& provenance) {
  for (std::size_t i = 0; i < call.operands.size(); ++i) {
    const Operand& operand = call.operands[i];
    if (!operand.payload || !call.info.args[operand.arg].written || prepared.plans[i].empty()) continue;
    const at::Tensor back =
        brought(*call.mesh, *prepared.decision.inputs[i], operand.payload->spec, locals[i], provenance);
    if (back.defined()) operand.payload->local().copy_(back);
  }
}

Spec replica_of(const TensorMeta& meta, const Mesh& mesh) {
  return Spec::make(meta, mesh, Placements(static_cast<std::size_t>(mesh.ndim()), Replicate()));
}

// `out` forms compute into memory of their own, which then goes to where the tensors given for it lie.
void give_own_outs(LocalCall& call) {
  for (const Operand& operand : call.operands) {
    if (!call.info.args[operand.arg].written || !operand.payload) continue;
    const at::Tensor& local = operand.payload->local();
    set_tensor(call, operand, local.defined() ? at::empty({0}, local.options()) : local);
  }
}

void fill_outs(const LocalCall& call, const Prepared& prepared, const Provenance& provenance) {
  std::size_t output = 0;
  const std::size_t first = call.stack.size() - call.info.returns.size();
  for (const Operand& operand : call.operands) {
    if (!call.info.args[operand.arg].written) continue;
    const Spec& wanted = operand.payload->spec;
    at::Tensor local = call.mesh->contains_me() ? call.stack[first + output].toTensor() : at::Tensor();
    const Spec computed = prepared.replicated ? replica_of(local.defined() ? meta_of(local) : wanted.meta(), *call.mesh)
                                              : *prepared.decision.outputs[output];
    ++output;
    if (!(computed.meta().shape() == wanted.meta().shape())) {
      fail_invalid(call.info.name, {.what = "the tensor given for the result has another shape",
                                    .got = wanted.to_string(),
                                    .expected = computed.to_string()});
    }
    local = brought(*call.mesh, computed, wanted, std::move(local), provenance);
    if (local.defined()) operand.payload->local().copy_(local);
  }
}

void drop_arguments(LocalCall& call) { torch::jit::drop(call.stack, call.info.args.size()); }

// Another operator may have fewer arguments or more: view(self, size) stands in for squeeze(self) and _reshape_alias.
void rewrite_arguments(LocalCall& call, const Prepared& prepared) {
  const std::size_t first = call.stack.size() - call.info.args.size();
  if (prepared.other_op) call.stack.resize(first + prepared.other_op->schema().arguments().size());
  for (const auto& [arg, value] : prepared.rewrites) call.stack[first + arg] = value;
}

// A form that copies may be run as one that does not.
void unshare_results(LocalCall& call) {
  const at::Tensor& part = call.operands[0].payload->local();
  const auto own = [&](const at::Tensor& result) {
    return result.defined() && result.numel() > 0 && result.is_alias_of(part) ? result.clone() : result;
  };
  for (std::size_t r = 0; r < call.info.returns.size(); ++r) {
    c10::IValue& value = call.stack[call.stack.size() - 1 - r];
    if (value.isTensor()) value = own(value.toTensor());
    if (!value.isTensorList()) continue;
    std::vector<at::Tensor> list = value.toTensorVector();
    for (at::Tensor& tensor : list) tensor = own(tensor);
    value = std::move(list);
  }
}

void run_locally(LocalCall& call, const Prepared& prepared) {
  if (prepared.other_op) {
    prepared.other_op->callBoxed(&call.stack);
  } else {
    call.op.callBoxed(&call.stack);
  }
  if (call.info.copies && call.operands[0].payload) unshare_results(call);
  const std::int64_t divisor = prepared.decision.local.divide_by;
  if (divisor == 1) return;
  for (std::size_t r = 0; r < call.info.returns.size(); ++r) {
    const c10::IValue& value = call.stack[call.stack.size() - 1 - r];
    if (value.isTensor() && value.toTensor().defined()) value.toTensor().div_(divisor);
  }
}

// For ranks that do not run the operator.
void make_up_results(LocalCall& call, const Prepared& prepared) {
  std::vector<c10::IValue> results;
  std::size_t output = 0;
  for (const OpInfo::Return& result : call.info.returns) {
    if (result.written_arg >= 0 && !call.info.out) {
      if (prepared.runs || prepared.decision.local.others == LocalWork::Others::kIdentity) {
        fill_identity(call.operands[0].payload->local(), prepared.decision.local.others_op);
      }
      ++output;
      results.emplace_back(at::Tensor());
    } else {
      results.emplace_back(made_up(prepared, output++, call));
    }
  }
  drop_arguments(call);
  for (c10::IValue& result : results) call.stack.push_back(std::move(result));
}

// Ranks outside the mesh hold nothing, and have nothing to run.
void skip(LocalCall& call, const Prepared& prepared) {
  const OpInfo& info = call.info;
  drop_arguments(call);
  std::size_t output = 0;
  for (const OpInfo::Return& result : info.returns) {
    if (result.is_tensor || result.written_arg >= 0) {
      call.stack.emplace_back(at::Tensor());
      ++output;
    } else if (result.is_list) {
      std::vector<at::Tensor> list(prepared.decision.outputs.size() - output);
      output += list.size();
      call.stack.emplace_back(std::move(list));
    } else {
      fail_invalid(info.name, {.what = "this rank is not in the tensor's mesh, and has no value of it",
                               .got = "rank " + std::to_string(call.mesh->rank()) + " and " + call.mesh->to_string()});
    }
  }
}

void check_non_members(const LocalCall& call, const Prepared& prepared) {
  if (!prepared.replicated || call.mesh->contains_me()) return;
  for (const OpInfo::Return& result : call.info.returns) {
    if (result.written_arg >= 0) continue;
    fail_unsupported(call.info.name,
                     {.what = "an operator without a rule on a rank outside the tensor's mesh",
                      .got = "rank " + std::to_string(call.mesh->rank()) + " and " + call.mesh->to_string()});
  }
}

// An in-place form that cannot keep its tensor's placement on the way (relu_ on a Partial): the plain form, copied into
// the tensor.
void run_out_of_place(LocalCall& call, const c10::OperatorHandle& plain) {
  const at::Tensor self = call.arg(0).toTensor();
  plain.callBoxed(&call.stack);
  const at::Tensor result = torch::jit::pop(call.stack).toTensor();
  self.copy_(result);
  call.stack.emplace_back(self);
}

// sum += gradient, both unreduced.
bool accumulate(LocalCall& call) {
  if (call.operands.size() != 2 || !call.operands[0].payload || !call.operands[1].payload) return false;
  const c10::IValue& factor = call.arg(2);
  if (!factor.isInt() || factor.toInt() != 1) return false;
  if (!add_unreduced(*call.operands[0].payload, *call.operands[1].payload)) return false;
  drop_arguments(call);
  call.stack.emplace_back(call.operands[0].tensor);
  return true;
}

// Autograd adds up gradients where the first one lies. Nobody else has it then, so that it may change its layout to the
// one that is best for the sum.
bool sum_gradients(LocalCall& call) {
  if (call.operands.size() != 2 || !call.operands[0].payload || !call.operands[1].payload) return false;
  const Spec& mine = call.operands[0].payload->spec;
  const Spec& other = call.operands[1].payload->spec;
  if (!mine.has_partial() || mine == other || !(mine.meta().shape() == other.meta().shape()) ||
      mine.meta().dtype() != other.meta().dtype()) {
    return false;
  }
  const at::Tensor self = call.operands[0].tensor;
  if (self.requires_grad() || self.unsafeGetTensorImpl()->unsafe_storage().use_count() != 1 || !in_backward())
    return false;
  plain_form(call.info)->callBoxed(&call.stack);
  take_over(self, torch::jit::pop(call.stack).toTensor());
  call.stack.emplace_back(self);
  return true;
}

// as_strided means memory, and counts from its beginning: that of the whole tensor, as the wrapper shows it.
void lay_as_shown(LocalCall& call, const Operand& operand, at::Tensor& local) {
  if (local.strides() != operand.tensor.strides()) {
    const at::Tensor shown = at::empty_strided(local.sizes(), operand.tensor.strides(), local.options());
    local = shown.copy_(local);
    call.copied = true;
  }
  c10::IValue& offset = call.arg(3);
  if (offset.isInt()) offset = offset.toInt() - operand.tensor.storage_offset() + local.storage_offset();
}

}  // namespace

namespace {

// Of the results; written down in the rank's history.
Provenance provenance_of(const LocalCall& call, const Prepared& prepared) {
  CallProvenance made(call.info, prepared.identity);
  for (const Operand& operand : call.operands) {
    if (!call.info.reads(operand.arg)) continue;
    if (operand.payload) {
      made.add_operand(operand.payload->provenance);
    } else {
      made.add_word(number_word(operand.tensor));
    }
  }
  for (const std::size_t i : call.info.number_args) {
    const c10::IValue& value = call.arg(i);
    if (is_number_in_key(call.info.args[i].key, value)) continue;
    made.add_number(number_word(value), is_one(value));
  }
  const Provenance result = made.result();
  note_made(*call.mesh, result.made, call.info.name, made.operand(0), made.operand(1));
  return result;
}

void note_writes(const LocalCall& call, const Provenance& provenance) {
  std::size_t output = 0;
  for (const Operand& operand : call.operands) {
    if (!operand.payload || !call.info.args[operand.arg].written) continue;
    note_written(operand.tensor, *operand.payload, of_output(provenance, output++));
  }
}

void check_results(const LocalCall& call) {
  for (std::size_t r = 0; r < call.info.returns.size(); ++r) {
    const c10::IValue& value = call.stack[call.stack.size() - call.info.returns.size() + r];
    if (value.isTensor() && has_payload(value.toTensor())) check_replicas_of(value.toTensor(), call.info.name);
    if (!value.isTensorList()) continue;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if (has_payload(tensor)) check_replicas_of(tensor, call.info.name);
    }
  }
}

}  // namespace

void run_boxed(const OpInfo& info, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveUs);
  LocalCall call{info, op, *stack, {}, nullptr};
  collect(call);
  if (info.drops) refuse_hidden_dropout(call);
  if (info.accumulates && (accumulate(call) || sum_gradients(call))) return;
  const std::shared_ptr<const Prepared> prepared = find_or_prepare(call);
  if (prepared->out_of_place) return run_out_of_place(call, *prepared->out_of_place);
  // What is whole already is read where it lies.
  if (prepared->replicated && (prepared->moves || !info.reads_memory)) say_no_rule(call);
  check_non_members(call, *prepared);

  const Provenance provenance = provenance_of(call, *prepared);
  const bool writes_back = info.writes && prepared->moves;
  Locals locals(writes_back ? call.operands.size() : 0);
  const CommCause cause(info.name, prepared->decision.reason);
  for (std::size_t i = 0; i < call.operands.size(); ++i) {
    const Operand& operand = call.operands[i];
    if (!operand.payload) continue;
    if (info.args[operand.arg].written) WatchedMemory::before_write(operand.payload->local());
    at::Tensor local = local_for(operand, prepared->plans[i]);
    // libtorch asks the wrapper, which has no such bit, whether it must be resolved first.
    if (info.reads_real && local.defined() && local.is_conj()) {
      local = local.resolve_conj();
      call.copied = true;
    }
    if (info.reads_memory && local.defined()) lay_as_shown(call, operand, local);
    if (writes_back) locals[i] = local;
    set_tensor(call, operand, std::move(local));
  }
  if (info.out) give_own_outs(call);
  if (!call.mesh->contains_me()) {
    skip(call, *prepared);
  } else if (prepared->algorithm) {
    const std::uint64_t made = check_level() == CheckLevel::kOff ? 0 : provenance.made;
    const CommTagGuard tagged({made, &info.name, made, 0});
    run_algorithm(call, *prepared);
  } else if (!prepared->runs || prepared->fills) {
    make_up_results(call, *prepared);
  } else {
    rewrite_arguments(call, *prepared);
    run_locally(call, *prepared);
  }
  if (info.out) {
    fill_outs(call, *prepared, provenance);
  } else if (writes_back) {
    write_back(call, *prepared, locals, provenance);
  }
  if (info.writes) note_writes(call, provenance);
  Results(call, *prepared, provenance).wrap_all();
  if (check_level() == CheckLevel::kValues) check_results(call);
}

namespace {

// A detached tensor shares all that the tensor has, also what is still under way.
void run_detach(torch::jit::Stack* stack) {
  const at::Tensor tensor = torch::jit::pop(*stack).toTensor();
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  stack->emplace_back(at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), false)));
}

// t_, unsqueeze_ and the like change what the tensor is, not what it holds: detached tensors that share its payload
// keep theirs, and this one takes over the view that the plain form gives.
void run_metadata_change(const OpInfo& info, torch::jit::Stack* stack) {
  const auto plain = plain_form(info);
  const at::Tensor self = (*stack)[stack->size() - info.args.size()].toTensor();
  // Nobody else has its memory, as of the results that libtorch's own operators squeeze: then it may move.
  const bool alone = self.unsafeGetTensorImpl()->unsafe_storage().use_count() == 1 && !payload_of(self).lost_alias &&
                     !payload_of(self).unit;
  plain->callBoxed(stack);
  const at::Tensor view = torch::jit::pop(*stack).toTensor();
  if (alone && payload_of(view).lost_alias) {
    payload_of(view).lost_alias.reset();
  } else if (payload_of(view).lost_alias) {
    fail_invalid(info.name, {.what = "in place, and yet the tensor would have to be moved",
                             .got = payload_of(self).spec.to_string(),
                             .advice = plain->schema().name().substr(6) + ", which gives a new tensor"});
  }
  take_over(self, view);
  stack->emplace_back(self);
}

[[noreturn]] void refuse_storage_change(const OpInfo& info) {
  fail_unsupported(info.name, {.what = "a distributed tensor's memory cannot be exchanged or given another shape",
                               .advice = "a new tensor"});
}

bool changes_storage(const std::string& name) {
  const std::string base = name.substr(0, name.find('.'));
  for (const char* known : {"aten::resize_", "aten::resize", "aten::set_", "aten::set", "aten::as_strided_",
                            "aten::resize_as_", "aten::resize_as"}) {
    if (base == known) return true;
  }
  return false;
}

class OpKernel final : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    std::call_once(once_, [&] {
      info_ = std::make_unique<OpInfo>(op);
      if (info_->name == "aten::detach" || info_->name == "aten::alias") {
        way_ = Way::kDetach;
      } else if (changes_storage(info_->name)) {
        way_ = Way::kRefuse;
      } else if (info_->in_place && info_->rule && info_->rule->rule->kind == RuleKind::kView) {
        way_ = Way::kMetadata;
      }
    });
    switch (way_) {
      case Way::kRun:
        return run_boxed(*info_, op, stack);
      case Way::kDetach:
        return run_detach(stack);
      case Way::kMetadata:
        return run_metadata_change(*info_, stack);
      case Way::kRefuse:
        refuse_storage_change(*info_);
    }
  }

 private:
  std::once_flag once_;
  std::unique_ptr<OpInfo> info_;
  enum class Way : std::uint8_t { kRun, kDetach, kMetadata, kRefuse };
  Way way_ = Way::kRun;
};

// For operators that were registered after ours.
void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<OpInfo>>();
  const OpInfo* info = nullptr;
  {
    const std::lock_guard lock(mutex);
    auto& entry = (*known)[&op.schema()];
    if (!entry) entry = std::make_unique<OpInfo>(op);
    info = entry.get();
  }
  run_boxed(*info, op, stack);
}

void register_all() {
  // Never destroyed: tensors may outlive main.
  static auto* any = new torch::Library(torch::Library::IMPL, "_", kDTensorKey, __FILE__, __LINE__);
  any->fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  // Operators of the program that say nothing of autograd.
  static auto* autograd =
      new torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::AutogradPrivateUse3, __FILE__, __LINE__);
  autograd->fallback(torch::CppFunction::makeFallthrough());
  static auto* aten = new torch::Library(torch::Library::IMPL, "aten", kDTensorKey, __FILE__, __LINE__);
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = c10::Dispatcher::singleton().findOp(name);
    // Those made of other operators reach us through them, some have kernels of their own.
    if (has_random_kernel(name) || has_direct_kernel(name) || has_own_kernel(name)) continue;
    if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) continue;
    const std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    aten->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<OpKernel>()));
  }
}

}  // namespace

void ensure_registered() {
  static std::once_flag once;
  std::call_once(once, [] {
    register_all();
    register_direct();
    register_own_kernels();
    register_nll_loss2d();
    register_reshape();
    register_composites();
    register_random();
    register_styled();
  });
}

DispatchStats dispatch_stats() { return Decisions::of_this_thread().stats(); }

NoRuleGuard::NoRuleGuard(NoRule mode) : before_(std::exchange(no_rule, mode)) {}
NoRuleGuard::~NoRuleGuard() { no_rule = before_; }

DecideGuard::DecideGuard(const DecideOptions& options) : before_(std::exchange(decide_options(), options)) {
  Decisions::of_this_thread().clear();
}
DecideGuard::~DecideGuard() {
  decide_options() = before_;
  Decisions::of_this_thread().clear();
}

}  // namespace dtensor
