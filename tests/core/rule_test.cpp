#include "dtensor/core/rule.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "dtensor/core/rules/rules.h"
#include "tests/core/expect_error.h"

namespace dtensor {
namespace {

// A change of any row shows up here, and as a line of a diff of the golden file.
TEST(Rule, GoldenPrintOfEveryRow) {
  std::ifstream golden(std::filesystem::path(DTENSOR_SOURCE_DIR) / "tests" / "core" / "golden" / "rules.txt");
  std::string line;
  for (const OpRule& rule : all_rules()) {
    ASSERT_TRUE(std::getline(golden, line)) << "the golden file ends before " << rule.name;
    ASSERT_EQ(to_string(rule), line);
  }
  EXPECT_FALSE(std::getline(golden, line)) << "no row for " << line;
}

TEST(Rule, TablesAreSorted) {
  for (const auto& table :
       {rules::conv(), rules::copy(), rules::index(), rules::linalg(), rules::loss(), rules::matmul(), rules::norm(),
        rules::pointwise(), rules::reduce(), rules::special(), rules::view()}) {
    for (std::size_t i = 1; i < table.size(); ++i) EXPECT_LT(table[i - 1].name, table[i].name);
  }
}

// The print is what a row is read from.
TEST(Rule, PrintsWhatItReads) {
  for (const OpRule& rule : all_rules()) {
    std::string text = to_string(rule).substr(rule.name.size() + 2);
    std::string pattern;
    if (!rule.outputs.empty()) {
      pattern = text.substr(0, text.find(' '));
      text = text.find(' ') == std::string::npos ? "" : text.substr(text.find(' '));
    }
    EXPECT_EQ(to_string(parse_rule({rule.name, pattern, text})), to_string(rule));
  }
}

TEST(Rule, FindsPlainInPlaceAndOutForms) {
  const auto found = [](std::string_view name) -> std::string {
    const auto rule = find_rule(name);
    if (!rule) return "none";
    return rule->rule->name + (rule->in_place ? ", in place" : "") + (rule->out ? ", out" : "");
  };
  EXPECT_EQ(found("aten::add.Tensor"), "aten::add.Tensor");
  EXPECT_EQ(found("aten::add_.Tensor"), "aten::add.Tensor, in place");
  EXPECT_EQ(found("aten::add.out"), "aten::add.Tensor, out");
  EXPECT_EQ(found("aten::transpose_"), "aten::transpose.int, in place");
  EXPECT_EQ(found("aten::pow_.Scalar"), "aten::pow.Tensor_Scalar, in place");
  EXPECT_EQ(found("aten::relu_"), "aten::relu, in place");
  EXPECT_EQ(found("aten::mm.out"), "aten::mm, out");
  EXPECT_EQ(found("aten::sum.IntList_out"), "aten::sum.dim_IntList, out");
  EXPECT_EQ(found("aten::mean.out"), "aten::mean.dim, out");
  EXPECT_EQ(found("aten::pow.Tensor_Scalar_out"), "aten::pow.Tensor_Scalar, out");
  EXPECT_EQ(found("aten::any.all_out"), "aten::any, out");
  EXPECT_EQ(found("aten::any.out"), "aten::any.dim, out");
  EXPECT_EQ(found("aten::max.out"), "aten::maximum, out");
  EXPECT_EQ(found("aten::clamp.Tensor_out"), "aten::clamp.Tensor, out");
  EXPECT_EQ(found("aten::norm.out"), "aten::norm.ScalarOpt_dim, out");
  EXPECT_EQ(found("aten::copy_"), "aten::copy_, in place");
  EXPECT_EQ(found("aten::zero_"), "aten::zero, in place");
  EXPECT_EQ(found("aten::__ilshift__.Scalar"), "aten::__lshift__.Scalar, in place");
  EXPECT_EQ(found("aten::_index_put_impl_"), "aten::_index_put_impl, in place");
  EXPECT_EQ(found("aten::max.dim_max"), "aten::max.dim, out");
  EXPECT_EQ(found("aten::topk.values"), "aten::topk, out");
  EXPECT_EQ(found("aten::gelu_backward.grad_input"), "aten::gelu_backward, out");
  EXPECT_EQ(found("aten::xlogy.OutTensor"), "aten::xlogy.Tensor, out");
  EXPECT_EQ(found("aten::native_dropout"), "none");
  EXPECT_EQ(found("aten::nothing_"), "none");
  EXPECT_EQ(found("aten::nothing.out"), "none");
}

TEST(Rule, SaysWhatBelongsIntoTheKey) {
  const OpRule* mul = find_rule("aten::mul.Scalar")->rule;
  EXPECT_EQ(key_use(*mul, 1), KeyUse::kScale);
  EXPECT_EQ(key_use(*find_rule("aten::add.Tensor")->rule, 2), KeyUse::kScale);
  EXPECT_EQ(key_use(*find_rule("aten::select.int")->rule, 1), KeyUse::kPlain);
  EXPECT_EQ(key_use(*find_rule("aten::select.int")->rule, 2), KeyUse::kNothing);
}

TEST(Rule, RefusesWhatItCannotRead) {
  EXPECT_ERROR(parse_rule({"aten::x", "mk,kn", ""}), kInvalidArgument,
               "[rule] a pattern has no arrow; got aten::x: mk,kn ; expected a row as in docs/rules.md");
  EXPECT_ERROR(parse_rule({"aten::x", "m1->m", ""}), kInvalidArgument,
               "[rule] a pattern has a character that is no dim; got aten::x: m1->m ; expected a row as in "
               "docs/rules.md");
  EXPECT_ERROR(parse_rule({"aten::x", "m->m", "linear(1)"}), kInvalidArgument,
               "[rule] a word names an operand that the pattern lacks; got aten::x: m->m linear(1); expected a row as "
               "in docs/rules.md");
  EXPECT_ERROR(parse_rule({"aten::x", "#m->m", ""}), kInvalidArgument,
               "[rule] # and an algorithm need each other; got aten::x: #m->m ; expected a row as in docs/rules.md");
  EXPECT_ERROR(parse_rule({"aten::x", "#M->#M", "halo(x)"}), kInvalidArgument,
               "[rule] a halo and its window need each other; got aten::x: #M->#M halo(x); expected a row as in "
               "docs/rules.md");
  for (const char* window : {"window(kernel:1)", "window(over:1,kernel:1)", "window(over:0)",
                             "window(over:0,kernel:1,kernel_of:0)", "window(over:0,kernel_of:2)"}) {
    const std::string words = "halo(x) " + std::string(window);
    EXPECT_ERROR(parse_rule({"aten::x", "#M,M->#M", words}), kInvalidArgument,
                 "[rule] a window says no # operand that it is over, or not one kernel; got aten::x: #M,M->#M " +
                     words + "; expected a row as in docs/rules.md");
  }
  EXPECT_ERROR(parse_rule({"aten::x", "#M->#M", "halo(x) window(width:1)"}), kInvalidArgument,
               "[rule] no such word at column 21; got 'halo(x) window(width:1)'; expected a row as in docs/rules.md");
  EXPECT_ERROR(
      parse_rule({"aten::x", "m->m;m,n->m", ""}), kInvalidArgument,
      "[rule] the patterns of a row are of different numbers of tensors; got aten::x: m->m;m,n->m ; expected a "
      "row as in docs/rules.md");
  EXPECT_ERROR(parse_rule({"aten::x", "", ""}), kInvalidArgument,
               "[rule] a row has no pattern; got aten::x:  ; expected a row as in docs/rules.md");
  EXPECT_ERROR(parse_rule({"aten::x", "m->m", "linaer(0)"}), kInvalidArgument,
               "[rule] no such word at column 8; got 'linaer(0)'; expected a row as in docs/rules.md");
}

TEST(StaticArg, ComparesHashesAndHasASign) {
  using Type = StaticArg::NumberType;
  const StaticArg two = StaticArg::number(Type::kFloating, 2);
  EXPECT_EQ(two, StaticArg::number(Type::kFloating, 2));
  EXPECT_EQ(two.hash(), StaticArg::number(Type::kFloating, 2).hash());
  EXPECT_FALSE(two == StaticArg::number(Type::kIntegral, 2));
  EXPECT_FALSE(StaticArg::integer(1) == StaticArg::boolean(true));
  EXPECT_FALSE(StaticArg::integers({1, 2}) == StaticArg::integers({2, 1}));
  EXPECT_FALSE(StaticArg::text("a") == StaticArg::text("b"));
  EXPECT_EQ(two.sign(), 1);
  EXPECT_EQ(StaticArg::number(Type::kFloating, -0.5).sign(), -1);
  EXPECT_EQ(StaticArg::number(Type::kFloating, 0).sign(), 0);
  EXPECT_EQ(StaticArg::number(Type::kFloating, -HUGE_VAL).sign(), 0);
  EXPECT_EQ(StaticArg::number(Type::kFloating, NAN).sign(), 0);
  EXPECT_EQ(StaticArg::number(Type::kComplex, 1).sign(), 0);
  EXPECT_EQ(StaticArg::integer(-3).sign(), -1);
  EXPECT_EQ(StaticArg::integer(7).as_ints(), Dims{7});
  EXPECT_TRUE(StaticArg().as_ints().empty());
}

}  // namespace
}  // namespace dtensor
