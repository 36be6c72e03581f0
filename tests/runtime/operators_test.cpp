// Operators of every family on every placement of small meshes, forward and backward, against the same on whole
// tensors. Shapes are uneven, some ranks hold nothing; replicas are compared bit for bit.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>

#include "dtensor/comm/world.h"
#include "dtensor/core/boxes.h"
#include "dtensor/runtime/dispatch.h"
#include "dtensor/runtime/payload.h"
#include "dtensor/runtime/tensor.h"
#include "tests/core/sweep.h"
#include "tests/runtime/helpers.h"

namespace dtensor {
namespace {

using testing::numbers;

using sweep::Random;
using Tensors = std::vector<at::Tensor>;

struct Case {
  std::string name;
  std::vector<std::vector<std::int64_t>> shapes;
  std::function<at::Tensor(const Tensors&)> run;
  bool partial = true;         // may operands be Partial?
  bool differentiable = true;  // almost everywhere
};

const std::vector<Case>& cases() {
  using T = const Tensors&;
  static const std::vector<Case> table = {
      // pointwise
      {"add", {{5, 3}, {5, 3}}, [](T t) { return t[0] + t[1]; }},
      {"add_broadcast", {{5, 3}, {3}}, [](T t) { return t[0] + t[1]; }},
      {"add_alpha", {{5, 3}, {5, 1}}, [](T t) { return at::add(t[0], t[1], -2.5); }},
      {"add_number", {{5, 3}}, [](T t) { return t[0] + 2.5; }},
      {"sub_from_number", {{5, 3}}, [](T t) { return 2.5 - t[0]; }},
      {"mul", {{5, 3}, {5, 3}}, [](T t) { return t[0] * t[1]; }},
      {"mul_number", {{5, 3}}, [](T t) { return t[0] * -3.0; }},
      {"div", {{5, 3}, {5, 3}}, [](T t) { return t[0] / (t[1] * t[1] + 1); }},
      {"exp", {{4, 3}}, [](T t) { return t[0].exp(); }},
      {"tanh", {{4, 3}}, [](T t) { return t[0].tanh(); }},
      {"sigmoid", {{7}}, [](T t) { return t[0].sigmoid(); }},
      {"relu", {{7, 2}}, [](T t) { return t[0].relu(); }},
      {"gelu", {{7, 2}}, [](T t) { return at::gelu(t[0]); }},
      {"silu", {{7, 2}}, [](T t) { return at::silu(t[0]); }},
      {"leaky_relu", {{7, 2}}, [](T t) { return at::leaky_relu(t[0], 0.1); }},
      {"clamp", {{7, 2}}, [](T t) { return t[0].clamp(-0.4, 0.6); }},
      {"pow", {{7, 2}}, [](T t) { return t[0].pow(3); }},
      {"abs_sqrt", {{7, 2}}, [](T t) { return (t[0].abs() + 1).sqrt(); }},
      {"maximum", {{5, 3}, {5, 3}}, [](T t) { return at::maximum(t[0], t[1]); }},
      {"where", {{5, 3}, {5, 3}}, [](T t) { return at::where(t[0] > 0.1, t[0], t[1] * 2); }},
      {"masked_fill", {{5, 3}}, [](T t) { return t[0].masked_fill(t[0] > 0.2, 3.0); }},
      {"addcmul", {{5, 3}, {5, 3}, {5, 3}}, [](T t) { return at::addcmul(t[0], t[1], t[2], 0.5); }},
      {"lerp", {{5, 3}, {5, 3}}, [](T t) { return at::lerp(t[0], t[1], 0.3); }},
      {"to_float", {{5, 3}}, [](T t) { return t[0].to(at::kFloat).to(at::kDouble) * 0 + t[0]; }},
      {"to_int", {{5, 3}}, [](T t) { return (t[0] * 3).to(at::kLong); }, true, false},
      {"compare", {{5, 3}, {5, 3}}, [](T t) { return t[0].gt(t[1]); }, true, false},
      {"in_place", {{5, 3}, {5, 3}}, [](T t) { return (t[0] * 1).add_(t[1]).mul_(2); }},
      // matmul
      {"mm", {{5, 4}, {4, 3}}, [](T t) { return at::mm(t[0], t[1]); }},
      {"mm_t", {{5, 4}, {3, 4}}, [](T t) { return at::mm(t[0], t[1].t()); }},
      {"addmm", {{3}, {5, 4}, {4, 3}}, [](T t) { return at::addmm(t[0], t[1], t[2]); }},
      {"bmm", {{2, 5, 4}, {2, 4, 3}}, [](T t) { return at::bmm(t[0], t[1]); }},
      {"matmul_3d", {{2, 5, 4}, {4, 3}}, [](T t) { return at::matmul(t[0], t[1]); }},
      {"linear", {{2, 5, 4}, {3, 4}, {3}}, [](T t) { return at::linear(t[0], t[1], t[2]); }},
      {"mv", {{5, 4}, {4}}, [](T t) { return at::mv(t[0], t[1]); }},
      {"dot", {{7}, {7}}, [](T t) { return at::dot(t[0], t[1]); }},
      // reductions
      {"sum", {{5, 3}}, [](T t) { return t[0].sum(); }},
      {"sum_dim", {{5, 3}}, [](T t) { return t[0].sum(0); }},
      {"sum_keepdim",
       {{5, 3, 2}},
       [](T t) {
         return t[0].sum(std::vector<std::int64_t>{0, 2}, true);
       }},
      {"mean", {{5, 3}}, [](T t) { return t[0].mean(); }},
      {"mean_dim", {{5, 3}}, [](T t) { return t[0].mean(1, true); }},
      {"amax", {{5, 3}}, [](T t) { return t[0].amax(0); }},
      {"amin_all",
       {{5, 3}},
       [](T t) {
         return t[0].amin(std::vector<std::int64_t>{0, 1});
       }},
      {"max_all", {{5, 3}}, [](T t) { return t[0].max(); }},
      {"prod", {{5, 3}}, [](T t) { return t[0].prod(0); }},
      {"any", {{5, 3}}, [](T t) { return (t[0] > 0.9).any(); }, true, false},
      {"all", {{5, 3}}, [](T t) { return (t[0] > -2).all(); }, true, false},
      {"argmax", {{5, 3}}, [](T t) { return t[0].argmax(0); }, true, false},
      {"logsumexp", {{5, 3}}, [](T t) { return t[0].logsumexp(0); }},
      {"var", {{5, 3}}, [](T t) { return t[0].var(0, true); }},
      {"norm", {{5, 3}}, [](T t) { return t[0].norm(); }},
      {"cumsum", {{5, 3}}, [](T t) { return t[0].cumsum(0); }},
      {"sort", {{5, 3}}, [](T t) { return std::get<0>(t[0].sort(0)); }, true, false},
      {"topk", {{5, 3}}, [](T t) { return std::get<0>(t[0].topk(2, 0)); }, true, false},
      // views
      {"t", {{5, 3}}, [](T t) { return t[0].t(); }},
      {"permute",
       {{5, 3, 2}},
       [](T t) {
         return t[0].permute({2, 0, 1});
       }},
      {"reshape",
       {{5, 4}},
       [](T t) {
         return t[0].reshape({2, 10});
       }},
      {"flatten",
       {{3, 5, 2}},
       [](T t) {
         return t[0].reshape({15, 2});
       }},
      {"unsqueeze", {{5, 3}}, [](T t) { return t[0].unsqueeze(1); }},
      {"squeeze", {{5, 1, 3}}, [](T t) { return t[0].squeeze(1); }},
      {"expand",
       {{5, 1}},
       [](T t) {
         return t[0].expand({5, 4});
       }},
      {"slice", {{7, 3}}, [](T t) { return t[0].slice(0, 1, 6, 2); }},
      {"narrow", {{7, 3}}, [](T t) { return t[0].narrow(1, 1, 2); }},
      {"select", {{5, 3}}, [](T t) { return t[0].select(0, 3); }},
      {"chunk",
       {{7, 4}},
       [](T t) {
         const auto c = t[0].chunk(2, 1);
         return c[0] * c[1];
       }},
      {"split",
       {{7, 4}},
       [](T t) {
         const auto c = t[0].split(3, 0);
         return c[0] + c[1];
       }},
      {"unbind",
       {{3, 4}},
       [](T t) {
         const auto c = t[0].unbind(0);
         return c[0] * c[2];
       }},
      {"cat",
       {{3, 4}, {2, 4}},
       [](T t) {
         return at::cat({t[0], t[1]}, 0);
       }},
      {"stack",
       {{3, 4}, {3, 4}},
       [](T t) {
         return at::stack({t[0], t[1]}, 1);
       }},
      {"flip", {{5, 3}}, [](T t) { return t[0].flip(std::vector<std::int64_t>{0}); }},
      {"tril", {{5, 4}}, [](T t) { return t[0].tril(); }},
      // normalisation, softmax, losses
      {"softmax", {{5, 3}}, [](T t) { return at::softmax(t[0], 1); }},
      {"log_softmax", {{5, 3}}, [](T t) { return at::log_softmax(t[0], 0); }},
      {"layer_norm", {{5, 4}, {4}, {4}}, [](T t) { return at::layer_norm(t[0], {4}, t[1], t[2]); }},
      {"mse_loss", {{5, 3}, {5, 3}}, [](T t) { return at::mse_loss(t[0], t[1]); }},
      {"mse_loss_sum", {{5, 3}, {5, 3}}, [](T t) { return at::mse_loss(t[0], t[1], at::Reduction::Sum); }},
      {"smooth_l1", {{5, 3}, {5, 3}}, [](T t) { return at::smooth_l1_loss(t[0], t[1]); }},
      {"attention",
       {{2, 5, 4}, {2, 5, 4}, {2, 5, 4}},
       [](T t) { return at::bmm(at::softmax(at::bmm(t[0], t[1].transpose(1, 2)) / 2, -1), t[2]); }},
      // chains whose middle is laid out oddly
      {"chain_views",
       {{4, 3, 2}},
       [](T t) {
         return t[0].reshape({12, 2}).t().reshape({2, 4, 3}).exp().sum(1);
       }},
      {"chain_partial", {{5, 4}, {4, 3}}, [](T t) { return (at::mm(t[0], t[1]) * 2 + 1).relu().sum(0); }},
      {"chain_mean", {{5, 4}}, [](T t) { return ((t[0] - t[0].mean(0)) * t[0]).mean(); }},
      {"clone_zero", {{5, 3}}, [](T t) { return at::zeros_like(t[0]) + at::ones_like(t[0]) * t[0].clone(); }},
  };
  return table;
}

bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         at::allclose(a.to(at::kDouble), b.to(at::kDouble), 1e-9, 1e-11, true);
}

// A whole tensor laid out; Partial parts are uneven and cancel.
at::Tensor laid_out(const at::Tensor& full, const DeviceMesh& mesh, const Placements& placements) {
  const TensorMeta meta(Dims(full.sizes().begin(), full.sizes().end()), DType::kF64);
  const Spec spec = Spec::make(meta, mesh, placements);
  at::Tensor part = full.clone();
  for (std::int64_t m = 0; m < mesh.ndim(); ++m) {
    if (!placements[m].is_partial()) continue;
    const std::int64_t n = mesh.size(m), i = (*mesh.coordinate())[m];
    // The first has all of it and something more for each of the others, which take it away.
    part = i == 0 ? part.add(static_cast<double>(n - 1) * 3.5) : at::full_like(part, -3.5);
  }
  const sweep::Indices elements = sweep::elements_of(box_of(spec, *mesh.coordinate()), meta.shape());
  const Dims shape = spec.local_shape(*mesh.coordinate());
  const at::Tensor local = part.reshape({-1}).index_select(0, at::tensor(elements, at::kLong));
  return wrap(local.view({shape.data(), shape.size()}).clone(), spec, std::make_shared<const DeviceMesh>(mesh));
}

// Every rank's part against the whole, so that replicas are compared too.
void expect_parts(const at::Tensor& tensor, const at::Tensor& whole, const std::string& what) {
  const at::Tensor full = DTensor(tensor).full_tensor();
  ASSERT_TRUE(same(full, whole)) << what << "\ngot " << full << "\nexpected " << whole;
  const DTensor handle(tensor);
  if (handle.spec().has_partial()) return;
  const sweep::Indices elements =
      sweep::elements_of(box_of(handle.spec(), *handle.mesh().coordinate()), handle.spec().meta().shape());
  const at::Tensor mine = whole.reshape({-1}).index_select(0, at::tensor(elements, at::kLong));
  ASSERT_TRUE(same(handle.to_local().reshape({-1}), mine)) << what << " on this rank";
}

struct Layout {
  std::vector<Placements> operands;
};

std::vector<Layout> layouts_for(const Case& c, const Dims& mesh, Random& random) {
  const auto choices = [&](std::size_t operand) {
    std::vector<Placements> result;
    for (const Placements& p :
         sweep::all_placements(mesh.size(), static_cast<std::int64_t>(c.shapes[operand].size()))) {
      std::int64_t partials = 0;
      for (const Placement& one : p) partials += one.is_partial() ? 1 : 0;
      if (partials <= (c.partial ? 1 : 0)) result.push_back(p);
    }
    return result;
  };
  std::vector<Layout> all = {{}};
  for (std::size_t i = 0; i < c.shapes.size(); ++i) {
    std::vector<Layout> next;
    for (const Layout& some : all) {
      for (const Placements& p : choices(i)) {
        next.push_back(some);
        next.back().operands.push_back(p);
      }
    }
    all = std::move(next);
  }
  const std::size_t most = 40;
  while (all.size() > most) {
    all[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(all.size())))] = all.back();
    all.pop_back();
  }
  return all;
}

