#include <algorithm>
#include <array>
#include <cctype>
#include <utility>

#include "dtensor/core/rule.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

constexpr std::string_view kGrammar = "a row as in docs/rules.md";

template <class Value>
using Names = std::span<const std::pair<std::string_view, Value>>;

template <class Value>
const Value* find(Names<Value> names, std::string_view name) {
  for (const auto& entry : names) {
    if (entry.first == name) return &entry.second;
  }
  return nullptr;
}

template <class Value>
std::string_view name_of(Names<Value> names, Value value) {
  for (const auto& entry : names) {
    if (entry.second == value) return entry.first;
  }
  return "?";
}

constexpr std::pair<std::string_view, Carry::Kind> kCarryList[] = {
    {"linear", Carry::Kind::kLinear},     {"times", Carry::Kind::kTimes}, {"over", Carry::Kind::kOver},
    {"weighted", Carry::Kind::kWeighted}, {"same", Carry::Kind::kSame},   {"up", Carry::Kind::kUp},
    {"down", Carry::Kind::kDown},         {"once", Carry::Kind::kOnce},   {"fill", Carry::Kind::kFill},
    {"sign", Carry::Kind::kSign},         {"carry", Carry::Kind::kOp}};
constexpr Names<Carry::Kind> kCarries(kCarryList);

constexpr std::pair<std::string_view, ViewKind> kViewList[] = {{"identity", ViewKind::kIdentity},
                                                               {"t", ViewKind::kTranspose2},
                                                               {"transpose", ViewKind::kTranspose},
                                                               {"permute", ViewKind::kPermute},
                                                               {"reshape", ViewKind::kReshape},
                                                               {"reshape_strides", ViewKind::kReshapeStrides},
                                                               {"expand", ViewKind::kExpand},
                                                               {"squeeze", ViewKind::kSqueeze},
                                                               {"squeeze_dims", ViewKind::kSqueezeDims},
                                                               {"unsqueeze", ViewKind::kUnsqueeze},
                                                               {"select", ViewKind::kSelect},
                                                               {"slice", ViewKind::kSlice},
                                                               {"narrow", ViewKind::kNarrow},
                                                               {"split", ViewKind::kSplit},
                                                               {"split_sizes", ViewKind::kSplitSizes},
                                                               {"unbind", ViewKind::kUnbind},
                                                               {"diagonal", ViewKind::kDiagonal},
                                                               {"unfold", ViewKind::kUnfold}};
constexpr Names<ViewKind> kViews(kViewList);

constexpr std::pair<std::string_view, RuleKind> kKindList[] = {
    {"replicated", RuleKind::kReplicated}, {"like", RuleKind::kLike}, {"fresh", RuleKind::kFresh}};
constexpr Names<RuleKind> kKinds(kKindList);

constexpr std::pair<std::string_view, MeanForm> kMeanList[] = {
    {"scaled", MeanForm::kScaled}, {"whole", MeanForm::kWhole}, {"given", MeanForm::kGiven}};
constexpr Names<MeanForm> kMeans(kMeanList);

constexpr std::pair<std::string_view, KeyUse> kKeyList[] = {
    {"plain", KeyUse::kPlain}, {"value", KeyUse::kValue},       {"type", KeyUse::kType},      {"sign", KeyUse::kSign},
    {"scale", KeyUse::kScale}, {"presence", KeyUse::kPresence}, {"nothing", KeyUse::kNothing}};
constexpr Names<KeyUse> kKeys(kKeyList);

constexpr std::pair<std::string_view, Algorithm::Kind> kAlgorithmList[] = {
    {"merged", Algorithm::Kind::kMerged}, {"located", Algorithm::Kind::kLocated}, {"halo", Algorithm::Kind::kHalo}};
constexpr Names<Algorithm::Kind> kAlgorithms(kAlgorithmList);

// The words that name one static argument, in the order in which they print.
constexpr std::pair<std::string_view, std::optional<std::size_t> OpRule::*> kArgWordList[] = {
    {"dims", &OpRule::dims_arg}, {"keepdim", &OpRule::keepdim_arg},   {"group", &OpRule::group_arg},
    {"size", &OpRule::size_arg}, {"whole_if", &OpRule::whole_if_arg}, {"pads", &OpRule::pads_arg},
};
constexpr Names<std::optional<std::size_t> OpRule::*> kArgWords(kArgWordList);

