// The second call of a kind goes another way than the first where nothing is boxed (runtime/direct.cpp): both are held
// to the operation on the full tensor.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dtensor/comm/world.h"
#include "dtensor/runtime/accumulate.h"
#include "dtensor/runtime/dispatch.h"
#include "dtensor/runtime/tensor.h"
#include "tests/runtime/helpers.h"

namespace dtensor {
namespace {

using testing::numbers;

struct Case {
  const char* name;
  std::function<at::Tensor(const at::Tensor& x, const at::Tensor& y)> call;  // [5,4] and [5,4]
};

// Those that write do so to a copy.
const std::vector<Case>& cases() {
  static const auto* all = new std::vector<Case>{
      {"add", [](auto& x, auto& y) { return at::add(x, y); }},
      {"add, twice the other", [](auto& x, auto& y) { return at::add(x, y, 2); }},
      {"add_", [](auto& x, auto& y) { return x.clone().add_(y); }},
      {"add_ a number", [](auto& x, auto&) { return x.clone().add_(1.5); }},
      {"addcdiv_", [](auto& x, auto& y) { return x.clone().addcdiv_(x, y + 3, 0.5); }},
      {"addcmul_", [](auto& x, auto& y) { return x.clone().addcmul_(x, y, 0.5); }},
      {"addmm", [](auto& x, auto& y) { return at::addmm(x, x, y.t().mm(y)); }},
      {"bmm",
       [](auto& x, auto& y) {
         return at::bmm(x.view({5, 2, 2}), y.view({5, 2, 2}));
       }},
      {"cat",
       [](auto& x, auto& y) {
         return at::cat({x, y, x}, 1);
       }},
      {"cat over the other dim",
       [](auto& x, auto& y) {
         return at::cat({x, y, x}, 0);
       }},
      {"div", [](auto& x, auto& y) { return at::div(x, y + 3); }},
      {"div by a number", [](auto& x, auto&) { return at::div(x, 3); }},
      {"mm", [](auto& x, auto& y) { return x.mm(y.t()); }},
      {"mul", [](auto& x, auto& y) { return at::mul(x, y); }},
      {"mul by a number", [](auto& x, auto&) { return at::mul(x, -2); }},
      {"mul_", [](auto& x, auto& y) { return x.clone().mul_(y); }},
      {"mul_ by a number", [](auto& x, auto&) { return x.clone().mul_(-2.5); }},
      {"relu", [](auto& x, auto&) { return at::relu(x); }},
      {"sqrt", [](auto& x, auto&) { return (x + 3).sqrt(); }},
      {"sub", [](auto& x, auto& y) { return at::sub(x, y, 3); }},
      {"sum", [](auto& x, auto&) { return x.sum(); }},
      {"sum over rows", [](auto& x, auto&) { return x.sum(0, true); }},
      {"sum over columns", [](auto& x, auto&) { return x.sum({1}); }},
      {"sum as integers", [](auto& x, auto&) { return x.sum(at::kLong); }},
      {"t", [](auto& x, auto&) { return x.t(); }},
      {"transpose", [](auto& x, auto&) { return x.transpose(0, -1); }},
      {"view",
       [](auto& x, auto&) {
         return x.view({5, 2, 2});
       }},
      {"view of fewer dims",
       [](auto& x, auto&) {
         return x.view({5, 2, 2}).view({5, -1});
       }},
      {"a view that is written",
       [](auto& x, auto& y) {
         const at::Tensor copy = x.clone();
         copy.t().add_(y.t());
         copy.view({5, 2, 2}).mul_(2);
         return copy;
       }},
      {"softmax", [](auto& x, auto&) { return at::softmax(x, 1); }},
      {"softmax over rows", [](auto& x, auto&) { return at::softmax(x, 0); }},
      {"softmax, back", [](auto& x, auto& y) { return at::_softmax_backward_data(x, at::softmax(y, 1), 1, at::kDouble); }},
      {"log_softmax", [](auto& x, auto&) { return at::log_softmax(x, -1); }},
      {"log_softmax, back",
       [](auto& x, auto& y) { return at::_log_softmax_backward_data(x, at::log_softmax(y, 1), 1, at::kDouble); }},
      {"gelu", [](auto& x, auto&) { return at::gelu(x); }},
      {"gelu by tanh", [](auto& x, auto&) { return at::gelu(x, "tanh"); }},
      {"gelu, back", [](auto& x, auto& y) { return at::gelu_backward(x, y, "tanh"); }},
      {"silu", [](auto& x, auto&) { return at::silu(x); }},
      {"clone", [](auto& x, auto&) { return x.clone().add_(1); }},
      {"clone by rows", [](auto& x, auto&) { return x.t().clone(at::MemoryFormat::Contiguous).view({2, 10}); }},
      {"expand", [](auto& x, auto&) { return x.expand({3, 5, 4}).mul(2); }},
      {"expand of columns", [](auto& x, auto&) { return x.slice(1, 0, 1).expand({-1, 6}); }},
      {"reshape", [](auto& x, auto&) { return x.t().reshape({2, 10}); }},
      {"a view of what was made", [](auto& x, auto&) { return at::_unsafe_view(x.clone(), {5, 2, 2}); }},
      {"layer norm", [](auto& x, auto&) { return at::layer_norm(x, {4}); }},
      {"layer norm with a weight",
       [](auto& x, auto& y) {
         return at::layer_norm(x, {4}, y.sum(0), y.sum(0).mul(2));
       }},
      {"layer norm, its mean", [](auto& x, auto&) { return std::get<1>(at::native_layer_norm(x, {4}, {}, {}, 1e-5)); }},
      {"layer norm, back to the weight",
       [](auto& x, auto& y) {
         const auto [z, mean, rstd] = at::native_layer_norm(x, {4}, {}, {}, 1e-5);
         const at::Tensor weight = y.sum(0);
         const auto [of_x, of_weight, of_bias] =
             at::native_layer_norm_backward(y, x, {4}, mean, rstd, weight, weight, {true, true, true});
         const auto [some, none, also] =
             at::native_layer_norm_backward(y, x, {4}, mean, rstd, weight, weight, {true, false, true});
         EXPECT_TRUE(also.defined() && !none.defined());
         return of_x + some + of_weight + of_bias + also;
       }},
      {"a view of a slice", [](auto& x, auto&) { return x.slice(1, 1, 3).t().mul(2); }},
  };
  return *all;
}

at::Tensor full(const at::Tensor& tensor) { return DTensor(tensor).full_tensor(); }

TEST(Direct, LaterCallsAreAsTheFirst) {
  const at::Tensor x = numbers({5, 4}), y = numbers({5, 4}, 7);
  for (const Dims& shape : {Dims{1}, Dims{2}, Dims{3}, Dims{6}, Dims{2, 2}}) {
    const Mesh mesh = Mesh::make(shape);
    run_ranks(mesh.size(), [&](World& world) {
      const DeviceMesh ranks = init_device_mesh(world, at::kCPU, mesh);
      for (const Placement& last : {Placement(Replicate()), Placement(Shard(0)), Placement(Partial())}) {
        Placements placements(shape.size(), Shard(0));
        placements.back() = last;
        const at::Tensor dx = distribute_tensor(x, ranks, placements), dy = distribute_tensor(y, ranks, placements);
        for (const Case& c : cases()) {
          const at::Tensor expected = c.call(x, y), first = c.call(dx, dy);
          for (int call = 0; call < 2; ++call) {
            const at::Tensor again = c.call(dx, dy);
            ASSERT_EQ(DTensor(again).spec(), DTensor(first).spec()) << c.name;
            ASSERT_EQ(again.storage_offset(), first.storage_offset()) << c.name;
            ASSERT_TRUE(at::equal(full(again), full(first))) << c.name << " of " << DTensor(dx).spec().to_string();
          }
          ASSERT_TRUE(at::allclose(full(first), expected, 1e-12, 1e-12))
              << c.name << " of " << DTensor(dx).spec().to_string();
        }
      }
    });
  }
}

TEST(Direct, GradientsAreThoseOfOneDevice) {
  const at::Tensor x = numbers({5, 4}), y = numbers({5, 4}, 7);
  const auto loss = [](const at::Tensor& a, const at::Tensor& b) {
    const at::Tensor h = at::relu(at::addmm(a, a, b.t().mm(b)));
    return (at::cat({h, b * 2}, 1).view({5, 2, 4}).transpose(0, 1) / 3).sum({0}).sub(a).sum();
  };
  const at::Tensor plain_x = x.clone().requires_grad_(), plain_y = y.clone().requires_grad_();
  for (int pass = 0; pass < 3; ++pass) loss(plain_x, plain_y).backward();
  run_ranks(3, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3}, {"x"});
    const at::Tensor dx = distribute_tensor(x, mesh, {Shard(0)}).requires_grad_();
    const at::Tensor dy = distribute_tensor(y, mesh, {Replicate()}).requires_grad_();
    for (int pass = 0; pass < 3; ++pass) loss(dx, dy).backward();
    EXPECT_TRUE(at::allclose(full(dx.grad()), plain_x.grad(), 1e-12, 1e-12));
    EXPECT_TRUE(at::allclose(full(dy.grad()), plain_y.grad(), 1e-12, 1e-12));
    EXPECT_EQ(DTensor(dy.grad()).spec(), DTensor(dy).spec());
  });
}

