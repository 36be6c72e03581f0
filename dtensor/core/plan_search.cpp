// The cheapest sequence of collectives, as a shortest path. A state is what a spec says, in a few words: which mesh
// dims are Partial, and for each factor its list of cuts; gathering or moving a cut that others lie inside of leaves a
// virtual one in its place. A* over a flat table; the bytes that the fullest rank still lacks are the bound.
#include <algorithm>
#include <array>
#include <bit>
#include <queue>

#include "dtensor/core/plan_impl.h"

namespace dtensor {
namespace {

constexpr std::size_t kMostSlots = 6;
constexpr std::size_t kMostEntries = 8;
// After so many expansions the best way known so far is taken; more where links differ and all ways may pay.
constexpr std::size_t kMostExpanded = 200;
constexpr std::size_t kMostExpandedMixed = 2'000;
constexpr std::uint8_t kFirstVirtual = 16;  // entries below are mesh dims, those from here on index virtual counts

using Mask = std::uint32_t;

// A list of cuts, outermost first, one byte each: 1 + the entry, so that 0 is the end.
class Entries {
 public:
  std::size_t size() const { return static_cast<std::size_t>(71 - std::countl_zero(word_)) / 8; }
  bool full() const { return size() == kMostEntries; }
  std::uint8_t operator[](std::size_t i) const { return static_cast<std::uint8_t>((word_ >> 8 * i & 0xff) - 1); }
  void set(std::size_t i, std::uint8_t entry) {
    word_ = (word_ & ~(std::uint64_t{0xff} << 8 * i)) | std::uint64_t{entry + 1u} << 8 * i;
  }
  void push(std::uint8_t entry) { set(size(), entry); }
  void cut_off_virtuals() {
    for (std::size_t n = size(); n > 0 && (*this)[n - 1] >= kFirstVirtual; --n) {
      word_ &= ~(std::uint64_t{0xff} << 8 * (n - 1));
    }
  }
  bool has(std::uint8_t entry) const {
    for (std::size_t i = 0; i < size(); ++i) {
      if ((*this)[i] == entry) return true;
    }
    return false;
  }
  // Is this list the beginning of the other?
  bool begins(const Entries& other) const {
    const std::size_t n = size();
    return n == kMostEntries ? word_ == other.word_ : (other.word_ & ((std::uint64_t{1} << 8 * n) - 1)) == word_;
  }
  std::uint64_t word() const { return word_; }
  friend bool operator==(const Entries&, const Entries&) = default;

 private:
  std::uint64_t word_ = 0;
};

struct State {
  std::uint64_t partial = 0;
  std::array<Entries, kMostSlots> slots;
  friend bool operator==(const State&, const State&) = default;
  std::size_t hash() const {
    std::uint64_t value = partial;
    for (const Entries& list : slots) value = (value ^ list.word()) * 0x9E3779B97F4A7C15ull ^ value >> 31;
    return static_cast<std::size_t>(value ^ value >> 32);
  }
};

// A factor that both specs cut, possibly differently.
struct Slot {
  std::size_t dim;
  std::int64_t size;
};

struct Node {
  State state;
  std::int64_t cost;
  std::int64_t bytes;  // on the fullest rank
  std::uint32_t parent;
  StepKind kind;
  Mask mask;
  bool closed = false;
};

// [f : C][g : E] as one list, C then virtual(what is left of f) then E; only where C cuts f evenly.
std::optional<Factor> as_one_factor(const DimLayout& dim) {
  Factor result{size_of(dim), {}};
  for (std::size_t f = 0; f < dim.size(); ++f) {
    std::int64_t piece = dim[f].size;
    for (const Cut& cut : dim[f].cuts) {
      if (f + 1 < dim.size() && piece % cut.count != 0) return std::nullopt;
      result.cuts.push_back(cut);
      piece = ceil_div(piece, cut.count);
    }
    if (f + 1 == dim.size()) return result;
    if (piece > 1) result.cuts.push_back({Cut::kVirtual, piece});
  }
  return result;
}

class Search {
 public:
  Search(const Spec& from, const Spec& to, const CostModel& cost, std::int64_t below, std::int64_t memory)
      : from_(from), to_(to), cost_(cost), below_(below), memory_(memory), mesh_ndim_(from.mesh().ndim()) {}

