// Operators over cut dims by algorithms with small communication: forward and backward against the same on whole
// tensors, for every layout that an algorithm takes.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <sstream>

#include "dtensor/comm/world.h"
#include "dtensor/runtime/dispatch.h"
#include "dtensor/runtime/payload.h"
#include "tests/runtime/compare.h"

namespace dtensor {
namespace {

using testing::error_of;
using testing::expect_parts;
using testing::integers;
using testing::numbers;
using testing::part_of;
using Tensors = std::vector<at::Tensor>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Case {
  std::string name;
  std::vector<std::vector<std::int64_t>> shapes;
  // From the operands to results that are compared; `other` lays out a tensor that has no gradient (indices) like the
  // mesh's replicas.
  std::function<Tensors(const Tensors&, const std::function<at::Tensor(const at::Tensor&)>& other)> run;
  bool differentiable = true;
};

// The values, and where they were found; places of ties in a topk are free, so the elements there are compared.
Tensors picked(const at::Tensor& x, const std::tuple<at::Tensor, at::Tensor>& found, std::int64_t dim) {
  return {std::get<0>(found), x.gather(dim, std::get<1>(found))};
}

Tensors batch_norm(const Tensors& t, const std::function<at::Tensor(const at::Tensor&)>& other, bool training) {
  if (t.size() == 1) return {at::batch_norm(t[0], {}, {}, {}, {}, training, 0.3, 1e-5, false)};
  const at::Tensor kept = numbers(t[1].sizes().vec(), 4.0).to(t[0].scalar_type());
  const at::Tensor mean = other(kept.clone()), var = other(kept.abs().add(0.5));
  return {at::batch_norm(t[0], t[1], t[2], mean, var, training, 0.3, 1e-5, false), mean, var};
}

const std::vector<Case>& cases() {
  using T = const Tensors&;
  using F = const std::function<at::Tensor(const at::Tensor&)>&;
  static const std::vector<Case> table = {
      {"softmax", {{5, 7}}, [](T t, F) -> Tensors { return {at::softmax(t[0], 1)}; }},
      {"softmax_first", {{7, 3}}, [](T t, F) -> Tensors { return {at::softmax(t[0], 0)}; }},
      {"softmax_middle", {{2, 7, 3}}, [](T t, F) -> Tensors { return {at::softmax(t[0], -2)}; }},
      {"log_softmax", {{5, 7}}, [](T t, F) -> Tensors { return {at::log_softmax(t[0], 1)}; }},
      {"logsumexp",
       {{5, 7}},
       [](T t, F) -> Tensors {
         return {t[0].logsumexp(1), t[0].logsumexp(0, true)};
       }},
      {"logsumexp_all",
       {{5, 7}},
       [](T t, F) -> Tensors {
         return {t[0].logsumexp(std::vector<std::int64_t>{0, 1})};
       }},
      {"norm",
       {{5, 7}},
       [](T t, F) -> Tensors {
         return {t[0].norm(), t[0].norm(2, 1, true)};
       }},
      {"norms",
       {{5, 7}},
       [](T t, F) -> Tensors {
         return {at::linalg_vector_norm(t[0], 1, {{1}}), at::linalg_vector_norm(t[0], 3, {{0, 1}}),
                 at::linalg_vector_norm(t[0], 2.5), at::linalg_vector_norm(t[0], -1, {{1}}, true)};
       }},
      {"norms_of_extremes",
       {{5, 7}},
       [](T t, F) -> Tensors {
         return {at::linalg_vector_norm(t[0], kInfinity, {{1}}), at::linalg_vector_norm(t[0], -kInfinity, {{0}}),
                 at::linalg_vector_norm(t[0], 0, {{1}}), at::norm(t[0], kInfinity)};
       }},
      {"var",
       {{5, 7}},
       [](T t, F) -> Tensors {
         return {t[0].var(1), t[0].std(std::vector<std::int64_t>{0, 1}, false),
                 t[0].var(std::vector<std::int64_t>{0}, true, true)};
       }},
      {"var_mean",
       {{5, 7}},
       [](T t, F) -> Tensors {
         const auto [v, m] = at::var_mean(t[0], at::IntArrayRef({1}), true, false);
         const auto [s, n] = at::std_mean(t[0], at::IntArrayRef({0}), true, true);
         return {v, m, s, n};
       }},
      {"layer_norm", {{5, 7}, {7}, {7}}, [](T t, F) -> Tensors { return {at::layer_norm(t[0], {7}, t[1], t[2])}; }},
      {"layer_norm_bare", {{5, 7}}, [](T t, F) -> Tensors { return {at::layer_norm(t[0], {7})}; }},
      {"batch_norm", {{5, 4, 3}, {4}, {4}}, [](T t, F other) { return batch_norm(t, other, true); }},
      {"batch_norm_of_planes", {{3, 2, 5, 4}, {2}, {2}}, [](T t, F other) { return batch_norm(t, other, true); }},
      {"batch_norm_in_use", {{5, 4, 3}, {4}, {4}}, [](T t, F other) { return batch_norm(t, other, false); }},
      {"batch_norm_bare", {{5, 4}}, [](T t, F other) { return batch_norm(t, other, true); }},
      {"group_norm", {{3, 6, 5}, {6}, {6}}, [](T t, F) -> Tensors { return {at::group_norm(t[0], 2, t[1], t[2])}; }},
      {"group_norm_bare", {{2, 6, 3, 2}}, [](T t, F) -> Tensors { return {at::group_norm(t[0], 3)}; }},
      {"layer_norm_2d",
       {{3, 5, 4}, {5, 4}, {5, 4}},
       [](T t, F) -> Tensors {
         return {at::layer_norm(t[0], {5, 4}, t[1], t[2])};
       }},
      {"embedding",
       {{7, 4}},
       [](T t, F other) -> Tensors {
         return {at::embedding(t[0], other(integers({3, 5}, 7)))};
       }},
      {"embedding_padding",
       {{7, 4}},
       [](T t, F other) -> Tensors { return {at::embedding(t[0], other(integers({9}, 7)), 2)}; }},
      {"gather",
       {{5, 7}},
       [](T t, F other) -> Tensors {
         return {t[0].gather(1, other(integers({5, 3}, 7)))};
       }},
      {"gather_first",
       {{7, 3}},
       [](T t, F other) -> Tensors {
         return {t[0].gather(0, other(integers({7, 3}, 7)))};
       }},
      {"index_select",
       {{5, 7}},
       [](T t, F other) -> Tensors { return {t[0].index_select(1, other(integers({9}, 7)))}; }},
      {"index_add",
       {{7, 3}, {4, 3}},
       [](T t, F other) -> Tensors { return {t[0].index_add(0, other(integers({4}, 7)), t[1], 1.5)}; }},
      {"index_add_in_place",
       {{7, 3}, {4, 3}},
       [](T t, F other) -> Tensors { return {(t[0] * 1).index_add_(0, other(integers({4}, 7)), t[1])}; }},
      {"scatter_add",
       {{5, 7}, {5, 4}},
       [](T t, F other) -> Tensors {
         return {t[0].scatter_add(1, other(integers({5, 4}, 7)), t[1])};
       }},
      {"scatter",
       {{5, 7}, {5, 2}},
       [](T t, F other) -> Tensors {
         const at::Tensor apart = other(at::arange(2, at::kLong).mul(3).expand({5, 2}).contiguous());
         return {t[0].scatter(1, apart, t[1]), t[0].scatter(1, apart, 2.5)};
       }},
      {"argmax",
       {{5, 7}},
       [](T t, F) -> Tensors {
         return {t[0].argmax(1), t[0].argmin(1, true), t[0].argmax(), t[0].argmin()};
       },
       false},
      {"max_dim",
       {{5, 7}},
       [](T t, F) -> Tensors {
         const auto [v, i] = t[0].max(1);
         const auto [w, j] = t[0].min(0, true);
         return {v, i, w, j};
       },
       false},
      {"max_dim_gradient",
       {{5, 7}},
       [](T t, F) -> Tensors {
         return {std::get<0>(t[0].max(1)), std::get<0>(t[0].min(0))};
       }},
      {"extremes_of_ties",
       {{5, 7}},
       [](T t, F) -> Tensors {
         const at::Tensor x = (t[0] * 2).round();
         const auto [v, i] = x.max(1);
         return {v, i, x.argmin(1), x.argmax(), x.to(at::kLong).argmax(1), x.gt(0).to(at::kInt).argmin(0)};
       },
       false},
      {"cumsum",
       {{5, 7}},
       [](T t, F) -> Tensors {
         return {t[0].cumsum(1), t[0].cumsum(0)};
       }},
      {"cumsum_of_integers",
       {{5, 7}},
       [](T t, F) -> Tensors {
         return {(t[0] * 9).to(at::kInt).cumsum(1), t[0].gt(0).cumsum(1)};
       },
       false},
      {"topk",
       {{5, 7}},
       [](T t, F) -> Tensors {
         Tensors all = picked(t[0], t[0].topk(3, 1), 1);
         for (const at::Tensor& more : picked(t[0], t[0].topk(1, 0, false), 0)) all.push_back(more);
         for (const at::Tensor& more : picked(t[0], t[0].topk(7, 1), 1)) all.push_back(more);
         return all;
       }},
      {"cross_entropy",
       {{5, 7}},
       [](T t, F other) -> Tensors {
         return {at::cross_entropy_loss(t[0], other(integers({5}, 7))),
                 at::cross_entropy_loss(t[0], other(integers({5}, 7)), {}, at::Reduction::Sum),
                 at::cross_entropy_loss(t[0], other(integers({5}, 7)), {}, at::Reduction::None)};
       }},
      {"cross_entropy_of_pixels",
       {{2, 7, 3, 2}},
       [](T t, F other) -> Tensors {
         const at::Tensor target = other(integers({2, 3, 2}, 7));
         return {at::cross_entropy_loss(t[0], target), at::cross_entropy_loss(t[0], target, {}, at::Reduction::None),
                 at::cross_entropy_loss(t[0], target, other(numbers({7}).abs().add(0.5).to(t[0].scalar_type())),
                                        at::Reduction::Mean, 3)};
       }},
      {"cross_entropy_weighted",
       {{5, 7}},
       [](T t, F other) -> Tensors {
         const at::Tensor weight = other(numbers({7}).abs().add(0.5).to(t[0].scalar_type()));
         return {at::cross_entropy_loss(t[0], other(integers({5}, 7)), weight, at::Reduction::Mean, 3),
                 at::cross_entropy_loss(t[0], other(integers({5}, 7)), weight, at::Reduction::Sum, 3)};
       }},
      {"convolution",
       {{2, 3, 7}, {4, 3, 3}, {4}},
       [](T t, F) -> Tensors {
         return {at::conv1d(t[0], t[1], t[2], 1, 1), at::conv1d(t[0], t[1], {}, 2, 2, 3)};
       }},
      {"convolution_of_less_than_windows",
       {{2, 1, 3}, {2, 1, 5}, {2}},
       [](T t, F) -> Tensors {
         return {at::conv1d(t[0], t[1], t[2], 1, 4), at::conv1d(t[0], t[1], t[2], 4, 1)};
       }},
      {"convolution_in_steps",
       {{1, 2, 9}, {2, 2, 1}},
       [](T t, F) -> Tensors {
         return {at::conv1d(t[0], t[1], {}, 4), at::conv1d(t[0], t[1], {}, 2, 3)};
       }},
      {"convolution_of_planes",
       {{2, 2, 6, 5}, {4, 2, 3, 2}, {4}},
       [](T t, F) -> Tensors {
         return {at::conv2d(t[0], t[1], t[2], {2, 1}, {1, 0}, {1, 2})};
       }},
      {"convolution_in_groups",
       {{1, 4, 5, 3}, {4, 2, 3, 3}, {4}},
       [](T t, F) -> Tensors { return {at::conv2d(t[0], t[1], t[2], 1, 1, 1, 2)}; }},
      {"convolution_of_boxes",
       {{1, 2, 3, 4, 5}, {2, 2, 2, 2, 2}},
       [](T t, F) -> Tensors {
         return {at::conv3d(t[0], t[1], {}, {1, 2, 1}, {1, 0, 1})};
       }},
      {"max_pool",
       {{2, 3, 7, 5}},
       [](T t, F) -> Tensors {
         return {at::max_pool2d(t[0], {3, 2}, {2, 1}, {1, 1}), at::max_pool2d(t[0], {2, 2}, {3, 2}, 0, {2, 1}, true),
                 at::max_pool2d(t[0], 2)};
       }},
      {"max_pool_places",
       {{3, 7, 5}},
       [](T t, F) -> Tensors {
         const at::Tensor lows = t[0].masked_fill(t[0].lt(0.5), -kInfinity), ties = (t[0] * 2).round();
         const auto [v, i] = at::max_pool2d_with_indices(lows, {3, 2}, {2, 1}, {1, 1}, {2, 1});
         const bool integers = TORCH_VERSION_MAJOR > 1;  // which libtorch 1.13 does not take
         const auto [w, j] =
             at::max_pool2d_with_indices(integers ? ties.to(at::kLong) : ties, {3, 3}, {1, 2}, {1, 1}, {1, 1}, true);
         return {v, i, w, j};
       },
       false},
      {"max_pool_of_boxes",
       {{1, 2, 3, 4, 5}},
       [](T t, F) -> Tensors {
         return {at::max_pool3d(t[0], {2, 3, 2}, {1, 2, 2}, {1, 1, 0}, {1, 1, 2})};
       }},
      {"avg_pool",
       {{2, 3, 7, 5}},
       [](T t, F) -> Tensors {
         return {at::avg_pool2d(t[0], {3, 2}, {2, 1}, {1, 1}),
                 at::avg_pool2d(t[0], {3, 2}, {2, 2}, {1, 1}, true, false),
                 at::avg_pool2d(t[0], {3, 3}, {2, 2}, {1, 1}, true), at::avg_pool2d(t[0], 2, {}, 0, false, true, 3)};
       }},
      {"avg_pool_of_boxes",
       {{1, 2, 3, 4, 5}},
       [](T t, F) -> Tensors {
         return {at::avg_pool3d(t[0], {2, 3, 2}, {1, 2, 2}, {1, 1, 0}, true, false)};
       }},
      {"convolution_transposed",
       {{2, 3, 7}, {3, 4, 3}, {4}},
       [](T t, F) -> Tensors { return {at::conv_transpose1d(t[0], t[1], t[2], 2, 1, 1)}; }},
  };
  return table;
}

at::Tensor laid_out(const at::Tensor& full, const Spec& spec, const DeviceMesh& mesh) {
  const Dims shape = spec.local_shape(*mesh.coordinate());
  return wrap(part_of(full, spec, mesh).view({shape.data(), shape.size()}).clone(), spec,
              std::make_shared<const DeviceMesh>(mesh));
}

// The first operand is laid out; the others follow where they must.
void check(const Case& c, const DeviceMesh& mesh, const Spec& spec, const Tensors& full, const Tensors& expected,
           const Tensors& gradients, double tolerance) {
  const auto replica = [&](const at::Tensor& t) -> at::Tensor {
    return distribute_tensor(t, mesh, Placements(static_cast<std::size_t>(mesh.ndim()), Replicate()));
  };
  SCOPED_TRACE(c.name + " of " + spec.to_string() + " on rank " + std::to_string(mesh.rank()));
  Tensors inputs = {laid_out(full[0].detach(), spec, mesh)};
  for (std::size_t i = 1; i < full.size(); ++i) inputs.push_back(replica(full[i].detach()));
  if (c.differentiable) {
    for (at::Tensor& input : inputs) input.requires_grad_(true);
  }
  const Tensors results = c.run(inputs, replica);
  ASSERT_EQ(results.size(), expected.size());
  at::Tensor loss;
  for (std::size_t k = 0; k < results.size(); ++k) {
    expect_parts(results[k].detach(), expected[k], tolerance, "result " + std::to_string(k));
    if (::testing::Test::HasFatalFailure()) return;
    if (!c.differentiable) continue;
    const at::Tensor squares = (results[k] * results[k] * static_cast<double>(k + 1)).sum();
    loss = loss.defined() ? loss + squares : squares;
  }
  if (!c.differentiable) return;
  loss.backward();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    ASSERT_TRUE(inputs[i].grad().defined());
    expect_parts(inputs[i].grad(), gradients[i], 10 * tolerance, "gradient " + std::to_string(i));
  }
}

// Plain, uneven and empty shards, orders, and factored and virtual layouts, of a tensor of this shape.
std::vector<Spec> specs_of(const at::Tensor& full, const Dims& mesh_shape) {
  const TensorMeta meta(Dims(full.sizes().begin(), full.sizes().end()),
                        full.scalar_type() == at::kFloat ? DType::kF32 : DType::kF64);
  const Mesh mesh = Mesh::make(mesh_shape);
  std::vector<Spec> result;
  for (const Placements& p : sweep::all_placements(mesh_shape.size(), meta.ndim())) {
    const bool partial = std::any_of(p.begin(), p.end(), [](const Placement& one) { return one.is_partial(); });
    if (!partial) result.push_back(Spec::make(meta, mesh, p));
  }
  if (mesh_shape.size() == 1) {
    for (std::int64_t d = 0; d < meta.ndim(); ++d) result.push_back(Spec::make(meta, mesh, {StridedShard(d, 2)}));
  } else {
    for (std::int64_t d = 0; d < meta.ndim(); ++d) {
      result.push_back(Spec::make(meta, mesh, {Shard(d), Shard(d)}, {{d, {1, 0}}}));
    }
  }
  return result;
}

class Algorithms : public ::testing::TestWithParam<std::string> {};

const Case& case_named(const std::string& name) {
  for (const Case& c : cases()) {
    if (c.name == name) return c;
  }
  throw std::runtime_error("no case " + name);
}

// What a case gives on whole tensors, and the gradients of its operands.
struct Whole {
  Tensors full, expected, gradients;
};

Whole run_whole(const Case& c, at::ScalarType type) {
  Tensors full, leaves;
  for (std::size_t i = 0; i < c.shapes.size(); ++i) {
    full.push_back(numbers(c.shapes[i], 0.3 + 1.7 * static_cast<double>(i)).to(type));
    leaves.push_back(full.back().clone().requires_grad_(c.differentiable));
  }
  Tensors expected = c.run(leaves, [](const at::Tensor&t) { return t; }), gradients;
  if (c.differentiable) {
    at::Tensor loss;
    for (std::size_t k = 0; k < expected.size(); ++k) {
      const at::Tensor squares = (expected[k] * expected[k] * static_cast<double>(k + 1)).sum();
      loss = loss.defined() ? loss + squares : squares;
    }
    loss.backward();
    for (const at::Tensor& leaf : leaves) gradients.push_back(leaf.grad());
  }
  for (at::Tensor& t : expected) t = t.detach();
  return {full, expected, gradients};
}

void sweep_case(const Case& c, at::ScalarType type, double tolerance) {
  const auto [full, expected, gradients] = run_whole(c, type);
  for (const Dims& shape : {Dims{2}, Dims{3}, Dims{4}, Dims{2, 2}}) {
    const std::vector<Spec> specs = specs_of(full[0], shape);
    run_ranks(Mesh::make(shape).size(), [&](World& world) {
      const DeviceMesh mesh = init_device_mesh(world, at::kCPU, shape);
      const NoRuleGuard rules(NoRule::kRefuse);
      for (const bool algorithms : {true, false}) {
        const DecideGuard guard({.algorithms_first = algorithms});
        for (const Spec& spec : specs) {
          check(c, mesh, spec, full, expected, gradients, tolerance);
          if (::testing::Test::HasFatalFailure()) throw std::runtime_error("a case failed");
        }
      }
    });
  }
}

TEST_P(Algorithms, AreThoseOfTheWhole) { sweep_case(case_named(GetParam()), at::kDouble, 1e-9); }
TEST_P(Algorithms, AreThoseOfTheWholeInFloat) { sweep_case(case_named(GetParam()), at::kFloat, 1e-5); }

std::vector<std::string> names() {
  std::vector<std::string> result;
  for (const Case& c : cases()) result.push_back(c.name);
  return result;
}

INSTANTIATE_TEST_SUITE_P(All, Algorithms, ::testing::ValuesIn(names()),
                         [](const ::testing::TestParamInfo<std::string>& which) { return which.param; });

// ---- values at the edges

using Run = std::function<at::Tensor(const at::Tensor&)>;

// On three ranks, along the last dim.
void expect_like_plain(const at::Tensor& x, const Run& run, double tolerance = 0) {
  const at::Tensor expected = run(x);
  run_ranks(3, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3});
    const DecideGuard guard({.algorithms_first = true});
    const at::Tensor result = run(distribute_tensor(x, mesh, {Shard(x.dim() - 1)}));
    expect_parts(result, expected, tolerance, "result");
  });
}

