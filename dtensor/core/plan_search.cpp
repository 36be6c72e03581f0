// The cheapest sequence of collectives, as a shortest path. A state is what a spec says, in a few words: which mesh
// dims are Partial, and for each factor its list of cuts; gathering or moving a cut that others lie inside of leaves a
// virtual one in its place. A* over a flat table, below the time of the direct exchange.
#include <algorithm>
#include <queue>

#include "dtensor/core/plan_impl.h"
#include "dtensor/core/plan_lists.h"

namespace dtensor {
namespace {

constexpr std::size_t kMostSlots = 6;
// The longer it takes, the less is insisted on: after so many expansions each further one drops what could save less
// than another 1/kPatience of the time; more patience where links differ and all ways may pay.
constexpr std::int64_t kExactExpanded = 32;
constexpr std::int64_t kPatience = 512;
constexpr std::int64_t kExactExpandedMixed = 256;
constexpr std::int64_t kPatienceMixed = 16'384;
// Comparing with more pieces than these is not worth what it saves.
constexpr std::int64_t kMostSampledPieces = 64;

struct State {
  std::array<CutLists::Index, kMostSlots> lists = {};
  Mask partial = 0;
  std::array<std::uint64_t, 2> words() const { return std::bit_cast<std::array<std::uint64_t, 2>>(*this); }
  friend bool operator==(const State& a, const State& b) {
    return a.words()[0] == b.words()[0] && a.words()[1] == b.words()[1];
  }
  std::size_t hash() const {
    const auto words = this->words();
    const std::uint64_t value = (words[0] ^ words[1] * 0x9E3779B97F4A7C15ull) * 0xD6E8FEB86659FD93ull;
    return static_cast<std::size_t>(value ^ value >> 32);
  }
};
static_assert(sizeof(State) == 16);

struct Node {
  State state;
  std::int64_t cost;
  std::int64_t slice;  // how much of it is a slice: the next one, if there is one, makes it one slice of both
  std::int64_t bytes;  // on the fullest rank
  std::int64_t bound;  // what a way through here costs at least
  std::uint32_t parent;
  Mask mask;
  StepKind kind;
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

// A factor and what the two specs cut it by. One that neither cuts only makes everything larger.
struct Slot {
  std::size_t dim;
  std::int64_t size;
  Entries start;
  Entries goal;
};

class Search {
 public:
  Search(const Spec& from, const Spec& to, const CostModel& cost, std::int64_t below, std::int64_t memory)
      : from_(from), to_(to), cost_(cost), below_(below), memory_(memory), mesh_ndim_(from.mesh().ndim()) {}

  // False when the two specs do not fit the states.
  bool prepare() {
    if (mesh_ndim_ > static_cast<std::int64_t>(kMostListed)) return false;
    for (std::int64_t m = 0; m < mesh_ndim_; ++m) add_mesh_dim(m);
    for (std::size_t d = 0; d < from_.dims().size(); ++d) {
      if (!add_slots(d)) return false;
    }
    if (!choose_slots()) return false;
    for (std::size_t s = 0; s < used_.size(); ++s) {
      const Slot& slot = slots_[used_[s]];
      for (std::size_t i = 0; i < slot.goal.size(); ++i) {
        if (slot.goal.is_virtual(i)) continue;
        goal_mask_ |= 1u << slot.goal[i];
        goal_slot_[slot.goal[i]] = s;
      }
    }
    choose_samples();
    initially_free_ = active_ & ~start_.partial;
    for (std::size_t s = 0; s < used_.size(); ++s) {
      const Slot& slot = slots_[used_[s]];
      lists_.emplace_back(slot.size, &context_, slot.goal);
      start_.lists[s] = lists_[s].index_of(slot.start);
      goal_.lists[s] = lists_[s].index_of(slot.goal);
      initially_free_ &= ~lists_[s][start_.lists[s]].cuts;
    }
    return true;
  }

  std::optional<std::vector<Step>> run() {
    if (start_ == goal_ && embedded_ == 0) return std::vector<Step>{};
    groups_.resize(std::size_t{1} << std::min<std::int64_t>(mesh_ndim_, 6));
    source_bytes_ = bytes_of(start_);
    target_bytes_ = bytes_of(goal_);
    prepare_bound();
    table_.assign(512, 0);
    nodes_.reserve(128);
    reach({start_, 0, 0, source_bytes_, 0, 0, 0, StepKind::kSlice});
    const std::int64_t exact = mixed_links_ ? kExactExpandedMixed : kExactExpanded;
    for (std::int64_t expanded = 0; !queue_.empty();) {
      const std::uint32_t index = ~queue_.top().second;
      queue_.pop();
      Node& node = nodes_[index];
      if (node.closed) continue;
      node.closed = true;
      slack_ = scaled(below_, std::max<std::int64_t>(0, expanded - exact), mixed_links_ ? kPatienceMixed : kPatience);
      if (node.state == goal_ || node.bound >= below_ - std::min(slack_, below_)) continue;
      expand(index);
      ++expanded;
    }
    for (std::uint32_t i = 1; i < nodes_.size(); ++i) {
      if (nodes_[i].state == goal_) return trace(i);
    }
    return std::nullopt;
  }

