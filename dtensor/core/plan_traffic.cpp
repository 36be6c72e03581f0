// How many bytes a step moves, and how long it takes.
#include <algorithm>

#include "dtensor/core/plan_holdings.h"

namespace dtensor {
namespace {

// The pieces of a factor that hold something of an interval, after its first i cuts.
std::int64_t count_pieces(const Factor& factor, std::size_t i, Interval piece, Interval wanted) {
  if (common_size(piece, wanted) == 0) return 0;
  if (i == factor.cuts.size()) return 1;
  const std::int64_t count = factor.cuts[i].count;
  const std::int64_t c = ceil_div(piece.size(), count);
  const std::int64_t first = (std::max(wanted.begin, piece.begin) - piece.begin) / c;
  const std::int64_t last = (std::min(wanted.end, piece.end) - 1 - piece.begin) / c;
  std::int64_t sum = count_pieces(factor, i + 1, chunk(piece, count, first), wanted);
  if (last > first) sum += count_pieces(factor, i + 1, chunk(piece, count, last), wanted);
  // Those in between are whole and alike.
  if (last > first + 1) sum += (last - first - 1) * count_pieces(factor, i + 1, {0, c}, {0, c});
  return sum;
}

// How many holders have some of what a place holds: exact where both hold one interval of every tensor dim.
std::int64_t count_holders(const Spec& has, const Spec& wants, const Dims& at) {
  std::int64_t count = 1;
  for (std::size_t d = 0; d < has.dims().size(); ++d) {
    const DimLayout& a = has.dims()[d];
    const DimLayout& b = wants.dims()[d];
    if (one_interval(a) && one_interval(b)) {
      count *= count_pieces(a[0], 0, {0, a[0].size}, interval_of(b[0], at));
      continue;
    }
    for (const Factor& factor : a) {
      for (const Cut& cut : factor.cuts) count *= cut.is_virtual() ? 1 : cut.count;
    }
  }
  return count;
}

// So many places are looked at; fewer where each is a set of many intervals to compare.
std::int64_t most_counted(const Spec& before, const Spec& after) {
  for (std::size_t d = 0; d < before.dims().size(); ++d) {
    if (!one_interval(before.dims()[d]) || !one_interval(after.dims()[d])) return kMostCountedSets;
  }
  return kMostCounted;
}

bool is_even(const Spec& spec) {
  for (const DimLayout& dim : spec.dims()) {
    for (const Factor& factor : dim) {
      std::int64_t pieces = 1;
      for (const Cut& cut : factor.cuts) pieces = scaled(pieces, cut.count, 1);
      if (factor.size % pieces != 0) return false;
    }
  }
  return true;
}

// The mesh dims along which ranks may have other numbers. Where all cuts are even those that stay do not matter, and
// none does where a tensor dim is only gathered or only cut further: all ranks do as the first one does.
std::uint32_t counted_mask(const Step& step) {
  const std::uint32_t all = cut_mask(step.before) | cut_mask(step.after);
  if (!is_even(step.before) || !is_even(step.after)) return all;
  const bool collective = step.kind == StepKind::kAllGather || step.kind == StepKind::kReduceScatter ||
                          step.kind == StepKind::kAllToAll || step.kind == StepKind::kAllReduce;
  std::uint32_t mask = 0;
  for (std::size_t d = 0; d < step.before.dims().size(); ++d) {
    if (step.before.dims()[d] == step.after.dims()[d]) continue;
    const std::uint32_t before = cut_mask(step.before.dims()[d]);
    const std::uint32_t after = cut_mask(step.after.dims()[d]);
    const bool nested = (before & ~after) == 0 || (after & ~before) == 0;
    if (!collective || !nested) mask |= before | after;
  }
  return mask;
}

Census census_of(const Step& step) {
  return Census(step.before.mesh().shape(), counted_mask(step), most_counted(step.before, step.after));
}

void raise_to(std::int64_t& value, std::int64_t other) { value = std::max(value, other); }

// What a place sends on one mesh. Everyone who wants a piece has it from its one holder; where several hold it they
// take turns, and who has it already takes nothing but the other parts, from those at its own index.
class Sends {
 public:
  Sends(const Step& step, const StepRoles& roles, Census& census, const Holdings& holdings)
      : roles_(roles), shape_(step.before.mesh().shape()), holdings_(holdings) {
    everyone_ = size_along(shape_, roles.everyone);
    turns_ = roles.num_takers / roles.num_holders;
    uneven_ = roles.num_takers % roles.num_holders;
    counted_ = census.exact();
    if (roles.num_holders == 1 || !counted_) return;
    Dims at(shape_.size());
    for (std::int64_t h = 0; h < roles.num_holders; ++h) {
      place_along(at, shape_, roles.holders, h);
      std::int64_t offset = 0;
      for (std::int64_t m : roles.holders) offset += census.stride(m) * at[m];
      offsets_.push_back(offset);
    }
    std::uint32_t scattered = 0;
    for (std::int64_t m : roles.parts) scattered |= 1u << m;
    const std::uint32_t others = scattered | (cut_mask(step.before) & cut_mask(step.after));
    const std::uint32_t cut = cut_mask(step.after);
    if ((cut & scattered) != 0) of_owners_.emplace(step, census, scattered);
    if (uneven_ != 0 && (cut & others) != 0) of_all_.emplace(step, census, others);
  }

