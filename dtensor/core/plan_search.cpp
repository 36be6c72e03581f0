// The cheapest sequence of collectives, as a shortest path. A state is what a spec says, in 32 bytes: which mesh dims
// are Partial, and for each factor its list of cuts; gathering or moving a cut that others lie inside of leaves a
// virtual one in its place. A* over a flat table; the bytes that the fullest rank still lacks are the bound.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <queue>

#include "dtensor/core/hash.h"
#include "dtensor/core/plan_impl.h"

namespace dtensor {
namespace {

constexpr std::size_t kMostSlots = 8;
constexpr std::size_t kMostEntries = 10;
constexpr std::size_t kCodeBytes = 32;
constexpr std::size_t kMostExpanded = 4'000;
constexpr std::uint8_t kFirstVirtual = 16;  // entries below are mesh dims, those from here on index virtual counts
constexpr std::uint8_t kEnd = 0xff;

using Mask = std::uint32_t;

// A list of cuts, outermost first.
struct Entries {
  std::uint8_t size = 0;
  std::array<std::uint8_t, kMostEntries> at = {};
  void push(std::uint8_t entry) { at[size++] = entry; }
  void cut_off_virtuals() {
    while (size > 0 && at[size - 1] >= kFirstVirtual) --size;
  }
  friend bool operator==(const Entries& a, const Entries& b) {
    return a.size == b.size && std::memcmp(a.at.data(), b.at.data(), a.size) == 0;
  }
};

struct State {
  Mask partial = 0;
  std::array<Entries, kMostSlots> slots;
};

struct Code {
  std::array<std::uint64_t, kCodeBytes / 8> words = {};
  friend bool operator==(const Code&, const Code&) = default;
  std::size_t hash() const {
    Hasher hasher;
    for (std::uint64_t word : words) hasher.add(word);
    return hasher.value();
  }
};

// A factor that both specs cut, possibly differently.
struct Slot {
  std::size_t dim;
  std::int64_t size;
};

struct Node {
  Code code;
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
      if (size == 1) continue;
      active_ |= 1u << m;
      if (from_.partials()[m]) start_.partial |= 1u << m;
      if (to_.partials()[m]) goal_.partial |= 1u << m;
      fastest_ = std::min(fastest_, links_.back().kib_ps);
      mixed_links_ = mixed_links_ || !(links_.back() == links_[std::countr_zero(active_)]);
    }
    goal_mask_ = cuts_of(goal_);
    return fits(start_) && fits(goal_);
  }

  bool at_goal() const { return encode(start_) == encode(goal_); }

  std::optional<std::vector<Step>> run() {
    groups_.resize(std::size_t{1} << std::min<std::int64_t>(mesh_ndim_, 6));
    target_bytes_ = bytes_of(goal_);
    source_bytes_ = bytes_of(start_);
    goal_code_ = encode(goal_);
    table_.assign(1024, 0);
    nodes_.reserve(256);
    reach(start_, source_bytes_, 0, 0, StepKind::kSlice, 0);
    std::size_t expanded = 0;
    while (!queue_.empty() && expanded < kMostExpanded) {
      const std::uint32_t index = queue_.top().second;
      queue_.pop();
      if (nodes_[index].closed) continue;
      nodes_[index].closed = true;
      if (nodes_[index].code == goal_code_) return trace(index);
      expand(index);
      ++expanded;
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
    if (slots_.size() == kMostSlots || a.cuts.size() > kMostEntries / 2 || b.cuts.size() > kMostEntries / 2)
      return false;
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

  Code encode(const State& state) const {
    std::array<std::uint8_t, kCodeBytes> bytes = {};
    bytes[0] = static_cast<std::uint8_t>(state.partial);
    bytes[1] = static_cast<std::uint8_t>(state.partial >> 8);
    std::size_t at = 2;
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      for (std::size_t i = 0; i < state.slots[s].size && at < kCodeBytes; ++i) bytes[at++] = state.slots[s].at[i] + 1;
      if (at < kCodeBytes) bytes[at++] = kEnd;
    }
    Code code;
    std::memcpy(code.words.data(), bytes.data(), kCodeBytes);
    return code;
  }

  State decode(const Code& code) const {
    std::array<std::uint8_t, kCodeBytes> bytes;
    std::memcpy(bytes.data(), code.words.data(), kCodeBytes);
    State state;
    state.partial = bytes[0] | static_cast<Mask>(bytes[1]) << 8;
    std::size_t at = 2;
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      while (bytes[at] != kEnd) state.slots[s].push(static_cast<std::uint8_t>(bytes[at++] - 1));
      ++at;
    }
    return state;
  }

