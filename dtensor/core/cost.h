#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "dtensor/core/intern.h"
#include "dtensor/core/mesh.h"

namespace dtensor {

// Times are integer picoseconds and saturate at kForever, so that every rank computes the same number.
inline constexpr std::int64_t kForever = INT64_MAX;
inline std::int64_t saturating_add(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  return __builtin_add_overflow(a, b, &result) ? kForever : result;
}

// a * b / c without overflow in between. Pre: none is negative, c > 0.
inline std::int64_t scaled(std::int64_t a, std::int64_t b, std::int64_t c) {
  std::int64_t product = 0;
  if (!__builtin_mul_overflow(a, b, &product)) return product / c;
  const auto wide =
      static_cast<unsigned __int128>(a) * static_cast<unsigned __int128>(b) / static_cast<unsigned __int128>(c);
  return wide > static_cast<unsigned __int128>(kForever) ? kForever : static_cast<std::int64_t>(wide);
}

// One kind of wire: what a message costs before its first byte, and what 1024 bytes cost after it.
struct Link {
  std::int64_t message_ps = 2'000'000;  // 2 us
  std::int64_t kib_ps = 20'480;         // 50 GB/s
  friend bool operator==(const Link&, const Link&) = default;
};

// Ranks of one aligned block of `ranks` consecutive ranks talk over `link`: {8, nvlink} for nodes of eight.
struct LinkLevel {
  std::int64_t ranks = 1;
  Link link;
  friend bool operator==(const LinkLevel&, const LinkLevel&) = default;
};

struct NamedLink {
  std::string mesh_dim;
  Link link;
  friend bool operator==(const NamedLink&, const NamedLink&) = default;
};

// Set by the user, alike on every rank; never measured by each rank alone.
struct CostConstants {
  Link link = {};                      // what no level and no name says
  std::vector<LinkLevel> levels = {};  // ascending blocks; the smallest that holds a group wins
  std::vector<NamedLink> named = {};   // by the name of a mesh dim; before the levels
  std::int64_t step_ps = 5'000'000;    // what starting any collective costs
  std::int64_t local_step_ps = 500'000;
  std::int64_t local_kib_ps = 1'024;  // copying within a rank: 1 TB/s
  friend bool operator==(const CostConstants&, const CostConstants&) = default;
};

class CostData {
 public:
  explicit CostData(const CostConstants& constants) : constants_(constants) {}
  const CostConstants& key() const noexcept { return constants_; }

 private:
  CostConstants constants_;
};

// What a group of mesh dims costs to talk over, per byte and per message. Every rank has one peer for each other
// coordinate of the group; a peer is reached over the slowest link among the mesh dims on which the two differ.
struct GroupCost {
  std::int64_t size = 1;
  std::int64_t rounds_ps = 0;     // ceil(log2(size)) messages on every mesh dim: gathers and reductions
  std::int64_t peers_ps = 0;      // a message to every peer
  std::int64_t peers_kib_ps = 0;  // 1024 bytes to every peer
  Link slowest{0, 0};
};

// Constants and what follows from them. Interned: equal constants are one object, so a model is a pointer in cache
// keys.
class CostModel {
 public:
  CostModel();  // the defaults of CostConstants
  explicit CostModel(const CostConstants& constants);

  const CostConstants& constants() const noexcept { return data_->key(); }
  // The link of a mesh dim: by name, else the smallest level whose blocks hold its groups, else the default.
  Link link_of(const Mesh& mesh, std::int64_t mesh_dim) const;
  // The link that joins two meshes: the slowest there is.
  Link between() const;
  GroupCost group(const Mesh& mesh, std::span<const std::int64_t> mesh_dims) const;
  static GroupCost group(std::span<const Link> links, std::span<const std::int64_t> sizes);

  // Each: what the busiest rank waits for. Bytes are those of one rank's piece.
  //   all-gather of 4 pieces of 1 MiB: step + 2 messages + 3 MiB;  all-to-all of the same: step + 3 messages + 3 pieces
  std::int64_t all_gather(const GroupCost& group, std::int64_t piece_bytes) const;
  std::int64_t reduce_scatter(const GroupCost& group, std::int64_t piece_bytes) const;
  std::int64_t all_reduce(const GroupCost& group, std::int64_t local_bytes) const;
  std::int64_t all_to_all(const GroupCost& group, std::int64_t local_bytes) const;
  std::int64_t permute(const GroupCost& group, std::int64_t local_bytes, std::int64_t messages) const;
  // Any messages within a group: `bytes` is the larger of what a rank sends and receives.
  std::int64_t exchange(const GroupCost& group, std::int64_t messages, std::int64_t bytes) const;
  std::int64_t local(std::int64_t bytes) const;

  friend bool operator==(const CostModel& a, const CostModel& b) noexcept { return a.data_ == b.data_; }
  std::size_t hash() const noexcept { return data_.hash(); }

 private:
  Interned<CostData> data_;
};

}  // namespace dtensor