at::Tensor edges() {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  return at::tensor({0.5, -1.0, 2.0, kInfinity, 1.0,       -2.0,       -kInfinity, 1.0, 2.0, 3.0,  //
                     nan, 1.0,  nan, 2.0,       kInfinity, -kInfinity, 2.0,        2.0, 2.0, -kInfinity},
                    at::kDouble)
      .view({4, 5});
}

TEST(AlgorithmEdges, NaNsAndInfinities) {
  const at::Tensor lows = at::full({2, 5}, -kInfinity, at::kDouble);
  for (const at::Tensor& x : {edges(), lows, at::cat({edges(), lows})}) {
    expect_like_plain(
        x, [](const at::Tensor& t) { return at::softmax(t, 1); }, 1e-12);
    expect_like_plain(
        x, [](const at::Tensor& t) { return at::log_softmax(t, 1); }, 1e-12);
    expect_like_plain(
        x, [](const at::Tensor& t) { return t.logsumexp(1); }, 1e-12);
    expect_like_plain(
        x, [](const at::Tensor& t) { return t.norm(2, 1); }, 1e-12);
    expect_like_plain(x, [](const at::Tensor& t) { return at::linalg_vector_norm(t, kInfinity, {{1}}); });
    expect_like_plain(
        x, [](const at::Tensor& t) { return t.var(1); }, 1e-12);
    expect_like_plain(x, [](const at::Tensor& t) { return t.argmax(1); });
    expect_like_plain(x, [](const at::Tensor& t) { return t.argmin(1); });
    expect_like_plain(x, [](const at::Tensor& t) { return t.argmax(); });
    expect_like_plain(x, [](const at::Tensor& t) { return std::get<0>(t.max(1)); });
    expect_like_plain(x, [](const at::Tensor& t) { return std::get<1>(t.max(1)); });
    expect_like_plain(x, [](const at::Tensor& t) { return std::get<1>(t.min(1)); });
    expect_like_plain(
        x, [](const at::Tensor& t) { return t.cumsum(1); }, 1e-12);
    expect_like_plain(x, [](const at::Tensor& t) { return std::get<0>(t.topk(3, 1)); });
    expect_like_plain(x, [](const at::Tensor& t) { return t.index_select(1, at::zeros_like(t, at::kLong).sum(1)); });
  }
}

