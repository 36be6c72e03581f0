#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "dtensor/core/spec.h"

namespace dtensor {

// A set of indices of one tensor dim, as a product: the dim is factored (sizes major to minor) and each factor has its
// intervals. x[15] as 3*5 with rows {0,1,2} and columns [0,3) is {0,1,2, 5,6,7, 10,11,12}, without writing them out.
struct FactorSet {
  std::int64_t size = 1;
  Intervals intervals;  // ascending, apart, none empty
  std::int64_t count() const noexcept;
};
using DimSet = InlineVec<FactorSet, 1>;

std::int64_t count_of(const DimSet& set);

// The maximal runs of consecutive indices, ascending, together with where each starts in the set's own order.
using RunFn = std::function<void(Interval indices, std::int64_t position)>;
void for_each_run(const DimSet& set, const RunFn& fn);
std::vector<Interval> runs_of(const DimSet& set);

// A set of elements of a tensor: the product of one index set per tensor dim.
struct Box {
  InlineVec<DimSet, 4> dims;
  std::int64_t numel() const noexcept;
};

// What the rank at a coordinate holds (or holds a part of, on Partial mesh dims).
Box box_of(const Spec& spec, const Dims& coordinate);

// The maximal runs of elements that follow each other both in the whole tensor (row-major) and in the box's own
// row-major order: (index in the whole, index in the box, length). This is how local memory maps to global elements.
using ElementRunFn = std::function<void(std::int64_t global, std::int64_t local, std::int64_t length)>;
void for_each_run(const Box& box, const Dims& shape, const ElementRunFn& fn);

// Does every rank hold the same indices of every tensor dim under both? Then its local tensor is the same, shape
// included, and going from one to the other is free, however they print. False for different meshes, shapes or
// reductions.
bool same_boxes(const Spec& a, const Spec& b);

// The mesh dims along which every rank holds the same elements with the same values.
std::vector<std::int64_t> replica_dims(const Spec& spec);
// The ranks that hold what the rank at this coordinate holds, itself included, in mesh order.
std::vector<std::int64_t> replicas_of(const Spec& spec, const Dims& coordinate, std::int64_t row = 0);

// A part of what one rank wants, and who has it: the index of its holders on every mesh dim of the holding spec.
struct Piece {
  static constexpr std::int64_t kAny = -1;    // any index will do: replicated
  static constexpr std::int64_t kEvery = -2;  // all of them are needed: Partial
  Dims holder;
  Box box;
};
using PieceFn = std::function<void(const Piece&)>;

// The pieces that together are what `wants` gives to the rank at `coordinate`, cut by who holds them under `has`; the
// two specs are of one tensor shape, on one mesh or on two. Each element is in exactly one piece, each holder is named
// once, and only this rank's own pieces are ever looked at: the cost is their number, not the mesh's size.
// Swap the roles to learn what a rank has to send: for_each_piece(target, source, my coordinate in source).
void for_each_piece(const Spec& has, const Spec& wants, const Dims& coordinate, const PieceFn& fn);

}  // namespace dtensor
