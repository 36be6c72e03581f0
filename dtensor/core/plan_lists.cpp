#include "dtensor/core/plan_lists.h"

#include <algorithm>

namespace dtensor {
namespace {

// Comparing with more pieces than these is not worth what it saves.
constexpr std::int64_t kMostSampledPieces = 64;

}  // namespace

std::uint8_t ListContext::virtual_entry(std::int64_t count) {
  const auto it = std::find(virtuals.begin(), virtuals.end(), count);
  const auto index = static_cast<std::uint8_t>(it - virtuals.begin());
  if (it == virtuals.end()) virtuals.push_back(count);
  return static_cast<std::uint8_t>(kFirstVirtual + index);
}

CutLists::CutLists(std::int64_t size, ListContext* context, const Entries& goal)
    : size_(size), context_(context), goal_(goal), binary_(context->binary && size > 0) {
  words_.reserve(32);
  lists_.reserve(32);
  for (std::size_t level = 0; level < context->within.size(); ++level) {
    if (binary_) {
      goal_bits_[level] = bits_of(goal, context->within[level]);
      wanted_[level].fill(left_of(goal_bits_[level].said));
      continue;
    }
    const Entries wanted = joined(goal, context->within[level]);
    std::int64_t pieces = 1;
    for (std::size_t i = 0; i < wanted.size(); ++i) pieces *= wanted.is_virtual(i) ? context->count(wanted[i]) : 1;
    if (pieces > kMostSampledPieces) continue;
    for (std::size_t k = 0; k < context->samples.size(); ++k) {
      goal_at_[level].push_back(intervals_at(wanted, context->samples[k]));
      for (const Interval& interval : goal_at_[level].back()) wanted_[level][k] += interval.size();
    }
  }
}

CutLists::Index CutLists::index_of(const Entries& entries) {
  const auto it = std::find(words_.begin(), words_.end(), entries.word());
  if (it == words_.end()) {
    words_.push_back(entries.word());
    lists_.push_back(describe(entries));
    return static_cast<Index>(words_.size() - 1);
  }
  return static_cast<Index>(it - words_.begin());
}

std::int16_t CutLists::made(const Entries& entries) {
  if (context_->even && !cuts_evenly(entries)) return kNone;
  return static_cast<std::int16_t>(index_of(entries));
}

std::optional<CutLists::Index> CutLists::with(Index i, int m) {
  if (lists_[i].pushed[m] == kUnknown) {
    Entries entries = lists_[i].entries;
    const bool room = entries.size() < Entries::kMost && size_ > 1;
    if (room) entries.push(static_cast<std::uint8_t>(m));
    const std::int16_t longer = room ? made(entries) : kNone;
    lists_[i].pushed[m] = longer;
  }
  const std::int16_t known = lists_[i].pushed[m];
  return known < 0 ? std::nullopt : std::optional(static_cast<Index>(known));
}

std::optional<CutLists::Index> CutLists::with_home(Index i, int m) {
  if (lists_[i].homed[m] == kUnknown) {
    Entries entries = lists_[i].entries;
    std::size_t place = 0;
    while (place < goal_.size() && goal_[place] != m) ++place;
    bool free = lists_[i].aligned && place < goal_.size() && pad(entries, place + 1);
    free = free && entries.is_virtual(place);
    if (free) entries.set(place, static_cast<std::uint8_t>(m));
    const std::int16_t longer = free ? made(entries) : kNone;
    lists_[i].homed[m] = longer;
  }
  const std::int16_t known = lists_[i].homed[m];
  return known < 0 ? std::nullopt : std::optional(static_cast<Index>(known));
}

std::optional<CutLists::Index> CutLists::with_parked(Index i, int m) {
  if (lists_[i].parked[m] == kUnknown) {
    Entries entries = lists_[i].entries;
    const bool free = lists_[i].aligned && size_ > 1 && pad(entries, goal_.size()) && entries.size() < Entries::kMost;
    if (free) entries.push(static_cast<std::uint8_t>(m));
    const std::int16_t longer = free ? made(entries) : kNone;
    lists_[i].parked[m] = longer;
  }
  const std::int16_t known = lists_[i].parked[m];
  return known < 0 ? std::nullopt : std::optional(static_cast<Index>(known));
}

std::optional<CutLists::Index> CutLists::with_at(Index i, std::size_t place, int m) {
  Entries entries = lists_[i].entries;
  if (!entries.is_virtual(place) || context_->count(entries[place]) != context_->sizes[m]) return std::nullopt;
  entries.set(place, static_cast<std::uint8_t>(m));
  return index_of(entries);
}

// Virtual cuts of the goal's sizes up to a length. False where there is no room for them.
bool CutLists::pad(Entries& entries, std::size_t size) const {
  if (size > Entries::kMost) return false;
  for (std::size_t i = entries.size(); i < size; ++i) {
    entries.push(goal_.is_virtual(i) ? goal_[i] : context_->virtual_entry(context_->sizes[goal_[i]]));
  }
  return true;
}

CutLists::Index CutLists::without(Index i, Mask mask) {
  for (Mask rest = mask & lists_[i].cuts; rest; rest &= rest - 1) {
    const int m = std::countr_zero(rest);
    if (lists_[i].removed[m] == kUnknown) {
      const Index shorter = index_of(joined(lists_[i].entries, 1u << m));
      lists_[i].removed[m] = static_cast<std::int16_t>(shorter);
    }
    i = static_cast<Index>(lists_[i].removed[m]);
  }
  return i;
}

// What the ranks along some mesh dims hold together.
Entries CutLists::joined(const Entries& entries, Mask within) const {
  Entries result = entries;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (entries.is_virtual(i) || !(within >> entries[i] & 1)) continue;
    result.set(i, context_->virtual_entry(context_->sizes[entries[i]]));
  }
  result.cut_off_virtuals();
  return result;
}

