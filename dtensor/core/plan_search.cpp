// The cheapest sequence of collectives, as a shortest path. A state is what a spec says, in a few words: which mesh
// dims are Partial, and for each factor its list of cuts; gathering or moving a cut that others lie inside of leaves a
// virtual one in its place. A* over a flat table, below the time of the direct exchange.
#include <algorithm>
#include <queue>
#include <utility>

#include "dtensor/core/plan_space.h"

namespace dtensor {
namespace {

// The longer it takes, the less is insisted on: after so many expansions each further one drops what could save less
// than another 1/kPatience of the time. Few ranks are planned for exactly. On few mesh dims more expansions are exact
// where links differ, as the bound knows less there.
constexpr std::int64_t kExactExpanded = 32;
constexpr std::int64_t kExactWhereLinksDiffer = 96;
constexpr int kFewMeshDims = 3;
constexpr std::int64_t kExactOnFewRanks = 8'192;
constexpr std::int64_t kFewRanks = 8;
constexpr std::int64_t kThorough = 4;
constexpr std::int64_t kPatience = 512;

constexpr std::size_t kNowhere = kMostSlots;

class Search : SearchSpace {
 public:
  Search(const Spec& from, const Spec& to, const CostModel& cost, std::int64_t below, std::int64_t memory)
      : SearchSpace(from, to, cost), below_(below), memory_(memory) {}

  using SearchSpace::prepare;

  std::optional<std::vector<Step>> run() {
    if (start_ == goal_ && embedded_ == 0) return std::vector<Step>{};
    groups_.resize(std::size_t{1} << std::min<std::int64_t>(mesh_ndim_, 6));
    source_bytes_ = bytes_of(start_);
    target_bytes_ = bytes_of(goal_);
    prepare_bound();
    table_.assign(512, 0);
    nodes_.reserve(128);
    reach({start_, 0, 0, source_bytes_, 0, 0, 0, StepKind::kSlice});
    const std::int64_t exact = exactly_expanded();
    for (std::int64_t expanded = 0; !queue_.empty();) {
      const std::uint32_t index = ~queue_.top().second;
      queue_.pop();
      Node& node = nodes_[index];
      if (node.closed) continue;
      node.closed = true;
      slack_ = scaled(below_, std::max<std::int64_t>(0, expanded - exact), kPatience);
      const bool too_much = node.bound >= below_ - std::min(slack_, below_);
      if (too_much && by_promise_) break;
      if (too_much || node.state == goal_) continue;
      thorough_ = !even_ && (ranks_ <= kFewRanks || expanded < kThorough);
      expand(index);
      ++expanded;
    }
    for (std::uint32_t i = 1; i < nodes_.size(); ++i) {
      if (nodes_[i].state == goal_) return steps_of(path_to(i));
    }
    if (start_ == goal_) return steps_of({nodes_[0]});
    return std::nullopt;
  }

 private:
  std::int64_t exactly_expanded() const {
    if (ranks_ <= kFewRanks) return kExactOnFewRanks;
    return mixed_links_ && std::popcount(active_) <= kFewMeshDims ? kExactWhereLinksDiffer : kExactExpanded;
  }

  std::vector<Node> path_to(std::uint32_t index) const {
    std::vector<Node> path = {nodes_[index]};
    for (; index != 0; index = nodes_[index].parent) path.push_back(nodes_[nodes_[index].parent]);
    std::reverse(path.begin(), path.end());
    return path;
  }

  // ---- the table

  void reach(Node node) {
    if (node.cost - node.slice >= below_) return;
    std::size_t at = node.state.hash() & (table_.size() - 1);
    while (table_[at] != 0 && !(nodes_[table_[at] - 1].state == node.state)) at = (at + 1) & (table_.size() - 1);
    if (table_[at] != 0 && nodes_[table_[at] - 1].cost <= node.cost) return;
    const bool arrived = node.state == goal_;
    const std::int64_t spent = node.cost - node.slice;
    const std::int64_t below = below_ - (arrived ? 0 : std::min(slack_, below_));
    node.bound = saturating_add(spent, arrived ? node.slice : at_least(node.state, below - spent));
    if (node.bound >= below) return;
    if (table_[at] == 0) {
      nodes_.push_back(node);
      table_[at] = static_cast<std::uint32_t>(nodes_.size());
    } else {
      nodes_[table_[at] - 1] = node;
    }
    queue_.push({by_promise_ ? node.bound : haste(node), ~(table_[at] - 1)});
    if (2 * nodes_.size() > table_.size()) grow();
    if (!arrived) return;
    below_ = node.cost;
    if (!by_promise_ && std::popcount(active_) <= kFewMeshDims) requeue();
  }

