#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dtensor/core/error.h"
#include "dtensor/core/inline_vec.h"

namespace dtensor {

// A map from a row-major index (or its coordinate) to an offset, as modes of (size, stride), outermost first:
//   layout(i) = sum over modes of coordinate(i)[k] * stride[k].
// Mesh dims are layouts over positions in a rank list, so slicing, flattening and grouping a mesh are layout algebra,
// computed on the modes and never on the ranks.
//   Layout{{2, 3}, {3, 1}} is the row-major 2x3 box: 0 1 2 3 4 5.   Layout{{3}, {2}} is 0 2 4.
// Invariants: size >= 1, stride >= 0 for every mode; the sum of size * stride fits in int64.
class Layout {
 public:
  struct Mode {
    std::int64_t size;
    std::int64_t stride;
    friend bool operator==(const Mode&, const Mode&) = default;
  };
  using Modes = InlineVec<Mode, 4>;

  Layout() = default;
  explicit Layout(Modes modes);
  Layout(const Dims& sizes, const Dims& strides);

  // Post: row_major(s)(i) == i for every i < numel.
  static Layout row_major(const Dims& sizes);

  const Modes& modes() const noexcept { return modes_; }
  std::size_t size() const noexcept { return modes_.size(); }
  std::int64_t numel() const noexcept { return numel_; }
  // The largest offset plus one.
  std::int64_t cosize() const noexcept;

  // The offset of the index-th element in row-major order. Pre: 0 <= index < numel().
  std::int64_t operator()(std::int64_t index) const noexcept;
  // Post: coordinate(i) are the row-major digits of i, one per mode.
  Dims coordinate(std::int64_t index) const;
  std::int64_t offset(const Dims& coordinate) const noexcept;

  // Every offset, in row-major order. Linear in numel: only for when a list was asked for.
  std::vector<std::int64_t> offsets() const;

  // True only if no two indices share an offset: with the modes sorted by stride, each stride is at least the reach of
  // the ones below it plus one. Exact for the layouts that meshes are made of (mixed-radix digits); interleaved
  // injective layouts such as (2,2):(2,3) are reported as overlapping.
  bool injective() const;

  friend bool operator==(const Layout& a, const Layout& b) { return a.modes_ == b.modes_; }

  // `(2,3):(3,1)`
  std::string to_string() const;

 private:
  Modes modes_;
  std::int64_t numel_ = 1;
};

// The fewest modes with the same function. Post: coalesce(a)(i) == a(i) for all i, no two adjacent modes can be merged.
Layout coalesce(const Layout& a);

// Post: compose(a, b)(i) == a(b(i)) for all i < numel(b). No value when the result is not a layout.
OrReason<Layout> compose(const Layout& a, const Layout& b);

// The offsets that `a` does not reach, as steps between copies of `a`.
// Post: with c = complement(a, total), {a(i) + c(j)} are exactly 0 … total-1, each once. No value when a does not tile.
OrReason<Layout> complement(const Layout& a, std::int64_t total);

// Splits `a` by a tile: compose(a, concat(complement(tile, numel(a)), tile)).
// Post: divide(a, t)(j * numel(t) + i) == a(complement(t)(j) + t(i)); the tiles are the rows.
OrReason<Layout> divide(const Layout& a, const Layout& tile);

// The modes of a, then those of b. Post: concat(a, b)(i * numel(b) + j) == a(i) + b(j).
Layout concat(const Layout& a, const Layout& b);

}  // namespace dtensor
