#include <dtensor/dtensor.h>
#include <torch/torch.h>

#include <cstdio>

// A function of plain tensors, run on every rank's own part: what no rule can say, the program says itself.
int main() {
  using namespace dtensor;
  run_ranks(3, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3}, {"dp"});
    const DTensor x = distribute_tensor(torch::arange(12.0).view({6, 2}), mesh, {Shard(0)});
    x.requires_grad_(true);
    // The largest row of each part; together the results are one tensor, cut by rows.
    const auto largest = [](const std::vector<at::Tensor>& parts) { return std::get<0>(parts[0].max(0, true)); };
    const DTensor rows = local_map(largest, {x}, {Shard(0)});
    rows.sum().backward();
    const at::Tensor values = rows.full_tensor().detach(), gradient = DTensor(x.grad()).full_tensor();
    if (world.rank() == 0) {
      std::printf("%s, its first column %g %g %g\n", rows.spec().to_string().c_str(), values[0][0].item<double>(),
                  values[1][0].item<double>(), values[2][0].item<double>());
      std::printf("the gradient reaches %g of %ld elements\n", gradient.sum().item<double>(), gradient.numel());
    }
  });
}
