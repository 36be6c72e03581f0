#pragma once

#include <cstdint>
#include <span>

#include "dtensor/core/inline_vec.h"

namespace dtensor {

// Steps a coordinate through all values of the chosen dims, the last one fastest; false, and back at the start, after
// the last.
inline bool next_coordinate(Dims& coordinate, const Dims& shape, std::span<const std::int64_t> dims) {
  for (std::size_t i = dims.size(); i-- > 0;) {
    const auto d = static_cast<std::size_t>(dims[i]);
    if (++coordinate[d] < shape[d]) return true;
    coordinate[d] = 0;
  }
  return false;
}

}  // namespace dtensor
