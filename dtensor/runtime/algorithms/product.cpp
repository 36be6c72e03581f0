// Products whose kernels want sizes in memory that parts do not have.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "dtensor/runtime/algorithms/algorithm.h"

namespace dtensor {
namespace {

using Results = std::vector<at::Tensor>;

constexpr std::int64_t kBytes = 16;  // of which strides are multiples

std::int64_t rounded_up(std::int64_t size, std::int64_t to) { return (size + to - 1) / to * to; }

at::Tensor run(const AlgorithmCall& call, std::vector<c10::IValue> args) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(call.op().c_str(), "");
  torch::jit::Stack stack = std::move(args);
  op.callBoxed(&stack);
  return stack.back().toTensor();
}

// Matrices whose rows (or columns, where those lie together) begin at such multiples.
at::Tensor aligned(const at::Tensor& x) {
  const std::int64_t rows = x.dim() - 2, columns = x.dim() - 1;
  if (x.stride(rows) == 1 && x.stride(columns) != 1 && x.size(columns) > 1)
    return aligned(x.transpose(rows, columns)).transpose(rows, columns);
  const std::int64_t unit = kBytes / static_cast<std::int64_t>(x.element_size());
  if (x.stride(columns) == 1 && x.stride(rows) % unit == 0) return x;
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes.back() = rounded_up(std::max<std::int64_t>(sizes.back(), 1), unit);
  return at::empty(sizes, x.options()).narrow(columns, 0, x.size(columns)).copy_(x);
}

// (self, mat2, ends of groups, bias, type)
Results grouped_mm(const AlgorithmCall& call) {
  const at::Tensor a = call.tensor(0), b = call.tensor(1);
  const auto options = a.options().dtype(call.type(0));
  if (a.numel() == 0 || b.numel() == 0) return {at::zeros(call.shape(0), options)};
  return {run(call, {aligned(a), aligned(b), call.arg(2), call.arg(3), call.arg(4)})};
}

// With zeros after it, so that it is as long along a dim; scales of one element stay as they are.
at::Tensor padded(const at::Tensor& x, std::int64_t dim, std::int64_t from, std::int64_t to) {
  if (!x.defined() || x.dim() <= dim || x.size(dim) != from || from == to) return x;
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes[static_cast<std::size_t>(dim)] = to;
  const at::Tensor result = at::zeros(sizes, x.options());
  result.narrow(dim, 0, from).copy_(x);
  return result;
}

// (self, mat2, scale of self, scale of mat2, bias, scale of the result, type, fast): what is summed and the columns of
// the result come in sixteens, and the columns of mat2 lie together.
Results scaled_mm(const AlgorithmCall& call) {
  const at::Tensor a = call.tensor(0), b = call.tensor(1);
  const std::int64_t summed = a.size(1), columns = b.size(1);
  const auto options = a.options().dtype(call.type(0));
  if (a.numel() == 0 || b.numel() == 0) return {at::zeros(call.shape(0), options)};
  const std::int64_t k = rounded_up(summed, kBytes), n = rounded_up(columns, kBytes);
  const at::Tensor left = padded(a, 1, summed, k).contiguous();
  const at::Tensor right = padded(padded(b, 0, summed, k), 1, columns, n).t().contiguous().t();
  const at::Tensor bias = padded(call.tensor(4), 0, columns, n);
  // One for every column, not one for all.
  const bool each = call.tensor(2).numel() > 1 || call.tensor(3).numel() > 1;
  const at::Tensor scales = each ? padded(call.tensor(3), 1, columns, n) : call.tensor(3);
  const at::Tensor result =
      run(call, {left, right, call.tensor(2), n == columns ? call.tensor(3) : scales.contiguous(),
                 bias.defined() ? c10::IValue(bias) : c10::IValue(), call.arg(5), call.arg(6), call.arg(7)});
  return {result.narrow(1, 0, columns)};
}

constexpr NamedAlgorithm kTable[] = {{"grouped_mm", grouped_mm}, {"scaled_mm", scaled_mm}};

}  // namespace

std::span<const NamedAlgorithm> product_algorithms() { return kTable; }

}  // namespace dtensor
