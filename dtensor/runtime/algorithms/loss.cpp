// The negative log likelihood where classes are cut (every rank looks up what it holds), and its mean over a cut batch.
#include <ATen/core/Reduction.h>
#include <ATen/ops/nll_loss_backward.h>
#include <ATen/ops/nll_loss_forward.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include "dtensor/runtime/algorithms/algorithm.h"

namespace dtensor {
namespace {

using Results = std::vector<at::Tensor>;

constexpr std::int64_t kElsewhere = -1;  // classes that are ignored here: of others, or of all

// The targets as classes of this rank's part of argument i.
at::Tensor classes_here(const AlgorithmCall& call, std::size_t i, const at::Tensor& target, std::int64_t ignore) {
  const at::Tensor ignored = target.eq(ignore);
  const std::int64_t dim = call.tensor(i).dim() - 1;
  const Located here = locate(call, i, dim, target.masked_fill(ignored, 0), kElsewhere);
  return here.position.masked_fill_(ignored, kElsewhere);
}

c10::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? c10::optional<at::Tensor>(tensor) : c10::nullopt;
}

// (input, target, weight, reduction, ignored class)
Results nll_loss(const AlgorithmCall& call) {
  const at::Tensor x = widened(call.tensor(0));
  const at::Tensor target = classes_here(call, 0, call.tensor(1), call.arg(4).toInt());
  const at::Tensor weight = call.tensor(2).defined() ? widened(call.tensor(2)) : at::Tensor();
  const std::int64_t reduction = call.arg(3).toInt();
  const bool each = reduction == at::Reduction::None;
  at::Tensor loss = at::zeros(call.shape(0), x.options());
  at::Tensor total = at::zeros({}, x.options());
  if (x.numel() > 0) {
    const std::int64_t local = each ? reduction : std::int64_t{at::Reduction::Sum};
    std::tie(loss, total) = at::nll_loss_forward(x, target, optional(weight), local, kElsewhere);
  }
  if (each) return {call.merged_result(loss, 0, ReduceOp::kSum), at::zeros(call.shape(1), x.options())};
  // Both are numbers that lie alike: they go together.
  const at::Tensor both = call.merged_numbers(at::stack({loss, total}), 0, ReduceOp::kSum);
  loss = both[0], total = both[1];
  return {reduction == at::Reduction::Mean ? loss.div(total) : loss.clone(), total.clone()};
}

// (gradient, input, target, weight, reduction, ignored class, total weight)
Results nll_loss_backward(const AlgorithmCall& call) {
  const at::Tensor x = call.tensor(1);
  const at::Tensor target = classes_here(call, 1, call.tensor(2), call.arg(5).toInt());
  if (x.numel() == 0) return {at::zeros(call.shape(0), x.options())};
  return {at::nll_loss_backward(call.tensor(0), x, target, optional(call.tensor(3)), call.arg(4).toInt(), kElsewhere,
                                call.tensor(6))};
}

constexpr NamedAlgorithm kTable[] = {{"nll_loss", nll_loss}, {"nll_loss_backward", nll_loss_backward}};

}  // namespace

std::span<const NamedAlgorithm> loss_algorithms() { return kTable; }

}  // namespace dtensor