 private:
  // ---- from specs

  void add_mesh_dim(std::int64_t m) {
    const std::int64_t size = from_.mesh().shape()[m];
    context_.sizes.push_back(size);
    links_.push_back(cost_.link_of(from_.mesh(), m));
    rounds_.push_back(CostModel::group(std::span(&links_.back(), 1), std::span(&size, 1)).rounds_ps);
    if (size == 1) return;
    active_ |= 1u << m;
    if (from_.partials()[m]) start_.partial |= 1u << m;
    // What is Replicate before it is embedded is Replicate for the search: see embed_where_smallest.
    if (to_.partials()[m] && from_.partials()[m]) goal_.partial |= 1u << m;
    if (to_.partials()[m] && !from_.partials()[m]) embedded_ |= 1u << m;
    fastest_ = std::min(fastest_, links_.back().kib_ps);
    least_message_ = std::min(least_message_, links_.back().message_ps);
    mixed_links_ = mixed_links_ || !(links_.back() == links_[std::countr_zero(active_)]);
  }

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
    if (a.cuts.size() > Entries::kMost || b.cuts.size() > Entries::kMost) return false;
    slots_.push_back({d, a.size, {}, {}});
    const auto read = [&](const Factor& factor, Entries& out) {
      for (const Cut& cut : factor.cuts) {
        if (!cut.is_virtual() && cut.count == 1) continue;
        out.push(cut.is_virtual() ? context_.virtual_entry(cut.count) : static_cast<std::uint8_t>(cut.mesh_dim));
      }
      out.cut_off_virtuals();
    };
    read(a, slots_.back().start);
    read(b, slots_.back().goal);
    return true;
  }

  // Only factors that are cut before or after are worth looking at, and the largest other one, to park cuts in.
  bool choose_slots() {
    const auto cut = [&](std::size_t s) { return slots_[s].start.size() > 0 || slots_[s].goal.size() > 0; };
    std::size_t parking = slots_.size();
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      if (!cut(s) && (parking == slots_.size() || slots_[s].size > slots_[parking].size)) parking = s;
    }
    unit_ = element_size(from_.meta().dtype());
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      if (cut(s) || s == parking) {
        used_.push_back(s);
      } else {
        unit_ *= slots_[s].size;
      }
    }
    return used_.size() <= kMostSlots;
  }

  // May every list that a factor can get cut it evenly?
  bool all_even() const {
    for (std::size_t s : used_) {
      Mask cuts = active_ & ~goal_mask_;
      std::int64_t pieces = 1;
      for (const Entries* list : {&slots_[s].start, &slots_[s].goal}) {
        for (std::size_t i = 0; i < list->size(); ++i) {
          if (list->is_virtual(i)) {
            pieces *= context_.count((*list)[i]);
          } else {
            cuts |= 1u << (*list)[i];
          }
        }
      }
      if (pieces > kMostSampledPieces) return false;
      for (; cuts; cuts &= cuts - 1) pieces *= context_.sizes[std::countr_zero(cuts)];
      if (slots_[s].size % pieces != 0) return false;
    }
    return true;
  }

  // Coordinates that tell the mesh dims apart by their first and last index. Where cuts are uneven, a step may cost
  // less than such a rank receives, so there is nothing to learn from them.
  void choose_samples() {
    even_ = all_even();
    if (!even_) return;
    for (unsigned pattern = 0; pattern < kMostSamples; ++pattern) {
      Dims at;
      for (std::int64_t m = 0; m < mesh_ndim_; ++m) {
        const auto code = static_cast<unsigned>(m) % 4;
        const bool last = (code >> (pattern >> 1) & 1) != (pattern & 1);
        at.push_back(last ? context_.sizes[m] - 1 : 0);
      }
      context_.samples.push_back(at);
    }
  }

  // ---- what is still to be paid