  std::int64_t at(std::size_t i, const Dims& coordinate) const {
    const Held3& held = holdings_[i];
    if (roles_.num_holders == 1) return held.before * roles_.num_takers * everyone_ - held.common;
    if (!counted_) return held.before * ceil_div(roles_.num_takers, roles_.num_holders) * everyone_;
    // Receivers with digit h on the holders' dims and q on the takers' have it from holder h + q: see for_each_receive.
    const std::int64_t mine = index_along(coordinate, shape_, roles_.holders);
    const std::int64_t q = index_along(coordinate, shape_, roles_.takers);
    const Holdings& owners = of_owners_ ? *of_owners_ : holdings_;
    const Holdings& all = of_all_ ? *of_all_ : owners;
    std::int64_t sum = held.before * turns_;
    for (std::int64_t turn = 0; turn < uneven_; ++turn) sum += common_with(all, i, mine, mine - turn);
    // Those that are at my place of the source have it, and would otherwise have come to me.
    sum -= common_with(owners, i, mine, mine - q);
    sum += common_with(owners, i, mine, mine);
    return sum * everyone_ - held.common;
  }

 private:
  // What I hold of what the place wants that differs from mine by its index among the holders.
  std::int64_t common_with(const Holdings& table, std::size_t i, std::int64_t mine, std::int64_t holder) const {
    const std::int64_t n = roles_.num_holders;
    const std::int64_t place = static_cast<std::int64_t>(i) - offsets_[mine] + offsets_[(holder % n + n) % n];
    return table[static_cast<std::size_t>(place)].common;
  }

  const StepRoles& roles_;
  const Dims& shape_;
  const Holdings& holdings_;
  std::vector<std::int64_t> offsets_;  // of the holders' indices in the census
  std::optional<Holdings> of_owners_;  // wanted by the ranks at my place of the source, of any part
  std::optional<Holdings> of_all_;     // wanted by anyone
  std::int64_t everyone_ = 1;
  std::int64_t turns_ = 1;
  std::int64_t uneven_ = 0;
  bool counted_ = false;
};

// Within one mesh: a rank receives what it lacks, from every part.
Traffic count_on_one_mesh(const Step& step, const StepRoles& roles) {
  Traffic result;
  Census census = census_of(step);
  const Holdings holdings(step, census);
  const Sends sends(step, roles, census, holdings);
  std::int64_t received = 0;
  std::size_t busiest = 0;
  Dims where(static_cast<std::size_t>(step.before.mesh().ndim()));
  census.each([&](std::size_t i, const Dims& at) {
    const Held3& held = holdings[i];
    const std::int64_t want = held.after * roles.num_parts - held.common;
    if (want > result.received.max) {
      result.received.max = want;
      busiest = i;
      where = at;
    }
    received = saturating_add(received, want);
    raise_to(result.sent.max, sends.at(i, at));
  });
  result.received.total = result.sent.total = census.whole(received);
  result.exact = census.exact();
  if (result.received.total == 0) {
    result.sent.max = 0;
    return result;
  }
  const bool keeps = holdings[busiest].common > 0;
  const std::int64_t copies =
      ceil_div(roles.num_takers, roles.num_holders) * size_along(step.before.mesh().shape(), roles.everyone);
  result.messages = scaled(count_holders(step.before, step.after, where), roles.num_parts, 1) - (keeps ? 1 : 0);
  raise_to(result.messages, scaled(count_holders(step.after, step.before, where), copies, 1) - (keeps ? 1 : 0));
  return result;
}

Traffic count_across(const Step& step, const StepRoles& roles) {
  Traffic result;
  const Mesh& source = step.before.mesh();
  const Mesh& target = step.after.mesh();
  Census census(target.shape(), (1u << target.ndim()) - 1, most_counted(step.before, step.after));
  std::int64_t received = 0;
  census.each([&](std::size_t, const Dims& at) {
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

// Each rank reduces one part of the elements and hands it round.
Traffic count_all_reduce(const Step& step, std::int64_t group) {
  Traffic result;
  Census census = census_of(step);
  const Holdings holdings(step, census);
  std::int64_t received = 0;
  for (std::size_t i = 0; i < census.size(); ++i) {
    const std::int64_t n = holdings[i].before;
    raise_to(result.received.max, n + (group - 2) * ceil_div(n, group));
    received = saturating_add(received, 2 * (group - 1) * n);
  }
  result.received.total = census.whole(received) / group;
  result.sent = result.received;
  result.messages = 2 * (group - 1);
  result.exact = census.exact();
  return result;
}

}  // namespace

std::int64_t most_bytes(const Spec& spec) {
  std::int64_t elements = 1;
  const Dims first(static_cast<std::size_t>(spec.mesh().ndim()));
  for (const DimLayout& dim : spec.dims()) elements *= held_size(dim, first);
  return elements * element_size(spec.meta().dtype());
}

Traffic traffic_of(const Step& step) {
  if (is_local(step.kind) || step.before.meta().numel() == 0) return {};
  const bool one_mesh = step.before.mesh() == step.after.mesh();
  const std::int64_t group = one_mesh ? size_along(step.before.mesh().shape(), step.mesh_dims)
                                      : step.before.mesh().size() + step.after.mesh().size();
  Traffic result;
  if (step.kind == StepKind::kAllReduce) {
    result = count_all_reduce(step, group);
  } else {
    const StepRoles roles = roles_of(step);
    result = one_mesh ? count_on_one_mesh(step, roles) : count_across(step, roles);
    result.messages = std::min(result.messages, group - 1);
  }
  const std::int64_t bytes = element_size(step.before.meta().dtype());
  for (std::int64_t* count : {&result.received.max, &result.received.total, &result.sent.max, &result.sent.total}) {
    *count = scaled(*count, bytes, 1);
  }
  return result;
}

void set_traffic(Step& step) {
  const Traffic traffic = traffic_of(step);
  step.received = traffic.received;
  step.sent = traffic.sent;
  step.messages = traffic.messages;
  step.exact = traffic.exact;
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

}  // namespace dtensor
