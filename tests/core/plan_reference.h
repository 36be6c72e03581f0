#pragma once

#include <map>
#include <queue>
#include <string>

#include "dtensor/core/plan.h"
#include "tests/core/sweep.h"

// What plans are compared with: the greedy way of walking the mesh dims one by one, and a search through everything.
namespace dtensor::reference {

inline Spec with_placement(const Spec& spec, std::int64_t m, const Placement& placement) {
  Placements placements = spec.placements();
  placements[m] = placement;
  return Spec::make(spec.meta(), spec.mesh(), placements);
}

// Innermost to outermost, undo shards whose outer neighbours on the same tensor dim differ from the target's; then
// outermost to innermost, whatever is left. For plain Shards in mesh order and Replicates.
inline std::vector<Spec> greedy(const Spec& from, const Spec& to) {
  std::vector<Spec> path = {from};
  const auto outer = [](const Placements& placements, std::int64_t m, std::int64_t dim) {
    std::vector<std::int64_t> result;
    for (std::int64_t i = 0; i < m; ++i) {
      if (placements[i].is_shard(dim)) result.push_back(i);
    }
    return result;
  };
  const std::int64_t ndim = from.mesh().ndim();
  for (std::int64_t m = ndim; m-- > 0;) {
    const Placements now = path.back().placements();
    Placement next = to.placements()[m];
    if (next.is_shard() && outer(now, m, next.dim()) != outer(to.placements(), m, next.dim())) next = Replicate();
    if (!(now[m] == next)) path.push_back(with_placement(path.back(), m, next));
  }
  for (std::int64_t m = 0; m < ndim; ++m) {
    if (!(path.back().placements()[m] == to.placements()[m])) {
      path.push_back(with_placement(path.back(), m, to.placements()[m]));
    }
  }
  return path;
}

struct Move {
  StepKind kind;
  std::int64_t mesh_dim;
  DimLayouts dims;
  Partials partials;
};

// Everything that one mesh dim can do alone.
inline std::vector<Move> moves_from(const Spec& spec) {
  std::vector<Move> moves;
  for (std::int64_t m = 0; m < spec.mesh().ndim(); ++m) {
    const std::int64_t count = spec.mesh().shape()[m];
    DimLayouts without = spec.dims();
    std::size_t home = without.size();
    for (std::size_t d = 0; d < without.size(); ++d) {
      for (Factor& factor : without[d]) {
        for (Cut& cut : factor.cuts) {
          if (cut.mesh_dim != m) continue;
          cut = {Cut::kVirtual, std::clamp<std::int64_t>(factor.size, 1, cut.count)};
          home = d;
        }
      }
    }
    Partials partials = spec.partials();
    const bool partial = partials[m].has_value();
    partials[m].reset();
    const bool cut = home < without.size();
    if (cut) moves.push_back({StepKind::kAllGather, m, without, partials});
    if (partial) moves.push_back({StepKind::kAllReduce, m, without, partials});
    for (std::size_t d = 0; d < without.size(); ++d) {
      if (cut && d == home) continue;
      DimLayouts dims = without;
      dims[d].back().cuts.push_back({static_cast<std::int32_t>(m), count});
      const StepKind kind = cut ? StepKind::kAllToAll : partial ? StepKind::kReduceScatter : StepKind::kSlice;
      moves.push_back({kind, m, dims, partials});
    }
  }
  return moves;
}

// The time of the cheapest sequence of single-dim collectives, by looking at every spec that can be reached for less
// than `below`, 2,000 of them at most; `below` when there is none.
inline std::int64_t cheapest(const Spec& from, const Spec& to, const CostModel& cost, std::int64_t below) {
  struct Known {
    Spec spec;
    std::int64_t time;
  };
  std::map<std::string, Known> known;
  using Entry = std::pair<std::int64_t, std::string>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue;
  known.insert({from.to_string(), {from, 0}});
  queue.push({0, from.to_string()});
  while (!queue.empty() && known.size() < 2'000) {
    const auto [time, text] = queue.top();
    queue.pop();
    if (time >= below) return below;
    const Known before = known.at(text);
    if (before.spec == to) return time;
    if (before.time < time) continue;
    for (const Move& move : moves_from(before.spec)) {
      const auto after = Spec::from_dims(to.meta(), to.mesh(), move.dims, move.partials);
      if (!after) continue;
      Step step{move.kind, {}, before.spec, *after};
      if (!is_local(move.kind)) step.mesh_dims.push_back(move.mesh_dim);
      const std::int64_t next = saturating_add(time, time_of(step, cost));
      const auto [it, fresh] = known.insert({after->to_string(), {*after, next}});
      if (!fresh && it->second.time <= next) continue;
      it->second.time = next;
      queue.push({next, it->first});
    }
  }
  return below;
}

}  // namespace dtensor::reference
