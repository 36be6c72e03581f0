// Norms, moments and normalization over cut dims: every rank reduces what it has, and slices are put together.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
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

double elements_along(const Spec& spec, const DimList& dims) {
  double count = 1;
  for (const std::int64_t d : dims) count *= static_cast<double>(spec.meta().shape()[d]);
  return count;
}

// Over all ranks' elements of a slice: how many, their mean, the sum of the squares of what is left without it.
struct Moments {
  double count;
  at::Tensor mean;
  at::Tensor squares;
};

Moments moments(const AlgorithmCall& call, const at::Tensor& x, const DimList& dims) {
  const double all = elements_along(call.spec(0), dims);
  double mine = 1;
  for (const std::int64_t d : dims) mine *= static_cast<double>(x.size(d));
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

// Summed over the dims before these.
at::Tensor over_batch(const at::Tensor& x, const DimList& dims) {
  DimList batch(static_cast<std::size_t>(dims.empty() ? x.dim() : dims[0]));
  std::iota(batch.begin(), batch.end(), 0);
  return batch.empty() ? x : x.sum(batch);
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
    const double count = elements_along(call.spec(1), dims);
    const at::Tensor inner = call.tensor(5).defined() ? gradient.mul(widened(call.tensor(5))) : gradient;
    const auto mean = [&](const at::Tensor& t) {
      return call.merged(t.sum(dims, true), 0, dims, ReduceOp::kSum).div_(count);
    };
    const at::Tensor offset = mean(inner), slope = mean(inner.mul(y));
    results[0] = at::sub(inner, offset).sub_(y.mul(slope)).mul_(scale);
  }
  if (wanted[1]) results[1] = over_batch(gradient.mul(y), dims);
  if (wanted[2]) results[2] = over_batch(gradient, dims);
  return results;
}

DimList dims_but(const at::Tensor& x, std::int64_t kept) {
  DimList dims;
  for (std::int64_t d = 0; d < x.dim(); ++d) {
    if (d != kept) dims.push_back(d);
  }
  return dims;
}

// One number for each channel, widened, as a factor of x.
at::Tensor of_channels(const at::Tensor& numbers, const at::Tensor& x) {
  DimList sizes(static_cast<std::size_t>(x.dim()), 1);
  sizes[1] = numbers.numel();
  return widened(numbers).reshape(sizes);
}

// (input, weight, bias, running mean, running variance, training, momentum, eps), of which some forms lack the
// statistics that run on, and one says by its name that it trains. Channels may be cut, on other mesh dims: they do not
// meet.
Results batch_norm(const AlgorithmCall& call) {
  const std::size_t args = call.num_args();
  const bool runs_on = args > 6;
  const bool training = args == 7 || call.arg(args - 3).toBool();
  const double momentum = call.arg(args - 2).toDouble(), eps = call.arg(args - 1).toDouble();
  const at::Tensor x = widened(call.tensor(0));
  at::Tensor mean, scale;
  Results results(call.decision().outputs.size());
  if (training) {
    const Moments m = moments(call, x, dims_but(x, 1));
    mean = m.mean;
    scale = m.squares.div(m.count).add_(eps).rsqrt_();
    results[1] = call.shaped(mean, 1);
    results[2] = call.shaped(scale, 2);
    const auto run_on = [&](const at::Tensor& running, const at::Tensor& now) {
      if (running.defined())
        running.mul_(1 - momentum).add_(now.reshape(running.sizes()).to(running.options()), momentum);
    };
    if (runs_on) run_on(call.tensor(3), mean);
    if (runs_on) run_on(call.tensor(4), m.squares.div(m.count - 1));
  } else {
    mean = of_channels(call.tensor(3), x);
    scale = of_channels(call.tensor(4), x).add(eps).rsqrt_();
    for (const std::size_t k : {1, 2}) results[k] = at::zeros(call.shape(k), x.options());
  }
  if (results.size() > 3) results[3] = at::zeros(call.shape(3), x.options());
  results[0] = at::sub(x, mean).mul_(scale);
  if (call.tensor(1).defined()) results[0].mul_(of_channels(call.tensor(1), x));
  if (call.tensor(2).defined()) results[0].add_(of_channels(call.tensor(2), x));
  return results;
}

