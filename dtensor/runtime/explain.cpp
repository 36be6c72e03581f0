#include "dtensor/runtime/explain.h"

#include <algorithm>

#include "dtensor/core/error.h"
#include "dtensor/runtime/dispatch_impl.h"
#include "dtensor/runtime/register.h"

namespace dtensor {
namespace {

c10::OperatorHandle find_operator(const std::string& op) {
  const std::string full = op.find("::") == std::string::npos ? "aten::" + op : op;
  const std::size_t dot = full.find('.');
  const auto handle = c10::Dispatcher::singleton().findSchema(
      {full.substr(0, dot), dot == std::string::npos ? "" : full.substr(dot + 1)});
  if (!handle) {
    fail_invalid("explain", {.what = "there is no such operator",
                             .got = full,
                             .expected = "its name with its overload, \"aten::add.Tensor\""});
  }
  return *handle;
}

torch::jit::Stack stack_of(const c10::OperatorHandle& op, std::vector<c10::IValue> args) {
  const auto& wanted = op.schema().arguments();
  if (args.size() > wanted.size()) {
    fail_invalid(
        "explain",
        {.what = "too many arguments", .got = std::to_string(args.size()), .expected = std::to_string(wanted.size())});
  }
  for (std::size_t i = args.size(); i < wanted.size(); ++i) {
    if (wanted[i].default_value()) {
      args.push_back(*wanted[i].default_value());
    } else {
      fail_invalid("explain", {.what = "an argument without a default is missing", .got = wanted[i].name()});
    }
  }
  return args;
}

std::string moves_of(const LocalCall& call, const Decision& decision) {
  std::string text;
  for (std::size_t i = 0; i < call.operands.size(); ++i) {
    if (!call.operands[i].payload || i >= decision.inputs.size() || !decision.inputs[i]) continue;
    const Spec* at = &call.operands[i].payload->spec;
    for (const Spec& stop : stops_between(*at, *decision.inputs[i])) {
      const Plan plan = make_plan(*at, stop);
      text += "         operand " + std::to_string(i) + ": " + to_string(at->placements()) + " -> " +
              to_string(stop.placements()) + ", receives " + bytes_text(plan.received().max) + " (" +
              bytes_text(plan.received().total) + " in all)\n";
      at = &stop;
    }
  }
  return text;
}

std::string outputs_of(const Decision& decision) {
  std::string text;
  for (const auto& output : decision.outputs) {
    if (!text.empty()) text += ", ";
    text += output ? output->to_string() : "nothing";
  }
  return text;
}

}  // namespace

std::string explain_call(const std::string& name, std::vector<c10::IValue> args) {
  ensure_registered();
  const c10::OperatorHandle op = find_operator(name);
  const OpInfo info(op);
  torch::jit::Stack stack = stack_of(op, std::move(args));
  LocalCall call{info, op, stack, {}, nullptr};
  collect(call);
  std::string text = info.name + '\n';
  for (const Operand& operand : call.operands) {
    text += "operand  " + (operand.payload ? operand.payload->spec.to_string() : "a number") + '\n';
  }
  if (!call.mesh) return text + "runs     as libtorch runs it: no operand is distributed\n";
  const auto ways = ways_of(call);
  if (!info.rule) return text + "rule     none: the operands are replicated\n";
  text += "rule     " + to_string(*info.rule->rule) + '\n';
  if (!ways) return text + "refused  " + ways.reason() + '\n';
  const Candidate& chosen = ways->front();
  text += "chosen   " + chosen.row + ": " + time_text(chosen.decision.time) + ", " + chosen.decision.reason + '\n';
  text += moves_of(call, chosen.decision);
  text += "gives    " + outputs_of(chosen.decision) + '\n';
  for (std::size_t i = 1; i < ways->size(); ++i) {
    const Candidate& other = (*ways)[i];
    text += "not by   " + other.row + ": " + time_text(other.decision.time) + '\n';
  }
  return text;
}

OrReason<std::vector<Candidate>> ways_to_run(const std::string& name, std::vector<c10::IValue> args) {
  ensure_registered();
  const c10::OperatorHandle op = find_operator(name);
  const OpInfo info(op);
  torch::jit::Stack stack = stack_of(op, std::move(args));
  LocalCall call{info, op, stack, {}, nullptr};
  collect(call);
  if (!call.mesh) return Reason{"no operand is distributed"};
  return ways_of(call);
}

}  // namespace dtensor
