// Norms, moments and layer norms over cut dims: every rank reduces what it has, and slices are put together.
#include <ATen/OpMathType.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "dtensor/runtime/algorithms/algorithm.h"

namespace dtensor {
namespace {

using Results = std::vector<at::Tensor>;
using DimList = std::vector<std::int64_t>;

// In the type that a norm is computed in: what its result has, made wider; complex numbers stay complex.
at::Tensor for_norm(const AlgorithmCall& call, const at::Tensor& x) {
  const auto type = at::toOpMathType(call.type(0));
  return x.to(x.is_complex() ? c10::toComplexType(type) : type);
}

// Norms of the parts, in double: their powers overflow no sooner than those of the elements would in one tensor.
Results norm_over(const AlgorithmCall& call, double p, const DimList& dims) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const at::Tensor x = for_norm(call, call.tensor(0));
  const at::Tensor part = x.numel() == 0
                              ? at::full(slice_sizes(x, dims), p < 0 ? kInfinity : 0.0, x.options().dtype(at::kDouble))
                              : at::linalg_vector_norm(x, p, at::IntArrayRef(dims), true).to(at::kDouble);
  if (p == kInfinity) return {call.shaped(call.merged(part, 0, dims, ReduceOp::kMax), 0)};
  if (p == -kInfinity) return {call.shaped(call.merged(part, 0, dims, ReduceOp::kMin), 0)};
  if (p == 0) return {call.shaped(call.merged(part, 0, dims, ReduceOp::kSum), 0)};
  return {call.shaped(call.merged(part.pow(p), 0, dims, ReduceOp::kSum).pow(1 / p), 0)};
}

double number_or(const c10::IValue& value, double otherwise) {
  return value.isNone() ? otherwise : value.toScalar().toDouble();
}

// (self, ord, dims, keepdim, type)
Results vector_norm(const AlgorithmCall& call) {
  return norm_over(call, number_or(call.arg(1), 2), call.named_dims(2));
}

// (self, p), (self, p, type), (self, p, dims, keepdim) and that with a type
Results norm(const AlgorithmCall& call) {
  const bool named = call.num_args() > 2 && call.arg(2).isIntList();
  DimList all(static_cast<std::size_t>(call.tensor(0).dim()));
  std::iota(all.begin(), all.end(), 0);
  return norm_over(call, number_or(call.arg(1), 2), named ? call.named_dims(2) : all);
}

// Over all ranks' elements of a slice: how many, their mean, the sum of the squares of what is left without it.
struct Moments {
  double count;
  at::Tensor mean;
  at::Tensor squares;
};

Moments moments(const AlgorithmCall& call, const at::Tensor& x, const DimList& dims) {
  double mine = 1, all = 1;
  for (const std::int64_t d : dims) {
    mine *= static_cast<double>(x.size(d));
    all *= static_cast<double>(call.spec(0).meta().shape()[d]);
  }
  const DimList sizes = slice_sizes(x, dims);
  at::Tensor variance = at::zeros(sizes, x.options().dtype(c10::toRealValueType(x.scalar_type())));
  at::Tensor mean = at::zeros(sizes, x.options());
  if (x.numel() > 0) std::tie(variance, mean) = at::var_mean(x, at::IntArrayRef(dims), false, true);
  const at::Tensor together = call.merged(mean.mul(mine / all), 0, dims, ReduceOp::kSum);
  const at::Tensor apart = at::sub(mean, together).abs().square_();
  return {all, together, call.merged(variance.add(apart).mul_(mine), 0, dims, ReduceOp::kSum)};
}

// (self, dims, correction, keepdim), and the mean where it is asked for
Results variance(const AlgorithmCall& call, bool root) {
  const Moments m = moments(call, widened(call.tensor(0)), call.named_dims(1));
  const double divisor = std::max(0.0, m.count - number_or(call.arg(2), 1));
  at::Tensor result = m.squares.div(divisor);
  if (root) result = result.sqrt_();
  if (call.decision().outputs.size() == 1) return {call.shaped(result, 0)};
  return {call.shaped(result, 0), call.shaped(m.mean, 1)};
}

Results var(const AlgorithmCall& call) { return variance(call, false); }
Results standard(const AlgorithmCall& call) { return variance(call, true); }

// The last dims of argument i, as many as a list of sizes has.
DimList last_dims(const AlgorithmCall& call, std::size_t i, std::size_t sizes) {
  const std::int64_t ndim = call.tensor(i).dim();
  DimList dims(call.arg(sizes).toIntVector().size());
  std::iota(dims.begin(), dims.end(), ndim - static_cast<std::int64_t>(dims.size()));
  return dims;
}

// (input, sizes, weight, bias, eps)
Results layer_norm(const AlgorithmCall& call) {
  const at::Tensor x = widened(call.tensor(0));
  const Moments m = moments(call, x, last_dims(call, 0, 1));
  const at::Tensor scale = m.squares.div(m.count).add_(call.arg(4).toDouble()).rsqrt_();
  at::Tensor y = at::sub(x, m.mean).mul_(scale);
  if (call.tensor(2).defined()) y = y.mul_(widened(call.tensor(2)));
  if (call.tensor(3).defined()) y = y.add_(widened(call.tensor(3)));
  return {y, call.shaped(m.mean, 1), call.shaped(scale, 2)};
}

// (gradient, input, sizes, mean, rstd, weight, bias, which of the three)
Results layer_norm_backward(const AlgorithmCall& call) {
  const DimList dims = last_dims(call, 1, 2);
  const auto& wanted = call.decision().outputs;
  const at::Tensor gradient = widened(call.tensor(0));
  const at::Tensor scale = widened(call.tensor(4));
  const at::Tensor y = at::sub(widened(call.tensor(1)), widened(call.tensor(3))).mul_(scale);
  Results results(3);
  if (wanted[0]) {
    double count = 1;
    for (const std::int64_t d : dims) count *= static_cast<double>(call.spec(1).meta().shape()[d]);
    const at::Tensor inner = call.tensor(5).defined() ? gradient.mul(widened(call.tensor(5))) : gradient;
    const auto mean = [&](const at::Tensor& t) {
      return call.merged(t.sum(dims, true), 0, dims, ReduceOp::kSum).div_(count);
    };
    const at::Tensor offset = mean(inner), slope = mean(inner.mul(y));
    results[0] = at::sub(inner, offset).sub_(y.mul(slope)).mul_(scale);
  }
  DimList batch(static_cast<std::size_t>(dims.empty() ? y.dim() : dims[0]));
  std::iota(batch.begin(), batch.end(), 0);
  const auto over_batch = [&](const at::Tensor& t) { return batch.empty() ? t : t.sum(batch); };
  if (wanted[1]) results[1] = over_batch(gradient.mul(y));
  if (wanted[2]) results[2] = over_batch(gradient);
  return results;
}

constexpr NamedAlgorithm kTable[] = {
    {"layer_norm", layer_norm},
    {"layer_norm_backward", layer_norm_backward},
    {"norm", norm},
    {"std", standard},
    {"var", var},
    {"vector_norm", vector_norm},
};

}  // namespace

std::span<const NamedAlgorithm> norm_algorithms() { return kTable; }

}  // namespace dtensor