  // Those that are nearly there go first: once a way is known, what cannot be better need not be looked at. On few mesh
  // dims, where the search ends by itself, those that promise most come first from then on: what cannot be better than
  // the best way of all is not looked at either.
  std::int64_t haste(const Node& node) const {
    const std::int64_t owed = node.bound - (node.cost - node.slice);
    return saturating_add(node.bound, saturating_add(owed, scaled(node.bound, unfinished(node.state), 8)));
  }

  void requeue() {
    by_promise_ = true;
    std::vector<Entry> open;
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      if (!nodes_[i].closed && nodes_[i].bound < below_) open.push_back({nodes_[i].bound, ~std::uint32_t(i)});
    }
    queue_ = decltype(queue_)(std::greater<>(), std::move(open));
  }

  // Mesh dims that something has to be done about before the last gather.
  std::int64_t unfinished(const State& state) const {
    Mask done = 0;
    Mask cuts = 0;
    for (std::size_t s = 0; s < lists_.size(); ++s) {
      const CutList& list = lists_[s][state.lists[s]];
      done |= list.settled | list.behind;
      cuts |= list.cuts;
    }
    return std::popcount((goal_mask_ | cuts | (state.partial & ~goal_.partial)) & ~done);
  }

  void grow() {
    table_.assign(2 * table_.size(), 0);
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      std::size_t at = nodes_[i].state.hash() & (table_.size() - 1);
      while (table_[at] != 0) at = (at + 1) & (table_.size() - 1);
      table_[at] = static_cast<std::uint32_t>(i + 1);
    }
  }

  // ---- moves

  void expand(std::uint32_t index) {
    now_ = index;
    state_ = nodes_[index].state;
    bytes_ = nodes_[index].bytes;
    Mask cuts = 0;
    Mask settled = 0;
    for (std::size_t s = 0; s < lists_.size(); ++s) {
      cuts |= list(s).cuts;
      settled |= list(s).settled;
    }
    free_ = active_ & ~cuts & ~state_.partial;
    // A slice that ends in its final place only makes everything after it smaller: take it at once.
    if (slice_into_place()) return;
    // Two gathers are one of both, where links and pieces are alike.
    if (mixed_links_ || !even_ || nodes_[index].kind != StepKind::kAllGather) {
      each_subset(cuts & ~settled, [&](Mask mask) { gather(mask); });
    }
    const Mask reducible = state_.partial & ~goal_.partial;
    each_subset(reducible, [&](Mask mask) { reduce(mask); });
    for (Mask rest = free_; rest; rest &= rest - 1) slice(std::countr_zero(rest));
    for (Mask rest = cuts & ~settled; rest; rest &= rest - 1) move(std::countr_zero(rest));
    move_groups(cuts & ~settled);
    permute();
  }

  const CutList& list(std::size_t s) const { return lists_[s][state_.lists[s]]; }
  const Entries& goal(std::size_t s) const { return lists_[s][goal_.lists[s]].entries; }
  bool wanted(int m) const { return goal_mask_ >> m & 1; }

  bool slice_into_place() {
    State next = state_;
    Mask mask = 0;
    for (Mask rest = free_ & goal_mask_; rest; rest &= rest - 1) {
      if (go_home(next, std::countr_zero(rest))) mask |= rest & -rest;
    }
    if (mask == 0) return false;
    emit(next, StepKind::kSlice, mask);
    // Unless there is so little that one slice later might be cheaper than one now and one later.
    const std::int64_t after = bytes_of(next);
    return scaled((bytes_ - after) / 2, dearer_[0], 1024) >= cost_.local(after);
  }

  template <class Fn>
  static void each_subset(Mask mask, Fn fn) {
    if (std::popcount(mask) <= 4) {
      for (Mask sub = mask; sub; sub = (sub - 1) & mask) fn(sub);
      return;
    }
    fn(mask);
    for (Mask rest = mask; rest; rest &= rest - 1) fn(rest & -rest);
  }

