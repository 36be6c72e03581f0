// One process of the ordinary programs: no seed, so every process starts from another one.
#include <cstdio>

#include "tests/parallel/ordinary_programs.h"

int main() {
  dtensor::World world = dtensor::World::from_env();
  const std::string failed = dtensor::testing::run_ordinary_programs(world);
  std::printf("rank %d on %s: %s\n", static_cast<int>(world.rank()), world.backend().c_str(),
              failed.empty() ? "all right" : failed.c_str());
  return failed.empty() ? 0 : 1;
}
