// The command as a person runs it: what it prints, and with which exit code.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/tools/run_tool.h"

namespace {

TEST(Show, DrawsWhoHoldsWhat) {
  const Outcome got = run("show --mesh dp=2,tp=3 --tensor 7x5 --placements 'S(0),S(1)'");
  EXPECT_EQ(got.code, 0);
  EXPECT_NE(got.output.find("f32[7,5] @ 2x3(dp,tp) : S(0),S(1)"), std::string::npos) << got.output;
  EXPECT_NE(got.output.find("  4  3  3  4  4  5\n"), std::string::npos) << got.output;
  EXPECT_NE(got.output.find("     5  (1,2)       [3,1]        [4,4]    12 B  4-6 x 4\n"), std::string::npos)
      << got.output;
  EXPECT_EQ(got.output.find('\x1b'), std::string::npos) << "colours into a pipe";
  EXPECT_NE(run("show --color always --spec 'f32[2] @ 2(a) : S(0)'").output.find('\x1b'), std::string::npos);
}

TEST(Show, JsonSaysTheSame) {
  const Outcome got = run("show --json --spec 'f32[9,4] @ 4(x) : S(0,2)'");
  ASSERT_EQ(got.code, 0) << got.output;
  const auto json = nlohmann::json::parse(got.output);
  EXPECT_EQ(json["spec"], "f32[9~2@0,4] @ 4(x) : S(0)[1]");
  EXPECT_EQ(json["placements"], nlohmann::json({"S(0,2)"}));
  ASSERT_EQ(json["ranks"].size(), 4u);
  EXPECT_EQ(json["ranks"][0]["runs"], nlohmann::json::parse("[[[0,2],[5,6]],[[0,4]]]"));
  EXPECT_EQ(json["ranks"][3]["shape"], nlohmann::json({1, 4}));
  EXPECT_EQ(json["ranks"][3]["offset"], nlohmann::json({8, 0}));
  EXPECT_EQ(json["ranks"][0]["bytes"], 48);
}

TEST(Show, SvgIsWrittenOrSaidWhyNot) {
  const auto path = std::filesystem::temp_directory_path() / ("dtensor_show_" + std::to_string(getpid()) + ".svg");
  const Outcome got = run("show --mesh a=2 --tensor 4 --placements 'S(0)' --svg " + path.string());
  EXPECT_EQ(got.code, 0) << got.output;
  std::ifstream file(path);
  std::string first;
  std::getline(file, first);
  EXPECT_EQ(first.rfind("<svg", 0), 0u);
  std::filesystem::remove(path);
  const Outcome bad = run("show --mesh a=2 --tensor 4 --placements 'S(0)' --svg /nowhere/at/all.svg");
  EXPECT_EQ(bad.code, 2);
  EXPECT_EQ(
      bad.output,
      "dtensor: [show] the file could not be written; got '/nowhere/at/all.svg'; try a folder that exists and may "
      "be written to\n");
}

TEST(Show, BadInputIsOneLineAndExitCodeTwo) {
  const Outcome dim = run("show --mesh dp=2 --tensor 7x5 --placements 'S(2)'");
  EXPECT_EQ(dim.code, 2);
  EXPECT_EQ(dim.output,
            "dtensor: [parse_spec] no such tensor dim at column 5; got 'S(2)'; expected a spec such as f32[8,6] @ "
            "2x2(dp,tp) : S(0),R\n");
  const Outcome none = run("show");
  EXPECT_EQ(none.code, 2);
  EXPECT_EQ(none.output,
            "dtensor: [show] nothing to show; expected --mesh, --tensor and --placements, or --spec; try dtensor show "
            "--mesh dp=2,tp=3 --tensor 7x5 --placements \"S(0),S(1)\"\n");
  EXPECT_EQ(run("show --frobnicate").code, 2);
  EXPECT_EQ(run("").code, 2);
  EXPECT_EQ(run("--help").code, 0);
  const Outcome help = run("show --help");
  EXPECT_EQ(help.code, 0);
  EXPECT_NE(help.output.find("Examples:"), std::string::npos);
}

}  // namespace