TEST(AlgorithmEdges, MinusZeroIsFound) {
  const at::Tensor x = at::full({1, 4}, -0.0, at::kDouble);
  run_ranks(3, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3});
    const DTensor place = distribute_tensor(at::full({1, 1}, 2, at::kLong), mesh, {Replicate()});
    const at::Tensor found = DTensor(distribute_tensor(x, mesh, {Shard(1)}).gather(1, place)).full_tensor();
    EXPECT_TRUE(found.signbit().all().item<bool>());
  });
}

TEST(AlgorithmEdges, HalfIsSummedInFloat) {
  for (const auto type : {at::kHalf, at::kBFloat16}) {
    const at::Tensor x = numbers({3, 500}).mul(4).to(type);
    expect_like_plain(
        x, [](const at::Tensor& t) { return t.to(at::kFloat).softmax(1).to(t.scalar_type()); }, 1e-3);
    if (type == at::kHalf && TORCH_VERSION_MAJOR < 2) continue;  // libtorch 1.13 has none of the rest
    expect_like_plain(
        x, [](const at::Tensor& t) { return t.cumsum(1).to(at::kFloat); }, 0.05);
    expect_like_plain(x, [](const at::Tensor& t) { return t.argmax(1); });
    if (type == at::kHalf) continue;
    expect_like_plain(
        x, [](const at::Tensor& t) { return at::softmax(t, 1); }, 1e-2);
    expect_like_plain(
        x, [](const at::Tensor& t) { return t.norm(2, 1); }, 1e-2);
    expect_like_plain(
        x, [](const at::Tensor& t) { return at::layer_norm(t, {500}); }, 2e-2);
  }
}

