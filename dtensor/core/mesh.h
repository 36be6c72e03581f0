#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dtensor/core/inline_vec.h"
#include "dtensor/core/intern.h"
#include "dtensor/core/layout.h"
#include "dtensor/core/rank_context.h"

namespace dtensor {

class MeshData;

// An n-d arrangement of ranks with (optionally) named dims. A small immutable value: equal meshes are one object.
//
// A mesh is a rank list (0 … n-1 unless one was given) and, per mesh dim, a layout of positions in that list.
// Sub-meshes share the list, so nothing is ever written out until a list of ranks is asked for.
//
// A sub-mesh stands for all its rows at once, as it does in a program that every rank runs: with `2x3(dp,tp)`,
// `mesh["tp"]` is {0,1,2} for ranks 0 to 2 and {3,4,5} for ranks 3 to 5. `select` and `submeshes` pin one row.
class Mesh {
 public:
  // Ranks 0 … n-1 in row-major order.
  static Mesh make(const Dims& shape, const std::vector<std::string>& names = {});
  // Any distinct ranks, in row-major order of the shape.
  static Mesh from_ranks(const Dims& shape, const std::vector<std::int64_t>& ranks,
                         const std::vector<std::string>& names = {});
  // Reads what to_string prints, and `dp=2,tp=3`.
  static Mesh parse(std::string_view text);

  std::int64_t ndim() const noexcept;
  // The number of ranks (of one row).
  std::int64_t size() const noexcept;
  std::int64_t size(std::int64_t dim) const;
  std::int64_t size(std::string_view name) const;
  const Dims& shape() const noexcept;
  // Empty when the dims have no names.
  const std::vector<std::string>& names() const noexcept;
  // The index of a named dim; an error that lists the names when there is none.
  std::int64_t dim_index(std::string_view name) const;

  // This rank's index on every mesh dim; no value when it is not in this mesh.
  std::optional<Dims> coordinate(std::int64_t rank) const;
  bool contains(std::int64_t rank) const { return coordinate(rank).has_value(); }

  // Rows: how many disjoint copies of this mesh its rank list holds (1 unless it is a sub-mesh).
  std::int64_t rows() const noexcept;
  std::optional<std::int64_t> row_of(std::int64_t rank) const;
  std::int64_t rank_at(const Dims& coordinate, std::int64_t row = 0) const;

  // Lists, written out on demand: the ranks of one row; of the group along `dim` through `rank`; of every such group.
  std::vector<std::int64_t> ranks(std::int64_t row = 0) const;
  std::vector<std::int64_t> group(std::int64_t dim, std::int64_t rank) const;
  std::vector<std::vector<std::int64_t>> groups(std::int64_t dim) const;

  // Some of the dims, in their own order.
  Mesh slice(const std::vector<std::string>& names) const;
  Mesh operator[](std::string_view name) const;
  // One dim in place of several, or of all; the default name joins theirs with '_'.
  Mesh flatten(const std::vector<std::string>& names, std::string_view name = {}) const;
  Mesh flatten_all(std::string_view name = {}) const;
  // Several dims in place of one.
  Mesh unflatten(std::string_view dim, const Dims& sizes, const std::vector<std::string>& names) const;
  Mesh unflatten(std::int64_t dim, const Dims& sizes, const std::vector<std::string>& names) const;
  // The dims of several sub-meshes of one mesh, side by side.
  static Mesh concatenate(const std::vector<Mesh>& meshes);
  // The ranks whose index on `dim` is `index`, as a mesh of the other dims. Pins the row: other ranks are not in it.
  Mesh select(std::string_view dim, std::int64_t index) const;
  // Every row of `mesh[name]`, each pinned.
  std::vector<Mesh> submeshes(std::string_view name) const;

  // The largest rank, to be checked against a world.
  std::int64_t max_rank() const noexcept;

  // `2x3(dp,tp)`; with a rank list `2x3(dp,tp) of [5,4,3,2,1,0]` or `2x3(dp,tp) of [6..11]`; a sub-mesh with its
  // strides in the list, `3(tp):[1] of 6`; pinned to one row, `3(tp):[1] at [2:3=1] of 6`.
  std::string to_string() const;

