#include <dtensor/dtensor.h>
#include <torch/torch.h>

#include <cstdio>

// Any torch::nn model, data parallel: the same program as threads, under `dtensor run`, torchrun or mpirun.
void train(dtensor::World& world) {
  using namespace dtensor;
  const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {world.size()}, {"dp"});
  manual_seed(world, 7);

  torch::nn::Sequential net(torch::nn::Linear(2, 32), torch::nn::Tanh(), torch::nn::Linear(32, 1));
  distribute_module(net, mesh);  // every parameter on every rank
  for (const auto& layer : net->children()) {
    if (auto* linear = layer->as<torch::nn::Linear>()) linear->reset_parameters();  // the same on any number of ranks
  }
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.02));

  for (int step = 0; step <= 200; ++step) {
    const at::Tensor x = rand({64, 2}, mesh, {Shard(0)}) * 4 - 2;  // each rank has its rows of the batch
    const at::Tensor y = (x.select(1, 0) * x.select(1, 1)).unsqueeze(1);
    optimizer.zero_grad();
    const at::Tensor loss = torch::mse_loss(net->forward(x), y);
    loss.backward();  // gradients are summed over the ranks, in one message, while the rest is computed
    optimizer.step();
    const double value = loss.item<double>();  // the mean over the whole batch, the same on every rank
    if (world.rank() == 0 && step % 100 == 0) std::printf("step %3d  loss %.3f\n", step, value);
  }
}

int main() {
  dtensor::World world = dtensor::World::from_env();
  if (world.size() > 1) {
    train(world);
  } else {
    dtensor::run_ranks(2, train);  // not started by anybody: two threads
  }
}