  void emit(const State& next, StepKind kind, Mask mask) {
    const std::int64_t bytes = bytes_of(next);
    if (memory_ >= 0 && live(next, kind, bytes) > memory_) return;
    const Node& now = nodes_[now_];
    const std::int64_t time = time_of(kind, mask, bytes);
    const bool slice = kind == StepKind::kSlice;
    const std::int64_t before = slice ? now.cost - now.slice : now.cost;
    reach({next, saturating_add(before, time), slice ? time : 0, bytes, 0, now_, mask, kind});
  }

  // The bytes of source, before and after. A slice that another step follows is read in place.
  std::int64_t live(const State& next, StepKind kind, std::int64_t bytes) const {
    const bool in_place = now_ == 0 || nodes_[now_].kind == StepKind::kSlice;
    if (kind == StepKind::kSlice && !(next == goal_)) return source_bytes_;
    return source_bytes_ + (in_place ? 0 : bytes_) + bytes;
  }

  std::int64_t time_of(StepKind kind, Mask mask, std::int64_t bytes) {
    switch (kind) {
      case StepKind::kAllGather:
        return cost_.all_gather(group(mask), bytes_);
      case StepKind::kReduceScatter:
        return cost_.reduce_scatter(group(mask), bytes);
      case StepKind::kAllReduce:
        return cost_.all_reduce(group(mask), bytes_);
      case StepKind::kAllToAll:
        return cost_.all_to_all(group(mask), bytes);
      case StepKind::kPermute:
        return cost_.permute(group(mask), bytes, 1);
      default:
        return cost_.local(bytes);
    }
  }

  // Cheaper to know than the state it leads to: a step, and then at least what the target has more.
  bool too_dear(std::int64_t time, std::int64_t bytes) const {
    const std::int64_t more = scaled(std::max<std::int64_t>(0, target_bytes_ - bytes), dearer_[0], 1024);
    return saturating_add(nodes_[now_].cost, saturating_add(time, more)) >= below_;
  }
  // Evenly cut pieces stay as large as they are, and others may grow.
  bool move_too_dear(Mask mask) { return even_ && too_dear(cost_.all_to_all(group(mask), bytes_), bytes_); }

  void gather(Mask mask) {
    const GroupCost& over = group(mask);
    if (!too_dear(cost_.all_gather(over, bytes_), scaled(bytes_, over.size, 1))) {
      emit(without(mask), StepKind::kAllGather, mask);
    }
  }

  State without(Mask mask) {
    State next = state_;
    for (std::size_t s = 0; s < lists_.size(); ++s) next.lists[s] = lists_[s].without(next.lists[s], mask);
    return next;
  }

  // ---- where a cut may go

  // To where the goal has it, if its factor is cut as the goal's so far and the place is free. There it is done with:
  // no other place is better.
  bool go_home(State& state, int m) {
    const std::size_t s = goal_slot_[m];
    const auto home = lists_[s].with_home(state.lists[s], m);
    if (home) state.lists[s] = *home;
    return home.has_value();
  }

  // Behind all that the goal has in a factor, where it is in nobody's way: the factor with the most elements, as one
  // such place is as good as another.
  bool park(State& state, int m, Mask except) {
    std::optional<std::size_t> best;
    CutLists::Index list = 0;
    for (std::size_t s = 0; s < lists_.size(); ++s) {
      if ((except >> s & 1) || (best && held(state, s) <= held(state, *best))) continue;
      const auto parked = lists_[s].with_parked(state.lists[s], m);
      if (!parked) continue;
      best = s;
      list = *parked;
    }
    if (best) state.lists[*best] = list;
    return best.has_value();
  }
  std::int64_t held(const State& state, std::size_t s) const { return lists_[s][state.lists[s]].held(); }

  // At every place of a factor where it stays within what is held: last, or instead of a virtual cut.
  template <class Fn>
  void each_place(const State& base, std::size_t s, int m, Fn fn) {
    State next = base;
    const std::size_t n = lists_[s][base.lists[s]].has_virtual ? lists_[s][base.lists[s]].entries.size() : 0;
    for (std::size_t i = 0; i < n; ++i) {
      const auto list = lists_[s].with_at(base.lists[s], i, m);
      if (!list) continue;
      next.lists[s] = *list;
      fn(next);
    }
    if (const auto list = lists_[s].with(base.lists[s], m)) {
      next.lists[s] = *list;
      fn(next);
    }
  }

