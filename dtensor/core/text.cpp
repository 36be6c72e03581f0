#include "dtensor/core/text.h"

#include <charconv>

#include "dtensor/core/error.h"

namespace dtensor {
namespace {

bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
bool is_alpha(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_name_rest(char c) { return is_alpha(c) || is_digit(c) || c == '.' || c == '-'; }

}  // namespace

void Scanner::skip_blanks() {
  while (at_ < text_.size() && is_blank(text_[at_])) ++at_;
}

bool Scanner::at_end() {
  skip_blanks();
  return at_ == text_.size();
}

bool Scanner::peek(std::string_view token) {
  skip_blanks();
  return text_.substr(at_).starts_with(token);
}

bool Scanner::take(std::string_view token) {
  if (!peek(token)) return false;
  at_ += token.size();
  return true;
}

void Scanner::expect(std::string_view token) {
  if (!take(token)) fail_here("missing '" + std::string(token) + "'");
}

void Scanner::expect_end() {
  if (!at_end()) fail_here("text after the end");
}

std::int64_t Scanner::integer() {
  skip_blanks();
  std::int64_t value = 0;
  const char* begin = text_.data() + at_;
  const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), value);
  if (error == std::errc::result_out_of_range) fail_here("a number that does not fit in 64 bits");
  if (error != std::errc()) fail_here("missing number");
  at_ += static_cast<std::size_t>(end - begin);
  return value;
}

std::int64_t Scanner::size() {
  if (peek("-")) fail_here("a negative number");
  return integer();
}

std::string_view Scanner::name() {
  skip_blanks();
  std::size_t end = at_;
  if (end < text_.size() && is_alpha(text_[end])) {
    while (end < text_.size() && is_name_rest(text_[end])) ++end;
  }
  const auto result = text_.substr(at_, end - at_);
  at_ = end;
  return result;
}

void Scanner::fail_here(std::string_view what) {
  fail_invalid(where_, {.what = std::string(what) + " at column " + std::to_string(at_ + 1),
                        .got = in_quotes(text_),
                        .expected = std::string(grammar_)});
}

bool is_name(std::string_view text) {
  if (text.empty() || !is_alpha(text[0])) return false;
  for (char c : text) {
    if (!is_name_rest(c)) return false;
  }
  return true;
}

std::string in_quotes(std::string_view text) {
  constexpr std::size_t kLongest = 120;
  std::string result = "'";
  for (char c : text.substr(0, kLongest)) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      constexpr char kHex[] = "0123456789abcdef";
      result += "\\x";
      result += kHex[(c >> 4) & 15];
      result += kHex[c & 15];
    } else {
      result += c;
    }
  }
  if (text.size() > kLongest) result += "…";
  return result + "'";
}

}  // namespace dtensor
