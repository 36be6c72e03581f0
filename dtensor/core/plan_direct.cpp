// Who sends what to whom in a step, and how many bytes that is.
//
// The balanced choice among replicas: let the wanted piece be held alike along the mesh dims H (Replicate before, cut
// after) and be wanted alike along Q (cut before, Replicate after). The receiver's digits on H rotate, its digits on Q
// spread: it takes the piece from holder (h + q) mod |H|. So the receivers of a piece take turns over its holders, and
// a sender finds its receivers as an arithmetic progression, without looking at anyone else's messages.
#include <algorithm>

#include "dtensor/core/coordinates.h"
#include "dtensor/core/plan_impl.h"

namespace dtensor {
namespace {

std::int64_t size_along(const Dims& shape, const MeshDims& dims) {
  std::int64_t size = 1;
  for (std::int64_t m : dims) size *= shape[m];
  return size;
}

// The row-major index of a coordinate among the chosen dims, and back.
std::int64_t index_along(const Dims& at, const Dims& shape, const MeshDims& dims) {
  std::int64_t index = 0;
  for (std::int64_t m : dims) index = index * shape[m] + at[m];
  return index;
}

void place_along(Dims& at, const Dims& shape, const MeshDims& dims, std::int64_t index) {
  for (std::size_t i = dims.size(); i-- > 0;) {
    at[dims[i]] = index % shape[dims[i]];
    index /= shape[dims[i]];
  }
}

bool agree(const Dims& a, const Dims& b, std::uint32_t mask) {
  for (std::size_t m = 0; m < a.size(); ++m) {
    if ((mask >> m & 1) && a[m] != b[m]) return false;
  }
  return true;
}

MeshDims dims_of(std::uint32_t mask) {
  MeshDims result;
  for (std::int64_t m = 0; mask >> m; ++m) {
    if (mask >> m & 1) result.push_back(m);
  }
  return result;
}

// Across two meshes nothing is common: the coordinates of one say nothing about the other.
class Messages {
 public:
  explicit Messages(const Step& step)
      : step_(step),
        roles_(roles_of(step)),
        one_mesh_(step.before.mesh() == step.after.mesh()),
        source_(step.before.mesh().shape()),
        target_(step.after.mesh().shape()),
        source_cuts_(cut_mask(step.before)),
        target_cuts_(dims_of(cut_mask(step.after))) {}

  void receive(const Dims& me, const TransferFn& fn) const {
    const std::optional<Dims> mine = one_mesh_ ? me : step_.before.mesh().coordinate(step_.after.mesh().rank_at(me));
    for_each_piece(step_.before, step_.after, me, [&](const Piece& piece) {
      Dims peer = piece.holder;
      for (std::int64_t m : roles_.common) peer[m] = me[m];
      if (mine && agree(peer, *mine, source_cuts_)) {
        peer = *mine;
      } else {
        place_along(peer, source_, roles_.holders, holder_for(me));
      }
      for (std::int64_t part = 0; part < roles_.num_parts; ++part) {
        place_along(peer, source_, roles_.parts, part);
        fn({peer, piece.box, mine && peer == *mine});
      }
    });
  }

  void send(const Dims& me, const TransferFn& fn) const {
    const std::optional<Dims> mine = one_mesh_ ? me : step_.after.mesh().coordinate(step_.before.mesh().rank_at(me));
    const std::int64_t my_index = index_along(me, source_, roles_.holders);
    for_each_piece(step_.after, step_.before, me, [&](const Piece& piece) {
      Dims peer = piece.holder;
      for (std::int64_t m : roles_.common) peer[m] = me[m];
      for (std::int64_t m : roles_.takers) peer[m] = 0;
      for (std::int64_t m : roles_.everyone) peer[m] = 0;
      send_piece(me, mine, my_index, peer, piece.box, fn);
    });
  }

 private:
  // Which of the holders serves this receiver.
  std::int64_t holder_for(const Dims& receiver) const {
    const std::int64_t rotation =
        index_along(receiver, target_, one_mesh_ ? roles_.holders : target_cuts_) % roles_.num_holders;
    if (step_.kind == StepKind::kBroadcast) return rotation;
    return (rotation + index_along(receiver, target_, roles_.takers)) % roles_.num_holders;
  }

  // The coordinate in the source mesh of a receiver that has the piece of `me` itself.
  std::optional<Dims> owner(const Dims& me, const Dims& receiver) const {
    std::optional<Dims> at =
        one_mesh_ ? receiver : step_.before.mesh().coordinate(step_.after.mesh().rank_at(receiver));
    if (at && !agree(me, *at, source_cuts_)) at.reset();
    return at;
  }