  // Home; else parked, or into the blocked list that it is wanted in; else anywhere.
  template <class Fn>
  void each_way(const State& base, int m, std::size_t except, Fn fn) {
    State next = base;
    const std::size_t home = wanted(m) ? goal_slot_[m] : kNowhere;
    if (home != kNowhere && home != except && go_home(next, m)) {
      fn(next);
      if (!thorough_) return;
      next = base;
    }
    const bool parked = park(next, m, 1u << except | 1u << home);
    if (parked) fn(next);
    for (std::size_t s = 0; s < lists_.size(); ++s) {
      if (s != except && (s == home || !parked || thorough_)) each_place(base, s, m, fn);
    }
  }

  // ---- moves that cut

  void slice(int m) {
    // The order of parked cuts makes no difference.
    for (std::size_t s = 0; s < lists_.size(); ++s) {
      const Entries& entries = list(s).entries;
      const std::size_t n = entries.size();
      if (n == 0 || entries.is_virtual(n - 1)) continue;
      const Mask last = 1u << entries[n - 1];
      if (entries[n - 1] > m && (list(s).behind & initially_free_ & ~goal_mask_ & last) && !wanted(m)) return;
    }
    each_way(state_, m, kNowhere, [&](const State& next) { emit(next, StepKind::kSlice, 1u << m); });
  }

  void reduce(Mask mask) {
    State next = state_;
    next.partial &= ~mask;
    emit(next, StepKind::kAllReduce, mask);
    if ((mask & (mask - 1)) == 0) {
      const int m = std::countr_zero(mask);
      each_way(next, m, kNowhere, [&](const State& cut) { emit(cut, StepKind::kReduceScatter, mask); });
      return;
    }
    // Each home or parked; all into one factor where something blocks that.
    State cut = next;
    bool placed = true;
    for (Mask rest = mask; rest && placed; rest &= rest - 1) {
      const int m = std::countr_zero(rest);
      placed = (wanted(m) && go_home(cut, m)) || park(cut, m, wanted(m) ? 1u << goal_slot_[m] : 0);
    }
    if (placed) emit(cut, StepKind::kReduceScatter, mask);
    scatter_at_ends(next, mask);
    for (std::size_t s = 0; s < lists_.size() && !placed; ++s) {
      cut = next;
      if (append(cut, s, mask)) emit(cut, StepKind::kReduceScatter, mask);
    }
  }

  // What is wanted in a list that something blocks, at its end there.
  void scatter_at_ends(State next, Mask mask) {
    Mask blocked = 0;
    bool placed = true;
    for (Mask rest = mask; rest && placed; rest &= rest - 1) {
      const int m = std::countr_zero(rest);
      if (wanted(m) && go_home(next, m)) continue;
      if (wanted(m)) blocked |= 1u << m;
      placed = wanted(m) ? append(next, goal_slot_[m], 1u << m) : park(next, m, 0);
    }
    if (placed && blocked != 0) emit(next, StepKind::kReduceScatter, mask);
  }

  bool append(State& state, std::size_t s, Mask mask) {
    for (; mask; mask &= mask - 1) {
      const auto longer = lists_[s].with(state.lists[s], std::countr_zero(mask));
      if (!longer) return false;
      state.lists[s] = *longer;
    }
    return true;
  }

  // Each to the end of the list that it is in at the goal, in the goal's order.
  bool append_as_goal(State& state, Mask mask) {
    for (std::size_t s = 0; s < lists_.size(); ++s) {
      const Entries entries = goal(s);
      for (std::size_t i = 0; i < entries.size(); ++i) {
        if (entries.is_virtual(i) || !(mask >> entries[i] & 1)) continue;
        if (!append(state, s, 1u << entries[i])) return false;
      }
    }
    return true;
  }

  std::size_t slot_of(int m) const {
    std::size_t s = 0;
    while (s < lists_.size() && !(list(s).cuts >> m & 1)) ++s;
    return s;
  }

  void move(int m) {
    const std::size_t here = slot_of(m);
    const bool away = wanted(m) && goal_slot_[m] != here;
    // What is in nobody's way only moves to go home.
    if (!thorough_ && !away && (list(here).behind >> m & 1)) return;
    if (move_too_dear(1u << m)) return;
    each_way(without(1u << m), m, here, [&](const State& next) { emit(next, StepKind::kAllToAll, 1u << m); });
  }

