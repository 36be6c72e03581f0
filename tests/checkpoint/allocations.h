#pragma once

#include <cstddef>

namespace dtensor::testing {

// The largest allocation of this program since the last reset.
std::size_t largest_allocation();
void reset_largest_allocation();

}  // namespace dtensor::testing
