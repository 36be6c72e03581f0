#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <dtensor/dtensor.h>

#include <iostream>

int main() {
  using namespace dtensor;
  // Four threads of this process are the ranks. With World::from_env() the same body runs under dtensor run, torchrun
  // and mpirun.
  run_ranks(4, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2, 2}, {"dp", "tp"});
    const at::Tensor value = at::full({1}, static_cast<double>(world.rank()), at::kFloat);
    world.group(mesh, "tp")->all_reduce(value, ReduceOp::kSum)->wait();
    world.group(mesh, "dp")->all_reduce(value, ReduceOp::kMax)->wait();
    if (world.rank() == 0) std::cout << "the larger of the two rows' sums is " << value.item<float>() << "\n";
  });
}