bool CutLists::cuts_evenly(const Entries& entries) const {
  std::int64_t pieces = 1;
  for (std::size_t i = 0; i < entries.size(); ++i) pieces *= context_->count(entries[i]);
  return size_ % pieces == 0;
}

CutList CutLists::describe(const Entries& entries) const {
  CutList list;
  list.entries = entries;
  for (auto* known : {&list.pushed, &list.homed, &list.parked, &list.removed}) known->fill(kUnknown);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const bool here = i < goal_.size() && entries[i] == goal_[i];
    list.aligned = list.aligned && (i >= goal_.size() || context_->count(entries[i]) == context_->count(goal_[i]));
    if (entries.is_virtual(i)) {
      list.has_virtual = true;
      continue;
    }
    const Mask bit = 1u << entries[i];
    list.cuts |= bit;
    if (list.aligned && here) list.settled |= bit;
    if (list.aligned && i >= goal_.size() && !goal_.has(entries[i])) list.behind |= bit;
    if (!here) list.misplaced = true;
    if (!goal_.has(entries[i]) && !takes_over(entries[i])) list.astray |= bit;
  }
  for (std::size_t level = 0; level < context_->within.size(); ++level) describe_level(list, level);
  return list;
}

CutLists::Bits CutLists::bits_of(const Entries& entries, Mask within) const {
  Bits bits;
  int at = 0;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const int n = std::countr_zero(static_cast<std::uint64_t>(context_->count(entries[i])));
    if (!entries.is_virtual(i) && !(within >> entries[i] & 1)) {
      const std::uint64_t said = ((std::uint64_t{1} << n) - 1) << at;
      bits.said |= said;
      for (std::size_t k = 0; k < context_->samples.size(); ++k) {
        bits.ones[k] |= context_->samples[k][entries[i]] != 0 ? said : 0;
      }
    }
    at += n;
  }
  return bits;
}

