#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dtensor/dtensor.h"
#include "tests/runtime/helpers.h"

namespace dtensor::testing {
namespace {

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    tokens = register_module("tokens", torch::nn::Embedding(7, 6));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})));
    up = register_module("up", torch::nn::Linear(6, 9));
    down = register_module("down", torch::nn::Linear(9, 6));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return down(torch::relu(up(norm(tokens(x))))); }
  torch::nn::Embedding tokens{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Mlp);

std::string placed(const at::Tensor& tensor) { return to_string(DTensor(tensor).placements()); }

TEST(ParallelizeModule, CutsParametersOverOneDimOfAMesh) {
  run_ranks(4, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2, 2}, {"dp", "tp"});
    Mlp mlp;
    parallelize_module(mlp, mesh["tp"],
                       {{"tokens", RowwiseParallel()}, {"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
    EXPECT_EQ(placed(mlp->tokens->weight), "R,S(0)");
    EXPECT_EQ(placed(mlp->up->weight), "R,S(0)");
    EXPECT_EQ(placed(mlp->up->bias), "R,S(0)");
    EXPECT_EQ(placed(mlp->down->weight), "R,S(1)");
    EXPECT_EQ(placed(mlp->down->bias), "R,R");
    EXPECT_EQ(placed(mlp->norm->weight), "R,R");
  });
}

TEST(ParallelizeModule, BlocksAreNotCutThrough) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"tp"});
    Mlp mlp;
    parallelize_module(mlp, mesh, {{"up", ColwiseParallel({.blocks = 3})}});
    EXPECT_EQ(DTensor(mlp->up->weight).to_local().size(0), world.rank() == 0 ? 6 : 3);
    const at::Tensor x = distribute_tensor(numbers({5, 6}), mesh, {Replicate()});
    const CommPolicyGuard none(CommPolicy::kForbid);
    const at::Tensor y = mlp->up(x).view({5, 3, 3});
    EXPECT_EQ(placed(y), "S(1)");
  });
}

TEST(ParallelizeModule, LayoutsFollowTheStyles) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"tp"});
    torch::manual_seed(3);
    Mlp plain, mlp;
    {
      const torch::NoGradGuard no_grad;
      for (std::size_t i = 0; i < plain->parameters().size(); ++i) {
        plain->parameters()[i].copy_(numbers(plain->parameters()[i].sizes(), static_cast<double>(i)));
        mlp->parameters()[i].copy_(plain->parameters()[i]);
      }
    }
    parallelize_module(mlp, mesh,
                       {{"tokens", RowwiseParallel({.output = Shard(1)})},
                        {"norm", SequenceParallel()},
                        {"up", ColwiseParallel()},
                        {"down", RowwiseParallel({.output = Shard(1)})}});
    const at::Tensor text = at::arange(15, at::kLong).remainder(7).view({3, 5});
    const at::Tensor x = distribute_tensor(text, mesh, {Replicate()});
    const at::Tensor embedded = mlp->tokens(x);
    EXPECT_EQ(placed(embedded), "S(1)");
    const at::Tensor normed = mlp->norm(embedded);
    EXPECT_EQ(placed(normed), "S(1)");
    const at::Tensor up = mlp->up(normed);
    EXPECT_EQ(placed(up), "S(2)");
    const at::Tensor y = mlp(x);
    EXPECT_EQ(placed(y), "S(1)");
    const at::Tensor expected = plain(text);
    EXPECT_TRUE(at::allclose(DTensor(y).full_tensor(), expected, 1e-12, 1e-12));
    y.pow(2).sum().backward();
    expected.pow(2).sum().backward();
    for (const auto& item : mlp->named_parameters()) {
      const at::Tensor want = plain->named_parameters()[item.key()].grad();
      EXPECT_TRUE(at::allclose(DTensor(item.value().grad()).full_tensor(), want, 1e-10, 1e-12)) << item.key();
    }
  });
}

