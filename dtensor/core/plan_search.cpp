// The cheapest sequence of collectives, as a shortest path. A state is what a spec says, in a few words: which mesh
// dims are Partial, and for each factor its list of cuts; gathering or moving a cut that others lie inside of leaves a
// virtual one in its place. A* over a flat table, below the time of the direct exchange.
#include <algorithm>
#include <queue>

#include "dtensor/core/plan_space.h"

namespace dtensor {
namespace {

// The longer it takes, the less is insisted on: after so many expansions each further one drops what could save less
// than another 1/kPatience of the time. More of both where links differ: the bound knows only the fastest.
constexpr std::int64_t kExactExpanded = 32;
constexpr std::int64_t kPatience = 512;
constexpr std::int64_t kMoreWhereLinksDiffer = 4;

// Where cuts may go: only where it must pay, or anywhere, which pays where links differ.
enum class Moves : std::uint8_t { kFew, kAll };

class Search : SearchSpace {
 public:
  Search(const Spec& from, const Spec& to, const CostModel& cost, std::int64_t below, std::int64_t memory, Moves moves)
      : SearchSpace(from, to, cost), below_(below), memory_(memory), wide_(moves == Moves::kAll) {}

  using SearchSpace::prepare;
  bool links_differ() const { return mixed_links_; }
  // The time of what was found, or what it should have been below.
  std::int64_t below() const { return below_; }

