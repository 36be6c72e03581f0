// The audit on rows of a program's own: what is wrong is found, and what is missing.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include "dtensor/core/rule.h"
#include "dtensor/testing/audit.h"
#include "dtensor/testing/parts.h"
#include "tests/testing/calls.h"

namespace dtensor::testing {
namespace {

at::Tensor gated_mm(const at::Tensor& x, const at::Tensor& w, const at::Tensor& gate) {
  return at::mm(x, w) * at::sigmoid(gate);
}

TORCH_LIBRARY(audited, library) {
  for (const char* name : {"right", "too_linear", "sums_a_gate", "poor"}) {
    library.def((std::string(name) + "(Tensor x, Tensor w, Tensor gate) -> Tensor").c_str());
  }
}
TORCH_LIBRARY_IMPL(audited, CPU, library) {
  for (const char* name : {"right", "too_linear", "sums_a_gate", "poor"}) library.impl(name, gated_mm);
}
TORCH_LIBRARY_IMPL(audited, Meta, library) {
  for (const char* name : {"right", "too_linear", "sums_a_gate", "poor"}) library.impl(name, gated_mm);
}

std::vector<c10::IValue> args() { return {floats({5, 4}), floats({4, 3}), floats({3})}; }

TEST(AuditOfOwnRows, PassesARightOne) {
  register_rule("audited::right", "mk,kn,n->mn", "linear(0) linear(1)");
  for (const Dims& mesh : {Dims{3}, Dims{2, 2}, Dims{2, 1, 2}}) {
    const AuditReport report =
        audit("audited::right", args(), {.mesh = mesh, .most_layouts = mesh.size() == 1 ? 300 : 20});
    EXPECT_TRUE(report.wrong.empty()) << report.wrong.front();
    EXPECT_GT(report.ways, report.layouts);
  }
  EXPECT_TRUE(missing_rows("audited::right", args()).empty());
}

TEST(AuditOfOwnRows, FindsAWrongPartial) {
  register_rule("audited::too_linear", "mk,kn,n->mn", "linear(0,1)");
  const AuditReport report = audit("audited::too_linear", args());
  ASSERT_FALSE(report.wrong.empty());
  EXPECT_NE(report.wrong[0].find("by linear(0,1): result 0 element"), std::string::npos) << report.wrong[0];
}

TEST(AuditOfOwnRows, FindsACutThatIsWrong) {
  register_rule("audited::sums_a_gate", "mk,kn,k->mn");
  const AuditReport report = audit("audited::sums_a_gate", {floats({5, 3}), floats({3, 3}), floats({3})});
  ASSERT_FALSE(report.wrong.empty());
}

TEST(AuditOfOwnRows, SaysWhatIsMissing) {
  register_rule("audited::poor", "mk,kn,N->mn");
  const std::vector<std::string> missing = missing_rows("audited::poor", args());
  ASSERT_EQ(missing.size(), 3);
  EXPECT_EQ(missing[0], "R; S(1); S(0) -> S(1)");
  EXPECT_EQ(missing[1], "R; P(sum); R -> P(sum)");
  EXPECT_EQ(missing[2], "P(sum); R; R -> P(sum)");
}

TEST(Parts, AreTheWholeAgain) {
  const at::Tensor whole = floats({5, 4});
  const Mesh mesh = Mesh::make({2, 3});
  for (const char* text :
       {"S(0),S(0)", "S(1),R", "P(sum),S(0)", "P(sum),P(avg)", "P(max),P(max)", "R,P(min)", "P(product),R"}) {
    const Spec spec = Spec::make({{5, 4}, DType::kF64}, mesh, parse_placements(text));
    auto parts = parts_of(whole, spec, 3);
    const auto again = whole_of(spec, parts);
    ASSERT_TRUE(again) << again.reason();
    EXPECT_EQ(difference(*again, whole), "") << text;
  }
  const Spec spec = Spec::make({{5, 4}, DType::kF64}, mesh, parse_placements("S(0),R"));
  auto parts = parts_of(whole, spec, 3);
  parts[1][0][0] = -0.0;
  EXPECT_NE(whole_of(spec, parts).reason().find("rank 1 has another replica"), std::string::npos);
}

}  // namespace
}  // namespace dtensor::testing
