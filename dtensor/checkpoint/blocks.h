#pragma once

#include <cstdint>

#include "dtensor/core/packing.h"

namespace dtensor {

// The data of an entry is checked in blocks of equal size, counted from the entry's first byte; the last one may be
// shorter. A reader takes any size between these, a multiple of 16, so that no element lies in two blocks.
inline constexpr std::int64_t kBlockBytes = 256 << 10;  // as we write them: a block stays in the cache while it is used
inline constexpr std::int64_t kLeastBlockBytes = 16;
inline constexpr std::int64_t kMaxBlockBytes = 1 << 20;

// Can a file have blocks of this size?
bool is_block_size(std::int64_t bytes);
std::int64_t num_blocks(std::int64_t bytes, std::int64_t block_bytes);

// From the first source element of a copy to its last. Strides are positive.
Interval source_span(const Copy& copy);

// Adds the copies that together copy those elements of `copy` whose source is in `range`. Their number grows with the
// dims of the copy, not with its elements.
void clip_copy(const Copy& copy, Interval range, Copies& copies);

}  // namespace dtensor