TEST(ParallelizeModule, AnInputThatIsSharedMovesOnce) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"tp"});
    torch::nn::Sequential net(torch::nn::Linear(6, 4), torch::nn::Linear(6, 4), torch::nn::Linear(6, 4));
    parallelize_module(net, mesh, {{"*", ColwiseParallel()}});
    const at::Tensor x = distribute_tensor(numbers({2, 4, 6}).to(at::kFloat), mesh, {Shard(1)}).requires_grad_();
    for (const bool grad : {true, false}) {
      const torch::AutoGradMode mode(grad);
      const CommRecorder recorder;
      at::Tensor sum;
      for (const auto& linear : *net) {
        const at::Tensor y = linear.ptr<torch::nn::LinearImpl>()->forward(x);
        sum = sum.defined() ? sum + y : y;
      }
      ASSERT_EQ(recorder.events().size(), 1) << recorder.to_string();
      EXPECT_EQ(recorder.events()[0].collective, "all-gather");
      if (!grad) continue;
      sum.sum().backward();
      std::int64_t scatters = 0;
      for (const CommEvent& event : recorder.events()) scatters += event.collective == "reduce-scatter";
      EXPECT_EQ(scatters, 1) << recorder.to_string();
    }
  });
}

TEST(ParallelizeModule, SaysWhatIsWrong) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"tp"});
    Mlp mlp;
    EXPECT_EQ(error_of([&] {
                parallelize_module(mlp, mesh, {{"upp", ColwiseParallel()}});
              }),
              "[parallelize_module] a name in the plan that fits no module; got \"upp\"; expected a module's name; the "
              "nearest are \"up\", \"norm\", \"down\"");
    EXPECT_EQ(error_of([&] {
                parallelize_module(mlp, mesh, {{"norm", ColwiseParallel()}});
              }),
              "[parallelize_module] ColwiseParallel of a module that is neither; got \"norm\", a "
              "torch::nn::LayerNormImpl; expected a Linear or an Embedding; try distribute_module, with the placements "
              "of its parameters");
    EXPECT_EQ(error_of([&] {
                parallelize_module(mlp, mesh, {{"up", ColwiseParallel({.blocks = 2})}});
              }),
              "[parallelize_module] a dim that does not consist of so many blocks; got 2 blocks of \"up.weight\", "
              "f64[9,6], dim 0; expected a divisor of 9");
    EXPECT_FALSE(is_dtensor(mlp->up->weight)) << "nothing was changed";
  });
  run_ranks(4, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2, 2}, {"dp", "tp"});
    Mlp mlp;
    EXPECT_EQ(error_of([&] {
                parallelize_module(mlp, mesh, {{"up", ColwiseParallel()}});
              }),
              "[parallelize_module] a mesh of several dims; got 2x2(dp,tp); expected one dim; try mesh[\"tp\"]");
  });
}

// Cross-entropy on logits that are cut over the classes.
TEST(LossParallel, EqualsThePlainLoss) {
  namespace F = torch::nn::functional;
  const std::int64_t classes = 7;
  const at::Tensor logits = numbers({6, classes}), weight = numbers({classes}, 0.7).abs() + 0.1;
  const at::Tensor target = at::arange(6, at::kLong).mul(3).remainder(classes);
  run_ranks(3, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3}, {"tp"});
    const auto check = [&](const F::CrossEntropyFuncOptions& options, const F::CrossEntropyFuncOptions& ours,
                           const std::string& what) {
      at::Tensor plain = logits.clone().requires_grad_();
      const at::Tensor expected = F::cross_entropy(plain, target, options);
      expected.sum().backward();
      at::Tensor mine = distribute_tensor(logits, mesh, {Shard(1)}).requires_grad_();
      const at::Tensor loss = F::cross_entropy(mine, distribute_tensor(target, mesh, {Replicate()}), ours);
      EXPECT_TRUE(at::allclose(DTensor(loss).full_tensor(), expected, 1e-12, 1e-12)) << what;
      loss.sum().backward();
      EXPECT_EQ(placed(mine.grad()), "S(1)");
      EXPECT_TRUE(at::allclose(DTensor(mine.grad()).full_tensor(), plain.grad(), 1e-12, 1e-12)) << what;
    };
    const at::Tensor weights = distribute_tensor(weight, mesh, {Replicate()});
    using Options = F::CrossEntropyFuncOptions;
    check(Options(), Options(), "mean");
    check(Options().reduction(torch::kSum), Options().reduction(torch::kSum), "sum");
    check(Options().reduction(torch::kNone), Options().reduction(torch::kNone), "none");
    check(Options().ignore_index(3), Options().ignore_index(3), "ignore_index");
    check(Options().weight(weight), Options().weight(weights), "weight");
    check(Options().label_smoothing(0.1), Options().label_smoothing(0.1), "label_smoothing");
    check(Options().weight(weight).ignore_index(3).label_smoothing(0.2),
          Options().weight(weights).ignore_index(3).label_smoothing(0.2), "all");
  });
}

}  // namespace
}  // namespace dtensor::testing
