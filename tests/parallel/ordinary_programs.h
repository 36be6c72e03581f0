#pragma once

// Programs as people write them: no seed, no source, no guard. Run by ranks that are threads and by processes.

#include <torch/torch.h>

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "dtensor/dtensor.h"

namespace dtensor::testing {

// Do plain tensors among distributed ones count as replicas without a guard? The GPT needs that.
inline constexpr bool kPlainTensorsCountAsReplicas = true;

struct Batch {
  at::Tensor x, target;
};

struct ConvNetImpl : torch::nn::Module {
  ConvNetImpl() {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 3).padding(1)));
    norm = register_module("norm", torch::nn::BatchNorm2d(4));
    head = register_module("head", torch::nn::Linear(4 * 3 * 3, 5));
  }
  at::Tensor loss(const Batch& batch) {
    const at::Tensor y = torch::max_pool2d(torch::relu(norm(conv(batch.x))), 2);
    return torch::cross_entropy_loss(head(y.flatten(1)), batch.target);
  }
  static Batch batch(std::int64_t step) {
    const at::Tensor x = torch::arange(4 * 2 * 6 * 6, at::kDouble).mul(0.3).add(static_cast<double>(step)).sin();
    return {x.view({4, 2, 6, 6}), torch::arange(4).add(step).remainder(5)};
  }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(ConvNet);

struct RecurrentImpl : torch::nn::Module {
  RecurrentImpl() {
    lstm = register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(3, 6).num_layers(2).batch_first(true)));
    head = register_module("head", torch::nn::Linear(6, 2));
  }
  at::Tensor loss(const Batch& batch) {
    const at::Tensor y = std::get<0>(lstm->forward(batch.x));
    return torch::mse_loss(head(y.select(1, -1)), batch.target);
  }
  static Batch batch(std::int64_t step) {
    const at::Tensor x = torch::arange(4 * 5 * 3, at::kDouble).mul(0.7).add(static_cast<double>(step)).sin();
    return {x.view({4, 5, 3}), torch::arange(8, at::kDouble).cos().view({4, 2})};
  }
  torch::nn::LSTM lstm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Recurrent);

