// One rank that is a process. `save DIR`: one checkpoint at once, one behind. `load DIR`: in other layouts, compared.
// `loop DIR VICTIM MICROSECONDS`: saves for ever, until this rank is killed so long after the first save.
#include <ATen/ops/arange.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "dtensor/checkpoint/checkpoint.h"
#include "dtensor/comm/world.h"
#include "dtensor/runtime/factories.h"
#include "dtensor/runtime/tensor.h"

namespace {

using namespace dtensor;

at::Tensor numbers(at::IntArrayRef sizes) {
  std::int64_t n = 1;
  for (const std::int64_t size : sizes) n *= size;
  return at::arange(n, at::kFloat).mul(0.37).sin().view(sizes);
}

NamedTensors tensors(const DeviceMesh& mesh) {
  return {{"rows", distribute_tensor(numbers({37, 11}), mesh, {Shard(0)})},
          {"columns", distribute_tensor(numbers({50, 40}), mesh, {Shard(1)})},
          {"same", distribute_tensor(numbers({17}), mesh, {Replicate()})},
          {"plain", numbers({3, 3})}};
}

bool load(const std::string& dir, const DeviceMesh& mesh) {
  const DTensor rows = zeros({37, 11}, mesh, {Shard(1)});
  const DTensor columns = zeros({50, 40}, mesh, {Shard(0)});
  const DTensor same = zeros({17}, mesh, {Shard(0)});
  const DTensor plain = zeros({3, 3}, mesh, {Replicate()});
  const LoadReport report =
      load_checkpoint(dir, {{"rows", rows}, {"columns", columns}, {"same", same}, {"plain", plain}});
  return report.bytes_read >= report.bytes_needed && rows.full_tensor().equal(numbers({37, 11})) &&
         columns.full_tensor().equal(numbers({50, 40})) && same.full_tensor().equal(numbers({17})) &&
         plain.full_tensor().equal(numbers({3, 3}));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  const std::string what = argv[1];
  const std::string dir = argv[2];
  World world = World::from_env();
  const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {world.size()}, {"x"});
  if (what == "load") {
    if (!load(dir, mesh)) return 1;
    std::printf("rank %ld of %ld has its parts\n", world.rank(), world.size());
    return 0;
  }
  const NamedTensors mine = tensors(mesh);
  save_checkpoint(dir, mine, {.keep = 2});
  if (what == "loop" && argc == 5 && world.rank() == std::atol(argv[3])) {
    std::thread([delay = std::chrono::microseconds(std::atol(argv[4]))] {
      std::this_thread::sleep_for(delay);
      ::kill(::getpid(), SIGKILL);
    }).detach();
  }
  do save_checkpoint_async(dir, mine, {.keep = 2}).wait();
  while (what == "loop");
}