  Mask cuts_of(const State& state) const {
    Mask mask = 0;
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      for (std::size_t i = 0; i < state.slots[s].size; ++i) {
        if (state.slots[s].at[i] < kFirstVirtual) mask |= 1u << state.slots[s].at[i];
      }
    }
    return mask;
  }

  std::int64_t most_held(std::int64_t size, const Entries& list, std::size_t i) const {
    for (; i < list.size; ++i) {
      const std::int64_t c = ceil_div(size, count_of_entry(list.at[i]));
      if (list.at[i] >= kFirstVirtual && c > 0) {
        const std::int64_t rest = size % c;
        return size / c * most_held(c, list, i + 1) + (rest > 0 ? most_held(rest, list, i + 1) : 0);
      }
      size = c;
    }
    return size;
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

  // ---- the table

  void reach(const State& state, std::int64_t bytes, std::int64_t cost, std::uint32_t parent, StepKind kind,
             Mask mask) {
    const std::int64_t lacks = scaled(std::max<std::int64_t>(0, target_bytes_ - bytes), fastest_, 1024);
    const std::int64_t bound = saturating_add(cost, lacks);
    if (bound >= below_) return;
    const Code code = encode(state);
    std::size_t at = code.hash() & (table_.size() - 1);
    while (table_[at] != 0 && !(nodes_[table_[at] - 1].code == code)) at = (at + 1) & (table_.size() - 1);
    if (table_[at] == 0) {
      nodes_.push_back({code, cost, bytes, parent, kind, mask});
      table_[at] = static_cast<std::uint32_t>(nodes_.size());
      queue_.push({bound, static_cast<std::uint32_t>(nodes_.size() - 1)});
      if (2 * nodes_.size() > table_.size()) grow();
      return;
    }
    Node& node = nodes_[table_[at] - 1];
    if (node.cost <= cost) return;
    node = {code, cost, bytes, parent, kind, mask};
    queue_.push({bound, table_[at] - 1});
  }

  void grow() {
    table_.assign(2 * table_.size(), 0);
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      std::size_t at = nodes_[i].code.hash() & (table_.size() - 1);
      while (table_[at] != 0) at = (at + 1) & (table_.size() - 1);
      table_[at] = static_cast<std::uint32_t>(i + 1);
    }
  }

  // ---- moves

  void expand(std::uint32_t index) {
    now_ = index;
    state_ = decode(nodes_[index].code);
    bytes_ = nodes_[index].bytes;
    const Mask cuts = cuts_of(state_);
    free_ = active_ & ~cuts & ~state_.partial;
    each_subset(cuts, [&](Mask mask) { gather(mask); });
    const Mask reducible = state_.partial & ~goal_.partial;
    each_subset(reducible, [&](Mask mask) { reduce(mask); });
    for (Mask rest = free_; rest; rest &= rest - 1) slice(std::countr_zero(rest));
    for (Mask rest = cuts; rest; rest &= rest - 1) move(std::countr_zero(rest));
    move_groups(cuts);
    permute();
    if (const Mask missing = free_ & goal_.partial; missing && reducible == 0) {
      State next = state_;
      next.partial |= missing;
      emit(next, StepKind::kEmbed, missing);
    }
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

  bool fits(const State& state) const {
    std::size_t length = 2 + slots_.size();
    for (std::size_t s = 0; s < slots_.size(); ++s) length += state.slots[s].size;
    return length <= kCodeBytes;
  }

  void emit(const State& next, StepKind kind, Mask mask) {
    if (!fits(next)) return;
    const std::int64_t bytes = bytes_of(next);
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
      for (std::size_t i = 0; i < list.size; ++i) {
        if (list.at[i] < kFirstVirtual && (mask >> list.at[i] & 1)) list.at[i] = virtual_entry(sizes_[list.at[i]]);
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
    for (std::size_t i = 0; i < list.size; ++i) {
      if (list.at[i] < kFirstVirtual || count_of_entry(list.at[i]) != sizes_[m]) continue;
      const std::uint8_t old = std::exchange(list.at[i], static_cast<std::uint8_t>(m));
      fn(next);
      list.at[i] = old;
    }
    if (list.size == kMostEntries || slots_[s].size <= 1) return;
    list.push(static_cast<std::uint8_t>(m));
    fn(next);
  }

  void slice(int m) {
    if (!(goal_mask_ >> m & 1) && !mixed_links_) return;
    for (std::size_t s = 0; s < slots_.size(); ++s) {
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
    if (list.size + std::popcount(mask) > static_cast<int>(kMostEntries)) return false;
    for (Mask rest = mask; rest; rest &= rest - 1) list.push(static_cast<std::uint8_t>(std::countr_zero(rest)));
    return true;
  }

  // Each to the end of the list that it is in at the goal, in the goal's order.
  void append_as_goal(State& state, Mask mask) const {
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      const Entries& goal = goal_.slots[s];
      for (std::size_t i = 0; i < goal.size; ++i) {
        if (goal.at[i] < kFirstVirtual && (mask >> goal.at[i] & 1) && state.slots[s].size < kMostEntries) {
          state.slots[s].push(goal.at[i]);
        }
      }
    }
  }

  std::size_t slot_of(int m) const {
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      for (std::size_t i = 0; i < state_.slots[s].size; ++i) {
        if (state_.slots[s].at[i] == m) return s;
      }
    }
    return slots_.size();
  }

  void move(int m) {
    const std::size_t home = slot_of(m);
    const State base = without(1u << m);
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      if (s == home) continue;
      each_place(base, s, m, [&](const State& next) { emit(next, StepKind::kAllToAll, 1u << m); });
    }
  }

  // Several cuts at once: all that are in the wrong factor, and the inner ends of a list.
  void move_groups(Mask cuts) {
    Mask astray = 0;
    for (Mask rest = cuts & goal_mask_; rest; rest &= rest - 1) {
      const int m = std::countr_zero(rest);
      const Entries& goal = goal_.slots[slot_of(m)];
      if (std::find(goal.at.begin(), goal.at.begin() + goal.size, m) == goal.at.begin() + goal.size) astray |= 1u << m;
    }
    if (std::popcount(astray) > 1) {
      State next = without(astray);
      append_as_goal(next, astray);
      emit(next, StepKind::kAllToAll, astray);
    }
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      const Entries& list = state_.slots[s];
      Mask tail = 0;
      for (std::size_t i = list.size; i-- > 0 && list.at[i] < kFirstVirtual;) {
        tail |= 1u << list.at[i];
        if (i + 1 == list.size) continue;
        const State base = without(tail);
        for (std::size_t t = 0; t < slots_.size(); ++t) {
          if (t == s || base.slots[t].size + std::popcount(tail) > static_cast<int>(kMostEntries)) continue;
          State next = base;
          for (std::size_t j = i; j < list.size; ++j) next.slots[t].push(list.at[j]);
          emit(next, StepKind::kAllToAll, tail);
        }
      }
    }
  }

  // The pieces stay what they are and change ranks: another order, or another mesh dim of the same size.
  void permute() {
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      const Entries& list = state_.slots[s];
      const Entries& goal = goal_.slots[s];
      if (list.size == goal.size && !(list == goal) &&
          std::is_permutation(list.at.begin(), list.at.begin() + list.size, goal.at.begin())) {
        std::size_t first = 0;
        while (list.at[first] == goal.at[first]) ++first;
        Mask mask = 0;
        bool real = true;
        for (std::size_t i = first; i < list.size; ++i) {
          real = real && list.at[i] < kFirstVirtual;
          if (real) mask |= 1u << list.at[i];
        }
        State next = state_;
        next.slots[s] = goal;
        if (real) emit(next, StepKind::kPermute, mask);
      }
      for (std::size_t i = 0; i < std::min(list.size, goal.size); ++i) {
        const std::uint8_t old = list.at[i];
        const std::uint8_t wanted = goal.at[i];
        if (old >= kFirstVirtual || wanted >= kFirstVirtual || !(free_ >> wanted & 1) ||
            sizes_[old] != sizes_[wanted]) {
          continue;
        }
        State next = state_;
        next.slots[s].at[i] = wanted;
        emit(next, StepKind::kPermute, 1u << old | 1u << wanted);
      }
    }
  }

  // ---- back to specs

  std::optional<Spec> spec_of(const Code& code) const {
    const State state = decode(code);
    DimLayouts dims(from_.dims().size());
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      Factor factor{slots_[s].size, {}};
      for (std::size_t i = 0; i < state.slots[s].size; ++i) {
        const std::uint8_t entry = state.slots[s].at[i];
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
      const auto after = i + 1 == path.size() ? std::optional(to_) : spec_of(node.code);
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
  std::int64_t element_ = 1;
  std::int64_t fastest_ = kForever;
  std::int64_t target_bytes_ = 0;
  std::int64_t source_bytes_ = 0;
  bool mixed_links_ = false;
  Mask active_ = 0;
  Mask goal_mask_ = 0;
  State start_;
  State goal_;
  Code goal_code_;
  std::vector<std::optional<GroupCost>> groups_;

  std::vector<Node> nodes_;
  std::vector<std::uint32_t> table_;  // 1 + index of a node; 0 is empty
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
  if (search.at_goal()) return std::vector<Step>{};
  return search.run();
}

}  // namespace dtensor
