// One process of a world that its environment describes: world_rank EXPECTED_BACKEND [BACKEND_OF_A_MESH_DIM]
#include <ATen/ops/full.h>

#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>

#include "dtensor/comm/world.h"

namespace {

using namespace dtensor;

void require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

std::int64_t sum_over(Communicator& group, std::int64_t value) {
  const auto buffer = at::full({1}, static_cast<double>(value), at::kLong);
  group.all_reduce(buffer, ReduceOp::kSum)->wait();
  return buffer.item<std::int64_t>();
}

void check(const std::string& backend, const std::string& other) {
  auto world = World::from_env({.timeout = std::chrono::seconds(60)});
  const std::int64_t n = world.size(), me = world.rank();
  require(world.backend() == backend, "the backend is " + world.backend());
  require(sum_over(*world.group(), me) == n * (n - 1) / 2, "the sum over the world");

  MeshOptions options;
  if (!other.empty()) options["tp"] = {.backend = other};
  const auto mesh = init_device_mesh(world, at::kCPU, {1, n}, {"dp", "tp"}, options);
  require(sum_over(*world.group(mesh, "dp"), me) == me, "the sum over one rank");
  // Over the ranks of the world a group exists; without rank 0 it has to be made, in the other backend if there is one.
  if (n > 1) {
    const auto rest = Mesh::from_ranks({n - 1},
                                       [&] {
                                         std::vector<std::int64_t> ranks;
                                         for (std::int64_t r = n - 1; r > 0; --r) ranks.push_back(r);
                                         return ranks;
                                       }(),
                                       {"pp"});
    MeshOptions of_rest;
    if (!other.empty()) of_rest["pp"] = {.backend = other};
    const auto part = init_device_mesh(world, at::kCPU, rest, of_rest);
    require(part.contains_me() == (me != 0), "who is in the mesh");
    if (part.contains_me()) {
      const auto group = world.group(part, "pp");
      require(group->describe().starts_with(other.empty() ? backend : other), group->describe());
      require(sum_over(*group, me) == n * (n - 1) / 2, "the sum without rank 0");
    }
  }
  std::printf("rank %ld of %ld on %s is fine\n", me, n, world.backend().c_str());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    check(argc > 1 ? argv[1] : "", argc > 2 ? argv[2] : "");
  } catch (const std::exception& error) {
    std::printf("failed: %s\n", error.what());
    return 1;
  }
}
