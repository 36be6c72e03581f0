// Modules that know nothing of distribution, trained on every mesh: the losses are those of a single device.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>

#include "dtensor/comm/world.h"
#include "dtensor/core/error.h"
#include "dtensor/runtime/buckets.h"
#include "dtensor/runtime/module.h"
#include "dtensor/runtime/record.h"
#include "dtensor/runtime/tensor.h"

namespace dtensor {
namespace {

at::Tensor numbers(at::IntArrayRef sizes, std::int64_t seed) {
  std::int64_t n = 1;
  for (const std::int64_t size : sizes) n *= size;
  return at::arange(n, at::kDouble).mul(0.61).add(static_cast<double>(seed)).sin().mul(0.5).view(sizes);
}

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(std::int64_t width) {
    linear = register_module("linear", torch::nn::Linear(width, width));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
  }
  at::Tensor forward(const at::Tensor& x) { return torch::gelu(linear(norm(x))) + x; }
  torch::nn::Linear linear{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Block);

// Raw parameters, a buffer, nested submodules, one of them used twice, a parameter registered twice.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    const std::int64_t width = 6;
    scale = register_parameter("scale", at::ones({width}, at::kDouble));
    tied = register_parameter("tied", scale);
    shift = register_buffer("shift", at::zeros({width}, at::kDouble));
    block = register_module("block", Block(width));
    blocks = register_module("blocks", torch::nn::Sequential(Block(width), torch::nn::Tanh()));
    head = register_module("head", torch::nn::Linear(width, 3));
    to(at::kDouble);
    std::int64_t seed = 1;
    torch::NoGradGuard no_grad;
    for (at::Tensor& p : parameters()) p.copy_(numbers(p.sizes(), seed++));
    shift.copy_(numbers(shift.sizes(), seed));
  }
  at::Tensor forward(at::Tensor x) {
    x = block(x * scale + shift);
    x = block(blocks->forward(x)) * tied;
    return head(x);
  }
  at::Tensor scale, tied, shift;
  Block block{nullptr};
  torch::nn::Sequential blocks{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Net);

template <class Step>
std::vector<double> train(Net& net, const at::Tensor& x, const at::Tensor& y, const std::string& optimizer, Step each) {
  std::unique_ptr<torch::optim::Optimizer> steps;
  if (optimizer == "SGD") {
    steps = std::make_unique<torch::optim::SGD>(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  } else {
    steps = std::make_unique<torch::optim::AdamW>(net->parameters(), torch::optim::AdamWOptions(0.01));
  }
  std::vector<double> losses;
  for (int i = 0; i < 20; ++i) {
    steps->zero_grad();
    const at::Tensor loss = torch::mse_loss(net(x), y);
    loss.backward();
    each();
    steps->step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

struct Run {
  Dims mesh;
  std::string parameters;  // placements on the last mesh dim, where the shape allows them
  std::string optimizer;
};

void PrintTo(const Run& run, std::ostream* out) { *out << run.parameters << ' ' << run.optimizer; }

class Training : public ::testing::TestWithParam<Run> {};

TEST_P(Training, LossesAreThoseOfOneDevice) {
  const auto& [shape, placement, optimizer] = GetParam();
  const at::Tensor x = numbers({7, 4, 6}, 50), y = numbers({7, 4, 3}, 51);
  Net plain;
  const std::vector<double> expected = train(plain, x, y, optimizer, [] {});
  EXPECT_LT(expected.back(), expected.front());
  const Mesh mesh = Mesh::make(shape);
  run_ranks(mesh.size(), [&](World& world) {
    const DeviceMesh ranks = init_device_mesh(world, at::kCPU, mesh);
    Net net;
    distribute_module(net, ranks, [&](const std::string&, const at::Tensor& p) {
      Placements placements(shape.size(), Replicate());
      const Placement wanted = parse_placements(placement)[0];
      if (wanted.is_shard() && wanted.dim() < p.dim()) placements.back() = wanted;
      return placements;
    });
    ASSERT_TRUE(is_dtensor(net->scale) && is_dtensor(net->shift) && is_dtensor(net->block->linear->weight));
    Placements batch(shape.size(), Replicate());
    batch[0] = Shard(0);
    const DTensor input = distribute_tensor(x, ranks, batch), target = distribute_tensor(y, ranks, batch);
    const std::vector<double> losses = train(net, input, target, optimizer, [&] {
      for (const auto& p : net->named_parameters()) {
        ASSERT_EQ(DTensor(p.value().grad()).spec(), DTensor(p.value()).spec()) << p.key();
      }
    });
    for (std::size_t i = 0; i < losses.size(); ++i) {
      ASSERT_NEAR(losses[i], expected[i], 1e-12 * std::abs(expected[i])) << "step " << i;
    }
  });
}

std::vector<Run> runs() {
  std::vector<Run> result;
  for (const Dims& mesh : {Dims{1}, Dims{2}, Dims{3}, Dims{4}, Dims{2, 2}, Dims{3, 2}, Dims{2, 2, 2}}) {
    for (const char* placement : {"R", "S(0)", "S(1)"}) {
      for (const char* optimizer : {"SGD", "AdamW"}) result.push_back({mesh, placement, optimizer});
    }
  }
  return result;
}

std::string run_name(const ::testing::TestParamInfo<Run>& info) {
  std::string name;
  for (const std::int64_t size : info.param.mesh) name += (name.empty() ? "" : "x") + std::to_string(size);
  const char c = info.param.parameters.size() > 1 ? info.param.parameters[2] : 'R';
  return name + "_" + (c == 'R' ? std::string("R") : "S" + std::string(1, c)) + "_" + info.param.optimizer;
}

INSTANTIATE_TEST_SUITE_P(Meshes, Training, ::testing::ValuesIn(runs()), run_name);

// Two matrices of over a megabyte; the gradient of the linear layer's is a transpose, the other's lies in order.
struct LargeImpl : torch::nn::Module {
  LargeImpl() {
    matrix = register_parameter("matrix", numbers({400, 400}, 1).clone());
    linear = register_module("linear", torch::nn::Linear(400, 400));
    linear->to(at::kDouble);
    const torch::NoGradGuard no_grad;
    linear->weight.copy_(numbers({400, 400}, 2));
    linear->bias.copy_(numbers({400}, 4));
  }
  at::Tensor forward(const at::Tensor& x) { return linear(x).pow(2).sum() + x.mm(matrix).pow(2).sum(); }
  at::Tensor matrix;
  torch::nn::Linear linear = nullptr;
};
TORCH_MODULE(Large);

TEST(Buckets, LargeGradientsAreReducedByThemselves) {
  const at::Tensor x = numbers({7, 400}, 3);
  Large plain;
  for (int pass = 0; pass < 2; ++pass) plain->forward(x).backward();
  run_ranks(3, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3}, {"x"});
    Large net;
    distribute_module(net, mesh);
    // Who keeps a gradient as it came keeps what it was.
    at::Tensor kept, as_it_was;
    net->matrix.register_hook([&](const at::Tensor& gradient) {
      kept = DTensor(gradient).to_local();
      as_it_was = kept.clone();
    });
    const DTensor input = distribute_tensor(x, mesh, {Shard(0)});
    for (int pass = 0; pass < 2; ++pass) {
      const at::Tensor loss = net->forward(input);
      CommRecorder recorder;
      loss.backward();
      for (const auto& p : net->named_parameters()) static_cast<void>(DTensor(p.value().grad()).to_local());
      const auto events = recorder.events();
      const auto large = std::count_if(events.begin(), events.end(),
                                       [](const CommEvent& e) { return e.op == "gradient" && e.bytes > 1'000'000; });
      EXPECT_EQ(large, 2) << recorder.to_string();
      EXPECT_EQ(events.size(), 3) << recorder.to_string();  // and the bias
      EXPECT_TRUE(at::equal(kept, as_it_was));
    }
    for (const auto& p : plain->named_parameters()) {
      const at::Tensor ours = DTensor(net->named_parameters()[p.key()].grad()).full_tensor();
      EXPECT_TRUE(at::allclose(ours, p.value().grad(), 1e-12, 1e-12)) << p.key();
    }
  });
}

// Of parameters that lie by columns, alone in a bucket or with others.
TEST(Buckets, GradientsLieAsTheirParametersDo) {
  const at::Tensor x = numbers({7, 400}, 3);
  const std::vector<at::Tensor> plain = {numbers({400, 400}, 1), numbers({5, 400}, 2), numbers({5}, 2)};
  const auto loss = [](const std::vector<at::Tensor>& p, const at::Tensor& input) {
    return (input.mm(p[0]).mm(p[1]) + p[2]).pow(2).sum();
  };
  const auto leaves = [](const std::vector<at::Tensor>& from) {
    std::vector<at::Tensor> result;
    for (const at::Tensor& one : from)
      result.push_back((one.dim() == 2 ? one.t().clone() : one.clone()).requires_grad_());
    return result;
  };
  const std::vector<at::Tensor> expected = leaves(plain);
  for (int pass = 0; pass < 2; ++pass) loss(expected, x).backward();
  run_ranks(3, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3}, {"x"});
    std::vector<at::Tensor> whole;
    for (const at::Tensor& one : plain) whole.push_back(distribute_tensor(one, mesh, {Replicate()}));
    const std::vector<at::Tensor> mine = leaves(whole);
    make_buckets(mine, 32 << 20);
    for (int pass = 0; pass < 2; ++pass) {
      loss(mine, distribute_tensor(x, mesh, {Shard(0)})).backward();
      for (const at::Tensor& p : mine) {
        EXPECT_EQ(p.grad().strides(), p.strides());
        EXPECT_EQ(DTensor(p.grad()).to_local().strides(), p.strides());
        EXPECT_EQ(p.grad().t().view({-1}).dim(), 1);
      }
    }
    for (std::size_t i = 0; i < mine.size(); ++i) {
      EXPECT_TRUE(at::allclose(DTensor(mine[i].grad()).full_tensor(), expected[i].grad(), 1e-9, 1e-9)) << i;
    }
  });
}

