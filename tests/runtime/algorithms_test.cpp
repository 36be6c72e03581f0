// Operators over cut dims by algorithms with small communication: forward and backward against the same on whole
// tensors, for every layout that an algorithm takes; and how little they send.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

#include "dtensor/comm/world.h"
#include "dtensor/core/boxes.h"
#include "dtensor/runtime/dispatch.h"
#include "dtensor/runtime/explain.h"
#include "dtensor/runtime/payload.h"
#include "dtensor/runtime/record.h"
#include "dtensor/runtime/tensor.h"
#include "tests/core/sweep.h"
#include "tests/runtime/helpers.h"

namespace dtensor {
namespace {

using testing::error_of;
using testing::numbers;
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

at::Tensor integers(at::IntArrayRef sizes, std::int64_t below) {
  std::int64_t n = 1;
  for (const std::int64_t size : sizes) n *= size;
  return at::arange(n, at::kLong).mul(7).add(3).remainder(below).view(sizes);
}

// The values, and where they were found; places of ties in a topk are free, so the elements there are compared.
Tensors picked(const at::Tensor& x, const std::tuple<at::Tensor, at::Tensor>& found, std::int64_t dim) {
  return {std::get<0>(found), x.gather(dim, std::get<1>(found))};
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
  };
  return table;
}

bool same(const at::Tensor& a, const at::Tensor& b, double tolerance) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         at::allclose(a.to(at::kDouble), b.to(at::kDouble), tolerance, tolerance, true);
}

at::Tensor part_of(const at::Tensor& full, const Spec& spec, const DeviceMesh& mesh) {
  const sweep::Indices elements = sweep::elements_of(box_of(spec, *mesh.coordinate()), spec.meta().shape());
  return full.reshape({-1}).index_select(0, at::tensor(elements, at::kLong));
}

at::Tensor laid_out(const at::Tensor& full, const Spec& spec, const DeviceMesh& mesh) {
  const Dims shape = spec.local_shape(*mesh.coordinate());
  return wrap(part_of(full, spec, mesh).view({shape.data(), shape.size()}).clone(), spec,
              std::make_shared<const DeviceMesh>(mesh));
}

// Every rank's part against the whole, so that replicas are compared too.
void expect_parts(const at::Tensor& tensor, const at::Tensor& whole, double tolerance, const std::string& what) {
  const DTensor handle(tensor);
  const at::Tensor full = handle.full_tensor();
  ASSERT_TRUE(same(full, whole, tolerance)) << what << "\ngot " << full << "\nexpected " << whole;
  if (handle.spec().has_partial()) return;
  const at::Tensor mine = part_of(whole, handle.spec(), handle.mesh());
  ASSERT_TRUE(same(handle.to_local().reshape({-1}), mine, tolerance)) << what << " on this rank";
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

void sweep_case(const Case& c, at::ScalarType type, double tolerance) {
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

TEST(AlgorithmEdges, IndicesOutOfRangeAreRefused) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2});
    const DTensor weight = distribute_tensor(numbers({6, 2}), mesh, {Shard(0)});
    const DTensor far = distribute_tensor(at::full({1}, 6, at::kLong), mesh, {Replicate()});
    EXPECT_EQ(error_of([&] { at::embedding(weight, far); }),
              "[aten::embedding] an index is out of range; got 6; expected 0 to 5");
    const DTensor before = distribute_tensor(at::full({1}, -1, at::kLong), mesh, {Replicate()});
    EXPECT_EQ(error_of([&] { weight.index_select(0, before); }),
              "[aten::index_select] an index is out of range; got -1; expected 0 to 5");
  });
}

// ---- how little is sent

constexpr std::int64_t kRows = 256, kClasses = 4096, kRanks = 4;
constexpr std::int64_t kSlice = kRows * 4;                            // one float for each row
constexpr std::int64_t kAll = kRows * kClasses * 4 / kRanks * 3 / 4;  // the least that turning the cut would bring

void on_class_sharded(const std::function<void(const DTensor& logits, const DTensor& target)>& run) {
  run_ranks(kRanks, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {kRanks}, {"tp"});
    const DTensor x = distribute_tensor(numbers({kRows, kClasses}).to(at::kFloat), mesh, {Shard(1)});
    const DTensor target = distribute_tensor(integers({kRows}, kClasses), mesh, {Replicate()});
    run(x, target);
  });
}