  // Several cuts at once: those that are in the wrong factor, and the inner ends of a list.
  void move_groups(Mask cuts) {
    Mask away = 0;
    for (Mask rest = cuts & goal_mask_; rest; rest &= rest - 1) {
      const int m = std::countr_zero(rest);
      if (goal_slot_[m] != slot_of(m)) away |= 1u << m;
    }
    each_subset(away, [&](Mask mask) {
      if ((mask & (mask - 1)) == 0 || move_too_dear(mask)) return;
      const State base = without(mask);
      State next = base;
      bool home = true;
      for (Mask rest = mask; rest && home; rest &= rest - 1) home = go_home(next, std::countr_zero(rest));
      if (!home && mask == away) {
        next = base;
        home = append_as_goal(next, mask);
      }
      if (home) emit(next, StepKind::kAllToAll, mask);
    });
    for (std::size_t s = 0; s < lists_.size(); ++s) move_tails(s);
  }

  void move_tails(std::size_t s) {
    const Entries entries = list(s).entries;
    Mask tail = 0;
    for (std::size_t i = entries.size(); i-- > 0 && !entries.is_virtual(i);) {
      tail |= 1u << entries[i];
      if (i + 1 == entries.size() || (tail & list(s).behind) == tail || move_too_dear(tail)) continue;
      // Where cuts can go home there is no better place for them.
      if (even_ && (tail & ~goal_mask_) == 0) continue;
      const State base = without(tail);
      for (std::size_t t = 0; t < lists_.size(); ++t) {
        State next = base;
        bool room = t != s;
        for (std::size_t j = i; j < entries.size() && room; ++j) room = append(next, t, 1u << entries[j]);
        if (room) emit(next, StepKind::kAllToAll, tail);
      }
    }
  }

  // The pieces stay what they are and change ranks: another order, or another mesh dim of the same size.
  void permute() {
    for (std::size_t s = 0; s < lists_.size(); ++s) {
      if (!list(s).misplaced) continue;
      const Entries entries = list(s).entries;
      const Entries wanted = goal(s);
      reorder(s, entries, wanted);
      for (std::size_t i = 0; i < std::min(entries.size(), wanted.size()); ++i) {
        if (entries.is_virtual(i) || wanted.is_virtual(i) || !(free_ >> wanted[i] & 1) ||
            context_.sizes[entries[i]] != context_.sizes[wanted[i]]) {
          continue;
        }
        Entries other = entries;
        other.set(i, wanted[i]);
        State next = state_;
        next.lists[s] = lists_[s].index_of(other);
        emit(next, StepKind::kPermute, 1u << entries[i] | 1u << wanted[i]);
      }
    }
  }

  void reorder(std::size_t s, const Entries& entries, const Entries& wanted) {
    if (entries.size() != wanted.size()) return;
    Mask mask = 0;
    for (std::size_t i = 0; i < entries.size(); ++i) {
      if (!wanted.has(entries[i])) return;
      if (mask == 0 && entries[i] == wanted[i]) continue;
      if (entries.is_virtual(i)) return;
      mask |= 1u << entries[i];
    }
    State next = state_;
    next.lists[s] = goal_.lists[s];
    emit(next, StepKind::kPermute, mask);
  }

  std::int64_t below_;
  std::int64_t slack_ = 0;
  bool by_promise_ = false;
  bool thorough_ = false;  // where it matters where cuts stand, look at all places
  const std::int64_t memory_;

  std::vector<Node> nodes_;
  std::vector<std::uint32_t> table_;  // 1 + index of a node; 0 is empty
  // Of equal bounds the youngest goes first: it is the furthest.
  using Entry = std::pair<std::int64_t, std::uint32_t>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue_;

  // The node being expanded.
  std::uint32_t now_ = 0;
  State state_;
  std::int64_t bytes_ = 0;
  Mask free_ = 0;
};

}  // namespace

std::optional<std::vector<Step>> search_steps(const Spec& from, const Spec& to, const CostModel& cost,
                                              std::int64_t below, std::int64_t memory) {
  Search search(from, to, cost, below, memory);
  if (!search.prepare()) return std::nullopt;
  return search.run();
}

}  // namespace dtensor