void CutLists::describe_level(CutList& list, std::size_t level) const {
  if (binary_) {
    const Bits mine = bits_of(list.entries, context_->within[level]);
    const Bits& goal = goal_bits_[level];
    list.levels[level].held = left_of(mine.said);
    const std::uint64_t both = mine.said & goal.said;
    const std::int64_t common = left_of(mine.said | goal.said);
    for (std::size_t k = 0; k < context_->samples.size(); ++k) {
      list.levels[level].common[k] = ((mine.ones[k] ^ goal.ones[k]) & both) != 0 ? 0 : common;
    }
    return;
  }
  const Entries entries = level == 0 ? list.entries : joined(list.entries, context_->within[level]);
  LevelSizes& sizes = list.levels[level];
  sizes.held = most_held(size_, entries, 0);
  for (std::size_t k = 0; k < goal_at_[level].size(); ++k) {
    for (const Interval& wanted : goal_at_[level][k]) {
      sizes.common[k] += overlap({0, size_}, entries, 0, context_->samples[k], wanted);
    }
  }
}

// Could a permute hand the pieces of m to a mesh dim that the goal wants here?
bool CutLists::takes_over(int m) const {
  for (std::size_t i = 0; i < goal_.size(); ++i) {
    if (!goal_.is_virtual(i) && context_->sizes[goal_[i]] == context_->sizes[m]) return true;
  }
  return false;
}

std::int64_t CutLists::most_held(std::int64_t size, const Entries& list, std::size_t i) const {
  for (; i < list.size(); ++i) {
    const std::int64_t c = ceil_div(size, context_->count(list[i]));
    if (list.is_virtual(i) && c > 0) {
      const std::int64_t rest = size % c;
      return size / c * most_held(c, list, i + 1) + (rest > 0 ? most_held(rest, list, i + 1) : 0);
    }
    size = c;
  }
  return size;
}

std::int64_t CutLists::held_at(std::int64_t size, const Entries& list, std::size_t i, const Dims& at) const {
  for (; i < list.size() && size > 0; ++i) {
    const std::int64_t c = ceil_div(size, context_->count(list[i]));
    if (list.is_virtual(i)) {
      const std::int64_t rest = size % c;
      return size / c * held_at(c, list, i + 1, at) + (rest > 0 ? held_at(rest, list, i + 1, at) : 0);
    }
    size = std::clamp<std::int64_t>(size - c * at[list[i]], 0, c);
  }
  return size;
}

// Virtual pieces that lie inside of what is wanted count alike, so only those at its ends are entered.
std::int64_t CutLists::overlap(Interval piece, const Entries& list, std::size_t i, const Dims& at,
                               Interval wanted) const {
  for (; i < list.size(); ++i) {
    const Interval hit{std::max(piece.begin, wanted.begin), std::min(piece.end, wanted.end)};
    if (hit.empty()) return 0;
    if (hit == piece) return held_at(piece.size(), list, i, at);
    const std::int64_t count = context_->count(list[i]);
    if (!list.is_virtual(i)) {
      piece = chunk(piece, count, at[list[i]]);
      continue;
    }
    const std::int64_t c = ceil_div(piece.size(), count);
    const std::int64_t first = (hit.begin - piece.begin) / c;
    const std::int64_t last = (hit.end - 1 - piece.begin) / c;
    std::int64_t sum = overlap(chunk(piece, count, first), list, i + 1, at, wanted);
    if (last > first) sum += overlap(chunk(piece, count, last), list, i + 1, at, wanted);
    if (last > first + 1) sum += (last - first - 1) * held_at(c, list, i + 1, at);
    return sum;
  }
  return std::max<std::int64_t>(0, std::min(piece.end, wanted.end) - std::max(piece.begin, wanted.begin));
}

Intervals CutLists::intervals_at(const Entries& list, const Dims& at) const {
  Factor factor{size_, {}};
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::int64_t count = context_->count(list[i]);
    factor.cuts.push_back({list.is_virtual(i) ? Cut::kVirtual : list[i], count});
  }
  return intervals_of(factor, at);
}

}  // namespace dtensor
