#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>

#include "dtensor/dtensor.h"
#include "tests/comm/launch_process.h"
#include "tests/runtime/helpers.h"

namespace dtensor::testing {
namespace {

torch::nn::Sequential make_net(std::int64_t width, std::int64_t layers) {
  torch::nn::Sequential net;
  for (std::int64_t i = 0; i < layers; ++i) {
    net->push_back(torch::nn::Linear(width, width));
    net->push_back(torch::nn::Tanh());
  }
  net->to(at::kDouble);
  const torch::NoGradGuard no_grad;
  double start = 0;
  for (at::Tensor& p : net->parameters()) p.copy_(numbers(p.sizes(), start += 0.3).mul(0.3));
  return net;
}

void shard_each(torch::nn::Sequential& net, const DeviceMesh& mesh, const FullyShardOptions& options = {}) {
  for (const auto& child : net->children()) {
    if (!child->parameters().empty()) fully_shard(*child, mesh, options);
  }
}

TEST(FullyShard, EveryRankHoldsItsPart) {
  run_ranks(4, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {4}, {"dp"});
    auto net = make_net(16, 6);
    std::int64_t all = 0, block = 0;
    for (const at::Tensor& p : net->parameters()) all += p.numel() * 8;
    for (const at::Tensor& p : net->children()[0]->parameters()) block += p.numel() * 8;
    shard_each(net, mesh);
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.01));
    const at::Tensor x = distribute_tensor(numbers({8, 16}), mesh, {Shard(0)});
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      net->forward(x).pow(2).mean().backward();
      EXPECT_EQ(gathered_bytes(mesh).now, 0) << "after a backward pass nothing is gathered";
      optimizer.step();
    }
    std::int64_t held = 0, gradients = 0, states = 0;
    for (const at::Tensor& p : net->parameters()) {
      held += static_cast<std::int64_t>(DTensor(p).to_local().nbytes());
      gradients += static_cast<std::int64_t>(DTensor(p.grad()).to_local().nbytes());
    }
    for (const auto& [key, state] : optimizer.state()) {
      const auto& adam = static_cast<const torch::optim::AdamWParamState&>(*state);
      states += static_cast<std::int64_t>(DTensor(adam.exp_avg()).to_local().nbytes());
      states += static_cast<std::int64_t>(DTensor(adam.exp_avg_sq()).to_local().nbytes());
    }
    EXPECT_EQ(held, all / 4);
    EXPECT_EQ(gradients, all / 4);
    EXPECT_EQ(states, 2 * all / 4);
    EXPECT_EQ(gathered_bytes(mesh).peak, block) << "one unit at a time";
  });
}

// Whatever order the parameters have in memory: gathered or not, they lie as they say.
TEST(FullyShard, TakesParametersThatLieByColumns) {
  const auto make = [] {
    torch::nn::Conv2d net(torch::nn::Conv2dOptions(3, 5, 2));
    net->to(at::kDouble);
    const torch::NoGradGuard no_grad;
    net->weight.set_data(numbers({5, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast));
    net->bias.copy_(numbers({5}, 2));
    return net;
  };
  const auto loss = [](torch::nn::Conv2d& net, const at::Tensor& x) {
    return net(x).pow(2).sum() + net->weight.view({5, -1}).pow(3).sum() + net->weight.permute({0, 2, 3, 1}).sum();
  };
  const at::Tensor x = numbers({6, 3, 4, 4}, 3);
  auto plain = make();
  const auto by_rows = [](torch::nn::Conv2d& net) { net->weight.set_data(net->weight.detach().contiguous()); };
  by_rows(plain);
  loss(plain, x).backward();
  run_ranks(2, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"dp"});
    auto net = make();
    fully_shard(*net, mesh);
    loss(net, distribute_tensor(x, mesh, {Shard(0)})).backward();
    EXPECT_TRUE(at::allclose(DTensor(net->weight.grad()).full_tensor(), plain->weight.grad(), 1e-9, 1e-9));
    EXPECT_EQ(net->weight.grad().view({5, -1}).dim(), 2);
  });
}

TEST(FullyShard, KeepsWhatItGatheredWhenAsked) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"dp"});
    auto net = make_net(8, 3);
    shard_each(net, mesh, {.reshard_after_forward = false});
    const at::Tensor x = distribute_tensor(numbers({4, 8}), mesh, {Shard(0)});
    const CommRecorder recorder;
    net->forward(x).sum().backward();
    std::int64_t gathers = 0;
    for (const CommEvent& event : recorder.events()) gathers += event.collective == "all-gather";
    EXPECT_EQ(gathers, 3) << recorder.to_string();
  });
}

