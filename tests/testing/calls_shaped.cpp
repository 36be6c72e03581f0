#include <ATen/ATen.h>
#include <ATen/core/List.h>

#include "tests/testing/calls.h"

namespace dtensor::testing {
namespace {

using c10::IValue;
using Ints = std::vector<std::int64_t>;

IValue l(Ints ints) { return ints; }
IValue flags(std::vector<bool> values) {
  c10::List<bool> list;
  for (const bool value : values) list.push_back(value);
  return list;
}
IValue list(std::vector<at::Tensor> tensors) { return tensors; }
IValue optional(std::vector<c10::optional<at::Tensor>> tensors) {
  c10::List<c10::optional<at::Tensor>> result;
  for (auto& tensor : tensors) result.push_back(tensor);
  return result;
}
const IValue none;

using Calls = std::vector<Call>;

void add_matmul(Calls& c) {
  c.push_back({"aten::mm", {floats({5, 4}), floats({4, 3})}});
  c.push_back({"aten::mm", {floats({1, 4}), floats({4, 1})}});
  c.push_back({"aten::addmm", {floats({3}), floats({5, 4}), floats({4, 3})}});
  c.push_back({"aten::addmm", {floats({5, 1}), floats({5, 4}), floats({4, 3}), 2, 0.5}});
  c.push_back({"aten::addmv", {floats({5}), floats({5, 4}), floats({4})}});
  c.push_back({"aten::addr", {floats({5, 4}), floats({5}), floats({4})}});
  c.push_back({"aten::baddbmm", {floats({3, 5, 4}), floats({3, 5, 2}), floats({3, 2, 4})}});
  c.push_back({"aten::bmm", {floats({3, 5, 4}), floats({3, 4, 2})}});
  c.push_back({"aten::dot", {floats({7}), floats({7})}});
  c.push_back({"aten::ger", {floats({5}), floats({4})}});
  c.push_back({"aten::linear", {floats({2, 5, 4}), floats({3, 4}), floats({3})}});
  c.push_back({"aten::mv", {floats({5, 4}), floats({4})}});
  c.push_back({"aten::vdot", {floats({7}), floats({7})}});
  c.push_back({"aten::vdot", {complexes({7}), complexes({7})}});
  c.push_back({"aten::addbmm", {floats({5, 4}), floats({3, 5, 2}), floats({3, 2, 4})}});
}

void add_linalg(Calls& c) {
  const at::Tensor spd = definite({3}, 4);
  const at::Tensor general = spd + floats({3, 4, 4}) / 4;
  const at::Tensor rhs = floats({3, 4, 2});
  const auto lu = at::linalg_lu_factor_ex(general);
  const auto ldl = at::linalg_ldl_factor_ex(spd);
  const auto qr = at::geqrf(general);
  const at::Tensor chol = at::linalg_cholesky(spd);
  const at::Tensor x = floats({3, 5, 4}), y = floats({3, 2, 4}, 0.5);
  c.push_back({"aten::_cdist_forward", {x, y, 2.0, none}});
  c.push_back({"aten::_cdist_backward", {floats({3, 5, 2}), x, y, 2.0, at::_cdist_forward(x, y, 2.0, c10::nullopt)}});
  c.push_back({"aten::_euclidean_dist", {x, y}});
  c.push_back({"aten::_cholesky_solve_helper", {rhs, chol, false}});
  c.push_back({"aten::_fft_c2c", {complexes({5, 4}), l({1}), 0, true}});
  c.push_back({"aten::_fft_c2r", {complexes({5, 3}), l({1}), 0, 4}});
  c.push_back({"aten::_fft_r2c", {floats({5, 4}), l({1}), 0, true}});
  for (const char* op :
       {"aten::_linalg_det", "aten::_linalg_slogdet", "aten::geqrf", "aten::linalg_inv_ex", "aten::linalg_lu",
        "aten::linalg_lu_factor_ex", "aten::linalg_matrix_exp", "aten::linalg_qr"}) {
    c.push_back({op, {general}});
  }
  for (const char* op : {"aten::_linalg_eigh", "aten::_linalg_svd", "aten::cholesky", "aten::cholesky_inverse",
                         "aten::linalg_cholesky_ex", "aten::linalg_eig", "aten::linalg_ldl_factor_ex"}) {
    c.push_back({op, {spd}});
  }
  c.push_back({"aten::cholesky_solve", {rhs, chol}});
  c.push_back({"aten::linalg_cross", {floats({5, 3}), floats({5, 3}, 1)}});
  c.push_back({"aten::linalg_householder_product", {std::get<0>(qr), std::get<1>(qr)}});
  c.push_back({"aten::linalg_ldl_solve", {std::get<0>(ldl), std::get<1>(ldl), rhs}});
  c.push_back({"aten::linalg_lu_solve", {std::get<0>(lu), std::get<1>(lu), rhs}});
  c.push_back({"aten::linalg_solve_triangular", {chol, rhs, false}});
  c.push_back({"aten::lu_unpack", {std::get<0>(lu), std::get<1>(lu)}});
  c.push_back({"aten::ormqr", {std::get<0>(qr), std::get<1>(qr), rhs}});
  c.push_back({"aten::trace", {floats({5, 4})}});
  c.push_back({"aten::triangular_solve", {rhs, chol, false}});
}

void add_losses(Calls& c) {
  const at::Tensor x = floats({5, 4}), p = positive({5, 4}), y = floats({5, 4}, 0.25);
  const at::Tensor target = bools({5, 4}).to(at::kDouble);
  for (const std::int64_t reduction : {0, 1, 2}) {
    const at::Tensor grad = reduction == 0 ? floats({5, 4}, 2) : floats({}, 2);
    c.push_back({"aten::binary_cross_entropy", {p, target, positive({4}), reduction}});
    c.push_back({"aten::binary_cross_entropy", {p, target, none, reduction}});
    c.push_back({"aten::binary_cross_entropy_backward", {grad, p, target, none, reduction}});
    c.push_back({"aten::binary_cross_entropy_with_logits", {x, target, positive({5, 4}), positive({4}), reduction}});
    c.push_back({"aten::huber_loss", {x, y, reduction, 1.0}});
    c.push_back({"aten::huber_loss_backward", {grad, x, y, reduction, 1.0}});
    c.push_back({"aten::mse_loss", {x, y, reduction}});
    c.push_back({"aten::mse_loss_backward", {grad, x, y, reduction}});
    c.push_back({"aten::smooth_l1_loss", {x, y, reduction, 1.0}});
    c.push_back({"aten::smooth_l1_loss_backward", {grad, x, y, reduction, 1.0}});
    c.push_back({"aten::soft_margin_loss", {x, y, reduction}});
    c.push_back({"aten::soft_margin_loss_backward", {grad, x, y, reduction}});
    const at::Tensor classes = indices({5}, 4);
    const at::Tensor each = reduction == 0 ? floats({5}, 2) : floats({}, 2);
    for (const IValue& weight : {none, IValue(positive({4}))}) {
      const c10::optional<at::Tensor> given = weight.isTensor() ? c10::make_optional(weight.toTensor()) : c10::nullopt;
      const auto total = std::get<1>(at::nll_loss_forward(x, classes, given, reduction, 2));
      c.push_back({"aten::nll_loss_forward", {x, classes, weight, reduction, 2}});
      c.push_back({"aten::nll_loss_backward", {each, x, classes, weight, reduction, 2, total}});
    }
  }
}

void add_norms(Calls& c) {
  const at::Tensor x = floats({5, 4}), g = floats({5, 4}, 1);
  const at::Tensor soft = at::softmax(x, 1), log_soft = at::log_softmax(x, 1);
  c.push_back({"aten::_softmax", {x, 1, false}});
  c.push_back({"aten::_softmax", {floats({3, 5, 2}), 1, false}});
  c.push_back({"aten::_log_softmax", {x, 0, false}});
  c.push_back({"aten::_softmax_backward_data", {g, soft, 1, at::kDouble}});
  c.push_back({"aten::_log_softmax_backward_data", {g, log_soft, 1, at::kDouble}});
  c.push_back({"aten::glu", {floats({5, 4}), 1}});
  c.push_back({"aten::glu_backward", {floats({5, 2}), x, 1}});
  const at::Tensor image = floats({5, 4, 3}), gi = floats({5, 4, 3}, 1);
  const at::Tensor w = positive({4}), b = floats({4});
  for (const bool training : {false, true}) {
    c.push_back({"aten::native_batch_norm", {image, w, b, floats({4}), positive({4}), training, 0.1, 1e-5}});
    c.push_back({"aten::native_batch_norm_backward",
                 {gi, image, w, floats({4}), positive({4}), floats({4}), positive({4}), training, 1e-5,
                  flags({true, true, true})}});
  }
  const auto group = at::native_group_norm(image, w, b, 5, 4, 3, 2, 1e-5);
  c.push_back({"aten::native_group_norm", {image, w, b, 5, 4, 3, 2, 1e-5}});
  c.push_back({"aten::native_group_norm_backward",
               {gi, image, std::get<1>(group), std::get<2>(group), w, 5, 4, 3, 2, flags({true, true, true})}});
  for (const Ints& normalized : {Ints{3}, Ints{4, 3}}) {
    const at::Tensor weight = positive(normalized), bias = floats(normalized);
    const auto layer = at::native_layer_norm(image, normalized, weight, bias, 1e-5);
    c.push_back({"aten::native_layer_norm", {image, l(normalized), weight, bias, 1e-5}});
    c.push_back(
        {"aten::native_layer_norm_backward",
         {gi, image, l(normalized), std::get<1>(layer), std::get<2>(layer), weight, bias, flags({true, true, true})}});
  }
}

void add_index(Calls& c) {
  const at::Tensor x = floats({5, 4});
  const at::Tensor i0 = indices({3, 4}, 5), src = floats({3, 4}, 3);
  c.push_back({"aten::cat", {list({floats({5, 4}), floats({2, 4}, 1), floats({1, 4}, 2)}), 0}});
  c.push_back({"aten::stack", {list({floats({5, 4}), floats({5, 4}, 1)}), 1}});
  c.push_back({"aten::embedding", {x, indices({3, 2}, 5)}});
  c.push_back({"aten::embedding_dense_backward", {floats({3, 2, 4}), indices({3, 2}, 5), 5, -1, false}});
  c.push_back({"aten::embedding_dense_backward", {floats({3, 2, 4}), indices({3, 2}, 5), 5, 2, true}});
  c.push_back({"aten::flip", {x, l({0})}});
  c.push_back({"aten::gather", {x, 0, i0}});
  c.push_back({"aten::gather", {x, 1, indices({5, 3}, 4)}});
  c.push_back({"aten::index.Tensor", {x, optional({c10::nullopt, indices({3}, 4)})}});
  c.push_back({"aten::index.Tensor", {x, optional({indices({3, 2}, 5)})}});
  c.push_back({"aten::index.Tensor", {x, optional({indices({3}, 5), indices({3}, 4)})}});
  c.push_back({"aten::index_add", {x, 0, indices({3}, 5), src}});
  c.push_back({"aten::index_copy", {x, 0, indices({3}, 5), src}});
  c.push_back({"aten::index_fill.int_Scalar", {x, 0, indices({3}, 5), 2.5}});
  c.push_back({"aten::index_fill.int_Tensor", {x, 0, indices({3}, 5), floats({}, 3)}});
  c.push_back({"aten::index_put", {x, optional({indices({3}, 5)}), src, true}});
  c.push_back({"aten::index_put", {x, optional({c10::nullopt, indices({3}, 4)}), floats({5, 3}), false}});
  c.push_back({"aten::index_reduce", {x, 0, indices({3}, 5), src, "amax"}});
  c.push_back({"aten::index_select", {x, 0, indices({3}, 5)}});
  c.push_back({"aten::isin.Tensor_Tensor", {indices({5, 4}, 7), indices({3}, 7)}});
  c.push_back({"aten::repeat", {x, l({2, 1, 3})}});
  c.push_back({"aten::repeat", {x, l({1, 3})}});
  c.push_back({"aten::roll", {x, l({2}), l({0})}});
  c.push_back({"aten::roll", {x, l({2}), l({})}});
  c.push_back({"aten::rot90", {floats({5, 4, 3}), 1, l({0, 1})}});
  c.push_back({"aten::scatter.reduce", {x, 0, i0, src, "add"}});
  c.push_back({"aten::scatter.src", {x, 0, i0.slice(1, 0, 1), src}});
  c.push_back({"aten::scatter.value", {x, 0, i0, 2.5}});
  c.push_back({"aten::scatter.value_reduce", {x, 0, i0, 2.5, "multiply"}});
  c.push_back({"aten::scatter_add", {x, 0, i0, src}});
  c.push_back({"aten::scatter_reduce.two", {x, 0, i0, src, "amax"}});
  c.push_back({"aten::searchsorted.Tensor", {std::get<0>(floats({3, 5}).sort(1)), floats({3, 4})}});
  c.push_back({"aten::select_backward", {floats({5}), l({5, 4}), 1, 2}});
  c.push_back({"aten::select_scatter", {x, floats({5}, 3), 1, 2}});
  c.push_back({"aten::slice_backward", {floats({5, 2}), l({5, 4}), 1, 1, 3, 1}});
  c.push_back({"aten::slice_scatter", {x, floats({5, 2}, 3), 1, 1, 3, 1}});
  c.push_back({"aten::take", {x, indices({3, 2}, 20)}});
  c.push_back({"aten::tril", {floats({3, 5, 4})}});
  c.push_back({"aten::triu", {floats({3, 5, 4}), 1}});
  c.push_back({"aten::bucketize.Tensor", {floats({5, 4}), std::get<0>(floats({7}).sort(0))}});
  c.push_back({"aten::where.self", {bools({5, 4}), x, floats({4}, 1)}});
  c.push_back({"aten::where.ScalarOther", {bools({5, 4}), x, 2.5}});
  c.push_back({"aten::where.ScalarSelf", {bools({5, 4}), 2.5, x}});
  c.push_back({"aten::masked_fill.Scalar", {x, bools({5, 1}), 2.5}});
  c.push_back({"aten::masked_fill.Tensor", {x, bools({5, 1}), floats({}, 3)}});
  c.push_back({"aten::native_dropout_backward", {x, bools({5, 4}), 2.0}});
}

void add_views(Calls& c) {
  const at::Tensor x = floats({6, 4});
  for (const char* op : {"aten::view", "aten::reshape", "aten::_unsafe_view", "aten::view_copy"}) {
    for (const Ints& to : {Ints{24}, Ints{2, 12}, Ints{4, 6}, Ints{2, 3, 2, 2}, Ints{6, 2, 2}})
      c.push_back({op, {x, l(to)}});
  }
  c.push_back({"aten::_reshape_alias", {x, l({3, 8}), l({8, 1})}});
  c.push_back({"aten::diagonal", {floats({5, 4, 3}), 0, 0, 2}});
  c.push_back({"aten::diagonal_copy", {floats({5, 4, 3}), 1, 0, 1}});
  c.push_back({"aten::expand", {floats({5, 1}), l({3, 5, 4})}});
  c.push_back({"aten::expand_copy", {floats({5, 1}), l({5, 4})}});
  c.push_back({"aten::narrow", {x, 0, 1, 3}});
  c.push_back({"aten::narrow_copy", {x, 0, 1, 3}});
  c.push_back({"aten::permute", {floats({5, 4, 3}), l({2, 0, 1})}});
  c.push_back({"aten::permute_copy", {floats({5, 4, 3}), l({2, 0, 1})}});
  for (const std::int64_t d : {0, 1}) {
    c.push_back({"aten::select.int", {x, d, 2}});
    c.push_back({"aten::select_copy.int", {x, d, 2}});
    c.push_back({"aten::slice.Tensor", {x, d, 1, 4, 2}});
    c.push_back({"aten::slice_copy.Tensor", {x, d, 0, 2, 1}});
    c.push_back({"aten::split.Tensor", {x, 2, d}});
    c.push_back({"aten::unsafe_split.Tensor", {x, 3, d}});
    c.push_back({"aten::unbind.int", {x, d}});
    c.push_back({"aten::unbind_copy.int", {x, d}});
    c.push_back({"aten::squeeze.dim", {floats({5, 1, 3}), d}});
  }
  c.push_back({"aten::split_with_sizes", {x, l({1, 2, 3}), 0}});
  c.push_back({"aten::unsafe_split_with_sizes", {x, l({1, 3}), 1}});
  c.push_back({"aten::squeeze", {floats({5, 1, 3, 1})}});
  c.push_back({"aten::transpose.int", {floats({5, 4, 3}), 0, 2}});
  c.push_back({"aten::transpose_copy.int", {floats({5, 4, 3}), 0, 2}});
  c.push_back({"aten::unfold", {x, 0, 3, 2}});
  c.push_back({"aten::unfold_copy", {x, 1, 2, 1}});
  c.push_back({"aten::unsqueeze", {x, 1}});
  c.push_back({"aten::unsqueeze_copy", {x, -1}});
  c.push_back({"aten::view_as_complex", {floats({5, 4, 2})}});
  c.push_back({"aten::view_as_real", {complexes({5, 4})}});
  c.push_back({"aten::_local_scalar_dense", {floats({}, 3)}});
  c.push_back({"aten::_to_copy", {x, at::kFloat}});
  c.push_back({"aten::_to_copy", {x, at::kLong}});
  c.push_back({"aten::_to_copy", {bools({5, 4}), at::kDouble}});
  c.push_back({"aten::copy", {x, floats({4}, 2)}});
  c.push_back({"aten::copy_", {x, floats({6, 1}, 2)}});
  c.push_back({"aten::copy_", {indices({5, 4}, 9), floats({5, 4})}});
  c.push_back({"aten::fill.Tensor", {x, floats({}, 3)}});
  c.push_back({"aten::new_full", {x, l({6, 4}), 2.5}});
  c.push_back({"aten::new_full", {x, l({3}), 2.5}});
  c.push_back({"aten::new_ones", {x, l({6, 4})}});
  c.push_back({"aten::new_zeros", {x, l({5})}});
  c.push_back({"aten::equal", {x, x}});
}

}  // namespace

void add_everyday(Calls& c);
void add_planes(Calls& c);
void add_reductions(Calls& c);

std::vector<Call> shaped_calls() {
  Calls calls;
  add_matmul(calls);
  add_linalg(calls);
  add_losses(calls);
  add_norms(calls);
  add_index(calls);
  add_views(calls);
  add_planes(calls);
  add_reductions(calls);
  add_everyday(calls);
  return calls;
}

}  // namespace dtensor::testing
