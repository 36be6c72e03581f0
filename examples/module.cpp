#include <dtensor/dtensor.h>
#include <torch/torch.h>

#include <cstdio>

// A module that knows nothing of meshes, and libtorch's optimizer: tensor parallel over "tp", data parallel over "dp".
int main() {
  using namespace dtensor;
  run_ranks(4, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2, 2}, {"dp", "tp"});
    torch::nn::Sequential net(torch::nn::Linear(4, 8), torch::nn::Tanh(), torch::nn::Linear(8, 1));
    for (at::Tensor& p : net->parameters()) {  // fixed numbers, so that the losses are always these
      const torch::NoGradGuard no_grad;
      p.copy_(torch::arange(1.0, p.numel() + 1).sin().view(p.sizes()));
    }
    distribute_module(net, mesh, [](const std::string& name, const at::Tensor&) -> Placements {
      if (name == "0.weight" || name == "0.bias") return {Replicate(), Shard(0)};  // by columns
      if (name == "2.weight") return {Replicate(), Shard(1)};                      // by rows
      return {Replicate(), Replicate()};
    });
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.05));
    const at::Tensor inputs = torch::arange(40.0).mul(0.7).sin().view({10, 4});
    const at::Tensor x = distribute_tensor(inputs, mesh, {Shard(0), Replicate()});
    const at::Tensor y = distribute_tensor(inputs.sum(1, true), mesh, {Shard(0), Replicate()});
    for (int step = 0; step <= 40; ++step) {
      optimizer.zero_grad();
      const at::Tensor loss = torch::mse_loss(net->forward(x), y);
      loss.backward();
      optimizer.step();
      const double value = loss.item<double>();  // the same number on every rank
      if (world.rank() == 0 && step % 20 == 0) std::printf("step %2d  loss %.3f\n", step, value);
    }
  });
}
