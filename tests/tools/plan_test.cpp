// `dtensor plan` as a person runs it.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/tools/run_tool.h"

namespace {

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(PlanCommand, SaysTheStepsAndWhyNotOtherwise) {
  const Outcome got = run("plan --mesh dp=2,tp=4 --tensor 4096x4096 --from 'S(0),R' --to 'R,S(1)'");
  EXPECT_EQ(got.code, 0);
  EXPECT_TRUE(contains(got.output, "from f32[4096,4096] @ 2x4(dp,tp) : S(0),R\n")) << got.output;
  EXPECT_TRUE(contains(got.output, "receives 8.4 MB (67.1 MB in all), at least 8.4 MB (67.1 MB in all)\n"));
  EXPECT_TRUE(contains(got.output, "not by   slice, all-gather: slower: ")) << got.output;
}

TEST(PlanCommand, KeepsToTheMemoryOrSaysTheLeast) {
  const std::string arguments = "plan --mesh a=8 --tensor 4096x4096 --from 'S(0)' --to 'S(1)' --memory ";
  const Outcome kept = run(arguments + "18MB");
  EXPECT_EQ(kept.code, 0) << kept.output;
  EXPECT_TRUE(contains(kept.output, " chunks, ")) << kept.output;
  const Outcome refused = run(arguments + "16MB");
  EXPECT_EQ(refused.code, 2);
  EXPECT_TRUE(contains(refused.output, "[plan] the memory limit is below what is possible; got 16 MB"))
      << refused.output;
  EXPECT_TRUE(contains(run(arguments + "16MX").output, "[plan] unknown unit 'MX' at column 5"));
}

TEST(PlanCommand, JsonSaysTheSame) {
  const Outcome got = run("plan --json --mesh a=2,b=2 --tensor 8x8 --from 'P,R' --to 'S(0),R'");
  ASSERT_EQ(got.code, 0) << got.output;
  const auto json = nlohmann::json::parse(got.output);
  ASSERT_EQ(json["steps"].size(), 1u);
  EXPECT_EQ(json["steps"][0]["kind"], "reduce-scatter");
  EXPECT_EQ(json["steps"][0]["op"], "sum");
  EXPECT_EQ(json["steps"][0]["received"]["max"], 128);
  EXPECT_EQ(json["received"], json["steps"][0]["received"]);
}

TEST(PlanCommand, GoesAcrossMeshes) {
  const Outcome got = run("plan --from 'f32[8,8] @ 2(a) : S(0)' --to 'f32[8,8] @ 4(b) of [2..5] : S(0)'");
  EXPECT_EQ(got.code, 0);
  EXPECT_TRUE(contains(got.output, "exchange       across meshes")) << got.output;
}

TEST(PlanCommand, RefusesWhatCannotBe) {
  const Outcome got = run("plan --mesh a=2 --tensor 8 --from 'S(0)' --to 'P'");
  EXPECT_EQ(got.code, 2);
  EXPECT_TRUE(contains(got.output, "dtensor: [plan] a Shard cannot turn into a Partial on mesh dim 0")) << got.output;
  EXPECT_TRUE(contains(run("plan --from R --to R").output, "[plan] no tensor or no mesh")) << got.output;
}

}  // namespace