  void prepare_bound() {
    ranks_ = from_.mesh().size();
    planes_ = size_of_group(goal_.partial & start_.partial);
    wanters_ = ranks_ / size_of_group(goal_mask_) / planes_;
    gathered_ = active_ & ~goal_mask_;
    for (Mask rest = goal_mask_; rest; rest &= rest - 1) {
      for (std::int64_t m = 0; m < mesh_ndim_; ++m) {
        if (context_.sizes[m] == context_.sizes[std::countr_zero(rest)]) gathered_ &= ~(1u << m);
      }
    }
    for (std::size_t k = 0; k < context_.samples.size(); ++k) {
      wanted_bytes_[k] = unit_;
      for (const CutLists& lists : lists_) wanted_bytes_[k] *= lists.wanted()[k];
    }
  }

  // The bytes that some rank must still receive, whatever the way. Of an element in k parts that w ranks want: k-1
  // receives until the parts have met, w-1 more, and one where no rank that wants it has a part; shared by all ranks at
  // best. A cut that goes to another factor of evenly cut ones leaves one element in its size where it is wanted.
  std::int64_t bytes_owed(const State& state, std::int64_t bytes) const {
    if (const Mask parts = state.partial & ~goal_.partial; parts != 0) {
      const std::int64_t k = size_of_group(parts);
      std::int64_t owed = scaled(from_.meta().nbytes(), (k + wanters_ - 2) * planes_, ranks_);
      if (even_) {
        const std::int64_t away = from_.meta().nbytes() - from_.meta().nbytes() / size_of_group(moved_cuts(state));
        owed = saturating_add(owed, scaled(away, planes_, ranks_));
      }
      return owed;
    }
    std::int64_t lacking = 0;
    for (std::size_t k = 0; k < context_.samples.size(); ++k) {
      std::int64_t common = unit_;
      for (std::size_t s = 0; s < lists_.size(); ++s) common *= lists_[s][state.lists[s]].common[k];
      lacking = std::max(lacking, wanted_bytes_[k] - common);
    }
    // Where several cuts change places at once a rank may keep nothing, and yet pay as if it kept its share.
    if (const Mask moved = moved_cuts(state); (moved & (moved - 1)) != 0) lacking -= lacking / size_of_group(moved);
    return std::max(lacking, target_bytes_ - bytes);
  }

  std::int64_t size_of_group(Mask mask) const {
    std::int64_t size = 1;
    for (; mask; mask &= mask - 1) size *= context_.sizes[std::countr_zero(mask)];
    return size;
  }

  // The cuts that the goal has in another factor.
  Mask moved_cuts(const State& state) const {
    Mask moved = 0;
    for (std::size_t s = 0; s < lists_.size(); ++s) {
      moved |= lists_[s][state.lists[s]].cuts & ~lists_[s][goal_.lists[s]].cuts;
    }
    return moved & goal_mask_;
  }

  // And the messages of the mesh dims that are Partial or cut the wrong factor, each by a gather, a reduction or an
  // all-to-all at least; a permute where a cut is only out of place.
  std::int64_t at_least(const State& state, std::int64_t bytes) const {
    std::int64_t messages = 0;
    Mask astray = 0;
    bool misplaced = false;
    for (std::size_t s = 0; s < lists_.size(); ++s) {
      const CutList& list = lists_[s][state.lists[s]];
      astray |= list.astray;
      misplaced = misplaced || list.misplaced;
    }
    if (misplaced) {
      messages = saturating_add(cost_.constants().step_ps, astray == 0 ? least_message_ : 0);
    }
    if (const Mask parts = state.partial & ~goal_.partial; parts != 0) {
      messages = saturating_add(messages, cost_.constants().step_ps);
      astray |= parts;
      for (Mask rest = parts & gathered_; rest; rest &= rest - 1) {
        messages = saturating_add(messages, rounds_[std::countr_zero(rest)]);
      }
    }
    for (; astray; astray &= astray - 1) messages = saturating_add(messages, rounds_[std::countr_zero(astray)]);
    return saturating_add(messages, scaled(bytes_owed(state, bytes), fastest_, 1024));
  }