// What makes a call another one than that before it.
TEST(Direct, OtherCallsAreOthers) {
  const at::Tensor x = numbers({6, 4}), y = numbers({6, 4}, 7);
  run_ranks(2, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    const at::Tensor rows = distribute_tensor(x, mesh, {Shard(0)}), columns = distribute_tensor(x, mesh, {Shard(1)});
    for (int call = 0; call < 2; ++call) {
      EXPECT_TRUE(at::equal(full(rows.view({6, 2, 2})), x.view({6, 2, 2})));
      EXPECT_TRUE(at::equal(full(rows.view({2, 3, 4})), x.view({2, 3, 4})));
      EXPECT_TRUE(at::equal(full(columns.view({2, 3, 4})), x.view({2, 3, 4})));
      EXPECT_TRUE(at::allclose(full(rows.sum({0})), x.sum({0})));
      EXPECT_TRUE(at::allclose(full(rows.sum({1})), x.sum({1})));
      EXPECT_TRUE(at::allclose(full(rows.sum({1}, true)), x.sum({1}, true)));
      EXPECT_TRUE(at::equal(full(at::add(rows, columns)), x + x));
      EXPECT_TRUE(at::equal(full(at::add(rows, distribute_tensor(x.to(at::kFloat), mesh, {Shard(0)}))),
                            at::add(x, x.to(at::kFloat))));
      const std::string error = testing::error_of([&] {
        const PlainOperandsGuard strict(PlainOperands::kRefuse);
        at::add(rows, y);
      });
      EXPECT_NE(error.find("a plain tensor among distributed ones"), std::string::npos) << error;
      EXPECT_TRUE(at::equal(full(at::add(rows, y)), x + y));
    }
  });
}

