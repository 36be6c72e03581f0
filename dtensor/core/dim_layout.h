#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "dtensor/core/checked.h"
#include "dtensor/core/error.h"
#include "dtensor/core/inline_vec.h"

namespace dtensor {

// [begin, end); empty when begin == end.
struct Interval {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const noexcept { return end - begin; }
  bool empty() const noexcept { return begin >= end; }
  friend bool operator==(const Interval&, const Interval&) = default;
};
using Intervals = InlineVec<Interval, 1>;

// The chunk rule, the one way anything is ever cut: with c = ceil(n/count), piece r of n elements is [c*r, c*(r+1)) cut
// off at n. Trailing pieces may be short or empty.
inline Interval chunk(Interval whole, std::int64_t count, std::int64_t index) {
  const std::int64_t c = ceil_div(whole.size(), count);
  std::int64_t begin = 0;
  if (__builtin_mul_overflow(c, index, &begin) || begin > whole.size()) begin = whole.size();
  const std::int64_t rest = whole.size() - begin;
  return {whole.begin + begin, whole.begin + begin + (rest < c ? rest : c)};
}

// One cut of a factor: by a mesh dim, or virtual, which nobody owns: every rank keeps all `count` pieces.
struct Cut {
  static constexpr std::int32_t kVirtual = -1;
  std::int32_t mesh_dim = kVirtual;
  std::int64_t count = 1;
  bool is_virtual() const noexcept { return mesh_dim == kVirtual; }
  friend bool operator==(const Cut&, const Cut&) = default;
};
using Cuts = InlineVec<Cut, 2>;

// `size` elements with an ordered list of cuts. Each cut applies the chunk rule to every piece that the cuts before it
// left, so the pieces form a tree: [10 : tp, fsdp] on 2x2 is 5|5, then 3|2 and 3|2.
struct Factor {
  std::int64_t size = 1;
  Cuts cuts;
  friend bool operator==(const Factor&, const Factor&) = default;
};

// One tensor dim as factors, major to minor; its size is their product. What a rank holds of the dim is the product
// over the factors of what it holds of each, in row-major order. See docs/layouts.md.
using DimLayout = InlineVec<Factor, 1>;

inline constexpr std::size_t kMaxFactors = 4;

std::int64_t size_of(const DimLayout& dim);
bool has_virtual(const Factor& factor);
// No cut but those by mesh dims of size 1.
bool is_whole(const Factor& factor);

// What the rank at a mesh coordinate holds of a factor: ascending, apart, none empty. One interval, or none, unless a
// virtual cut makes them several (then as many as there are).
Intervals intervals_of(const Factor& factor, const Dims& coordinate);
// Their total size and first element, by arithmetic alone.
struct Held {
  std::int64_t size = 0;
  std::int64_t first = 0;  // meaningless when size == 0
};
Held held_of(const Factor& factor, const Dims& coordinate);

// A factor of size major*minor as two. Its elements and who holds them stay what they are.
//   [6 : a]  on 3 ranks at 3*2 -> [3 : a][2]      every boundary of the pieces falls between rows
//   [6 : a, b] on 3x2 at 3*2   -> [3 : a][2 : b]  the first cuts leave one row each, the others cut inside it
OrReason<std::pair<Factor, Factor>> split(const Factor& factor, std::int64_t major, std::int64_t minor);

// The canonical form: no two neighbours that are one factor, no virtual cut that factors can say, no uncut factor of
// size 1 (unless alone), cuts by mesh dims of size 1 in the first factor, before the first cut by a later mesh dim.
// Post: same elements on every rank; coalesce is idempotent.
DimLayout coalesce(const DimLayout& dim);

// One tensor dim's cuts in the public words: mesh dim, its size, its split factor (1: plain), in mesh order.
struct PublicCut {
  std::int32_t mesh_dim = 0;
  std::int64_t count = 1;
  std::int64_t split_factor = 1;
  friend bool operator==(const PublicCut&, const PublicCut&) = default;
};
using PublicCuts = InlineVec<PublicCut, 4>;

// The order of cuts that strided shards stand for, where they stand for one: walking the mesh dims from the last to the
// first, each goes where the sizes before it multiply to its split factor.
std::optional<Cuts> decode_order(std::span<const PublicCut> cuts);
// The same the other way: the split factor of each cut of an order, in mesh order.
PublicCuts encode_order(const Cuts& order);

// A dim of n elements from its public cuts. An order where it can be decoded as one; else one strided shard among plain
// ones, literally; else not supported.
OrReason<DimLayout> read_public(std::int64_t n, std::span<const PublicCut> cuts);
// The public cuts that read_public turns into this (coalesced) layout, if there are any.
std::optional<PublicCuts> write_public(const DimLayout& dim);

}  // namespace dtensor
