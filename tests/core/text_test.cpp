#include "dtensor/core/text.h"

#include <gtest/gtest.h>

#include "dtensor/core/spec.h"

namespace dtensor {
namespace {

// Texts that must read back to themselves, one for each form that can be printed.
TEST(Text, CanonicalFormsReadBack) {
  for (const char* text : {
           "f32[8,6] @ 2x2(dp,tp) : S(0),R",
           "f32[] @ 2(a) : P(max)",
           "bf16[7,5]{1,7} @ 2x3(dp,tp) : S(1),S(0)",
           "f32[10,4] @ 2x2(fsdp,tp) : S(0)[1],S(0)[0]",
           "f32[(3*5),8] @ 2(tp) : S(0.1)",
           "f32[(5*3),8] @ 2(tp) : S(0.0)",
           "f32[9~2@0] @ 4(x) : S(0)[1]",
           "f32[13~3@1] @ 2x3(a,b) : S(0)[0],S(0)[2]",
           "f32[(3*7~2@0)] @ 2x2(a,b) : S(0.1)[1],R",
           "i64[8] @ 3x2(tp,dp):[1,3] of 12 : S(0),P(xor)",
           "f32[8] @ 2x3(dp,tp):[3,1] at [2:6=1] of 12 : S(0),R",
           "f32[8] @ 2x2(a,b) of [7,3,5,1] : S(0),R",
       }) {
    EXPECT_EQ(Spec::parse(text).to_string(), text);
  }
}

TEST(Text, OtherSpellingsReadAlike) {
  const Spec spec = Spec::parse("f32[10,4] @ 2x2(fsdp,tp) : S(0)[1],S(0)[0]");
  EXPECT_EQ(Spec::parse("f32[10,4] @ fsdp=2,tp=2 : S(0,2),S(0)"), spec);
  EXPECT_EQ(Spec::parse("  f32 [ 10 , 4 ]@2x2( fsdp , tp ) : S( -2 ,2),S(0) "), spec);
  EXPECT_EQ(Spec::parse("f32[15,8] @ 2(tp) : S(0,3)").to_string(), "f32[(3*5),8] @ 2(tp) : S(0.1)");
  EXPECT_EQ(TensorMeta::parse("f32[8,6]{6,1}"), TensorMeta({8, 6}, DType::kF32));
}

TEST(Text, QuotedTextIsSafeToPrint) {
  EXPECT_EQ(in_quotes("a\tb\x1b[31m"), "'a\\x09b\\x1b[31m'");
  EXPECT_EQ(in_quotes(std::string(500, 'x')).size(), 120 + 2 + std::string("…").size());
}

}  // namespace
}  // namespace dtensor
