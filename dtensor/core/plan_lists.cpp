#include "dtensor/core/plan_lists.h"

#include <algorithm>

namespace dtensor {

std::uint8_t ListContext::virtual_entry(std::int64_t count) {
  const auto it = std::find(virtuals.begin(), virtuals.end(), count);
  const auto index = static_cast<std::uint8_t>(it - virtuals.begin());
  if (it == virtuals.end()) virtuals.push_back(count);
  return static_cast<std::uint8_t>(kFirstVirtual + index);
}

CutLists::CutLists(std::int64_t size, ListContext* context, const Entries& goal)
    : size_(size), context_(context), goal_(goal) {
  words_.reserve(32);
  lists_.reserve(32);
  for (const Dims& at : context->samples) {
    goal_at_.push_back(intervals_at(goal, at));
    for (const Interval& interval : goal_at_.back()) wanted_[goal_at_.size() - 1] += interval.size();
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

CutLists::Index CutLists::with(Index i, int m) {
  if (lists_[i].pushed[m] < 0) {
    Entries entries = lists_[i].entries;
    entries.push(static_cast<std::uint8_t>(m));
    const Index longer = index_of(entries);
    lists_[i].pushed[m] = static_cast<std::int16_t>(longer);
  }
  return static_cast<Index>(lists_[i].pushed[m]);
}

CutLists::Index CutLists::without(Index i, Mask mask) {
  for (Mask rest = mask & lists_[i].cuts; rest; rest &= rest - 1) {
    const int m = std::countr_zero(rest);
    if (lists_[i].removed[m] < 0) {
      Entries entries = lists_[i].entries;
      for (std::size_t k = 0; k < entries.size(); ++k) {
        if (entries[k] == m) entries.set(k, context_->virtual_entry(context_->sizes[m]));
      }
      entries.cut_off_virtuals();
      const Index shorter = index_of(entries);
      lists_[i].removed[m] = static_cast<std::int16_t>(shorter);
    }
    i = static_cast<Index>(lists_[i].removed[m]);
  }
  return i;
}

CutList CutLists::describe(const Entries& entries) const {
  CutList list;
  list.entries = entries;
  list.pushed.fill(-1);
  list.removed.fill(-1);
  list.held = most_held(size_, entries, 0);
  list.finished = entries == goal_;
  bool in_place = true;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const bool here = i < goal_.size() && entries[i] == goal_[i];
    in_place = in_place && here;
    if (entries.is_virtual(i)) {
      list.has_virtual = true;
      continue;
    }
    const Mask bit = 1u << entries[i];
    list.cuts |= bit;
    if (in_place) list.settled |= bit;
    if (!here) list.misplaced = true;
    if (!goal_.has(entries[i]) && !takes_over(entries[i])) list.astray |= bit;
  }
  if (in_place && entries.size() < goal_.size() && !goal_.is_virtual(entries.size())) list.next = goal_[entries.size()];
  for (std::size_t k = 0; k < goal_at_.size(); ++k) {
    for (const Interval& wanted : goal_at_[k]) {
      list.common[k] += overlap({0, size_}, entries, 0, context_->samples[k], wanted);
    }
  }
  return list;
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

// Pre: the cuts are even. Pieces that lie inside of what is wanted count alike, so only those at its ends are entered.
std::int64_t CutLists::overlap(Interval piece, const Entries& list, std::size_t i, const Dims& at,
                               Interval wanted) const {
  for (; i < list.size(); ++i) {
    const Interval hit{std::max(piece.begin, wanted.begin), std::min(piece.end, wanted.end)};
    if (hit.empty()) return 0;
    if (hit == piece) return most_held(piece.size(), list, i);
    const std::int64_t count = context_->count(list[i]);
    if (!list.is_virtual(i)) {
      piece = chunk(piece, count, at[list[i]]);
      continue;
    }
    const std::int64_t c = piece.size() / count;
    const std::int64_t first = (hit.begin - piece.begin) / c;
    const std::int64_t last = (hit.end - 1 - piece.begin) / c;
    std::int64_t sum = overlap(chunk(piece, count, first), list, i + 1, at, wanted);
    if (last > first) sum += overlap(chunk(piece, count, last), list, i + 1, at, wanted);
    if (last > first + 1) sum += (last - first - 1) * most_held(c, list, i + 1);
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
