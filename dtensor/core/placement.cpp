#include "dtensor/core/placement.h"

#include <array>

#include "dtensor/core/error.h"
#include "dtensor/core/placement_impl.h"

namespace dtensor {
namespace {

constexpr std::array<std::string_view, 8> kOpNames = {"sum", "avg", "min", "max", "product", "and", "or", "xor"};

}  // namespace

std::string_view to_string(ReduceOp op) { return kOpNames[static_cast<std::size_t>(op)]; }

std::optional<ReduceOp> reduce_op_from(std::string_view name) {
  for (std::size_t i = 0; i < kOpNames.size(); ++i) {
    if (kOpNames[i] == name) return static_cast<ReduceOp>(i);
  }
  return std::nullopt;
}

Shard::Shard(std::int64_t dim) {
  kind_ = Kind::kShard;
  dim_ = dim;
}

StridedShard::StridedShard(std::int64_t dim, std::int64_t split_factor) {
  if (split_factor < 1) {
    fail_invalid(
        "StridedShard",
        {.what = "the split factor is out of range", .got = std::to_string(split_factor), .expected = "1 or more"});
  }
  kind_ = split_factor == 1 ? Kind::kShard : Kind::kStridedShard;
  dim_ = dim;
  split_factor_ = split_factor;
}

Partial::Partial(ReduceOp op) {
  kind_ = Kind::kPartial;
  op_ = op;
}

FactorShard::FactorShard(std::int64_t dim, std::int32_t factor) {
  kind_ = Kind::kShard;
  dim_ = dim;
  factor_ = factor;
}

std::string Placement::to_string() const {
  switch (kind_) {
    case Kind::kReplicate:
      return "R";
    case Kind::kPartial:
      return "P(" + std::string(dtensor::to_string(op_)) + ")";
    case Kind::kShard:
      return "S(" + std::to_string(dim_) + (factor_ < 0 ? "" : "." + std::to_string(factor_)) + ")";
    case Kind::kStridedShard:
      return "S(" + std::to_string(dim_) + "," + std::to_string(split_factor_) + ")";
  }
  fail(ErrorKind::kInternal, "placement", {.what = "unknown kind"});
}

std::string to_string(const Placements& placements) {
  return join(placements, ",", [](const Placement& placement) { return placement.to_string(); });
}

PlacementText parse_placement(Scanner& in) {
  PlacementText result;
  if (in.take("R")) return result;
  if (in.take("P")) {
    ReduceOp op = ReduceOp::kSum;
    if (in.take("(")) {
      const std::string_view name = in.name();
      const auto known = reduce_op_from(name);
      if (!known) in.fail_here("unknown reduction " + in_quotes(name));
      op = *known;
      in.expect(")");
    }
    result.placement = Partial(op);
    return result;
  }
  if (!in.take("S")) in.fail_here("no placement");
  in.expect("(");
  const std::int64_t dim = in.integer();
  result.placement = Shard(dim);
  if (in.take(",")) {
    const std::int64_t split_factor = in.size();
    if (split_factor < 1) in.fail_here("a split factor of 0");
    result.placement = StridedShard(dim, split_factor);
  } else if (in.take(".")) {
    result.factor = in.size();
  }
  in.expect(")");
  if (in.take("[")) {
    result.position = in.size();
    in.expect("]");
  }
  return result;
}

Placements parse_placements(std::string_view text) {
  Scanner in(text, "parse_placements", "placements such as S(0),S(1,2),R,P(sum), one for each mesh dim");
  Placements result;
  if (in.at_end()) return result;
  do {
    const PlacementText entry = parse_placement(in);
    if (entry.factor || entry.position) in.fail_here("a factor or an order, which only a spec has");
    result.push_back(entry.placement);
  } while (in.take(","));
  in.expect_end();
  return result;
}

}  // namespace dtensor
