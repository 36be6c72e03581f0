#include <algorithm>

#include "dtensor/core/checked.h"
#include "dtensor/core/propagate_impl.h"
#include "dtensor/core/text.h"
#include "dtensor/core/view.h"
#include "dtensor/core/view_more.h"

namespace dtensor {
namespace {

// A view of one spec: what comes out, and what the local call needs to know.
struct Viewed {
  std::vector<Spec> outputs;
  std::vector<Rewrite> rewrites;
  std::string op;  // another operator for the locals
};

class Viewer {
 public:
  Viewer(const OpRule& rule, const OpCall& call) : rule_(rule), call_(call) {}

  OrReason<Viewed> view(const Spec& spec) const {
    Viewed viewed;
    const auto reason = outputs_of(spec, viewed);
    if (reason) return Reason{*reason};
    if (viewed.outputs.size() != call_.outputs.size()) {
      return Reason{"the call has " + std::to_string(call_.outputs.size()) + " results, the view " +
                    std::to_string(viewed.outputs.size())};
    }
    for (std::size_t k = 0; k < viewed.outputs.size(); ++k) {
      const Spec& out = viewed.outputs[k];
      auto exact = Spec::from_dims(*call_.outputs[k], out.mesh(), out.dims(), out.partials());
      if (!exact) return Reason{exact.reason()};
      viewed.outputs[k] = *exact;
    }
    return viewed;
  }

 private:
  const StaticArg& arg(std::size_t position) const { return call_.constant(position); }
  std::int64_t int_arg(std::size_t position, std::int64_t otherwise) const {
    return arg(position).kind() == StaticArg::Kind::kInt ? arg(position).as_int() : otherwise;
  }
  static std::int64_t normal(std::int64_t dim, std::int64_t ndim) { return dim < 0 ? dim + ndim : dim; }

  using Failure = std::optional<std::string>;
  static Failure keep(OrReason<Spec> spec, Viewed& viewed) {
    if (!spec) return spec.reason();
    viewed.outputs.push_back(*spec);
    return std::nullopt;
  }

  Failure outputs_of(const Spec& spec, Viewed& viewed) const {
    const std::int64_t ndim = spec.meta().ndim();
    switch (rule_.view) {
      case ViewKind::kIdentity:
        return keep(spec, viewed);
      case ViewKind::kTranspose2:
        return keep(ndim < 2 ? spec : permute(spec, {1, 0}), viewed);
      case ViewKind::kTranspose:
        return keep(swapped(spec, int_arg(1, 0), int_arg(2, 0)), viewed);
      case ViewKind::kPermute:
        return keep(permute(spec, arg(1).as_ints()), viewed);
      case ViewKind::kReshapeStrides:
        viewed.op = "aten::view";  // whatever the local strides are
        [[fallthrough]];
      case ViewKind::kReshape:
        viewed.rewrites.push_back({1, Rewrite::Kind::kLocalShape, 0, {}});
        return keep(reshape(spec, call_.outputs[0]->shape()), viewed);
      case ViewKind::kExpand:
        viewed.rewrites.push_back({1, Rewrite::Kind::kLocalShape, 0, {}});
        return keep(expand(spec, call_.outputs[0]->shape()), viewed);
      case ViewKind::kSqueeze:
      case ViewKind::kSqueezeDims:
        // A local size may be 1 where the global one is not: the local call says the shape.
        viewed.op = "aten::view";
        viewed.rewrites.push_back({1, Rewrite::Kind::kLocalShape, 0, {}});
        return keep(squeeze(spec, dims_to_squeeze(spec)), viewed);
      case ViewKind::kUnsqueeze:
        return keep(unsqueeze(spec, normal(int_arg(1, 0), ndim + 1)), viewed);
      case ViewKind::kSelect:
        return keep(select(spec, normal(int_arg(1, 0), ndim)), viewed);
      case ViewKind::kUnbind:
        return unbind(spec, normal(int_arg(1, 0), ndim), viewed);
      case ViewKind::kSlice:
        return slice(spec, normal(int_arg(1, 0), ndim), viewed);
      case ViewKind::kNarrow:
        return narrow_at(spec, normal(int_arg(1, 0), ndim), viewed);
      case ViewKind::kSplit:
      case ViewKind::kSplitSizes:
        return split_at(spec, normal(int_arg(2, 0), ndim), viewed);
      case ViewKind::kDiagonal:
        return keep(as_result(spec, {normal(int_arg(2, 0), ndim), normal(int_arg(3, 1), ndim)}), viewed);
      case ViewKind::kUnfold: {
        if (ndim == 0) return keep(as_result(spec, {}), viewed);
        const std::int64_t along = normal(int_arg(1, 0), ndim);
        return keep(as_result(spec, {along}, along), viewed);
      }
    }
    return "no such view";
  }

  static Spec swapped(const Spec& spec, std::int64_t a, std::int64_t b) {
    const std::int64_t ndim = spec.meta().ndim();
    if (ndim == 0) return spec;
    Dims order;
    for (std::int64_t d = 0; d < ndim; ++d) order.push_back(d);
    std::swap(order[normal(a, ndim)], order[normal(b, ndim)]);
    return permute(spec, order);
  }

