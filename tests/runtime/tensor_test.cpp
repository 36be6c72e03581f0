// Distributed tensors as tensors: operators, views, autograd, modules and optimizers, against the same on whole tensors.
#include "dtensor/runtime/tensor.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dtensor/comm/world.h"
#include "dtensor/core/error.h"
#include "dtensor/runtime/dispatch.h"
#include "dtensor/runtime/payload.h"

namespace dtensor {
namespace {

// Numbers that depend on nothing but the shape.
at::Tensor numbers(at::IntArrayRef sizes, std::int64_t seed = 0) {
  std::int64_t n = 1;
  for (const std::int64_t size : sizes) n *= size;
  return at::arange(n, at::kDouble).mul(0.37).add(0.1 * static_cast<double>(seed + 1)).sin().view(sizes);
}

bool close(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && at::allclose(a, b, 1e-12, 1e-12, true);
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

DTensor laid_out(const at::Tensor& full, const DeviceMesh& mesh, const std::string& placements) {
  return distribute_tensor(full, mesh, parse_placements(placements));
}

TEST(Tensor, GoesAroundWhole) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    const at::Tensor full = numbers({5, 3});
    const DTensor rows = laid_out(full, mesh, "S(0)");
    EXPECT_TRUE(is_dtensor(rows));
    EXPECT_FALSE(is_dtensor(full));
    EXPECT_EQ(rows.sizes(), full.sizes());
    EXPECT_EQ(rows.spec().to_string(), "f64[5,3] @ 2(x) : S(0)");
    EXPECT_EQ(rows.to_local().size(0), world.rank() == 0 ? 3 : 2);
    EXPECT_TRUE(at::equal(rows.full_tensor(), full));
    EXPECT_TRUE(at::equal(rows.redistribute({Shard(1)}).full_tensor(), full));
  });
}

TEST(Tensor, OperatorsAreThoseOfTheWhole) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    const at::Tensor a = numbers({5, 4}), b = numbers({4, 6}, 1), c = numbers({5, 4}, 2);
    for (const char* pa : {"S(0)", "S(1)", "R"}) {
      for (const char* pb : {"S(0)", "S(1)", "R"}) {
        SCOPED_TRACE(std::string(pa) + " and " + pb);
        const DTensor x = laid_out(a, mesh, pa), w = laid_out(b, mesh, pb), y = laid_out(c, mesh, pb);
        EXPECT_TRUE(close(DTensor(at::mm(x, w)).full_tensor(), at::mm(a, b)));
        EXPECT_TRUE(close(DTensor(x + y).full_tensor(), a + c));
        EXPECT_TRUE(close(DTensor(x * y + 2.5).full_tensor(), a * c + 2.5));
        EXPECT_TRUE(close(DTensor(at::mm(x, w) + 1).full_tensor(), at::mm(a, b) + 1));
        EXPECT_TRUE(close(DTensor(x.t()).full_tensor(), a.t()));
        EXPECT_TRUE(close(DTensor(x.sum()).full_tensor(), a.sum()));
        EXPECT_TRUE(close(DTensor(x.mean(0)).full_tensor(), a.mean(0)));
        EXPECT_TRUE(close(DTensor(x.amax(1)).full_tensor(), a.amax(1)));
        EXPECT_TRUE(close(DTensor(x.reshape({20})).full_tensor(), a.reshape({20})));
        EXPECT_TRUE(close(DTensor(at::cat({x, y}, 0)).full_tensor(), at::cat({a, c}, 0)));
        EXPECT_TRUE(close(DTensor(at::softmax(x, 1)).full_tensor(), at::softmax(a, 1)));
        EXPECT_DOUBLE_EQ(x.sum().item<double>(), a.sum().item<double>());
      }
    }
  });
}

TEST(Tensor, GradientsComeHome) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    for (const char* px : {"S(0)", "S(1)", "R"}) {
      for (const char* pw : {"S(0)", "S(1)", "R"}) {
        SCOPED_TRACE(std::string(px) + " and " + pw);
        at::Tensor x = numbers({5, 4}).requires_grad_(true), w = numbers({3, 4}, 1).requires_grad_(true),
                   bias = numbers({3}, 2).requires_grad_(true);
        at::linear(x, w, bias).relu().pow(2).sum().backward();
        at::Tensor dx = laid_out(x, mesh, px), dw = laid_out(w, mesh, pw), db = laid_out(bias, mesh, "R");
        ASSERT_TRUE(dx.is_leaf() && dx.requires_grad());
        at::linear(dx, dw, db).relu().pow(2).sum().backward();
        EXPECT_EQ(DTensor(dx.grad()).spec(), DTensor(dx).spec());
        EXPECT_EQ(DTensor(dw.grad()).spec(), DTensor(dw).spec());
        EXPECT_EQ(DTensor(db.grad()).spec(), DTensor(db).spec());
        EXPECT_TRUE(close(DTensor(dx.grad()).full_tensor(), x.grad()));
        EXPECT_TRUE(close(DTensor(dw.grad()).full_tensor(), w.grad()));
        EXPECT_TRUE(close(DTensor(db.grad()).full_tensor(), bias.grad()));
      }
    }
  });
}

TEST(Tensor, ViewsShareMemory) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    const at::Tensor full = numbers({4, 6});
    at::Tensor x = laid_out(full, mesh, "S(0)");
    at::Tensor view = x.view({24});
    view.add_(1);
    EXPECT_TRUE(close(DTensor(x).full_tensor(), full + 1));
    x.mul_(2);
    EXPECT_TRUE(close(DTensor(view).full_tensor(), ((full + 1) * 2).view({24})));
    x.t().add_(3);
    EXPECT_TRUE(close(DTensor(x).full_tensor(), (full + 1) * 2 + 3));
  });
}

TEST(Tensor, PlainTensorsAreRefused) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    const at::Tensor full = numbers({4, 6});
    const DTensor x = laid_out(full, mesh, "S(0)");
    EXPECT_EQ(error_of([&] { x + full; }),
              "[aten::add.Tensor] a plain tensor among distributed ones; got f64[4,6] as argument \"other\"; expected "
              "distributed tensors, or numbers; try distribute_tensor(tensor, mesh, placements), or ImplicitReplication "
              "where it is the same on all ranks");
    const ImplicitReplication guard;
    EXPECT_TRUE(close(DTensor(x + full).full_tensor(), full + full));
  });
}

}  // namespace
}  // namespace dtensor
