#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace dtensor {

// 1234567 as "1,234,567".
inline std::string with_separators(std::int64_t number) {
  std::string text = std::to_string(number);
  for (std::size_t at = text.size(); at > 3 && text[at - 4] != '-';) {
    at -= 3;
    text.insert(at, 1, ',');
  }
  return text;
}

// Ranks for an error, short however many there are: "rank 3", "ranks 3, 5, 8-20", "ranks 3, 5, 8-20 and 999,979
// others".
inline std::string rank_list(std::vector<std::int64_t> ranks) {
  constexpr int kMostItems = 8;
  std::sort(ranks.begin(), ranks.end());
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  std::size_t at = 0;
  for (int items = 0; at < ranks.size() && items < kMostItems; ++items) {
    std::size_t end = at + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (end - at < 3) end = at + 1;  // "4, 5" is no longer than "4-5"
    if (items > 0) text += ", ";
    text += std::to_string(ranks[at]);
    if (end - at > 1) text += "-" + std::to_string(ranks[end - 1]);
    at = end;
  }
  const auto others = static_cast<std::int64_t>(ranks.size() - at);
  if (others > 0) text += " and " + with_separators(others) + (others == 1 ? " other" : " others");
  return text;
}

// The members of a group, in its order, for an error: "{2,0,1}", and of a large group the first few.
inline std::string member_list(const std::vector<std::int64_t>& ranks) {
  constexpr std::size_t kMost = 64, kFew = 8;
  const std::size_t shown = ranks.size() > kMost ? kFew : ranks.size();
  std::string text = "{";
  for (std::size_t i = 0; i < shown; ++i) text += (i > 0 ? "," : "") + std::to_string(ranks[i]);
  if (shown < ranks.size()) {
    text += " and " + with_separators(static_cast<std::int64_t>(ranks.size() - shown)) + " others";
  }
  return text + "}";
}

}  // namespace dtensor
