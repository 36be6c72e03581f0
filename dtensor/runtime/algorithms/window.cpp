// Convolution and pooling over cut dims: every rank fetches what the windows of its outputs read beyond its own part,
// and gives back what their gradients add there.
#include <ATen/ops/avg_pool2d.h>
#include <ATen/ops/avg_pool2d_backward.h>
#include <ATen/ops/avg_pool3d.h>
#include <ATen/ops/avg_pool3d_backward.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/max_pool2d_with_indices.h>
#include <ATen/ops/max_pool3d_with_indices.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

#include "dtensor/runtime/algorithms/algorithm.h"
#include "dtensor/runtime/identity.h"

namespace dtensor {
namespace {

using Results = std::vector<at::Tensor>;
using Sizes = std::vector<std::int64_t>;
using Region = std::vector<Interval>;  // along the last dims

Region common(const Region& a, const Region& b) {
  Region result;
  for (std::size_t i = 0; i < a.size(); ++i) result.push_back(common(a[i], b[i]));
  return result;
}

bool is_empty(const Region& region) {
  return std::any_of(region.begin(), region.end(), [](const Interval& one) { return one.empty(); });
}

std::int64_t count(const Region& region) {
  std::int64_t n = 1;
  for (const Interval& one : region) n *= one.size();
  return n;
}

// What windows over a cut tensor read. Its parts and what is needed of it are regions of its last dims: along those
// that the algorithm's mesh dims cut, what the windows of this rank's outputs span, padding included; along others
// everything.
class Halo {
 public:
  // `over` and `outputs` are cut alike; argument i is the one that the windows slide over.
  Halo(const AlgorithmCall& call, std::size_t i, const Spec& outputs)
      : call_(call), i_(i), windows_(call.decision().local.windows), pieces_(call.pieces()) {
    const Spec& over = call.spec(i);
    first_ = over.meta().ndim() - static_cast<std::int64_t>(windows_.size());
    for (std::size_t w = 0; w < windows_.size(); ++w) cut_.push_back(is_cut(over.dims()[dim(w)]));
    me_ = static_cast<std::size_t>(std::find(pieces_.begin(), pieces_.end(), call.at()) - pieces_.begin());
    for (std::size_t p = 0; p < pieces_.size(); ++p) {
      add_member(over, over.local(pieces_[p]), outputs.local(pieces_[p]));
    }
  }

  const std::vector<Window>& windows() const { return windows_; }
  std::int64_t size(std::size_t w) const { return call_.spec(i_).meta().shape()[dim(w)]; }  // of the whole
  const Interval& outputs(std::size_t w) const { return outputs_[w]; }                      // of this rank
  const Interval& reads(std::size_t w) const { return reads_[w]; }                          // padding included

  // The padding that is left to the kernel.
  Sizes padding() const {
    Sizes result;
    for (std::size_t w = 0; w < windows_.size(); ++w) result.push_back(cut_[w] ? 0 : windows_[w].padding);
    return result;
  }

  // The sizes of what this rank's windows read, for a part of the tensor.
  Sizes sizes(const at::Tensor& part) const {
    Sizes result = part.sizes().vec();
    for (std::size_t w = 0; w < windows_.size(); ++w) result[dim(w)] = reads_[w].size();
    return result;
  }

  // It, with `fill` where it is padding; a view of the part where that is all.
  at::Tensor fetched(const at::Tensor& part, const at::Scalar& fill) const {
    const bool padded = needed_[me_] != reads_;
    if (most_ == 0 && !padded) return narrowed(part, reads_, held_[me_]);
    const at::Tensor result =
        padded ? at::full(sizes(part), fill, part.options()) : at::empty(sizes(part), part.options());
    std::vector<at::Tensor> sent;
    Sizes counts;
    std::vector<Region> from;
    for (std::size_t p = 0; p < pieces_.size(); ++p) {
      sent.push_back(narrowed(part, common(held_[me_], needed_[p]), held_[me_]));
      from.push_back(common(needed_[me_], held_[p]));
      counts.push_back(narrowed(result, from.back(), reads_).numel());
    }
    const std::vector<at::Tensor> got = moved(sent, counts, part);
    for (std::size_t p = 0; p < pieces_.size(); ++p) {
      const at::Tensor place = narrowed(result, from[p], reads_);
      if (place.numel() > 0) place.copy_(got[p].view(place.sizes()));
    }
    return result;
  }

