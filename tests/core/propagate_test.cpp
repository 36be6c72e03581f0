#include "dtensor/core/propagate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/core/rule_call.h"

// What is decided, per family, written by hand.
namespace dtensor {
namespace {

using namespace calls;
const StaticArg kNone;

TEST(Propagate, MatmulAsItLies) {
  const auto mm = [](const char* x, const char* w) { return decided("aten::mm", {x, w}, {"f32[8,4]"}); };
  EXPECT_EQ(mm("f32[8,6] @ 2(x) : R", "f32[6,4] @ 2(x) : R"), "R | R -> R");
  EXPECT_EQ(mm("f32[8,6] @ 2(x) : S(0)", "f32[6,4] @ 2(x) : R"), "S(0) | R -> S(0)");
  EXPECT_EQ(mm("f32[8,6] @ 2(x) : R", "f32[6,4] @ 2(x) : S(1)"), "R | S(1) -> S(1)");
  EXPECT_EQ(mm("f32[8,6] @ 2(x) : S(1)", "f32[6,4] @ 2(x) : S(0)"), "S(1) | S(0) -> P(sum)");
  EXPECT_EQ(mm("f32[8,6] @ 2(x) : P(sum)", "f32[6,4] @ 2(x) : R"), "P(sum) | R -> P(sum)");
  EXPECT_EQ(mm("f32[8,6] @ 2(x) : R", "f32[6,4] @ 2(x) : P(avg)"), "R | P(avg) -> P(avg)");
  EXPECT_EQ(mm("f32[8,6] @ 2x2(a,b) : S(0),S(1)", "f32[6,4] @ 2x2(a,b) : R,S(0)"), "S(0),S(1) | R,S(0) -> S(0),P(sum)");
  EXPECT_EQ(mm("f32[8,6] @ 2x2(a,b) : P,S(0)", "f32[6,4] @ 2x2(a,b) : R,R"), "P(sum),S(0) | R,R -> P(sum),S(0)");
  // Both Partial on one mesh dim is a product of sums, not a sum of products.
  EXPECT_EQ(mm("f32[8,6] @ 2(x) : P(sum)", "f32[6,4] @ 2(x) : P(sum)"), "P(sum) | P(sum)>R -> P(sum)");
}

TEST(Propagate, MatmulTakesLayoutsWhole) {
  EXPECT_EQ(decided("aten::mm", {"f32[(3*5),8] @ 2(tp) : S(0.1)", "f32[8,4] @ 2(tp) : R"}, {"f32[15,4]"}),
            "S(0.1) | R -> S(0.1)");
  EXPECT_EQ(decided("aten::mm", {"f32[10,8] @ 2x2(f,t) : S(0)[1],S(0)[0]", "f32[8,4] @ 2x2(f,t) : R,R"}, {"f32[10,4]"}),
            "S(0)[1],S(0)[0] | R,R -> S(0)[1],S(0)[0]");
  // Another order of the same mesh dims is another split: the smaller operand moves.
  EXPECT_EQ(decided("aten::mm", {"f32[64,10] @ 2x2(f,t) : S(1)[1],S(1)[0]", "f32[10,4] @ 2x2(f,t) : S(0)[0],S(0)[1]"},
                    {"f32[64,4]"}),
            "S(1)[1],S(1)[0] | S(0),S(0)>S(0)[1],S(0)[0] -> P(sum),P(sum)");
}

// A linear layer whose batch and weight are both cut (as under fully_shard): without the exit term both operands would
// be exchanged, and the result left Partial.
TEST(Propagate, GathersTheWeightOfACutLinear) {
  EXPECT_EQ(
      decided("aten::mm", {"bf16[4096,4096] @ 8(x) : S(0)", "bf16[4096,4096] @ 8(x) : S(0)"}, {"bf16[4096,4096]"}),
      "S(0) | S(0)>R -> S(0)");
}

TEST(Propagate, AddedOperandsJoinTheSum) {
  const auto addmm = [](const char* b, const char* x, const char* w) {
    return decided("aten::addmm", {b, x, w, num(1), num(1)}, {"f32[8,4]"});
  };
  EXPECT_EQ(addmm("f32[4] @ 2(x) : R", "f32[8,6] @ 2(x) : S(1)", "f32[6,4] @ 2(x) : S(0)"),
            "R>P(sum) | S(1) | S(0) -> P(sum)");
  EXPECT_EQ(addmm("f32[4] @ 2(x) : P", "f32[8,6] @ 2(x) : P", "f32[6,4] @ 2(x) : R"), "P(sum) | P(sum) | R -> P(sum)");
  EXPECT_EQ(addmm("f32[4] @ 2(x) : S(0)", "f32[8,6] @ 2(x) : R", "f32[6,4] @ 2(x) : S(1)"), "S(0) | R | S(1) -> S(1)");
  EXPECT_EQ(addmm("f32[4] @ 2(x) : R", "f32[8,6] @ 2(x) : S(0)", "f32[6,4] @ 2(x) : R"), "R | S(0) | R -> S(0)");
  // A bias that is cut goes by Replicate, which is local for the rest of the way.
  const OpCall call =
      make("aten::addmm",
           {"f32[4] @ 2(x) : S(0)", "f32[4096,4096] @ 2(x) : S(1)", "f32[4096,4] @ 2(x) : S(0)", num(1), num(1)},
           {"f32[4096,4]"});
  const auto decision = decide_call(call);
  ASSERT_EQ(shown(call, decision), "S(0)>P(sum) | S(1) | S(0) -> P(sum)");
  const auto stops = stops_between(*call.operands[0], *decision->inputs[0]);
  EXPECT_EQ(join(stops, " ", placed), "R P(sum)");
}

TEST(Propagate, ReplicateNeverTurnsPartialToFit) {
  const auto add = [](const char* a, const char* b) {
    return decided("aten::add.Tensor", {a, b, num(1)}, {"f32[8,6]"});
  };
  EXPECT_EQ(add("f32[8,6] @ 2(x) : P", "f32[8,6] @ 2(x) : P"), "P(sum) | P(sum) -> P(sum)");
  EXPECT_EQ(add("f32[8,6] @ 2(x) : P", "f32[8,6] @ 2(x) : R"), "P(sum)>R | R -> R");
  EXPECT_EQ(add("f32[8,6] @ 2(x) : P", "f32[8,6] @ 2(x) : S(1)"), "P(sum)>S(1) | S(1) -> S(1)");
  EXPECT_EQ(add("f32[8,6] @ 2(x) : P", "f32[8,6] @ 2(x) : P(avg)"), "P(sum)>S(0) | P(avg)>S(0) -> S(0)");
  EXPECT_EQ(add("f32[8,6] @ 2(x) : P(max)", "f32[8,6] @ 2(x) : P(max)"), "P(max)>S(0) | P(max)>S(0) -> S(0)");
  // Large enough that two reduce-scatters pay.
  EXPECT_EQ(decided("aten::add.Tensor", {"f32[4096,4096] @ 8(x) : P", "f32[4096,4096] @ 8(x) : R", num(1)},
                    {"f32[4096,4096]"}),
            "P(sum)>S(0) | R>S(0) -> S(0)");
}

TEST(Propagate, NumbersJoinASumOnce) {
  EXPECT_EQ(decided("aten::add.Tensor", {"f32[8] @ 2x2(a,b) : P,R", Wrapped{}, num(1)}, {"f32[8]"}),
            "P(sum),R | number -> P(sum),R; once on 0, others keep");
  EXPECT_EQ(decided("aten::add.Scalar", {"f32[8] @ 2x2(a,b) : P,P", num(2), num(1)}, {"f32[8]"}),
            "P(sum),P(sum) -> P(sum),P(sum); once on 0,1, others keep");
  // Integers that become floating change what the others would keep.
  EXPECT_EQ(decided("aten::add.Scalar", {"i64[8] @ 2(x) : P", num(0.5), num(1)}, {"f32[8]"}), "P(sum)>S(0) -> S(0)");
  EXPECT_EQ(decided("aten::mul.Tensor", {"f32[8] @ 2(x) : P", Wrapped{}}, {"f32[8]"}), "P(sum) | number -> P(sum)");
  EXPECT_EQ(decided("aten::fill_.Scalar", {"f32[8] @ 2(x) : P", num(2)}, {"f32[8]"}),
            "P(sum) -> P(sum); once on 0, others identity of sum");
  EXPECT_EQ(decided("aten::fill_.Scalar", {"f32[8] @ 2(x) : P(max)", num(2)}, {"f32[8]"}), "P(max) -> P(max)");
  EXPECT_EQ(decided("aten::zero_", {"f32[8] @ 2(x) : P"}, {"f32[8]"}), "P(sum) -> P(sum)");
}

TEST(Propagate, RisingAndFallingKeepMinAndMax) {
  const auto one = [](const char* name, const char* x) { return decided(name, {x}, {"f32[8]"}); };
  EXPECT_EQ(one("aten::exp", "f32[8] @ 2(x) : P(max)"), "P(max) -> P(max)");
  EXPECT_EQ(one("aten::neg", "f32[8] @ 2(x) : P(max)"), "P(max) -> P(min)");
  EXPECT_EQ(one("aten::neg", "f32[8] @ 2(x) : P(sum)"), "P(sum) -> P(sum)");
  EXPECT_EQ(one("aten::exp", "f32[8] @ 2(x) : P(sum)"), "P(sum)>S(0) -> S(0)");
  EXPECT_EQ(one("aten::log", "f32[8] @ 2(x) : P(max)"), "P(max)>S(0) -> S(0)");
  const auto mul = [](double c, const char* x, const char* out) {
    return decided("aten::mul.Scalar", {x, num(c)}, {out});
  };
  EXPECT_EQ(mul(2, "f32[8] @ 2(x) : P(max)", "f32[8]"), "P(max) -> P(max)");
  EXPECT_EQ(mul(-2, "f32[8] @ 2(x) : P(max)", "f32[8]"), "P(max) -> P(min)");
  EXPECT_EQ(mul(0, "f32[8] @ 2(x) : P(max)", "f32[8]"), "P(max)>S(0) -> S(0)");
  EXPECT_EQ(mul(HUGE_VAL, "f32[8] @ 2(x) : P(max)", "f32[8]"), "P(max)>S(0) -> S(0)");
  EXPECT_EQ(mul(2, "i64[8] @ 2(x) : P(max)", "i64[8]"), "P(max)>S(0) -> S(0)");  // wraps
  EXPECT_EQ(mul(2, "i64[8] @ 2(x) : P(sum)", "i64[8]"), "P(sum) -> P(sum)");
  EXPECT_EQ(decided("aten::maximum", {"f32[8] @ 2(x) : P(max)", "f32[8] @ 2(x) : R"}, {"f32[8]"}),
            "P(max) | R -> P(max)");
  // A max here and a min there would not commute.
  EXPECT_EQ(decided("aten::maximum", {"f32[8] @ 2x2(a,b) : P(max),R", "f32[8] @ 2x2(a,b) : R,P(min)"}, {"f32[8]"}),
            "P(max),R | R,P(min)>R,R -> P(max),R");
}

TEST(Propagate, CastsAreLinearAmongFloatingTypes) {
  const auto cast = [](const char* x, const char* out) { return decided("aten::_to_copy", {x}, {out}); };
  EXPECT_EQ(cast("f32[8] @ 2(x) : P", "bf16[8]"), "P(sum) -> P(sum)");
  EXPECT_EQ(cast("f32[8] @ 2(x) : P", "c64[8]"), "P(sum) -> P(sum)");
  EXPECT_EQ(cast("f32[8] @ 2(x) : P", "i64[8]"), "P(sum)>S(0) -> S(0)");
  EXPECT_EQ(cast("f32[8] @ 2(x) : P", "bool[8]"), "P(sum)>S(0) -> S(0)");
  EXPECT_EQ(cast("i32[8] @ 2(x) : P", "i64[8]"), "P(sum)>S(0) -> S(0)");
  EXPECT_EQ(cast("f64[8] @ 2(x) : P(max)", "f32[8]"), "P(max) -> P(max)");
  EXPECT_EQ(cast("f32[8] @ 2(x) : S(0)", "i64[8]"), "S(0) -> S(0)");
  EXPECT_EQ(decided("aten::clone", {"i32[8] @ 2(x) : P(product)"}, {"i32[8]"}), "P(product) -> P(product)");
}

TEST(Propagate, BroadcastDimsAreAbsent) {
  EXPECT_EQ(decided("aten::mul.Tensor", {"f32[8,6] @ 2(x) : S(1)", "f32[8,1] @ 2(x) : R"}, {"f32[8,6]"}),
            "S(1) | R -> S(1)");
  EXPECT_EQ(decided("aten::mul.Tensor", {"f32[8,6] @ 2(x) : S(1)", "f32[6] @ 2(x) : S(0)"}, {"f32[8,6]"}),
            "S(1) | S(0) -> S(1)");
  EXPECT_EQ(decided("aten::mul.Tensor", {"f32[8,6] @ 2(x) : S(0)", "f32[1,6] @ 2(x) : S(0)"}, {"f32[8,6]"}),
            "S(0) | S(0)>R -> S(0)");
  EXPECT_EQ(decided("aten::mul.Tensor", {"f32[1,6] @ 2(x) : S(0)", "f32[1,6] @ 2(x) : S(0)"}, {"f32[1,6]"}),
            "S(0) | S(0) -> S(0)");
}

TEST(Propagate, InPlaceKeepsTheWholeSpecOfSelf) {
  const auto add = [](const char* a, const char* b) {
    return decided("aten::add_.Tensor", {a, b, num(1)}, {"f32[8,6]"});
  };
  EXPECT_EQ(add("f32[8,6] @ 2(x) : S(0)", "f32[8,6] @ 2(x) : S(1)"), "S(0) | S(1)>S(0) -> S(0)");
  EXPECT_EQ(add("f32[8,6] @ 2(x) : R", "f32[8,6] @ 2(x) : P"), "R | P(sum)>R -> R");
  EXPECT_EQ(add("f32[8,6] @ 2(x) : P", "f32[6] @ 2(x) : R"), "P(sum) | R>P(sum) -> P(sum)");
  EXPECT_EQ(add("f32[8,6] @ 2(x) : P", "f32[6] @ 2(x) : S(0)"), "P(sum) | S(0)>P(sum) -> P(sum)");
  EXPECT_EQ(decided("aten::mul_.Tensor", {"f32[8] @ 2(x) : R", "f32[8] @ 2(x) : P"}, {"f32[8]"}), "R | P(sum)>R -> R");
  EXPECT_EQ(decided("aten::copy_", {"f32[8] @ 2(x) : P", "f32[8] @ 2(x) : R", flag(false)}, {"f32[8]"}),
            "P(sum) | R>P(sum) -> P(sum)");
  EXPECT_EQ(decided("aten::relu_", {"f32[8] @ 2(x) : P"}, {"f32[8]"}),
            "no: no way to run it in place keeps f32[8] @ 2(x) : P(sum); the operands are f32[8] @ 2(x) : P(sum)");
  // The other operand may hold an infinity: self is reduced first, which in place is not possible.
  EXPECT_EQ(decided("aten::mul_.Tensor", {"f32[8] @ 2(x) : P", "f32[8] @ 2(x) : P"}, {"f32[8]"}),
            "no: no way to run it in place keeps f32[8] @ 2(x) : P(sum); the operands are f32[8] @ 2(x) : P(sum), "
            "f32[8] @ 2(x) : P(sum)");
  EXPECT_EQ(decided("aten::mul_.Tensor", {"i64[8] @ 2(x) : P", "i64[8] @ 2(x) : P"}, {"i64[8]"}),
            "P(sum) | P(sum)>R -> P(sum)");
}

// 0 * inf is not 0: a sum is scaled unreduced by what is known to be finite in the type of the result alone.
TEST(Propagate, SumsAreScaledByFiniteFactors) {
  const double inf = std::numeric_limits<double>::infinity();
  const auto mul = [](const char* x, double factor) {
    const std::string type(x, 3);
    const std::string tensor = decided("aten::mul.Tensor", {x, Wrapped{num(factor)}}, {type + "[8]"});
    const std::string scalar = decided("aten::mul.Scalar", {x, num(factor)}, {type + "[8]"});
    EXPECT_EQ(tensor.substr(0, 7), scalar.substr(0, 7));
    return scalar;
  };
  const auto div = [](const char* x, double factor) {
    return decided("aten::div.Scalar", {x, num(factor)}, {std::string(x, 3) + "[8]"});
  };
  for (const double factor : {2.0, -3.5, 0.0, 1e30, 1e-42}) {
    EXPECT_EQ(mul("f32[8] @ 2(x) : P", factor), "P(sum) -> P(sum)");
  }
  for (const double factor : {inf, -inf, std::nan(""), 1e39}) {
    EXPECT_EQ(mul("f32[8] @ 2(x) : P", factor), "P(sum)>S(0) -> S(0)");
  }
  EXPECT_EQ(mul("f64[8] @ 2(x) : P", 1e39), "P(sum) -> P(sum)");
  EXPECT_EQ(mul("f16[8] @ 2(x) : P", 1e5), "P(sum)>S(0) -> S(0)");
  EXPECT_EQ(mul("f16[8] @ 2(x) : P", 1e4), "P(sum) -> P(sum)");
  EXPECT_EQ(div("f32[8] @ 2(x) : P", 1e-30), "P(sum) -> P(sum)");
  for (const double factor : {0.0, 1e-42, inf}) EXPECT_EQ(div("f32[8] @ 2(x) : P", factor), "P(sum)>S(0) -> S(0)");
  // What is not known may be infinite, or zero; integers are finite.
  EXPECT_EQ(decided("aten::mul.Tensor", {"f32[8] @ 2(x) : P", Wrapped{StaticArg::none()}}, {"f32[8]"}),
            "P(sum)>S(0) | number -> S(0)");
  EXPECT_EQ(decided("aten::mul.Tensor", {"f32[8] @ 2(x) : P", "f32[8] @ 2(x) : R"}, {"f32[8]"}), "P(sum)>R | R -> R");
  EXPECT_EQ(decided("aten::mul.Tensor", {"f32[8] @ 2(x) : P", "i64[8] @ 2(x) : R"}, {"f32[8]"}),
            "P(sum) | R -> P(sum)");
  EXPECT_EQ(decided("aten::div.Tensor", {"f32[8] @ 2(x) : P", "i64[8] @ 2(x) : R"}, {"f32[8]"}), "P(sum)>R | R -> R");
  EXPECT_EQ(decided("aten::add.Tensor", {"f32[8] @ 2(x) : P", "f32[8] @ 2(x) : P", num(inf)}, {"f32[8]"}),
            "P(sum)>S(0) | P(sum)>S(0) -> S(0)");
}

// The weights of an average are fractions.
TEST(Propagate, SumsOfIntegersAreReducedBeforeTheyAreAveraged) {
  const std::vector<std::string> out = {"i64[1,2,2,2]"};
  EXPECT_EQ(decided("aten::_adaptive_avg_pool2d", {"i64[1,2,4,4] @ 2(x) : P", ints({2, 2})}, out),
            "P(sum)>S(1) -> S(1)");
  EXPECT_EQ(decided("aten::_adaptive_avg_pool2d", {"f32[1,2,4,4] @ 2(x) : P", ints({2, 2})}, {"f32[1,2,2,2]"}),
            "P(sum) -> P(sum)");
}

// Nothing to be reduced, and yet a result: the operator itself knows what it is.
TEST(Propagate, NothingIsReducedOnTheFullTensor) {
  EXPECT_EQ(decided("aten::max", {"f32[0,3] @ 2(x) : S(0)"}, {"f32[]"}), "S(0)>R -> R");
  EXPECT_EQ(decided("aten::sum", {"f32[4,0] @ 2(x) : S(0)", StaticArg::none()}, {"f32[]"}), "S(0)>R -> R");
  EXPECT_EQ(decided("aten::sum.dim_IntList", {"f32[4,0] @ 2(x) : S(0)", ints({1}), flag(false)}, {"f32[4]"}),
            "S(0) -> S(0)");
}

TEST(Propagate, OutIsLeftWhereItLies) {
  EXPECT_EQ(
      decided("aten::mm.out", {"f32[8,6] @ 2(x) : S(0)", "f32[6,4] @ 2(x) : R", "f32[8,4] @ 2(x) : R"}, {"f32[8,4]"}),
      "S(0) | R | R -> S(0)");
  // Where something must move anyway, what the result then takes to get there counts.
  EXPECT_EQ(decided("aten::exp.out", {"f32[512,512] @ 2(x) : P", "f32[512,512] @ 2(x) : S(1)"}, {"f32[512,512]"}),
            "P(sum)>S(1) | S(1) -> S(1)");
}

TEST(Propagate, Reductions) {
  const auto sum = [](const char* x, Dims dims, bool keep, const char* out) {
    return decided("aten::sum.dim_IntList", {x, ints(std::move(dims)), flag(keep), kNone}, {out});
  };
  EXPECT_EQ(sum("f32[8,6] @ 2(x) : S(0)", {0}, false, "f32[6]"), "S(0) -> P(sum); empty gives sum");
  EXPECT_EQ(sum("f32[8,6] @ 2(x) : S(0)", {1}, false, "f32[8]"), "S(0) -> S(0)");
  EXPECT_EQ(sum("f32[8,6] @ 2(x) : S(1)", {0}, false, "f32[6]"), "S(1) -> S(0)");
  EXPECT_EQ(sum("f32[8,6] @ 2(x) : S(1)", {0}, true, "f32[1,6]"), "S(1) -> S(1)");
  EXPECT_EQ(sum("f32[8,6] @ 2x2(a,b) : S(1),P", {-1}, true, "f32[8,1]"),
            "S(1),P(sum) -> P(sum),P(sum); empty gives sum");
  EXPECT_EQ(sum("f32[8,6] @ 2x2(a,b) : S(0),S(1)", {}, false, "f32[]"), "S(0),S(1) -> P(sum),P(sum); empty gives sum");
  EXPECT_EQ(decided("aten::sum", {"f32[8,6] @ 2(x) : S(0)", kNone}, {"f32[]"}), "S(0) -> P(sum); empty gives sum");
  EXPECT_EQ(decided("aten::mean.dim", {"f32[8,7] @ 2(x) : S(1)", ints({1}), flag(false), kNone}, {"f32[8]"}),
            "S(1) -> P(sum); runs aten::sum.dim_IntList; over 7; empty gives sum");
  EXPECT_EQ(decided("aten::mean.dim", {"f32[8,7] @ 2(x) : S(0)", ints({1}), flag(false), kNone}, {"f32[8]"}),
            "S(0) -> S(0)");
  EXPECT_EQ(decided("aten::mean", {"f32[8,7] @ 2(x) : P", kNone}, {"f32[]"}), "P(sum) -> P(sum)");
  EXPECT_EQ(decided("aten::amax", {"f32[8,7] @ 2x2(a,b) : S(1),P(max)", ints({1}), flag(false)}, {"f32[8]"}),
            "S(1),P(max) -> P(max),P(max); empty gives max");
  EXPECT_EQ(decided("aten::amax", {"f32[8] @ 2(a) : P(sum)", ints({0}), flag(false)}, {"f32[]"}), "P(sum)>R -> R");
  EXPECT_EQ(decided("aten::min", {"i64[8,7] @ 2(a) : S(1)"}, {"i64[]"}), "S(1) -> P(min); empty gives min");
  EXPECT_EQ(decided("aten::prod", {"f32[8,7] @ 2(a) : S(1)", kNone}, {"f32[]"}),
            "S(1) -> P(product); empty gives product");
  EXPECT_EQ(decided("aten::any.dim", {"bool[8,7] @ 2(a) : S(1)", i(1), flag(false)}, {"bool[8]"}),
            "S(1) -> P(or); empty gives or");
  EXPECT_EQ(decided("aten::all", {"bool[8,7] @ 2(a) : S(0)"}, {"bool[]"}), "S(0) -> P(and); empty gives and");
  EXPECT_EQ(decided("aten::max.dim", {"f32[8,7] @ 2(a) : S(0)", i(1), flag(false)}, {"f32[8]", "i64[8]"}),
            "S(0) -> S(0) | S(0)");
  EXPECT_EQ(decided("aten::logsumexp", {"f32[8,7] @ 2(a) : S(1)", ints({1}), flag(true)}, {"f32[8,1]"}),
            "S(1)>S(0) -> S(0)");
  EXPECT_EQ(decided("aten::linalg_vector_norm", {"f32[8] @ 2(a) : S(0)", num(2), kNone, flag(false), kNone}, {"f32[]"}),
            "S(0)>R -> R");
}

TEST(Propagate, SoftmaxAndLayerNorm) {
  EXPECT_EQ(decided("aten::_softmax", {"f32[15,8] @ 2(x) : S(0)", i(-1), flag(false)}, {"f32[15,8]"}), "S(0) -> S(0)");
  EXPECT_EQ(decided("aten::_softmax", {"f32[15,8] @ 2(x) : S(1)", i(-1), flag(false)}, {"f32[15,8]"}),
            "S(1)>S(0) -> S(0)");
  EXPECT_EQ(
      decided("aten::_log_softmax_backward_data",
              {"f32[15,8] @ 2(x) : P", "f32[15,8] @ 2(x) : R", i(1), StaticArg::dtype(DType::kF32)}, {"f32[15,8]"}),
      "P(sum) | R -> P(sum)");
  EXPECT_EQ(decided("aten::native_layer_norm",
                    {"f32[2,15,8] @ 2x2(a,b) : S(0),S(1)", ints({8}), "f32[8] @ 2x2(a,b) : R,R",
                     "f32[8] @ 2x2(a,b) : R,R", num(1e-5)},
                    {"f32[2,15,8]", "f32[2,15,1]", "f32[2,15,1]"}),
            "S(0),S(1) | R,R | R,R -> S(0),S(1) | S(0),S(1) | S(0),S(1)");
  const auto backward = [](const char* g, const char* x, const char* stat) {
    return decided("aten::native_layer_norm_backward",
                   {g, x, ints({8}), stat, stat, "f32[8] @ 2(x) : R", Absent{}, ints({1, 1, 0})},
                   {"f32[15,8]", "f32[8]", "-"});
  };
  EXPECT_EQ(backward("f32[15,8] @ 2(x) : S(0)", "f32[15,8] @ 2(x) : S(0)", "f32[15,1] @ 2(x) : S(0)"),
            "S(0) | S(0) | S(0) | S(0) | R -> S(0) | P(sum) | -");
  EXPECT_EQ(backward("f32[15,8] @ 2(x) : P", "f32[15,8] @ 2(x) : R", "f32[15,1] @ 2(x) : R"),
            "P(sum) | R | R | R | R -> P(sum) | P(sum) | -");
}

TEST(Propagate, Losses) {
  const auto mse = [](std::int64_t reduction, const char* out) {
    return decided("aten::mse_loss", {"f32[15,8] @ 2(x) : S(0)", "f32[15,8] @ 2(x) : S(0)", i(reduction)}, {out});
  };
  EXPECT_EQ(mse(0, "f32[15,8]"), "S(0) | S(0) -> S(0)");
  EXPECT_EQ(mse(1, "f32[]"), "S(0) | S(0) -> P(sum); over 120; empty gives sum");
  EXPECT_EQ(mse(2, "f32[]"), "S(0) | S(0) -> P(sum); empty gives sum");
  const OpCall call =
      make("aten::mse_loss_backward", {"f32[] @ 2(x) : R", "f32[15,8] @ 2(x) : S(0)", "f32[15,8] @ 2(x) : S(0)", i(1)},
           {"f32[15,8]"});
  const auto decision = decide_call(call);
  EXPECT_EQ(shown(call, decision), "R | S(0) | S(0) -> S(0); over 120");
  ASSERT_TRUE(decision);
  EXPECT_EQ(decision->rewrites, (std::vector<Rewrite>{{3, Rewrite::Kind::kValue, 0, i(2)}}));
  const auto nll = [](std::int64_t reduction, const char* out) {
    return decided("aten::nll_loss_forward",
                   {"f32[6,8] @ 2(x) : S(0)", "i64[6] @ 2(x) : S(0)", Absent{}, i(reduction), i(-100)}, {out, "f32[]"});
  };
  EXPECT_EQ(nll(1, "f32[]"), "S(0)>R | S(0)>R -> R | R");
  EXPECT_EQ(nll(2, "f32[]"), "S(0) | S(0) -> P(sum) | P(sum); empty gives sum");
  EXPECT_EQ(decided("aten::nll_loss_backward",
                    {"f32[] @ 2(x) : R", "f32[6,8] @ 2(x) : S(0)", "i64[6] @ 2(x) : S(0)", Absent{}, i(1), i(-100),
                     "f32[] @ 2(x) : R"},
                    {"f32[6,8]"}),
            "R | S(0) | S(0) | R -> S(0)");
}

// Dims that must be whole may be cut all the same where an algorithm is cheaper than moving the operand.
TEST(Propagate, AlgorithmsCompeteByCost) {
  const auto softmax = [](const char* x, const char* out) {
    return decided("aten::_softmax", {x, i(1), flag(false)}, {out});
  };
  EXPECT_EQ(softmax("f32[512,32768] @ 8(x) : S(1)", "f32[512,32768]"), "S(1) -> S(1); softmax over 0");
  EXPECT_EQ(softmax("f32[512,32768] @ 8(x) : S(0)", "f32[512,32768]"), "S(0) -> S(0)");
  EXPECT_EQ(softmax("f32[512,32768] @ 2x4(a,b) : S(0),S(1)", "f32[512,32768]"),
            "S(0),S(1) -> S(0),S(1); softmax over 1");
  EXPECT_EQ(softmax("f32[512,32768] @ 2x4(a,b) : S(1)[1],S(1)[0]", "f32[512,32768]"),
            "S(1)[1],S(1)[0] -> S(1)[1],S(1)[0]; softmax over 0,1");
  // Slices that are as large as what moving brings.
  EXPECT_EQ(softmax("f32[65536,8] @ 8(x) : S(1)", "f32[65536,8]"), "S(1)>S(0) -> S(0)");
  EXPECT_EQ(softmax("f32[15,8] @ 2(x) : S(1)", "f32[15,8]"), "S(1)>S(0) -> S(0)");
  // On one rank nothing needs to be said.
  EXPECT_EQ(softmax("f32[512,32768] @ 1(x) : S(1)", "f32[512,32768]"), "S(1)>R -> R");
  // An algorithm of a linear operator is linear.
  EXPECT_EQ(decided("aten::_log_softmax_backward_data",
                    {"f32[512,32768] @ 2x4(a,b) : P,S(1)", "f32[512,32768] @ 2x4(a,b) : R,S(1)", i(1),
                     StaticArg::dtype(DType::kF32)},
                    {"f32[512,32768]"}),
            "P(sum),S(1) | R,S(1) -> P(sum),S(1); log_softmax_backward over 1");
  // Results that lack the dim come out reduced.
  EXPECT_EQ(decided("aten::max.dim", {"f32[512,32768] @ 4(x) : S(1)", i(1), flag(false)}, {"f32[512]", "i64[512]"}),
            "S(1) -> R | R; max_dim over 0");
  EXPECT_EQ(
      decided("aten::linalg_vector_norm", {"f32[1048576] @ 4(x) : S(0)", num(2), kNone, flag(false), kNone}, {"f32[]"}),
      "S(0) -> R; vector_norm over 0");
  EXPECT_EQ(decided("aten::topk", {"f32[512,32768] @ 4(x) : S(1)", i(8), i(1), flag(true), flag(true)},
                    {"f32[512,8]", "i64[512,8]"}),
            "S(1) -> R | R; topk over 0");
  EXPECT_EQ(decided("aten::native_layer_norm",
                    {"f32[512,32768] @ 2x4(a,b) : S(0),S(1)", ints({32768}), "f32[32768] @ 2x4(a,b) : R,S(0)",
                     "f32[32768] @ 2x4(a,b) : R,R", num(1e-5)},
                    {"f32[512,32768]", "f32[512,1]", "f32[512,1]"}),
            "S(0),S(1) | R,S(0) | R,R>R,S(0) -> S(0),S(1) | S(0),R | S(0),R; layer_norm over 1");
  EXPECT_EQ(decided("aten::cumsum", {"f32[512,32768] @ 4(x) : S(1)", i(1), kNone}, {"f32[512,32768]"}),
            "S(1) -> S(1); cumsum over 0");
  // One run on every rank, or not at all.
  EXPECT_EQ(decided("aten::cumsum", {"f32[512,(2*16384)] @ 4(x) : S(1.1)", i(1), kNone}, {"f32[512,32768]"}),
            "S(1.1)>S(0) -> S(0)");
  EXPECT_EQ(decided("aten::cumsum_", {"f32[6,8] @ 2(x) : S(1)", i(1), kNone}, {"f32[6,8]"}),
            "S(1) -> S(1); cumsum over 0");
}

// What is sorted must be whole, and so another dim is cut; all is gathered only where there is none.
TEST(Propagate, SortsMoveTheCutToAnotherDim) {
  const auto in = [](const char* name, const char* x, std::vector<Arg> more, const char* values, const char* places) {
    std::vector<Arg> args = {x};
    args.insert(args.end(), more.begin(), more.end());
    return decided(name, args, {values, places});
  };
  const char *x = "f32[1024,512] @ 4(x) : S(1)", *all = "f32[1024,512]", *places = "i64[1024,512]";
  const char *row = "f32[1024]", *row_places = "i64[1024]";
  const std::string moved = "S(1)>S(0) -> S(0) | S(0)";
  EXPECT_EQ(in("aten::sort", x, {i(1), flag(false)}, all, places), moved);
  EXPECT_EQ(in("aten::sort", x, {i(-1), flag(false)}, all, places), moved);
  EXPECT_EQ(in("aten::sort.stable", x, {flag(true), i(1), flag(false)}, all, places), moved);
  EXPECT_EQ(in("aten::kthvalue", x, {i(3), i(1), flag(false)}, row, row_places), moved);
  EXPECT_EQ(in("aten::median.dim", x, {i(1), flag(false)}, row, row_places), moved);
  EXPECT_EQ(in("aten::nanmedian.dim", x, {i(1), flag(false)}, row, row_places), moved);
  EXPECT_EQ(in("aten::mode", x, {i(1), flag(false)}, row, row_places), moved);
  // As it lies along another dim.
  EXPECT_EQ(in("aten::sort", x, {i(0), flag(false)}, all, places), "S(1) -> S(1) | S(1)");
  EXPECT_EQ(in("aten::sort", "f32[1024,512] @ 2x2(a,b) : S(0),S(1)", {i(1), flag(false)}, all, places),
            "S(0),S(1)>S(0),S(0) -> S(0),S(0) | S(0),S(0)");
  // Few of many are merged.
  EXPECT_EQ(in("aten::topk", "f32[512,32768] @ 4(x) : S(1)", {i(8), i(1), flag(true), flag(true)}, "f32[512,8]",
               "i64[512,8]"),
            "S(1) -> R | R; topk over 0");
  // There is no other dim.
  EXPECT_EQ(in("aten::sort", "f32[65536] @ 4(x) : S(0)", {i(0), flag(false)}, "f32[65536]", "i64[65536]"),
            "S(0)>R -> R | R");
  EXPECT_EQ(decided("aten::median", {x}, {"f32[]"}), "S(1)>R -> R");
}

TEST(Propagate, ConvolutionsOverCutDimsFetchWhatTheirWindowsRead) {
  const auto forward = [](const char* x, const char* weight, const char* out, Dims stride = {1, 1},
                          bool transposed = false) {
    return decided("aten::convolution",
                   {x, weight, Absent{}, ints(std::move(stride)), ints({1, 1}), ints({1, 1}), flag(transposed),
                    ints({0, 0}), i(1)},
                   {out});
  };
  const char* weight = "f32[16,16,3,3] @ 4(x) : R";
  EXPECT_EQ(forward("f32[8,16,64,64] @ 4(x) : S(2)", weight, "f32[8,16,64,64]"),
            "S(2) | R -> S(2); convolution over 0");
  EXPECT_EQ(forward("f32[8,16,64,64] @ 4(x) : S(3)", weight, "f32[8,16,32,32]", {2, 2}),
            "S(3) | R -> S(3); convolution over 0");
  // As it lies, where it can be.
  EXPECT_EQ(forward("f32[8,16,64,64] @ 4(x) : S(0)", weight, "f32[8,16,64,64]"), "S(0) | R -> S(0)");
  EXPECT_EQ(forward("f32[8,16,64,64] @ 2x2(a,b) : S(0),S(2)", "f32[16,16,3,3] @ 2x2(a,b) : R,R", "f32[8,16,64,64]"),
            "S(0),S(2) | R,R -> S(0),S(2); convolution over 1");
  EXPECT_EQ(forward("f32[8,16,64,64] @ 2x2(a,b) : R,S(2)", "f32[16,16,3,3] @ 2x2(a,b) : S(0),R", "f32[8,16,64,64]"),
            "R,S(2) | S(0),R -> S(1),S(2); convolution over 1");
  EXPECT_EQ(forward("f32[8,16,64,64] @ 2x2(a,b) : S(3),S(2)", "f32[16,16,3,3] @ 2x2(a,b) : R,R", "f32[8,16,64,64]"),
            "S(3),S(2) | R,R -> S(3),S(2); convolution over 0,1");
  EXPECT_EQ(forward("f32[8,16,64,64] @ 2x2(a,b) : S(2)[1],S(2)[0]", "f32[16,16,3,3] @ 2x2(a,b) : R,R",
                    "f32[8,16,32,32]", {2, 2}),
            "S(2)[1],S(2)[0] | R,R -> S(2)[1],S(2)[0]; convolution over 0,1");
  EXPECT_EQ(forward("f32[8,16,64,64] @ 2x2(a,b) : P,S(2)", "f32[16,16,3,3] @ 2x2(a,b) : R,R", "f32[8,16,64,64]"),
            "P(sum),S(2) | R,R -> P(sum),S(2); convolution over 1");
  // One run on every rank, or not at all; no windows slide over what is transposed.
  EXPECT_EQ(forward("f32[8,16,(2*32),64] @ 4(x) : S(2.1)", weight, "f32[8,16,64,64]"), "S(2.1)>S(0) | R -> S(0)");
  EXPECT_EQ(forward("f32[8,16,64,64] @ 4(x) : S(2)", weight, "f32[8,16,64,64]", {1, 1}, true), "S(2)>S(0) | R -> S(0)");
  // Rows that are as wide as what they read of others are moved instead.
  EXPECT_EQ(forward("f32[512,1024,1,8] @ 8(x) : S(3)", "f32[16,1024,3,129] @ 8(x) : R", "f32[512,16,1,8]"),
            "S(3)>S(0) | R -> S(0)");
  // The gradients of weight and bias are sums.
  EXPECT_EQ(decided("aten::convolution_backward",
                    {"f32[8,16,32,32] @ 2x2(a,b) : S(0),S(2)", "f32[8,16,64,64] @ 2x2(a,b) : S(0),S(2)",
                     "f32[16,16,3,3] @ 2x2(a,b) : R,R", ints({16}), ints({2, 2}), ints({1, 1}), ints({1, 1}),
                     flag(false), ints({0, 0}), i(1), ints({1, 1, 1})},
                    {"f32[8,16,64,64]", "f32[16,16,3,3]", "f32[16]"}),
            "S(0),S(2) | S(0),S(2) | R,R -> S(0),S(2) | P(sum),P(sum) | P(sum),P(sum); empty gives sum; "
            "convolution_backward over 1");
}

TEST(Propagate, LossesOfCutClassesAndBatches) {
  const auto nll = [](const char* x, const char* target, std::int64_t reduction, const char* out) {
    return decided("aten::nll_loss_forward", {x, target, Absent{}, i(reduction), i(-100)}, {out, "f32[]"});
  };
  const char* classes = "f32[512,32768] @ 2x4(a,b) : S(0),S(1)";
  EXPECT_EQ(nll(classes, "i64[512] @ 2x4(a,b) : S(0),R", 1, "f32[]"),
            "S(0),S(1) | S(0),R -> R,R | R,R; nll_loss over 0,1");
  EXPECT_EQ(nll(classes, "i64[512] @ 2x4(a,b) : S(0),R", 2, "f32[]"),
            "S(0),S(1) | S(0),R -> P(sum),R | P(sum),R; empty gives sum; nll_loss over 1");
  EXPECT_EQ(nll(classes, "i64[512] @ 2x4(a,b) : S(0),R", 0, "f32[512]"),
            "S(0),S(1) | S(0),R -> S(0),R | P(sum),R; empty gives sum; nll_loss over 1");
  EXPECT_EQ(decided("aten::nll_loss_backward",
                    {"f32[] @ 2x4(a,b) : R,R", classes, "i64[512] @ 2x4(a,b) : S(0),R", Absent{}, i(1), i(-100),
                     "f32[] @ 2x4(a,b) : R,R"},
                    {"f32[512,32768]"}),
            "R,R | S(0),S(1) | S(0),R | R,R -> S(0),S(1); nll_loss_backward over 1");
}

// A kernel that knows where its part lies needs no choice.
TEST(Propagate, LookingUpWhereTheTableIsCut) {
  const auto index_select = [](const char* x) {
    return decided("aten::index_select", {x, i(0), "i64[9] @ 2x2(a,b) : R,R"}, {"f32[9,6]"});
  };
  EXPECT_EQ(index_select("f32[8,6] @ 2x2(a,b) : S(0),S(1)"), "S(0),S(1) | R,R -> P(sum),S(1); index_select over 0");
  EXPECT_EQ(index_select("f32[8,6] @ 2x2(a,b) : S(0),P"), "S(0),P(sum) | R,R -> P(sum),P(sum); index_select over 0");
  EXPECT_EQ(decided("aten::index_add_",
                    {"f32[8,6] @ 2(x) : S(0)", i(0), "i64[9] @ 2(x) : R", "f32[9,6] @ 2(x) : R", num(1)}, {"f32[8,6]"}),
            "S(0) | R | R -> S(0); index_add over 0");
  // As many indices as places do not make them the same dim.
  EXPECT_EQ(decided("aten::gather", {"f32[8] @ 2(x) : S(0)", i(0), "i64[8] @ 2(x) : R", flag(false)}, {"f32[8]"}),
            "S(0) | R -> P(sum); gather over 0");
  // There is no sum of bools.
  EXPECT_EQ(decided("aten::gather", {"bool[8] @ 2(x) : S(0)", i(0), "i64[8] @ 2(x) : R", flag(false)}, {"bool[8]"}),
            "S(0)>R | R -> R");
}

TEST(Propagate, LookingUpAndJoining) {
  const auto embedding = [](const char* w, const char* ids) {
    return decided("aten::embedding", {w, ids}, {"f32[4,3,6]"});
  };
  EXPECT_EQ(embedding("f32[50,6] @ 2(x) : R", "i64[4,3] @ 2(x) : S(0)"), "R | S(0) -> S(0)");
  EXPECT_EQ(embedding("f32[50,6] @ 2(x) : S(1)", "i64[4,3] @ 2(x) : R"), "S(1) | R -> S(2)");
  EXPECT_EQ(embedding("f32[50,6] @ 2(x) : S(0)", "i64[4,3] @ 2(x) : R"), "S(0) | R -> P(sum); embedding over 0");
  const auto backward = [](const char* g, const char* ids, bool by_frequency) {
    return decided("aten::embedding_dense_backward", {g, ids, i(50), i(-1), flag(by_frequency)}, {"f32[50,6]"});
  };
  EXPECT_EQ(backward("f32[4,3,6] @ 2(x) : S(0)", "i64[4,3] @ 2(x) : S(0)", false), "S(0) | S(0) -> P(sum)");
  EXPECT_EQ(backward("f32[4,3,6] @ 2(x) : S(0)", "i64[4,3] @ 2(x) : S(0)", true), "S(0)>S(2) | S(0)>R -> S(1)");
  EXPECT_EQ(decided("aten::cat", {List{"f32[15,8] @ 2(x) : S(1)", "f32[3,8] @ 2(x) : S(1)"}, i(0)}, {"f32[18,8]"}),
            "S(1) | S(1) -> S(1)");
  EXPECT_EQ(decided("aten::cat", {List{"f32[15,8] @ 2(x) : P", "f32[3,8] @ 2(x) : P"}, i(0)}, {"f32[18,8]"}),
            "P(sum) | P(sum) -> P(sum)");
  EXPECT_EQ(decided("aten::stack", {List{"f32[5,8] @ 2(x) : S(1)", "f32[5,8] @ 2(x) : S(1)"}, i(1)}, {"f32[5,2,8]"}),
            "S(1) | S(1) -> S(2)");
  EXPECT_EQ(
      decided("aten::gather", {"f32[5,8] @ 2(x) : S(0)", i(1), "i64[5,3] @ 2(x) : S(0)", flag(false)}, {"f32[5,3]"}),
      "S(0) | S(0) -> S(0)");
  // Fewer rows of indices than of values: they do not cut alike.
  EXPECT_EQ(decided("aten::gather", {"f32[5,8] @ 2(x) : R", i(1), "i64[3,3] @ 2(x) : S(0)", flag(false)}, {"f32[3,3]"}),
            "R | S(0)>R -> R");
}

TEST(Propagate, Factories) {
  EXPECT_EQ(decided("aten::zeros_like", {"f32[5,8] @ 2x2(a,b) : S(0),P"}, {"f32[5,8]"}), "S(0),P(sum) -> S(0),R");
  EXPECT_EQ(decided("aten::new_zeros", {"f32[5,8] @ 2x2(a,b) : S(0),P", ints({3})}, {"f32[3]"}), "S(0),P(sum) -> R,R");
  EXPECT_EQ(decided("aten::_local_scalar_dense", {"f32[] @ 2(x) : P"}, {}), "P(sum)>R -> ");
  EXPECT_EQ(decided("aten::select_backward", {"f32[8] @ 2(x) : S(0)", ints({5, 8}), i(0), i(2)}, {"f32[5,8]"}),
            "S(0) -> S(1)");
}

TEST(Propagate, RefusesTwoMeshesAndMisfits) {
  EXPECT_EQ(decided("aten::mul.Tensor", {"f32[8] @ 2(x) : R", "f32[8] @ 4(y) : R"}, {"f32[8]"}),
            "no: the operands are on different meshes: f32[8] @ 2(x) : R and f32[8] @ 4(y) : R");
  EXPECT_EQ(decided("aten::exp", {Wrapped{}}, {"f32[]"}), "no: no operand is distributed");
  EXPECT_EQ(decided("aten::mm", {"f32[8] @ 2(x) : R", "f32[8,2] @ 2(x) : R"}, {"f32[2]"}),
            "no: the row `aten::mm: mk,kn->mn linear(0) linear(1)` does not fit the call: operand 0 is f32[8] @ 2(x) : "
            "R");
}

// A row with several patterns: the first that fits the number of dims.
TEST(Propagate, TakesThePatternThatFits) {
  const auto product = [](const char* a, const char* b, const char* result) {
    return decided("aten::_grouped_mm", {a, b, "i32[3] @ 2(x) : R", Absent{}, StaticArg::none()}, {result});
  };
  const std::string way = "; grouped_mm over 0";
  EXPECT_EQ(product("f32[4,8,6] @ 2(x) : S(0)", "f32[4,6,5] @ 2(x) : S(0)", "f32[4,8,5]"),
            "S(0) | S(0) | R -> S(0)" + way);
  EXPECT_EQ(product("f32[8,6] @ 2(x) : R", "f32[3,6,5] @ 2(x) : S(2)", "f32[8,5]"), "R | S(2) | R -> S(1)" + way);
  EXPECT_EQ(product("f32[8,6] @ 2(x) : S(1)", "f32[3,6,5] @ 2(x) : S(1)", "f32[8,5]"),
            "S(1) | S(1) | R -> P(sum)" + way);
  EXPECT_EQ(product("f32[8,6] @ 2(x) : S(0)", "f32[6,5] @ 2(x) : R", "f32[3,8,5]"), "S(0) | R | R -> S(1)" + way);
  EXPECT_EQ(product("f32[3,8,6] @ 2(x) : S(1)", "f32[6,5] @ 2(x) : R", "f32[8,5]"), "S(1) | R | R -> S(0)" + way);
  EXPECT_EQ(product("f32[8,6] @ 2(x) : P", "f32[3,6,5] @ 2(x) : R", "f32[8,5]"), "P(sum) | R | R -> P(sum)");
  // Rows that are in groups are whole.
  EXPECT_EQ(product("f32[8,6] @ 2(x) : S(0)", "f32[3,6,5] @ 2(x) : R", "f32[8,5]"), "S(0)>R | R | R -> R");
}

// Scales of one element, of rows and columns, or of blocks.
TEST(Propagate, ScaledProducts) {
  const auto product = [](const char* a, const char* b, const char* scale_a, const char* scale_b) {
    return decided("aten::_scaled_mm", {a, b, scale_a, scale_b, Absent{}, Absent{}, StaticArg::none(), flag(false)},
                   {"bf16[32,48]"});
  };
  // A bias is added once.
  EXPECT_EQ(decided("aten::_scaled_mm",
                    {"f8e4m3[32,64] @ 2(x) : S(1)", "f8e4m3[64,48] @ 2(x) : S(0)", "f32[] @ 2(x) : R",
                     "f32[] @ 2(x) : R", "bf16[48] @ 2(x) : R", Absent{}, StaticArg::none(), flag(false)},
                    {"bf16[32,48]"}),
            "S(1) | S(0) | R | R | R>P(sum) -> P(sum); scaled_mm over 0");
  const char* one = "f32[] @ 2(x) : R";
  EXPECT_EQ(product("f8e4m3[32,64] @ 2(x) : S(0)", "f8e4m3[64,48] @ 2(x) : R", one, one), "S(0) | R | R | R -> S(0)");
  EXPECT_EQ(product("f8e4m3[32,64] @ 2(x) : S(1)", "f8e4m3[64,48] @ 2(x) : S(0)", one, one),
            "S(1) | S(0) | R | R -> P(sum); scaled_mm over 0");
  EXPECT_EQ(product("f8e4m3[32,64] @ 2(x) : S(0)", "f8e4m3[64,48] @ 2(x) : R", "f32[32,1] @ 2(x) : S(0)",
                    "f32[1,48] @ 2(x) : R"),
            "S(0) | R | S(0) | R -> S(0)");
  // Blocks along the summed dim: it stays whole.
  EXPECT_EQ(product("f8e4m3[32,64] @ 2(x) : S(1)", "f8e4m3[64,48] @ 2(x) : R", "f32[32,2] @ 2(x) : R",
                    "f32[2,48] @ 2(x) : R"),
            "S(1)>R | R | R | R -> R");
}

// A condition without letters speaks of all dims.
TEST(Propagate, CutsOnlyIf) {
  const auto embedded = [](std::int64_t a, std::int64_t b, const char* result) {
    return decided("aten::diag_embed", {"f32[4,3] @ 2(x) : S(0)", i(0), i(a), i(b)}, {result});
  };
  EXPECT_EQ(embedded(-2, -1, "f32[4,3,3]"), "S(0) -> S(0)");
  EXPECT_EQ(embedded(0, 2, "f32[3,4,3]"), "S(0)>R -> R");
}

TEST(Propagate, CandidatesComeWithTheChosenOneFirst) {
  const OpCall call = make("aten::mm", {"f32[8,6] @ 2(x) : S(0)", "f32[6,4] @ 2(x) : S(0)"}, {"f32[8,4]"});
  const auto all = candidates(*find_rule(call.name)->rule, call);
  ASSERT_TRUE(all);
  EXPECT_EQ(join(*all, " ", [](const Candidate& c) { return c.row; }), "m k n R");
  for (std::size_t k = 0; k < all->size(); ++k) {
    const auto nth = decide_call(call, {.nth = static_cast<std::int64_t>(k)});
    EXPECT_EQ(shown(call, nth), shown(call, (*all)[k].decision));
  }
  EXPECT_EQ(decide_call(call)->reason, "row m; operand 1 from f32[6,4] @ 2(x) : S(0) to f32[6,4] @ 2(x) : R; 7 us");
  EXPECT_EQ(
      decide_call(call, {.explain = true})->reason,
      "row m; operand 1 from f32[6,4] @ 2(x) : S(0) to f32[6,4] @ 2(x) : R; 7 us; instead of row k, 14 us; instead "
      "of row n, 14 us; instead of row R, 14 us");
}

std::int64_t least_time(const OpCall& call) {
  std::int64_t least = kForever;
  const auto all = candidates(*find_rule(call.name)->rule, call);
  if (!all) return 0;
  for (const Candidate& candidate : *all) least = std::min(least, candidate.decision.time);
  return least;
}

OpCall mm_call(const Dims& mkn, const std::string& x, const std::string& w) {
  const auto meta = [](std::int64_t rows, std::int64_t columns) {
    return "f32[" + std::to_string(rows) + "," + std::to_string(columns) + "]";
  };
  return make("aten::mm",
              {Spec::parse(meta(mkn[0], mkn[1]) + " @ " + x), Spec::parse(meta(mkn[1], mkn[2]) + " @ " + w)},
              {meta(mkn[0], mkn[2])});
}

// Where every mesh dim must change, the choice is the cheapest of all ways, though few of them are planned.
TEST(Propagate, BoundsNeverHideTheCheapest) {
  for (const std::string mesh : {"2x3(a,b) : ", "4x2(a,b) : "}) {
    for (const std::string x : {"S(1),S(0)", "P,S(0)", "S(0),P", "P,P"}) {
      for (const std::string w : {"S(1),S(0)", "P,S(1)", "P,P"}) {
        for (const Dims& mkn : {Dims{640, 500, 300}, Dims{7, 4096, 13}, Dims{4096, 8, 2048}, Dims{3, 5, 2}}) {
          const OpCall call = mm_call(mkn, mesh + x, mesh + w);
          if (x == "S(0),P" && w == "P,S(1)") continue;  // nothing to choose
          EXPECT_EQ(decide_call(call)->time, least_time(call)) << mesh << x << " " << w << " " << join_numbers(mkn);
        }
      }
    }
  }
}

// With more mesh dims not all ways are looked at; what is chosen is not far from the best.
TEST(Propagate, ChoiceOnThreeMeshDimsIsCloseToTheCheapest) {
  const std::string mesh = "2x2x3(a,b,c) : ";
  for (const std::string x : {"S(1),S(0),P", "P,S(0),S(0)"}) {
    for (const std::string w : {"S(1),S(0),P", "P,P,S(0)", "P,S(1),S(1)"}) {
      for (const Dims& mkn : {Dims{640, 500, 300}, Dims{7, 4096, 13}, Dims{4096, 8, 2048}}) {
        const OpCall call = mm_call(mkn, mesh + x, mesh + w);
        EXPECT_LE(decide_call(call)->time, least_time(call) + least_time(call) / 4) << x << " " << w << " " << mkn[0];
      }
    }
  }
}

// A mesh dim of size 1 makes everything free; what is chosen is what more ranks would choose.
TEST(Propagate, OneRankChoosesAsManyDo) {
  EXPECT_EQ(decided("aten::mm", {"f32[8,6] @ 1(x) : S(0)", "f32[6,4] @ 1(x) : S(0)"}, {"f32[8,4]"}),
            "S(0) | S(0)>R -> S(0)");
  EXPECT_EQ(decided("aten::mm", {"f32[8,6] @ 1x2(x,y) : S(0),S(0)", "f32[6,4] @ 1x2(x,y) : S(0),R"}, {"f32[8,4]"}),
            "S(0),S(0) | S(0),R>R,R -> S(0),S(0)");
  EXPECT_EQ(decided("aten::relu", {"f32[8] @ 1(x) : P"}, {"f32[8]"}), "P(sum)>R -> R");
}

// Mesh dims on which the operands fit a row keep it: a replicated mesh dim does not start to cut because another one
// has to move something.
TEST(Propagate, MeshDimsThatFitStay) {
  EXPECT_EQ(
      decided("aten::mm", {"f32[512,512] @ 2x2(a,b) : S(0),R", "f32[512,512] @ 2x2(a,b) : S(0),R"}, {"f32[512,512]"}),
      "S(0),R | S(0),R>R,R -> S(0),R");
}

// x[5,4,3] at (none, i), at (i, none, j), at (none, none, i): the dims of the indices and those not looked up pass.
TEST(Propagate, LooksUpByLists) {
  const auto with_items = [](OpCall call, std::vector<std::size_t> items) {
    call.items = std::move(items);
    return shown(call, decide_call(call));
  };
  const auto look_up = [&](const char* x, const List& indices, std::vector<std::size_t> items, const char* result) {
    items.insert(items.begin(), 0);
    return with_items(make("aten::index.Tensor", {x, indices}, {result}), items);
  };
  EXPECT_EQ(look_up("f32[5,4,3] @ 2(x) : S(0)", {"i64[7] @ 2(x) : R"}, {1}, "f32[5,7,3]"), "S(0) | R -> S(0)");
  EXPECT_EQ(look_up("f32[5,4,3] @ 2(x) : R", {"i64[7] @ 2(x) : S(0)"}, {1}, "f32[5,7,3]"), "R | S(0) -> S(1)");
  EXPECT_EQ(look_up("f32[5,4,3] @ 2(x) : S(1)", {"i64[7] @ 2(x) : S(0)"}, {1}, "f32[5,7,3]"), "S(1)>R | S(0) -> S(1)");
  EXPECT_EQ(look_up("f32[5,4,3] @ 2(x) : S(1)", {"i64[7] @ 2(x) : R", "i64[6,7] @ 2(x) : R"}, {0, 2}, "f32[6,7,4]"),
            "S(1) | R | R -> S(2)");
  EXPECT_EQ(look_up("f32[5,4,3] @ 2(x) : P(max)", {"i64[] @ 2(x) : R"}, {2}, "f32[5,4]"), "P(max) | R -> P(max)");
  EXPECT_EQ(look_up("f32[5,4] @ 2(x) : R", {"i64[3,1] @ 2(x) : S(0)", "i64[7] @ 2(x) : R"}, {0, 1}, "f32[3,7]"),
            "R | S(0) | R -> S(0)");
  EXPECT_EQ(look_up("f32[5,4] @ 2(x) : R", {"bool[5,4] @ 2(x) : R"}, {0}, "f32[9]"),
            "no: the row `aten::index.Tensor: ...,*->... index same(0)` does not fit the call: an index is a mask");

  const auto put = [&](const char* x, const char* index, const char* values, std::size_t item) {
    const OpCall call = make("aten::index_put_", {x, List{index}, values, flag(false)}, {"f32[5,4,3]"});
    return with_items(call, {0, item, 0});
  };
  EXPECT_EQ(put("f32[5,4,3] @ 2(x) : S(0)", "i64[7] @ 2(x) : R", "f32[5,7,3] @ 2(x) : S(0)", 1),
            "S(0) | R | S(0) -> S(0)");
  EXPECT_EQ(put("f32[5,4,3] @ 2(x) : S(2)", "i64[7] @ 2(x) : S(0)", "f32[3] @ 2(x) : S(0)", 0),
            "S(2) | S(0)>R | S(0) -> S(2)");
}

}  // namespace
}  // namespace dtensor