  void send_piece(const Dims& me, const std::optional<Dims>& mine, std::int64_t my_index, Dims& peer, const Box& box,
                  const TransferFn& fn) const {
    const auto to_everyone = [&] {
      do fn({peer, box, mine && peer == *mine});
      while (next_coordinate(peer, target_, roles_.everyone));
    };
    // Among those who want it, the one that shares my place has it from me alone.
    if (mine) {
      const Dims before = peer;
      for (std::int64_t m : roles_.takers) peer[m] = (*mine)[m];
      const auto at = owner(me, peer);
      if (one_mesh_ ? at && agree(*at, me, mask_of(roles_.holders)) : peer == *mine) to_everyone();
      peer = before;
    }
    const std::int64_t rotation = holder_for(peer);  // with the takers' digits at 0
    const bool all = step_.kind == StepKind::kBroadcast;
    if (all && rotation != my_index) return;
    const std::int64_t stride = all ? 1 : roles_.num_holders;
    std::int64_t first = all ? 0 : (my_index - rotation + roles_.num_holders) % roles_.num_holders;
    for (; first < roles_.num_takers; first += stride) {
      place_along(peer, target_, roles_.takers, first);
      if (!owner(me, peer)) to_everyone();
    }
  }

  static std::uint32_t mask_of(const MeshDims& dims) {
    std::uint32_t mask = 0;
    for (std::int64_t m : dims) mask |= 1u << m;
    return mask;
  }

  const Step& step_;
  const StepRoles roles_;
  const bool one_mesh_;
  const Dims& source_;
  const Dims& target_;
  const std::uint32_t source_cuts_;
  const MeshDims target_cuts_;
};

bool one_interval(const DimLayout& dim) { return dim.size() == 1 && !has_virtual(dim[0]); }

Interval interval_of(const Factor& factor, const Dims& at) {
  Interval piece{0, factor.size};
  for (const Cut& cut : factor.cuts) piece = chunk(piece, cut.count, at[cut.mesh_dim]);
  return piece;
}

std::int64_t common_size(const Intervals& a, const Intervals& b) {
  std::int64_t size = 0;
  for (std::size_t i = 0, j = 0; i < a.size() && j < b.size(); a[i].end < b[j].end ? ++i : ++j) {
    size += std::max<std::int64_t>(0, std::min(a[i].end, b[j].end) - std::max(a[i].begin, b[j].begin));
  }
  return size;
}

bool same_factoring(const DimLayout& a, const DimLayout& b) {
  return a.size() == b.size() &&
         std::equal(a.begin(), a.end(), b.begin(), [](const Factor& x, const Factor& y) { return x.size == y.size; });
}

// How many indices of a tensor dim are held both by a place under one layout and by a place under another.
std::int64_t common_size(const DimLayout& a, const Dims& at_a, const DimLayout& b, const Dims& at_b) {
  if (one_interval(a) && one_interval(b)) {
    const Interval x = interval_of(a[0], at_a);
    const Interval y = interval_of(b[0], at_b);
    return std::max<std::int64_t>(0, std::min(x.end, y.end) - std::max(x.begin, y.begin));
  }
  std::int64_t size = 1;
  if (same_factoring(a, b)) {
    for (std::size_t f = 0; f < a.size(); ++f) size *= common_size(intervals_of(a[f], at_a), intervals_of(b[f], at_b));
    return size;
  }
  const auto runs = [](const DimLayout& dim, const Dims& at) {
    Intervals result;
    DimSet set;
    for (const Factor& factor : dim) set.push_back({factor.size, intervals_of(factor, at)});
    for_each_run(set, [&](Interval run, std::int64_t) { result.push_back(run); });
    return result;
  };
  return common_size(runs(a, at_a), runs(b, at_b));
}

std::int64_t held_size(const DimLayout& dim, const Dims& at) {
  std::int64_t size = 1;
  for (const Factor& factor : dim) size *= held_of(factor, at).size;
  return size;
}

std::int64_t held_size(const Spec& spec, const Dims& at) {
  std::int64_t size = 1;
  for (const DimLayout& dim : spec.dims()) size *= held_size(dim, at);
  return size;
}

std::int64_t common_size(const Spec& a, const Dims& at_a, const Spec& b, const Dims& at_b) {
  std::int64_t size = 1;
  for (std::size_t d = 0; d < a.dims().size() && size > 0; ++d) {
    size *= common_size(a.dims()[d], at_a, b.dims()[d], at_b);
  }
  return size;
}

// Which piece, counting all, an element of a factor is in.
std::int64_t piece_index(const Factor& factor, std::int64_t element) {
  Interval piece{0, factor.size};
  std::int64_t index = 0;
  for (const Cut& cut : factor.cuts) {
    const std::int64_t i = (element - piece.begin) / ceil_div(piece.size(), cut.count);
    index = index * cut.count + i;
    piece = chunk(piece, cut.count, i);
  }
  return index;
}

// About how many holders have some of what a place holds: exact for even cuts of one interval.
std::int64_t count_holders(const Spec& has, const Spec& wants, const Dims& at) {
  std::int64_t count = 1;
  for (std::size_t d = 0; d < has.dims().size(); ++d) {
    const DimLayout& a = has.dims()[d];
    const DimLayout& b = wants.dims()[d];
    if (one_interval(a) && one_interval(b)) {
      const Interval wanted = interval_of(b[0], at);
      if (wanted.empty()) return 0;
      count *= piece_index(a[0], wanted.end - 1) - piece_index(a[0], wanted.begin) + 1;
      continue;
    }
    for (const Factor& factor : a) {
      for (const Cut& cut : factor.cuts) count *= cut.is_virtual() ? 1 : cut.count;
    }
  }
  return count;
}

// All coordinates along some mesh dims, or a few along each when they are too many.
class Census {
 public:
  Census(const Dims& shape, std::uint32_t mask) : at_(shape.size()) {
    for (std::size_t m = 0; m < shape.size(); ++m) {
      if (mask >> m & 1) {
        dims_.push_back(static_cast<std::int64_t>(m));
        population_ = scaled(population_, shape[m], 1);
      } else {
        copies_ = scaled(copies_, shape[m], 1);
      }
    }
    exact_ = population_ <= kMostCounted;
    for (std::int64_t m : dims_) {
      Dims& list = indices_.emplace_back();
      const std::int64_t few[] = {0, 1, shape[m] / 2, shape[m] - 1};
      for (std::int64_t i = 0; i < (exact_ ? shape[m] : 4); ++i) {
        const std::int64_t index = exact_ ? i : few[i];
        if (list.empty() || index > list.back()) list.push_back(index);
      }
      sample_ *= static_cast<std::int64_t>(list.size());
    }
  }