  std::optional<std::vector<Step>> run() {
    if (start_ == goal_ && embedded_ == 0) return std::vector<Step>{};
    groups_.resize(std::size_t{1} << std::min<std::int64_t>(mesh_ndim_, 6));
    source_bytes_ = bytes_of(start_);
    target_bytes_ = bytes_of(goal_);
    prepare_bound();
    table_.assign(512, 0);
    nodes_.reserve(128);
    reach({start_, 0, 0, source_bytes_, 0, 0, 0, StepKind::kSlice});
    const std::int64_t more = mixed_links_ ? kMoreWhereLinksDiffer : 1;
    for (std::int64_t expanded = 0; !queue_.empty();) {
      const std::uint32_t index = ~queue_.top().second;
      queue_.pop();
      Node& node = nodes_[index];
      if (node.closed) continue;
      node.closed = true;
      slack_ = scaled(below_, std::max<std::int64_t>(0, expanded - more * kExactExpanded), more * kPatience);
      if (node.state == goal_ || node.bound >= below_ - std::min(slack_, below_)) continue;
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
    const std::int64_t owed = arrived ? node.slice : at_least(node.state, node.bytes);
    node.bound = saturating_add(node.cost - node.slice, owed);
    if (node.bound >= below_ - (arrived ? 0 : std::min(slack_, below_))) return;
    if (table_[at] == 0) {
      nodes_.push_back(node);
      table_[at] = static_cast<std::uint32_t>(nodes_.size());
    } else {
      nodes_[table_[at] - 1] = node;
    }
    // Those that are nearly there go first: once a way is known, what cannot be better need not be looked at.
    queue_.push({saturating_add(node.bound, owed / 4), ~(table_[at] - 1)});
    if (2 * nodes_.size() > table_.size()) grow();
    if (arrived) below_ = node.cost;
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

  bool slice_into_place() {
    for (std::size_t s = 0; s < lists_.size(); ++s) {
      const int wanted = list(s).next;
      if (wanted < 0 || !(free_ >> wanted & 1)) continue;
      State next = state_;
      next.lists[s] = lists_[s].with(next.lists[s], wanted);
      emit(next, StepKind::kSlice, 1u << wanted);
      return true;
    }
    return false;
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

  void gather(Mask mask) {
    // Cheaper to know than the state it leads to.
    const std::int64_t time = cost_.all_gather(group(mask), bytes_);
    if (saturating_add(nodes_[now_].cost, time) < below_) emit(without(mask), StepKind::kAllGather, mask);
  }

  State without(Mask mask) {
    State next = state_;
    for (std::size_t s = 0; s < lists_.size(); ++s) next.lists[s] = lists_[s].without(next.lists[s], mask);
    return next;
  }

  // A cut by m at every place of a factor where it stays within what is held: last, or instead of a virtual cut.
  template <class Fn>
  void each_place(const State& base, std::size_t s, int m, Fn fn) {
    State next = base;
    if (lists_[s][base.lists[s]].has_virtual) {
      Entries entries = lists_[s][base.lists[s]].entries;
      for (std::size_t i = 0; i < entries.size(); ++i) {
        if (!entries.is_virtual(i) || context_.count(entries[i]) != context_.sizes[m]) continue;
        const std::uint8_t old = entries[i];
        entries.set(i, static_cast<std::uint8_t>(m));
        next.lists[s] = lists_[s].index_of(entries);
        fn(next);
        entries.set(i, old);
      }
    }
    if (!lists_[s].room(base.lists[s]) || lists_[s].size() <= 1) return;
    next.lists[s] = lists_[s].with(base.lists[s], m);
    fn(next);
  }

  // Cuts only go where the goal has them; parking them elsewhere for a while pays only where links differ.
  bool may_park(std::size_t s, int m) const {
    return wide_ || !(goal_mask_ >> m & 1) || goal(s).has(static_cast<std::uint8_t>(m));
  }

  // Where cuts by these stand in nobody's way: behind a list that has all of the goal's, the one with the most
  // elements. One such place is as good as another.
  std::optional<std::size_t> parking(Mask mask) const {
    std::optional<std::size_t> best;
    if (wide_) return best;
    const std::int64_t pieces = size_of_group(mask);
    for (std::size_t s = 0; s < lists_.size(); ++s) {
      const CutList& now = list(s);
      if (lists_[s][goal_.lists[s]].cuts & ~now.settled || now.has_virtual || !lists_[s].room(state_.lists[s]))
        continue;
      if (now.held % pieces == 0 && (!best || now.held > list(*best).held)) best = s;
    }
    return best;
  }

  // Could the cuts hold the next places of a factor for the goal's, which are of the same sizes and go there once these
  // are gathered again?
  bool stand_in(std::size_t s, Mask mask) const {
    const Entries& wanted = goal(s);
    std::size_t i = list(s).entries.size();
    for (; mask; mask &= mask - 1, ++i) {
      if (i >= wanted.size() || context_.count(wanted[i]) != context_.sizes[std::countr_zero(mask)]) return false;
    }
    return true;
  }

  void slice(int m) {
    // Replicas may share a reduction that is still to come, or the slow links.
    const bool wanted = goal_mask_ >> m & 1;
    if (!wanted && !mixed_links_ && (state_.partial & ~goal_.partial) == 0) return;
    const auto park = wanted ? std::nullopt : parking(1u << m);
    for (std::size_t s = 0; s < lists_.size(); ++s) {
      if (!may_park(s, m) || (park && s != *park && !stand_in(s, 1u << m))) continue;
      // The order of parked cuts makes no difference.
      const Entries& entries = list(s).entries;
      const std::size_t n = entries.size();
      if (park && n > goal(s).size() && entries[n - 1] > m && (initially_free_ >> entries[n - 1] & 1)) continue;
      each_place(state_, s, m, [&](const State& next) { emit(next, StepKind::kSlice, 1u << m); });
    }
  }

  void reduce(Mask mask) {
    State next = state_;
    next.partial &= ~mask;
    emit(next, StepKind::kAllReduce, mask);
    if ((mask & (mask - 1)) == 0) {
      scatter(next, std::countr_zero(mask));
    } else if ((mask & ~goal_mask_) == 0) {
      append_as_goal(next, mask);
      emit(next, StepKind::kReduceScatter, mask);
    } else {
      const auto park = parking(mask & ~goal_mask_);
      for (std::size_t s = 0; s < lists_.size(); ++s) {
        State cut = next;
        if ((!park || stand_in(s, mask)) && append(cut, s, mask)) emit(cut, StepKind::kReduceScatter, mask);
      }
      if (!park) return;
      append_as_goal(next, mask & goal_mask_);
      if (append(next, *park, mask & ~goal_mask_)) emit(next, StepKind::kReduceScatter, mask);
    }
  }

  void scatter(const State& reduced, int m) {
    const bool wanted = goal_mask_ >> m & 1;
    const bool ready = wanted && list(goal_slot_[m]).next == m;
    const auto park = parking(1u << m);
    for (std::size_t s = 0; s < lists_.size(); ++s) {
      const bool home = wanted && s == goal_slot_[m];
      if (ready ? !home : park && s != *park && !home && !stand_in(s, 1u << m)) continue;
      each_place(reduced, s, m, [&](const State& cut) { emit(cut, StepKind::kReduceScatter, 1u << m); });
    }
  }

  bool append(State& state, std::size_t s, Mask mask) {
    if (!lists_[s].room(state.lists[s], static_cast<std::size_t>(std::popcount(mask)))) return false;
    for (; mask; mask &= mask - 1) state.lists[s] = lists_[s].with(state.lists[s], std::countr_zero(mask));
    return true;
  }

  // Each to the end of the list that it is in at the goal, in the goal's order.
  void append_as_goal(State& state, Mask mask) {
    for (std::size_t s = 0; s < lists_.size(); ++s) {
      const Entries entries = goal(s);
      for (std::size_t i = 0; i < entries.size(); ++i) {
        if (!entries.is_virtual(i) && (mask >> entries[i] & 1) && lists_[s].room(state.lists[s])) {
          state.lists[s] = lists_[s].with(state.lists[s], entries[i]);
        }
      }
    }
  }

  std::size_t slot_of(int m) const {
    std::size_t s = 0;
    while (s < lists_.size() && !(list(s).cuts >> m & 1)) ++s;
    return s;
  }

  void move(int m) {
    const std::size_t home = slot_of(m);
    const bool wanted = goal_mask_ >> m & 1;
    const auto park = wanted ? std::nullopt : parking(1u << m);
    // What the goal has not got may only have to make room.
    if (park && (lists_[home][goal_.lists[home]].cuts & ~list(home).settled) == 0) return;
    const State base = without(1u << m);
    for (std::size_t s = 0; s < lists_.size(); ++s) {
      if (s == home || !may_park(s, m) || (park && s != *park)) continue;
      each_place(base, s, m, [&](const State& next) { emit(next, StepKind::kAllToAll, 1u << m); });
    }
  }

  // Several cuts at once: all that are in the wrong factor, and the inner ends of a list.
  void move_groups(Mask cuts) {
    Mask astray = 0;
    for (Mask rest = cuts & goal_mask_; rest; rest &= rest - 1) {
      const int m = std::countr_zero(rest);
      if (goal_slot_[m] != slot_of(m)) astray |= 1u << m;
    }
    if ((astray & (astray - 1)) != 0) {
      State next = without(astray);
      append_as_goal(next, astray);
      emit(next, StepKind::kAllToAll, astray);
    }
    for (std::size_t s = 0; s < lists_.size(); ++s) move_tails(s);
  }

  void move_tails(std::size_t s) {
    const Entries entries = list(s).entries;
    Mask tail = 0;
    for (std::size_t i = entries.size(); i-- > 0 && !entries.is_virtual(i);) {
      tail |= 1u << entries[i];
      if (i + 1 == entries.size()) continue;
      const State base = without(tail);
      for (std::size_t t = 0; t < lists_.size(); ++t) {
        if (t == s || !may_park(t, std::countr_zero(tail)) || !lists_[t].room(base.lists[t], entries.size() - i)) {
          continue;
        }
        State next = base;
        for (std::size_t j = i; j < entries.size(); ++j) next.lists[t] = lists_[t].with(next.lists[t], entries[j]);
        emit(next, StepKind::kAllToAll, tail);
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
  const std::int64_t memory_;
  const bool wide_;

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
  Search search(from, to, cost, below, memory, Moves::kFew);
  if (!search.prepare()) return std::nullopt;
  auto found = search.run();
  if (!search.links_differ()) return found;
  Search wider(from, to, cost, search.below(), memory, Moves::kAll);
  wider.prepare();
  auto better = wider.run();
  return better ? std::move(better) : std::move(found);
}

}  // namespace dtensor
