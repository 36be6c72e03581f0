#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dtensor/core/boxes.h"
#include "dtensor/core/cost.h"
#include "dtensor/core/spec.h"

namespace dtensor {

enum class StepKind : std::uint8_t {
  kSlice,          // local: every rank keeps a part of what it has
  kEmbed,          // local: Replicate to Partial; the first index keeps the value, the others hold the identity
  kAllGather,      // cuts are undone
  kReduceScatter,  // Partial to Shard
  kAllReduce,      // Partial to Replicate
  kAllToAll,       // cuts move to another tensor dim
  kPermute,        // the same pieces on other ranks
  kExchange,       // every rank gets its boxes from whoever has them: a variable all-to-all
  kBroadcast,      // an exchange in which a piece leaves its holder once, for all replicas that want it
};
// `all-gather`, …
std::string_view to_string(StepKind kind);
bool is_local(StepKind kind);

// Bytes of the busiest rank, and of all ranks together.
struct Volume {
  std::int64_t max = 0;
  std::int64_t total = 0;
  friend bool operator==(const Volume&, const Volume&) = default;
};

using MeshDims = InlineVec<std::int64_t, 4>;

// One step of a plan. Whatever its kind, it is said by the two specs: afterwards every rank holds its part of `after`,
// taken from what `before` gives to the ranks that differ from it on `mesh_dims` alone (across two meshes: to anyone).
// for_each_receive and for_each_send say it message by message.
struct Step {
  StepKind kind;
  MeshDims mesh_dims;  // the group, ascending; empty for local steps and across meshes
  Spec before;
  Spec after;
  // Of a reduction: what to reduce by, and what to divide by afterwards (avg is a sum divided by its mesh dims' sizes).
  std::optional<ReduceOp> op = {};
  std::int64_t divisor = 1;
  Volume received = {};
  // max: on one mesh what the rank that sends most sends; across two no rank sends more.
  Volume sent = {};
  std::int64_t messages = 0;  // how many the rank that receives most sends or receives; about, where cuts are virtual
  bool exact = true;          // are these counted over all ranks? Else they stand for a sample
  std::int64_t chunks = 1;    // packed and sent in so many parts, to keep the staging memory small
  std::int64_t staging = 0;   // bytes of buffers next to the local tensors
  std::int64_t time = 0;      // picoseconds
};

// A message as one of its ends sees it: the peer's coordinate in its own mesh (`before` of a receive, `after` of a
// send) and the elements. A rank's own part is a message to itself.
struct Transfer {
  Dims peer;
  Box box;
  bool self = false;
};
using TransferFn = std::function<void(const Transfer&)>;
// Every element of the rank's part of `after` comes once, or once from each part of a Partial in ascending order of the
// parts; replicas share the work by a rule that each rank computes alone. Costs this rank's own messages.
// Pre: not kSlice, not kEmbed. An all-reduce is shown as every rank needing every part.
void for_each_receive(const Step& step, const Dims& coordinate, const TransferFn& fn);
// The same messages from the other end.
void for_each_send(const Step& step, const Dims& coordinate, const TransferFn& fn);

// How one would go, or would have gone.
struct Route {
  enum class Way : std::uint8_t { kNothing, kSteps, kDirect, kBroadcast };
  Way way = Way::kNothing;
  std::vector<Step> steps;
  std::int64_t time = 0;
  std::int64_t peak = 0;  // bytes of source, target, what lies between and staging at once, on the busiest rank
  std::string refused;    // why it was not taken; empty when it was
};

struct PlanOptions {
  static constexpr std::int64_t kStaging = 32 << 20;
  CostModel cost = {};
  // No rank may use more than this: source and target, what lies between, staging. An error when it cannot be done.
  std::optional<std::int64_t> memory = {};
  // What packed messages may use of it.
  std::int64_t staging = kStaging;
  // Also find out what the rejected ways would have cost; slower, for people.
  bool explain = false;
};

struct PlanKey {
  Spec from;
  Spec to;
  CostModel cost;
  std::int64_t memory;  // -1: no limit
  std::int64_t staging;
  bool explain;
  std::size_t hash() const;
  friend bool operator==(const PlanKey&, const PlanKey&) = default;
};

struct PlanDraft;

class PlanData {
 public:
  // Makes the plan; throws what make_plan throws.
  explicit PlanData(const PlanKey& key);
  // Takes what was made outside of the table's lock.
  explicit PlanData(const PlanDraft& draft);
  const PlanKey& key() const noexcept { return key_; }

