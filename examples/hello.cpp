#include <dtensor/dtensor.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  using namespace dtensor;
  run_ranks(4, [](World& world) {  // four threads; World::from_env() for processes, MPI and GPUs
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2, 2}, {"dp", "tp"});
    const DTensor x = distribute_tensor(torch::arange(12.0).view({3, 4}), mesh, {Shard(0), Replicate()});
    const DTensor w = ones({4, 6}, mesh, {Replicate(), Shard(1)});
    const DTensor y = torch::mm(x, w) + 1;  // libtorch's own; nothing is sent
    const double sum = y.sum().item<double>();
    if (world.rank() == 3) std::cout << y << "\nsum " << sum << "\n";
  });
}
