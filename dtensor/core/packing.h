#pragma once

#include <cstdint>
#include <vector>

#include "dtensor/core/boxes.h"

namespace dtensor {

// A strided copy from one flat memory to another, in elements. No two dims can be said as one.
struct Copy {
  struct Dim {
    std::int64_t size = 1;
    std::int64_t from = 1;  // strides
    std::int64_t to = 1;
    friend bool operator==(const Dim&, const Dim&) = default;
  };
  std::int64_t from = 0;
  std::int64_t to = 0;
  InlineVec<Dim, 4> dims;  // major to minor
  std::int64_t numel() const noexcept;
  friend bool operator==(const Copy&, const Copy&) = default;
};
using Copies = std::vector<Copy>;

// How elements lie in a flat memory: those of `held`, each dim in its own ascending order, `stride` apart.
struct Place {
  Box held;
  Dims stride;
  std::int64_t offset = 0;
};

// The elements of a box one after the other, without gaps; `order` says which dims are major (see packing_order).
Place packed(const Box& box, const Dims& order, std::int64_t offset = 0);
// The dims of a tensor from the largest stride to the smallest: packing in this order keeps runs long.
Dims packing_order(const TensorMeta& meta);
// The local tensor of a rank as redistribution makes it: dense, dims in the order of the global strides.
Place local_place(const Spec& spec, const Dims& coordinate);

// Adds the copies that take a box from one memory to another; both hold all of it.
void add_copies(const Box& box, const Place& from, const Place& to, Copies& copies);
// Do these copies leave every one of n elements where it is?
bool is_identity(const Copies& copies, std::int64_t n);

// Part `index` of `count` of a box, cut along its longest dim: the same wherever the box is held.
Box part_of(const Box& box, std::int64_t count, std::int64_t index);
// The row-major index of a box's first element. Pre: not empty.
std::int64_t first_element(const Box& box, const Dims& shape);

// Calls fn(from, to, n) for every run of n elements that lie side by side on both ends.
template <class Fn>
void for_each_run(const Copy& copy, Fn fn) {
  const auto& dims = copy.dims;
  std::size_t outer = dims.size();
  std::int64_t run = 1;
  if (outer > 0 && dims[outer - 1].from == 1 && dims[outer - 1].to == 1) run = dims[--outer].size;
  InlineVec<std::int64_t, 4> index(outer);
  for (std::int64_t from = copy.from, to = copy.to;;) {
    fn(from, to, run);
    std::size_t d = outer;
    for (; d > 0; --d) {
      from += dims[d - 1].from;
      to += dims[d - 1].to;
      if (++index[d - 1] < dims[d - 1].size) break;
      from -= dims[d - 1].size * dims[d - 1].from;
      to -= dims[d - 1].size * dims[d - 1].to;
      index[d - 1] = 0;
    }
    if (d == 0) return;
  }
}

// Plays copies between two memories of elements of this size.
void play(const Copies& copies, const void* from, void* to, std::int64_t element_size);

}  // namespace dtensor