TEST(AlgorithmBytes, SlicesAreSentAndNoLogits) {
  on_class_sharded([](const DTensor& x, const DTensor&) {
    const std::vector<std::pair<const char*, std::function<at::Tensor()>>> calls = {
        {"aten::_softmax", [&] { return at::softmax(x, 1); }},
        {"aten::_log_softmax", [&] { return at::log_softmax(x, 1); }},
        {"aten::logsumexp", [&] { return x.logsumexp(1); }},
        {"aten::linalg_vector_norm", [&] { return at::linalg_vector_norm(x, 2, {{1}}); }},
        {"aten::var.correction", [&] { return x.var(1); }},
        {"aten::native_layer_norm", [&] { return at::layer_norm(x, {kClasses}); }},
        {"aten::argmax", [&] { return x.argmax(1); }},
        {"aten::max.dim", [&] { return std::get<0>(x.max(1)); }},
        {"aten::cumsum", [&] { return x.cumsum(1); }},
        {"aten::topk", [&] { return std::get<0>(x.topk(4, 1)); }},
    };
    for (const auto& [name, call] : calls) {
      SCOPED_TRACE(name);
      CommRecorder recorder;
      call();
      ASSERT_FALSE(recorder.events().empty());
      EXPECT_LT(recorder.bytes() * 15, kAll) << recorder.to_string();
      for (const CommEvent& event : recorder.events()) EXPECT_EQ(event.op, name) << recorder.to_string();
    }
  });
}

TEST(AlgorithmBytes, SoftmaxSendsTwoSlices) {
  on_class_sharded([](const DTensor& x, const DTensor&) {
    CommRecorder recorder;
    at::softmax(x, 1);
    ASSERT_EQ(recorder.events().size(), 2) << recorder.to_string();
    // The largest and the sum of every row; at most every other rank's are read.
    EXPECT_LE(recorder.bytes(), 2 * kSlice * (kRanks - 1)) << recorder.to_string();
    EXPECT_NE(recorder.events()[0].reason.find("softmax(1)"), std::string::npos) << recorder.to_string();
  });
}

TEST(AlgorithmBytes, CrossEntropyNeverGathersLogits) {
  on_class_sharded([](const DTensor& x, const DTensor& target) {
    at::Tensor logits = x.detach().requires_grad_(true);
    CommRecorder recorder;
    const at::Tensor loss = at::cross_entropy_loss(logits, target);
    loss.backward();
    // The largest, the sum, the loss with its weight; going back, the sum of the gradients.
    EXPECT_LE(recorder.events().size(), 4) << recorder.to_string();
    EXPECT_LE(recorder.bytes(), 3 * kSlice * (kRanks - 1) + 2 * 4 * (kRanks - 1)) << recorder.to_string();
    EXPECT_EQ(DTensor(logits.grad()).placements(), Placements{Shard(1)});
  });
}

TEST(AlgorithmBytes, TheMeanOverACutBatchSendsTwoNumbers) {
  run_ranks(kRanks, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {kRanks}, {"dp"});
    const DTensor x = distribute_tensor(numbers({kRows, kClasses}).to(at::kFloat), mesh, {Shard(0)});
    const DTensor target = distribute_tensor(integers({kRows}, kClasses), mesh, {Shard(0)});
    at::Tensor logits = x.detach().requires_grad_(true);
    CommRecorder recorder;
    at::cross_entropy_loss(logits, target).backward();
    EXPECT_EQ(recorder.events().size(), 1) << recorder.to_string();
    EXPECT_LE(recorder.bytes(), 2 * 4 * (kRanks - 1)) << recorder.to_string();
  });
}

TEST(AlgorithmBytes, AnEmbeddingWithACutVocabularySendsNothing) {
  run_ranks(kRanks, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {kRanks}, {"tp"});
    const DTensor weight = distribute_tensor(numbers({kClasses, 8}).requires_grad_(true), mesh, {Shard(0)});
    const DTensor indices = distribute_tensor(integers({64}, kClasses), mesh, {Replicate()});
    CommRecorder recorder;
    const at::Tensor y = at::embedding(weight, indices);
    EXPECT_EQ(DTensor(y).placements(), Placements{Partial()});
    EXPECT_EQ(DTensor(weight.index_select(0, indices)).placements(), Placements{Partial()});
    EXPECT_TRUE(recorder.events().empty()) << recorder.to_string();
    const DTensor more = distribute_tensor(numbers({64, 8}), mesh, {Replicate()});
    EXPECT_EQ(DTensor(weight.index_add(0, indices, more)).placements(), Placements{Shard(0)});
    EXPECT_TRUE(recorder.events().empty()) << recorder.to_string();
    DTensor(y).redistribute({Replicate()}).sum().backward();
    EXPECT_EQ(DTensor(weight.grad()).placements(), Placements{Shard(0)});
    ASSERT_EQ(recorder.events().size(), 1) << recorder.to_string();
    EXPECT_EQ(recorder.events()[0].op, "redistribute");
  });
}

TEST(AlgorithmBytes, ASmallTensorIsMovedInstead) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"tp"});
    const DTensor x = distribute_tensor(numbers({4, 6}), mesh, {Shard(1)});
    const std::string text = explain("_softmax", at::Tensor(x), std::int64_t{1}, false);
    EXPECT_NE(text.find("softmax(1)"), std::string::npos) << text;
    const DTensor whole = distribute_tensor(numbers({4, 6}), mesh, {Shard(0)});
    CommRecorder recorder;
    EXPECT_EQ(DTensor(at::softmax(whole, 1)).placements(), Placements{Shard(0)});
    EXPECT_TRUE(recorder.events().empty()) << recorder.to_string();
  });
}

}  // namespace
}  // namespace dtensor