TEST(AlgorithmEdges, ComplexAndIntegers) {
  const at::Tensor z = at::complex(numbers({3, 7}), numbers({3, 7}, 0.9));
  const auto parts = [](const at::Tensor& t) { return at::view_as_real(t); };
  expect_like_plain(
      z, [](const at::Tensor& t) { return t.norm(2, 1); }, 1e-12);
  expect_like_plain(
      z, [](const at::Tensor& t) { return at::linalg_vector_norm(t, 1, {{1}}); }, 1e-12);
  expect_like_plain(
      z, [](const at::Tensor& t) { return t.var(1); }, 1e-12);
  run_ranks(3, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3});
    const DecideGuard guard({.algorithms_first = true});
    const DTensor d = distribute_tensor(z, mesh, {Shard(1)});
    EXPECT_TRUE(at::allclose(parts(DTensor(d.cumsum(1)).full_tensor()), parts(z.cumsum(1))));
  });
  const at::Tensor n = integers({3, 7}, 5).sub(2);
  expect_like_plain(n, [](const at::Tensor& t) { return std::get<1>(t.max(1)); });
  expect_like_plain(n, [](const at::Tensor& t) { return t.to(at::kByte).cumsum(1); });
  expect_like_plain(n, [](const at::Tensor& t) { return std::get<0>(t.gt(0).max(1)); });
  expect_like_plain(n, [](const at::Tensor& t) { return std::get<0>(t.topk(2, 1)); });
}

