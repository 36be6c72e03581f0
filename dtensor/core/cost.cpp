#include "dtensor/core/cost.h"

#include <algorithm>
#include <bit>

#include "dtensor/core/checked.h"
#include "dtensor/core/error.h"
#include "dtensor/core/hash.h"

namespace dtensor {
namespace {

InternTable<CostConstants, CostData>& cost_table() {
  static auto* table = new InternTable<CostConstants, CostData>(256);  // never destroyed: handles may outlive main
  return *table;
}

void add_link(Hasher& hasher, const Link& link) {
  hasher.add(static_cast<std::uint64_t>(link.message_ps));
  hasher.add(static_cast<std::uint64_t>(link.kib_ps));
}

std::size_t hash_of(const CostConstants& constants) {
  Hasher hasher;
  add_link(hasher, constants.link);
  for (const LinkLevel& level : constants.levels) {
    hasher.add(static_cast<std::uint64_t>(level.ranks));
    add_link(hasher, level.link);
  }
  for (const NamedLink& named : constants.named) {
    hasher.add_all(named.mesh_dim);
    add_link(hasher, named.link);
  }
  hasher.add(static_cast<std::uint64_t>(constants.step_ps));
  hasher.add(static_cast<std::uint64_t>(constants.local_step_ps));
  hasher.add(static_cast<std::uint64_t>(constants.local_kib_ps));
  return hasher.value();
}

void check(const CostConstants& constants) {
  const auto refuse = [](const char* what, std::int64_t got, const char* expected) {
    fail_invalid("cost", {.what = what, .got = std::to_string(got), .expected = expected});
  };
  const auto check_time = [&](std::int64_t time) {
    if (time < 0) refuse("a cost constant is negative", time, "0 picoseconds or more");
  };
  const auto check_link = [&](const Link& link) {
    check_time(link.message_ps);
    check_time(link.kib_ps);
  };
  check_link(constants.link);
  std::int64_t last = 0;
  for (const LinkLevel& level : constants.levels) {
    check_link(level.link);
    if (level.ranks <= last) refuse("link levels do not grow", level.ranks, "ascending numbers of ranks, 1 or more");
    last = level.ranks;
  }
  for (const NamedLink& named : constants.named) check_link(named.link);
  check_time(constants.step_ps);
  check_time(constants.local_step_ps);
  check_time(constants.local_kib_ps);
}

std::int64_t log2_ceil(std::int64_t n) { return std::bit_width(static_cast<std::uint64_t>(n - 1)); }

std::int64_t bytes_time(std::int64_t bytes, std::int64_t kib_ps) { return scaled(bytes, kib_ps, 1024); }

bool slower(const Link& a, const Link& b) {
  return a.kib_ps != b.kib_ps ? a.kib_ps > b.kib_ps : a.message_ps > b.message_ps;
}

}  // namespace

CostModel::CostModel() {
  static const CostModel model{CostConstants{}};
  data_ = model.data_;
}

CostModel::CostModel(const CostConstants& constants) {
  check(constants);
  data_ = cost_table().intern(constants, hash_of(constants));
}

Link CostModel::link_of(const Mesh& mesh, std::int64_t mesh_dim) const {
  const CostConstants& all = constants();
  if (!mesh.names().empty()) {
    for (const NamedLink& named : all.named) {
      if (named.mesh_dim == mesh.names()[mesh_dim]) return named.link;
    }
  }
  if (all.levels.empty()) return all.link;
  // The first group of the dim speaks for all of them.
  Dims at(static_cast<std::size_t>(mesh.ndim()));
  const std::int64_t first = mesh.rank_at(at);
  at[mesh_dim] = mesh.shape()[mesh_dim] - 1;
  const std::int64_t last = mesh.rank_at(at);
  for (const LinkLevel& level : all.levels) {
    if (first / level.ranks == last / level.ranks) return level.link;
  }
  return all.link;
}

Link CostModel::between() const {
  Link result = constants().link;
  for (const LinkLevel& level : constants().levels) result = slower(level.link, result) ? level.link : result;
  for (const NamedLink& named : constants().named) result = slower(named.link, result) ? named.link : result;
  return result;
}

GroupCost CostModel::group(const Mesh& mesh, std::span<const std::int64_t> mesh_dims) const {
  InlineVec<Link, 4> links;
  InlineVec<std::int64_t, 4> sizes;
  for (std::int64_t m : mesh_dims) {
    links.push_back(link_of(mesh, m));
    sizes.push_back(mesh.shape()[m]);
  }
  return group(links, sizes);
}

GroupCost CostModel::group(std::span<const Link> links, std::span<const std::int64_t> sizes) {
  GroupCost result;
  for (std::size_t i = 0; i < links.size(); ++i) {
    result.size *= sizes[i];
    result.rounds_ps = saturating_add(result.rounds_ps, scaled(log2_ceil(sizes[i]), links[i].message_ps, 1));
    if (sizes[i] > 1 && slower(links[i], result.slowest)) result.slowest = links[i];
    // Peers whose slowest differing mesh dim is this one: another index here, any index on the faster ones.
    std::int64_t peers = sizes[i] - 1;
    for (std::size_t j = 0; j < links.size(); ++j) {
      if (slower(links[i], links[j]) || (j > i && !slower(links[j], links[i]))) peers *= sizes[j];
    }
    result.peers_ps = saturating_add(result.peers_ps, scaled(peers, links[i].message_ps, 1));
    result.peers_kib_ps = saturating_add(result.peers_kib_ps, scaled(peers, links[i].kib_ps, 1));
  }
  return result;
}

std::int64_t CostModel::all_gather(const GroupCost& group, std::int64_t piece_bytes) const {
  return saturating_add(saturating_add(constants().step_ps, group.rounds_ps),
                        bytes_time(piece_bytes, group.peers_kib_ps));
}

std::int64_t CostModel::reduce_scatter(const GroupCost& group, std::int64_t piece_bytes) const {
  return all_gather(group, piece_bytes);
}

std::int64_t CostModel::all_reduce(const GroupCost& group, std::int64_t local_bytes) const {
  const std::int64_t piece = ceil_div(local_bytes, group.size);
  return saturating_add(saturating_add(constants().step_ps, scaled(2, group.rounds_ps, 1)),
                        bytes_time(2 * piece, group.peers_kib_ps));
}

std::int64_t CostModel::all_to_all(const GroupCost& group, std::int64_t local_bytes) const {
  const std::int64_t piece = ceil_div(local_bytes, group.size);
  return saturating_add(saturating_add(constants().step_ps, group.peers_ps), bytes_time(piece, group.peers_kib_ps));
}

std::int64_t CostModel::permute(const GroupCost& group, std::int64_t local_bytes, std::int64_t messages) const {
  return saturating_add(saturating_add(constants().step_ps, scaled(messages, group.slowest.message_ps, 1)),
                        bytes_time(local_bytes, group.slowest.kib_ps));
}

std::int64_t CostModel::exchange(const GroupCost& group, std::int64_t messages, std::int64_t bytes) const {
  const std::int64_t peers = std::max<std::int64_t>(group.size - 1, 1);
  return saturating_add(saturating_add(constants().step_ps, scaled(messages, group.peers_ps, peers)),
                        bytes_time(bytes, group.peers_kib_ps / peers));
}

std::int64_t CostModel::local(std::int64_t bytes) const {
  return saturating_add(constants().local_step_ps, bytes_time(bytes, constants().local_kib_ps));
}

}  // namespace dtensor
