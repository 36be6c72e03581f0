// One rank, a process, that draws every random operator's values: compared with what one rank alone draws.
#include <cstdio>

#include "tests/runtime/random_cases.h"

int main() {
  dtensor::World world = dtensor::World::from_env();
  std::string complaints;
  for (const dtensor::Dims& shape : dtensor::testing::mesh_shapes_of(world.size(), 3)) {
    const dtensor::DeviceMesh mesh = dtensor::init_device_mesh(world, c10::kCPU, shape);
    for (const auto& placements : dtensor::testing::sharded_placements(mesh.ndim(), 2)) {
      complaints += dtensor::testing::check_random_cases(world, mesh, placements, {7, 5});
    }
  }
  std::printf("rank %d: %s\n", static_cast<int>(world.rank()), complaints.empty() ? "all alike" : complaints.c_str());
}
