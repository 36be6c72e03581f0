#include "tools/operators_command.h"

#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>
#include <string>

#include "dtensor/core/error.h"
#include "dtensor/core/rule.h"

namespace dtensor {
namespace {

std::string_view handled(const OpRule& rule) {
  switch (rule.kind) {
    case RuleKind::kView:
      return rule.may_move ? "view, moves where it must" : "view";
    case RuleKind::kReplicated:
      return "replicated";
    case RuleKind::kLike:
    case RuleKind::kFresh:
      return "factory";
    default:
      return "rule";
  }
}

// The name is the first word of a row's text.
std::string row_of(const OpRule& rule) {
  const std::string text = to_string(rule);
  return "| `" + rule.name + "` | `" + text.substr(std::min(rule.name.size() + 2, text.size())) + "` | " +
         std::string(handled(rule)) + " |\n";
}

void print_page() {
  std::cout
      << "# Operators\n\n"
         "Printed by `dtensor operators` from the tables in `dtensor/core/rules/`; [rules.md](rules.md) explains the "
         "notation. In-place and\n`out` forms follow from these rows. Operators that are made of others by libtorch "
         "need none, and random ones have kernels of\ntheir own; every other operator runs on replicated operands, "
         "which is said once.\n\n"
      << all_rules().size() << " rows.\n\n| operator | rule | handled as |\n|---|---|---|\n";
  for (const OpRule& rule : all_rules()) std::cout << row_of(rule);
}

void print_one(const std::string& name) {
  const std::string full = name.find("::") == std::string::npos ? "aten::" + name : name;
  bool found = false;
  for (const OpRule& rule : all_rules()) {
    const bool same = rule.name == full || rule.name.rfind(full + ".", 0) == 0;
    if (same) std::cout << to_string(rule) << "\n";
    found = found || same;
  }
  if (found) return;
  if (const auto rule = find_rule(full)) {
    std::cout << full << " by " << to_string(*rule->rule) << "\n";
    return;
  }
  fail_invalid("operators", {.what = "there is no row of that name",
                             .got = full,
                             .expected = "an operator of aten; without a row it runs on replicated operands, unless "
                                         "libtorch makes it of others"});
}

}  // namespace

void add_operators_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("operators", "Which operators have a rule, and which");
  const auto name = std::make_shared<std::string>();
  command->add_option("name", *name, "One operator (add, aten::mm, add_.Tensor); without it the whole page");
  command->callback([name] { name->empty() ? print_page() : print_one(*name); });
}

}  // namespace dtensor
