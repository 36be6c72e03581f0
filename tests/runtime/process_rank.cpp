// One rank of a training run, however it was started: prints its losses, to the last digit.
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>

#include "dtensor/comm/world.h"
#include "dtensor/runtime/module.h"
#include "dtensor/runtime/tensor.h"
#include "tests/runtime/process_training.h"

int main() {
  // NCCL allows ranks to share a GPU when they seem to be on different hosts.
  if (const char* rank = std::getenv("RANK")) {
    setenv("NCCL_HOSTID", (std::string("rank") + rank).c_str(), /*overwrite=*/0);
    setenv("NCCL_SOCKET_IFNAME", "lo", /*overwrite=*/0);
  }
  dtensor::World world = dtensor::World::from_env();
  std::string line = "rank " + std::to_string(world.rank()) + " on " + world.backend() + ":";
  for (const double loss : dtensor::testing::losses_of(world)) {
    char text[32];
    std::snprintf(text, sizeof text, " %.17g", loss);
    line += text;
  }
  std::printf("%s\n", line.c_str());
}