// What window() says, in the order in which it prints.
constexpr std::pair<std::string_view, std::optional<std::size_t> WindowArgs::*> kWindowList[] = {
    {"over", &WindowArgs::over},     {"kernel_of", &WindowArgs::kernel_of}, {"kernel", &WindowArgs::kernel},
    {"stride", &WindowArgs::stride}, {"padding", &WindowArgs::padding},     {"dilation", &WindowArgs::dilation},
};
constexpr Names<std::optional<std::size_t> WindowArgs::*> kWindowWords(kWindowList);

constexpr std::pair<std::string_view, bool OpRule::*> kFlagList[] = {{"move", &OpRule::may_move},
                                                                     {"exact", &OpRule::exact},
                                                                     {"index", &OpRule::indexed},
                                                                     {"skip_empty", &OpRule::skip_empty}};
constexpr Names<bool OpRule::*> kFlags(kFlagList);

constexpr std::pair<std::string_view, DimToken::Kind> kTokenList[] = {{"@", DimToken::Kind::kGroup},
                                                                      {"~", DimToken::Kind::kRest},
                                                                      {"^", DimToken::Kind::kStacked},
                                                                      {"_", DimToken::Kind::kAlone},
                                                                      {"*", DimToken::Kind::kAny}};
constexpr Names<DimToken::Kind> kTokens(kTokenList);

[[noreturn]] void refuse(const RuleText& text, const std::string& what) {
  fail_invalid("rule",
               {.what = what,
                .got = std::string(text.name) + ": " + std::string(text.pattern) + " " + std::string(text.words),
                .expected = std::string(kGrammar)});
}

TensorPattern parse_tensor(const RuleText& row, std::string_view text) {
  TensorPattern result;
  while (text.starts_with('+') || text.starts_with('#')) {
    (text.front() == '+' ? result.added : result.marked) = true;
    text.remove_prefix(1);
  }
  while (!text.empty()) {
    const char c = text.front();
    if (text.starts_with("...")) {
      result.dims.push_back({DimToken::Kind::kEllipsis, 0});
      text.remove_prefix(3);
      continue;
    }
    if (const auto* kind = find(kTokens, text.substr(0, 1))) {
      result.dims.push_back({*kind, 0});
    } else if (c >= 'a' && c <= 'z') {
      result.dims.push_back({DimToken::Kind::kLetter, c});
    } else if (c >= 'A' && c <= 'Z') {
      result.dims.push_back({DimToken::Kind::kWhole, c});
    } else {
      refuse(row, "a pattern has a character that is no dim");
    }
    text.remove_prefix(1);
  }
  return result;
}

std::vector<TensorPattern> parse_tensors(const RuleText& row, std::string_view text) {
  std::vector<TensorPattern> result;
  for (;;) {
    const std::size_t comma = text.find(',');
    result.push_back(parse_tensor(row, text.substr(0, comma)));
    if (comma == std::string_view::npos) return result;
    text.remove_prefix(comma + 1);
  }
}

template <class Value>
Value expect_name(Scanner& scanner, Names<Value> names) {
  const Value* value = find(names, scanner.name());
  if (!value) scanner.fail_here("no such word");
  return *value;
}

ReduceOp parse_reduction(Scanner& scanner) {
  const auto op = reduce_op_from(scanner.name());
  if (!op) scanner.fail_here("no such reduction");
  return *op;
}

Carry parse_carry(Scanner& scanner, Carry::Kind kind) {
  Carry carry{kind, {}, ReduceOp::kSum, 0, {}};
  if (kind == Carry::Kind::kOp) {
    carry.op = parse_reduction(scanner);
    scanner.expect(":");
  }
  do carry.operands.push_back(static_cast<std::size_t>(scanner.size()));
  while (scanner.take(","));
  if (kind == Carry::Kind::kSign) {
    scanner.expect(":");
    carry.arg = static_cast<std::size_t>(scanner.size());
  }
  if (kind == Carry::Kind::kTimes || kind == Carry::Kind::kOver) {
    scanner.expect(":");
    do carry.factors.push_back(static_cast<std::size_t>(scanner.size()));
    while (scanner.take(","));
  }
  return carry;
}

WindowArgs parse_window(Scanner& scanner) {
  WindowArgs window;
  do {
    const auto member = expect_name(scanner, kWindowWords);
    scanner.expect(":");
    window.*member = static_cast<std::size_t>(scanner.size());
  } while (scanner.take(","));
  return window;
}

std::string print_window(const WindowArgs& window) {
  std::string text;
  for (const auto& [word, member] : kWindowWords) {
    if (window.*member) text += (text.empty() ? "" : ",") + std::string(word) + ":" + std::to_string(*(window.*member));
  }
  return text;
}

