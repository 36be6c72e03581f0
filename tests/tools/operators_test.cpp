// `dtensor operators` as a person runs it.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "tests/tools/run_tool.h"

namespace {

TEST(OperatorsCommand, PrintsThePageThatIsInTheDocs) {
  const auto page = std::filesystem::path(DTENSOR_SOURCE_DIR) / "docs" / "operators.md";
  std::ostringstream text;
  text << std::ifstream(page).rdbuf();
  EXPECT_TRUE(run("operators").output == text.str()) << "dtensor operators >docs/operators.md";
}

TEST(OperatorsCommand, SaysTheRowsOfOne) {
  EXPECT_EQ(run("operators mm").output,
            "aten::mm: mk,kn->mn linear(0) linear(1)\naten::mm.dtype: mk,kn->mn linear(0) linear(1)\n");
  EXPECT_EQ(run("operators aten::mm.out").output, "aten::mm.out by aten::mm: mk,kn->mn linear(0) linear(1)\n");
  const Outcome none = run("operators no_such_thing");
  EXPECT_EQ(none.code, 2);
  EXPECT_EQ(none.output.find("dtensor: [operators] there is no row of that name; got aten::no_such_thing"), 0)
      << none.output;
}

}  // namespace
