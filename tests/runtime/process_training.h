#pragma once

#include <torch/torch.h>

#include <vector>

#include "dtensor/comm/world.h"
#include "dtensor/runtime/module.h"
#include "dtensor/runtime/tensor.h"

namespace dtensor::testing {

// The losses of a small network, its first layer cut by columns, its second by rows, its input by the batch; with
// redistributions of every kind on the way.
inline std::vector<double> losses_of(World& world) {
  const std::int64_t n = world.size();
  const at::DeviceType device = world.backend() == "nccl" ? at::kCUDA : at::kCPU;
  const DeviceMesh mesh = init_device_mesh(world, device, n % 2 == 0 ? Dims{2, n / 2} : Dims{1, n}, {"dp", "tp"});
  torch::nn::Sequential net(torch::nn::Linear(6, 10), torch::nn::Tanh(), torch::nn::Linear(10, 3));
  net->to(device, at::kDouble);
  for (at::Tensor& p : net->parameters()) {
    const torch::NoGradGuard no_grad;
    p.copy_(torch::arange(1.0, static_cast<double>(p.numel() + 1), at::kDouble).sin().view(p.sizes()));
  }
  distribute_module(net, mesh, [](const std::string& name, const at::Tensor&) -> Placements {
    if (name == "0.weight" || name == "0.bias") return {Replicate(), Shard(0)};
    if (name == "2.weight") return {Shard(0), Shard(1)};
    return {Replicate(), Replicate()};
  });
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.02));
  const at::Tensor inputs = torch::arange(42.0, at::kDouble).mul(0.7).sin().view({7, 6}).to(device);
  const at::Tensor x = distribute_tensor(inputs, mesh, {Shard(0), Replicate()}, {.source = 0});
  std::vector<double> losses;
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    const at::Tensor y = net->forward(x);
    const at::Tensor turned = DTensor(y).redistribute({Shard(1), Shard(0)}).redistribute({Shard(0), Replicate()});
    const at::Tensor loss = (turned - 0.5).pow(2).mean();
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

}  // namespace dtensor::testing
