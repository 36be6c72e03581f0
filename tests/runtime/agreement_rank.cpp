// One rank of the programs in disagreements.h, as a process. Each runs on a mesh with another order of the ranks, and
// so on groups of its own: an error poisons no other program's.
#include <algorithm>
#include <cstdio>

#include "tests/runtime/disagreements.h"

namespace {

using namespace dtensor;
using namespace dtensor::testing;

std::string in_one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

}  // namespace

int main(int argc, char** argv) {
  World world = World::from_env({.timeout = std::chrono::seconds(60)});
  if (argc > 1 && std::string(argv[1]) == "train-apart") {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {world.size()}, {"x"});
    auto model = replicated_model(mesh);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    step(model, optimizer, numbers({5, 4}, world.rank() == 0 ? 1 : 2));
    return 0;
  }
  std::vector<std::int64_t> order;
  for (std::int64_t rank = 0; rank < world.size(); ++rank) order.push_back(rank);
  std::next_permutation(order.begin(), order.end());  // the first is the order of the world's own group
  for (const bool harmless : {false, true}) {
    for (const RankProgram& program : harmless ? harmless_differences() : disagreements()) {
      // After an error the order of this group's calls is lost: a fresh group for each.
      const DeviceMesh mesh =
          init_device_mesh(world, at::kCPU, Mesh::from_ranks({world.size()}, order, {program.name}));
      const std::string error = error_of([&] { program.run(world, mesh, world.rank() == world.size() - 1); });
      std::printf("rank %d %s%s: %s\n", static_cast<int>(world.rank()), program.name.c_str(),
                  harmless ? " (harmless)" : "", in_one_line(error).c_str());
      std::fflush(stdout);
      manual_seed(world, 1);
      world.group()->barrier()->wait();
      std::next_permutation(order.begin(), order.end());
    }
  }
  world.leave("done: what was written differs on purpose");
}