// A gradient that somebody keeps stays what it was, however often and in whatever way the graph is gone through.
TEST(Buckets, KeptAndMissingGradients) {
  const at::Tensor x = numbers({7, 400}, 3);
  // After each: the gradients, and one that was kept.
  const auto run = [](Large& net, const at::Tensor& input, const auto& see) {
    const at::Tensor loss = net->forward(input);
    loss.backward({}, /*retain_graph=*/true);
    see(net);
    loss.backward();
    see(net);
    net->zero_grad();
    at::Tensor kept;
    net->matrix.register_hook([&](const at::Tensor& gradient) { kept = gradient; });
    net->linear(input).pow(2).sum().backward();  // without the matrix
    see(net);
    input.mm(net->matrix).pow(2).sum().backward();  // without the layer
    see(net);
    const at::Tensor once = kept.clone();
    net->forward(input).backward({}, true, /*create_graph=*/true);
    see(net);
    const auto norms = net->matrix.grad().pow(2).sum() + net->linear->weight.grad().pow(2).sum();
    net->zero_grad(/*set_to_none=*/true);
    norms.backward();
    see(net);
    net->zero_grad();
    net->matrix.mul(2).add(net->linear->weight.mul(2)).backward(once);  // one gradient, two leaves
    see(net);
  };
  std::vector<at::Tensor> expected;
  const auto whole = [](const at::Tensor& g) { return is_dtensor(g) ? DTensor(g.detach()).full_tensor() : g.detach(); };
  Large plain;
  run(plain, x, [&](Large& net) {
    for (const at::Tensor& p : net->parameters()) {
      expected.push_back(p.grad().defined() ? p.grad().detach().clone() : at::Tensor());
    }
  });
  run_ranks(2, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    Large net;
    distribute_module(net, mesh);
    std::size_t next = 0;
    run(net, distribute_tensor(x, mesh, {Shard(0)}), [&](Large& now) {
      for (const at::Tensor& p : now->parameters()) {
        const at::Tensor& want = expected[next++];
        ASSERT_EQ(p.grad().defined(), want.defined()) << next;
        if (want.defined()) {
          EXPECT_TRUE(at::allclose(whole(p.grad()), want, 1e-10, 1e-10)) << next;
        }
      }
    });
  });
}

