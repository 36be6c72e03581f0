#include "dtensor/core/propagate.h"

#include <gtest/gtest.h>

#include "tests/core/rule_call.h"

namespace dtensor {
namespace {

using namespace calls;

TEST(Propagate, MatmulAsItLies) {
  const auto mm = [](const char* x, const char* w) { return decided("aten::mm", {x, w}, {"f32[8,4]"}); };
  EXPECT_EQ(mm("f32[8,6] @ 2(x) : R", "f32[6,4] @ 2(x) : R"), "R | R -> R");
  EXPECT_EQ(mm("f32[8,6] @ 2(x) : S(0)", "f32[6,4] @ 2(x) : R"), "S(0) | R -> S(0)");
  EXPECT_EQ(mm("f32[8,6] @ 2(x) : R", "f32[6,4] @ 2(x) : S(1)"), "R | S(1) -> S(1)");
  EXPECT_EQ(mm("f32[8,6] @ 2(x) : S(1)", "f32[6,4] @ 2(x) : S(0)"), "S(1) | S(0) -> P(sum)");
  EXPECT_EQ(mm("f32[8,6] @ 2(x) : P(sum)", "f32[6,4] @ 2(x) : R"), "P(sum) | R -> P(sum)");
  EXPECT_EQ(mm("f32[8,6] @ 2(x) : R", "f32[6,4] @ 2(x) : P(avg)"), "R | P(avg) -> P(avg)");
  EXPECT_EQ(mm("f32[8,6] @ 2x2(a,b) : S(0),S(1)", "f32[6,4] @ 2x2(a,b) : R,S(0)"), "S(0),S(1) | R,S(0) -> S(0),P(sum)");
}

}  // namespace
}  // namespace dtensor