TEST(AlgorithmEdges, SlicesOfMinusInfinityAreZerosWhereTheOperatorSaysSo) {
  const auto op = c10::Dispatcher::singleton().findSchema({"aten::_safe_softmax", ""});
  if (!op) GTEST_SKIP() << "this libtorch does not have it";
  expect_like_plain(
      at::cat({edges(), at::full({2, 5}, -kInfinity, at::kDouble)}),
      [&](const at::Tensor& t) {
        torch::jit::Stack stack = {t, std::int64_t{1}, c10::IValue()};
        op->callBoxed(&stack);
        return stack.at(0).toTensor();
      },
      1e-12);
}

// A Partial of one mesh dim passes through what is merged over another.
TEST(AlgorithmEdges, LinearOnesCarryPartials) {
  const at::Tensor x = numbers({3, 7}), y = at::log_softmax(x, 1);
  run_ranks(4, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2, 2});
    const DecideGuard guard({.algorithms_first = true});
    const auto in_parts = [&](const at::Tensor& t) {
      const at::Tensor part = distribute_tensor(t, mesh, {Replicate(), Shard(1)}).to_local();
      return from_local(part * ((*mesh.coordinate())[0] == 0 ? 3 : -2), mesh, {Partial(), Shard(1)},
                        {.shape = Dims{3, 7}});
    };
    const Placements same = {Partial(), Shard(1)};
    const at::Tensor sums = in_parts(x).cumsum(1);
    EXPECT_EQ(DTensor(sums).placements(), same);
    expect_parts(sums, x.cumsum(1), 1e-12, "cumsum");
    const DTensor result = distribute_tensor(y, mesh, {Replicate(), Shard(1)});
    const at::Tensor gradient = at::_log_softmax_backward_data(in_parts(x), result, 1, at::kDouble);
    EXPECT_EQ(DTensor(gradient).placements(), same);
    expect_parts(gradient, at::_log_softmax_backward_data(x, y, 1, at::kDouble), 1e-12, "gradient");
  });
}