// It asks its input for its type.
TEST(DistributeModule, SequentialTakesADTensor) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    torch::nn::Sequential net(torch::nn::Linear(4, 3), torch::nn::Tanh());
    distribute_module(net, mesh, {}, {.source = 0});
    DTensor x = distribute_tensor(at::ones({5, 4}), mesh, {Shard(0)});
    const DTensor constant = x;
    const at::Tensor y = net->forward(static_cast<const at::Tensor&>(x));
    for (const at::Tensor& again : {net->forward(x), net->forward(constant), net->forward(DTensor(x))}) {
      EXPECT_TRUE(at::equal(DTensor(again).full_tensor(), DTensor(y).full_tensor()));
    }
    torch::nn::AnyModule any{torch::nn::Tanh()};
    EXPECT_EQ(any.forward(x).sizes(), x.sizes());
  });
}

TEST(DistributeModule, TakesTheValuesOfOneRank) {
  run_ranks(3, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3}, {"x"});
    torch::nn::Linear linear(4, 5);
    torch::NoGradGuard no_grad;
    linear->weight.fill_(static_cast<double>(world.rank() + 1));
    distribute_module(linear, mesh, [](const std::string&, const at::Tensor&) { return Placements{Shard(0)}; },
                      {.source = 1});
    EXPECT_TRUE(at::equal(DTensor(linear->weight).full_tensor(), at::full({5, 4}, 2.0)));
  });
}

}  // namespace
}  // namespace dtensor
