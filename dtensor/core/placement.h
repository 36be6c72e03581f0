#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace dtensor {

enum class ReduceOp : std::uint8_t { kSum, kAvg, kMin, kMax, kProduct, kAnd, kOr, kXor };

// "sum", "avg", "min", "max", "product", "and", "or", "xor".
std::string_view to_string(ReduceOp op);
std::optional<ReduceOp> reduce_op_from(std::string_view name);

// What one mesh dim does to a tensor; made by Shard, StridedShard, Replicate and Partial below. A small value.
class Placement {
 public:
  enum class Kind : std::uint8_t { kReplicate, kShard, kStridedShard, kPartial };

  Kind kind() const noexcept { return kind_; }
  bool is_replicate() const noexcept { return kind_ == Kind::kReplicate; }
  // Cut along a tensor dim, plainly or strided.
  bool is_shard() const noexcept { return kind_ == Kind::kShard || kind_ == Kind::kStridedShard; }
  bool is_shard(std::int64_t dim) const noexcept { return is_shard() && this->dim() == dim; }
  bool is_partial() const noexcept { return kind_ == Kind::kPartial; }
  bool is_partial(ReduceOp op) const noexcept { return is_partial() && op_ == op; }

  // The tensor dim that is cut; may be negative until a spec is made of it. Pre: is_shard().
  std::int64_t dim() const noexcept { return dim_; }
  // 1 for a plain Shard.
  std::int64_t split_factor() const noexcept { return split_factor_; }
  // Which factor of the dim a FactorShard cuts; -1 for all other placements.
  std::int32_t factor() const noexcept { return factor_; }
  // Pre: is_partial().
  ReduceOp op() const noexcept { return op_; }

  // `S(0)`, `S(0,2)` when strided, `R`, `P(sum)`. A piece of a factored dim that neither form can say prints as
  // `S(0.1)`: factor 1 of dim 0 (see spec.h).
  std::string to_string() const;

  friend bool operator==(const Placement&, const Placement&) = default;

 private:
  friend class Shard;
  friend class StridedShard;
  friend class Replicate;
  friend class Partial;
  friend class FactorShard;
  constexpr Placement() = default;

  Kind kind_ = Kind::kReplicate;
  ReduceOp op_ = ReduceOp::kSum;
  std::int32_t factor_ = -1;
  std::int64_t dim_ = 0;
  std::int64_t split_factor_ = 1;
};

// Tensor dim `dim` is cut by the chunk rule: with c = ceil(n/k), index r holds [c*r, min(n, c*(r+1))).
// 5 rows on 3 ranks: 2, 2, 1. 4 rows on 3 ranks: 2, 2, 0.
class Shard : public Placement {
 public:
  explicit Shard(std::int64_t dim);
};

// As if the dim had first been cut into `split_factor` pieces: each of them is cut by the chunk rule, and index r holds
// the r-th part of every piece. Says "mesh dims to my right cut before me" (FSDP over tensor parallel on one dim) and
// what flattening leaves of a dim that was not the first. A split factor of 1 is a plain Shard.
// 9 rows, split factor 2, 4 ranks: {0,1,5} {2,3,6} {4,7} {8}.
class StridedShard : public Placement {
 public:
  StridedShard(std::int64_t dim, std::int64_t split_factor);
};

// Every index holds the whole.
class Replicate : public Placement {
 public:
  Replicate() = default;
};

// Every index holds a whole-size part; the value is their reduction.
class Partial : public Placement {
 public:
  explicit Partial(ReduceOp op = ReduceOp::kSum);
};

// A cut of one factor of a factored dim that is neither a Shard nor a StridedShard, as read back from a spec.
class FactorShard : public Placement {
 public:
  FactorShard(std::int64_t dim, std::int32_t factor);
};

// One per mesh dim.
using Placements = std::vector<Placement>;

// `S(0),R,P(sum)`
std::string to_string(const Placements& placements);
// Reads `S(0),S(-1),S(0,2),R,P,P(max)`.
Placements parse_placements(std::string_view text);

}  // namespace dtensor
