#include <ATen/ATen.h>
#include <ATen/core/List.h>

#include "tests/testing/calls.h"

namespace dtensor::testing {

using c10::IValue;
using Ints = std::vector<std::int64_t>;
using Calls = std::vector<Call>;

namespace {

IValue l(Ints ints) { return ints; }
IValue flags(std::vector<bool> values) {
  c10::List<bool> list;
  for (const bool value : values) list.push_back(value);
  return list;
}
const IValue none;

void add_convolutions(Calls& c) {
  const at::Tensor x = floats({3, 4, 6});
  for (const bool transposed : {false, true}) {
    for (const std::int64_t groups : {1, 2}) {
      const at::Tensor w = floats(transposed ? Ints{4, 2 / groups, 3} : Ints{2, 4 / groups, 3});
      const IValue one = l({1}), zero = l({0});
      c.push_back({"aten::convolution", {x, w, floats({2}), one, zero, one, transposed, zero, groups}});
      const at::Tensor y = at::convolution(x, w, floats({2}), {1}, {0}, {1}, transposed, {0}, groups);
      c.push_back({"aten::convolution_backward",
                   {floats(y.sizes().vec(), 1), x, w, l({2}), one, zero, one, transposed, zero, groups,
                    flags({true, true, true})}});
    }
  }
}

// Windows that reach beyond a part: over more than a neighbour's, in steps, with gaps, into the padding.
void add_halos(Calls& c) {
  const std::size_t first = c.size();
  const at::Tensor line = floats({2, 2, 7}), plane = floats({2, 2, 5, 4});
  const at::Tensor thin = floats({2, 2, 3}, 1), flat = floats({2, 2, 3, 2}, 1);
  const auto add = [&](const at::Tensor& x, const at::Tensor& w, Ints stride, Ints padding, Ints dilation) {
    const Ints none_out(stride.size(), 0);
    const at::Tensor y = at::convolution(x, w, floats({2}), stride, padding, dilation, false, none_out, 1);
    c.push_back({"aten::convolution", {x, w, floats({2}), l(stride), l(padding), l(dilation), false, l(none_out), 1}});
    c.push_back({"aten::convolution_backward",
                 {floats(y.sizes().vec(), 1), x, w, l({2}), l(stride), l(padding), l(dilation), false, l(none_out), 1,
                  flags({true, true, true})}});
  };
  add(line, thin, {2}, {1}, {1});
  add(line, thin, {1}, {4}, {3});
  add(plane, flat, {1, 2}, {1, 0}, {1, 2});
  const IValue kernel = l({3, 2}), stride = l({2, 1}), padding = l({1, 1}), dilation = l({2, 1});
  const auto max = at::max_pool2d_with_indices(plane, {3, 2}, {2, 1}, {1, 1}, {2, 1}, true);
  c.push_back({"aten::max_pool2d_with_indices", {plane, kernel, stride, padding, dilation, true}});
  c.push_back(
      {"aten::max_pool2d_with_indices_backward",
       {floats(std::get<0>(max).sizes().vec()), plane, kernel, stride, padding, dilation, true, std::get<1>(max)}});
  for (const bool with_padding : {true, false}) {
    const at::Tensor average = at::avg_pool2d(plane, {3, 2}, {2, 1}, {1, 1}, true, with_padding);
    c.push_back({"aten::avg_pool2d", {plane, kernel, stride, padding, true, with_padding, none}});
    c.push_back({"aten::avg_pool2d_backward",
                 {floats(average.sizes().vec()), plane, kernel, stride, padding, true, with_padding, none}});
  }
  for (std::size_t i = first; i < c.size(); ++i) c[i].again = true;
}

void add_pools(Calls& c) {
  const at::Tensor plane = floats({3, 4, 6, 4}), box = floats({3, 2, 4, 4, 2});
  const IValue two = l({2, 2}), two3 = l({2, 2, 2}), one = l({1, 1}), one3 = l({1, 1, 1}), zero = l({0, 0}),
               zero3 = l({0, 0, 0});
  c.push_back({"aten::_adaptive_avg_pool2d", {plane, l({3, 2})}});
  c.push_back({"aten::_adaptive_avg_pool2d_backward", {floats({3, 4, 3, 2}), plane}});
  c.push_back({"aten::_adaptive_avg_pool3d", {box, l({2, 2, 1})}});
  c.push_back({"aten::_adaptive_avg_pool3d_backward", {floats({3, 2, 2, 2, 1}), box}});
  c.push_back({"aten::adaptive_max_pool2d", {plane, l({3, 2})}});
  c.push_back({"aten::adaptive_max_pool2d_backward",
               {floats({3, 4, 3, 2}), plane, std::get<1>(at::adaptive_max_pool2d(plane, {3, 2}))}});
  c.push_back({"aten::adaptive_max_pool3d", {box, l({2, 2, 1})}});
  c.push_back({"aten::adaptive_max_pool3d_backward",
               {floats({3, 2, 2, 2, 1}), box, std::get<1>(at::adaptive_max_pool3d(box, {2, 2, 1}))}});
  c.push_back({"aten::avg_pool2d", {plane, two}});
  c.push_back({"aten::avg_pool2d_backward", {floats({3, 4, 3, 2}), plane, two, two, zero, false, true, none}});
  c.push_back({"aten::avg_pool3d", {box, two3}});
  c.push_back({"aten::avg_pool3d_backward", {floats({3, 2, 2, 2, 1}), box, two3, two3, zero3, false, true, none}});
  const auto max2 = at::max_pool2d_with_indices(plane, {2, 2});
  const auto max3 = at::max_pool3d_with_indices(box, {2, 2, 2});
  c.push_back({"aten::max_pool2d_with_indices", {plane, two}});
  c.push_back({"aten::max_pool2d_with_indices_backward",
               {floats({3, 4, 3, 2}), plane, two, two, zero, one, false, std::get<1>(max2)}});
  c.push_back({"aten::max_pool3d_with_indices", {box, two3}});
  c.push_back({"aten::max_pool3d_with_indices_backward",
               {floats({3, 2, 2, 2, 1}), box, two3, two3, zero3, one3, false, std::get<1>(max3)}});
  c.push_back({"aten::max_unpool2d", {std::get<0>(max2), std::get<1>(max2), l({6, 4})}});
  c.push_back({"aten::max_unpool3d", {std::get<0>(max3), std::get<1>(max3), l({4, 4, 2}), two3, zero3}});
  c.push_back({"aten::channel_shuffle", {plane, 2}});
  c.push_back({"aten::pixel_shuffle", {plane, 2}});
  c.push_back({"aten::pixel_unshuffle", {plane, 2}});
  c.push_back({"aten::im2col", {plane, two, one, zero, two}});
  c.push_back({"aten::col2im", {floats({3, 16, 6}), l({6, 4}), two, one, zero, two}});
}

void add_pads(Calls& c) {
  const at::Tensor row = floats({3, 2, 4}), plane = floats({3, 2, 4, 3}), box = floats({3, 2, 3, 4, 2});
  for (const char* kind : {"reflection", "replication"}) {
    const std::string op = std::string("aten::") + kind + "_pad";
    c.push_back({op + "1d", {row, l({1, 2})}});
    c.push_back({op + "1d_backward", {floats({3, 2, 7}), row, l({1, 2})}});
    c.push_back({op + "2d", {plane, l({1, 2, 1, 0})}});
    c.push_back({op + "2d_backward", {floats({3, 2, 5, 6}), plane, l({1, 2, 1, 0})}});
    c.push_back({op + "3d", {box, l({1, 0, 1, 1, 0, 1})}});
    c.push_back({op + "3d_backward", {floats({3, 2, 4, 6, 3}), box, l({1, 0, 1, 1, 0, 1})}});
  }
  for (const Ints& pads : {Ints{1, 2}, Ints{0, 0, 1, 0}, Ints{1, -1}}) {
    c.push_back({"aten::constant_pad_nd", {floats({5, 4}), l(pads), 7}});
  }
}

void add_resampling(Calls& c) {
  const at::Tensor row = floats({3, 2, 4}), plane = floats({3, 2, 4, 3}), box = floats({3, 2, 3, 4, 2});
  const auto add = [&](const std::string& op, const at::Tensor& from, Ints to, bool corners) {
    Ints result = {3, 2};
    result.insert(result.end(), to.begin(), to.end());
    std::vector<IValue> forward = {from, l(to)}, backward = {floats(result), l(to), l(from.sizes().vec())};
    if (corners) forward.push_back(false), backward.push_back(false);
    c.push_back({"aten::" + op, forward});
    c.push_back({"aten::" + op + "_backward", backward});
  };
  add("upsample_nearest1d", row, {7}, false);
  add("_upsample_nearest_exact1d", row, {7}, false);
  add("upsample_linear1d", row, {7}, true);
  for (const char* op : {"upsample_nearest2d", "_upsample_nearest_exact2d"}) add(op, plane, {6, 5}, false);
  for (const char* op :
       {"upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"}) {
    add(op, plane, {6, 5}, true);
  }
  for (const char* op : {"upsample_nearest3d", "_upsample_nearest_exact3d"}) add(op, box, {4, 5, 3}, false);
  add("upsample_trilinear3d", box, {4, 5, 3}, true);
  const at::Tensor grid = floats({3, 5, 2, 2}) / 8, grid3 = floats({3, 5, 2, 2, 3}) / 16;
  c.push_back({"aten::grid_sampler_2d", {plane, grid, 0, 0, false}});
  c.push_back(
      {"aten::grid_sampler_2d_backward", {floats({3, 2, 5, 2}), plane, grid, 0, 0, false, flags({true, true})}});
  c.push_back({"aten::grid_sampler_3d", {box, grid3, 0, 0, false}});
  c.push_back(
      {"aten::grid_sampler_3d_backward", {floats({3, 2, 5, 2, 2}), box, grid3, 0, 0, false, flags({true, true})}});
}

}  // namespace

void add_planes(Calls& c);
void add_planes(Calls& c) {
  add_convolutions(c);
  add_halos(c);
  add_pools(c);
  add_pads(c);
  add_resampling(c);
}

void add_reductions(Calls& c);
void add_reductions(Calls& c) {
  const at::Tensor x = floats({5, 4}), y = floats({3, 5, 2});
  for (const bool keep : {false, true}) {
    for (const Ints& dims : {Ints{0}, Ints{1}, Ints{0, 1}, Ints{}}) {
      for (const char* op :
           {"aten::sum.dim_IntList", "aten::mean.dim", "aten::amax", "aten::amin", "aten::nansum", "aten::logsumexp"}) {
        if (dims.empty() && std::string(op) == "aten::logsumexp") continue;
        c.push_back({op, {x, l(dims), keep}});
      }
      for (const double order : {2.0, 1.0, 0.0, 3.0, static_cast<double>(INFINITY), -static_cast<double>(INFINITY)}) {
        c.push_back({"aten::linalg_vector_norm", {x, order, l(dims), keep}});
      }
      for (const char* op :
           {"aten::var.correction", "aten::std.correction", "aten::var_mean.correction", "aten::std_mean.correction"}) {
        c.push_back({op, {x, l(dims), 1, keep}});
      }
    }
    for (const std::int64_t d : {0, 1, -1}) {
      for (const char* op : {"aten::all.dim", "aten::any.dim"}) c.push_back({op, {bools({5, 4}), d, keep}});
      for (const char* op : {"aten::argmax", "aten::argmin", "aten::max.dim", "aten::min.dim", "aten::median.dim",
                             "aten::mode", "aten::nanmedian.dim", "aten::prod.dim_int"}) {
        c.push_back({op, {y, d, keep}});
      }
      c.push_back({"aten::aminmax", {y, d, keep}});
    }
    c.push_back({"aten::argmax", {x, none, keep}});
    c.push_back({"aten::kthvalue", {y, 2, 1, keep}});
    c.push_back({"aten::norm.ScalarOpt_dim", {x, 2.0, l({0}), keep}});
  }
  for (const std::int64_t d : {0, 1}) {
    for (const char* op : {"aten::cumsum", "aten::cumprod", "aten::cummax", "aten::cummin", "aten::logcumsumexp"}) {
      c.push_back({op, {y, d}});
    }
    c.push_back({"aten::sort", {y, d, true}});
    c.push_back({"aten::sort.stable", {indices({5, 4}, 3), true, d, false}});
    c.push_back({"aten::topk", {y, 2, d}});
    c.push_back({"aten::topk", {y, 1, d, false}});
  }
  c.push_back({"aten::argmax", {floats({5, 4}).div(1).floor(), 0}});  // with ties
  c.push_back({"aten::max.dim", {floats({5, 4}).floor(), 0}});
  c.push_back({"aten::count_nonzero", {floats({5, 4}).floor(), none}});
  c.push_back({"aten::count_nonzero.dim_IntList", {floats({5, 4}).floor(), l({0})}});
  c.push_back({"aten::dist", {x, floats({5, 4}, 0.5)}});
  c.push_back({"aten::norm.ScalarOpt_dtype", {x, 2.0, at::kDouble}});
  c.push_back({"aten::norm.ScalarOpt_dim_dtype", {x, 2.0, l({0}), false, at::kDouble}});
}

}  // namespace dtensor::testing