  bool exact() const { return exact_; }
  // What a sum over the sample stands for.
  std::int64_t whole(std::int64_t sum) const { return scaled(scaled(sum, population_, sample_), copies_, 1); }

  template <class Fn>
  void each(Fn fn) {
    Dims digits(dims_.size());
    for (std::int64_t i = 0; i < sample_; ++i) {
      for (std::size_t j = 0; j < dims_.size(); ++j) at_[dims_[j]] = indices_[j][digits[j]];
      fn(static_cast<const Dims&>(at_));
      for (std::size_t j = dims_.size(); j-- > 0;) {
        if (++digits[j] < static_cast<std::int64_t>(indices_[j].size())) break;
        digits[j] = 0;
      }
    }
  }

 private:
  Dims at_;
  MeshDims dims_;
  std::vector<Dims> indices_;
  std::int64_t population_ = 1;
  std::int64_t sample_ = 1;
  std::int64_t copies_ = 1;
  bool exact_ = true;
};

void raise_to(std::int64_t& value, std::int64_t other) { value = std::max(value, other); }

}  // namespace

std::uint32_t cut_mask(const Spec& spec) {
  std::uint32_t mask = 0;
  for (const DimLayout& dim : spec.dims()) {
    for (const Factor& factor : dim) {
      for (const Cut& cut : factor.cuts) {
        if (!cut.is_virtual() && cut.count > 1) mask |= 1u << cut.mesh_dim;
      }
    }
  }
  return mask;
}

StepRoles roles_of(const Step& step) {
  StepRoles roles;
  const std::uint32_t source = cut_mask(step.before);
  const std::uint32_t target = cut_mask(step.after);
  const Dims& shape = step.before.mesh().shape();
  if (!(step.before.mesh() == step.after.mesh())) {
    const Dims& other = step.after.mesh().shape();
    for (std::int64_t m = 0; m < step.before.mesh().ndim(); ++m) {
      if (shape[m] > 1 && !(source >> m & 1)) roles.holders.push_back(m);
    }
    for (std::int64_t m = 0; m < step.after.mesh().ndim(); ++m) {
      if (other[m] > 1 && !(target >> m & 1)) roles.takers.push_back(m);
    }
    roles.num_holders = size_along(shape, roles.holders);
    roles.num_takers = size_along(other, roles.takers);
    return roles;
  }
  for (std::int64_t m = 0; m < step.before.mesh().ndim(); ++m) {
    const bool cut = source >> m & 1;
    const bool cut_after = target >> m & 1;
    if (shape[m] == 1 || (cut && cut_after)) continue;
    if (step.before.partials()[m] && !step.after.partials()[m]) {
      roles.parts.push_back(m);
      if (!cut_after) roles.everyone.push_back(m);
    } else if (cut) {
      roles.takers.push_back(m);
    } else {
      (cut_after ? roles.holders : roles.common).push_back(m);
    }
  }
  roles.num_holders = size_along(shape, roles.holders);
  roles.num_takers = size_along(shape, roles.takers);
  roles.num_parts = size_along(shape, roles.parts);
  return roles;
}

void for_each_receive(const Step& step, const Dims& coordinate, const TransferFn& fn) {
  Messages(step).receive(coordinate, fn);
}

void for_each_send(const Step& step, const Dims& coordinate, const TransferFn& fn) {
  Messages(step).send(coordinate, fn);
}

std::int64_t most_bytes(const Spec& spec) {
  return spec.local_bytes(Dims(static_cast<std::size_t>(spec.mesh().ndim())));
}

namespace {

// Within one mesh: a rank receives what it lacks, from every part; with one holder each, all who want a piece have it
// from its holder.
Traffic count_on_one_mesh(const Step& step, const StepRoles& roles) {
  Traffic result;
  Census census(step.before.mesh().shape(), cut_mask(step.before) | cut_mask(step.after));
  const std::int64_t everyone = size_along(step.before.mesh().shape(), roles.everyone);
  const std::int64_t copies = ceil_div(roles.num_takers, roles.num_holders) * everyone;
  std::int64_t received = 0;
  Dims busiest(static_cast<std::size_t>(step.before.mesh().ndim()));
  census.each([&](const Dims& at) {
    const std::int64_t kept = common_size(step.before, at, step.after, at);
    const std::int64_t want = held_size(step.after, at) * roles.num_parts - kept;
    if (want > result.received.max) {
      result.received.max = want;
      busiest = at;
    }
    received = saturating_add(received, want);
    raise_to(result.sent.max, held_size(step.before, at) * copies - (roles.num_holders == 1 ? kept : 0));
  });
  result.received.total = result.sent.total = census.whole(received);
  result.exact = census.exact();
  if (result.received.total == 0) {
    result.sent.max = 0;
    return result;
  }
  const bool keeps = common_size(step.before, busiest, step.after, busiest) > 0;
  result.messages = scaled(count_holders(step.before, step.after, busiest), roles.num_parts, 1) - (keeps ? 1 : 0);
  raise_to(result.messages, scaled(count_holders(step.after, step.before, busiest), copies, 1) - (keeps ? 1 : 0));
  return result;
}

Traffic count_across(const Step& step, const StepRoles& roles) {
  Traffic result;
  const Mesh& source = step.before.mesh();
  const Mesh& target = step.after.mesh();
  Census census(target.shape(), (1u << target.ndim()) - 1);
  std::int64_t received = 0;
  census.each([&](const Dims& at) {
    const auto mine = source.coordinate(target.rank_at(at));
    const std::int64_t want = held_size(step.after, at) - (mine ? common_size(step.before, *mine, step.after, at) : 0);
    raise_to(result.received.max, want);
    received = saturating_add(received, want);
    raise_to(result.messages, count_holders(step.before, step.after, at));
  });
  result.received.total = census.whole(received);
  const Dims first(static_cast<std::size_t>(source.ndim()));
  const std::int64_t copies = step.kind == StepKind::kBroadcast ? 1 : ceil_div(roles.num_takers, roles.num_holders);
  result.sent = {held_size(step.before, first) * copies, result.received.total};
  raise_to(result.messages, scaled(count_holders(step.after, step.before, first), copies, 1));
  result.exact = census.exact();
  return result;
}

}  // namespace

Traffic traffic_of(const Step& step) {
  if (is_local(step.kind) || step.before.meta().numel() == 0) return {};
  const StepRoles roles = roles_of(step);
  const bool one_mesh = step.before.mesh() == step.after.mesh();
  const std::int64_t group = one_mesh ? size_along(step.before.mesh().shape(), step.mesh_dims)
                                      : step.before.mesh().size() + step.after.mesh().size();
  Traffic result;
  if (step.kind == StepKind::kAllReduce) {
    // Each rank reduces one part of the elements and hands it round.
    Census census(step.before.mesh().shape(), cut_mask(step.before));
    std::int64_t received = 0;
    census.each([&](const Dims& at) {
      const std::int64_t n = held_size(step.before, at);
      raise_to(result.received.max, n + (group - 2) * ceil_div(n, group));
      received = saturating_add(received, 2 * (group - 1) * n);
    });
    result.received.total = census.whole(received) / group;
    result.sent = result.received;
    result.messages = 2 * (group - 1);
    result.exact = census.exact();
  } else {
    result = one_mesh ? count_on_one_mesh(step, roles) : count_across(step, roles);
    result.messages = std::min(result.messages, group - 1);
  }
  const std::int64_t bytes = element_size(step.before.meta().dtype());
  for (std::int64_t* count : {&result.received.max, &result.received.total, &result.sent.max, &result.sent.total}) {
    *count = scaled(*count, bytes, 1);
  }
  return result;
}

bool all_counted(const Spec& from, const Spec& to) {
  if (!(from.mesh() == to.mesh())) return to.mesh().size() <= kMostCounted;
  const MeshDims dims = dims_of(cut_mask(from) | cut_mask(to));
  std::int64_t ranks = 1;
  for (std::int64_t m : dims) ranks = scaled(ranks, from.mesh().shape()[m], 1);
  return ranks <= kMostCounted;
}

void set_traffic(Step& step) {
  const Traffic traffic = traffic_of(step);
  step.received = traffic.received;
  step.sent = traffic.sent;
  step.messages = traffic.messages;
}

std::int64_t time_of(const Step& step, const CostModel& cost) {
  const Mesh& mesh = step.before.mesh();
  if (is_local(step.kind)) return cost.local(most_bytes(step.after));
  if (!(mesh == step.after.mesh())) {
    const Link link = cost.between();
    const std::int64_t both = mesh.size() + step.after.mesh().size();
    const GroupCost group = CostModel::group(std::span(&link, 1), std::span(&both, 1));
    return cost.exchange(group, step.messages, std::max(step.received.max, step.sent.max));
  }
  const GroupCost group = cost.group(mesh, step.mesh_dims);
  switch (step.kind) {
    case StepKind::kAllGather:
      return cost.all_gather(group, most_bytes(step.before));
    case StepKind::kReduceScatter:
      return cost.reduce_scatter(group, most_bytes(step.after));
    case StepKind::kAllReduce:
      return cost.all_reduce(group, most_bytes(step.before));
    case StepKind::kAllToAll:
      return cost.all_to_all(group, most_bytes(step.after));
    case StepKind::kPermute:
      return cost.permute(group, most_bytes(step.after), 1);
    default:
      break;
  }
  // Replicas share the sends: the fullest rank's share of them is its share of what there is to send.
  const StepRoles roles = roles_of(step);
  std::int64_t sends = step.sent.max;
  if (roles.num_holders > 1) {
    sends = std::min(sends, ceil_div(step.sent.total, std::max<std::int64_t>(mesh.size(), 1)));
  }
  return cost.exchange(group, step.messages, std::max(step.received.max, sends));
}

MeshDims changed_dims(const Spec& from, const Spec& to) {
  std::uint32_t mask = 0;
  const auto add = [&](const DimLayout& dim) {
    for (const Factor& factor : dim) {
      for (const Cut& cut : factor.cuts) {
        if (!cut.is_virtual() && cut.count > 1) mask |= 1u << cut.mesh_dim;
      }
    }
  };
  for (std::size_t d = 0; d < from.dims().size(); ++d) {
    if (from.dims()[d] == to.dims()[d]) continue;
    add(from.dims()[d]);
    add(to.dims()[d]);
  }
  for (std::int64_t m = 0; m < from.mesh().ndim(); ++m) {
    if (from.mesh().shape()[m] > 1 && from.partials()[m] && !to.partials()[m]) mask |= 1u << m;
  }
  return dims_of(mask);
}

void set_reduction(Step& step) {
  for (std::int64_t m = 0; m < step.before.mesh().ndim(); ++m) {
    const auto op = step.before.partials()[m];
    // Across meshes only mesh dims of size 1 are still Partial, and the target has dims of its own.
    if (!op || step.before.mesh().shape()[m] == 1 || step.after.partials()[m]) continue;
    const bool average = *op == ReduceOp::kAvg;
    step.op = average ? ReduceOp::kSum : *op;
    if (average) step.divisor *= step.before.mesh().shape()[m];
  }
}

Step direct_step(const Spec& from, const Spec& to, const CostModel& cost) {
  Step step{StepKind::kExchange, {}, from, to};
  if (from.mesh() == to.mesh()) step.mesh_dims = changed_dims(from, to);
  set_reduction(step);
  set_traffic(step);
  step.time = time_of(step, cost);
  return step;
}

}  // namespace dtensor
