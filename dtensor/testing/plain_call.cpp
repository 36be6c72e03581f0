#include "dtensor/testing/plain_call.h"

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/scalar_tensor.h>

#include "dtensor/core/error.h"
#include "dtensor/runtime/meta.h"

namespace dtensor::testing {
namespace {

// Calls fn(tensor) for each tensor of an argument and puts what it returns in its place.
c10::IValue mapped(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& fn) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(fn(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(fn(tensor));
    return list;
  }
  if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
    c10::List<c10::optional<at::Tensor>> list;
    for (const c10::IValue& item : value.toListRef()) {
      if (item.isTensor() && item.toTensor().defined()) {
        list.push_back(fn(item.toTensor()));
      } else {
        list.push_back(c10::nullopt);
      }
    }
    return list;
  }
  return value;
}

at::Tensor as_tensor(const c10::IValue& value) {
  if (value.isScalar() || value.isBool()) return at::scalar_tensor(value.toScalar(), at::kDouble);
  return {};
}

}  // namespace

PlainCall::PlainCall(const std::string& op, std::vector<c10::IValue> args) : op_(op), args_(std::move(args)) {
  const std::size_t dot = std::min(op.find('.'), op.size());
  const auto found = c10::Dispatcher::singleton().findSchema(
      {op.substr(0, dot), dot == op.size() ? std::string() : op.substr(dot + 1)});
  if (!found) {
    fail_invalid("audit", {.what = "there is no such operator",
                           .got = op,
                           .expected = "its name with its overload, \"aten::add.Tensor\""});
  }
  handle_ = std::make_unique<c10::OperatorHandle>(*found);
  const auto& wanted = found->schema().arguments();
  if (args_.size() > wanted.size()) {
    fail_invalid("audit", {.what = "too many arguments of " + op,
                           .got = std::to_string(args_.size()),
                           .expected = std::to_string(wanted.size())});
  }
  for (std::size_t i = args_.size(); i < wanted.size(); ++i) {
    if (!wanted[i].default_value()) {
      fail_invalid("audit", {.what = "an argument of " + op + " is missing", .got = wanted[i].name()});
    }
    args_.push_back(*wanted[i].default_value());
  }
  for (std::size_t i = 0; i < args_.size(); ++i) {
    mapped(args_[i], [&](const at::Tensor& tensor) {
      const auto* alias = wanted[i].alias_info();
      if (alias && alias->isWrite()) written_.push_back(tensors_.size());
      tensors_.push_back(tensor);
      return tensor;
    });
  }
}

PlainCall::~PlainCall() = default;

std::vector<c10::IValue> PlainCall::with(const std::vector<at::Tensor>& tensors) const {
  std::vector<c10::IValue> args;
  std::size_t next = 0;
  for (const c10::IValue& arg : args_) {
    args.push_back(mapped(arg, [&](const at::Tensor&) { return tensors[next++]; }));
  }
  return args;
}

std::vector<at::Tensor> PlainCall::run(const std::vector<at::Tensor>& tensors) const {
  torch::jit::Stack stack = with(tensors);
  handle_->callBoxed(&stack);
  std::vector<at::Tensor> results;
  for (const c10::IValue& value : stack) {
    if (value.isTensor()) {
      results.push_back(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) results.push_back(tensor);
    } else {
      results.push_back(as_tensor(value));
    }
  }
  for (const std::size_t i : written_) results.push_back(tensors[i]);
  return results;
}

std::vector<Placement> placements_for(const at::Tensor& tensor) {
  std::vector<Placement> result = {Replicate()};
  for (std::int64_t d = 0; d < tensor.dim(); ++d) result.push_back(Shard(d));
  const DType dtype = dtype_of(tensor.scalar_type());
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kProduct,
                            ReduceOp::kAnd, ReduceOp::kOr, ReduceOp::kXor}) {
    if (can_reduce(dtype, op)) result.push_back(Partial(op));
  }
  return result;
}

std::string to_string(const std::vector<Spec>& layout) {
  std::string text;
  for (const Spec& spec : layout) text += (text.empty() ? "" : "; ") + spec.to_string();
  return text;
}

}  // namespace dtensor::testing
