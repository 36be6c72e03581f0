// Memory that several tensors have, and what is written to it.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <thread>

#include "dtensor/comm/world.h"
#include "dtensor/runtime/accumulate.h"
#include "dtensor/runtime/local_map.h"
#include "dtensor/runtime/module.h"
#include "dtensor/runtime/tensor.h"
#include "tests/runtime/helpers.h"

namespace dtensor {
namespace {

using testing::error_of;
using testing::numbers;

at::Tensor full(const at::Tensor& tensor) { return DTensor(tensor).full_tensor(); }

void on_ranks(std::int64_t ranks, const std::function<void(const DeviceMesh&)>& body) {
  run_ranks(ranks, [&](World& world) { body(init_device_mesh(world, at::kCPU, {ranks}, {"x"})); });
}

bool says_modified(const std::function<void()>& call) {
  return error_of(call).find("modified by an inplace operation") != std::string::npos;
}

// Through a part, or what a tensor was made of: autograd sees that a value that it needs has changed.
TEST(Writes, ThroughPartsAreSeen) {
  on_ranks(3, [](const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(numbers({5, 4}), mesh, {Shard(0)}).requires_grad_();
    at::Tensor y = x.exp();
    DTensor(y.detach()).to_local().mul_(2);
    EXPECT_TRUE(says_modified([&] { y.sum().backward(); }));
    y = x.exp();
    local_map(
        [](const std::vector<at::Tensor>& parts) {
          const at::NoGradGuard no_grad;
          return parts[0].mul_(2);
        },
        {DTensor(y)}, {Shard(0)});
    EXPECT_TRUE(says_modified([&] { y.sum().backward(); }));
    const at::Tensor part = numbers({2, 4});
    y = x.slice(0, 0, 1) * from_local(part, mesh, {Shard(0)}, {.shape = Dims{6, 4}});
    part.mul_(2);
    EXPECT_TRUE(says_modified([&] { y.sum().backward(); }));
  });
}

// Where a mesh dim has one rank nothing is sent, and memory is shared.
TEST(Writes, ToWhatWasNotSentAreSeen) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {1, 2}, {"dp", "tp"});
    const at::Tensor p = distribute_tensor(numbers({4, 2}), mesh, {Shard(0), Replicate()}).requires_grad_();
    const at::Tensor x = p.exp(), y = DTensor(x).redistribute({Replicate(), Replicate()});
    y.mul_(3);
    EXPECT_TRUE(says_modified([&] { y.sum().backward(); }));
  });
}

// Views of one kind begin at different places, and their gradients go there.
TEST(Writes, ToViewsOfOneKindHaveTheirOwnPlaces) {
  const auto loss = [](const at::Tensor& x) {
    const at::Tensor y = x * 1;
    for (const std::int64_t row : {0, 3, 1}) y.select(0, row).mul_(static_cast<double>(row + 2));
    return (y * y).sum();
  };
  const at::Tensor plain = numbers({6}).requires_grad_();
  loss(plain).backward();
  on_ranks(3, [&](const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(plain.detach(), mesh, {Replicate()}).requires_grad_();
    EXPECT_EQ(x.select(0, 1).storage_offset(), 1);
    EXPECT_EQ(x.select(0, 4).storage_offset(), 4);
    loss(x).backward();
    EXPECT_TRUE(at::allclose(full(x.grad()), plain.grad(), 1e-12, 1e-12));
  });
}