TEST(AlgorithmEdges, OutFormsAndRanksOutsideTheMesh) {
  const at::Tensor x = numbers({3, 7});
  run_ranks(3, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, Mesh::from_ranks({2}, {0, 2}));
    const DecideGuard guard({.algorithms_first = true});
    const DTensor part = distribute_tensor(x, mesh, {Shard(1)});
    at::Tensor out = distribute_tensor(at::zeros_like(x), mesh, {Shard(0)});
    at::cumsum_out(out, part, 1);
    const DTensor sums = part.clone().cumsum_(1);
    const DTensor most = part.argmax(1);
    EXPECT_EQ(DTensor(out).placements(), Placements{Shard(0)});
    if (!mesh.contains_me()) return;
    expect_parts(out, x.cumsum(1), 1e-12, "out");
    expect_parts(sums, x.cumsum(1), 1e-12, "in place");
    expect_parts(most, x.argmax(1), 0, "argmax");
  });
}

TEST(AlgorithmEdges, HalosOfOtherTypesAndMemoryOrders) {
  const at::Tensor x = numbers({2, 3, 9, 7}), w = numbers({4, 3, 3, 3}, 0.7);
  run_ranks(3, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3});
    const DecideGuard guard({.algorithms_first = true});
    const auto weight = [&](at::ScalarType type) { return distribute_tensor(w.to(type), mesh, {Replicate()}); };
    const auto part = [&](const at::Tensor& t) { return distribute_tensor(t, mesh, {Shard(2)}); };
    const at::Tensor floats = x.to(at::kFloat), last = part(floats).contiguous(at::MemoryFormat::ChannelsLast);
    EXPECT_TRUE(DTensor(last).to_local().is_contiguous(at::MemoryFormat::ChannelsLast));
    expect_parts(at::conv2d(last, weight(at::kFloat), {}, 1, 1), at::conv2d(floats, w.to(at::kFloat), {}, 1, 1), 1e-5,
                 "channels last");
    expect_parts(at::max_pool2d(last, 3, 2, 1), at::max_pool2d(floats, 3, 2, 1), 0, "largest, channels last");
    const at::Tensor small = x.to(at::kBFloat16);
    expect_parts(at::avg_pool2d(part(small), 3, 2, 1), at::avg_pool2d(small, 3, 2, 1), 1e-2, "bfloat16");
    expect_parts(at::max_pool2d(part(small), 3, 2, 1), at::max_pool2d(small, 3, 2, 1), 0, "largest of bfloat16");
    at::Tensor out = distribute_tensor(at::zeros({2, 3, 5, 4}, at::kDouble), mesh, {Shard(0)});
    at::avg_pool2d_out(out, part(x), 3, 2, 1);
    expect_parts(out, at::avg_pool2d(x, 3, 2, 1), 1e-12, "out");
    EXPECT_EQ(DTensor(out).placements(), Placements{Shard(0)});
  });
}

// A convolution, drawn: one to three dims, any stride, padding and gaps that leave an output.
Case random_convolution(sweep::Random& random) {
  const std::int64_t ndim = 1 + random.below(3), groups = 1 + random.below(2);
  std::vector<std::int64_t> x = {1 + random.below(3), 2 * groups}, w = {2 * groups, 2}, stride, padding, dilation;
  for (std::int64_t d = 0; d < ndim; ++d) {
    const std::int64_t kernel = 1 + random.below(4), gap = 1 + random.below(2), span = (kernel - 1) * gap + 1;
    stride.push_back(1 + random.below(4));
    dilation.push_back(gap);
    padding.push_back(random.below(span + 1));
    x.push_back(std::max<std::int64_t>(1, span - 2 * padding.back()) + random.below(ndim == 1 ? 9 : 4));
    w.push_back(kernel);
  }
  std::ostringstream name;
  const auto say = [&](const char* what, at::IntArrayRef numbers) { name << what << ' ' << numbers << ' '; };
  say("convolution of", x);
  say("weight", w);
  say("stride", stride);
  say("padding", padding);
  say("dilation", dilation);
  return {name.str(), {x, w, {w[0]}}, [=](const Tensors& t, const auto&) -> Tensors {
            return {at::convolution(t[0], t[1], t[2], stride, padding, dilation, false, {0}, groups)};
          }};
}

