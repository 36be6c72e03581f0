#pragma once

#include <string>
#include <variant>
#include <vector>

#include "dtensor/core/propagate.h"
#include "dtensor/core/text.h"

// Calls and decisions as text, for tests of rules.
namespace dtensor::calls {

inline StaticArg num(double value) {
  const bool integral = value == static_cast<double>(static_cast<std::int64_t>(value));
  using Type = StaticArg::NumberType;
  return StaticArg::number(integral ? Type::kIntegral : Type::kFloating, value);
}
inline StaticArg i(std::int64_t value) { return StaticArg::integer(value); }
inline StaticArg ints(Dims values) { return StaticArg::integers(std::move(values)); }
inline StaticArg flag(bool value) { return StaticArg::boolean(value); }

// A number as a 0-d tensor; none: its value is not known.
struct Wrapped {
  StaticArg value = num(2);
};
struct Absent {};                       // an optional tensor that is not given
using List = std::vector<std::string>;  // a list of tensors
using Arg = std::variant<const char*, Spec, StaticArg, Wrapped, Absent, List>;

// Tensors are written as specs, results as metas: ("aten::mm", {"f32[4,6] @ 2 : S(0)", "f32[6,2] @ 2 : R"},
// {"f32[4,2]"}).
inline OpCall make(std::string_view name, const std::vector<Arg>& args, const std::vector<std::string>& outputs) {
  OpCall call{name, {}, {}, {}};
  const auto add = [&](std::vector<std::optional<Spec>> operands, const StaticArg& number = {}) {
    call.args.push_back(ArgRef::tensors(call.operands.size(), operands.size()));
    for (auto& operand : operands) {
      call.operands.push_back(std::move(operand));
      call.numbers.push_back(number);
    }
  };
  for (const Arg& arg : args) {
    if (const auto* text = std::get_if<const char*>(&arg)) add({Spec::parse(*text)});
    if (const auto* spec = std::get_if<Spec>(&arg)) add({*spec});
    if (const auto* number = std::get_if<Wrapped>(&arg)) add({std::nullopt}, number->value);
    if (std::holds_alternative<Absent>(arg)) add({});
    if (const auto* value = std::get_if<StaticArg>(&arg)) call.args.push_back(ArgRef::value(*value));
    if (const auto* list = std::get_if<List>(&arg)) {
      std::vector<std::optional<Spec>> operands;
      for (const std::string& text : *list) operands.push_back(Spec::parse(text));
      add(std::move(operands));
    }
  }
  for (const std::string& text : outputs) {
    call.outputs.push_back(text == "-" ? std::nullopt : std::optional(TensorMeta::parse(text)));
  }
  return call;
}

// The part of a spec after the colon.
inline std::string placed(const Spec& spec) {
  const std::string text = spec.to_string();
  return text.substr(text.rfind(" : ") + 3);
}

// `S(0) | S(1)>R -> S(0)`; then what the local call does otherwise.
inline std::string shown(const OpCall& call, const OrReason<Decision>& decision) {
  if (!decision) return "no: " + decision.reason();
  std::string text;
  for (std::size_t k = 0; k < call.operands.size(); ++k) {
    text += k ? " | " : "";
    if (!call.operands[k]) {
      text += "number";
      continue;
    }
    text += placed(*call.operands[k]);
    if (!(*call.operands[k] == *decision->inputs[k])) text += ">" + placed(*decision->inputs[k]);
  }
  text += " -> " + join(decision->outputs, " | ", [](const auto& out) { return out ? placed(*out) : "-"; });
  const LocalWork& local = decision->local;
  if (!local.op.empty()) text += "; runs " + local.op;
  if (local.divide_by != 1) text += "; over " + std::to_string(local.divide_by);
  if (local.identity) text += "; empty gives " + std::string(to_string(*local.identity));
  if (!local.once.empty()) {
    text += "; once on " + join_numbers(local.once);
    text += local.others == LocalWork::Others::kKeep
                ? ", others keep"
                : ", others identity of " + std::string(to_string(local.others_op));
  }
  if (!local.algorithm.empty()) text += "; " + local.algorithm + " over " + join_numbers(local.algorithm_dims);
  if (decision->alias) text += "; alias";
  return text;
}

inline OrReason<Decision> decide_call(const OpCall& call, const DecideOptions& options = {}) {
  const auto found = find_rule(call.name);
  if (!found) return Reason{"no rule"};
  return decide(*found->rule, call, options);
}

inline std::string decided(std::string_view name, const std::vector<Arg>& args,
                           const std::vector<std::string>& outputs) {
  const OpCall call = make(name, args, outputs);
  return shown(call, decide_call(call));
}

}  // namespace dtensor::calls