  // False when the two specs do not fit the states.
  bool prepare() {
    if (mesh_ndim_ > kFirstVirtual) return false;
    for (std::size_t d = 0; d < from_.dims().size(); ++d) {
      if (!add_slots(d)) return false;
    }
    element_ = element_size(from_.meta().dtype());
    for (std::int64_t m = 0; m < mesh_ndim_; ++m) {
      const std::int64_t size = from_.mesh().shape()[m];
      sizes_.push_back(size);
      links_.push_back(cost_.link_of(from_.mesh(), m));
      rounds_.push_back(CostModel::group(std::span(&links_.back(), 1), std::span(&size, 1)).rounds_ps);
      if (size == 1) continue;
      active_ |= 1u << m;
      if (from_.partials()[m]) start_.partial |= 1u << m;
      if (to_.partials()[m]) goal_.partial |= 1u << m;
      fastest_ = std::min(fastest_, links_.back().kib_ps);
      mixed_links_ = mixed_links_ || !(links_.back() == links_[std::countr_zero(active_)]);
    }
    goal_mask_ = cuts_of(goal_);
    return true;
  }

  bool at_goal() const { return start_ == goal_; }

  std::optional<std::vector<Step>> run() {
    groups_.resize(std::size_t{1} << std::min<std::int64_t>(mesh_ndim_, 6));
    target_bytes_ = bytes_of(goal_);
    source_bytes_ = bytes_of(start_);
    table_.assign(1024, 0);
    nodes_.reserve(256);
    reach(start_, source_bytes_, 0, 0, StepKind::kSlice, 0);
    std::size_t expanded = 0;
    while (!queue_.empty() && expanded < (mixed_links_ ? kMostExpandedMixed : kMostExpanded)) {
      const std::uint32_t index = queue_.top().second;
      queue_.pop();
      if (nodes_[index].closed) continue;
      nodes_[index].closed = true;
      if (nodes_[index].state == goal_) return trace(index);
      expand(index);
      ++expanded;
    }
    for (std::uint32_t i = 1; i < nodes_.size(); ++i) {
      if (nodes_[i].state == goal_) return trace(i);
    }
    return std::nullopt;
  }

 private:
  // The factors of a tensor dim as slots: as they are when both specs have the same ones, else as one.
  bool add_slots(std::size_t d) {
    const DimLayout& a = from_.dims()[d];
    const DimLayout& b = to_.dims()[d];
    const bool same = a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(),
                                                         [](const auto& x, const auto& y) { return x.size == y.size; });
    if (same) {
      for (std::size_t f = 0; f < a.size(); ++f) {
        if (!add_slot(d, a[f], b[f])) return false;
      }
      return true;
    }
    const auto one = as_one_factor(a);
    const auto other = as_one_factor(b);
    return one && other && add_slot(d, *one, *other);
  }

  bool add_slot(std::size_t d, const Factor& a, const Factor& b) {
    if (slots_.size() == kMostSlots || a.cuts.size() > kMostEntries || b.cuts.size() > kMostEntries) return false;
    slots_.push_back({d, a.size});
    const auto read = [&](const Factor& factor, Entries& out) {
      for (const Cut& cut : factor.cuts) {
        if (!cut.is_virtual() && cut.count == 1) continue;
        out.push(cut.is_virtual() ? virtual_entry(cut.count) : static_cast<std::uint8_t>(cut.mesh_dim));
      }
      out.cut_off_virtuals();
    };
    read(a, start_.slots[slots_.size() - 1]);
    read(b, goal_.slots[slots_.size() - 1]);
    return true;
  }

  std::uint8_t virtual_entry(std::int64_t count) {
    const auto it = std::find(virtuals_.begin(), virtuals_.end(), count);
    const auto index = static_cast<std::uint8_t>(it - virtuals_.begin());
    if (it == virtuals_.end()) virtuals_.push_back(count);
    return static_cast<std::uint8_t>(kFirstVirtual + index);
  }

  std::int64_t count_of_entry(std::uint8_t entry) const {
    return entry < kFirstVirtual ? sizes_[entry] : virtuals_[entry - kFirstVirtual];
  }

  Mask cuts_of(const State& state) const {
    Mask mask = 0;
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      for (std::size_t i = 0; i < state.slots[s].size(); ++i) {
        if (state.slots[s][i] < kFirstVirtual) mask |= 1u << state.slots[s][i];
      }
    }
    return mask;
  }

