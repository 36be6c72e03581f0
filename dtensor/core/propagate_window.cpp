#include <algorithm>

#include "dtensor/core/propagate_impl.h"

namespace dtensor {
namespace {

// The operand that a tensor argument stands for; past the end where it is absent.
std::size_t operand_of(const OpCall& call, std::size_t entry) {
  for (const ArgRef& arg : call.args) {
    if (!arg.is_tensor) continue;
    if (entry == 0) return arg.count > 0 ? arg.first : call.operands.size();
    --entry;
  }
  return call.operands.size();
}

}  // namespace

std::size_t window_operand(const OpRule& rule, const OpCall& call) { return operand_of(call, *rule.window->over); }

std::int64_t kernel_ndim(const OpRule& rule, const OpCall& call) {
  const std::size_t kernel = operand_of(call, *rule.window->kernel_of);
  if (kernel >= call.operands.size() || !call.operands[kernel]) return 0;
  return std::max<std::int64_t>(0, call.operands[kernel]->meta().ndim() - 2);
}

std::vector<Window> windows_of(const OpRule& rule, const OpCall& call, std::size_t ndim) {
  const WindowArgs& window = *rule.window;
  const auto numbers = [&](const std::optional<std::size_t>& arg) {
    return arg ? call.constant(*arg).as_ints() : Dims();
  };
  Dims kernel = numbers(window.kernel);
  if (window.kernel_of) {
    const std::size_t weight = operand_of(call, *window.kernel_of);
    if (weight >= call.operands.size() || !call.operands[weight]) return std::vector<Window>(ndim);
    const Dims& shape = call.operands[weight]->meta().shape();
    kernel = Dims(shape.end() - kernel_ndim(rule, call), shape.end());
  }
  const Dims stride = numbers(window.stride), padding = numbers(window.padding), dilation = numbers(window.dilation);
  const auto at = [](const Dims& list, std::size_t i, std::int64_t otherwise) {
    return list.empty() ? otherwise : list[std::min(i, list.size() - 1)];
  };
  std::vector<Window> windows;
  for (std::size_t i = 0; i < ndim; ++i) {
    const std::int64_t size = at(kernel, i, 1);
    windows.push_back({size, at(stride, i, size), at(padding, i, 0), at(dilation, i, 1)});
  }
  return windows;
}

}  // namespace dtensor