// Ranks that have nothing of the operands go the general way, and yet all ranks reduce in the same order what waits.
TEST(Direct, WhatIsStillToBeReducedIsReducedInOrder) {
  const at::Tensor x = numbers({2, 4}), y = numbers({2, 4}, 3);
  run_ranks(3, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3}, {"x"});
    const at::Tensor a = distribute_tensor(x, mesh, {Shard(0)}).requires_grad_();
    const at::Tensor b = distribute_tensor(y, mesh, {Shard(0)}).requires_grad_();
    for (int call = 0; call < 2; ++call) static_cast<void>(at::sub(a.detach(), b.detach()));
    {
      const GradientAccumulation guard;
      a.mul(2).backward(from_local(x, mesh, {Partial()}));
      b.mul(2).backward(from_local(y, mesh, {Partial()}));
    }
    EXPECT_TRUE(at::allclose(full(at::sub(a.grad(), b.grad())), 6 * (x - y), 1e-12, 1e-12));
    EXPECT_TRUE(at::allclose(full(a.grad()), 6 * x, 1e-12, 1e-12));
    EXPECT_TRUE(at::allclose(full(b.grad()), 6 * y, 1e-12, 1e-12));
  });
}

// What integers become when they are divided is the program's choice.
TEST(Direct, TheDefaultTypeDecidesAnew) {
  const at::Tensor x = at::arange(6);
  run_ranks(1, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {1}, {"x"});
    const at::Tensor dx = distribute_tensor(x, mesh, {Shard(0)});
    for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kFloat}) {
      torch::set_default_dtype(c10::scalarTypeToTypeMeta(type));
      for (int call = 0; call < 2; ++call) {
        for (const at::Tensor& result : {at::div(dx, 4), at::div(dx, dx + 1), at::mul(dx, 1.5), dx.sqrt(), dx.exp()}) {
          EXPECT_EQ(result.scalar_type(), type);
          EXPECT_EQ(DTensor(result).to_local().scalar_type(), type);
        }
      }
    }
  });
}

}  // namespace
}  // namespace dtensor
