#include "dtensor/core/plan_space.h"

#include <algorithm>

namespace dtensor {
namespace {

// Each step's time is rounded down to a picosecond; what is owed by all of them at once would not be.
constexpr std::int64_t kMostRounded = 16;

// The last sample, where there is one.
constexpr std::size_t kOrigin = kMostSamples - 1;

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

}  // namespace

bool SearchSpace::prepare() {
  if (mesh_ndim_ > static_cast<std::int64_t>(kMostListed)) return false;
  for (std::int64_t m = 0; m < mesh_ndim_; ++m) add_mesh_dim(m);
  for (Mask mask = 0; mask < (1u << std::min<std::int64_t>(mesh_ndim_, 4)); ++mask) sizes_.push_back(multiplied(mask));
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
  even_ = context_.even = all_even();
  const auto power_of_two = [](std::int64_t n) { return std::has_single_bit(static_cast<std::uint64_t>(n)); };
  context_.binary = even_ && std::all_of(context_.sizes.begin(), context_.sizes.end(), power_of_two) &&
                    std::all_of(context_.virtuals.begin(), context_.virtuals.end(), power_of_two);
  choose_samples();
  choose_levels();
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

void SearchSpace::add_mesh_dim(std::int64_t m) {
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
  least_size_ = std::min(least_size_, size);
  least_message_ = std::min(least_message_, links_.back().message_ps);
  mixed_links_ = mixed_links_ || !(links_.back() == links_[std::countr_zero(active_)]);
}

bool SearchSpace::add_slots(std::size_t d) {
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

bool SearchSpace::add_slot(std::size_t d, const Factor& a, const Factor& b) {
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

bool SearchSpace::choose_slots() {
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

bool SearchSpace::all_even() const {
  for (std::size_t s : used_) {
    Mask cuts = 0;
    std::int64_t pieces = 1;
    for (const Entries* list : {&slots_[s].start, &slots_[s].goal}) {
      for (std::size_t i = 0; i < list->size(); ++i) {
        if (list->is_virtual(i)) {
          pieces = scaled(pieces, context_.count((*list)[i]), 1);
        } else {
          cuts |= 1u << (*list)[i];
        }
      }
    }
    const std::int64_t size = slots_[s].size;
    if (size % scaled(pieces, size_of_group(cuts), 1) != 0) return false;
    const std::int64_t most = scaled(pieces, size_of_group(active_), 1);
    // Halves of halves: where not all of them divide it single elements are left, and nothing is to be gained.
    const auto power_of_two = [](std::int64_t n) { return (n & (n - 1)) == 0; };
    if (size % most != 0 && !(power_of_two(size) && power_of_two(most))) return false;
  }
  return true;
}

void SearchSpace::choose_samples() {
  for (std::size_t pattern = 0; pattern < kOrigin; ++pattern) {
    Dims at;
    for (std::int64_t m = 0; m < mesh_ndim_; ++m) at.push_back(m >> pattern & 1 ? context_.sizes[m] - 1 : 0);
    context_.samples.push_back(at);
  }
  if (!even_) context_.samples.push_back(Dims(static_cast<std::size_t>(mesh_ndim_)));
}

void SearchSpace::choose_levels() {
  std::int64_t fastest = kForever;
  for (Mask rest = active_; rest; rest &= rest - 1) {
    fastest = std::min(fastest, links_[std::countr_zero(rest)].kib_ps);
  }
  dearer_[0] = active_ == 0 ? 0 : fastest;
  for (std::int64_t known = fastest; mixed_links_ && context_.within.size() < kMostLevels;) {
    Mask within = 0;
    std::int64_t next = kForever;
    for (Mask rest = active_; rest; rest &= rest - 1) {
      const std::int64_t here = links_[std::countr_zero(rest)].kib_ps;
      if (here <= known) {
        within |= rest & -rest;
      } else {
        next = std::min(next, here);
      }
    }
    if (within == active_) return;
    dearer_[context_.within.size()] = next - known;
    context_.within.push_back(within);
    known = next;
  }
}

void SearchSpace::prepare_bound() {
  ranks_ = from_.mesh().size();
  all_bytes_ = from_.meta().nbytes();
  for (std::size_t s = 0; s < lists_.size(); ++s) goal_cuts_[s] = lists_[s][goal_.lists[s]].cuts;
  planes_ = size_of_group(goal_.partial & start_.partial);
  gathered_ = active_ & ~goal_mask_;
  for (Mask rest = goal_mask_; rest; rest &= rest - 1) {
    for (std::int64_t m = 0; m < mesh_ndim_; ++m) {
      if (context_.sizes[m] == context_.sizes[std::countr_zero(rest)]) gathered_ &= ~(1u << m);
    }
  }
  for (std::size_t i = 0; i < context_.within.size(); ++i) {
    Level& level = levels_[i];
    const Mask within = context_.within[i];
    level.block = size_of_group(within);
    level.planes = size_of_group(goal_.partial & within);
    level.wanters = size_of_group(active_ & ~within & ~goal_mask_ & ~goal_.partial);
    level.target = unit_;
    for (std::size_t s = 0; s < lists_.size(); ++s) level.target *= lists_[s][goal_.lists[s]].levels[i].held;
    for (std::size_t k = 0; k < context_.samples.size(); ++k) {
      level.wanted[k] = unit_;
      for (const CutLists& lists : lists_) level.wanted[k] *= lists.wanted(i, k);
    }
  }
}

std::int64_t SearchSpace::bytes_owed(const Standing& now, std::size_t i) const {
  const Level& level = levels_[i];
  const Mask between = ~context_.within[i];
  if (const Mask parts = now.partial & between; parts != 0) {
    std::int64_t owed = scaled(all_bytes_, (size_of_group(parts) + level.wanters - 2) * planes_, ranks_);
    if (const Mask away = now.away & between; even_ && away != 0) {
      owed = saturating_add(owed, scaled(all_bytes_ - all_bytes_ / size_of_group(away), planes_, ranks_));
    }
    return owed;
  }
  // Where several cuts change places at once, or unevenly, a rank may keep nothing, and yet pay as if it kept its
  // share. The first of all ranks always keeps it.
  const Mask moved = goal_mask_ & ~now.home & between;
  const bool at_once = now.away != 0 && (moved & (moved - 1)) != 0;
  const std::int64_t kept = !even_ ? least_size_ : at_once ? size_of_group(moved) : 0;
  std::int64_t lacking = 0;
  for (std::size_t k = 0; k < context_.samples.size(); ++k) {
    std::int64_t common = unit_;
    for (std::size_t s = 0; s < lists_.size(); ++s) common *= now.lists[s]->levels[i].common[k];
    const std::int64_t lacks = level.wanted[k] - common;
    if (lacks <= lacking) continue;
    lacking = std::max(lacking, k == kOrigin || kept == 0 ? lacks : lacks - ceil_div(lacks, kept));
  }
  std::int64_t held = unit_;
  for (std::size_t s = 0; s < lists_.size(); ++s) held *= now.lists[s]->levels[i].held;
  lacking = std::max(lacking, level.target - held);
  return level.block == 1 ? lacking : scaled(lacking, level.planes, level.block);
}

std::int64_t SearchSpace::multiplied(Mask mask) const {
  std::int64_t size = 1;
  for (; mask; mask &= mask - 1) size *= context_.sizes[std::countr_zero(mask)];
  return size;
}

std::int64_t SearchSpace::at_least(const State& state, std::int64_t enough) const {
  std::int64_t messages = 0;
  Mask astray = 0;
  bool misplaced = false;
  Standing now;
  for (std::size_t s = 0; s < lists_.size(); ++s) {
    const CutList& list = lists_[s][state.lists[s]];
    now.lists[s] = &list;
    now.away |= list.cuts & ~goal_cuts_[s] & goal_mask_;
    now.home |= list.cuts & goal_cuts_[s];
    astray |= list.astray;
    misplaced = misplaced || list.misplaced;
  }
  if (misplaced) {
    messages = saturating_add(cost_.constants().step_ps, astray == 0 ? least_message_ : 0);
  }
  now.partial = state.partial & ~goal_.partial;
  if (now.partial != 0) {
    messages = saturating_add(messages, cost_.constants().step_ps);
    astray |= now.partial;
    for (Mask rest = now.partial & gathered_; rest; rest &= rest - 1) {
      messages = saturating_add(messages, rounds_[std::countr_zero(rest)]);
    }
  }
  for (; astray; astray &= astray - 1) messages = saturating_add(messages, rounds_[std::countr_zero(astray)]);
  std::int64_t bound = messages;
  std::int64_t time = -kMostRounded;
  for (std::size_t i = 0; i < context_.within.size() && bound < enough; ++i) {
    time = saturating_add(time, scaled(bytes_owed(now, i), dearer_[i], 1024));
    bound = saturating_add(messages, std::max<std::int64_t>(0, time));
  }
  return bound;
}

std::int64_t SearchSpace::bytes_of(const State& state) const {
  std::int64_t bytes = unit_;
  for (std::size_t s = 0; s < lists_.size(); ++s) bytes *= lists_[s][state.lists[s]].held();
  return bytes;
}

const GroupCost& SearchSpace::new_group(Mask mask) {
  if (mask >= groups_.size()) groups_.resize(std::size_t{mask} + 1);
  InlineVec<Link, 4> links;
  InlineVec<std::int64_t, 4> sizes;
  for (Mask rest = mask; rest; rest &= rest - 1) {
    links.push_back(links_[std::countr_zero(rest)]);
    sizes.push_back(context_.sizes[std::countr_zero(rest)]);
  }
  return groups_[mask].emplace(CostModel::group(links, sizes));
}

std::optional<Spec> SearchSpace::spec_of(const State& state) const {
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

void SearchSpace::embed_where_smallest(std::vector<Node>& path) const {
  if (embedded_ == 0) return;
  std::size_t best = path.size();
  std::int64_t bytes = target_bytes_;
  for (std::size_t i = path.size(); i-- > 1;) {
    const Node& node = path[i];
    const Node& before = path[i - 1];
    Mask busy = node.mask | (node.kind == StepKind::kAllReduce || node.kind == StepKind::kReduceScatter ? ~0u : 0);
    for (std::size_t s = 0; s < lists_.size(); ++s) busy |= lists_[s][before.state.lists[s]].cuts;
    if (busy & embedded_) break;
    if (before.bytes < bytes && (i == 1 || before.kind != StepKind::kSlice)) {
      best = i;
      bytes = before.bytes;
    }
  }
  for (std::size_t i = best; i < path.size(); ++i) path[i].state.partial |= embedded_;
  Node embed = path[best - 1];
  embed.state.partial |= embedded_;
  embed.mask = embedded_;
  embed.kind = StepKind::kEmbed;
  path.insert(path.begin() + static_cast<std::ptrdiff_t>(best), embed);
}

std::optional<std::vector<Step>> SearchSpace::steps_of(std::vector<Node> path) const {
  embed_where_smallest(path);
  std::vector<Step> steps;
  Spec before = from_;
  for (std::size_t i = 1; i < path.size(); ++i) {
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

}  // namespace dtensor
