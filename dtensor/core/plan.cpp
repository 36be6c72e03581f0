#include "dtensor/core/plan.h"

#include <algorithm>

#include "dtensor/core/coordinates.h"
#include "dtensor/core/hash.h"
#include "dtensor/core/plan_impl.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

constexpr std::int64_t kLeastStaging = 64 << 10;

InternTable<PlanDraft, PlanData>& plan_table() {
  static auto* table = new InternTable<PlanDraft, PlanData>(16'384);  // never destroyed: handles may outlive main
  return *table;
}

// The target before its new Partials are filled in: Replicate there.
Spec before_embedding(const Spec& from, const Spec& to) {
  Partials partials = to.partials();
  bool embeds = false;
  for (std::int64_t m = 0; m < to.mesh().ndim(); ++m) {
    if (!partials[m] || from.partials()[m] || to.mesh().shape()[m] == 1) continue;
    partials[m].reset();
    embeds = true;
  }
  return embeds ? expect_spec(Spec::from_dims(to.meta(), to.mesh(), to.dims(), partials), "plan") : to;
}

// Without any Partial: what a spec is once all is reduced, or before it is embedded.
Spec without_partials(const Spec& spec) {
  if (!spec.has_partial()) return spec;
  return expect_spec(Spec::from_dims(spec.meta(), spec.mesh(), spec.dims(), Partials(spec.partials().size())), "plan");
}

// A spec without Partials, cut by more mesh dims inside of everything else, along one tensor dim.
Spec cut_further(const Spec& spec, std::uint32_t mask, std::size_t tensor_dim) {
  DimLayouts dims = spec.dims();
  for (std::int64_t m : dims_of(mask)) {
    dims[tensor_dim].back().cuts.push_back({static_cast<std::int32_t>(m), spec.mesh().shape()[m]});
  }
  return expect_spec(Spec::from_dims(spec.meta(), spec.mesh(), dims, spec.partials()), "plan");
}

// Everything reduced, and cut by the mesh dims that were Partial, on the tensor dim that is largest on a rank: the
// fewest bytes that a Partial can leave its mesh with.
Spec reduced_and_cut(const Spec& from) {
  const Dims shape = from.local_shape(Dims(static_cast<std::size_t>(from.mesh().ndim())));
  const auto widest = std::max_element(shape.begin(), shape.end());
  std::uint32_t mask = 0;
  for (std::int64_t m = 0; m < from.mesh().ndim(); ++m) mask |= from.partials()[m] ? 1u << m : 0;
  const Spec whole = without_partials(from);
  if (shape.empty() || *widest <= 1) return whole;
  return cut_further(whole, mask, static_cast<std::size_t>(widest - shape.begin()));
}

// The mesh dims whose Partial ends.
MeshDims reduced_dims(const Spec& from, const Spec& to) {
  MeshDims dims;
  for (std::int64_t m = 0; m < from.mesh().ndim(); ++m) {
    if (from.mesh().shape()[m] > 1 && from.partials()[m] && !to.partials()[m]) dims.push_back(m);
  }
  return dims;
}

// The mesh dims of more than one rank along which all hold the same.
std::uint32_t replicated_mask(const Spec& spec) {
  std::uint32_t mask = 0;
  for (std::int64_t m = 0; m < spec.mesh().ndim(); ++m) {
    const bool many = spec.mesh().shape()[m] > 1 && !spec.partials()[m];
    if (many && !(cut_mask(spec) >> m & 1)) mask |= 1u << m;
  }
  return mask;
}

// Cut by more mesh dims, inside of everything else: each on the tensor dim that the target has it on, else on the one
// that is largest on a rank. Where they were Partial that ends. None where something cannot be cut.
std::optional<Spec> cut_towards(const Spec& from, const Spec& to, const MeshDims& mesh_dims) {
  const Dims shape = from.local_shape(Dims(static_cast<std::size_t>(from.mesh().ndim())));
  if (shape.empty()) return std::nullopt;
  const auto widest = static_cast<std::size_t>(std::max_element(shape.begin(), shape.end()) - shape.begin());
  DimLayouts dims = from.dims();
  Partials partials = from.partials();
  for (std::int64_t m : mesh_dims) {
    const auto home = static_cast<std::size_t>(to.tensor_dim_of(m).value_or(static_cast<std::int64_t>(widest)));
    if (shape[home] <= 1) return std::nullopt;
    dims[home].back().cuts.push_back({static_cast<std::int32_t>(m), from.mesh().shape()[m]});
    partials[m].reset();
  }
  const auto spec = Spec::from_dims(from.meta(), from.mesh(), dims, partials);
  return spec ? std::optional(*spec) : std::nullopt;
}

class Planner {
 public:
  explicit Planner(const PlanKey& key) : key_(key), from_(key.from), to_(key.to), source_(most_bytes(from_)) {}

  Route best;
  std::vector<Route> rejected;
  Volume bound;

  void plan() {
    if (from_.mesh() == to_.mesh()) {
      plan_on_one_mesh();
    } else {
      plan_across();
    }
  }

 private:
  bool fits(const Route& route) const { return key_.memory < 0 || route.peak <= key_.memory; }

  // Bytes, chunks, time and memory of every step, then of all.
  void settle(Route& route) const {
    route.time = 0;
    route.peak = source_;
    for (std::size_t i = 0; i < route.steps.size(); ++i) {
      Step& step = route.steps[i];
      if (step.messages == 0) set_traffic(step);
      const std::int64_t live = live_bytes(route.steps, i);
      std::int64_t needed = step.received.max;
      if (step.kind == StepKind::kAllReduce)
        needed = most_bytes(step.before);
      else if (step.kind != StepKind::kAllGather)
        needed += step.sent.max;
      std::int64_t room = key_.staging;
      if (key_.memory >= 0) room = std::min(room, key_.memory - live);
      room = std::max(room, kLeastStaging);
      step.staging = std::min(needed, room);
      step.chunks = std::max<std::int64_t>(1, ceil_div(needed, room));
      step.time = saturating_add(time_of(step, key_.cost), scaled(step.chunks - 1, key_.cost.constants().step_ps, 1));
      route.time = saturating_add(route.time, step.time);
      route.peak = std::max(route.peak, live + step.staging);
    }
  }

  void plan_on_one_mesh() {
    if (same_boxes(from_, to_)) {
      best = {Route::Way::kNothing, {}, 0, source_, {}};
      return;
    }
    if (from_.meta().numel() == 0) {
      best = {Route::Way::kSteps, {{StepKind::kSlice, {}, from_, to_}}, 0, 0, {}};
      settle(best);
      return;
    }
    const Spec ready = before_embedding(from_, to_);
    Route direct{Route::Way::kDirect, {direct_step(from_, ready)}, 0, 0, {}};
    Step& exchange = direct.steps[0];
    set_traffic(exchange);
    bound = bound_on_one_mesh(exchange);
    if (exchange.received.total == 0 && exchange.exact && !exchange.op) {
      exchange.kind = StepKind::kSlice;
      exchange.mesh_dims.clear();
      exchange.messages = 0;
      direct.way = Route::Way::kSteps;
      if (same_boxes(from_, ready)) direct.steps.clear();
    }
    if (!(ready == to_)) direct.steps.push_back({StepKind::kEmbed, {}, direct.steps.empty() ? from_ : ready, to_});
    settle(direct);
    std::vector<Route> routes = {std::move(direct)};
    if (auto reduced = reduced_first(ready)) routes.push_back(std::move(*reduced));
    const Route* known = nullptr;
    for (const Route& route : routes) {
      if (fits(route) && (!known || route.time < known->time)) known = &route;
    }
    // Where it is as fast as an exchange the sequence is taken: the same bytes by known collectives.
    const std::int64_t below = known ? saturating_add(known->time, 1) : kForever;
    Route sequence = find_sequence(below, key_.memory);
    // What lies between the steps may be large. Beyond source, target and staging it must buy a quarter of the time.
    const std::int64_t modest = source_ + most_bytes(to_) + key_.staging;
    const bool lavish = sequence.way != Route::Way::kNothing && between(sequence) > modest;
    if (lavish && known && sequence.time > scaled(known->time, 3, 4)) sequence = find_sequence(below, modest);
    const bool found = sequence.way != Route::Way::kNothing;
    if (found) routes.insert(routes.begin(), std::move(sequence));
    choose_among(std::move(routes));
    if (!found) add_slower_sequence();
  }

  // For people: the sequence that lost, looked for only now so that what is explained is what is done.
  void add_slower_sequence() {
    Route sequence = key_.explain ? find_sequence(kForever, key_.memory) : Route{};
    if (sequence.way == Route::Way::kNothing || sequence.time < best.time) {
      sequence = {Route::Way::kSteps, {}, 0, 0, "no sequence of collectives is faster"};
    } else {
      refuse(sequence);
    }
    rejected.insert(rejected.begin(), std::move(sequence));
  }

  // Reduced by one reduce-scatter, which replicas share by slicing, and exchanged then: all that differs goes straight
  // to its place, and a Partial is not sent in all its parts.
  std::optional<Route> reduced_first(const Spec& ready) const {
    const MeshDims ending = reduced_dims(from_, ready);
    if (ending.empty()) return std::nullopt;
    // Two parts cost as much to reduce as to hand round afterwards.
    const bool share = size_along(from_.mesh().shape(), ending) > 2 && replicated_mask(from_) != 0;
    const auto sliced = share ? cut_towards(from_, ready, dims_of(replicated_mask(from_))) : std::optional(from_);
    const auto middle = sliced ? cut_towards(*sliced, ready, ending) : std::nullopt;
    if (!middle || same_boxes(*middle, ready)) return std::nullopt;
    Route route{Route::Way::kSteps, {}, 0, 0, {}};
    if (share) route.steps.push_back({StepKind::kSlice, {}, from_, *sliced});
    route.steps.push_back(direct_step(*sliced, *middle));
    route.steps.back().kind = StepKind::kReduceScatter;
    route.steps.back().mesh_dims = ending;
    route.steps.push_back(direct_step(*middle, ready));
    set_traffic(route.steps.back());
    if (route.steps.back().received.total == 0) return std::nullopt;
    if (!(ready == to_)) route.steps.push_back({StepKind::kEmbed, {}, ready, to_});
    settle(route);
    return route;
  }

  // The most that lies on a rank between steps, without staging.
  std::int64_t between(const Route& route) const {
    std::int64_t most = 0;
    for (std::size_t i = 0; i < route.steps.size(); ++i) most = std::max(most, live_bytes(route.steps, i));
    return most;
  }

  // Source, before and after of a step. A slice that another step follows is read in place, and an embedding works in
  // place.
  std::int64_t live_bytes(const std::vector<Step>& steps, std::size_t i) const {
    const Step& step = steps[i];
    if (step.kind == StepKind::kSlice && i + 1 < steps.size()) return source_;
    const bool in_place = i == 0 || steps[i - 1].kind == StepKind::kSlice || step.kind == StepKind::kEmbed;
    return source_ + most_bytes(step.after) + (in_place ? 0 : most_bytes(step.before));
  }

  // Without steps when there is no sequence below this time and memory.
  Route find_sequence(std::int64_t below, std::int64_t memory) const {
    auto steps = search_steps(from_, to_, key_.cost, below, memory);
    if (!steps) return {};
    Route route{Route::Way::kSteps, std::move(*steps), 0, 0, {}};
    settle(route);
    return route;
  }

  void refuse(Route& loser) const {
    loser.refused = fits(loser)
                        ? "slower: " + time_text(loser.time)
                        : "needs " + bytes_text(loser.peak) + " of memory, more than " + bytes_text(key_.memory);
  }

  [[noreturn]] void refuse_memory(const Route& least) const {
    fail_invalid("plan", {.what = "the memory limit is below what is possible",
                          .got = bytes_text(key_.memory) + " from " + from_.to_string() + " to " + to_.to_string(),
                          .expected = std::to_string(least.peak) + " bytes or more"});
  }

  Volume bound_on_one_mesh(const Step& direct) const {
    if (!direct.op) return direct.received;
    // Of every element: k parts meet in k-1 receives, and the w ranks that want it have it after w-1 more. On average
    // over the ranks that is (k-1)/k of what they hold for a reduce-scatter, 2(k-1)/k for an all-reduce.
    const StepRoles roles = roles_of(direct);
    std::int64_t want = to_.mesh().size();
    std::int64_t planes = 1;  // what stays Partial happens once for each of its parts
    for (std::int64_t m = 0; m < to_.mesh().ndim(); ++m) {
      if (cut_mask(to_) >> m & 1) want /= to_.mesh().shape()[m];
      if (from_.partials()[m] && to_.partials()[m]) planes *= to_.mesh().shape()[m];
    }
    Volume result;
    result.total = scaled(from_.meta().nbytes(), (roles.num_parts - 1 + want / planes - 1) * planes, 1);
    result.max = ceil_div(result.total, to_.mesh().size());
    return result;
  }

  // ---- two meshes

  // On the source's mesh what is Partial is reduced; then everything crosses once, to where it is wanted or to one of
  // the replicas that want it, which hand it round within the target's mesh.
  void plan_across() {
    std::vector<Step> first;
    Spec middle = from_;
    if (from_.has_partial()) {
      middle = reduced_and_cut(from_);
      first = collectives(from_, middle);
      if (first.empty()) middle = from_;  // Partial on mesh dims of size 1 alone
    }
    const Spec ready = without_partials(to_);
    std::vector<Route> routes = {crossing(first, StepKind::kExchange, middle, ready)};
    bound = bound_across(routes[0].steps[first.size()], ready);
    if (routes[0].way == Route::Way::kDirect) {
      const StepRoles roles = roles_of(routes[0].steps[first.size()]);
      if (roles.num_takers > roles.num_holders) {
        routes.push_back(crossing(first, StepKind::kBroadcast, middle, ready));
      }
      const std::uint32_t replicas = replicated_mask(ready);
      for (std::size_t d = 0; d < ready.dims().size() && replicas != 0; ++d) {
        if (ready.local_shape(Dims(static_cast<std::size_t>(ready.mesh().ndim())))[d] <= 1) continue;
        routes.push_back(crossing(first, StepKind::kExchange, middle, cut_further(ready, replicas, d)));
      }
    }
    choose_among(std::move(routes));
  }

  // To `landing` on the other mesh, and from there to the target.
  Route crossing(const std::vector<Step>& first, StepKind kind, const Spec& middle, const Spec& landing) const {
    Route route{kind == StepKind::kBroadcast ? Route::Way::kBroadcast : Route::Way::kDirect, first, 0, 0, {}};
    Step step = direct_step(middle, landing);
    step.kind = kind;
    set_traffic(step);
    if (step.received.total == 0 && step.exact) {
      step.kind = StepKind::kSlice;
      route.way = Route::Way::kSteps;
    }
    route.steps.push_back(step);
    const Spec ready = without_partials(to_);
    if (!(landing == ready)) {
      route.way = Route::Way::kSteps;
      for (Step& last : collectives(landing, ready)) route.steps.push_back(std::move(last));
    }
    if (!(ready == to_)) route.steps.push_back({StepKind::kEmbed, {}, ready, to_});
    settle(route);
    return route;
  }

  std::vector<Step> collectives(const Spec& from, const Spec& to) const {
    if (auto steps = search_steps(from, to, key_.cost, kForever, key_.memory)) return std::move(*steps);
    return {direct_step(from, to)};
  }

  // The fastest that fits; of the others the best of each way is kept.
  void choose_among(std::vector<Route> routes) {
    std::stable_sort(routes.begin(), routes.end(),
                     [&](const Route& a, const Route& b) { return fits(a) != fits(b) ? fits(a) : a.time < b.time; });
    if (!fits(routes[0])) {
      refuse_memory(*std::min_element(routes.begin(), routes.end(),
                                      [](const Route& a, const Route& b) { return a.peak < b.peak; }));
    }
    best = std::move(routes[0]);
    std::uint32_t seen = 1u << static_cast<unsigned>(best.way);
    for (std::size_t i = 1; i < routes.size(); ++i) {
      const std::uint32_t way = 1u << static_cast<unsigned>(routes[i].way);
      if (seen & way) continue;
      seen |= way;
      refuse(routes[i]);
      rejected.push_back(std::move(routes[i]));
    }
  }

  // Of the bytes that a mesh's ranks must receive from outside or from each other. What is finished nowhere is lacking
  // everywhere, and its k parts take k-1 receives to meet, one of them at a rank that wants it.
  Volume bound_across(const Step& direct, const Spec& ready) const {
    std::int64_t parts = 1;
    for (std::int64_t m = 0; m < from_.mesh().ndim(); ++m) {
      if (from_.partials()[m]) parts *= from_.mesh().shape()[m];
    }
    if (parts == 1) return direct.received;
    const std::int64_t all = scaled(from_.meta().nbytes(), replicas_of(ready), 1);
    return {most_bytes(ready), saturating_add(all, scaled(from_.meta().nbytes(), parts - 2, 1))};
  }

  static std::int64_t replicas_of(const Spec& spec) {
    std::int64_t replicas = 1;
    for (std::int64_t m : dims_of(replicated_mask(spec))) replicas *= spec.mesh().shape()[m];
    return replicas;
  }

  const PlanKey& key_;
  const Spec& from_;
  const Spec& to_;
  const std::int64_t source_;
};

std::optional<std::string> partial_reason(const Spec& from, const Spec& to) {
  for (std::int64_t m = 0; m < to.mesh().ndim(); ++m) {
    const auto op = to.partials()[m];
    if (!op || to.mesh().shape()[m] == 1 || from.partials()[m] == op) continue;
    const std::string where = " on mesh dim " + std::to_string(m);
    if (from.partials()[m]) {
      return "a Partial cannot turn into one of another reduction" + where;
    }
    if (!from.placements()[m].is_replicate()) return "a Shard cannot turn into a Partial" + where;
  }
  return std::nullopt;
}

// Rows of two meshes go in pairs, and what is planned for the first pair must hold for all: a rank that is in both
// meshes is in the same row of both, and at the same two coordinates in every row.
std::optional<std::string> rows_reason(const Mesh& from, const Mesh& to) {
  if (from.rows() != to.rows()) return "between two meshes, rows go in pairs, and these have different numbers of them";
  if (from.rows() == 1) return std::nullopt;
  Dims at(static_cast<std::size_t>(to.ndim()));
  const MeshDims all = dims_of((1u << to.ndim()) - 1);
  do {
    const auto there = from.coordinate(to.rank_at(at));
    for (std::int64_t row = 0; row < to.rows(); ++row) {
      const std::int64_t rank = to.rank_at(at, row);
      const bool paired = from.coordinate(rank) == there && (!there || from.row_of(rank) == row);
      if (!paired) return "between two meshes, rows go in pairs, and these do not overlap alike in all of them";
    }
  } while (next_coordinate(at, to.shape(), all));
  return std::nullopt;
}

}  // namespace

