// Randomness that belongs to the tensor: the same bytes on any mesh, with any placements, as threads and as processes;
// the state, its streams and its replay; what is refused.
#include "dtensor/runtime/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/poisson.h>
#include <ATen/ops/rand_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/version.h>
#if TORCH_VERSION_MAJOR >= 2
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#endif

#include "dtensor/core/error.h"
#include "dtensor/runtime/factories.h"
#include "dtensor/runtime/record.h"
#include "tests/comm/launch_process.h"
#include "tests/runtime/helpers.h"
#include "tests/runtime/random_cases.h"

namespace dtensor {
namespace {

using testing::check_random_cases;
using testing::error_of;

class RandomOnRanks : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(RandomOnRanks, AllPlacementsGiveTheSameBytes) {
  run_ranks(GetParam(), [](World& world) {
    for (const Dims& shape : testing::mesh_shapes_of(world.size(), 3)) {
      const DeviceMesh mesh = init_device_mesh(world, at::kCPU, shape);
      for (const Placements& placements : testing::sharded_placements(mesh.ndim(), 2)) {
        EXPECT_EQ(check_random_cases(world, mesh, placements, {7, 5}), "") << to_string(placements);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, RandomOnRanks, ::testing::Range<std::int64_t>(1, 9));

TEST(RandomTensor, OrdersStridesAndEmptyShards) {
  run_ranks(4, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2, 2});
    for (const char* text : {"S(0,2),S(0)", "S(1),S(0)", "S(0),S(0)", "S(1,2),S(1)", "S(2),S(2)"}) {
      for (const Dims& shape : {Dims{3, 2, 5}, Dims{9, 2, 2}, Dims{2, 3, 1}}) {
        EXPECT_EQ(check_random_cases(world, mesh, parse_placements(text), shape), "") << text;
      }
    }
  });
}

TEST(RandomTensor, ProcessesDrawTheSame) {
  for (const std::int64_t ranks : {2, 4}) {
    testing::Process process({LAUNCH_MAIN, "run", "-n", std::to_string(ranks), "--", RANDOM_RANK},
                             {{"OMP_NUM_THREADS", "1"}});
    const auto result = process.finish(300);
    ASSERT_EQ(result.code, 0) << result.out << result.err;
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      EXPECT_NE(result.out.find("rank " + std::to_string(rank) + ": all alike"), std::string::npos) << result.out;
    }
  }
}

// A GPU draws the CPU's bits.
TEST(RandomTensor, DevicesDrawTheSame) {
  if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no GPU";
  run_ranks(1, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCUDA, {1});
    for (const char* only : {"rand", "uniform_", "normal_", "log_normal_", "exponential_", "cauchy_", "geometric_",
                             "bernoulli", "dropout", "native_dropout", "feature", "like", "generator", "views"}) {
      for (const Dims& shape : {Dims{7, 5}, Dims{301, 1000}}) {
        EXPECT_EQ(check_random_cases(world, mesh, {Shard(0)}, shape, only), "");
      }
    }
  });
}

// A device's own generator gives the call's seed, as a CPU's does.
TEST(RandomTensor, DevicesHaveGenerators) {
  if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no GPU";
  std::vector<at::Tensor> drawn;
  for (int time = 0; time < 2; ++time) {
    run_ranks(1, [&](World& world) {
      const DeviceMesh mesh = init_device_mesh(world, at::kCUDA, {1});
      at::Generator generator = at::globalContext().defaultGenerator(at::Device(at::kCUDA, 0)).clone();
      generator.set_current_seed(5);
      const at::Tensor first = rand({7, 3}, mesh, {Shard(0)}, {}, generator).full_tensor();
      const at::Tensor second = rand({7, 3}, mesh, {Shard(0)}, {}, generator).full_tensor();
      EXPECT_FALSE(at::equal(first, second));
      EXPECT_EQ(random_state(world).to_string().find("calls 0:"), std::string::npos);
      drawn.push_back(at::stack({first, second}));
    });
  }
  EXPECT_TRUE(at::equal(drawn[0], drawn[1]));
}

TEST(RandomTensor, StateCanBeReadSetAndReplayed) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2});
    const auto draw = [&] { return rand({5, 3}, mesh, {Shard(0)}).to_local(); };
    manual_seed(world, 7);
    EXPECT_EQ(random_state(world).to_string(), "seed 7, stream 0, calls");
    const at::Tensor first = draw(), second = draw();
    EXPECT_FALSE(at::equal(first, second));
    EXPECT_EQ(random_state(mesh).to_string(), "seed 7, stream 0, calls 0:2");
    manual_seed(world, 7);
    EXPECT_TRUE(at::equal(draw(), first));
    const RandomState kept = RandomState::parse(random_state(world).to_string());
    EXPECT_EQ(kept, random_state(world));
    EXPECT_TRUE(at::equal(draw(), second));
    const at::Tensor third = draw();
    {
      const RandomScope again(mesh, kept);
      EXPECT_TRUE(at::equal(draw(), second));
      EXPECT_TRUE(at::equal(draw(), third));
    }
    EXPECT_EQ(random_state(world).to_string(), "seed 7, stream 0, calls 0:3");
    set_random_state(world, kept);
    EXPECT_TRUE(at::equal(draw(), second));
    manual_seed(world, 8);
    EXPECT_FALSE(at::equal(draw(), first));
    // Empty tensors, and those of others, count as calls.
    rand({0, 3}, mesh, {Shard(0)});
    rand({3}, init_device_mesh(world, at::kCPU, Mesh::from_ranks({1}, {0})), {Replicate()});
    EXPECT_EQ(random_state(world).calls.at(0), 3u);
  });
}