// Two leaves whose gradient is one tensor, which one of them sends while the other takes it over.
TEST(Writes, ToAGradientDoNotReachAnothersThatIsUnderWay) {
  for (const std::int64_t rows : {24, 24000}) {
    for (const bool accumulate : {false, true}) {
      on_ranks(3, [&](const DeviceMesh& mesh) {
        const at::Tensor a = numbers({rows, 4}), b = numbers({rows, 4}, 3);
        const at::Tensor x = distribute_tensor(a, mesh, {Replicate()}).requires_grad_();
        const at::Tensor y = distribute_tensor(b, mesh, {Shard(0)}).requires_grad_();
        std::optional<GradientAccumulation> guard;
        if (accumulate) guard.emplace();
        ((x + y) * (x + y)).sum().backward();
        guard.reset();
        for (const at::Tensor& leaf : {y, x}) leaf.grad().mul_(0.5);
        EXPECT_TRUE(at::allclose(full(x.grad()), a + b, 1e-12, 1e-12)) << rows;
        EXPECT_TRUE(at::allclose(full(y.grad()), a + b, 1e-12, 1e-12)) << rows;
      });
    }
  }
}

struct PairImpl : torch::nn::Module {
  explicit PairImpl(std::int64_t rows) {
    x = register_parameter("x", numbers({rows, 4}));
    y = register_parameter("y", numbers({rows, 4}, 3));
  }
  at::Tensor x, y;
};
TORCH_MODULE(Pair);

TEST(Writes, ToAGradientDoNotReachThoseOfABucket) {
  for (const std::int64_t rows : {24, 240000}) {
    on_ranks(2, [&](const DeviceMesh& mesh) {
      Pair pair(rows);
      const at::Tensor sum = (pair->x + pair->y).detach();
      distribute_module(*pair, mesh, [](const std::string& name, const at::Tensor&) {
        return Placements{name == "x" ? Placement(Replicate()) : Placement(Shard(0))};
      });
      ((pair->x + pair->y) * (pair->x + pair->y)).sum().backward();
      for (const at::Tensor& leaf : {pair->y, pair->x}) leaf.grad().mul_(0.5);
      EXPECT_TRUE(at::allclose(full(pair->x.grad()), sum, 1e-12, 1e-12)) << rows;
      EXPECT_TRUE(at::allclose(full(pair->y.grad()), sum, 1e-12, 1e-12)) << rows;
    });
  }
}

// The value from before, on all ranks: never a mixture.
TEST(Writes, ToWhatIsUnderWayAreNotSeen) {
  on_ranks(3, [](const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(numbers({6, 4}), mesh, {Shard(0)});
    const DTensor y = DTensor(x).redistribute({Replicate()}, {.async = true});
    x.zero_();
    EXPECT_TRUE(at::equal(y.to_local(), numbers({6, 4})));
  });
}

// Forms that copy give copies, also where the part alone would be a view.
TEST(Writes, ToCopiesOfViewsStayThere) {
  on_ranks(3, [](const DeviceMesh& mesh) {
    const at::Tensor whole = numbers({4, 1, 2});
    for (const Placement& placement : {Placement(Replicate()), Placement(Shard(0)), Placement(Shard(2))}) {
      const at::Tensor x = distribute_tensor(whole, mesh, {placement});
      at::squeeze_copy(x).zero_();
      at::squeeze_copy(x, 1).zero_();
      for (const at::Tensor& piece : at::split_copy(x, 4, 0)) piece.zero_();
      EXPECT_TRUE(at::equal(full(x), whole)) << placement.to_string();
    }
  });
}

// In inference mode, too, a view of a parameter may have to be moved.
TEST(Writes, ViewsOfParametersInInferenceMode) {
  on_ranks(2, [](const DeviceMesh& mesh) {
    const at::Tensor whole = numbers({5, 4}), p = distribute_tensor(whole, mesh, {Shard(0)}).requires_grad_();
    const c10::InferenceMode inference;
    EXPECT_TRUE(at::equal(full(p.slice(0, 1, 4)), whole.slice(0, 1, 4)));
    EXPECT_TRUE(at::equal(full(p[1]), whole[1]));
    EXPECT_TRUE(at::equal(full(p.chunk(2)[1]), whole.chunk(2)[1]));
  });
}

