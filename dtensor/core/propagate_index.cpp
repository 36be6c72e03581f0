#include <algorithm>

#include "dtensor/core/propagate_impl.h"

namespace dtensor {
namespace {

using Tokens = std::vector<DimToken>;

DimToken letter(std::int64_t which) {
  return {DimToken::Kind::kLetter, static_cast<char>('a' + static_cast<char>(which))};
}
constexpr DimToken kWholeToken{DimToken::Kind::kWhole, 'I'};
constexpr std::int64_t kMostDims = 13;  // half of the letters are for operand 0, half for the indices

// The operands of the list of indices: the second tensor argument of the schema.
OrReason<ArgRef> list_of(const OpCall& call) {
  bool first = true;
  for (const ArgRef& arg : call.args) {
    if (arg.is_tensor && !std::exchange(first, false)) return arg;
  }
  return Reason{"it has no list of indices"};
}

class Patterns {
 public:
  Patterns(const OpCall& call, const ArgRef& list, bool writes)
      : call_(call), list_(list), writes_(writes), ndim_(call.operands[0]->meta().ndim()) {}

  OrReason<IndexPatterns> make() {
    gone_.resize(static_cast<std::size_t>(ndim_), false);
    for (std::size_t i = list_.first; i < list_.first + list_.count; ++i) {
      const auto& index = call_.operands[i];
      if (!index) return Reason{"an index is no distributed tensor"};
      if (index->meta().dtype() == DType::kBool || index->meta().dtype() == DType::kU8) {
        return Reason{"an index is a mask"};
      }
      const std::size_t at = call_.items.empty() ? i - list_.first : call_.items[i];
      if (at >= gone_.size()) return Reason{"there are more indices than dims"};
      gone_[at] = true;
      width_ = std::max(width_, index->meta().ndim());
    }
    if (list_.count == 0 || ndim_ > kMostDims || width_ > kMostDims) return Reason{"it has too few or too many dims"};
    IndexPatterns patterns;
    const Tokens looked_up = result();
    for (std::size_t i = 0; i < call_.operands.size(); ++i) {
      if (i == 0) {
        patterns.inputs.push_back({self(), false});
      } else if (i < list_.first + list_.count) {
        patterns.inputs.push_back({last(index_dims(), ndim_of(i)), false});
      } else {
        if (ndim_of(i) > static_cast<std::int64_t>(looked_up.size())) return Reason{"the values have too many dims"};
        patterns.inputs.push_back({last(looked_up, ndim_of(i)), false});
      }
    }
    patterns.output = {writes_ ? self() : looked_up, false};
    return patterns;
  }

 private:
  std::int64_t ndim_of(std::size_t i) const { return call_.operands[i] ? call_.operands[i]->meta().ndim() : 0; }
  static Tokens last(const Tokens& tokens, std::int64_t count) {
    return {tokens.end() - static_cast<std::ptrdiff_t>(count), tokens.end()};
  }

  Tokens self() const {
    Tokens tokens;
    for (std::int64_t d = 0; d < ndim_; ++d) tokens.push_back(gone_[d] ? kWholeToken : letter(d));
    return tokens;
  }
  Tokens index_dims() const {
    Tokens tokens;
    for (std::int64_t d = 0; d < width_; ++d) tokens.push_back(writes_ ? kWholeToken : letter(kMostDims + d));
    return tokens;
  }
  // The dims of the indices stand where the first looked-up dim stood, or in front when the looked-up dims are not
  // neighbours.
  Tokens result() const {
    const auto first = std::find(gone_.begin(), gone_.end(), true) - gone_.begin();
    std::ptrdiff_t after = first;
    while (after < static_cast<std::ptrdiff_t>(gone_.size()) && gone_[static_cast<std::size_t>(after)]) ++after;
    const bool together = std::find(gone_.begin() + after, gone_.end(), true) == gone_.end();
    const Tokens indices = index_dims();
    Tokens tokens = together ? Tokens() : indices;
    for (std::int64_t d = 0; d < ndim_; ++d) {
      if (together && d == first) tokens.insert(tokens.end(), indices.begin(), indices.end());
      if (!gone_[d]) tokens.push_back(letter(d));
    }
    return tokens;
  }

  const OpCall& call_;
  const ArgRef& list_;
  const bool writes_;
  const std::int64_t ndim_;
  std::int64_t width_ = 0;  // dims of the indices, broadcast together
  InlineVec<bool, 8> gone_;
};

}  // namespace

OrReason<IndexPatterns> index_patterns(const OpRule& rule, const OpCall& call) {
  const auto list = list_of(call);
  if (!list) return Reason{list.reason()};
  if (call.operands.empty() || !call.operands[0]) return Reason{"what is looked up in is no distributed tensor"};
  return Patterns(call, *list, rule.inputs.size() > 2).make();
}

}  // namespace dtensor