  Dims dims_to_squeeze(const Spec& spec) const {
    const std::int64_t ndim = spec.meta().ndim();
    const Dims asked = rule_.view == ViewKind::kSqueezeDims ? arg(1).as_ints() : Dims{};
    Dims result;
    for (std::int64_t d = 0; d < ndim; ++d) {
      const bool wanted = rule_.view == ViewKind::kSqueeze ||
                          std::any_of(asked.begin(), asked.end(), [&](auto dim) { return normal(dim, ndim) == d; });
      if (wanted && spec.meta().shape()[d] == 1) result.push_back(d);
    }
    return result;
  }

  // The result has the dims that are not gone, and then whole ones; `again`: one of those stands where it stood. Not
  // when a dim that is gone is cut.
  OrReason<Spec> as_result(const Spec& spec, const Dims& gone, std::int64_t again = -1) const {
    auto rest = without(spec, gone);
    if (!rest) return rest;
    const Dims& shape = call_.outputs[0]->shape();
    DimLayouts dims = rest->dims();
    if (again >= 0) dims.insert(static_cast<std::size_t>(again), DimLayout{Factor{shape[again], {}}});
    for (std::size_t d = dims.size(); d < shape.size(); ++d) dims.push_back({Factor{shape[d], {}}});
    return Spec::from_dims(*call_.outputs[0], spec.mesh(), dims, spec.partials());
  }

  static Failure unbind(const Spec& spec, std::int64_t dim, Viewed& viewed) {
    for (std::int64_t i = 0; i < spec.meta().shape()[dim]; ++i) {
      if (const auto reason = keep(select(spec, dim), viewed)) return reason;
    }
    return std::nullopt;
  }

  static bool whole(const DimLayout& dim) { return dim.size() == 1 && is_whole(dim[0]); }

  Failure slice(const Spec& spec, std::int64_t dim, Viewed& viewed) const {
    const std::int64_t size = spec.meta().shape()[dim];
    const auto bound = [&](std::int64_t at) { return std::clamp<std::int64_t>(normal(at, size), 0, size); };
    const std::int64_t start = bound(int_arg(2, 0));
    const std::int64_t end = std::max(start, bound(int_arg(3, size)));
    const std::int64_t step = int_arg(4, 1);
    if (step != 1) return keep(stride_over(spec, dim, start, end, step), viewed);
    if (!whole(spec.dims()[dim])) {
      const auto at = static_cast<std::size_t>(dim);
      viewed.rewrites.push_back({2, Rewrite::Kind::kScaled, at, StaticArg::integer(start)});
      viewed.rewrites.push_back({3, Rewrite::Kind::kScaled, at, StaticArg::integer(end)});
    }
    return keep(narrow(spec, dim, start, end - start), viewed);
  }

  Failure narrow_at(const Spec& spec, std::int64_t dim, Viewed& viewed) const {
    const std::int64_t start = normal(int_arg(2, 0), spec.meta().shape()[dim]);
    const std::int64_t length = int_arg(3, 0);
    if (!whole(spec.dims()[dim])) {
      const auto at = static_cast<std::size_t>(dim);
      viewed.rewrites.push_back({2, Rewrite::Kind::kScaled, at, StaticArg::integer(start)});
      viewed.rewrites.push_back({3, Rewrite::Kind::kScaled, at, StaticArg::integer(length)});
    }
    return keep(narrow(spec, dim, start, length), viewed);
  }

  Failure split_at(const Spec& spec, std::int64_t dim, Viewed& viewed) const {
    Dims sizes;
    for (const auto& meta : call_.outputs) sizes.push_back(meta->shape()[dim]);
    if (!whole(spec.dims()[dim])) {  // by sizes: a rank that holds nothing still has all parts
      viewed.op = "aten::split_with_sizes";
      viewed.rewrites.push_back({1, Rewrite::Kind::kScaled, static_cast<std::size_t>(dim), StaticArg::integers(sizes)});
    }
    std::int64_t start = 0;
    for (std::int64_t size : sizes) {
      if (const auto reason = keep(narrow(spec, dim, start, size), viewed)) return reason;
      start += size;
    }
    return std::nullopt;
  }

