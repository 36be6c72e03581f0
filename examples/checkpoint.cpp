#include <dtensor/checkpoint/folders.h>
#include <dtensor/dtensor.h>
#include <stdlib.h>
#include <torch/torch.h>

#include <cstdio>

// Trains on four ranks, saves, and goes on with three: the checkpoint knows nothing of meshes that cannot be others.
int main() {
  using namespace dtensor;
  char dir[] = "/tmp/dtensor-example-XXXXXX";
  if (mkdtemp(dir) == nullptr) return 1;

  // `steps` steps on a mesh of this shape, from the newest checkpoint if there is one.
  const auto train = [&](World& world, const Dims& shape, int steps) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, shape);
    manual_seed(world, 7);
    torch::nn::Sequential net(torch::nn::Linear(4, 8), torch::nn::Tanh(), torch::nn::Linear(8, 1));
    for (at::Tensor& p : net->parameters()) {
      const torch::NoGradGuard no_grad;
      p.copy_(torch::arange(1.0, p.numel() + 1).sin().view(p.sizes()));
    }
    distribute_module(*net, mesh, [&](const std::string&, const at::Tensor&) {
      Placements placements(static_cast<std::size_t>(mesh.ndim()), Replicate());
      placements.back() = Shard(0);
      return placements;
    });
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.05));

    std::int64_t step = 0;
    if (!names_in(dir).empty()) {
      const LoadReport report = load_checkpoint(dir, *net, optimizer);
      step = *report.step;
      if (world.rank() == 0) std::printf("went on from step %ld, read %ld bytes\n", step, report.bytes_read);
    }
    const Placements whole(static_cast<std::size_t>(mesh.ndim()), Replicate());
    const at::Tensor inputs = torch::arange(40.0).mul(0.7).sin().view({10, 4});
    const at::Tensor x = distribute_tensor(inputs, mesh, whole);
    const at::Tensor y = distribute_tensor(inputs.sum(1, true), mesh, whole);
    double loss = 0;
    for (const std::int64_t end = step + steps; step < end; ++step) {
      optimizer.zero_grad();
      const at::Tensor error = torch::mse_loss(net->forward(x), y);
      error.backward();
      optimizer.step();
      loss = error.item<double>();
    }
    if (world.rank() == 0) std::printf("step %ld on %ld ranks: loss %.4f\n", step, world.size(), loss);
    // Written behind: training could go on at once.
    PendingSave save =
        save_checkpoint_async(dir, *net, optimizer, {.step = step, .metadata = {{"by", "me"}}, .keep = 2});
    save.wait();
  };
  run_ranks(4, [&](World& world) { train(world, {2, 2}, 20); });
  run_ranks(3, [&](World& world) { train(world, {3}, 20); });
  remove_all(dir);
}
