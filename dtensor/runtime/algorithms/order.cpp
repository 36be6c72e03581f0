// Largest and smallest elements, where they are, and running sums along a cut dim.
#include <ATen/OpMathType.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/max.h>
#include <ATen/ops/min.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <numeric>

#include "dtensor/runtime/algorithms/algorithm.h"
#include "dtensor/runtime/identity.h"

namespace dtensor {
namespace {

using Results = std::vector<at::Tensor>;
using DimList = std::vector<std::int64_t>;

constexpr std::int64_t kEverything = -1;  // in place of a dim

struct Found {
  at::Tensor value;
  at::Tensor position;  // a global index
};

// The global row-major index of a local one.
at::Tensor flat_globally(const AlgorithmCall& call, const at::Tensor& x, const at::Tensor& flat) {
  const Dims& shape = call.spec(0).meta().shape();
  at::Tensor rest = flat, result = at::zeros_like(flat);
  std::int64_t stride = 1;
  for (std::int64_t d = x.dim(); d-- > 0;) {
    result = result.add(globally(call, 0, d, rest.remainder(x.size(d))), stride);
    rest = rest.div(x.size(d), "floor");
    stride *= shape[d];
  }
  return result;
}

// This rank's extreme elements of every slice along a dim (or of everything), and the first place of each.
Found find_here(const AlgorithmCall& call, std::int64_t dim, ReduceOp op) {
  const at::Tensor x = call.tensor(0);
  const DimList sizes = slice_sizes(x, call.named_dims(1));
  if (x.numel() == 0) {
    const at::Tensor nothing = at::empty(sizes, x.options());
    fill_identity(nothing, op);
    return {nothing, at::full(sizes, call.spec(0).meta().numel(), x.options().dtype(at::kLong))};
  }
  const auto extreme_of = [&](const at::Tensor& t, std::int64_t d) {
    return op == ReduceOp::kMax ? at::max(t, d, true) : at::min(t, d, true);
  };
  if (dim != kEverything) {
    const auto [value, position] = extreme_of(x, dim);
    return {value, globally(call, 0, dim, position)};
  }
  const auto [value, position] = extreme_of(x.reshape({-1}), 0);
  return {value.reshape(sizes), flat_globally(call, x, position).reshape(sizes)};
}

// The first NaN wins, else the first of the extreme elements: of those who have it, the lowest place.
Found find_extreme(const AlgorithmCall& call, std::int64_t dim, ReduceOp op) {
  const DimList over = call.named_dims(1);
  const Found mine = find_here(call, dim, op);
  const at::Tensor value = call.merged(mine.value, 0, over, op);
  const at::Tensor is_nan = mine.value.ne(mine.value).logical_and_(value.ne(value));
  const at::Tensor has_it = mine.value.eq(value).logical_or_(is_nan);
  const at::Tensor nowhere = at::full({}, call.spec(0).meta().numel(), mine.position.options());
  return {value, call.merged(at::where(has_it, mine.position, nowhere), 0, over, ReduceOp::kMin)};
}

// (self, dim, keepdim); everything without a dim
Results arg_extreme(const AlgorithmCall& call, ReduceOp op) {
  const std::int64_t dim = call.arg(1).isNone() ? kEverything : call.named_dim(1);
  return {call.shaped(find_extreme(call, dim, op).position, 0)};
}
Results argmax(const AlgorithmCall& call) { return arg_extreme(call, ReduceOp::kMax); }
Results argmin(const AlgorithmCall& call) { return arg_extreme(call, ReduceOp::kMin); }

Results extreme_along(const AlgorithmCall& call, ReduceOp op) {
  const Found found = find_extreme(call, call.named_dim(1), op);
  return {call.shaped(found.value, 0), call.shaped(found.position, 1)};
}
Results max_dim(const AlgorithmCall& call) { return extreme_along(call, ReduceOp::kMax); }
Results min_dim(const AlgorithmCall& call) { return extreme_along(call, ReduceOp::kMin); }

// How much of a dim each piece holds.
DimList held_by(const AlgorithmCall& call, const std::vector<Dims>& pieces, std::int64_t dim) {
  DimList held;
  for (const Dims& at : pieces) held.push_back(call.spec(0).local_shape(at)[dim]);
  return held;
}

at::Tensor padded(const at::Tensor& t, std::int64_t dim, std::int64_t size) {
  if (t.size(dim) == size) return t;
  DimList sizes = t.sizes().vec();
  sizes[static_cast<std::size_t>(dim)] = size - t.size(dim);
  return at::cat({t, at::zeros(sizes, t.options())}, dim);
}

// (self, k, dim, largest, sorted): the best k of everyone's best k.
Results topk(const AlgorithmCall& call) {
  const at::Tensor x = call.tensor(0);
  const std::int64_t k = call.arg(1).toInt(), dim = call.named_dim(2);
  const bool largest = call.arg(3).toBool(), sorted = call.arg(4).toBool();
  const DimList held = held_by(call, call.pieces(), dim);
  const std::int64_t most = std::min(k, *std::max_element(held.begin(), held.end()));
  const auto [value, position] = at::topk(x, std::min(k, x.size(dim)), dim, largest, true);
  at::Tensor values = call.gathered(padded(value, dim, most), 0, dim);
  at::Tensor positions = call.gathered(padded(globally(call, 0, dim, position), dim, most), 0, dim);
  DimList real;  // without what was padded
  for (std::size_t p = 0; p < held.size(); ++p) {
    for (std::int64_t i = 0; i < std::min(k, held[p]); ++i) real.push_back(static_cast<std::int64_t>(p) * most + i);
  }
  if (static_cast<std::int64_t>(real.size()) < values.size(dim)) {
    const at::Tensor columns = at::tensor(real, at::kLong).to(x.device());
    values = values.index_select(dim, columns);
    positions = positions.index_select(dim, columns);
  }
  const auto [best, column] = at::topk(values, k, dim, largest, sorted);
  return {best, positions.gather(dim, column)};
}

// (self, dim, type): what the ranks before this one have in all is added to its own running sum.
Results cumsum(const AlgorithmCall& call) {
  const at::Tensor x = call.tensor(0);
  const std::int64_t dim = call.named_dim(1), mine = x.size(dim);
  const at::Tensor sums = at::cumsum(x, dim, at::toOpMathType(call.type(0)));
  const at::Tensor total = mine > 0 ? sums.narrow(dim, mine - 1, 1) : at::zeros(slice_sizes(x, {dim}), sums.options());
  const at::Tensor totals = call.gathered(total.contiguous(), 0, dim);
  const std::vector<Dims> pieces = call.pieces();
  const auto first = [&](const Dims& at) { return call.spec(0).local(at).offset[dim]; };
  DimList before;
  for (std::size_t p = 0; p < pieces.size(); ++p) {
    if (first(pieces[p]) < first(call.at())) before.push_back(static_cast<std::int64_t>(p));
  }
  if (before.empty() || mine == 0) return {sums};
  const at::Tensor columns = at::tensor(before, at::kLong).to(x.device());
  return {sums.add_(totals.index_select(dim, columns).sum(dim, true))};
}

// (self, number of bins, min, max): where no range is given, the one of all elements.
Results histc(const AlgorithmCall& call) {
  const at::Tensor x = call.tensor(0);
  double low = call.arg(2).toScalar().toDouble(), high = call.arg(3).toScalar().toDouble();
  if (low == high) {
    DimList all(static_cast<std::size_t>(x.dim()));
    std::iota(all.begin(), all.end(), 0);
    low = call.merged(extreme(x, all, ReduceOp::kMin), 0, all, ReduceOp::kMin).item<double>();
    high = call.merged(extreme(x, all, ReduceOp::kMax), 0, all, ReduceOp::kMax).item<double>();
    if (low == high) low -= 1, high += 1;
  }
  return {call.merged_result(at::histc(x, call.arg(1).toInt(), low, high), 0, ReduceOp::kSum)};
}

constexpr NamedAlgorithm kTable[] = {
    {"argmax", argmax},   {"argmin", argmin},   {"cumsum", cumsum}, {"histc", histc},
    {"max_dim", max_dim}, {"min_dim", min_dim}, {"topk", topk},
};

}  // namespace

std::span<const NamedAlgorithm> order_algorithms() { return kTable; }

}  // namespace dtensor