// (gradient, input, weight, running mean, running variance, mean, scale, training, eps, which of the three)
Results batch_norm_backward(const AlgorithmCall& call) {
  const bool training = call.arg(7).toBool();
  const auto& wanted = call.decision().outputs;
  const at::Tensor gradient = widened(call.tensor(0)), x = widened(call.tensor(1));
  const at::Tensor mean = of_channels(call.tensor(training ? 5 : 3), x);
  const at::Tensor scale =
      training ? of_channels(call.tensor(6), x) : of_channels(call.tensor(4), x).add(call.arg(8).toDouble()).rsqrt_();
  const at::Tensor y = at::sub(x, mean).mul_(scale);
  const DimList dims = dims_but(x, 1);
  at::Tensor offset, slope;  // sums of the gradient, and of it times y
  if (wanted[1] || wanted[2] || training) {
    const at::Tensor mine = at::cat({gradient.sum(dims, true), gradient.mul(y).sum(dims, true)});
    const at::Tensor sums = call.merged(mine, 0, dims, ReduceOp::kSum);
    offset = sums.narrow(0, 0, 1);
    slope = sums.narrow(0, 1, 1);
  }
  Results results(3);
  if (wanted[0]) {
    results[0] = gradient;
    if (training) {
      const double count = elements_along(call.spec(1), dims);
      results[0] = at::sub(gradient, offset.div(count)).sub_(y.mul(slope.div(count)));
    }
    results[0] = results[0].mul(call.tensor(2).defined() ? scale.mul(of_channels(call.tensor(2), x)) : scale);
  }
  if (wanted[1]) results[1] = call.shaped(slope, 1);
  if (wanted[2]) results[2] = call.shaped(offset, 2);
  return results;
}

// Channels in groups, wherever channels and planes are cut. What is summed up for each sample and channel, [n,c], is
// put together for each sample and group, as many as the call says.
class Groups {
 public:
  Groups(const AlgorithmCall& call, std::size_t input, std::int64_t groups)
      : call_(call), input_(input), groups_(groups), dims_(dims_but(call.tensor(input), 0)) {
    const at::Tensor x = call.tensor(input);
    const std::int64_t channels = call.spec(input).meta().shape()[1];
    of_channel_ = globally(call, input, 1, at::arange(x.size(1), x.options().dtype(at::kLong)))
                      .div(std::max<std::int64_t>(1, channels / groups), "floor");
    count_ = elements_along(call.spec(input), dims_) / static_cast<double>(groups);
  }

  // Several sums at once, each [n,groups] of all ranks.
  Results merged(const Results& parts) const {
    Results some;
    for (const at::Tensor& part : parts) {
      some.push_back(at::zeros({part.size(0), groups_}, part.options()).index_add_(1, of_channel_, part));
    }
    const at::Tensor mine = at::cat(some, 1);
    DimList sizes(static_cast<std::size_t>(call_.tensor(input_).dim()), 1);
    sizes[0] = mine.size(0);
    sizes[1] = mine.size(1);
    return call_.merged(mine.reshape(sizes), input_, dims_, ReduceOp::kSum).reshape(mine.sizes()).split(groups_, 1);
  }
  // [n,groups] for each channel, as a factor of [n,c,...].
  at::Tensor spread(const at::Tensor& numbers) const { return numbers.index_select(1, of_channel_).unsqueeze(2); }
  double count() const { return count_; }  // elements of a group

 private:
  const AlgorithmCall& call_;
  std::size_t input_;
  std::int64_t groups_;
  DimList dims_;
  at::Tensor of_channel_;
  double count_ = 0;
};

at::Tensor planes_as_one(const at::Tensor& x) { return x.dim() == 2 ? x.unsqueeze(2) : x.flatten(2); }

// (input, weight, bias, N, C, HxW, groups, eps)
Results group_norm(const AlgorithmCall& call) {
  const Groups groups(call, 0, call.arg(6).toInt());
  const at::Tensor x = planes_as_one(widened(call.tensor(0)));
  const at::Tensor mean = groups.merged({x.sum(2)})[0].div(groups.count());
  const at::Tensor centered = at::sub(x, groups.spread(mean));
  const at::Tensor squares = groups.merged({centered.square().sum(2)})[0];
  const at::Tensor scale = squares.div(groups.count()).add_(call.arg(7).toDouble()).rsqrt_();
  at::Tensor y = centered.mul_(groups.spread(scale));
  if (call.tensor(1).defined()) y = y.mul_(of_channels(call.tensor(1), y));
  if (call.tensor(2).defined()) y = y.add_(of_channels(call.tensor(2), y));
  return {call.shaped(y, 0), call.shaped(mean, 1), call.shaped(scale, 2)};
}

