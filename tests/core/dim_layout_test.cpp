#include "dtensor/core/dim_layout.h"

#include <gtest/gtest.h>

#include "tests/core/sweep.h"

namespace dtensor {
namespace {

TEST(Chunk, IsTorchChunk) {
  EXPECT_EQ(chunk({0, 5}, 3, 0), (Interval{0, 2}));
  EXPECT_EQ(chunk({0, 5}, 3, 2), (Interval{4, 5}));
  EXPECT_EQ(chunk({0, 4}, 3, 2), (Interval{4, 4}));
  EXPECT_EQ(chunk({7, 7}, 3, 2), (Interval{7, 7}));
  EXPECT_EQ(chunk({0, kInt64Max}, 2, 1), (Interval{kInt64Max / 2 + 1, kInt64Max}));
  EXPECT_EQ(chunk({0, kInt64Max}, kInt64Max, kInt64Max - 1), (Interval{kInt64Max - 1, kInt64Max}));
}

// A random layout of one dim over the mesh dims, virtual cuts included.
DimLayout random_dim(sweep::Random& random, const Dims& mesh) {
  DimLayout dim;
  std::vector<std::int32_t> free;
  for (std::size_t m = 0; m < mesh.size(); ++m) free.push_back(static_cast<std::int32_t>(m));
  for (std::int64_t f = 1 + random.below(3); f > 0; --f) {
    Factor factor{random.below(8), {}};
    for (std::int64_t c = random.below(4); c > 0; --c) {
      if (random.chance(3)) {
        factor.cuts.push_back({Cut::kVirtual, 1 + random.below(std::max<std::int64_t>(factor.size, 1))});
      } else if (!free.empty()) {
        const auto at = static_cast<std::size_t>(random.below(static_cast<std::int64_t>(free.size())));
        factor.cuts.push_back({free[at], mesh[free[at]]});
        free.erase(free.begin() + at);
      }
    }
    dim.push_back(factor);
  }
  return dim;
}

// The indices a coordinate holds of a dim, cut as the definition says, list by list.
sweep::Indices held(const DimLayout& dim, const Dims& coordinate) {
  sweep::Indices result = {0};
  for (const Factor& factor : dim) {
    std::vector<sweep::Indices> pieces = {sweep::iota(factor.size)};
    for (const Cut& cut : factor.cuts) {
      std::vector<sweep::Indices> next;
      for (const sweep::Indices& piece : pieces) {
        for (std::int64_t i = 0; i < cut.count; ++i) {
          if (cut.is_virtual() || coordinate[cut.mesh_dim] == i) next.push_back(sweep::chunk_of(piece, cut.count, i));
        }
      }
      pieces = next;
    }
    sweep::Indices next;
    for (std::int64_t outer : result) {
      for (const sweep::Indices& piece : pieces) {
        for (std::int64_t i : piece) next.push_back(outer * factor.size + i);
      }
    }
    result = next;
  }
  return result;
}

TEST(DimLayout, HeldAndCoalesceFollowTheDefinition) {
  sweep::Random random(31);
  const std::vector<Dims> meshes = sweep::mesh_shapes(12, 3);
  std::int64_t with_virtual = 0;
  for (int i = 0; i < sweep::rounds(60'000); ++i) {
    const Dims shape = random.pick(meshes);
    const DimLayout dim = random_dim(random, shape);
    const DimLayout canonical = coalesce(dim);
    ASSERT_EQ(coalesce(canonical), canonical);
    ASSERT_EQ(size_of(canonical), size_of(dim));
    for (const Factor& factor : canonical) {
      ASSERT_TRUE(factor.size != 1 || canonical.size() == 1 || !factor.cuts.empty());
      with_virtual += has_virtual(factor);
    }
    sweep::for_each_coordinate(Mesh::make(shape), [&](const Dims& coordinate) {
      const sweep::Indices expected = held(dim, coordinate);
      ASSERT_EQ(held(canonical, coordinate), expected);
      std::int64_t size = 1;
      std::int64_t first = 0;
      for (const Factor& factor : canonical) {
        const Held part = held_of(factor, coordinate);
        size *= part.size;
        first = first * factor.size + part.first;
        std::int64_t total = 0;
        for (const Interval& interval : intervals_of(factor, coordinate)) total += interval.size();
        ASSERT_EQ(total, part.size);
      }
      ASSERT_EQ(size, static_cast<std::int64_t>(expected.size()));
      if (size > 0) {
        ASSERT_EQ(first, expected[0]);
      }
    });
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(with_virtual, sweep::rounds(1'000));
}

TEST(DimLayout, SplitKeepsTheElements) {
  sweep::Random random(32);
  const std::vector<Dims> meshes = sweep::mesh_shapes(12, 2);
  std::int64_t splits = 0;
  for (int i = 0; i < sweep::rounds(60'000); ++i) {
    const Dims shape = random.pick(meshes);
    Factor factor = random_dim(random, shape)[0];
    const std::int64_t major = random.below(7);
    const std::int64_t minor = random.below(7);
    factor.size = major * minor;
    const auto parts = split(factor, major, minor);
    if (!parts) continue;
    ++splits;
    sweep::for_each_coordinate(Mesh::make(shape), [&](const Dims& coordinate) {
      ASSERT_EQ(held({parts->first, parts->second}, coordinate), held({factor}, coordinate));
    });
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(splits, sweep::rounds(10'000));
}

// A huge virtual cut is counted, not enumerated.
TEST(DimLayout, VirtualCutsCostNothing) {
  const Factor factor{1'000'000'000'003, {{Cut::kVirtual, 999'999'999'989}, {0, 3}}};
  const Held middle = held_of(factor, {1});
  EXPECT_EQ(held_of(factor, {0}).size + middle.size + held_of(factor, {2}).size, factor.size);
  EXPECT_EQ(middle.first, 1);
}

}  // namespace
}  // namespace dtensor