 private:
  friend class Plan;
  PlanKey key_;
  Route route_;
  std::vector<Route> rejected_;
  Volume received_bound_;
  std::int64_t memory_bound_ = 0;
  bool exact_ = true;
};

// How to get from one spec to another, and what it costs. A pure function of the specs and the options: every rank has
// the same plan without asking. Immutable; equal plans are one object.
class Plan {
 public:
  const Spec& from() const noexcept { return data_->key_.from; }
  const Spec& to() const noexcept { return data_->key_.to; }
  const std::vector<Step>& steps() const noexcept { return data_->route_.steps; }
  std::int64_t time() const noexcept { return data_->route_.time; }
  std::int64_t peak_bytes() const noexcept { return data_->route_.peak; }
  // Sums over the steps.
  Volume received() const;
  Volume sent() const;
  // What no plan can go below: max and total over the ranks of |target minus source|, with the terms of a Partial over
  // k ranks ((k-1)/k of it for a reduce-scatter, 2(k-1)/k for an all-reduce); bytes of source and target.
  const Volume& received_bound() const noexcept { return data_->received_bound_; }
  std::int64_t memory_bound() const noexcept { return data_->memory_bound_; }
  // False when the mesh is too large to look at all ranks: volumes then stand for a sample of them.
  bool exact() const noexcept { return data_->exact_; }
  Route::Way way() const noexcept { return data_->route_.way; }
  const std::vector<Route>& rejected() const noexcept { return data_->rejected_; }
  std::string to_string() const;
  std::size_t hash() const noexcept { return data_.hash(); }

  friend bool operator==(const Plan& a, const Plan& b) noexcept { return a.data_ == b.data_; }

 private:
  friend Plan make_plan(const Spec& from, const Spec& to, const PlanOptions& options);
  explicit Plan(Interned<PlanData> data) : data_(std::move(data)) {}
  Interned<PlanData> data_;
};

// The cheapest way from one spec to the other, on one mesh or across two, among sequences of collectives and the direct
// exchange. Kept in a bounded, thread-safe cache; a look-up costs about 0.1 us.
// Across two meshes every rank of either plays the steps of its own mesh and the crossing; rows of sub-meshes go in
// pairs, so that a peer's rank is rank_at(peer, my row). A Partial on the other mesh is filled in by its first index.
// Errors: different shapes or types, on one mesh a Partial target where the source is not Replicate or equally Partial,
// sub-meshes whose rows do not pair up, a memory limit below what is possible.
Plan make_plan(const Spec& from, const Spec& to, const PlanOptions& options = {});
// Is there a way? The reason why not otherwise.
std::optional<std::string> why_not(const Spec& from, const Spec& to);
InternStats plan_cache_stats();

// The bytes of a step, counted over all ranks that hold something else; over a sample when there are more than
// kMostCounted of them, or kMostCountedSets where a rank holds more than one interval of a tensor dim.
inline constexpr std::int64_t kMostCounted = 2048;
inline constexpr std::int64_t kMostCountedSets = 128;
struct Traffic {
  Volume received;
  Volume sent;
  std::int64_t messages = 0;
  bool exact = true;
};
Traffic traffic_of(const Step& step);
// What the cost model says of a step, given its messages and bytes.
std::int64_t time_of(const Step& step, const CostModel& cost);

// `12.5 MB`, `3 B`; `1.25 ms`, `0 ps`.
std::string bytes_text(std::int64_t bytes);
std::string time_text(std::int64_t picoseconds);

}  // namespace dtensor