// The words in brackets after a name; false when the word is not known.
bool parse_word(OpRule& rule, Scanner& scanner, std::string_view word) {
  if (const auto* kind = find(kCarries, word)) {
    rule.carries.push_back(parse_carry(scanner, *kind));
    if (*kind == Carry::Kind::kSign) rule.key.try_emplace(rule.carries.back().arg, KeyUse::kSign);
    for (const std::size_t factor : rule.carries.back().factors) rule.key[factor] = KeyUse::kScale;
  } else if (const auto* member = find(kArgWords, word)) {
    rule.*(*member) = static_cast<std::size_t>(scanner.size());
  } else if (const auto* algorithm = find(kAlgorithms, word)) {
    rule.algorithm = Algorithm{std::string(scanner.name()), *algorithm, false};
    if (scanner.take(":")) {
      if (scanner.name() != "plain") scanner.fail_here("no such word");
      rule.algorithm->plain = true;
    }
  } else if (word == "window") {
    rule.window = parse_window(scanner);
  } else if (word == "view") {
    rule.kind = RuleKind::kView;
    rule.view = expect_name(scanner, kViews);
  } else if (word == "reduce") {
    rule.reduce = parse_reduction(scanner);
  } else if (word == "mean") {
    const std::string space(scanner.name());
    scanner.expect("::");
    rule.mean_op = space + "::" + std::string(scanner.name());
  } else if (word == "reduction") {
    rule.reduction_arg = static_cast<std::size_t>(scanner.size());
    if (scanner.take(":")) rule.mean_form = expect_name(scanner, kMeans);
  } else if (word == "key") {
    const auto arg = static_cast<std::size_t>(scanner.size());
    scanner.expect(":");
    rule.key[arg] = expect_name(scanner, kKeys);
  } else if (word == "only_if") {
    OnlyIf condition;
    condition.arg = static_cast<std::size_t>(scanner.size());
    scanner.expect("=");
    const bool negative = scanner.take("-");
    condition.value = scanner.size() * (negative ? -1 : 1);
    if (scanner.take(":")) {
      condition.letters = scanner.name();
      if (scanner.take("@")) condition.letters += '@';
    }
    rule.only_if.push_back(std::move(condition));
  } else if (word == "scaled") {
    ScaledArg scaled;
    scaled.arg = static_cast<std::size_t>(scanner.size());
    scanner.expect(":");
    scaled.dim = static_cast<std::size_t>(scanner.size());
    rule.scaled = scaled;
  } else {
    return false;
  }
  return true;
}

void parse_words(OpRule& rule, std::string_view words) {
  Scanner scanner(words, "rule", kGrammar);
  while (!scanner.at_end()) {
    const std::string_view word = scanner.name();
    if (const auto* kind = find(kKinds, word)) {
      rule.kind = *kind;
      continue;
    }
    if (const auto* flag = find(kFlags, word)) {
      rule.*(*flag) = true;
      continue;
    }
    scanner.expect("(");
    if (!parse_word(rule, scanner, word)) scanner.fail_here("no such word");
    scanner.expect(")");
  }
}

std::string print(const TensorPattern& tensor) {
  std::string text = tensor.added ? "+" : "";
  if (tensor.marked) text += '#';
  for (const DimToken& token : tensor.dims) {
    switch (token.kind) {
      case DimToken::Kind::kLetter:
      case DimToken::Kind::kWhole:
        text += token.letter;
        break;
      case DimToken::Kind::kEllipsis:
        text += "...";
        break;
      default:
        text += name_of(kTokens, token.kind);
        break;
    }
  }
  return text;
}

void check(const RuleText& text, const OpRule& rule) {
  if (rule.kind == RuleKind::kFactors && rule.outputs.empty()) refuse(text, "a row has no pattern");
  for (const Carry& carry : rule.carries) {
    for (std::size_t operand : carry.operands) {
      if (operand >= rule.inputs.size()) refuse(text, "a word names an operand that the pattern lacks");
    }
  }
  const auto marked = [](const TensorPattern& tensor) { return tensor.marked; };
  const bool marks = std::any_of(rule.inputs.begin(), rule.inputs.end(), marked);
  if (marks != rule.algorithm.has_value()) refuse(text, "# and an algorithm need each other");
  const bool halo = rule.algorithm && rule.algorithm->kind == Algorithm::Kind::kHalo;
  if (halo != rule.window.has_value()) refuse(text, "a halo and its window need each other");
  if (!rule.window) return;
  const WindowArgs& window = *rule.window;
  const auto known = [&](const std::optional<std::size_t>& operand) {
    return operand && *operand < rule.inputs.size();
  };
  if (!known(window.over) || !rule.inputs[*window.over].marked ||
      (window.kernel ? window.kernel_of.has_value() : !known(window.kernel_of))) {
    refuse(text, "a window says no # operand that it is over, or not one kernel");
  }
}

}  // namespace

