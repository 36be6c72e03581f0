#include "tests/testing/calls.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <numeric>
#include <set>

#include "dtensor/core/rule.h"
#include "dtensor/testing/plain_call.h"

namespace dtensor::testing {
namespace {

std::int64_t numel(const std::vector<std::int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

// Every element of 0 … n-1 once, in an order that looks like none.
at::Tensor shuffled(std::int64_t n) {
  std::int64_t step = n / 2 + 1;
  while (std::gcd(step, n) != 1) ++step;
  return n == 0 ? at::empty({0}, at::kLong) : at::arange(n, at::kLong).mul(step).remainder(n);
}

// A way to fill in a schema: shapes of the first tensor and of the others, and their type.
struct Fill {
  std::vector<std::int64_t> first;
  std::vector<std::int64_t> others;
  char type;
};

at::Tensor tensor_for(const Fill& fill, std::size_t which) {
  const auto& sizes = which == 0 ? fill.first : fill.others;
  if (fill.type == 'i') return indices(sizes, 5) + 1;
  if (fill.type == 'b') return bools(sizes);
  if (fill.type == 'c') return complexes(sizes);
  return floats(sizes, static_cast<double>(which));
}

c10::optional<c10::IValue> value_for(const c10::Argument& argument, const Fill& fill, std::size_t& tensors) {
  c10::TypePtr type = argument.real_type();
  if (type->kind() == c10::TypeKind::OptionalType) type = type->containedType(0);
  if (type->kind() == c10::TypeKind::TensorType) return tensor_for(fill, tensors++);
  if (argument.default_value()) return *argument.default_value();
  switch (type->kind()) {
    case c10::TypeKind::NumberType:
    case c10::TypeKind::FloatType:
      return fill.type == 'f' || fill.type == 'c' ? c10::IValue(1.5) : c10::IValue(2);
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return c10::IValue(1);
    case c10::TypeKind::BoolType:
      return c10::IValue(false);
    case c10::TypeKind::ScalarTypeType:
      return c10::IValue(at::kDouble);
    case c10::TypeKind::ListType:
      if (type->containedType(0)->kind() == c10::TypeKind::TensorType) return c10::nullopt;
      return c10::IValue(std::vector<std::int64_t>{1});
    default:
      return c10::nullopt;
  }
}

bool runs(const Call& call) {
  try {
    const PlainCall plain(call.op, call.args);
    std::vector<at::Tensor> own;
    for (const at::Tensor& tensor : plain.tensors()) own.push_back(tensor.clone());
    for (const at::Tensor& result : plain.run(own)) {
      if (result.defined()) result.clone();
    }
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

void add_by_schema(const c10::FunctionSchema& schema, const std::string& name, std::vector<Call>& calls) {
  static const std::vector<Fill> fills = {
      {{5, 4}, {5, 4}, 'f'}, {{5, 4}, {4}, 'f'}, {{5, 1}, {1, 4}, 'f'}, {{5, 4}, {5, 4}, 'i'},
      {{5, 4}, {5, 4}, 'b'}, {{0, 4}, {4}, 'f'}, {{}, {}, 'f'},         {{5, 4}, {5, 4}, 'c'},
  };
  std::size_t added = 0;
  for (const Fill& fill : fills) {
    Call call{name, {}};
    std::size_t tensors = 0;
    for (const c10::Argument& argument : schema.arguments()) {
      const auto value = value_for(argument, fill, tensors);
      if (!value) return;
      call.args.push_back(*value);
    }
    // Shapes of the others say nothing new of one tensor; of many tensors, two ways are enough.
    if (tensors < 2 && fill.others != fill.first && fill.first.size() != 2) continue;
    if (tensors < 2 && fill.first.size() == 2 && fill.first[1] == 1) continue;
    if (tensors > 2 && added >= 2) continue;
    if (!runs(call)) continue;
    calls.push_back(std::move(call));
    ++added;
  }
}

}  // namespace

at::Tensor floats(std::vector<std::int64_t> sizes, double start) {
  const std::int64_t n = numel(sizes);
  return (shuffled(n).to(at::kDouble) - static_cast<double>(n / 2)).div(8).add(start + 0.0625).view(sizes);
}
at::Tensor positive(std::vector<std::int64_t> sizes) {
  const std::int64_t n = numel(sizes);
  return (shuffled(n).to(at::kDouble) + 1).div(static_cast<double>(n + 1)).view(sizes);
}
at::Tensor complexes(std::vector<std::int64_t> sizes) {
  return at::complex(floats(sizes), floats(sizes, 0.5).flip({0}));
}
at::Tensor indices(std::vector<std::int64_t> sizes, std::int64_t n) {
  return shuffled(numel(sizes)).remainder(n).view(sizes);
}
at::Tensor bools(std::vector<std::int64_t> sizes) { return shuffled(numel(sizes)).remainder(3).eq(0).view(sizes); }
at::Tensor definite(std::vector<std::int64_t> batch, std::int64_t n) {
  batch.push_back(n);
  batch.push_back(n);
  const at::Tensor some = floats(batch) / 4;
  return at::matmul(some, some.transpose(-2, -1)) + at::eye(n, at::kDouble);
}

namespace {

c10::optional<c10::OperatorHandle> find_operator(const std::string& name) {
  const std::size_t dot = std::min(name.find('.'), name.size());
  return c10::Dispatcher::singleton().findSchema(
      {name.substr(0, dot), dot == name.size() ? std::string() : name.substr(dot + 1)});
}

bool may_lack_a_kernel(const std::string& name) {
  return name.rfind("aten::_fused_", 0) == 0 || name.rfind("aten::_amp_", 0) == 0;
}

// Kernels of newer versions that read where a guessed call has nothing, and so end the program.
bool crashes_when_guessed(const std::string& name) {
  return name.find("batch_norm") != std::string::npos || name.find("attention") != std::string::npos;
}

}  // namespace

const std::vector<Call>& sample_calls() {
  static const std::vector<Call> table = [] {
    std::vector<Call> calls;
    std::set<std::string> written;
    for (Call& call : shaped_calls()) {
      written.insert(call.op);
      // Kernels for GPUs alone, in some versions.
      if (find_operator(call.op) && (!may_lack_a_kernel(call.op) || runs(call))) calls.push_back(std::move(call));
    }
    for (const OpRule& rule : all_rules()) {
      if (written.count(rule.name) || crashes_when_guessed(rule.name)) continue;
      if (const auto op = find_operator(rule.name)) add_by_schema(op->schema(), rule.name, calls);
    }
    return calls;
  }();
  return table;
}

}  // namespace dtensor::testing