TEST(RandomTensor, StreamsAreApart) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2});
    const DeviceMesh alone = init_device_mesh(world, at::kCPU, Mesh::from_ranks({1}, {world.rank()}));
    manual_seed(world, 7);
    const at::Tensor common = rand({6}, mesh, {Replicate()}).to_local();
    // Ranks that do different things, each in a stream of its own.
    {
      const RandomStream mine(world, 1 + static_cast<std::uint64_t>(world.rank()));
      for (std::int64_t i = 0; i <= world.rank(); ++i) {
        EXPECT_FALSE(at::equal(rand({6}, alone, {Replicate()}).to_local(), common));
      }
    }
    // And then go on together.
    const DTensor after = rand({6}, mesh, {Shard(0)});
    EXPECT_EQ(after.full_tensor().numel(), 6);
    EXPECT_EQ(random_state(world).calls.at(0), 2u);
  });
}

TEST(RandomTensor, DivergedRanksAreCaught) {
  const auto text = error_of([] {
    run_ranks(2, [](World& world) {
      const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
      DTensor x = rand({4}, mesh, {Shard(0)});
      if (world.rank() == 1) x.uniform_();
      x.full_tensor();
    });
  });
  // Whoever comes second says it.
  EXPECT_NE(text.find(" random calls"), std::string::npos) << text;
  EXPECT_NE(text.find("after 1"), std::string::npos) << text;
  EXPECT_NE(text.find("after 2"), std::string::npos) << text;
  const auto seeds = error_of([] {
    run_ranks(2, [](World& world) {
      const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
      manual_seed(world, static_cast<std::uint64_t>(world.rank()));
      rand({4}, mesh, {Shard(0)}).full_tensor();
    });
  });
  EXPECT_NE(seeds.find("with one seed or generator"), std::string::npos) << seeds;
  const auto generators = error_of([] {
    run_ranks(2, [](World& world) {
      const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
      const auto seed = static_cast<std::uint64_t>(world.rank());
      rand({4}, mesh, {Shard(0)}, {}, at::detail::createCPUGenerator(seed)).full_tensor();
    });
  });
  EXPECT_NE(generators.find("with one seed or generator"), std::string::npos) << generators;
}

TEST(RandomTensor, WhatCannotBeIsRefused) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    DTensor partial = zeros({4}, mesh, {Partial()});
    EXPECT_EQ(error_of([&] { partial.uniform_(); }),
              "[aten::uniform_] random values into a Partial tensor: their sum would be another distribution; got "
              "f32[4] @ 2(x) : P(sum); expected Shard and Replicate; try redistribute it first");
    EXPECT_NE(error_of([&] { rand({4}, mesh, {Partial()}); }).find("[rand] random values into a Partial"),
              std::string::npos);
    DTensor integers = zeros({4}, mesh, {Shard(0)}, at::kLong);
    EXPECT_NE(error_of([&] { integers.normal_(); }).find("there are no such values of this type"), std::string::npos);
    EXPECT_NE(error_of([&] { integers.random_(5, 5); }).find("the range of integers is empty"), std::string::npos);
    DTensor x = rand({4}, mesh, {Shard(0)});
    EXPECT_NE(error_of([&] { x.normal_(0, -1); }).find("a deviation is not negative"), std::string::npos);
    EXPECT_NE(error_of([&] { at::poisson(x); }).find("a random operator without a rule"), std::string::npos);
    EXPECT_NE(error_of([&] { at::multinomial(x, 5); }).find("more than there are"), std::string::npos);
    EXPECT_NE(error_of([&] { randint(0, 300, {4}, mesh, {Shard(0)}, at::kByte); }).find("does not have all of these"),
              std::string::npos);
#if TORCH_VERSION_MAJOR >= 2
    const DTensor q = randn({2, 1, 4, 8}, mesh, {Shard(0)});
    EXPECT_NE(error_of([&] {
                at::_scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.5);
              }).find("drops elements by itself"),
              std::string::npos);
#endif
    // All ranks are as far as each other after all this.
    EXPECT_EQ(x.full_tensor().numel(), 4);
  });
}

TEST(RandomTensor, DropoutReducesAPartialFirst) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    const at::Tensor x = ones({6, 4}, mesh, {Partial()});
    CommRecorder recorder;
    const DTensor y = at::dropout(x, 0.5, true);
    EXPECT_EQ(y.placements(), Placements{Replicate()});
    ASSERT_EQ(recorder.events().size(), 1u);
    EXPECT_EQ(recorder.events()[0].op, "aten::native_dropout");
    EXPECT_TRUE(at::equal(y.to_local().mul(2).remainder(4), at::zeros({6, 4})));
    EXPECT_EQ(DTensor(at::rand_like(x)).placements(), Placements{Replicate()});
    EXPECT_TRUE(at::equal(DTensor(at::dropout(y, 0.5, false)).to_local(), y.to_local()));
  });
}

}  // namespace
}  // namespace dtensor