bool is_local(StepKind kind) { return kind == StepKind::kSlice || kind == StepKind::kEmbed; }

std::optional<std::string> why_not(const Spec& from, const Spec& to) {
  if (!(from.meta().shape() == to.meta().shape())) return "the tensors have different shapes";
  if (from.meta().dtype() != to.meta().dtype()) return "the tensors have different types";
  if (from.mesh() == to.mesh()) return partial_reason(from, to);
  return rows_reason(from.mesh(), to.mesh());
}

std::size_t PlanKey::hash() const {
  Hasher hasher;
  hasher.add(from.hash());
  hasher.add(to.hash());
  hasher.add(cost.hash());
  hasher.add(static_cast<std::uint64_t>(memory));
  hasher.add(static_cast<std::uint64_t>(staging) * 2 + (explain ? 1 : 0));
  return hasher.value();
}

PlanData::PlanData(const PlanKey& key) : key_(key) {
  Planner planner(key_);
  planner.plan();
  route_ = std::move(planner.best);
  rejected_ = std::move(planner.rejected);
  received_bound_ = planner.bound;
  memory_bound_ = most_bytes(key.from) + most_bytes(key.to);
  for (const Step& step : route_.steps) exact_ = exact_ && step.exact;
}

PlanData::PlanData(const PlanDraft& draft) : PlanData(std::move(draft.made)) {}

