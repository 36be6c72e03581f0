#include <ATen/ATen.h>
#include <ATen/core/List.h>

#include <limits>

#include "tests/testing/calls.h"

namespace dtensor::testing {

using c10::IValue;
using Ints = std::vector<std::int64_t>;
using Calls = std::vector<Call>;
using Tensors = std::vector<at::Tensor>;

namespace {

IValue l(Ints ints) { return ints; }
IValue optional(const Tensors& tensors) {
  c10::List<c10::optional<at::Tensor>> list;
  for (const at::Tensor& tensor : tensors) list.push_back(tensor);
  return list;
}
const IValue none;

// Parameters of two shapes, and what an optimizer keeps of them.
void add_optimizers(Calls& c) {
  const Tensors params = {floats({5, 4}), floats({3}, 1)}, grads = {floats({5, 4}, 2), floats({3}, 0.5)};
  const Tensors first = {floats({5, 4}, 1), floats({3})}, second = {positive({5, 4}), positive({3})};
  const Tensors largest = {positive({5, 4}) + 0.5, positive({3}) + 0.5};
  const auto steps = [] { return Tensors{at::full({}, 3.0, at::kFloat), at::full({}, 3.0, at::kFloat)}; };
  for (const char* op : {"aten::_fused_adam_", "aten::_fused_adamw_"}) {
    for (const bool amsgrad : {false, true}) {
      c.push_back({op,
                   {params, grads, first, second, amsgrad ? largest : Tensors{}, steps(), 0.01, 0.9, 0.99, 0.1, 1e-8,
                    amsgrad, false, none, none}});
    }
  }
  c.push_back({"aten::_fused_adam_.tensor_lr",
               {params, grads, first, second, Tensors{}, steps(), at::full({}, 0.01, at::kDouble), 0.9, 0.99, 0.1, 1e-8,
                false, true, at::full({}, 4.0, at::kFloat), at::full({}, 0.0, at::kFloat)}});
  for (const bool nesterov : {false, true}) {
    c.push_back({"aten::_fused_sgd_", {params, grads, first, 0.1, 0.9, 0.01, 0.0, nesterov, false, false, none, none}});
  }
  c.push_back({"aten::_fused_sgd_", {params, grads, Tensors{}, 0.1, 0.0, 0.01, 0.0, false, true, false, none, none}});
  c.push_back({"aten::_fused_adagrad_", {params, grads, second, steps(), 0.01, 0.1, 0.1, 1e-8, false, none, none}});
  const std::string unscale = "aten::_amp_foreach_non_finite_check_and_unscale_";
  at::Tensor bad = floats({5, 4}).to(at::kFloat);
  for (const bool infinite : {false, true}) {
    if (infinite) bad[3][1] = std::numeric_limits<float>::infinity();
    c.push_back({unscale,
                 {Tensors{floats({3}).to(at::kFloat), bad.clone()}, at::zeros({1}, at::kFloat),
                  at::full({1}, 0.5, at::kFloat)}});
  }
}

// (batch, heads, length, size)
void add_attention(Calls& c) {
  const at::Tensor q = floats({3, 2, 5, 4}), k = floats({3, 2, 6, 4}, 0.5), v = floats({3, 2, 6, 4}, 1);
  const std::string op = "aten::_scaled_dot_product_flash_attention_for_cpu";
  for (const bool causal : {false, true}) {
    const at::Tensor weights = [&] {
      at::Tensor scores = at::matmul(q, k.transpose(-2, -1)) / 2;
      if (causal) scores = scores.masked_fill(at::ones({5, 6}, at::kBool).tril().logical_not(), -HUGE_VAL);
      return scores;
    }();
    const at::Tensor out = at::matmul(weights.softmax(-1), v), sums = weights.logsumexp({-1});
    c.push_back({op, {q, k, v, 0.0, causal, none, none}});
    c.push_back({op + "_backward", {floats({3, 2, 5, 4}, 2), q, k, v, out, sums, 0.0, causal, none, none}});
  }
  c.push_back({op, {q, k, v, 0.0, false, floats({5, 6}).div(4), none}});
}

void add_batch_norms(Calls& c) {
  const at::Tensor image = floats({5, 4, 3}), w = positive({4}), b = floats({4});
  c.push_back({"aten::_batch_norm_no_update", {image, w, b, floats({4}), positive({4}), 0.1, 1e-5}});
  for (const bool training : {false, true}) {
    c.push_back({"aten::_native_batch_norm_legit", {image, w, b, floats({4}), positive({4}), training, 0.1, 1e-5}});
  }
  c.push_back({"aten::_native_batch_norm_legit.no_stats", {image, w, b, true, 0.1, 1e-5}});
  c.push_back({"aten::_batch_norm_with_update", {image, w, b, floats({4}), positive({4}), 0.1, 1e-5}});
}

void add_margins(Calls& c) {
  const at::Tensor x = floats({5, 4}), classes = indices({5}, 4);
  const at::Tensor labels = indices({5, 4}, 4) - 1;
  for (const std::int64_t reduction : {0, 1, 2}) {
    const at::Tensor grad = reduction == 0 ? floats({5}, 2) : floats({}, 2);
    c.push_back({"aten::multi_margin_loss", {x, classes, 1, 1, positive({4}), reduction}});
    c.push_back({"aten::multi_margin_loss_backward", {grad, x, classes, 2, 1, none, reduction}});
    const auto both = at::multilabel_margin_loss_forward(x, labels, reduction);
    c.push_back({"aten::multilabel_margin_loss_forward", {x, labels, reduction}});
    c.push_back({"aten::multilabel_margin_loss_backward", {grad, x, labels, reduction, std::get<1>(both)}});
    const at::Tensor planes = floats({2, 3, 2, 2}), pixels = indices({2, 2, 2}, 3);
    const at::Tensor each = reduction == 0 ? floats({2, 2, 2}, 2) : floats({}, 2);
    const auto total = std::get<1>(at::nll_loss2d_forward(planes, pixels, positive({3}), reduction, 1));
    c.push_back({"aten::nll_loss2d_forward", {planes, pixels, positive({3}), reduction, 1}});
    c.push_back({"aten::nll_loss2d_backward", {each, planes, pixels, positive({3}), reduction, 1, total}});
  }
}

void add_counting(Calls& c) {
  const at::Tensor x = floats({5, 4}), sorted = std::get<0>(floats({7}).sort(0));
  c.push_back({"aten::histc", {x, 5, -1.0, 0.75}});
  c.push_back({"aten::histc", {x, 4, 0, 0}});
  c.push_back({"aten::histc", {at::full({5, 4}, 2.0, at::kDouble), 3, 0, 0}});
  c.push_back({"aten::histogram.bin_ct", {x, 4, none, positive({5, 4}), false}});
  c.push_back({"aten::histogram.bins_tensor", {x, sorted, none, true}});
  c.push_back({"aten::isin.Scalar_Tensor", {x[1][2].item(), x, false, false}});
  c.push_back({"aten::bucketize.Scalar", {0.5, sorted}});
  c.push_back({"aten::searchsorted.Scalar", {sorted, 0.5}});
  c.push_back({"aten::nonzero", {bools({5, 4})}});
  c.push_back({"aten::masked_select", {x, bools({5, 1})}});
  c.push_back({"aten::_unique2", {indices({5, 4}, 7), true, true, true}});
  c.push_back({"aten::unique_consecutive", {indices({5, 4}, 7), true, true}});
  c.push_back({"aten::allclose", {x, floats({5, 4})}});
  c.push_back({"aten::allclose", {x, floats({5, 4}, 1)}});
  c.push_back({"aten::is_same_size", {x, floats({5, 4})}});
}

void add_diagonals(Calls& c) {
  const at::Tensor x = floats({5, 4});
  c.push_back({"aten::diag_embed", {x, 0, -2, -1}});
  c.push_back({"aten::diag_embed", {x, 1, -2, -1}});
  c.push_back({"aten::diag_embed", {x, 0, 0, 2}});
  c.push_back({"aten::diagonal_scatter", {x, floats({3}, 3), 1}});
  c.push_back({"aten::block_diag", {Tensors{x, floats({2, 3}, 1)}}});
  c.push_back({"aten::renorm", {x, 2, 0, 0.5}});
  c.push_back({"aten::_pdist_forward", {x, 2.0}});
  c.push_back({"aten::_pdist_backward", {floats({10}), x, 2.0, at::_pdist_forward(x, 2.0)}});
}

void add_surgery(Calls& c) {
  const at::Tensor x = floats({5, 4}), src = floats({3, 4}, 3);
  c.push_back({"aten::_index_put_impl_", {x, optional({indices({3}, 5)}), src, true, false}});
  c.push_back({"aten::put", {x, indices({3, 2}, 20), floats({3, 2}, 3), true}});
  c.push_back({"aten::masked_scatter", {x, bools({5, 4}), floats({5, 4}, 3)}});
  c.push_back({"aten::split_with_sizes_copy", {x, l({1, 3, 1}), 0}});
  c.push_back({"aten::split_copy.Tensor", {x, 2, 1}});
  c.push_back({"aten::squeeze_copy", {floats({5, 1, 3})}});
  c.push_back({"aten::squeeze_copy.dim", {floats({5, 1, 3}), 1}});
  c.push_back({"aten::squeeze_copy.dims", {floats({5, 1, 3}), l({1})}});
  for (const char* op : {"aten::view.dtype", "aten::view_copy.dtype"}) {
    c.push_back({op, {x, at::kLong}});
    c.push_back({op, {floats({5, 4}).to(at::kFloat), at::kDouble}});
    c.push_back({op, {floats({5, 1}), at::kInt}});
  }
  c.push_back({"aten::as_strided_copy", {x, l({3, 2}), l({4, 3}), 1}});
  c.push_back({"aten::as_strided_scatter", {x, floats({3, 2}, 3), l({3, 2}), l({4, 3}), 1}});
  c.push_back({"aten::linspace.Tensor_Scalar", {floats({}, 1), 3.0, 5}});
}

// Products of matrices in groups: side by side along the rows, the columns or what is summed; or one by one.
void add_grouped(Calls& c) {
  const auto product = [&](Ints a, Ints b, bool grouped) {
    const at::Tensor ends = at::tensor({4, 16, 32}, at::kInt);
    c.push_back({"aten::_grouped_mm",
                 {floats(std::move(a)).to(at::kFloat), floats(std::move(b)).to(at::kFloat),
                  grouped ? IValue(ends) : none, none, none}});
  };
  product({3, 8, 16}, {3, 16, 24}, false);
  product({32, 16}, {3, 16, 24}, true);
  product({8, 32}, {32, 24}, true);
  product({3, 8, 16}, {16, 32}, true);
}

}  // namespace

void add_everyday(Calls& c) {
  add_optimizers(c);
  add_attention(c);
  add_batch_norms(c);
  add_margins(c);
  add_counting(c);
  add_diagonals(c);
  add_surgery(c);
  add_grouped(c);
}

}  // namespace dtensor::testing