// (gradient, input, mean, scale, weight, N, C, HxW, groups, which of the three)
Results group_norm_backward(const AlgorithmCall& call) {
  const auto& wanted = call.decision().outputs;
  const Groups groups(call, 1, call.arg(8).toInt());
  const at::Tensor gradient = planes_as_one(widened(call.tensor(0)));
  const at::Tensor scale = groups.spread(widened(call.tensor(3)));
  const at::Tensor y =
      at::sub(planes_as_one(widened(call.tensor(1))), groups.spread(widened(call.tensor(2)))).mul_(scale);
  Results results(3);
  if (wanted[0]) {
    const at::Tensor inner = call.tensor(4).defined() ? gradient.mul(of_channels(call.tensor(4), y)) : gradient;
    const Results sums = groups.merged({inner.sum(2), inner.mul(y).sum(2)});
    const auto mean = [&](const at::Tensor& sum) { return groups.spread(sum.div(groups.count())); };
    results[0] = call.shaped(at::sub(inner, mean(sums[0])).sub_(y.mul(mean(sums[1]))).mul_(scale), 0);
  }
  if (!wanted[1] && !wanted[2]) return results;
  const DimList dims = dims_but(call.tensor(1), 1);
  const DimList over = {0, 2};
  DimList sizes(static_cast<std::size_t>(call.tensor(1).dim()), 1);
  sizes[0] = 2;
  sizes[1] = y.size(1);
  const at::Tensor mine = at::stack({gradient.mul(y).sum(over), gradient.sum(over)}).reshape(sizes);
  const at::Tensor sums = call.merged(mine, 0, dims, ReduceOp::kSum);
  if (wanted[1]) results[1] = call.shaped(sums.select(0, 0), 1);
  if (wanted[2]) results[2] = call.shaped(sums.select(0, 1), 2);
  return results;
}

// What is added to the mean square where a call does not say.
double smallest_step(c10::ScalarType type) {
  double step = 0;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, type, "rms_norm",
                                  [&] { step = std::numeric_limits<scalar_t>::epsilon(); });
  return step;
}

// (input, sizes, weight, eps)
Results rms_norm(const AlgorithmCall& call) {
  const at::Tensor x = widened(call.tensor(0));
  const DimList dims = last_dims(call, 0, 1);
  const at::Tensor squares = call.merged(x.square().sum(dims, true), 0, dims, ReduceOp::kSum);
  const double eps = call.arg(3).isNone() ? smallest_step(call.tensor(0).scalar_type()) : call.arg(3).toDouble();
  const at::Tensor scale = squares.div(elements_along(call.spec(0), dims)).add_(eps).rsqrt_();
  at::Tensor y = x.mul(scale);
  if (call.tensor(2).defined()) y = y.mul_(widened(call.tensor(2)));
  return {y, call.shaped(scale, 1)};
}

// (gradient, input, sizes, scale, weight, which of the two)
Results rms_norm_backward(const AlgorithmCall& call) {
  const auto& wanted = call.decision().outputs;
  const DimList dims = last_dims(call, 1, 2);
  const at::Tensor gradient = widened(call.tensor(0)), scale = widened(call.tensor(3));
  const at::Tensor y = widened(call.tensor(1)).mul(scale);
  Results results(2);
  if (wanted[0]) {
    const at::Tensor inner = call.tensor(4).defined() ? gradient.mul(widened(call.tensor(4))) : gradient;
    const at::Tensor sum = call.merged(inner.mul(y).sum(dims, true), 0, dims, ReduceOp::kSum);
    results[0] = at::sub(inner, y.mul(sum.div(elements_along(call.spec(1), dims)))).mul_(scale);
  }
  if (wanted[1]) results[1] = over_batch(gradient.mul(y), dims);
  return results;
}

constexpr NamedAlgorithm kTable[] = {
    {"batch_norm", batch_norm},
    {"batch_norm_backward", batch_norm_backward},
    {"group_norm", group_norm},
    {"group_norm_backward", group_norm_backward},
    {"layer_norm", layer_norm},
    {"layer_norm_backward", layer_norm_backward},
    {"norm", norm},
    {"rms_norm", rms_norm},
    {"rms_norm_backward", rms_norm_backward},
    {"std", standard},
    {"var", var},
    {"vector_norm", vector_norm},
};

}  // namespace

std::span<const NamedAlgorithm> norm_algorithms() { return kTable; }

}  // namespace dtensor