// On a mesh that is drawn, too, with cuts of the last dims, so many, and of the first.
void check_drawn(const Case& c, std::int64_t planes, sweep::Random& random) {
  const Dims shape = random.pick(std::vector<Dims>{{2}, {3}, {4}, {2, 2}, {3, 2}});
  const auto ndim = static_cast<std::int64_t>(c.shapes[0].size());
  Placements placements;
  for (std::size_t m = 0; m < shape.size(); ++m) {
    placements.push_back(Shard(random.chance(4) ? 0 : ndim - 1 - random.below(planes)));
  }
  const Whole whole = run_whole(c, at::kDouble);
  const TensorMeta meta(Dims(c.shapes[0].begin(), c.shapes[0].end()), DType::kF64);
  const Spec spec = Spec::make(meta, Mesh::make(shape), placements);
  run_ranks(Mesh::make(shape).size(), [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, shape);
    const NoRuleGuard rules(NoRule::kRefuse);
    const DecideGuard guard({.algorithms_first = true});
    check(c, mesh, spec, whole.full, whole.expected, whole.gradients, 1e-9);
    if (::testing::Test::HasFatalFailure()) throw std::runtime_error("a case failed");
  });
}

TEST(AlgorithmEdges, HalosOfAnyWindows) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    sweep::Random random(seed);
    const Case c = random_convolution(random);
    check_drawn(c, static_cast<std::int64_t>(c.shapes[0].size()) - 2, random);
  }
}

// A pooling, drawn: planes or boxes, of the largest (with its places) or of averages.
Case random_pooling(sweep::Random& random) {
  const std::int64_t ndim = 2 + random.below(2);
  const bool largest = random.chance(2), ceil = random.chance(2), counts = random.chance(2), divides = random.chance(4);
  std::vector<std::int64_t> x = {1 + random.below(2), 2}, kernel, stride, padding, dilation;
  for (std::int64_t d = 0; d < ndim; ++d) {
    kernel.push_back(1 + random.below(4));
    const std::int64_t gap = largest ? 1 + random.below(2) : 1, span = (kernel.back() - 1) * gap + 1;
    stride.push_back(1 + random.below(4));
    dilation.push_back(gap);
    padding.push_back(random.below(kernel.back() / 2 + 1));
    // So that no window is all padding, for which libtorch names a place outside of the plane.
    x.push_back((largest ? std::max(gap, span - 2 * padding.back()) : span) + random.below(5));
  }
  if (random.chance(3)) x.erase(x.begin());
  std::ostringstream name;
  const auto say = [&](const char* what, at::IntArrayRef numbers) { name << what << ' ' << numbers << ' '; };
  say(largest ? "the largest of" : "the average of", x);
  say("kernel", kernel);
  say("stride", stride);
  say("padding", padding);
  say("dilation", dilation);
  name << (ceil ? "ceil " : "") << (counts ? "with padding " : "") << (divides ? "by 3" : "");
  return {name.str(), {x}, [=](const Tensors& t, const auto&) -> Tensors {
            if (largest) {
              const auto pool = ndim == 2 ? at::max_pool2d_with_indices : at::max_pool3d_with_indices;
              const auto [values, places] = pool(t[0], kernel, stride, padding, dilation, ceil);
              return {values, places.to(t[0].scalar_type())};
            }
            const auto pool = ndim == 2 ? at::avg_pool2d : at::avg_pool3d;
            return {pool(t[0], kernel, stride, padding, ceil, counts,
                         divides ? c10::optional<std::int64_t>(3) : c10::nullopt)};
          }};
}

TEST(AlgorithmEdges, HalosOfAnyPools) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    sweep::Random random(seed);
    check_drawn(random_pooling(random), 2, random);
  }
}

// NaNs, ties and nothing but padding, in both orders of memory, there and back.
TEST(AlgorithmEdges, HalosFindPlaces) {
  const at::Tensor x = numbers({2, 3, 9, 7});
  at::Tensor odd = x.masked_fill(x.gt(0.8), std::numeric_limits<double>::quiet_NaN());
  odd.masked_fill_(odd.lt(0), -kInfinity);
  const auto pool = [](const at::Tensor& t) {
    return at::max_pool2d_with_indices(t, {3, 2}, {2, 1}, {1, 1}, {2, 2}, true);
  };
  const auto back = [](const at::Tensor& g, const at::Tensor& t, const at::Tensor& places) {
    return at::max_pool2d_with_indices_backward(g, t, {3, 2}, {2, 1}, {1, 1}, {2, 2}, true, places);
  };
  for (const auto order : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
    for (const at::Tensor& t : {odd, at::full_like(x, -kInfinity)}) {
      const at::Tensor plain = t.contiguous(order);
      const auto [v, i] = pool(plain);
      const at::Tensor gradient = numbers(v.sizes(), 3).contiguous(order), expected = back(gradient, plain, i);
      run_ranks(4, [&, v = v, i = i](World& world) {
        const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2, 2});
        const DecideGuard guard({.algorithms_first = true});
        for (const std::int64_t dim : {3, 2, 1}) {
          const auto laid = [&](const at::Tensor& whole) -> at::Tensor {
            return distribute_tensor(whole, mesh, {Shard(2), Shard(dim)}).contiguous(order);
          };
          const at::Tensor mine = laid(t);
          const auto [values, places] = pool(mine);
          expect_parts(values, v, 0, "values");
          expect_parts(places, i, 0, "places");
          EXPECT_EQ(values.strides(), v.strides());
          expect_parts(back(laid(gradient), mine, places), expected, 1e-12, "gradient");
        }
      });
    }
  }
}