  friend bool operator==(const Mesh& a, const Mesh& b) noexcept { return a.data_ == b.data_; }
  std::size_t hash() const noexcept { return data_.hash(); }
  // The same in every process, so that ranks can compare it.
  std::uint64_t stable_hash() const noexcept;

 private:
  friend class MeshData;
  friend struct MeshParts;
  explicit Mesh(Interned<MeshData> data) : data_(std::move(data)) {}
  static Mesh from_parts(const struct MeshParts& parts, std::string_view where);
  std::int64_t check_dim(std::int64_t dim, std::string_view where) const;
  Mesh take_dims(const std::vector<std::int64_t>& dims) const;

  Interned<MeshData> data_;
};

// How many meshes are interned, and how often look-ups hit.
InternStats mesh_intern_stats();

inline constexpr std::int64_t kMaxMeshDims = 16;

enum class DeviceKind : std::uint8_t { kCpu, kCuda };

std::string_view device_name(DeviceKind device);

// A mesh as one rank sees it: which device its tensors live on, and who "I" am. A rank's identity lives here and
// nowhere else, so threads can be ranks. Equality is the mesh's and the device's: the same on all ranks.
class DeviceMesh : public Mesh {
 public:
  // Every rank of the mesh must be in the world; this rank need not be in the mesh. Without a context nothing can be
  // sent over it.
  DeviceMesh(Mesh mesh, DeviceKind device, std::int64_t rank, std::int64_t world_size,
             std::shared_ptr<RankContext> context = nullptr);

  DeviceKind device() const noexcept { return device_; }
  std::int64_t rank() const noexcept { return rank_; }
  std::int64_t world_size() const noexcept { return world_size_; }
  // What this rank has beside its meshes; null when the mesh belongs to no world.
  const std::shared_ptr<RankContext>& context() const noexcept { return context_; }

  using Mesh::coordinate;
  const std::optional<Dims>& coordinate() const noexcept { return coordinate_; }
  bool contains_me() const noexcept { return coordinate_.has_value(); }
  // The mesh that this one was sliced from, or flattened or unflattened of, and so on up; itself when it was made
  // whole.
  const DeviceMesh& root() const noexcept { return root_ ? *root_ : *this; }
  // My index on a mesh dim. The first form is for 1-D meshes.
  std::int64_t local_rank() const;
  std::int64_t local_rank(std::int64_t dim) const;
  std::int64_t local_rank(std::string_view name) const;
  // The ranks of my group along a dim; all my row's ranks.
  std::vector<std::int64_t> my_group(std::int64_t dim) const { return group(dim, rank_); }
  std::vector<std::int64_t> my_ranks() const;

  DeviceMesh slice(const std::vector<std::string>& names) const { return with(Mesh::slice(names)); }
  DeviceMesh operator[](std::string_view name) const { return with(Mesh::operator[](name)); }
  DeviceMesh flatten(const std::vector<std::string>& names, std::string_view name = {}) const {
    return with(Mesh::flatten(names, name));
  }
  DeviceMesh flatten_all(std::string_view name = {}) const { return with(Mesh::flatten_all(name)); }
  DeviceMesh unflatten(std::string_view dim, const Dims& sizes, const std::vector<std::string>& names) const {
    return with(Mesh::unflatten(dim, sizes, names));
  }
  DeviceMesh unflatten(std::int64_t dim, const Dims& sizes, const std::vector<std::string>& names) const {
    return with(Mesh::unflatten(dim, sizes, names));
  }
  DeviceMesh select(std::string_view dim, std::int64_t index) const { return with(Mesh::select(dim, index)); }

  friend bool operator==(const DeviceMesh& a, const DeviceMesh& b) noexcept {
    return static_cast<const Mesh&>(a) == static_cast<const Mesh&>(b) && a.device_ == b.device_;
  }

 private:
  DeviceMesh with(Mesh mesh) const;

  DeviceKind device_;
  std::int64_t rank_;
  std::int64_t world_size_;
  std::optional<Dims> coordinate_;
  std::shared_ptr<RankContext> context_;
  std::shared_ptr<const DeviceMesh> root_;  // null: this one
};

}  // namespace dtensor