  std::int64_t most_held(std::int64_t size, const Entries& list, std::size_t i) const {
    for (; i < list.size(); ++i) {
      const std::int64_t c = ceil_div(size, count_of_entry(list[i]));
      if (list[i] >= kFirstVirtual && c > 0) {
        const std::int64_t rest = size % c;
        return size / c * most_held(c, list, i + 1) + (rest > 0 ? most_held(rest, list, i + 1) : 0);
      }
      size = c;
    }
    return size;
  }

  // Only what differs from the state being expanded is computed again.
  std::int64_t bytes_after(const State& next) const {
    std::int64_t bytes = element_;
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      bytes *= next.slots[s] == state_.slots[s] ? held_[s] : most_held(slots_[s].size, next.slots[s], 0);
    }
    return bytes;
  }

  std::int64_t bytes_of(const State& state) const {
    std::int64_t bytes = element_;
    for (std::size_t s = 0; s < slots_.size(); ++s) bytes *= most_held(slots_[s].size, state.slots[s], 0);
    return bytes;
  }

  const GroupCost& group(Mask mask) {
    if (mask >= groups_.size()) groups_.resize(std::size_t{mask} + 1);
    auto& entry = groups_[mask];
    if (!entry) {
      InlineVec<Link, 4> links;
      InlineVec<std::int64_t, 4> sizes;
      for (Mask rest = mask; rest; rest &= rest - 1) {
        links.push_back(links_[std::countr_zero(rest)]);
        sizes.push_back(sizes_[std::countr_zero(rest)]);
      }
      entry = CostModel::group(links, sizes);
    }
    return *entry;
  }

  // What still has to be paid from a state, by any way: the bytes that the fullest rank lacks; and the messages of the
  // mesh dims that are Partial or cut the wrong factor, each by a gather, a reduction or an all-to-all at least.
  std::int64_t at_least(const State& state, std::int64_t bytes) const {
    std::int64_t result = scaled(std::max<std::int64_t>(0, target_bytes_ - bytes), fastest_, 1024);
    Mask astray = static_cast<Mask>(state.partial & ~goal_.partial);
    bool permutable = false;
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      for (std::size_t i = 0; i < state.slots[s].size(); ++i) {
        const std::uint8_t m = state.slots[s][i];
        if (m >= kFirstVirtual || goal_.slots[s].has(m)) continue;
        if (takes_over(goal_.slots[s], m)) {
          permutable = true;
        } else {
          astray |= 1u << m;
        }
      }
    }
    if (astray == 0 && !permutable) return result;
    result = saturating_add(result, cost_.constants().step_ps);
    for (; astray; astray &= astray - 1) result = saturating_add(result, rounds_[std::countr_zero(astray)]);
    return result;
  }

  // Could a permute hand the pieces of m to a mesh dim that the goal wants here?
  bool takes_over(const Entries& goal, std::uint8_t m) const {
    for (std::size_t i = 0; i < goal.size(); ++i) {
      if (goal[i] < kFirstVirtual && sizes_[goal[i]] == sizes_[m]) return true;
    }
    return false;
  }

  // ---- the table

  void reach(const State& state, std::int64_t bytes, std::int64_t cost, std::uint32_t parent, StepKind kind,
             Mask mask) {
    const std::int64_t bound = saturating_add(cost, at_least(state, bytes));
    if (bound >= below_) return;
    std::size_t at = state.hash() & (table_.size() - 1);
    while (table_[at] != 0 && !(nodes_[table_[at] - 1].state == state)) at = (at + 1) & (table_.size() - 1);
    if (table_[at] == 0) {
      nodes_.push_back({state, cost, bytes, parent, kind, mask});
      table_[at] = static_cast<std::uint32_t>(nodes_.size());
      queue_.push({bound, static_cast<std::uint32_t>(nodes_.size() - 1)});
      if (2 * nodes_.size() > table_.size()) grow();
      return;
    }
    Node& node = nodes_[table_[at] - 1];
    if (node.cost <= cost) return;
    node = {state, cost, bytes, parent, kind, mask};
    queue_.push({bound, table_[at] - 1});
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
    for (std::size_t s = 0; s < slots_.size(); ++s) held_[s] = most_held(slots_[s].size, state_.slots[s], 0);
    const Mask cuts = cuts_of(state_);
    free_ = active_ & ~cuts & ~state_.partial;
    // A slice that ends in its final place only makes everything after it smaller: take it at once.
    if (slice_into_place()) return;
    const Mask settled = settled_cuts();
    each_subset(cuts & ~settled, [&](Mask mask) { gather(mask); });
    const Mask reducible = state_.partial & ~goal_.partial;
    each_subset(reducible, [&](Mask mask) { reduce(mask); });
    for (Mask rest = free_; rest; rest &= rest - 1) slice(std::countr_zero(rest));
    for (Mask rest = cuts & ~settled; rest; rest &= rest - 1) move(std::countr_zero(rest));
    move_groups(cuts & ~settled);
    permute();
    if (const Mask missing = free_ & goal_.partial; missing && reducible == 0) {
      State next = state_;
      next.partial |= missing;
      emit(next, StepKind::kEmbed, missing);
    }
  }

  // The cuts that stand where the goal has them, with nothing else before them: nobody needs to touch these.
  Mask settled_cuts() const {
    Mask mask = 0;
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      const Entries& list = state_.slots[s];
      const Entries& goal = goal_.slots[s];
      for (std::size_t i = 0; i < std::min(list.size(), goal.size()) && list[i] == goal[i]; ++i) {
        if (list[i] < kFirstVirtual) mask |= 1u << list[i];
      }
    }
    return mask;
  }

  bool slice_into_place() {
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      const Entries& list = state_.slots[s];
      const Entries& goal = goal_.slots[s];
      if (list.size() >= goal.size() || !list.begins(goal)) continue;
      const std::uint8_t wanted = goal[list.size()];
      if (wanted >= kFirstVirtual || !(free_ >> wanted & 1)) continue;
      State next = state_;
      next.slots[s].push(wanted);
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
    const std::int64_t bytes = bytes_after(next);
    if (memory_ >= 0 && source_bytes_ + (now_ == 0 ? 0 : bytes_) + bytes > memory_) return;
    std::int64_t time = 0;
    switch (kind) {
      case StepKind::kAllGather:
        time = cost_.all_gather(group(mask), bytes_);
        break;
      case StepKind::kReduceScatter:
        time = cost_.reduce_scatter(group(mask), bytes);
        break;
      case StepKind::kAllReduce:
        time = cost_.all_reduce(group(mask), bytes_);
        break;
      case StepKind::kAllToAll:
        time = cost_.all_to_all(group(mask), bytes);
        break;
      case StepKind::kPermute:
        time = cost_.permute(group(mask), bytes, 1);
        break;
      default:
        time = cost_.local(bytes);
    }
    reach(next, bytes, saturating_add(nodes_[now_].cost, time), now_, kind, mask);
  }

  // Takes the cuts of these mesh dims out; where others lie inside, a virtual cut stays.
  State without(Mask mask) {
    State next = state_;
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      Entries& list = next.slots[s];
      for (std::size_t i = 0; i < list.size(); ++i) {
        if (list[i] < kFirstVirtual && (mask >> list[i] & 1)) list.set(i, virtual_entry(sizes_[list[i]]));
      }
      list.cut_off_virtuals();
    }
    return next;
  }

  void gather(Mask mask) { emit(without(mask), StepKind::kAllGather, mask); }

  // A cut by m at every place of a factor where it stays within what is held: last, or instead of a virtual cut.
  template <class Fn>
  void each_place(const State& base, std::size_t s, int m, Fn fn) {
    State next = base;
    Entries& list = next.slots[s];
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (list[i] < kFirstVirtual || count_of_entry(list[i]) != sizes_[m]) continue;
      const std::uint8_t old = list[i];
      list.set(i, static_cast<std::uint8_t>(m));
      fn(next);
      list.set(i, old);
    }
    if (list.full() || slots_[s].size <= 1) return;
    list.push(static_cast<std::uint8_t>(m));
    fn(next);
  }

  // Cuts only go where the goal has them; parking them elsewhere for a while pays only where links differ.
  bool may_park(std::size_t s, int m) const {
    return mixed_links_ || !(goal_mask_ >> m & 1) || goal_.slots[s].has(static_cast<std::uint8_t>(m));
  }

  void slice(int m) {
    // Replicas may share a reduction that is still to come, or the slow links.
    if (!(goal_mask_ >> m & 1) && !mixed_links_ && (state_.partial & ~goal_.partial) == 0) return;
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      if (!may_park(s, m)) continue;
      each_place(state_, s, m, [&](const State& next) { emit(next, StepKind::kSlice, 1u << m); });
    }
  }

  void reduce(Mask mask) {
    State next = state_;
    next.partial &= ~mask;
    emit(next, StepKind::kAllReduce, mask);
    if (std::popcount(mask) == 1) {
      for (std::size_t s = 0; s < slots_.size(); ++s) {
        each_place(next, s, std::countr_zero(mask),
                   [&](const State& cut) { emit(cut, StepKind::kReduceScatter, mask); });
      }
      return;
    }
    if ((mask & ~goal_mask_) == 0) {
      append_as_goal(next, mask);
      emit(next, StepKind::kReduceScatter, mask);
      return;
    }
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      State cut = next;
      if (append(cut.slots[s], mask)) emit(cut, StepKind::kReduceScatter, mask);
    }
  }

  bool append(Entries& list, Mask mask) const {
    if (list.size() + static_cast<std::size_t>(std::popcount(mask)) > kMostEntries) return false;
    for (Mask rest = mask; rest; rest &= rest - 1) list.push(static_cast<std::uint8_t>(std::countr_zero(rest)));
    return true;
  }

  // Each to the end of the list that it is in at the goal, in the goal's order.
  void append_as_goal(State& state, Mask mask) const {
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      const Entries& goal = goal_.slots[s];
      for (std::size_t i = 0; i < goal.size(); ++i) {
        if (goal[i] < kFirstVirtual && (mask >> goal[i] & 1) && !state.slots[s].full()) {
          state.slots[s].push(goal[i]);
        }
      }
    }
  }

  std::size_t slot_of(int m) const {
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      for (std::size_t i = 0; i < state_.slots[s].size(); ++i) {
        if (state_.slots[s][i] == m) return s;
      }
    }
    return slots_.size();
  }

  void move(int m) {
    const std::size_t home = slot_of(m);
    const State base = without(1u << m);
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      if (s == home || !may_park(s, m)) continue;
      each_place(base, s, m, [&](const State& next) { emit(next, StepKind::kAllToAll, 1u << m); });
    }
  }

  // Several cuts at once: all that are in the wrong factor, and the inner ends of a list.
  void move_groups(Mask cuts) {
    Mask astray = 0;
    for (Mask rest = cuts & goal_mask_; rest; rest &= rest - 1) {
      const int m = std::countr_zero(rest);
      const Entries& goal = goal_.slots[slot_of(m)];
      if (!goal.has(static_cast<std::uint8_t>(m))) astray |= 1u << m;
    }
    if (std::popcount(astray) > 1) {
      State next = without(astray);
      append_as_goal(next, astray);
      emit(next, StepKind::kAllToAll, astray);
    }
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      const Entries& list = state_.slots[s];
      Mask tail = 0;
      for (std::size_t i = list.size(); i-- > 0 && list[i] < kFirstVirtual;) {
        tail |= 1u << list[i];
        if (i + 1 == list.size()) continue;
        const State base = without(tail);
        for (std::size_t t = 0; t < slots_.size(); ++t) {
          if (t == s || !may_park(t, std::countr_zero(tail)) ||
              base.slots[t].size() + static_cast<std::size_t>(std::popcount(tail)) > kMostEntries)
            continue;
          State next = base;
          for (std::size_t j = i; j < list.size(); ++j) next.slots[t].push(list[j]);
          emit(next, StepKind::kAllToAll, tail);
        }
      }
    }
  }

  static bool same_entries(const Entries& a, const Entries& b) {
    for (std::size_t i = 0; i < a.size(); ++i) {
      if (!b.has(a[i])) return false;
    }
    return true;
  }

  // The pieces stay what they are and change ranks: another order, or another mesh dim of the same size.
  void permute() {
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      const Entries& list = state_.slots[s];
      const Entries& goal = goal_.slots[s];
      if (list.size() == goal.size() && !(list == goal) && same_entries(list, goal)) {
        std::size_t first = 0;
        while (list[first] == goal[first]) ++first;
        Mask mask = 0;
        bool real = true;
        for (std::size_t i = first; i < list.size(); ++i) {
          real = real && list[i] < kFirstVirtual;
          if (real) mask |= 1u << list[i];
        }
        State next = state_;
        next.slots[s] = goal;
        if (real) emit(next, StepKind::kPermute, mask);
      }
      for (std::size_t i = 0; i < std::min(list.size(), goal.size()); ++i) {
        const std::uint8_t old = list[i];
        const std::uint8_t wanted = goal[i];
        if (old >= kFirstVirtual || wanted >= kFirstVirtual || !(free_ >> wanted & 1) ||
            sizes_[old] != sizes_[wanted]) {
          continue;
        }
        State next = state_;
        next.slots[s].set(i, wanted);
        emit(next, StepKind::kPermute, 1u << old | 1u << wanted);
      }
    }
  }

  // ---- back to specs

  std::optional<Spec> spec_of(const State& state) const {
    DimLayouts dims(from_.dims().size());
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      Factor factor{slots_[s].size, {}};
      for (std::size_t i = 0; i < state.slots[s].size(); ++i) {
        const std::uint8_t entry = state.slots[s][i];
        const std::int64_t count = count_of_entry(entry);
        if (entry < kFirstVirtual) {
          factor.cuts.push_back({entry, count});
        } else {
          factor.cuts.push_back({Cut::kVirtual, std::clamp<std::int64_t>(factor.size, 1, count)});
        }
      }
      dims[slots_[s].dim].push_back(factor);
    }
    Partials partials(static_cast<std::size_t>(mesh_ndim_));
    for (std::int64_t m = 0; m < mesh_ndim_; ++m) {
      if (state.partial >> m & 1) partials[m] = from_.partials()[m] ? from_.partials()[m] : to_.partials()[m];
    }
    const auto spec = Spec::from_dims(from_.meta(), from_.mesh(), dims, partials);
    if (!spec) return std::nullopt;
    return *spec;
  }

  std::optional<std::vector<Step>> trace(std::uint32_t index) const {
    std::vector<std::uint32_t> path;
    for (; index != 0; index = nodes_[index].parent) path.push_back(index);
    std::reverse(path.begin(), path.end());
    std::vector<Step> steps;
    Spec before = from_;
    for (std::size_t i = 0; i < path.size(); ++i) {
      const Node& node = nodes_[path[i]];
      const auto after = i + 1 == path.size() ? std::optional(to_) : spec_of(node.state);
      if (!after) return std::nullopt;
      if (node.kind == StepKind::kSlice && !steps.empty() && steps.back().kind == StepKind::kSlice) {
        steps.back().after = *after;
      } else {
        steps.push_back({node.kind, {}, before, *after});
        for (Mask rest = is_local(node.kind) ? 0 : node.mask; rest; rest &= rest - 1) {
          steps.back().mesh_dims.push_back(std::countr_zero(rest));
        }
        if (node.kind == StepKind::kReduceScatter || node.kind == StepKind::kAllReduce) set_reduction(steps.back());
      }
      before = *after;
    }
    return steps;
  }

  const Spec& from_;
  const Spec& to_;
  const CostModel& cost_;
  const std::int64_t below_;
  const std::int64_t memory_;
  const std::int64_t mesh_ndim_;
  InlineVec<Slot, 4> slots_;
  InlineVec<std::int64_t, 8> virtuals_;
  Dims sizes_;
  InlineVec<Link, 4> links_;
  Dims rounds_;
  std::int64_t element_ = 1;
  std::int64_t fastest_ = kForever;
  std::int64_t target_bytes_ = 0;
  std::int64_t source_bytes_ = 0;
  bool mixed_links_ = false;
  Mask active_ = 0;
  Mask goal_mask_ = 0;
  State start_;
  State goal_;
  std::vector<std::optional<GroupCost>> groups_;

  std::vector<Node> nodes_;
  std::vector<std::uint32_t> table_;  // 1 + index of a node; 0 is empty
  using Entry = std::pair<std::int64_t, std::uint32_t>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue_;

  // The node being expanded.
  std::uint32_t now_ = 0;
  State state_;
  std::int64_t bytes_ = 0;
  std::array<std::int64_t, kMostSlots> held_ = {};
  Mask free_ = 0;
};

}  // namespace

std::optional<std::vector<Step>> search_steps(const Spec& from, const Spec& to, const CostModel& cost,
                                              std::int64_t below, std::int64_t memory) {
  Search search(from, to, cost, below, memory);
  if (!search.prepare()) return std::nullopt;
  if (search.at_goal()) return std::vector<Step>{};
  return search.run();
}

}  // namespace dtensor
