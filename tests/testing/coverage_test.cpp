// Which operators have a way of their own, and which fall back to replicated operands: none of everyday's may.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/version.h>

#include <fstream>
#include <set>
#include <sstream>

#include "dtensor/comm/world.h"
#include "dtensor/core/rule.h"
#include "dtensor/runtime/dispatch.h"
#include "dtensor/runtime/register.h"
#include "dtensor/runtime/tensor.h"
#include "dtensor/testing/plain_call.h"
#include "tests/testing/calls.h"

namespace dtensor::testing {
namespace {

struct Everyday {
  std::set<std::string> names;  // "aten::add", all overloads
  std::set<std::string> full;   // "aten::view.dtype"
};

Everyday everyday() {
  Everyday result;
  std::ifstream file(DTENSOR_EVERYDAY_OPERATORS);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line.substr(0, line.find('#')));
    for (std::string word; words >> word;) {
      (word.find('.') == std::string::npos ? result.names : result.full).insert("aten::" + word);
    }
  }
  return result;
}

std::string text_of(const c10::OperatorName& name) {
  return name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
}

bool is_meant(const Everyday& all, const c10::OperatorName& name) {
  if (all.full.count(text_of(name)) || all.names.count(name.name)) return true;
  return form_of(name.name).in_place && all.names.count(name.name.substr(0, name.name.size() - 1));
}

bool takes_tensors(const c10::FunctionSchema& schema) {
  for (const c10::Argument& argument : schema.arguments()) {
    if (!argument.is_out() && argument.type()->str().find("Tensor") != std::string::npos) return true;
  }
  return false;
}

// What the dispatcher itself knows: these mean memory, and are checked or refused there.
const std::set<std::string> kByHand = {"aten::as_strided", "aten::as_strided_"};

TEST(Coverage, NoEverydayOperatorIsWithoutAWay) {
  const Everyday all = everyday();
  ASSERT_GT(all.names.size(), 300U);
  ensure_registered();
  std::size_t looked_at = 0;
  std::string without;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || !is_meant(all, name) || !takes_tensors(op->schema())) continue;
    ++looked_at;
    if (find_rule(text_of(name)) || has_random_kernel(name) || has_own_kernel(name)) continue;
    if (kByHand.count(name.name)) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) continue;
    if (name.name.rfind("aten::_foreach_", 0) == 0) continue;
    without += "  " + text_of(name) + '\n';
  }
  EXPECT_GT(looked_at, 600U);
  EXPECT_EQ(without, "");
}

// What runs on replicas: floor_divide_ by a number, which libtorch 1.13 makes of an out form without a meta kernel.
bool runs_on_replicas(const std::string& refused) {
  return TORCH_VERSION_MAJOR < 2 && refused.rfind("[aten::floor_divide.out]", 0) == 0;
}

// The call with its first dims cut, in a program that refuses to run on replicated operands. Empty: it ran.
std::string refusal(const std::string& op, const std::vector<c10::IValue>& args, const DeviceMesh& mesh) {
  const NoRuleGuard strict(NoRule::kRefuse);
  try {
    const PlainCall call(op, args);
    std::vector<at::Tensor> operands;
    for (const at::Tensor& tensor : call.tensors()) {
      const Placement placement = tensor.dim() > 0 ? Placement(Shard(0)) : Placement(Replicate());
      operands.push_back(distribute_tensor(tensor.clone(), mesh, {placement}));
    }
    call.run(operands);
  } catch (const std::exception& error) {
    const std::string text = error.what();
    if (text.find("has no rule") != std::string::npos) return text.substr(0, text.find('\n'));
  }
  return {};
}

// "aten::add_.Tensor" of "aten::add.Tensor".
std::string in_place_of(const std::string& op) {
  const std::size_t dot = std::min(op.find('.'), op.size());
  return op.substr(0, dot) + "_" + op.substr(dot);
}

bool exists(const std::string& op, std::size_t num_args) {
  const std::size_t dot = std::min(op.find('.'), op.size());
  const auto found = c10::Dispatcher::singleton().findSchema(
      {op.substr(0, dot), dot == op.size() ? std::string() : op.substr(dot + 1)});
  return found && found->schema().arguments().size() >= num_args;
}

TEST(Coverage, NoCallOfARowRunsWithoutIt) {
  std::set<std::string> without;
  run_ranks(2, [&](World& world) {
    const at::NoGradGuard no_grad;
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2});
    for (const Call& call : sample_calls()) {
      for (const std::string& op : {call.op, in_place_of(call.op)}) {
        if (!exists(op, call.args.size())) continue;
        const std::string text = refusal(op, call.args, mesh);
        if (world.rank() == 0 && !text.empty() && !runs_on_replicas(text)) without.insert(text);
      }
    }
  });
  std::string text;
  for (const std::string& line : without) text += "  " + line + '\n';
  EXPECT_EQ(text, "");
}

}  // namespace
}  // namespace dtensor::testing