  // The other way: of a gradient of what was read, every rank gets what falls into its own part, added up.
  at::Tensor given_back(const at::Tensor& read, at::IntArrayRef part_sizes) const {
    const at::Tensor result = at::zeros(part_sizes, read.options());
    std::vector<at::Tensor> sent;
    Sizes counts;
    std::vector<Region> to;
    for (std::size_t p = 0; p < pieces_.size(); ++p) {
      sent.push_back(narrowed(read, common(needed_[me_], held_[p]), reads_));
      to.push_back(common(held_[me_], needed_[p]));
      counts.push_back(narrowed(result, to.back(), held_[me_]).numel());
    }
    const std::vector<at::Tensor> got = moved(sent, counts, read);
    for (std::size_t p = 0; p < pieces_.size(); ++p) {
      const at::Tensor place = narrowed(result, to[p], held_[me_]);
      if (place.numel() > 0) place.add_(got[p].view(place.sizes()));
    }
    return result;
  }

 private:
  std::size_t dim(std::size_t w) const { return static_cast<std::size_t>(first_) + w; }

  bool is_cut(const DimLayout& dim) const {
    const MeshDims& ours = call_.decision().local.algorithm_dims;
    const auto& cuts = dim[0].cuts;
    return std::any_of(cuts.begin(), cuts.end(),
                       [&](const Cut& one) { return std::find(ours.begin(), ours.end(), one.mesh_dim) != ours.end(); });
  }

  void add_member(const Spec& over, const Spec::Local& part, const Spec::Local& made) {
    Region held, needed, reads, all_made;
    for (std::size_t w = 0; w < windows_.size(); ++w) {
      const std::size_t d = dim(w), out = d + made.shape.size() - part.shape.size();
      const std::int64_t size = over.meta().shape()[d];
      const Interval outputs{made.offset[out], made.offset[out] + made.shape[out]};
      all_made.push_back(outputs);
      held.push_back({part.offset[d], part.offset[d] + part.shape[d]});
      reads.push_back(cut_[w] ? windows_[w].read_by(outputs) : Interval{0, size});
      needed.push_back(common(reads.back(), {0, size}));
    }
    // Where there is no output along one dim nothing is read along the others.
    if (is_empty(needed)) needed.assign(windows_.size(), Interval{});
    if (held_.size() == me_) {
      reads_ = std::move(reads);
      outputs_ = std::move(all_made);
    }
    most_ = std::max(most_, count(needed) - count(common(needed, held)));
    held_.push_back(std::move(held));
    needed_.push_back(std::move(needed));
  }

  // A region of what has `whole` along the last dims.
  at::Tensor narrowed(const at::Tensor& tensor, const Region& region, const Region& whole) const {
    at::Tensor result = tensor;
    for (std::size_t w = 0; w < windows_.size(); ++w) {
      const bool none = is_empty(region);
      result = result.narrow(static_cast<std::int64_t>(dim(w)), none ? 0 : region[w].begin - whole[w].begin,
                             none ? 0 : region[w].size());
    }
    return result;
  }

  // Nothing is sent where every rank has what it needs.
  std::vector<at::Tensor> moved(const std::vector<at::Tensor>& sent, const Sizes& counts,
                                const at::Tensor& like) const {
    if (most_ > 0) {
      std::int64_t others = like.element_size();
      for (std::int64_t d = 0; d < first_; ++d) others *= like.size(d);
      return call_.exchanged(sent, counts, i_, most_ * others);
    }
    std::vector<at::Tensor> result(sent.size(), at::empty({0}, like.options()));
    result[me_] = sent[me_].reshape({-1});
    return result;
  }

