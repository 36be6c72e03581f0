#pragma once

// Random values as they were computed -> elements of a tensor's type.

#include <cstdint>

#include "dtensor/core/tensor_meta.h"

namespace dtensor {

enum class RandomValue : std::uint8_t {
  kFloat,      // rounded to nearest
  kFloatDown,  // rounded down: a uniform value stays below its end
  kDouble,
  kByte,  // 0 or 1
  kInt,
};

// Does a value already have the bytes of an element?
bool is_stored_as_is(RandomValue value, DType dtype);
// values[from … from+count) as elements, to `out`. Values that an integer type does not have: the nearest it has.
void store_random(RandomValue value, const void* values, std::int64_t from, std::int64_t count, DType dtype, void* out);
// The nearest number that the (floating) type has.
double rounded_to(DType dtype, double value);

}  // namespace dtensor