Plan make_plan(const Spec& from, const Spec& to, const PlanOptions& options) {
  const PlanKey key{from, to, options.cost, options.memory.value_or(-1), options.staging, options.explain};
  const std::size_t hash = key.hash();
  if (auto known = plan_table().find(hash, [&](const PlanData& data) { return data.key() == key; })) {
    return Plan(std::move(known));
  }
  if (const auto reason = why_not(from, to)) {
    fail_invalid("plan", {.what = *reason,
                          .got = "from " + from.to_string() + " to " + to.to_string(),
                          .expected = "one tensor; Partial only where the source is Replicate or equally Partial"});
  }
  if (key.staging < 1 || (options.memory && *options.memory < 0)) {
    fail_invalid("plan", {.what = "a limit is not positive",
                          .got = std::to_string(options.memory.value_or(key.staging)),
                          .expected = "bytes of memory and of staging"});
  }
  // Without the table's lock: threads plan side by side, and the first to finish a plan is the one that is kept.
  PlanData made(key);
  return Plan(plan_table().intern(PlanDraft{made}, hash));
}

InternStats plan_cache_stats() { return plan_table().stats(); }

Volume Plan::received() const {
  Volume sum;
  for (const Step& step : steps()) {
    sum = {saturating_add(sum.max, step.received.max), saturating_add(sum.total, step.received.total)};
  }
  return sum;
}

Volume Plan::sent() const {
  Volume sum;
  for (const Step& step : steps()) {
    sum = {saturating_add(sum.max, step.sent.max), saturating_add(sum.total, step.sent.total)};
  }
  return sum;
}

}  // namespace dtensor
