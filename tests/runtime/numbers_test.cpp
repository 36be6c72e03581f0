// Plain 0-d tensors count as numbers wherever an operator takes a tensor, and results are those of the whole.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dtensor/comm/world.h"
#include "dtensor/runtime/factories.h"
#include "dtensor/runtime/random.h"
#include "dtensor/runtime/tensor.h"
#include "tests/runtime/helpers.h"

namespace dtensor {
namespace {

using testing::error_of;
using testing::numbers;

struct Case {
  const char* name;
  std::function<at::Tensor(const at::Tensor& x, const at::Tensor& y)> call;  // [5,4] and [4,3]
};

const std::vector<Case>& cases() {
  static const at::Tensor half = at::scalar_tensor(0.3, at::kDouble), one = at::scalar_tensor(1, at::kLong);
  static const auto* all = new std::vector<Case>{
      {"where of numbers", [](auto& x, auto&) { return at::where(x > 0, 1.0, 2.0); }},
      {"where of plain 0-d tensors", [](auto& x, auto&) { return at::where(x > 0, half, half + 1); }},
      {"where of rows", [](auto& x, auto&) { return at::where(x > 0, x[0], x[1]); }},
      {"mean of where", [](auto& x, auto&) { return at::where(x > 0, 1.0, 2.0).mean(); }},
      {"addmm", [](auto& x, auto& y) { return at::addmm(half, x, y); }},
      {"addmv", [](auto& x, auto& y) { return at::addmv(half, x, y.select(1, 0)); }},
      {"baddbmm", [](auto& x, auto& y) { return at::baddbmm(half, x.unsqueeze(0), y.unsqueeze(0)); }},
      {"linear", [](auto& x, auto& y) { return at::linear(x, y.t(), half); }},
      {"index_select", [](auto& x, auto&) { return at::index_select(x, 0, one); }},
      {"embedding", [](auto& x, auto&) { return at::embedding(x, one); }},
      {"clamp", [](auto& x, auto&) { return at::clamp(x, half); }},
      {"clamp_", [](auto& x, auto&) { return x.clone().clamp_(half); }},
      {"addcdiv", [](auto& x, auto&) { return at::addcdiv(x, x, half); }},
      {"addcdiv of a number", [](auto& x, auto&) { return at::addcdiv(x, half, x + 3); }},
  };
  return *all;
}

at::Tensor full(const at::Tensor& tensor) { return DTensor(tensor).full_tensor(); }

void on_layouts(const std::function<void(const DeviceMesh&, const Placement&)>& body) {
  run_ranks(3, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3}, {"x"});
    for (const Placement& one :
         {Placement(Replicate()), Placement(Shard(0)), Placement(Shard(1)), Placement(Partial())})
      body(mesh, one);
  });
}

TEST(Numbers, AreOperandsEverywhere) {
  const at::Tensor x = numbers({5, 4}), y = numbers({4, 3}, 7);
  on_layouts([&](const DeviceMesh& mesh, const Placement& placement) {
    const at::Tensor dx = distribute_tensor(x, mesh, {placement});
    // The sum over the dim between them is cut where x is cut by columns.
    const at::Tensor dy = distribute_tensor(y, mesh, {placement.is_shard(1) ? Placement(Shard(0)) : placement});
    for (const Case& c : cases()) {
      const at::Tensor expected = c.call(x, y), result = c.call(dx, dy);
      ASSERT_EQ(result.sizes(), expected.sizes()) << c.name << " of " << DTensor(dx).spec().to_string();
      ASSERT_TRUE(at::allclose(full(result), expected, 1e-12, 1e-12)) << c.name << " of " << placement.to_string();
    }
  });
}

TEST(Numbers, AreGradients) {
  const at::Tensor x = numbers({5, 4}).requires_grad_(), square = numbers({4, 4}).add(at::eye(4, at::kDouble) * 3);
  at::mse_loss(x, numbers({5, 4}, 2)).backward(at::scalar_tensor(2.0, at::kDouble));
  const at::Tensor plain = square.clone().requires_grad_();
  plain.det().backward();
  on_layouts([&](const DeviceMesh& mesh, const Placement& placement) {
    const at::Tensor dx = distribute_tensor(x.detach(), mesh, {placement}).requires_grad_();
    at::mse_loss(dx, distribute_tensor(numbers({5, 4}, 2), mesh, {Shard(0)}))
        .backward(at::scalar_tensor(2.0, at::kDouble));
    EXPECT_TRUE(at::allclose(full(dx.grad()), x.grad(), 1e-12, 1e-12)) << placement.to_string();
    const at::Tensor ds = distribute_tensor(square, mesh, {placement}).requires_grad_();
    ds.det().backward();
    EXPECT_TRUE(at::allclose(full(ds.grad()), plain.grad(), 1e-10, 1e-10)) << placement.to_string();
  });
}

