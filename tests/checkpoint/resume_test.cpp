// A run that was saved and loaded goes on as if it had never stopped.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dtensor/checkpoint/checkpoint.h"
#include "dtensor/comm/world.h"
#include "dtensor/runtime/module.h"
#include "dtensor/runtime/random.h"
#include "tests/checkpoint/store.h"

namespace dtensor {
namespace {

using testing::error_of;
using testing::Folder;
using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

struct Training {
  torch::nn::Sequential net{torch::nn::Linear(6, 12), torch::nn::Tanh(), torch::nn::Dropout(0.3),
                            torch::nn::BatchNorm1d(12), torch::nn::Linear(12, 1)};
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  DeviceMesh mesh;

  Training(World& world, const Dims& shape, const MakeOptimizer& make, bool start)
      : mesh(init_device_mesh(world, at::kCPU, shape)) {
    const torch::NoGradGuard no_grad;
    std::int64_t salt = 0;
    for (at::Tensor& p : net->parameters()) {
      p.copy_(start ? torch::arange(1.0, p.numel() + 1).add(0.1 * static_cast<double>(++salt)).sin().view(p.sizes())
                    : torch::zeros_like(p));
    }
    distribute_module(net, mesh, [&](const std::string& name, const at::Tensor&) {
      Placements placements(static_cast<std::size_t>(mesh.ndim()), Replicate());
      if (name == "0.weight" || name == "0.bias") placements.back() = Shard(0);
      if (name == "4.weight") placements.back() = Shard(1);
      return placements;
    });
    optimizer = make(net->parameters());
  }

  double step(int number) {
    const at::Tensor inputs = torch::arange(60.0).mul(0.7).add(number).sin().view({10, 6});
    Placements placements(static_cast<std::size_t>(mesh.ndim()), Replicate());
    const at::Tensor x = distribute_tensor(inputs, mesh, placements);
    const at::Tensor y = distribute_tensor(inputs.sum(1, true), mesh, placements);
    optimizer->zero_grad();
    const at::Tensor loss = torch::mse_loss(net->forward(x), y);
    loss.backward();
    optimizer->step();
    return loss.item<double>();
  }
};

template <class Optimizer, class Options>
MakeOptimizer maker(Options options) {
  return [options](std::vector<at::Tensor> parameters) {
    return std::make_unique<Optimizer>(std::move(parameters), options);
  };
}

struct Kind {
  std::string name;
  MakeOptimizer make;
  MakeOptimizer fresh;  // with other options: the checkpoint's count
};

std::vector<Kind> kinds() {
  using namespace torch::optim;
  return {
      {"SGD", maker<SGD>(SGDOptions(0.02).momentum(0.9).nesterov(true)), maker<SGD>(SGDOptions(0.5).momentum(0.1))},
      {"plain SGD", maker<SGD>(SGDOptions(0.02)), maker<SGD>(SGDOptions(0.5))},
      {"Adam", maker<Adam>(AdamOptions(0.03).amsgrad(true)), maker<Adam>(AdamOptions(1))},
      {"AdamW", maker<AdamW>(AdamWOptions(0.03).betas({0.8, 0.99})), maker<AdamW>(AdamWOptions(1))},
      {"RMSprop", maker<RMSprop>(RMSpropOptions(0.01).momentum(0.5).centered(true)), maker<RMSprop>(RMSpropOptions(1))},
      {"Adagrad", maker<Adagrad>(AdagradOptions(0.1)), maker<Adagrad>(AdagradOptions(1))}};
}

TEST(Resume, ToTheBitOnTheSameMeshToRoundingOnAnother) {
  for (const Kind& kind : kinds()) {
    const Folder folder;
    std::vector<double> losses;
    run_ranks(4, [&](World& world) {
      manual_seed(world, 11);
      Training run(world, {2, 2}, kind.make, true);
      for (int step = 0; step < 3; ++step) run.step(step);
      for (auto& group : run.optimizer->param_groups()) group.options().set_lr(group.options().get_lr() / 2);
      save_checkpoint(folder.path(), *run.net, *run.optimizer, {.step = 3});
      std::vector<double> rest;
      for (int step = 3; step < 7; ++step) rest.push_back(run.step(step));
      if (world.rank() == 0) losses = rest;
    });
    ASSERT_EQ(losses.size(), 4u);
    const auto resume = [&](std::int64_t ranks, const Dims& shape) {
      std::vector<double> again;
      run_ranks(ranks, [&](World& world) {
        manual_seed(world, 999);
        Training run(world, shape, kind.fresh, false);
        const LoadReport report = load_checkpoint(folder.path(), *run.net, *run.optimizer);
        EXPECT_EQ(report.step, 3);
        EXPECT_GE(report.bytes_read, report.bytes_needed);
        std::vector<double> rest;
        for (int step = 3; step < 7; ++step) rest.push_back(run.step(step));
        if (world.rank() == 0) again = rest;
      });
      return again;
    };
    EXPECT_EQ(resume(4, {2, 2}), losses) << kind.name;
    for (const auto& [ranks, shape] : std::vector<std::pair<std::int64_t, Dims>>{{3, {3}}, {1, {1}}}) {
      const std::vector<double> other = resume(ranks, shape);
      for (std::size_t i = 0; i < losses.size(); ++i) {
        EXPECT_NEAR(other[i], losses[i], 1e-4 * std::abs(losses[i])) << kind.name << " on " << ranks;
      }
    }
  }
}

TEST(Resume, BehindTheProgramToo) {
  const Folder folder;
  run_ranks(2, [&](World& world) {
    manual_seed(world, 11);
    const Kind kind = kinds()[3];
    Training run(world, {2}, kind.make, true);
    for (int step = 0; step < 3; ++step) run.step(step);
    PendingSave pending = save_checkpoint_async(folder.path(), *run.net, *run.optimizer, {.step = 3});
    std::vector<double> losses;
    for (int step = 3; step < 7; ++step) losses.push_back(run.step(step));
    pending.wait();
    Training other(world, {2}, kind.fresh, false);
    load_checkpoint(folder.path(), *other.net, *other.optimizer);
    for (int step = 3; step < 7; ++step) EXPECT_EQ(other.step(step), losses[static_cast<std::size_t>(step - 3)]);
  });
}

TEST(Resume, TheModuleAlone) {
  const Folder folder;
  run_ranks(2, [&](World& world) {
    Training run(world, {2}, kinds()[2].make, true);
    run.step(0);
    save_checkpoint(folder.path(), *run.net, *run.optimizer);
    Training other(world, {2}, kinds()[1].make, false);
    const LoadReport report = load_checkpoint(folder.path(), *other.net);
    EXPECT_TRUE(report.unexpected.empty());
    EXPECT_TRUE(
        DTensor(other.net->parameters()[0]).full_tensor().equal(DTensor(run.net->parameters()[0]).full_tensor()));
    EXPECT_EQ(error_of([&] { load_checkpoint(folder.path(), *other.net, *other.optimizer); }),
              "[load_checkpoint] the checkpoint has no state of this optimizer; got 'Adam'; expected SGD");
    torch::optim::LBFGS strange(run.net->parameters());
    EXPECT_EQ(
        error_of([&] { save_checkpoint(folder.path(), *run.net, strange); }),
        "[checkpoint] the state of this optimizer is not known here; expected SGD, Adam, AdamW, RMSprop or Adagrad; "
        "try its tensors as a map of names, with save_checkpoint(dir, tensors)");
  });
}

struct Tall : torch::nn::Module {
  explicit Tall(c10::Device device) { weight = register_parameter("weight", torch::empty({8, 6}, device)); }
  at::Tensor weight;
};

// A module that was never whole: made without values, then loaded.
TEST(Resume, AModuleWithoutValues) {
  const Folder folder;
  Tall plain(at::kCPU);
  plain.weight.detach().copy_(torch::arange(48.0).view({8, 6}));
  save_checkpoint(folder.path(), plain);
  run_ranks(2, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2});
    Tall net(at::kMeta);
    EXPECT_EQ(error_of([&] { save_checkpoint(folder.path(), net); }).substr(0, 64),
              "[save_checkpoint] a tensor without values, on the meta device; g");
    distribute_module(net, mesh, [](const std::string&, const at::Tensor&) { return Placements{Shard(0)}; });
    const LoadReport report = load_checkpoint(folder.path(), net);
    EXPECT_EQ(report.bytes_needed, 4 * 6 * 4);
    EXPECT_EQ(report.bytes_read, 8 * 6 * 4);  // the block that has it, which has the other rank's part too
    EXPECT_TRUE(DTensor(net.weight).full_tensor().equal(plain.weight));
  });
}