class Operators : public ::testing::TestWithParam<std::string> {};

const Case& case_named(const std::string& name) {
  for (const Case& c : cases()) {
    if (c.name == name) return c;
  }
  throw std::runtime_error("no case " + name);
}

void check_case(const Case& c, const DeviceMesh& mesh, const Layout& layout, const Tensors& full,
                const at::Tensor& expected, const Tensors& gradients) {
  Tensors inputs;
  std::string text = c.name + " on " + mesh.to_string() + ":";
  for (std::size_t i = 0; i < full.size(); ++i) {
    inputs.push_back(laid_out(full[i].detach(), mesh, layout.operands[i]));
    if (c.differentiable) inputs.back().requires_grad_(true);
    text += " " + to_string(layout.operands[i]) + ";";
  }
  SCOPED_TRACE(text + " rank " + std::to_string(mesh.rank()));
  const at::Tensor result = c.run(inputs);
  expect_parts(result.detach(), expected, "result");
  if (!c.differentiable || ::testing::Test::HasFatalFailure()) return;
  (result * result).sum().backward();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    ASSERT_EQ(inputs[i].grad().defined(), gradients[i].defined());
    if (!gradients[i].defined()) continue;
    EXPECT_EQ(DTensor(inputs[i].grad()).spec().to_string(), home_of(DTensor(inputs[i]).spec()).to_string());
    expect_parts(inputs[i].grad(), gradients[i], "gradient " + std::to_string(i));
  }
}

