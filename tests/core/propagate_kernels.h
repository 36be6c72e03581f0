#pragma once

#include "tests/core/propagate_play.h"

namespace dtensor::play_rules {

// Operators on plain arrays, as short as they can be written, by name. Indices and class ids are any numbers, taken
// modulo the size, so that every operand can be random.
const Kernels& kernels();

}  // namespace dtensor::play_rules