// Drawn alike however the tensor lies.
TEST(Numbers, AreProbabilitiesAndMeans) {
  run_ranks(3, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3}, {"x"});
    const at::Tensor half = at::scalar_tensor(0.4, at::kDouble);
    std::vector<at::Tensor> first;
    for (const Placement& placement : {Placement(Replicate()), Placement(Shard(0)), Placement(Shard(1))}) {
      manual_seed(world, 5);
      const at::Tensor x = distribute_tensor(numbers({5, 4}), mesh, {placement});
      const std::vector<at::Tensor> drawn = {full(x.clone().bernoulli_(half)), full(at::normal(x, half)),
                                             full(at::normal(half, x.abs()))};
      if (first.empty()) first = drawn;
      for (std::size_t i = 0; i < drawn.size(); ++i) EXPECT_TRUE(at::equal(drawn[i], first[i])) << i;
    }
  });
}

// A value that the type does not have is an error on every rank, not on the one that fills it in.
TEST(Numbers, ThatDoNotFitAreRefusedAlike) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    EXPECT_NE(error_of([&] { full({4}, 300, mesh, {Partial()}, at::kByte); }), "no error");
  });
}

// What cannot be distributed says so at the door.
// libtorch makes nothing of it, and does not divide by it.
TEST(Numbers, AreNotMadeOfNothing) {
  const auto norm = [](const at::Tensor& x, const at::Tensor& weight, const at::Tensor& mean, bool training) {
    return at::batch_norm(x, weight, weight, mean, mean, training, 0.1, 1e-5, false);
  };
  on_layouts([&](const DeviceMesh& mesh, const Placement& placement) {
    const Placement whole = placement.is_shard(1) ? Placement(Shard(0)) : Placement(Replicate());
    for (const bool training : {true, false}) {
      const DTensor x = distribute_tensor(at::empty({0, 3}, at::kDouble), mesh, {placement}).requires_grad_();
      const DTensor weight = distribute_tensor(at::full({3}, 2.0, at::kDouble), mesh, {whole}).requires_grad_();
      const DTensor mean = distribute_tensor(at::full({3}, 5.0, at::kDouble), mesh, {whole});
      const at::Tensor y = norm(x, weight, mean, training);
      EXPECT_EQ(y.sizes(), x.sizes()) << x.spec().to_string();
      y.sum().backward();
      EXPECT_EQ(x.grad().sizes(), x.sizes()) << x.spec().to_string();
      EXPECT_TRUE(full(weight.grad()).eq(0).all().item<bool>()) << x.spec().to_string();
      EXPECT_TRUE(full(mean).eq(5).all().item<bool>()) << x.spec().to_string();
    }
    if (!placement.is_shard(1)) {
      const at::Tensor flat = distribute_tensor(at::empty({0}, at::kDouble), mesh, {placement}).requires_grad_();
      norm(flat, {}, {}, false).sum().backward();
      EXPECT_EQ(flat.grad().numel(), 0);
    }
  });
}

TEST(Doors, SayWhatIsWrong) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    const DTensor x = distribute_tensor(numbers({4, 2}), mesh, {Shard(0)});
    EXPECT_NE(error_of([&] { from_local(x, mesh, {Shard(0)}); }).find("distributed already"), std::string::npos);
    EXPECT_NE(error_of([&] { distribute_tensor(x, mesh, {Shard(0)}); }).find("redistribute"), std::string::npos);
    EXPECT_NE(error_of([&] { from_local(at::Tensor(), mesh, {Shard(0)}); }).find("undefined"), std::string::npos);
    EXPECT_NE(error_of([] { DTensor().mesh(); }).find("undefined"), std::string::npos);
    EXPECT_NE(error_of([] { DTensor().full_tensor(); }).find("undefined"), std::string::npos);
    const at::Tensor computed = numbers({4, 2}).requires_grad_() * 2;
    EXPECT_NE(error_of([&] { distribute_tensor(computed, mesh, {Shard(0)}); }).find("computed"), std::string::npos);
    const at::Tensor three = at::ones({3}, at::kDouble), images = distribute_tensor(numbers({4, 6}), mesh, {Shard(0)});
    const std::string error = error_of([&] {
      const at::Tensor short_one = distribute_tensor(three, mesh, {Replicate()});
      at::batch_norm(images, {}, {}, short_one, short_one, true, 0.1, 1e-5, false);
    });
    EXPECT_NE(error.find("each channel"), std::string::npos) << error;
  });
}

}  // namespace
}  // namespace dtensor