TEST_P(Operators, AreThoseOfTheWhole) {
  const Case& c = case_named(GetParam());
  Tensors full;
  for (std::size_t i = 0; i < c.shapes.size(); ++i)
    full.push_back(numbers(c.shapes[i], 0.3 + 1.7 * static_cast<double>(i)));
  Tensors leaves;
  for (const at::Tensor& t : full) leaves.push_back(t.clone().requires_grad_(c.differentiable));
  const at::Tensor expected = c.run(leaves);
  Tensors gradients(full.size());
  if (c.differentiable) {
    (expected * expected).sum().backward();
    for (std::size_t i = 0; i < full.size(); ++i) gradients[i] = leaves[i].grad();
  }
  for (const Dims& shape : {Dims{2}, Dims{3}, Dims{6}, Dims{2, 2}}) {
    Random random(7);
    const std::vector<Layout> layouts = layouts_for(c, shape, random);
    run_ranks(Mesh::make(shape).size(), [&](World& world) {
      const DeviceMesh mesh = init_device_mesh(world, at::kCPU, shape);
      for (const Layout& layout : layouts) {
        check_case(c, mesh, layout, full, expected.detach(), gradients);
        if (::testing::Test::HasFatalFailure()) throw std::runtime_error("a case failed");
      }
    });
  }
}

std::vector<std::string> names() {
  std::vector<std::string> result;
  for (const Case& c : cases()) result.push_back(c.name);
  return result;
}

INSTANTIATE_TEST_SUITE_P(All, Operators, ::testing::ValuesIn(names()),
                         [](const ::testing::TestParamInfo<std::string>& which) { return which.param; });

}  // namespace
}  // namespace dtensor
