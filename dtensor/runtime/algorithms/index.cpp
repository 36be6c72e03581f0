// Looking up and writing along a cut dim: every rank does what falls into its own part.
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/scatter.h>
#include <ATen/ops/scatter_add.h>
#include <ATen/ops/tensor.h>

#include "dtensor/core/boxes.h"
#include "dtensor/core/error.h"
#include "dtensor/runtime/algorithms/algorithm.h"
#include "dtensor/runtime/identity.h"

namespace dtensor {
namespace {

using Results = std::vector<at::Tensor>;

std::vector<Interval> runs_along(const AlgorithmCall& call, std::size_t i, std::int64_t dim) {
  return runs_of(box_of(call.spec(i), call.at()).dims[static_cast<std::size_t>(dim)]);
}

void check_range(const AlgorithmCall& call, const at::Tensor& index, std::int64_t size) {
  if (index.numel() == 0) return;
  const auto [least, most] = at::aminmax(index);
  if (!index.device().is_cpu()) return at::_assert_async(least.ge(0).logical_and_(most.lt(size)));
  const auto low = least.item<std::int64_t>(), high = most.item<std::int64_t>();
  if (low >= 0 && high < size) return;
  fail_invalid(call.op(), {.what = "an index is out of range",
                           .got = std::to_string(low < 0 ? low : high),
                           .expected = "0 to " + std::to_string(size - 1)});
}

}  // namespace

Located locate(const AlgorithmCall& call, std::size_t i, std::int64_t dim, const at::Tensor& index,
               std::int64_t elsewhere) {
  const std::int64_t size = call.spec(i).meta().shape()[dim];
  check_range(call, index, size);
  const std::vector<Interval> runs = runs_along(call, i, dim);
  Located result;
  if (runs.size() <= 1) {
    const Interval run = runs.empty() ? Interval{} : runs[0];
    result.inside = index.ge(run.begin).logical_and_(index.lt(run.end));
    result.position = index.to(at::kLong).sub(run.begin);
  } else {
    const at::Tensor table = at::full({size}, -1, at::kLong);
    std::int64_t position = 0;
    for (const Interval& run : runs) {
      for (std::int64_t at = run.begin; at < run.end; ++at) table.data_ptr<std::int64_t>()[at] = position++;
    }
    result.position = table.to(index.device()).index_select(0, index.reshape({-1})).view(index.sizes());
    result.inside = result.position.ge(0);
  }
  result.position = result.position.masked_fill_(result.inside.logical_not(), elsewhere);
  return result;
}

at::Tensor globally(const AlgorithmCall& call, std::size_t i, std::int64_t dim, const at::Tensor& position) {
  const std::vector<Interval> runs = runs_along(call, i, dim);
  if (runs.empty()) return position;
  if (runs.size() == 1) return position.add(runs[0].begin);
  std::vector<std::int64_t> table;
  for (const Interval& run : runs) {
    for (std::int64_t at = run.begin; at < run.end; ++at) table.push_back(at);
  }
  const at::Tensor indices = at::tensor(table, at::kLong).to(position.device());
  return indices.index_select(0, position.reshape({-1})).view(position.sizes());
}

namespace {

// What is looked up on a rank that holds nothing.
at::Tensor nothing(const AlgorithmCall& call, const at::Tensor& like) {
  const at::Tensor result = at::empty(call.shape(0), like.options());
  fill_identity(result, ReduceOp::kSum);
  return result;
}

// What is not here adds nothing to what is found elsewhere.
at::Tensor without(const at::Tensor& found, const at::Tensor& inside) {
  at::Tensor zero = at::empty({}, found.options());
  fill_identity(zero, ReduceOp::kSum);
  return found.masked_fill_(inside.logical_not(), zero);
}

// (weight, indices, padding, by frequency, sparse)
Results embedding(const AlgorithmCall& call) {
  const at::Tensor weight = call.tensor(0);
  const Located here = locate(call, 0, 0, call.tensor(1), 0);
  if (weight.size(0) == 0) return {nothing(call, weight)};
  return {without(at::embedding(weight, here.position), here.inside.unsqueeze(-1))};
}

// (self, dim, index, sparse)
Results gather(const AlgorithmCall& call) {
  const at::Tensor self = call.tensor(0);
  const std::int64_t dim = call.named_dim(1);
  const Located here = locate(call, 0, dim, call.tensor(2), 0);
  if (self.size(dim) == 0) return {nothing(call, self)};
  return {without(at::gather(self, dim, here.position), here.inside)};
}

// (self, dim, index)
Results index_select(const AlgorithmCall& call) {
  const at::Tensor self = call.tensor(0);
  const std::int64_t dim = call.named_dim(1);
  const Located here = locate(call, 0, dim, call.tensor(2), 0);
  if (self.size(dim) == 0) return {nothing(call, self)};
  std::vector<std::int64_t> along(static_cast<std::size_t>(self.dim()), 1);
  along[static_cast<std::size_t>(dim)] = -1;
  return {without(self.index_select(dim, here.position), here.inside.view(along))};
}

// One place more, where what is for others goes.
at::Tensor with_room(const at::Tensor& self, std::int64_t dim) {
  std::vector<std::int64_t> sizes = self.sizes().vec();
  sizes[static_cast<std::size_t>(dim)] = 1;
  return at::cat({self, at::full(sizes, 0, self.options())}, dim);
}

// (self, dim, index, source, factor)
Results index_add(const AlgorithmCall& call) {
  const at::Tensor self = call.tensor(0);
  const std::int64_t dim = call.named_dim(1), held = self.size(dim);
  const Located here = locate(call, 0, dim, call.tensor(2), held);
  const at::Tensor room = with_room(self, dim);
  return {room.index_add_(dim, here.position, call.tensor(3), call.arg(4).toScalar()).narrow(dim, 0, held)};
}

// scatter and scatter_add: (self, dim, index, source or value)
Results scatter(const AlgorithmCall& call) {
  const at::Tensor self = call.tensor(0), index = call.tensor(2);
  const std::int64_t dim = call.named_dim(1), held = self.size(dim);
  if (index.numel() == 0) return {self.clone()};
  const Located here = locate(call, 0, dim, index, held);
  const at::Tensor room = with_room(self, dim);
  if (call.op().rfind("aten::scatter_add", 0) == 0) {
    room.scatter_add_(dim, here.position, call.tensor(3));
  } else if (call.tensor(3).defined()) {
    room.scatter_(dim, here.position, call.tensor(3));
  } else {
    room.scatter_(dim, here.position, call.arg(3).toScalar());
  }
  return {room.narrow(dim, 0, held)};
}

constexpr NamedAlgorithm kTable[] = {
    {"embedding", embedding},       {"gather", gather},   {"index_add", index_add},
    {"index_select", index_select}, {"scatter", scatter},
};

}  // namespace

std::span<const NamedAlgorithm> index_algorithms() { return kTable; }

}  // namespace dtensor