// Nobody counts writes there, and yet a copy that stands for a view is not taken for what it was.
TEST(Writes, ToWhatViewsWereCopiedFromInInferenceMode) {
  on_ranks(2, [](const DeviceMesh& mesh) {
    const std::vector<std::function<void(const at::Tensor&)>> writes = {
        [](const at::Tensor& x) { x.add_(x); },
        [](const at::Tensor& x) { x.clamp_(0); },
        [](const at::Tensor& x) { x.t().mul_(2); },
        [](const at::Tensor& x) { x.select(1, 0).zero_(); },
        [](const at::Tensor& x) { x.copy_(x * 2); },
        [](const at::Tensor& x) { at::mul_out(const_cast<at::Tensor&>(x), x, x); },
        [](const at::Tensor& x) { x.uniform_(); },
    };
    const auto out_of_date = [](const at::Tensor& view) {
      return error_of([&] { static_cast<void>(view + 1); }).find("has been written since") != std::string::npos;
    };
    const at::Tensor before = distribute_tensor(numbers({5, 4}), mesh, {Shard(0)});
    for (std::size_t i = 0; i < writes.size(); ++i) {
      const c10::InferenceMode inference;
      const at::Tensor within = distribute_tensor(numbers({5, 4}), mesh, {Shard(0)});
      for (const at::Tensor& x : {before, within}) {
        const at::Tensor view = x.slice(0, 1, 4), reshaped = x.reshape({2, 10}), other = at::empty_like(x);
        writes[i](other);
        EXPECT_FALSE(out_of_date(view) || out_of_date(reshaped)) << i;
        writes[i](x);
        EXPECT_TRUE(out_of_date(view) && out_of_date(reshaped)) << i;
        EXPECT_FALSE(out_of_date(x.slice(0, 1, 4))) << i;
      }
    }
    const at::Tensor view = before.slice(0, 1, 4);
    before.data().zero_();
    EXPECT_TRUE(out_of_date(view));
  });
}

// The gradient goes to where the new value lies; the old hook has nothing to say.
TEST(Writes, ALeafMayBeGivenAnotherValue) {
  on_ranks(2, [](const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(numbers({5, 4}), mesh, {Shard(0)}).requires_grad_();
    const at::Tensor plain = numbers({5, 4}).requires_grad_();
    {
      const at::Tensor sum = (x * x).sum(), plain_sum = (plain * plain).sum();
      x.set_data(distribute_tensor(numbers({5, 4}, 3), mesh, {Shard(0)}));
      plain.set_data(numbers({5, 4}, 3));
      sum.backward();
      plain_sum.backward();
    }
    EXPECT_TRUE(at::equal(full(x.grad()), plain.grad()));
    const at::Tensor whole = numbers({3, 6}, 7);
    x.mutable_grad() = at::Tensor();
    x.set_data(distribute_tensor(whole, mesh, {Shard(1)}));
    (x * x).sum().backward();
    EXPECT_TRUE(at::equal(full(x.grad()), 2 * whole));
    EXPECT_EQ(DTensor(x.grad()).placements(), Placements{Shard(1)});
  });
}

// Threads of a rank may use a tensor at once, as they may a plain one: its first use in a graph, and what is under way.
TEST(Writes, ThreadsMayReadTogether) {
  on_ranks(2, [](const DeviceMesh& mesh) {
    for (int round = 0; round < 50; ++round) {
      const at::Tensor x = distribute_tensor(numbers({4, 4}), mesh, {Replicate()}).requires_grad_();
      const DTensor moved =
          DTensor(distribute_tensor(numbers({4, 4}), mesh, {Shard(0)})).redistribute({Replicate()}, {.async = true});
      std::vector<std::thread> threads;
      for (int i = 0; i < 3; ++i) {
        threads.emplace_back([&] {
          static_cast<void>((x * 2).sum());
          EXPECT_EQ(moved.to_local().numel(), 16);
        });
      }
      for (std::thread& thread : threads) thread.join();
    }
  });
}

}  // namespace
}  // namespace dtensor
