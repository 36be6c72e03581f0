#include "dtensor/debug/draw.h"

#include <gtest/gtest.h>

namespace dtensor {
namespace {

std::string draw(std::string_view spec) { return draw_text(Spec::parse(spec)); }

TEST(Draw, UnevenTwoDims) {
  EXPECT_EQ(draw("f32[3,5] @ 2x2(dp,tp) : S(0),S(1)"),
            "f32[3,5] @ 2x2(dp,tp) : S(0),S(1)\n"
            "\n"
            "     0  1  2  3  4\n"
            "  0  0  0  0  1  1\n"
            "  1  0  0  0  1  1\n"
            "  2  2  2  2  3  3\n"
            "\n"
            "  rank  coordinate  local shape  offset  bytes  holds\n"
            "     0  (0,0)       [2,3]        [0,0]    24 B  0-1 x 0-2\n"
            "     1  (0,1)       [2,2]        [0,3]    16 B  0-1 x 3-4\n"
            "     2  (1,0)       [1,3]        [2,0]    12 B  2 x 0-2\n"
            "     3  (1,1)       [1,2]        [2,3]     8 B  2 x 3-4\n");
}

TEST(Draw, ReplicatedPartialAndStrided) {
  EXPECT_EQ(draw("f32[4] @ 2x2(a,b) : R,S(0)"),
            "f32[4] @ 2x2(a,b) : R,S(0)\n"
            "\n"
            "      0    1    2    3\n"
            "    0,2  0,2  1,3  1,3\n"
            "\n"
            "  rank  coordinate  local shape  offset  bytes  holds\n"
            "     0  (0,0)       [2]          [0]       8 B  0-1\n"
            "     1  (0,1)       [2]          [2]       8 B  2-3\n"
            "     2  (1,0)       [2]          [0]       8 B  0-1\n"
            "     3  (1,1)       [2]          [2]       8 B  2-3\n"
            "  a,b: each of the ranks holds the element\n");
  EXPECT_NE(draw("f32[2] @ 2(a) : P(sum)").find("0+1  0+1"), std::string::npos);
  EXPECT_NE(draw("f32[9] @ 4(x) : S(0,2)").find("0  0  1  1  2  0  1  2  3"), std::string::npos);
}

TEST(Draw, LargeDimsAreDrawnByStretches) {
  const std::string text = draw("f32[4096,1000] @ 2x2(dp,tp) : S(0),S(1)");
  EXPECT_NE(text.find("               0-499  500-999\n"
                      "     0-2047        0        1\n"
                      "  2048-4095        2        3\n"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("3.9 MiB"), std::string::npos) << text;
}

TEST(Draw, OddTensorsDrawToo) {
  EXPECT_NE(draw("f32[] @ 2(a) : R").find("0,1"), std::string::npos);
  EXPECT_NE(draw("f32[0,4] @ 2(a) : S(0)").find("the tensor has no elements"), std::string::npos);
  const std::string deep = draw("f32[4,2,2] @ 2(a) : S(0)");
  EXPECT_NE(deep.find("[0-1,:,:]"), std::string::npos) << deep;
  EXPECT_NE(deep.find("[2-3,:,:]"), std::string::npos) << deep;
  EXPECT_NE(draw("f32[100000] @ 100x1000(a,b) : S(0),R").find("a mesh of 100000 ranks is not drawn, only listed"),
            std::string::npos);
  EXPECT_NE(draw("f32[8] @ 3(tp):[1] of 6 : S(0)").find("the first of 2 rows of the mesh"), std::string::npos);
  EXPECT_NE(draw("f32[4,8] @ 40(a) : S(1)").find("… and 8 more ranks"), std::string::npos);
}

TEST(Draw, ColorsOnlyWhenAsked) {
  const Spec spec = Spec::parse("f32[2] @ 2(a) : S(0)");
  EXPECT_EQ(draw_text(spec).find('\x1b'), std::string::npos);
  EXPECT_NE(draw_text(spec, {.color = true}).find("\x1b[48;5;114;38;5;16m"), std::string::npos);
}

// Every tag that opens closes, one rectangle per cell and rank, and nothing from outside stands unescaped.
TEST(Draw, SvgIsWellFormed) {
  const std::string svg = draw_svg(Spec::parse("f32[3,5] @ 2x2(dp,tp) : S(0),S(1)"));
  const auto count = [&](std::string_view what) {
    std::size_t n = 0;
    for (std::size_t at = svg.find(what); at != std::string::npos; at = svg.find(what, at + 1)) ++n;
    return n;
  };
  EXPECT_EQ(svg.rfind("<svg xmlns=\"http://www.w3.org/2000/svg\"", 0), 0u);
  EXPECT_EQ(count("<text"), count("</text>"));
  EXPECT_EQ(count("<rect"), 1u + 15u + 4u);
  EXPECT_EQ(count("/>"), count("<rect"));
  EXPECT_EQ(svg.substr(svg.size() - 7), "</svg>\n");
}

}  // namespace
}  // namespace dtensor
