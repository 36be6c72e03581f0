// Softmax and its kin over a cut dim: of every slice the ranks tell each other the largest element and the sum.
#include <ATen/OpMathType.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/real.h>
#include <ATen/ops/sub.h>

#include <limits>

#include "dtensor/runtime/algorithms/algorithm.h"

namespace dtensor {
namespace {

using Results = std::vector<at::Tensor>;

// x minus the largest element of its slice: NaN where that is infinite, as in libtorch.
at::Tensor shifted(const AlgorithmCall& call, const at::Tensor& x, std::int64_t dim) {
  return at::sub(x, call.merged(extreme(x, {dim}, ReduceOp::kMax), 0, {dim}, ReduceOp::kMax));
}

at::Tensor sum_over(const AlgorithmCall& call, const at::Tensor& x, std::int64_t dim) {
  return call.merged(x.sum(dim, true), 0, {dim}, ReduceOp::kSum);
}

Results softmax(const AlgorithmCall& call) {
  const std::int64_t dim = call.named_dim(1);
  const at::Tensor e = shifted(call, widened(call.tensor(0)), dim).exp_();
  return {e.div_(sum_over(call, e, dim))};
}

Results log_softmax(const AlgorithmCall& call) {
  const std::int64_t dim = call.named_dim(1);
  const at::Tensor z = shifted(call, widened(call.tensor(0)), dim);
  return {z.sub_(sum_over(call, z.exp(), dim).log_())};
}

// Slices of nothing but -inf become zeros.
Results safe_softmax(const AlgorithmCall& call) {
  const std::int64_t dim = call.named_dim(1);
  const at::Tensor x = call.tensor(0).to(at::toOpMathType(call.type(0)));
  const at::Tensor most = call.merged(extreme(x, {dim}, ReduceOp::kMax), 0, {dim}, ReduceOp::kMax);
  const at::Tensor e = at::sub(x, most).exp_();
  const at::Tensor nothing = most.eq(-std::numeric_limits<double>::infinity());
  return {e.div_(sum_over(call, e, dim)).masked_fill_(nothing, 0)};
}

// (gradient, result, dim, input type)
Results softmax_backward(const AlgorithmCall& call) {
  const std::int64_t dim = call.named_dim(2);
  const at::Tensor gradient = widened(call.tensor(0)), y = widened(call.tensor(1));
  return {at::sub(gradient, sum_over(call, gradient.mul(y), dim)).mul_(y)};
}

Results log_softmax_backward(const AlgorithmCall& call) {
  const std::int64_t dim = call.named_dim(2);
  const at::Tensor gradient = widened(call.tensor(0)), y = widened(call.tensor(1));
  return {at::sub(gradient, y.exp().mul_(sum_over(call, gradient, dim)))};
}

Results logsumexp(const AlgorithmCall& call) {
  const std::vector<std::int64_t> dims = call.named_dims(1);
  at::Tensor x = call.tensor(0);
  x = x.to(at::toOpMathType(x.is_complex() ? x.scalar_type() : call.type(0)));
  const at::Tensor most =
      call.merged(extreme(x.is_complex() ? at::real(x) : x, dims, ReduceOp::kMax), 0, dims, ReduceOp::kMax);
  const at::Tensor shift = most.masked_fill(most.abs().eq(std::numeric_limits<double>::infinity()), 0);
  const at::Tensor sum = call.merged(at::sub(x, shift).exp_().sum(dims, true), 0, dims, ReduceOp::kSum);
  return {call.shaped(sum.log().add_(shift), 0)};
}

constexpr NamedAlgorithm kTable[] = {
    {"log_softmax", log_softmax}, {"log_softmax_backward", log_softmax_backward},
    {"logsumexp", logsumexp},     {"safe_softmax", safe_softmax},
    {"softmax", softmax},         {"softmax_backward", softmax_backward},
};

}  // namespace

std::span<const NamedAlgorithm> softmax_algorithms() { return kTable; }

}  // namespace dtensor
