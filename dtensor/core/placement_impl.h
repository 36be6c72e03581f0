#pragma once

#include "dtensor/core/placement.h"
#include "dtensor/core/text.h"

namespace dtensor {

// A placement as it stands in a spec's text: `S(0.1)[2]` is factor 1 of dim 0, third in the order of its cuts.
struct PlacementText {
  Placement placement = Replicate();
  std::optional<std::int64_t> factor;
  std::optional<std::int64_t> position;
};

PlacementText parse_placement(Scanner& in);

}  // namespace dtensor