// Makes its positions and its mask in every forward pass, and has one of each in a buffer, too.
struct TinyGptImpl : torch::nn::Module {
  static constexpr std::int64_t kTokens = 11, kWidth = 8, kHeads = 2, kLength = 6;
  TinyGptImpl() {
    tokens = register_module("tokens", torch::nn::Embedding(kTokens, kWidth));
    positions = register_module("positions", torch::nn::Embedding(kLength, kWidth));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    qkv = register_module("qkv", torch::nn::Linear(kWidth, 3 * kWidth));
    out = register_module("out", torch::nn::Linear(kWidth, kWidth));
    head = register_module("head", torch::nn::Linear(kWidth, kTokens));
    mask = register_buffer("mask", torch::tril(torch::ones({kLength, kLength})).view({1, 1, kLength, kLength}));
  }
  at::Tensor loss(const Batch& batch) {
    const std::int64_t n = batch.x.size(0);
    const at::Tensor h = tokens(batch.x) + positions(torch::arange(kLength));
    const auto heads = [&](const at::Tensor& t) { return t.view({n, kLength, kHeads, -1}).transpose(1, 2); };
    const auto parts = qkv(norm(h)).chunk(3, -1);
    at::Tensor scores = heads(parts[0]).matmul(heads(parts[1]).transpose(-2, -1)) / 2.0;
    scores = scores.masked_fill(torch::tril(torch::ones({kLength, kLength})) == 0, -1e9);
    scores = scores.masked_fill(mask == 0, -1e9);
    const at::Tensor attended = torch::softmax(scores, -1).matmul(heads(parts[2]));
    const at::Tensor y = h + out(attended.transpose(1, 2).reshape({n, kLength, kWidth}));
    return torch::cross_entropy_loss(head(y).view({-1, kTokens}), batch.target.view({-1}));
  }
  static Batch batch(std::int64_t step) {
    const at::Tensor all = torch::arange(4 * kLength).mul(3 + 2 * step).remainder(kTokens).view({4, kLength});
    return {all, all.roll({1}, {1})};
  }
  torch::nn::Embedding tokens{nullptr}, positions{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear qkv{nullptr}, out{nullptr}, head{nullptr};
  at::Tensor mask;
};
TORCH_MODULE(TinyGpt);

enum class Call { kDistributeModule, kParallelizeModule, kFullyShard };
inline const char* name_of(Call call) {
  return call == Call::kDistributeModule    ? "distribute_module"
         : call == Call::kParallelizeModule ? "parallelize_module"
                                            : "fully_shard";
}

// Trains a model that the call has distributed, and the same by libtorch alone, from the values that rank 0 had. Empty,
// or what is wrong.
template <class Net>
std::string run_program(World& world, Call call) {
  const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {world.size()}, {"dp"});
  Net net, plain;
  net->to(at::kDouble);
  plain->to(at::kDouble);
  std::vector<at::Tensor> first;
  for (const at::Tensor& p : net->parameters()) first.push_back(p.detach().clone());
  Placement cut = Shard(0);
  if (call == Call::kDistributeModule) distribute_module(net, mesh);
  if (call == Call::kFullyShard) fully_shard(net, mesh);
  if (call == Call::kParallelizeModule) {
    parallelize_module(net, mesh, {{"head", ColwiseParallel({.output = Replicate()})}});
    cut = Replicate();
  }
  std::vector<at::Tensor> parameters = net->parameters(), plain_parameters = plain->parameters();
  for (std::size_t i = 0; i < first.size(); ++i) {
    const at::NoGradGuard no_grad;
    const at::Tensor expected = distribute_tensor(first[i], mesh, {Replicate()}, {.source = 0}).to_local();
    plain_parameters[i].copy_(expected);
    if (!at::equal(DTensor(parameters[i]).full_tensor(), expected)) return "parameter " + std::to_string(i);
  }
  torch::optim::SGD optimizer(parameters, 0.1), plain_optimizer(plain_parameters, 0.1);
  std::vector<double> losses;
  for (std::int64_t step = 0; step < 4; ++step) {
    const Batch batch = Net::Impl::batch(step);
    plain_optimizer.zero_grad();
    const at::Tensor plain_loss = plain->loss(batch);
    plain_loss.backward();
    plain_optimizer.step();
    optimizer.zero_grad();
    std::optional<ImplicitReplication> guard;
    if (!kPlainTensorsCountAsReplicas) guard.emplace();
    const at::Tensor loss =
        net->loss({distribute_tensor(batch.x, mesh, {cut}), distribute_tensor(batch.target, mesh, {cut})});
    guard.reset();
    loss.backward();
    optimizer.step();
    losses.push_back(loss.template item<double>());
    const double expected = plain_loss.template item<double>();
    if (!(std::abs(losses.back() - expected) <= 1e-9 * std::abs(expected))) {
      return "loss " + std::to_string(losses.back()) + " in step " + std::to_string(step) + ", plain " +
             std::to_string(expected);
    }
  }
  // An error names what differs.
  const DistributeOptions equal{.equal_copies = true};
  distribute_tensor(torch::tensor(losses, at::kDouble), mesh, {Replicate()}, equal);
  for (const at::Tensor& p : parameters) {
    const DTensor value(p.detach());
    const at::Tensor full = value.full_tensor();
    distribute_tensor(full, mesh, {Replicate()}, equal);
    if (value.placements() == Placements{Replicate()}) distribute_tensor(value.to_local(), mesh, {Replicate()}, equal);
  }
  return "";
}

// All models under all calls; the ones that fail, with the reason.
inline std::string run_ordinary_programs(World& world) {
  std::string failed;
  for (const Call call : {Call::kDistributeModule, Call::kParallelizeModule, Call::kFullyShard}) {
    const auto note = [&](const char* model, const std::string& text) {
      if (!text.empty()) failed += std::string(model) + " under " + name_of(call) + ": " + text + "\n";
    };
    note("conv net", run_program<ConvNet>(world, call));
    note("LSTM", run_program<Recurrent>(world, call));
    note("GPT", run_program<TinyGpt>(world, call));
  }
  return failed;
}

}  // namespace dtensor::testing
