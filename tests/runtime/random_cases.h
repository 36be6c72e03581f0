#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "dtensor/comm/world.h"
#include "dtensor/core/placement.h"

namespace dtensor::testing {

// Every random operator once, on a tensor of this shape laid out so. What it gives must be the same numbers wherever it
// runs.
struct RandomCase {
  std::string name;
  std::function<std::vector<at::Tensor>(World&, const DeviceMesh&, const Placements&, const Dims& shape)> run;
};
const std::vector<RandomCase>& random_cases();

// Runs the cases on this mesh and compares what this rank holds, byte for byte, with its part of what one rank alone
// draws. A text that says what differs; empty when nothing does. Only cases whose name starts with `only`, if given.
std::string check_random_cases(World& world, const DeviceMesh& mesh, const Placements& placements, const Dims& shape,
                               const std::string& only = {});

// Every placement of Replicate and Shard(0 … ndim-1) on the mesh dims.
std::vector<Placements> sharded_placements(std::int64_t mesh_ndim, std::int64_t tensor_ndim);
// Every mesh of `ranks` ranks with up to `max_dims` dims, none of size 1 but the mesh of one rank.
std::vector<Dims> mesh_shapes_of(std::int64_t ranks, std::int64_t max_dims);

}  // namespace dtensor::testing