  const AlgorithmCall& call_;
  const std::size_t i_;
  const std::vector<Window>& windows_;
  const std::vector<Dims> pieces_;
  std::int64_t first_ = 0;  // of the last dims
  std::size_t me_ = 0;
  std::int64_t most_ = 0;  // that a rank must fetch of a plane
  std::vector<bool> cut_;
  std::vector<Region> held_, needed_;  // by every one of the pieces' ranks
  Region reads_, outputs_;             // of this one
};

at::Tensor zero_sum(at::IntArrayRef sizes, const at::Tensor& like) {
  const at::Tensor result = at::empty(sizes, like.options());
  fill_identity(result, ReduceOp::kSum);
  return result;
}

// (input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
Results convolution(const AlgorithmCall& call) {
  const Halo halo(call, 0, *call.decision().outputs[0]);
  const at::Tensor x = halo.fetched(call.tensor(0), 0);
  const at::Tensor bias = call.tensor(2);
  if (c10::multiply_integers(call.shape(0)) == 0) return {at::empty(call.shape(0), x.options())};
  return {at::convolution(x, call.tensor(1), bias.defined() ? c10::optional<at::Tensor>(bias) : c10::nullopt,
                          call.arg(3).toIntVector(), halo.padding(), call.arg(5).toIntVector(), false,
                          call.arg(7).toIntVector(), call.arg(8).toInt())};
}

// (grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask)
Results convolution_backward(const AlgorithmCall& call) {
  const at::Tensor gradient = call.tensor(0), input = call.tensor(1), weight = call.tensor(2);
  const c10::List<bool> mask = call.arg(10).toBoolList();
  const Halo halo(call, 1, call.spec(0));
  const Sizes channels = {weight.size(0)};
  // The weight's gradient alone reads the input.
  const at::Tensor x = mask[1] ? halo.fetched(input, 0) : at::zeros(halo.sizes(input), input.options());
  at::Tensor read = at::zeros({0}), of_weight, of_bias;
  if (gradient.numel() > 0) {
    std::tie(read, of_weight, of_bias) = at::convolution_backward(
        gradient, x, weight, at::OptionalIntArrayRef(channels), call.arg(4).toIntVector(), halo.padding(),
        call.arg(6).toIntVector(), false, call.arg(8).toIntVector(), call.arg(9).toInt(), {mask[0], mask[1], mask[2]});
  } else {
    read = at::zeros(halo.sizes(input), input.options());
    of_weight = zero_sum(weight.sizes(), weight);
    of_bias = zero_sum(channels, weight);
  }
  return {mask[0] ? halo.given_back(read, input.sizes()) : at::Tensor(), of_weight, of_bias};
}

// ---- pooling: planes of two or three dims

Sizes sizes_of(const Halo& halo, std::int64_t Window::*member) {
  Sizes result;
  for (const Window& window : halo.windows()) result.push_back(window.*member);
  return result;
}

// How many inputs every window of this rank's averages over, or divides by.
at::Tensor divisors(const Halo& halo, bool with_padding, const at::Tensor& like) {
  at::Tensor result = at::ones({}, like.options());
  for (std::size_t w = 0; w < halo.windows().size(); ++w) {
    const Window& window = halo.windows()[w];
    Sizes counts;
    for (std::int64_t o = halo.outputs(w).begin; o < halo.outputs(w).end; ++o) {
      const Interval read = window.read_by({o, o + 1});
      const std::int64_t edge = with_padding ? window.padding : 0;
      counts.push_back(common(read, {-edge, halo.size(w) + edge}).size());
    }
    result = result.unsqueeze(-1).mul(at::tensor(counts, at::kLong).to(like.options()));
  }
  return result;
}

// What is left of dividing by the numbers of inputs, or by the number that the call gives.
at::Tensor divided(const Halo& halo, const at::Tensor& sums, const c10::IValue& with_padding,
                   const c10::IValue& given) {
  const at::Tensor by =
      given.isNone() ? divisors(halo, with_padding.toBool(), sums) : at::full({}, given.toInt(), sums.options());
  if (at::isIntegralType(sums.scalar_type(), true)) return sums.div(by, "trunc");
  return sums.div(by);
}

// (self, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override)
Results avg_pool(const AlgorithmCall& call) {
  const Halo halo(call, 0, *call.decision().outputs[0]);
  const at::Tensor x = widened(halo.fetched(call.tensor(0), 0));
  if (c10::multiply_integers(call.shape(0)) == 0) return {at::empty(call.shape(0), x.options())};
  const auto pool = halo.windows().size() == 2 ? at::avg_pool2d : at::avg_pool3d;
  const at::Tensor sums = pool(x, sizes_of(halo, &Window::kernel), sizes_of(halo, &Window::stride), halo.padding(),
                               call.arg(4).toBool(), true, 1);
  return {divided(halo, sums, call.arg(5), call.arg(6))};
}

// (grad_output, self, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override)
Results avg_pool_backward(const AlgorithmCall& call) {
  const at::Tensor gradient = widened(call.tensor(0)), self = call.tensor(1);
  const Halo halo(call, 1, call.spec(0));
  at::Tensor read = at::zeros(halo.sizes(self), gradient.options());
  if (gradient.numel() > 0) {
    const auto back = halo.windows().size() == 2 ? at::avg_pool2d_backward : at::avg_pool3d_backward;
    read = back(divided(halo, gradient, call.arg(6), call.arg(7)), read, sizes_of(halo, &Window::kernel),
                sizes_of(halo, &Window::stride), halo.padding(), call.arg(5).toBool(), true, 1);
  }
  return {halo.given_back(read, self.sizes())};
}

// Flat positions in planes of what is read as positions in the whole's, or back.
at::Tensor replaced(const Halo& halo, const at::Tensor& flat, bool to_whole) {
  at::Tensor rest = flat, result = at::zeros_like(flat);
  std::int64_t stride = 1;
  for (std::size_t w = halo.windows().size(); w-- > 0;) {
    const Interval& reads = halo.reads(w);
    const std::int64_t from = to_whole ? reads.size() : halo.size(w), to = to_whole ? halo.size(w) : reads.size();
    at::Tensor at = rest.remainder(from).add(to_whole ? reads.begin : -reads.begin);
    // Where nothing is larger than padding it is the window's first element that is none.
    const std::int64_t dilation = halo.windows()[w].dilation;
    if (to_whole) at = at::where(at.lt(0), at.remainder(dilation), at);
    result = result.add(at, stride);
    rest = rest.div(from, "floor");
    stride *= to;
  }
  return result;
}

// (self, kernel, stride, padding, dilation, ceil_mode)
Results max_pool(const AlgorithmCall& call) {
  const Halo halo(call, 0, *call.decision().outputs[0]);
  const at::Tensor lowest = at::empty({}, call.tensor(0).options().device(at::kCPU));
  fill_identity(lowest, ReduceOp::kMax);
  const at::Tensor x = halo.fetched(call.tensor(0), lowest.item());
  if (c10::multiply_integers(call.shape(0)) == 0) {
    return {at::empty(call.shape(0), x.options()), at::empty(call.shape(1), x.options().dtype(at::kLong))};
  }
  const auto pool = halo.windows().size() == 2 ? at::max_pool2d_with_indices : at::max_pool3d_with_indices;
  const auto [values, places] = pool(x, sizes_of(halo, &Window::kernel), sizes_of(halo, &Window::stride),
                                     halo.padding(), sizes_of(halo, &Window::dilation), call.arg(5).toBool());
  return {values, replaced(halo, places, true)};
}

// (grad_output, self, kernel, stride, padding, dilation, ceil_mode, indices)
Results max_pool_backward(const AlgorithmCall& call) {
  const at::Tensor gradient = call.tensor(0), self = call.tensor(1), places = call.tensor(7);
  const Halo halo(call, 1, call.spec(0));
  const at::Tensor read = at::zeros(halo.sizes(self), gradient.options());
  if (gradient.numel() > 0) {
    const std::int64_t planes = gradient.dim() - static_cast<std::int64_t>(halo.windows().size());
    const auto flat = [&](const at::Tensor& t) { return t.flatten(planes); };
    flat(read).scatter_add_(planes, flat(replaced(halo, places, false)), flat(gradient));
  }
  return {halo.given_back(read, self.sizes())};
}

constexpr NamedAlgorithm kTable[] = {
    {"avg_pool", avg_pool},       {"avg_pool_backward", avg_pool_backward},
    {"convolution", convolution}, {"convolution_backward", convolution_backward},
    {"max_pool", max_pool},       {"max_pool_backward", max_pool_backward},
};

}  // namespace

std::span<const NamedAlgorithm> window_algorithms() { return kTable; }

}  // namespace dtensor
