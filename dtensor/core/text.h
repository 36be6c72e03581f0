#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace dtensor {

// A cursor over text that comes from outside. Every parser of this library reads through it, so that all of them skip
// blanks alike, refuse numbers that do not fit, and point at the column where they gave up.
class Scanner {
 public:
  // `where` names the parser in errors, `grammar` is what it expects, shown after "expected".
  Scanner(std::string_view text, std::string_view where, std::string_view grammar)
      : text_(text), where_(where), grammar_(grammar) {}

  bool at_end();
  // Does the next token start with this? Takes it if so.
  bool take(std::string_view token);
  bool peek(std::string_view token);
  void expect(std::string_view token);
  void expect_end();
  // A decimal integer, with an optional minus.
  std::int64_t integer();
  // A non-negative decimal integer.
  std::int64_t size();
  // [A-Za-z_][A-Za-z0-9_.-]*; empty when there is none.
  std::string_view name();

  [[noreturn]] void fail_here(std::string_view what);

 private:
  void skip_blanks();

  std::string_view text_;
  std::string_view where_;
  std::string_view grammar_;
  std::size_t at_ = 0;
};

// A name that can be printed and parsed again: [A-Za-z_][A-Za-z0-9_.-]*.
bool is_name(std::string_view text);

// "a, b, c" for messages and prints.
template <class Range, class Print>
std::string join(const Range& items, std::string_view separator, Print print) {
  std::string text;
  bool first = true;
  for (const auto& item : items) {
    if (!first) text += separator;
    first = false;
    text += print(item);
  }
  return text;
}

template <class Range>
std::string join_numbers(const Range& items, std::string_view separator = ",") {
  return join(items, separator, [](auto item) { return std::to_string(item); });
}

// Text from outside as it may stand in an error: quoted, cut to a readable length, control characters escaped.
std::string in_quotes(std::string_view text);

}  // namespace dtensor