// A checkpoint of another module is refused before anything is changed, the optimizer included.
TEST(Resume, WhatIsRefusedLeavesTheOptimizerAlone) {
  using namespace torch::optim;
  const Folder folder;
  run_ranks(2, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2});
    const auto train = [&](torch::nn::Linear& linear, Optimizer& optimizer) {
      linear->forward(distribute_tensor(torch::ones({4, 3}), mesh, {Shard(0)})).sum().backward();
      optimizer.step();
    };
    torch::nn::Linear saved(3, 2), other(torch::nn::LinearOptions(3, 2).bias(false));
    distribute_module(saved, mesh);
    distribute_module(other, mesh);
    AdamW first(saved->parameters(), AdamWOptions(0.01)), second(other->parameters(), AdamWOptions(0.5));
    train(saved, first);
    train(other, second);
    train(other, second);
    save_checkpoint(folder.path(), *saved, first);
    EXPECT_NE(error_of([&] { load_checkpoint(folder.path(), *other, second); }), "no error");
    EXPECT_EQ(static_cast<AdamWOptions&>(second.param_groups()[0].options()).lr(), 0.5);
    const auto& state = static_cast<AdamWParamState&>(*second.state().begin()->second);
    EXPECT_EQ(state.step(), 2);
    EXPECT_NE(DTensor(state.exp_avg()).full_tensor().abs().sum().item<double>(), 0);
  });
}

// Parameters keep their order in memory; files have none.
TEST(Resume, WhatLiesByColumns) {
  const Folder folder;
  run_ranks(2, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2});
    const auto make = [&](double start) {
      Tall net(at::kCPU);
      net.weight.set_data(torch::arange(48.0).add(start).view({6, 8}).t());
      distribute_module(net, mesh, [](const std::string&, const at::Tensor&) { return Placements{Shard(0)}; });
      return net;
    };
    const Tall net = make(0);
    EXPECT_EQ(net.weight.stride(0), 1);
    save_checkpoint(folder.path(), net);
    Tall other = make(5);
    load_checkpoint(folder.path(), other);
    EXPECT_TRUE(DTensor(other.weight).full_tensor().equal(torch::arange(48.0).view({6, 8}).t()));
  });
}

}  // namespace
}  // namespace dtensor
