#include "dtensor/core/layout.h"

#include <gtest/gtest.h>

#include <set>

#include "tests/core/sweep.h"

namespace dtensor {
namespace {

Layout random_layout(sweep::Random& random) {
  Layout::Modes modes;
  for (std::int64_t i = 1 + random.below(3); i > 0; --i) modes.push_back({1 + random.below(6), random.below(13)});
  return Layout(modes);
}

TEST(Layout, RowMajorIsTheIdentity) {
  const Layout layout = Layout::row_major({2, 3, 4});
  EXPECT_EQ(layout.to_string(), "(2,3,4):(12,4,1)");
  EXPECT_EQ(layout.cosize(), 24);
  for (std::int64_t i = 0; i < 24; ++i) {
    EXPECT_EQ(layout(i), i);
    EXPECT_EQ(layout.offset(layout.coordinate(i)), i);
  }
}

TEST(Layout, CoalesceKeepsTheFunction) {
  sweep::Random random(1);
  for (int i = 0; i < sweep::rounds(20'000); ++i) {
    const Layout a = random_layout(random);
    const Layout b = coalesce(a);
    ASSERT_EQ(a.numel(), b.numel());
    for (std::int64_t k = 0; k < a.numel(); ++k) ASSERT_EQ(a(k), b(k)) << a.to_string();
    ASSERT_EQ(coalesce(b), b);
    ASSERT_EQ(a.offsets(), b.offsets());
  }
}

TEST(Layout, ComposeIsComposition) {
  sweep::Random random(2);
  int composed = 0;
  for (int i = 0; i < sweep::rounds(100'000); ++i) {
    const Layout a = random_layout(random);
    const Layout b = random_layout(random);
    const auto c = compose(a, b);
    if (!c) continue;
    ++composed;
    ASSERT_EQ(c->numel(), b.numel());
    for (std::int64_t k = 0; k < b.numel(); ++k) {
      ASSERT_EQ((*c)(k), a(b(k))) << a.to_string() << " o " << b.to_string() << " = " << c->to_string();
    }
  }
  EXPECT_GT(composed, sweep::rounds(5'000));
}

// Splitting the digits of a row-major layout always composes when the sizes divide.
TEST(Layout, ComposeSplitsDigits) {
  const auto c = compose(Layout({4, 6}, {100, 10}), Layout::row_major({2, 4, 3}));
  ASSERT_TRUE(c) << c.reason();
  EXPECT_EQ(c->to_string(), "(2,2,2,3):(200,100,30,10)");
  const auto no = compose(Layout({4, 6}, {100, 10}), Layout::row_major({6, 4}));
  EXPECT_FALSE(no);
}

TEST(Layout, ComplementTiles) {
  sweep::Random random(3);
  int tiled = 0;
  for (int i = 0; i < sweep::rounds(100'000); ++i) {
    const Layout a = random_layout(random);
    const std::int64_t total = a.cosize() * (1 + random.below(4));
    const auto c = complement(a, total);
    if (!c) continue;
    ++tiled;
    std::set<std::int64_t> seen;
    for (std::int64_t j = 0; j < c->numel(); ++j) {
      for (std::int64_t k = 0; k < a.numel(); ++k) ASSERT_TRUE(seen.insert(a(k) + (*c)(j)).second) << a.to_string();
    }
    ASSERT_EQ(static_cast<std::int64_t>(seen.size()), total);
    ASSERT_EQ(*seen.rbegin(), total - 1);
    ASSERT_TRUE(a.injective());
  }
  EXPECT_GT(tiled, sweep::rounds(2'000));
}

TEST(Layout, DivideMakesTilesTheRows) {
  const auto tiles = divide(Layout::row_major({24}), Layout({3}, {4}));
  ASSERT_TRUE(tiles) << tiles.reason();
  const Layout rest = *complement(Layout({3}, {4}), 24);
  for (std::int64_t j = 0; j < rest.numel(); ++j) {
    for (std::int64_t i = 0; i < 3; ++i) EXPECT_EQ((*tiles)(j * 3 + i), rest(j) + 4 * i);
  }
}

TEST(Layout, InjectiveNeverSaysYesWrongly) {
  sweep::Random random(4);
  int injective = 0;
  for (int i = 0; i < sweep::rounds(50'000); ++i) {
    const Layout a = random_layout(random);
    const auto offsets = a.offsets();
    const std::set<std::int64_t> distinct(offsets.begin(), offsets.end());
    if (!a.injective()) continue;
    ++injective;
    ASSERT_EQ(distinct.size(), offsets.size()) << a.to_string();
  }
  EXPECT_GT(injective, sweep::rounds(5'000));
}

}  // namespace
}  // namespace dtensor