OpRule parse_rule(const RuleText& text) {
  const std::size_t end = text.pattern.find(';');
  if (end != std::string_view::npos) {
    OpRule rule = parse_rule({text.name, text.pattern.substr(0, end), text.words});
    OpRule next = parse_rule({text.name, text.pattern.substr(end + 1), text.words});
    if (next.inputs.size() != rule.inputs.size() || next.outputs.size() != rule.outputs.size()) {
      refuse(text, "the patterns of a row are of different numbers of tensors");
    }
    rule.others = std::exchange(next.others, {});
    rule.others.insert(rule.others.begin(), std::move(next));
    return rule;
  }
  OpRule rule;
  rule.name = text.name;
  if (!text.pattern.empty()) {
    const std::size_t arrow = text.pattern.find("->");
    if (arrow == std::string_view::npos) refuse(text, "a pattern has no arrow");
    rule.inputs = parse_tensors(text, text.pattern.substr(0, arrow));
    rule.outputs = parse_tensors(text, text.pattern.substr(arrow + 2));
  }
  parse_words(rule, text.words);
  check(text, rule);
  return rule;
}

std::string to_string(const Carry& carry) {
  std::string text = std::string(name_of(kCarries, carry.kind)) + "(";
  if (carry.kind == Carry::Kind::kOp) text += std::string(to_string(carry.op)) + ":";
  text += join_numbers(carry.operands);
  if (carry.kind == Carry::Kind::kSign) text += ":" + std::to_string(carry.arg);
  if (!carry.factors.empty()) text += ":" + join_numbers(carry.factors);
  return text + ")";
}

std::string to_string(const OpRule& rule) {
  std::string text = rule.name + ":";
  const auto add = [&](const std::string& word) { text += " " + word; };
  const auto add_call = [&](std::string_view word, const std::string& in) { add(std::string(word) + "(" + in + ")"); };
  const auto pattern = [](const OpRule& of) {
    return join(of.inputs, ",", print) + "->" + join(of.outputs, ",", print);
  };
  if (!rule.outputs.empty()) add(pattern(rule));
  for (const OpRule& other : rule.others) text += ";" + pattern(other);
  if (rule.kind == RuleKind::kView) add_call("view", std::string(name_of(kViews, rule.view)));
  if (find(kKinds, name_of(kKinds, rule.kind))) add(std::string(name_of(kKinds, rule.kind)));
  for (const auto& [word, flag] : kFlags) {
    if (rule.*flag) add(std::string(word));
  }
  for (const auto& [word, member] : kArgWords) {
    if (rule.*member) add_call(word, std::to_string(*(rule.*member)));
  }
  for (const OnlyIf& condition : rule.only_if) {
    add_call("only_if", std::to_string(condition.arg) + "=" + std::to_string(condition.value) +
                            (condition.letters.empty() ? "" : ":" + condition.letters));
  }
  if (rule.scaled) add_call("scaled", std::to_string(rule.scaled->arg) + ":" + std::to_string(rule.scaled->dim));
  if (rule.reduction_arg) {
    const std::string form =
        rule.mean_form == MeanForm::kScaled ? "" : ":" + std::string(name_of(kMeans, rule.mean_form));
    add_call("reduction", std::to_string(*rule.reduction_arg) + form);
  }
  if (rule.reduce) add_call("reduce", std::string(to_string(*rule.reduce)));
  if (!rule.mean_op.empty()) add_call("mean", rule.mean_op);
  if (rule.algorithm) {
    add_call(name_of(kAlgorithms, rule.algorithm->kind),
             rule.algorithm->name + (rule.algorithm->plain ? ":plain" : ""));
  }
  if (rule.window) add_call("window", print_window(*rule.window));
  for (const Carry& carry : rule.carries) add(to_string(carry));
  for (const auto& [arg, use] : rule.key) {
    add_call("key", std::to_string(arg) + ":" + std::string(name_of(kKeys, use)));
  }
  return text;
}

}  // namespace dtensor