  std::int64_t bytes_of(const State& state) const {
    std::int64_t bytes = unit_;
    for (std::size_t s = 0; s < lists_.size(); ++s) bytes *= lists_[s][state.lists[s]].held;
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
        sizes.push_back(context_.sizes[std::countr_zero(rest)]);
      }
      entry = CostModel::group(links, sizes);
    }
    return *entry;
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
      each_subset(cuts & ~settled, [&](Mask mask) { emit(without(mask), StepKind::kAllGather, mask); });
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
    return mixed_links_ || !(goal_mask_ >> m & 1) || goal(s).has(static_cast<std::uint8_t>(m));
  }

  // Where cuts by these stand in nobody's way: behind a list that has all of the goal's, the one with the most
  // elements. One such place is as good as another.
  std::optional<std::size_t> parking(Mask mask) const {
    std::optional<std::size_t> best;
    if (mixed_links_) return best;
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

  // ---- back to specs

  std::optional<Spec> spec_of(const State& state) const {
    DimLayouts dims(from_.dims().size());
    std::size_t u = 0;
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      Factor factor{slots_[s].size, {}};
      if (u < used_.size() && used_[u] == s) {
        const Entries& entries = lists_[u][state.lists[u]].entries;
        for (std::size_t i = 0; i < entries.size(); ++i) {
          const std::int64_t count = context_.count(entries[i]);
          if (entries.is_virtual(i)) {
            factor.cuts.push_back({Cut::kVirtual, std::clamp<std::int64_t>(factor.size, 1, count)});
          } else {
            factor.cuts.push_back({entries[i], count});
          }
        }
        ++u;
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

  // One step more: where the mesh dims that are to be embedded have nothing to do any more, and a rank holds least.
  void embed_where_smallest(std::vector<Node>& path) const {
    if (embedded_ == 0) return;
    std::size_t best = path.size();
    std::int64_t bytes = target_bytes_;
    for (std::size_t i = path.size(); i-- > 0;) {
      const Node& node = path[i];
      Mask busy = node.mask | (node.kind == StepKind::kAllReduce || node.kind == StepKind::kReduceScatter ? ~0u : 0);
      const Node& before = i == 0 ? nodes_[0] : path[i - 1];
      for (std::size_t s = 0; s < lists_.size(); ++s) busy |= lists_[s][before.state.lists[s]].cuts;
      if (busy & embedded_) break;
      if (before.bytes < bytes && (i == 0 || before.kind != StepKind::kSlice)) {
        best = i;
        bytes = before.bytes;
      }
    }
    for (std::size_t i = best; i < path.size(); ++i) path[i].state.partial |= embedded_;
    Node embed = best == 0 ? nodes_[0] : path[best - 1];
    embed.state.partial |= embedded_;
    embed.mask = embedded_;
    embed.kind = StepKind::kEmbed;
    path.insert(path.begin() + static_cast<std::ptrdiff_t>(best), embed);
  }

  std::optional<std::vector<Step>> trace(std::uint32_t index) const {
    std::vector<Node> path;
    for (; index != 0; index = nodes_[index].parent) path.push_back(nodes_[index]);
    std::reverse(path.begin(), path.end());
    embed_where_smallest(path);
    std::vector<Step> steps;
    Spec before = from_;
    for (std::size_t i = 0; i < path.size(); ++i) {
      const Node& node = path[i];
      // Of slices that follow each other only the last one's spec is needed.
      const bool slice = node.kind == StepKind::kSlice;
      if (slice && i + 1 < path.size() && path[i + 1].kind == StepKind::kSlice) continue;
      const auto after = i + 1 == path.size() ? std::optional(to_) : spec_of(node.state);
      if (!after) return std::nullopt;
      steps.push_back({node.kind, {}, before, *after});
      for (Mask rest = is_local(node.kind) ? 0 : node.mask; rest; rest &= rest - 1) {
        steps.back().mesh_dims.push_back(std::countr_zero(rest));
      }
      if (node.kind == StepKind::kReduceScatter || node.kind == StepKind::kAllReduce) set_reduction(steps.back());
      before = *after;
    }
    return steps;
  }

  const Spec& from_;
  const Spec& to_;
  const CostModel& cost_;
  std::int64_t below_;
  std::int64_t slack_ = 0;
  const std::int64_t memory_;
  const std::int64_t mesh_ndim_;

  InlineVec<Slot, 4> slots_;
  InlineVec<std::size_t, 4> used_;  // slots that the states have lists for
  ListContext context_;
  std::vector<CutLists> lists_;
  std::array<std::size_t, kMostListed> goal_slot_ = {};
  InlineVec<Link, 4> links_;
  Dims rounds_;
  std::int64_t unit_ = 1;  // bytes of everything outside the used slots
  std::int64_t fastest_ = kForever;
  std::int64_t least_message_ = kForever;
  bool mixed_links_ = false;
  bool even_ = false;
  Mask active_ = 0;
  Mask goal_mask_ = 0;
  Mask embedded_ = 0;
  Mask initially_free_ = 0;
  State start_;
  State goal_;
  std::vector<std::optional<GroupCost>> groups_;

  // For the bound.
  Mask gathered_ = 0;  // what is reduced over these must be handed round as well: no permute can take it over
  std::int64_t source_bytes_ = 0;
  std::int64_t target_bytes_ = 0;
  std::int64_t ranks_ = 1;
  std::int64_t planes_ = 1;   // what stays Partial happens once for each of its parts
  std::int64_t wanters_ = 1;  // ranks of a plane that want the same element
  std::array<std::int64_t, kMostSamples> wanted_bytes_ = {};

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