  const OpRule& rule_;
  const OpCall& call_;
};

Way way_of(const Spec& input, Viewed viewed, bool alias, const CostModel& cost) {
  Way way;
  way.decision.inputs.emplace_back(input);
  for (Spec& output : viewed.outputs) {
    way.output_bytes += output.local_bytes(Dims(static_cast<std::size_t>(output.mesh().ndim())));
    way.decision.outputs.emplace_back(std::move(output));
  }
  way.decision.local.op = std::move(viewed.op);
  way.decision.rewrites = std::move(viewed.rewrites);
  way.decision.alias = alias;
  way.row = to_string(input.placements());
  way.compute = alias ? 0 : cost.local(way.output_bytes);
  return way;
}

// The spec with each mesh dim's cut kept, dropped (-1) or on another tensor dim.
constexpr std::int64_t kKept = -2;
OrReason<Spec> recut(const Spec& spec, const Dims& targets) {
  DimLayouts dims = spec.dims();
  InlineVec<bool, 6> changed(dims.size(), false);
  for (std::size_t m = 0; m < targets.size(); ++m) {
    if (targets[m] == kKept) continue;
    changed[static_cast<std::size_t>(*spec.tensor_dim_of(static_cast<std::int64_t>(m)))] = true;
    if (targets[m] >= 0) changed[targets[m]] = true;
  }
  for (std::size_t d = 0; d < dims.size(); ++d) {
    if (!changed[d]) continue;
    Factor factor{spec.meta().shape()[d], {}};
    for (const Factor& old : spec.dims()[d]) {
      for (const Cut& cut : old.cuts) {
        if (!cut.is_virtual() && targets[cut.mesh_dim] == kKept) factor.cuts.push_back(cut);
      }
    }
    for (std::size_t m = 0; m < targets.size(); ++m) {
      if (targets[m] == static_cast<std::int64_t>(d)) {
        factor.cuts.push_back({static_cast<std::int32_t>(m), spec.mesh().shape()[m]});
      }
    }
    dims[d] = {std::move(factor)};
  }
  return Spec::from_dims(spec.meta(), spec.mesh(), dims, spec.partials());
}

// Every way to lay the operand out otherwise so that the view is free: cuts dropped or moved to other tensor dims.
std::vector<Way> moved_ways(const Viewer& viewer, const Spec& spec, const CostModel& cost) {
  std::vector<Way> ways;
  const MoveFloor floor(spec.mesh(), cost);
  const Dims source = first_local_shape(spec);
  const std::int64_t size = element_size(spec.meta().dtype());
  const std::int64_t ndim = spec.meta().ndim();
  Dims targets(static_cast<std::size_t>(spec.mesh().ndim()), kKept);
  for (bool more = true; more && ways.size() < kMostWays;) {
    more = false;
    for (std::size_t m = targets.size(); m-- > 0 && !more;) {
      if (!spec.tensor_dim_of(static_cast<std::int64_t>(m))) continue;
      more = ++targets[m] < ndim;
      if (!more) targets[m] = kKept;
    }
    if (!more) break;
    const auto input = recut(spec, targets);
    if (!input || *input == spec) continue;
    auto viewed = viewer.view(*input);
    if (!viewed) continue;
    Way way = way_of(*input, std::move(*viewed), false, cost);
    way.bound = saturating_add(way.compute, floor.time(source, first_local_shape(*input), size, false, 0));
    ways.push_back(std::move(way));
  }
  std::stable_sort(ways.begin(), ways.end(), [](const Way& a, const Way& b) { return a.bound < b.bound; });
  return ways;
}

Candidate finished(const OpCall& call, Way way, const Score& score) {
  way.decision.time = score.time;
  way.decision.reason = "the operand from " + call.operands[0]->to_string() + " to " +
                        way.decision.inputs[0]->to_string() + "; " + time_text(score.time);
  return {std::move(way.decision), std::move(way.row)};
}

// The ways by ascending score; when only the best is wanted, no further than the bounds allow.
OrReason<std::vector<Candidate>> ways_of(const OpRule& rule, const OpCall& call, const CostModel& cost,
                                         bool only_best) {
  if (call.operands.size() != 1 || !call.operands[0]) return Reason{"a view has one distributed operand"};
  const Viewer viewer(rule, call);
  const Spec& spec = *call.operands[0];
  auto free = viewer.view(spec);
  if (free) {
    Way way = way_of(spec, std::move(*free), true, cost);
    way.decision.reason = "as it lies";
    return std::vector<Candidate>{{std::move(way.decision), std::move(way.row)}};
  }
  if (!rule.may_move) return Reason{free.reason() + ": no view without moving data"};
  std::vector<std::pair<Score, Way>> scored;
  std::int64_t best = kForever;
  for (Way& way : moved_ways(viewer, spec, cost)) {
    if (only_best && way.bound > best) break;
    const auto score = score_of(call, way, scored.size(), {}, cost);
    if (!score) continue;
    best = std::min(best, score->time);
    scored.emplace_back(*score, std::move(way));
  }
  if (scored.empty()) return Reason{free.reason()};
  std::sort(scored.begin(), scored.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Candidate> result;
  for (auto& [score, way] : scored) result.push_back(finished(call, std::move(way), score));
  return result;
}

}  // namespace

OrReason<std::vector<Candidate>> view_candidates(const OpRule& rule, const OpCall& call, const DecideOptions& options) {
  return ways_of(rule, call, options.cost, false);
}

OrReason<Decision> decide_view(const OpRule& rule, const OpCall& call, const DecideOptions& options) {
  auto all = ways_of(rule, call, options.cost, true);
  if (!all) return Reason{all.reason()};
  return std::move(all->front().decision);
}

}  // namespace dtensor