TEST(FullyShard, AccumulatesWithoutCommunication) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"dp"});
    auto plain = make_net(5, 3), net = make_net(5, 3);
    shard_each(net, mesh);
    const CommRecorder recorder;
    for (int i = 0; i < 3; ++i) {
      const at::Tensor x = numbers({4, 5}, i);
      plain->forward(x).pow(2).sum().backward();
      std::optional<GradientAccumulation> guard;
      if (i < 2) guard.emplace();
      net->forward(at::Tensor(distribute_tensor(x, mesh, {Shard(0)}))).pow(2).sum().backward();
      std::int64_t scatters = 0;
      for (const CommEvent& event : recorder.events()) scatters += event.collective == "reduce-scatter";
      EXPECT_EQ(scatters, i < 2 ? 0 : 3) << recorder.to_string();
    }
    for (std::size_t i = 0; i < plain->parameters().size(); ++i) {
      const at::Tensor mine = DTensor(net->parameters()[i].grad()).full_tensor();
      EXPECT_TRUE(at::allclose(mine, plain->parameters()[i].grad(), 1e-12, 1e-12)) << i;
    }
  });
}

TEST(FullyShard, EvaluatesWithoutGradients) {
  run_ranks(3, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3}, {"dp"});
    auto plain = make_net(5, 2), net = make_net(5, 2);
    fully_shard(net, mesh);
    const torch::NoGradGuard no_grad;
    const at::Tensor x = numbers({4, 5});
    const at::Tensor y = net->forward(at::Tensor(distribute_tensor(x, mesh, {Shard(0)})));
    EXPECT_TRUE(at::allclose(DTensor(y).full_tensor(), plain->forward(x), 1e-12, 1e-12));
    // Written while it is gathered: the next use sees it.
    net->parameters()[0].zero_();
    plain->parameters()[0].zero_();
    const at::Tensor again = net->forward(at::Tensor(distribute_tensor(x, mesh, {Shard(0)})));
    EXPECT_TRUE(at::allclose(DTensor(again).full_tensor(), plain->forward(x), 1e-12, 1e-12));
    EXPECT_TRUE(at::equal(DTensor(net->parameters()[1]).full_tensor(), plain->parameters()[1]));
    const at::Tensor view = net->parameters()[0].t();
    EXPECT_EQ(error_of([&] { view.zero_(); }),
              "[fully_shard] a view of a gathered parameter is written, or its part taken: its memory does not stay; "
              "got f64[5,5]{1,5} @ 3(dp) : R; try the parameter itself, or clone()");
  });
}

// Parameters of 16 bits while they are used, sums of 32.
// Layers in another order in every step, some twice and some not at all, with evaluations between: what was gathered
// ahead is not always what comes.
void expect_plain_training(World& world) {
  const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {world.size()}, {"dp"});
  auto plain = make_net(5, 4), net = make_net(5, 4);
  shard_each(net, mesh);
  torch::optim::SGD plain_steps(plain->parameters(), 0.1), steps(net->parameters(), 0.1);
  const auto forward = [](torch::nn::Sequential& layers, at::Tensor x, std::size_t kind) {
    static const std::vector<std::size_t> kOrders[] = {{0, 2, 4, 6}, {0, 2, 2, 6}, {4, 0, 6, 2, 4}};
    for (const std::size_t layer : kOrders[kind % 3])
      x = layers->children()[layer]->as<torch::nn::Linear>()->forward(x);
    return x;
  };
  for (std::size_t step = 0; step < 7; ++step) {
    const at::Tensor x = numbers({5, 5}, static_cast<double>(step));
    const DTensor mine = distribute_tensor(x, mesh, {Shard(0)});
    const auto expect_same = [&](std::size_t kind) {
      const at::Tensor expected = forward(plain, x, kind).tanh().sum(), got = forward(net, mine, kind).tanh().sum();
      EXPECT_NEAR(DTensor(got).full_tensor().item<double>(), expected.item<double>(), 1e-10) << "step " << step;
      if (!at::GradMode::is_enabled()) return;
      expected.backward();
      got.backward();
    };
    if (step % 2 == 1) {
      const torch::NoGradGuard no_grad;
      expect_same(step + 1);
    }
    plain_steps.zero_grad();
    steps.zero_grad();
    expect_same(step);
    plain_steps.step();
    steps.step();
  }
}

