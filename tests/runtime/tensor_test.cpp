// Distributed tensors as tensors: operators, views, autograd, modules and optimizers, against the same on whole
// tensors.
#include "dtensor/runtime/tensor.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dtensor/comm/world.h"
#include "dtensor/core/error.h"
#include "dtensor/runtime/dispatch.h"
#include "dtensor/runtime/payload.h"
#include "dtensor/runtime/record.h"
#include "tests/runtime/helpers.h"

namespace dtensor {
namespace {

using testing::error_of;
using testing::numbers;

bool close(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && at::allclose(a, b, 1e-12, 1e-12, true);
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

// The gradient of a redistribution is the redistribution of the gradient, with each rank's part of the whole's.
TEST(Tensor, RedistributionIsDifferentiable) {
  run_ranks(4, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2, 2}, {"a", "b"});
    const at::Tensor full = numbers({5, 6}), weights = numbers({5, 6}, 3);
    const std::vector<std::string> layouts = {"S(0),R", "R,S(1)", "S(0),S(1)", "S(1),S(0)", "S(0),S(0)", "R,R", "P,R"};
    for (const std::string& from : layouts) {
      for (const std::string& to : layouts) {
        const Placements source = parse_placements(from), target = parse_placements(to);
        if (target[0].is_partial() && source[0].is_shard()) continue;
        SCOPED_TRACE(from + " to " + to);
        at::Tensor x = laid_out(full, mesh, from).detach().requires_grad_(true);
        for (const bool async : {false, true}) {
          x.mutable_grad() = at::Tensor();
          const at::Tensor y = DTensor(x).redistribute(target, {.async = async});
          EXPECT_TRUE(close(DTensor(y).full_tensor().detach(), full));
          (y * laid_out(weights, mesh, "R,R")).sum().backward();
          EXPECT_EQ(DTensor(x.grad()).spec().to_string(), home_of(DTensor(x).spec()).to_string());
          EXPECT_TRUE(close(DTensor(x.grad()).full_tensor(), weights));
        }
      }
    }
  });
}

TEST(Tensor, RedistributionInAnotherType) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    const at::Tensor full = numbers({5, 6});
    const at::Tensor x = laid_out(full, mesh, "S(0)").detach().requires_grad_(true);
    CommRecorder recorder;
    const DTensor y =
        DTensor(x).redistribute({Replicate()}, {.forward_dtype = at::kFloat, .backward_dtype = at::kBFloat16});
    EXPECT_EQ(y.scalar_type(), at::kDouble);
    EXPECT_TRUE(at::equal(y.to_local().detach(), full.to(at::kFloat).to(at::kDouble)));
    EXPECT_EQ(recorder.bytes(), (world.rank() == 0 ? 2 : 3) * 6 * 4);
    (y * laid_out(numbers({5, 6}, 3), mesh, "R")).sum().backward();
    EXPECT_TRUE(at::equal(DTensor(x.grad()).full_tensor(), numbers({5, 6}, 3).to(at::kBFloat16).to(at::kDouble)));
  });
}

// Plain tensors at both ends.
TEST(Tensor, LocalPartsAreDifferentiable) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    const at::Tensor local = numbers({3, 2}, world.rank()).requires_grad_(true);
    const DTensor x = from_local(local, mesh, {Shard(0)});
    EXPECT_EQ(x.sizes(), at::IntArrayRef({6, 2}));
    const at::Tensor mine = DTensor(x * 2).to_local();
    (mine * static_cast<double>(world.rank() + 1)).sum().backward();
    EXPECT_TRUE(at::equal(local.grad(), at::full({3, 2}, 2.0 * static_cast<double>(world.rank() + 1), at::kDouble)));
    // Every rank does something of its own with a replica: its gradient is a sum of parts.
    at::Tensor w = laid_out(numbers({4}), mesh, "R").detach().requires_grad_(true);
    const at::Tensor part = DTensor(w).to_local({.grad_placements = Placements{Partial()}});
    (part * static_cast<double>(world.rank() + 1)).sum().backward();
    EXPECT_EQ(DTensor(w.grad()).placements(), Placements{Replicate()});
    EXPECT_TRUE(at::equal(DTensor(w.grad()).full_tensor(), at::full({4}, 3.0, at::kDouble)));
  });
}

TEST(Tensor, LocalPartsLieAsTheWholeSays) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    const at::Tensor full = numbers({8, 3}), weight = numbers({3, 8}, 2);
    const at::Tensor columns = full.narrow(0, 4 * world.rank(), 4).t().contiguous().t();
    const DTensor x = from_local(columns, mesh, {Shard(0)}, {.stride = Dims{3, 1}});
    EXPECT_TRUE(at::equal(DTensor(x.view({-1})).full_tensor(), full.view({-1})));
    // Without strides the whole lies as its parts do.
    const DTensor by_columns = from_local(columns, mesh, {Shard(0)});
    EXPECT_EQ(by_columns.strides(), at::IntArrayRef({1, 8}));
    EXPECT_TRUE(at::equal(DTensor(by_columns.t().view({-1})).full_tensor(), full.t().reshape({-1})));
    // A gradient by rows of a tensor by columns.
    const at::Tensor t = from_local(full.narrow(0, 4 * world.rank(), 4).clone(), mesh, {Shard(0)}).t().requires_grad_();
    (DTensor(t).to_local() * weight.narrow(1, 4 * world.rank(), 4)).sum().backward();
    EXPECT_TRUE(at::equal(DTensor(t.grad().t().view({-1})).full_tensor(), weight.t().reshape({-1})));
  });
}

TEST(Tensor, LocalPartsHaveSecondDerivatives) {
  run_ranks(3, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3}, {"x"});
    const at::Tensor full = numbers({5, 2});
    for (const Placement& placement : {Placement(Shard(0)), Placement(Replicate())}) {
      const at::Tensor x = distribute_tensor(full, mesh, {placement}).requires_grad_(true);
      const at::Tensor loss = DTensor(x).full_tensor().pow(3).sum();
      const at::Tensor gradient = torch::autograd::grad({loss}, {x}, {}, true, true)[0];
      DTensor(gradient).full_tensor().pow(2).sum().backward();
      EXPECT_TRUE(at::allclose(DTensor(x.grad()).full_tensor(), full.pow(3) * 36));
    }
  });
}

TEST(Tensor, MovesToAnotherMesh) {
  run_ranks(4, [](World& world) {
    const DeviceMesh first = init_device_mesh(world, at::kCPU, Mesh::from_ranks({2}, {0, 1}));
    const DeviceMesh second = init_device_mesh(world, at::kCPU, Mesh::from_ranks({3}, {1, 2, 3}));
    const at::Tensor full = numbers({5, 6});
    const at::Tensor x = laid_out(full, first, "S(0)").detach().requires_grad_(true);
    const DTensor y = DTensor(x).redistribute(second, {Shard(1)});
    EXPECT_EQ(y.to_local().defined(), world.rank() > 0);
    if (world.rank() > 0) {
      EXPECT_TRUE(close(y.full_tensor().detach(), full));
    } else {
      y.full_tensor();
    }
    (y * 3).sum().backward();
    EXPECT_EQ(DTensor(x.grad()).spec(), DTensor(x).spec());
    const at::Tensor gradient = DTensor(x.grad()).full_tensor();
    if (world.rank() < 2) {
      EXPECT_TRUE(close(gradient, at::full({5, 6}, 3.0, at::kDouble)));
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

}  // namespace
}  // namespace dtensor
