// What happens when a call is new: its operands' specs go to the rules, and the answer is worked out for this rank.
#include <ATen/ops/empty_strided.h>

#include <algorithm>

#include "dtensor/core/error.h"
#include "dtensor/runtime/dispatch_impl.h"
#include "dtensor/runtime/meta.h"

namespace dtensor {
namespace {

using NumberType = StaticArg::NumberType;

Spec replicated(const Spec& spec) {
  return Spec::make(spec.meta(), spec.mesh(), Placements(static_cast<std::size_t>(spec.mesh().ndim()), Replicate()));
}

std::string operands_text(const LocalCall& call) {
  std::string text;
  for (const Operand& operand : call.operands) {
    if (!text.empty()) text += ", ";
    text += operand.payload ? operand.payload->spec.to_string() : "a number";
  }
  return text;
}

c10::IValue to_ivalue(const StaticArg& value) {
  switch (value.kind()) {
    case StaticArg::Kind::kBool:
      return value.as_bool();
    case StaticArg::Kind::kInts: {
      const Dims ints = value.as_ints();
      return c10::IValue(std::vector<std::int64_t>(ints.begin(), ints.end()));
    }
    case StaticArg::Kind::kNumber:
      return value.as_double();
    case StaticArg::Kind::kText:
      return value.as_text();
    case StaticArg::Kind::kNone:
      return {};
    default:
      return value.as_int();
  }
}

c10::IValue int_list(const Dims& dims) { return c10::IValue(std::vector<std::int64_t>(dims.begin(), dims.end())); }

c10::IValue rewritten(const Rewrite& rewrite, const Decision& decision, const Dims& at) {
  switch (rewrite.kind) {
    case Rewrite::Kind::kLocalShape:
      return int_list(decision.outputs[rewrite.index]->local_shape(at));
    case Rewrite::Kind::kLocalStride:
      return int_list(decision.outputs[rewrite.index]->local_stride(at));
    case Rewrite::Kind::kScaled: {
      const Spec& spec = *decision.inputs[0];
      const std::int64_t global = spec.meta().shape()[rewrite.index];
      const std::int64_t local = spec.local_shape(at)[rewrite.index];
      Dims sizes = rewrite.value.as_ints();
      for (std::int64_t& size : sizes) size = global == 0 ? 0 : size * local / global;
      if (rewrite.value.kind() == StaticArg::Kind::kInt) return sizes[0];
      return int_list(sizes);
    }
    case Rewrite::Kind::kValue:
      break;
  }
  return to_ivalue(rewrite.value);
}

[[noreturn]] void refuse(const LocalCall& call, const std::string& reason) {
  fail_invalid(call.info.name,
               {.what = reason, .got = operands_text(call), .advice = "redistribute the operands first"});
}

// Without a rule, or where this libtorch cannot tell what the results will be.
Decision on_replicas(const LocalCall& call) {
  if (call.info.takes_generator) {
    fail_unsupported(call.info.name,
                     {.what = "a random operator without a rule: its ranks would draw different numbers",
                      .got = operands_text(call)});
  }
  if (call.info.name == "aten::as_strided") check_no_gaps(call.operands[0].payload->spec, call.info.name);
  Decision decision;
  for (const Operand& operand : call.operands) {
    decision.inputs.push_back(operand.payload ? std::optional<Spec>(replicated(operand.payload->spec)) : std::nullopt);
  }
  decision.reason = call.info.rule ? "its rule has no other way: the operands are replicated"
                                   : "no rule: the operands are replicated";
  return decision;
}

bool returns_tensors(const LocalCall& call) {
  return std::any_of(call.info.returns.begin(), call.info.returns.end(),
                     [](const OpInfo::Return& result) { return result.is_tensor || result.is_list; });
}

// What results there will be, only the values may say (nonzero): a rule that wants everything whole need not know it.
bool runs_on_replicas(const LocalCall& call) {
  return call.info.rule && call.info.rule->rule->kind == RuleKind::kReplicated && returns_tensors(call);
}

// Does the call have another form than the rule knows of (a 0-d index)? Then it runs on replicas.
bool misfit(const LocalCall& call, const std::vector<std::optional<TensorMeta>>& results) {
  return !call.info.in_place && !fits(*call.info.rule->rule, describe(call, results));
}

void work_out(const LocalCall& call, Prepared& prepared) {
  const Decision& decision = prepared.decision;
  for (std::size_t i = 0; i < call.operands.size(); ++i) {
    prepared.plans.emplace_back();
    const Operand& operand = call.operands[i];
    if (!operand.payload || i >= decision.inputs.size() || !decision.inputs[i]) continue;
    const Spec* at = &operand.payload->spec;
    if (*at == *decision.inputs[i]) continue;
    for (const Spec& stop : stops_between(*at, *decision.inputs[i])) {
      prepared.plans.back().push_back(make_plan(*at, stop));
      at = &stop;
    }
    prepared.moves = true;
  }
  const LocalWork& local = decision.local;
  if (!local.op.empty()) {
    const std::size_t dot = local.op.find('.');
    const std::string overload = dot == std::string::npos ? "" : local.op.substr(dot + 1);
    prepared.other_op =
        c10::Dispatcher::singleton().findSchemaOrThrow(local.op.substr(0, dot).c_str(), overload.c_str());
  }
  if (!local.algorithm.empty()) prepared.algorithm = find_algorithm(local.algorithm);
  const auto at = call.mesh->coordinate();
  if (!at) return;
  for (const Rewrite& rewrite : decision.rewrites) {
    prepared.rewrites.emplace_back(rewrite.arg, rewritten(rewrite, decision, *at));
  }
  for (const std::int64_t m : local.once) prepared.runs = prepared.runs && (*at)[m] == 0;
  const bool makes_tensors =
      !call.info.returns.empty() && std::all_of(call.info.returns.begin(), call.info.returns.end(),
                                                [](const OpInfo::Return& r) { return r.is_tensor && !r.alias; });
  // Not every kernel takes a tensor without elements; where it would make and write none, it need not run. A batch norm
  // of nothing leaves the statistics that run on.
  if (makes_tensors && !prepared.replicated) {
    const auto empty = [&](const std::optional<Spec>& spec) {
      if (!spec) return false;
      const Dims shape = spec->local_shape(*at);
      return std::find(shape.begin(), shape.end(), 0) != shape.end();
    };
    const auto makes_none = [&](const std::optional<Spec>& spec) { return !spec || empty(spec); };
    prepared.fills = std::all_of(decision.outputs.begin(), decision.outputs.end(), makes_none);
    const bool of_nothing = empty(decision.inputs[0]);
    for (std::size_t i = 0; i < call.operands.size(); ++i) {
      const bool written = call.info.args[call.operands[i].arg].written;
      prepared.fills = prepared.fills && (!written || of_nothing || makes_none(decision.inputs[i]));
    }
  }
  if (local.identity && decision.inputs[0]) {
    std::int64_t numel = 1;
    for (const std::int64_t size : decision.inputs[0]->local_shape(*at)) numel *= size;
    prepared.fills = prepared.fills || numel == 0;
  }
  for (const auto& output : decision.outputs) {
    prepared.output_shapes.push_back(output ? output->local_shape(*at) : Dims{});
    prepared.output_strides.push_back(output ? output->local_stride(*at) : Dims{});
  }
}

// Can the operator be called on the parts as they lie, and its results be wrapped, with at most a list of sizes
// exchanged?
void find_short_way(const LocalCall& call, Prepared& prepared) {
  const LocalWork& local = prepared.decision.local;
  const bool plain = call.mesh->contains_me() && prepared.runs && !prepared.fills && !prepared.moves &&
                     !prepared.replicated && !prepared.other_op && !prepared.algorithm && local.divide_by == 1;
  const auto& outputs = prepared.decision.outputs;
  const bool each = !outputs.empty() && outputs.size() == call.info.returns.size() && outputs[0];
  // Autograd adds gradients up, and those that are not summed yet have a way of their own.
  const bool sums = call.info.accumulates && call.operands[0].payload && call.operands[0].payload->spec.has_partial();
  const bool copies = call.info.returns_alias && !prepared.decision.alias && !local.is_same();
  const auto& rewrites = prepared.rewrites;
  const bool sizes = rewrites.size() == 1 && rewrites[0].second.isIntList();
  prepared.as_it_lies = plain && each && !sums && !copies && (rewrites.empty() || sizes);
  if (!sizes) return;
  for (const std::int64_t size : rewrites[0].second.toIntVector()) prepared.sizes.push_back(size);
}

// The key's words after the operands' are the static arguments, which are numbers: no pointers. An operand has two
// words, a number that scales three.
std::uint64_t identity_of(const LocalCall& call, const Prepared& prepared) {
  std::uint64_t identity = mix(call.info.identity, prepared.words[1] & 0xFF);
  std::size_t next = 2;
  for (const Operand& operand : call.operands) {
    identity = mix(identity, prepared.words[next]);
    identity = mix(identity, operand.payload ? operand.payload->spec.stable_hash() : prepared.words[next + 1]);
    next += operand.payload || !call.info.scales ? 2 : 3;
  }
  for (; next < prepared.words.size(); ++next) identity = mix(identity, prepared.words[next]);
  for (const auto& output : prepared.decision.outputs) identity = mix(identity, output ? output->stable_hash() : 1);
  return identity;
}

}  // namespace

at::Tensor copy_in_order(const at::Tensor& local, const Prepared& prepared, std::size_t output) {
  const Dims& shape = prepared.output_shapes[output];
  if (local.sizes() != at::IntArrayRef(shape.data(), shape.size())) return local;  // wrapping it says what is wrong
  const Dims& strides = prepared.output_strides[output];
  const at::Tensor result = at::empty_strided(local.sizes(), {strides.data(), strides.size()}, local.options());
  return local.numel() > 0 ? result.copy_(local) : result;
}

void check_no_gaps(const Spec& spec, const std::string& op) {
  const TensorMeta& meta = spec.meta();
  std::int64_t span = 1;
  for (std::int64_t d = 0; d < meta.ndim(); ++d) span += (meta.shape()[d] - 1) * meta.stride()[d];
  if (span == meta.numel() || meta.numel() == 0) return;
  fail_unsupported(op, {.what = "a distributed tensor that is itself a view of memory with gaps",
                        .got = spec.to_string(),
                        .advice = "contiguous() first, or slice, permute and view"});
}

OpCall describe(const LocalCall& call, std::vector<std::optional<TensorMeta>> results) {
  OpCall described{call.info.name, {}, {}, std::move(results)};
  std::vector<std::pair<std::size_t, std::size_t>> ranges(call.info.args.size(), {0, 0});
  for (const Operand& operand : call.operands) {
    auto& [first, count] = ranges[operand.arg];
    if (count++ == 0) first = described.operands.size();
    described.items.push_back(operand.item);
    described.operands.push_back(operand.payload ? std::optional<Spec>(operand.payload->spec) : std::nullopt);
    described.numbers.push_back(operand.payload ? StaticArg::none() : number_of(operand.tensor));
  }
  for (std::size_t i = 0; i < call.info.args.size(); ++i) {
    const OpInfo::Arg& arg = call.info.args[i];
    if (arg.kind == OpInfo::ArgKind::kOther || arg.kind == OpInfo::ArgKind::kDType) {
      described.args.push_back(ArgRef::value(static_arg(arg, call.arg(i))));
    } else {
      described.args.push_back(ArgRef::tensors(ranges[i].first, ranges[i].second));
    }
  }
  return described;
}

StaticArg static_arg(const OpInfo::Arg& arg, const c10::IValue& value) {
  if (value.isNone()) return StaticArg::none();
  if (arg.kind == OpInfo::ArgKind::kDType) return StaticArg::dtype(dtype_of(value.toScalarType()));
  if (value.isBool()) return StaticArg::boolean(value.toBool());
  if (value.isInt()) return StaticArg::integer(value.toInt());
  if (value.isDouble()) return StaticArg::number(NumberType::kFloating, value.toDouble());
  if (value.isComplexDouble()) {
    const c10::complex<double> number = value.toComplexDouble();
    return StaticArg::number(NumberType::kComplex, number.real(), number.imag());
  }
  if (value.isIntList()) {
    const auto list = value.toIntVector();
    return StaticArg::integers(Dims(list.begin(), list.end()));
  }
  if (value.isBoolList()) {
    const auto list = value.toBoolList();
    Dims bools;
    for (const bool b : list) bools.push_back(b ? 1 : 0);
    return StaticArg::integers(std::move(bools));
  }
  if (value.isString()) return StaticArg::text(value.toStringRef());
  if (value.isDevice()) return StaticArg::text(value.toDevice().str());
  if (value.isDoubleList()) {
    std::string text;
    for (const double number : value.toDoubleVector()) text += std::to_string(number) + ' ';
    return StaticArg::text(std::move(text));
  }
  return StaticArg::text(value.tagKind());
}

StaticArg number_of(const at::Tensor& plain) {
  if (plain._is_zerotensor()) return StaticArg::integer(0);
  if (!plain.device().is_cpu() || plain.numel() != 1) return StaticArg::none();
  const void* data = plain.data_ptr();
  switch (plain.scalar_type()) {
    case c10::ScalarType::Double:
      return StaticArg::number(NumberType::kFloating, *static_cast<const double*>(data));
    case c10::ScalarType::Float:
      return StaticArg::number(NumberType::kFloating, *static_cast<const float*>(data));
    case c10::ScalarType::Long:
      return StaticArg::integer(*static_cast<const std::int64_t*>(data));
    case c10::ScalarType::Bool:
      return StaticArg::boolean(*static_cast<const bool*>(data));
    default:
      return static_arg({}, c10::IValue(plain.item()));
  }
}

DecideOptions& decide_options() {
  thread_local DecideOptions options;
  return options;
}

OrReason<std::vector<Candidate>> ways_of(const LocalCall& call) {
  if (!call.info.rule) return Reason{"no rule"};
  if (runs_on_replicas(call)) return Reason{"the operands are replicated, as its rule says"};
  auto results = global_results(call);
  if (!results) return Reason{"this libtorch cannot say what the results will be: the operands are replicated"};
  return candidates(*call.info.rule->rule, describe(call, std::move(*results)), {.explain = true});
}

std::shared_ptr<const Prepared> prepare(const LocalCall& call, std::vector<std::uint64_t> words, std::size_t hash) {
  auto prepared = std::make_shared<Prepared>();
  prepared->words = std::move(words);
  prepared->hash = hash;
  for (const Operand& operand : call.operands) {
    prepared->operands.push_back(operand.payload ? std::optional<Spec>(operand.payload->spec) : std::nullopt);
  }
  GlobalResults results = std::vector<std::optional<TensorMeta>>{};
  if (call.info.rule && returns_tensors(call) && !runs_on_replicas(call)) results = global_results(call);
  if (call.info.rule && results && !runs_on_replicas(call) && !misfit(call, *results)) {
    auto decision = decide(*call.info.rule->rule, describe(call, std::move(*results)), decide_options());
    if (!decision) {
      prepared->out_of_place = plain_form(call.info);
      if (!prepared->out_of_place) refuse(call, decision.reason());
      return prepared;  // the other form has its own
    }
    prepared->decision = std::move(*decision);
  } else {
    prepared->decision = on_replicas(call);
    prepared->replicated = true;
  }
  prepared->identity = identity_of(call, *prepared);
  work_out(call, *prepared);
  find_short_way(call, *prepared);
  if (call.info.returns_alias && !call.info.writes && !prepared->replicated) prepared->offsets = view_offsets(call);
  return prepared;
}

}  // namespace dtensor