// Where ranks are processes, the next unit is gathered ahead: this program starts itself as ranks.
TEST(FullyShard, WhatWasGatheredAheadIsUpToDate) {
  if (std::getenv("RANK")) {
    World world = World::from_env();
    return expect_plain_training(world);
  }
  run_ranks(3, expect_plain_training);
  const std::string me = std::filesystem::read_symlink("/proc/self/exe");
  Process process({LAUNCH_MAIN, "run", "-n", "2", "--", me, "--gtest_filter=FullyShard.WhatWasGatheredAheadIsUpToDate"},
                  {{"OMP_NUM_THREADS", "1"}});
  const auto result = process.finish(100);
  EXPECT_EQ(result.code, 0) << result.out << result.err;
}

// A handle from before a unit was gathered: what is written there is seen.
TEST(FullyShard, WritesToPartsAreSeen) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"dp"});
    auto net = make_net(5, 1);
    fully_shard(net, mesh);
    const torch::NoGradGuard no_grad;
    const at::Tensor x = distribute_tensor(numbers({4, 5}), mesh, {Shard(0)});
    const at::Tensor weight = net->parameters()[0].detach(), bias = net->parameters()[1].detach();
    static_cast<void>(net->forward(x));
    weight.zero_();
    bias.zero_();
    EXPECT_TRUE(at::equal(DTensor(net->forward(x)).full_tensor(), at::zeros({4, 5}, at::kDouble)));
  });
}

TEST(FullyShard, ComputesInLowPrecision) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"dp"});
    auto plain = make_net(6, 2), net = make_net(6, 2);
    plain->to(at::kFloat);
    net->to(at::kFloat);
    shard_each(net, mesh, {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat});
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    const at::Tensor x = numbers({8, 6}).to(at::kFloat);
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      const at::Tensor y = net->forward(at::Tensor(distribute_tensor(x.to(at::kBFloat16), mesh, {Shard(0)})));
      EXPECT_EQ(y.scalar_type(), at::kBFloat16);
      y.to(at::kFloat).pow(2).sum().backward();
      if (step == 0) {
        plain->forward(x).pow(2).sum().backward();
        for (std::size_t i = 0; i < plain->parameters().size(); ++i) {
          const at::Tensor gradient = net->parameters()[i].grad();
          EXPECT_EQ(gradient.scalar_type(), at::kFloat);
          EXPECT_EQ(DTensor(gradient).spec(), DTensor(net->parameters()[i]).spec());
          EXPECT_TRUE(at::allclose(DTensor(gradient).full_tensor(), plain->parameters()[i].grad(), 0.05, 0.05)) << i;
        }
      }
      optimizer.step();
      EXPECT_EQ(net->parameters()[0].scalar_type(), at::kFloat);
    }
  });
}

TEST(FullyShard, ClipsByTheNormOfAll) {
  auto plain = make_net(5, 2);
  const at::Tensor x = numbers({4, 5});
  plain->forward(x).pow(2).sum().backward();
  const double expected = torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.01);
  run_ranks(4, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2, 2}, {"dp", "tp"});
    auto net = make_net(5, 2);
    parallelize_module(net, mesh["tp"], {{"0", ColwiseParallel()}, {"2", RowwiseParallel()}});
    fully_shard(*net->children()[0], mesh["dp"]);
    net->forward(at::Tensor(distribute_tensor(x, mesh, {Shard(0), Replicate()}))).pow(2).sum().backward();
    EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(net->parameters(), 0.01), expected, 1e-12 * expected);
    for (std::size_t i = 0; i < plain->parameters().size(); ++i) {
      EXPECT_TRUE(
          at::allclose(DTensor(net->parameters()[i].grad()).full_tensor(), plain->parameters()[i].grad(), 1e-12, 1e-14))
          << i;
    }
  });
}

TEST(FullyShard, SaysWhatIsWrong) {
  run_ranks(4, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2, 2}, {"dp", "tp"});
    auto net = make_net(4, 1);
    EXPECT_EQ(error_of([&] { fully_shard(net, mesh); }),
              "[fully_shard] a mesh of several dims; got 2x2(dp,tp); expected one dim; try mesh[\"tp\"]");
    EXPECT_EQ(error_of([&] {
                fully_shard(net, mesh.flatten({"dp", "tp"}, "all"));
              }),
              "[fully_shard] a mesh dim that is not one of the whole mesh's; got 4(all) of 2x2(dp,tp); try one of its "
              "dims, by name");
  });
}

}  // namespace
}  // namespace dtensor::testing