// Of one dim, without gradients, too; of integers.
TEST(AlgorithmEdges, HalosOfPoolsThatAreMadeOfOthers) {
  const at::Tensor x = numbers({2, 3, 7}), planes = numbers({2, 3, 5, 7}).mul(10);
  expect_like_plain(x, [](const at::Tensor& t) { return at::max_pool1d(t, 3, 2, 1); });
  expect_like_plain(
      x, [](const at::Tensor& t) { return at::avg_pool1d(t, 3, 2, 1); }, 1e-12);
  expect_like_plain(planes.to(at::kLong), [](const at::Tensor& t) { return at::avg_pool2d(t, 3, 2, 1); });
  if (TORCH_VERSION_MAJOR < 2) return;  // libtorch 1.13 does not take integers here
  expect_like_plain(planes.to(at::kByte), [](const at::Tensor& t) { return at::max_pool2d(t, 3, 2, 1); });
}

// Products whose parts want other sizes in memory: a part of one column with one scale, and rows that overlap.
TEST(AlgorithmEdges, ProductsOfOddParts) {
#if TORCH_VERSION_MAJOR >= 2
  const auto op = c10::Dispatcher::singleton().findSchema({"aten::_grouped_mm", ""});
  if (!op || !op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) GTEST_SKIP() << "no such kernel for CPUs";
  const auto f8 = at::kFloat8_e4m3fn;
  const at::Tensor a = numbers({4, 16}).to(f8), b = numbers({2, 16}, 3).to(f8),
                   scale = at::full({1, 1}, 0.5, at::kFloat);
  const auto scaled = [](const at::Tensor& left, const at::Tensor& right, const at::Tensor& by) {
    return at::_scaled_mm(left, right.t(), by, by, {}, {}, at::kBFloat16);
  };
  const at::Tensor line = numbers({32}).to(at::kBFloat16), groups = numbers({2, 16, 8}).to(at::kBFloat16);
  const at::Tensor ends = at::tensor({2, 4}, at::kInt),
                   expected = at::_grouped_mm(line.unfold(0, 16, 1).slice(0, 0, 4).contiguous(), groups, ends);
  run_ranks(2, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2});
    const auto laid = [&](const at::Tensor& t, const Placement& as) -> at::Tensor {
      return distribute_tensor(t, mesh, {as});
    };
    expect_parts(scaled(laid(a, Replicate()), laid(b, Shard(0)), laid(scale, Replicate())), scaled(a, b, scale), 1e-2,
                 "scaled");
    const at::Tensor rows = laid(line, Replicate()).unfold(0, 16, 1).slice(0, 0, 4);
    expect_parts(at::_grouped_mm(rows, laid(groups, Shard(2)), laid(ends, Replicate())), expected, 1e-2, "in groups");
  });
#endif
}

TEST(AlgorithmEdges, HalosHaveSecondDerivatives) {
  const at::Tensor x = numbers({2, 3, 9, 7}), w = numbers({4, 3, 3, 3}, 0.7), b = numbers({4}, 0.9);
  const auto loss = [](const Tensors& t) {
    const at::Tensor y = at::conv2d(t[0], t[1], t[2], {2, 1}, {1, 2}, {2, 1});
    const Tensors first = torch::autograd::grad({y.pow(3).sum()}, t, {}, true, true);
    return y.sum() + first[0].pow(2).sum() + first[1].pow(2).sum() + first[2].pow(2).sum();
  };
  const Tensors plain = {x.clone().requires_grad_(), w.clone().requires_grad_(), b.clone().requires_grad_()};
  loss(plain).backward();
  run_ranks(4, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2, 2});
    const DecideGuard guard({.algorithms_first = true});
    const Placements whole = {Replicate(), Replicate()};
    for (const Placement& second :
         {Placement(Shard(3)), Placement(Shard(2)), Placement(Shard(0)), Placement(Partial())}) {
      const Tensors mine = {distribute_tensor(x, mesh, {Shard(2), second}).requires_grad_(),
                            distribute_tensor(w, mesh, whole).requires_grad_(),
                            distribute_tensor(b, mesh, whole).requires_grad_()};
      loss(mine).backward();
      for (std::size_t i = 0; i < mine.size(); ++i) expect_parts(mine[i].grad(), plain[i].grad(), 1e-7, "gradient");
    }
  });
}

// Each row of a sub-mesh has its own tensor, and talks to itself alone.
TEST(AlgorithmEdges, HalosOnRowsOfASubMesh) {
  run_ranks(4, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2, 2}, {"dp", "cp"});
    const DecideGuard guard({.algorithms_first = true});
    const double row = static_cast<double>((*mesh.coordinate())[0]);
    const at::Tensor x = numbers({2, 3, 7}, 0.3 + row), w = numbers({4, 3, 3}, 1 + row);
    const DeviceMesh line = mesh["cp"];
    const DTensor d = distribute_tensor(x, line, {Shard(2)});
    const at::Tensor y = at::conv1d(d, distribute_tensor(w, line, {Replicate()}), {}, 1, 1);
    EXPECT_EQ(DTensor(y).placements(), Placements{Shard(2)});
    expect_parts(y, at::conv1d(x, w, {}, 1, 1), 1e-12, "of one row");
  });
}

TEST(AlgorithmEdges, IndicesOutOfRangeAreRefused) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2});
    const DTensor weight = distribute_tensor(numbers({6, 2}), mesh, {Shard(0)});
    const DTensor places = distribute_tensor(at::arange(-1, 7, 7, at::kLong), mesh, {Replicate()});
    EXPECT_EQ(error_of([&] { at::embedding(weight, places.narrow(0, 1, 1)); }),
              "[aten::embedding] an index is out of range; got 6; expected 0 to 5");
    EXPECT_EQ(error_of([&] { weight.index_select(0, places.narrow(0, 0, 1)); }),
              "[aten::index_select] an index is out of range; got -1; expected 0 to 5");
  });
}

}  // namespace
}  // namespace dtensor
