#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dtensor/core/dim_layout.h"
#include "dtensor/core/intern.h"
#include "dtensor/core/mesh.h"
#include "dtensor/core/placement.h"
#include "dtensor/core/tensor_meta.h"

namespace dtensor {

using DimLayouts = InlineVec<DimLayout, 4>;
// Per mesh dim: the reduction it is Partial in, if it is.
using Partials = InlineVec<std::optional<ReduceOp>, 4>;

// In which order the mesh dims cut a tensor dim. One entry for each tensor dim that is cut, ascending.
struct ShardOrderEntry {
  std::int64_t tensor_dim;
  std::vector<std::int64_t> mesh_dims;
  friend bool operator==(const ShardOrderEntry&, const ShardOrderEntry&) = default;
};
using ShardOrder = std::vector<ShardOrderEntry>;

class SpecData;

// How one logical tensor lies on a mesh: its meta, the mesh, one factored layout per tensor dim, and which mesh dims
// are Partial. The public placements are read into this form and derived from it (docs/layouts.md has the invariants).
//
// An immutable value; equal specs are one object, so copies, == and hash cost a pointer. It does not know "my" rank:
// the spec is the same object on all ranks of a process.
//
//   auto spec = Spec::make({{7, 5}, DType::kF32}, Mesh::make({2, 3}, {"dp", "tp"}), {Shard(0), Shard(1)});
//   spec.to_string() == "f32[7,5] @ 2x3(dp,tp) : S(0),S(1)"
class Spec {
 public:
  // One placement per mesh dim; several mesh dims cut the same tensor dim in mesh order unless a StridedShard or the
  // given order says otherwise.
  static Spec make(const TensorMeta& meta, const Mesh& mesh, const Placements& placements);
  static Spec make(const TensorMeta& meta, const Mesh& mesh, const Placements& placements, const ShardOrder& order);
  // From factored layouts, brought into canonical form. No value when they have too many factors; an error when they do
  // not describe the tensor on this mesh.
  static OrReason<Spec> from_dims(const TensorMeta& meta, const Mesh& mesh, const DimLayouts& dims,
                                  const Partials& partials);
  // Reads what to_string prints, and StridedShard written as S(0,2).
  static Spec parse(std::string_view text);

  const TensorMeta& meta() const noexcept;
  const Mesh& mesh() const noexcept;
  // Canonical (see coalesce), one per tensor dim.
  const DimLayouts& dims() const noexcept;
  const Partials& partials() const noexcept;
  // In public words. An order reads as StridedShards; a cut that neither form can say as FactorShard.
  const Placements& placements() const noexcept;
  ShardOrder shard_order() const;

  bool is_replicated() const noexcept;
  bool has_partial() const noexcept;
  // Into how many pieces the mesh cuts the tensor; per tensor dim.
  std::int64_t num_shards() const;
  Dims num_shards_per_dim() const;
  // The tensor dim a mesh dim cuts; none when it replicates or is Partial.
  std::optional<std::int64_t> tensor_dim_of(std::int64_t mesh_dim) const;

  // What the rank at a mesh coordinate holds. The offset is its first global index on every dim; on a dim where it
  // holds nothing, the dim's size.
  struct Local {
    Dims shape;
    Dims offset;
  };
  Local local(const Dims& coordinate) const;
  Dims local_shape(const Dims& coordinate) const { return local(coordinate).shape; }
  // Of a freshly made local tensor: dense, dims in the order of the global strides; 0 where the global stride is 0.
  Dims local_stride(const Dims& coordinate) const;
  std::int64_t local_bytes(const Dims& coordinate) const;

  // `f32[8,6] @ 2x2(dp,tp) : S(0),R`. Orders print as `S(0)[1],S(0)[0]`, factored dims as `f32[(3*5),6] @ 2(tp) :
  // S(0.1)`, a virtual cut into 2 before the first cut as `f32[9~2@0] @ 4(x) : S(0)[1]`.
  std::string to_string() const;

  friend bool operator==(const Spec& a, const Spec& b) noexcept { return a.data_ == b.data_; }
  std::size_t hash() const noexcept { return data_.hash(); }
  // The same in every process, so that ranks can compare it.
  std::uint64_t stable_hash() const noexcept;

 private:
  explicit Spec(Interned<SpecData> data) : data_(std::move(data)) {}
  Interned<SpecData> data_;
};

InternStats spec_intern_stats();

// One cut as it is applied: the shape the rank sees before it and after it. The first step starts from the global
// shape, the last ends at the local one. Cuts of one dim come in their order, otherwise mesh dims ascend.
struct ShardStep {
  std::int64_t mesh_dim;
  std::int64_t tensor_dim;
  Dims before;
  Dims after;
};
std::vector<ShardStep> shard_steps(const Spec& spec, const Dims& coordinate);

// The global shape that these local shapes (in the mesh's row-major order) come from, with the spec's dims read as
// sizes to be found: an error when no chunk-rule tensor has them. Only for plain Shards, in mesh order.
Dims global_shape_from_locals(const Mesh& mesh, const Placements& placements, const std::vector<Dims>& locals);

// The same layout but for one mesh dim, which from now on does this. A Shard cuts what the others leave, as the last.
Spec with_placement_on(const Spec& spec, std::int64_t mesh_dim, const Placement& placement);

// The refusal of from_dims as an error, for callers that cannot go on without.
Spec expect_spec(OrReason<Spec> spec, std::string_view where);

}  // namespace dtensor
