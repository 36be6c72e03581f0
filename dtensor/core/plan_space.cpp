#include "dtensor/core/plan_space.h"

#include <algorithm>

namespace dtensor {
namespace {

// Comparing with more pieces than these is not worth what it saves.
constexpr std::int64_t kMostSampledPieces = 64;

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
  fastest_ = std::min(fastest_, links_.back().kib_ps);
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

void SearchSpace::choose_samples() {
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

void SearchSpace::prepare_bound() {
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

std::int64_t SearchSpace::bytes_owed(const State& state, std::int64_t bytes) const {
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

std::int64_t SearchSpace::size_of_group(Mask mask) const {
  std::int64_t size = 1;
  for (; mask; mask &= mask - 1) size *= context_.sizes[std::countr_zero(mask)];
  return size;
}

Mask SearchSpace::moved_cuts(const State& state) const {
  Mask moved = 0;
  for (std::size_t s = 0; s < lists_.size(); ++s) {
    moved |= lists_[s][state.lists[s]].cuts & ~lists_[s][goal_.lists[s]].cuts;
  }
  return moved & goal_mask_;
}

std::int64_t SearchSpace::at_least(const State& state, std::int64_t bytes) const {
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

std::int64_t SearchSpace::bytes_of(const State& state) const {
  std::int64_t bytes = unit_;
  for (std::size_t s = 0; s < lists_.size(); ++s) bytes *= lists_[s][state.lists[s]].held;
  return bytes;
}

const GroupCost& SearchSpace::group(Mask mask) {
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
