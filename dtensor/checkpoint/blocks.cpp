#include "dtensor/checkpoint/blocks.h"

#include <algorithm>

#include "dtensor/core/checked.h"

namespace dtensor {
namespace {

using CopyDims = InlineVec<Copy::Dim, 4>;

// How far the last element of these dims is from the first one.
std::int64_t last_offset(const CopyDims& dims, std::size_t first) {
  std::int64_t last = 0;
  for (std::size_t d = first; d < dims.size(); ++d) last += (dims[d].size - 1) * dims[d].from;
  return last;
}

// The smallest i >= 0 with i * stride >= offset.
std::int64_t first_index(std::int64_t offset, std::int64_t stride) {
  return offset <= 0 ? 0 : ceil_div(offset, stride);
}

// Pre: dims from `first` on are sorted by their source strides, largest first.
void clip(std::int64_t from, std::int64_t to, const CopyDims& dims, std::size_t first, Interval range, Copies& copies) {
  const std::int64_t last = last_offset(dims, first);
  if (from >= range.end || from + last < range.begin) return;
  const auto add = [&](std::int64_t index, std::int64_t size) {
    Copy part{from, to, {}};
    for (std::size_t d = first; d < dims.size(); ++d) {
      Copy::Dim dim = dims[d];
      if (d == first) {
        part.from += index * dim.from;
        part.to += index * dim.to;
        dim.size = size;
      }
      if (dim.size > 1) part.dims.push_back(dim);
    }
    // The largest steps of the target first, as everywhere.
    std::stable_sort(part.dims.begin(), part.dims.end(),
                     [](const Copy::Dim& a, const Copy::Dim& b) { return a.to > b.to; });
    copies.push_back(std::move(part));
  };
  if (from >= range.begin && from + last < range.end) {
    add(0, first < dims.size() ? dims[first].size : 1);
    return;
  }
  // Index i of the first dim covers [from + i * stride, from + i * stride + inner].
  const Copy::Dim& outer = dims[first];
  const std::int64_t inner = last_offset(dims, first + 1);
  const std::int64_t begin = first_index(range.begin - inner - from, outer.from);
  const std::int64_t end = std::min(outer.size, first_index(range.end - from, outer.from));
  const std::int64_t inside = std::clamp(first_index(range.begin - from, outer.from), begin, std::max(begin, end));
  const std::int64_t outside =
      std::clamp(first_index(range.end - inner - from, outer.from), inside, std::max(inside, end));
  for (std::int64_t i = begin; i < inside; ++i) {
    clip(from + i * outer.from, to + i * outer.to, dims, first + 1, range, copies);
  }
  if (inside < outside) add(inside, outside - inside);
  for (std::int64_t i = outside; i < end; ++i) {
    clip(from + i * outer.from, to + i * outer.to, dims, first + 1, range, copies);
  }
}

}  // namespace

bool is_block_size(std::int64_t bytes) {
  return bytes >= kLeastBlockBytes && bytes <= kMaxBlockBytes && bytes % kLeastBlockBytes == 0;
}

std::int64_t num_blocks(std::int64_t bytes, std::int64_t block_bytes) { return ceil_div(bytes, block_bytes); }

Interval source_span(const Copy& copy) { return {copy.from, copy.from + last_offset(copy.dims, 0) + 1}; }

void clip_copy(const Copy& copy, Interval range, Copies& copies) {
  if (range.empty()) return;
  CopyDims dims = copy.dims;
  std::stable_sort(dims.begin(), dims.end(), [](const Copy::Dim& a, const Copy::Dim& b) { return a.from > b.from; });
  clip(copy.from, copy.to, dims, 0, range, copies);
}

}  // namespace dtensor
