#include <gtest/gtest.h>

#include "tests/core/rule_call.h"

namespace dtensor {
namespace {

using namespace calls;
const StaticArg kNone;

TEST(PropagateView, FreeViewsAlias) {
  EXPECT_EQ(decided("aten::t", {"f32[8,6] @ 2(x) : S(1)"}, {"f32[6,8]{1,6}"}), "S(1) -> S(0); alias");
  EXPECT_EQ(decided("aten::t", {"f32[8] @ 2(x) : S(0)"}, {"f32[8]"}), "S(0) -> S(0); alias");
  EXPECT_EQ(decided("aten::transpose.int", {"f32[2,8,6] @ 2(x) : S(1)", i(0), i(-2)}, {"f32[8,2,6]{6,48,1}"}),
            "S(1) -> S(0); alias");
  EXPECT_EQ(decided("aten::permute", {"f32[2,8,6] @ 2(x) : P(max)", ints({2, 0, 1})}, {"f32[6,2,8]{1,48,6}"}),
            "P(max) -> P(max); alias");
  EXPECT_EQ(decided("aten::view", {"f32[3,5,8] @ 2(x) : S(1)", ints({-1, 8})}, {"f32[15,8]"}), "S(1) -> S(0.1); alias");
  EXPECT_EQ(decided("aten::view", {"f32[(3*5),8] @ 2(x) : S(0.1)", ints({3, 5, 8})}, {"f32[3,5,8]"}),
            "S(0.1) -> S(1); alias");
  EXPECT_EQ(decided("aten::detach", {"f32[8] @ 2(x) : P"}, {"f32[8]"}), "P(sum) -> P(sum); alias");
  EXPECT_EQ(decided("aten::unsqueeze", {"f32[8,6] @ 2(x) : S(1)", i(-2)}, {"f32[8,1,6]"}), "S(1) -> S(2); alias");
  EXPECT_EQ(decided("aten::expand", {"f32[1,6] @ 2(x) : S(1)", ints({2, 8, -1}), flag(false)}, {"f32[2,8,6]{0,0,1}"}),
            "S(1) -> S(2); alias");
  EXPECT_EQ(decided("aten::select.int", {"f32[8,6] @ 2(x) : S(1)", i(0), i(3)}, {"f32[6]"}), "S(1) -> S(0); alias");
  EXPECT_EQ(decided("aten::unbind.int", {"f32[2,6] @ 2(x) : S(1)", i(0)}, {"f32[6]", "f32[6]"}),
            "S(1) -> S(0) | S(0); alias");
  EXPECT_EQ(
      decided("aten::slice.Tensor", {"f32[8,6] @ 2(x) : S(1)", i(0), kNone, i(INT64_MAX), i(3)}, {"f32[3,6]{18,1}"}),
      "S(1) -> S(1); alias");
}

TEST(PropagateView, RewritesWhatTheLocalCallIsTold) {
  const auto rewrites = [](std::string_view name, const std::vector<Arg>& args,
                           const std::vector<std::string>& outputs) {
    const auto decision = decide_call(make(name, args, outputs));
    return decision ? decision->rewrites : std::vector<Rewrite>{{99, {}, 0, {}}};
  };
  using Kind = Rewrite::Kind;
  EXPECT_EQ(rewrites("aten::view", {"f32[3,5,8] @ 2(x) : S(1)", ints({-1, 8})}, {"f32[15,8]"}),
            (std::vector<Rewrite>{{1, Kind::kLocalShape, 0, {}}}));
  EXPECT_EQ(rewrites("aten::_reshape_alias", {"f32[3,5,8] @ 2(x) : S(1)", ints({15, 8}), ints({8, 1})}, {"f32[15,8]"}),
            (std::vector<Rewrite>{{1, Kind::kLocalShape, 0, {}}}));
  // An uncut dim is the same on every rank.
  EXPECT_EQ(rewrites("aten::slice.Tensor", {"f32[8,6] @ 2(x) : S(1)", i(0), i(1), i(3), i(1)}, {"f32[2,6]"}),
            std::vector<Rewrite>());
  EXPECT_EQ(rewrites("aten::slice.Tensor", {"f32[(3*4),6] @ 2(x) : S(0.1)", i(0), i(-8), i(100), i(1)}, {"f32[8,6]"}),
            (std::vector<Rewrite>{{2, Kind::kScaled, 0, i(4)}, {3, Kind::kScaled, 0, i(12)}}));
  EXPECT_EQ(rewrites("aten::narrow", {"f32[(3*4),6] @ 2(x) : S(0.1)", i(0), i(4), i(8)}, {"f32[8,6]"}),
            (std::vector<Rewrite>{{2, Kind::kScaled, 0, i(4)}, {3, Kind::kScaled, 0, i(8)}}));
}

// The three parts of a fused weight, cut below them.
TEST(PropagateView, PartsOfAFusedWeightAreFree) {
  EXPECT_EQ(
      decided("aten::split.Tensor", {"f32[(3*4),6] @ 2(x) : S(0.1)", i(4), i(0)}, {"f32[4,6]", "f32[4,6]", "f32[4,6]"}),
      "S(0.1) -> S(0) | S(0) | S(0); runs aten::split_with_sizes; alias");
}

// The local strides need not be those of a fresh tensor.
TEST(PropagateView, ReshapeAliasIsALocalView) {
  EXPECT_EQ(decided("aten::_reshape_alias", {"f32[3,5,8] @ 2(x) : S(1)", ints({15, 8}), ints({8, 1})}, {"f32[15,8]"}),
            "S(1) -> S(0.1); runs aten::view; alias");
}

// A local size of 1 is not a global one.
TEST(PropagateView, SqueezeSaysTheLocalShape) {
  EXPECT_EQ(decided("aten::squeeze", {"f32[2,1,6] @ 2(x) : S(0)"}, {"f32[2,6]"}),
            "S(0) -> S(0); runs aten::view; alias");
  EXPECT_EQ(decided("aten::squeeze.dim", {"f32[2,1,6] @ 2(x) : S(0)", i(0)}, {"f32[2,1,6]"}),
            "S(0) -> S(0); runs aten::view; alias");
}

TEST(PropagateView, NoFreeForm) {
  EXPECT_EQ(decided("aten::view", {"f32[15,8] @ 2(x) : S(0)", ints({3, 5, 8})}, {"f32[3,5,8]"}),
            "no: 15 elements are not cut between rows of 5: no view without moving data");
  EXPECT_EQ(decided("aten::_unsafe_view", {"f32[15,8] @ 2(x) : S(0)", ints({3, 5, 8})}, {"f32[3,5,8]"}),
            "S(0)>S(1) -> S(2)");
  EXPECT_EQ(decided("aten::select.int", {"f32[15,8] @ 2(x) : S(0)", i(0), i(3)}, {"f32[8]"}), "S(0)>S(1) -> S(0)");
  EXPECT_EQ(decided("aten::select.int", {"f32[15] @ 2(x) : S(0)", i(0), i(3)}, {"f32[]"}), "S(0)>R -> R");
  EXPECT_EQ(decided("aten::slice.Tensor", {"f32[15] @ 2x2(a,b) : S(0),P", i(0), i(0), i(3), i(1)}, {"f32[3]"}),
            "S(0),P(sum)>R,P(sum) -> R,P(sum)");
  EXPECT_EQ(decided("aten::expand", {"f32[1,6] @ 2(x) : S(0)", ints({8, 6}), flag(false)}, {"f32[8,6]{0,1}"}),
            "S(0)>S(1) -> S(1)");
  // Memory that no redistribution makes contiguous.
  EXPECT_EQ(decided("aten::_unsafe_view", {"f32[4,6]{1,4} @ 2(x) : R", ints({24})}, {"f32[24]"}),
            "no: dims 0 and 1 of f32[4,6]{1,4} do not follow each other in memory");
}

}  // namespace
}  // namespace dtensor
