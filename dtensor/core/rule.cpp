#include "dtensor/core/rule.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>

#include "dtensor/core/rules/rules.h"

namespace dtensor {
namespace {

std::vector<OpRule> read_tables() {
  std::vector<OpRule> rows;
  for (const auto& table :
       {rules::conv(), rules::copy(), rules::index(), rules::linalg(), rules::loss(), rules::matmul(), rules::norm(),
        rules::pointwise(), rules::reduce(), rules::special(), rules::view()}) {
    for (const RuleText& text : table) rows.push_back(parse_rule(text));
  }
  std::sort(rows.begin(), rows.end(), [](const OpRule& a, const OpRule& b) { return a.name < b.name; });
  const auto twice =
      std::adjacent_find(rows.begin(), rows.end(), [](const OpRule& a, const OpRule& b) { return a.name == b.name; });
  if (twice != rows.end()) fail_invalid("rule", {.what = "an operator has two rows", .got = twice->name});
  return rows;
}

const std::vector<OpRule>& table() {
  static const auto* rows = new std::vector<OpRule>(read_tables());
  return *rows;
}

// Rows of the program, by name; never removed, so that pointers to them stay.
struct OwnRows {
  std::mutex mutex;
  std::map<std::string, OpRule, std::less<>> rows;
};
OwnRows& own() {
  static auto* rows = new OwnRows;
  return *rows;
}

const OpRule* find_own(std::string_view name) {
  const std::lock_guard lock(own().mutex);
  const auto at = own().rows.find(name);
  return at == own().rows.end() ? nullptr : &at->second;
}

const OpRule* find_row(std::string_view name) {
  if (const OpRule* rule = find_own(name)) return rule;
  const auto& rows = table();
  const auto at = std::lower_bound(rows.begin(), rows.end(), name,
                                   [](const OpRule& rule, std::string_view key) { return rule.name < key; });
  return at != rows.end() && at->name == name ? &*at : nullptr;
}

// In-place forms whose plain one is not found by dropping the mark.
constexpr std::pair<std::string_view, std::string_view> kInPlaceForms[] = {
    {"aten::__ilshift__.Scalar", "aten::__lshift__.Scalar"},
    {"aten::__ilshift__.Tensor", "aten::__lshift__.Tensor"},
    {"aten::__irshift__.Scalar", "aten::__rshift__.Scalar"},
    {"aten::__irshift__.Tensor", "aten::__rshift__.Tensor"},
    {"aten::floor_divide_.Tensor", "aten::floor_divide"},
    {"aten::ldexp_", "aten::ldexp.Tensor"},
    {"aten::pow_.Scalar", "aten::pow.Tensor_Scalar"},
    {"aten::pow_.Tensor", "aten::pow.Tensor_Tensor"},
    {"aten::transpose_", "aten::transpose.int"},
};

// `out` overloads whose plain form is not found by dropping the word.
constexpr std::pair<std::string_view, std::string_view> kOutForms[] = {
    {"aten::all.all_out", "aten::all"},
    {"aten::all.out", "aten::all.dim"},
    {"aten::any.all_out", "aten::any"},
    {"aten::any.out", "aten::any.dim"},
    {"aten::div.out_mode", "aten::div.Tensor_mode"},
    {"aten::max.dim_max", "aten::max.dim"},
    {"aten::max.out", "aten::maximum"},
    {"aten::max.unary_out", "aten::max"},
    {"aten::mean.dtype_out", "aten::mean"},
    {"aten::mean.out", "aten::mean.dim"},
    {"aten::median.dim_values", "aten::median.dim"},
    {"aten::min.dim_min", "aten::min.dim"},
    {"aten::min.out", "aten::minimum"},
    {"aten::min.unary_out", "aten::min"},
    {"aten::nanmedian.dim_values", "aten::nanmedian.dim"},
    {"aten::norm.dtype_out", "aten::norm.ScalarOpt_dim_dtype"},
    {"aten::norm.out", "aten::norm.ScalarOpt_dim"},
    {"aten::prod.int_out", "aten::prod.dim_int"},
    {"aten::sort.values_stable", "aten::sort.stable"},
    {"aten::sum.IntList_out", "aten::sum.dim_IntList"},
    {"aten::upsample_bilinear2d.vec_out", "aten::upsample_bilinear2d"},
    {"aten::upsample_nearest2d.vec_out", "aten::upsample_nearest2d"},
    {"aten::xlogy.OutScalar_Other", "aten::xlogy.Scalar_Other"},
    {"aten::xlogy.OutScalar_Self", "aten::xlogy.Scalar_Self"},
    {"aten::xlogy.OutTensor", "aten::xlogy.Tensor"},
};

// `out` overloads that are called after their results.
constexpr std::string_view kNamedOuts[] = {"L",       "U",      "X",      "a",    "eigenvalues", "grad_input",
                                           "inverse", "output", "result", "sign", "values"};

template <std::size_t N>
const std::string_view* find_form(const std::pair<std::string_view, std::string_view> (&forms)[N],
                                  std::string_view name) {
  for (const auto& [form, plain] : forms) {
    if (form == name) return &plain;
  }
  return nullptr;
}

bool is_named_out(std::string_view overload) {
  return std::find(std::begin(kNamedOuts), std::end(kNamedOuts), overload) != std::end(kNamedOuts);
}

const OpRule* find_plain_of_out(std::string_view name) {
  if (const std::string_view* plain = find_form(kOutForms, name)) return find_row(*plain);
  const std::size_t dot = name.find('.');
  const std::string base(name.substr(0, dot));
  const std::string_view overload = name.substr(dot + 1);
  if (is_named_out(overload)) return find_row(base);
  if (overload != "out") {
    return find_row(base + "." + std::string(overload.substr(0, overload.size() - std::string_view("_out").size())));
  }
  for (const char* plain : {"", ".Tensor"}) {
    if (const OpRule* rule = find_row(base + plain)) return rule;
  }
  return nullptr;
}

}  // namespace

std::string plain_name(std::string_view in_place) {
  if (const std::string_view* plain = find_form(kInPlaceForms, in_place)) return std::string(*plain);
  const std::size_t mark = in_place.substr(0, in_place.find('.')).size() - 1;
  return std::string(in_place.substr(0, mark)) + std::string(in_place.substr(mark + 1));
}

CallForm form_of(std::string_view name) {
  const std::size_t dot = name.find('.');
  const std::string_view base = name.substr(0, dot);
  const std::string_view overload = dot == std::string_view::npos ? std::string_view() : name.substr(dot + 1);
  CallForm form{base.ends_with('_') && !base.ends_with("__"), overload == "out" || overload.ends_with("_out")};
  form.in_place = form.in_place || find_form(kInPlaceForms, name);
  form.out = form.out || is_named_out(overload) || find_form(kOutForms, name);
  return form;
}

void register_rule(const std::string& name, const std::string& pattern, const std::string& words) {
  OpRule rule = parse_rule({name, pattern, words});
  const std::lock_guard lock(own().mutex);
  const auto [at, is_new] = own().rows.try_emplace(name, rule);
  if (is_new || to_string(at->second) == to_string(rule)) return;
  fail_invalid(
      "register_rule",
      {.what = "the operator was given another rule", .got = to_string(rule), .expected = to_string(at->second)});
}

std::optional<FoundRule> find_rule(std::string_view name) {
  const CallForm form = form_of(name);
  const OpRule* rule = find_row(name);
  if (!rule && form.in_place) rule = find_row(plain_name(name));
  if (!rule && form.out) rule = find_plain_of_out(name);
  if (!rule) return std::nullopt;
  return FoundRule{rule, form.in_place, form.out};
}

std::span<const OpRule> all_rules() { return table(); }

KeyUse key_use(const OpRule& rule, std::size_t arg) {
  const auto use = rule.key.find(arg);
  return use == rule.key.end() ? KeyUse::kPlain : use->second;
}

}  // namespace dtensor
