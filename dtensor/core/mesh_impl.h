#pragma once

#include <memory>
#include <utility>

#include "dtensor/core/mesh.h"

namespace dtensor {

// The ranks that a mesh and all its sub-meshes index into: first, first+1, … unless a list was given.
struct RankMap {
  std::int64_t size = 0;
  std::int64_t first = 0;
  std::vector<std::int64_t> list;                              // empty when consecutive
  std::vector<std::pair<std::int64_t, std::int64_t>> by_rank;  // (rank, position), sorted; empty when consecutive
  std::size_t hash = 0;

  static std::shared_ptr<const RankMap> consecutive(std::int64_t first, std::int64_t size);
  // Distinct, non-negative ranks (checked).
  static std::shared_ptr<const RankMap> from_list(std::vector<std::int64_t> ranks, std::string_view where);

  std::int64_t rank(std::int64_t position) const { return list.empty() ? first + position : list[position]; }
  std::optional<std::int64_t> position(std::int64_t rank) const;
  std::int64_t max_rank() const { return list.empty() ? first + size - 1 : by_rank.back().first; }
  friend bool operator==(const RankMap& a, const RankMap& b) {
    return a.hash == b.hash && a.size == b.size && a.first == b.first && a.list == b.list;
  }
};

// A digit of the positions that is held at one value: what `select` leaves of a mesh dim.
struct FixedDigit {
  std::int64_t size;
  std::int64_t stride;
  std::int64_t value;
  friend bool operator==(const FixedDigit&, const FixedDigit&) = default;
};

// What a mesh is made of, and its key in the table of meshes.
struct MeshParts {
  std::shared_ptr<const RankMap> map;
  std::vector<std::string> names;  // empty or one per dim
  InlineVec<Layout, 4> dims;       // positions in the map, one layout per mesh dim, each coalesced
  InlineVec<FixedDigit, 4> fixed;  // outermost first, coalesced; only positions with these digits are in the mesh

  std::size_t hash() const;
  friend bool operator==(const MeshParts& a, const MeshParts& b) {
    return (a.map == b.map || *a.map == *b.map) && a.names == b.names && a.dims == b.dims && a.fixed == b.fixed;
  }
};

class MeshData {
 public:
  // Pre: checked by Mesh::from_parts.
  explicit MeshData(const MeshParts& parts);
  const MeshParts& key() const noexcept { return parts_; }

  const MeshParts& parts() const noexcept { return parts_; }
  std::uint64_t stable_hash() const noexcept { return stable_hash_; }
  const Dims& shape() const noexcept { return shape_; }
  std::int64_t size() const noexcept { return size_; }
  const Layout& rows() const noexcept { return rows_; }
  std::int64_t position(const Dims& coordinate, std::int64_t row) const;

 private:
  MeshParts parts_;
  const std::uint64_t stable_hash_ = parts_.hash();
  Dims shape_;
  std::int64_t size_ = 1;
  Layout rows_;            // what the dims and the fixed digits leave over: where each row starts
  std::int64_t base_ = 0;  // what the fixed digits add to every position
};

// The index along a dim of what stands at a position: the dim's digits of the position.
std::int64_t index_at(const Layout& dim, std::int64_t position);

}  // namespace dtensor
