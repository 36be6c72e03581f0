#include "dtensor/core/spec.h"

#include <algorithm>

#include "dtensor/core/checked.h"
#include "dtensor/core/hash.h"
#include "dtensor/core/spec_impl.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

InternTable<SpecKey, SpecData>& spec_table() {
  static auto* table = new InternTable<SpecKey, SpecData>(1 << 16);  // never destroyed: handles may outlive main
  return *table;
}

std::string describe(const TensorMeta& meta, const Mesh& mesh, const Placements& placements) {
  return meta.to_string() + " @ " + mesh.to_string() + " : " + to_string(placements);
}

std::int64_t check_tensor_dim(const Placement& placement, const TensorMeta& meta) {
  const std::int64_t ndim = meta.ndim();
  if (ndim == 0) {
    fail_invalid("spec", {.what = "a 0-d tensor cannot be sharded",
                          .got = placement.to_string() + " for " + meta.to_string(),
                          .expected = "R or P"});
  }
  const std::int64_t dim = placement.dim() < 0 ? placement.dim() + ndim : placement.dim();
  if (dim < 0 || dim >= ndim) {
    fail_invalid("spec", {.what = "no such tensor dim",
                          .got = placement.to_string() + " for " + meta.to_string(),
                          .expected = "a dim from " + std::to_string(-ndim) + " to " + std::to_string(ndim - 1)});
  }
  return dim;
}

void check_count(std::size_t placements, const Mesh& mesh) {
  if (static_cast<std::int64_t>(placements) == mesh.ndim()) return;
  fail_invalid("spec", {.what = "placements and mesh dims differ in number",
                        .got = std::to_string(placements) + " placements for " + mesh.to_string(),
                        .expected = std::to_string(mesh.ndim()) + ", one for each mesh dim"});
}

void check_partials(const TensorMeta& meta, const Partials& partials) {
  std::optional<ReduceOp> seen;
  for (const auto& op : partials) {
    if (!op) continue;
    if (!can_reduce(meta.dtype(), *op)) {
      fail_invalid("spec", {.what = "values of this type have no such reduction",
                            .got = "P(" + std::string(to_string(*op)) + ") for " + meta.to_string()});
    }
    const auto is_mean_or_sum = [](ReduceOp o) { return o == ReduceOp::kSum || o == ReduceOp::kAvg; };
    if (seen && *seen != *op && !(is_mean_or_sum(*seen) && is_mean_or_sum(*op))) {
      fail_invalid("spec",
                   {.what = "two reductions in one spec do not commute",
                    .got = "P(" + std::string(to_string(*seen)) + ") and P(" + std::string(to_string(*op)) + ")",
                    .expected = "one reduction, or sum with avg"});
    }
    seen = op;
  }
}

// The public cuts of every tensor dim, in mesh order, and the Partials.
void read_placements(const TensorMeta& meta, const Mesh& mesh, const Placements& placements,
                     InlineVec<PublicCuts, 4>& cuts, Partials& partials) {
  check_count(placements.size(), mesh);
  cuts.resize(meta.shape().size());
  partials.resize(placements.size());
  for (std::size_t m = 0; m < placements.size(); ++m) {
    const Placement& placement = placements[m];
    if (placement.is_partial()) {
      partials[m] = placement.op();
    } else if (placement.is_shard()) {
      if (placement.factor() >= 0) {
        fail_invalid("spec", {.what = "a cut of a factor does not say what the factors are",
                              .got = placement.to_string(),
                              .expected = "S, R or P",
                              .advice = "parsing a whole spec, or another tensor's spec"});
      }
      cuts[check_tensor_dim(placement, meta)].push_back(
          {static_cast<std::int32_t>(m), mesh.shape()[m], placement.split_factor()});
    }
  }
}

// Sizes, mesh dims and counts must be those of the tensor and the mesh.
void check_dims(const SpecKey& key) {
  const auto refuse = [&](const std::string& what, const std::string& got) {
    fail_invalid(
        "spec",
        {.what = what, .got = got, .expected = "a layout of " + key.meta.to_string() + " @ " + key.mesh.to_string()});
  };
  if (static_cast<std::int64_t>(key.dims.size()) != key.meta.ndim()) {
    refuse("layouts and tensor dims differ in number", std::to_string(key.dims.size()) + " layouts");
  }
  check_count(key.partials.size(), key.mesh);
  InlineVec<bool, 16> used;
  for (const auto& op : key.partials) used.push_back(op.has_value());
  for (std::size_t d = 0; d < key.dims.size(); ++d) {
    InlineVec<std::int64_t, 4> sizes;
    for (const Factor& factor : key.dims[d]) {
      sizes.push_back(factor.size);
      if (factor.size < 0) refuse("a factor is negative", std::to_string(factor.size));
      for (const Cut& cut : factor.cuts) {
        if (cut.is_virtual()) {
          if (cut.count < 1 || cut.count > std::max<std::int64_t>(factor.size, 1)) {
            refuse("a virtual cut makes no pieces", std::to_string(cut.count) + " of " + std::to_string(factor.size));
          }
        } else if (cut.mesh_dim < 0 || cut.mesh_dim >= key.mesh.ndim() || cut.count != key.mesh.shape()[cut.mesh_dim]) {
          refuse("a cut is not by a mesh dim",
                 "mesh dim " + std::to_string(cut.mesh_dim) + " into " + std::to_string(cut.count));
        } else if (std::exchange(used[cut.mesh_dim], true)) {
          refuse("a mesh dim is used twice", "mesh dim " + std::to_string(cut.mesh_dim));
        }
      }
    }
    const auto product = checked_product(sizes);
    if (!product || *product != key.meta.shape()[d]) {
      refuse("the factors do not multiply to the tensor dim",
             join_numbers(sizes, "*") + " for dim " + std::to_string(d));
    }
  }
}

Interned<SpecData> intern(const SpecKey& key) {
  return spec_table().intern(key, hash_of(key.meta, key.mesh, derive_placements(key)));
}

// A spec whose public words are these, if there is one already. FactorShards do not say all, so they never match.
Interned<SpecData> find_by_placements(const TensorMeta& meta, const Mesh& mesh, const Placements& placements) {
  for (const Placement& placement : placements) {
    if (placement.factor() >= 0) return {};
  }
  return spec_table().find(hash_of(meta, mesh, placements), [&](const SpecData& data) {
    return data.key().mesh == mesh && data.key().meta == meta && data.placements() == placements;
  });
}

}  // namespace

std::size_t hash_of(const TensorMeta& meta, const Mesh& mesh, const Placements& placements) {
  Hasher hasher;
  hasher.add(mesh.hash());
  hasher.add(meta.hash());
  for (const Placement& placement : placements) {
    hasher.add(static_cast<std::uint64_t>(placement.kind()) + 8 * static_cast<std::uint64_t>(placement.op()) +
               64 * static_cast<std::uint64_t>(placement.dim()));
    hasher.add(static_cast<std::uint64_t>(placement.split_factor()));
  }
  return hasher.value();
}

SpecData::SpecData(const SpecKey& key) : key_(key), placements_(derive_placements(key)) {
  for (const DimLayout& dim : key_.dims) {
    for (const Factor& factor : dim) replicated_ = replicated_ && factor.cuts.empty();
  }
  for (const auto& op : key_.partials) has_partial_ = has_partial_ || op.has_value();
  replicated_ = replicated_ && !has_partial_;
  Hasher stable;
  stable.add(key_.mesh.stable_hash());
  stable.add(key_.meta.hash());
  for (const DimLayout& dim : key_.dims) {
    stable.add(dim.size());
    for (const Factor& factor : dim) {
      stable.add(static_cast<std::uint64_t>(factor.size));
      for (const Cut& cut : factor.cuts) {
        stable.add(static_cast<std::uint64_t>(cut.mesh_dim));
        stable.add(static_cast<std::uint64_t>(cut.count));
      }
    }
  }
  for (const auto& op : key_.partials) stable.add(op ? 1 + static_cast<std::uint64_t>(*op) : 0);
  stable_hash_ = stable.value();
}

Placements derive_placements(const SpecKey& key) {
  Placements result(static_cast<std::size_t>(key.mesh.ndim()), Replicate());
  for (std::size_t m = 0; m < result.size(); ++m) {
    if (key.partials[m]) result[m] = Partial(*key.partials[m]);
  }
  for (std::size_t d = 0; d < key.dims.size(); ++d) {
    const auto dim = static_cast<std::int64_t>(d);
    if (const auto cuts = write_public(key.dims[d])) {
      for (const PublicCut& cut : *cuts) result[cut.mesh_dim] = StridedShard(dim, cut.split_factor);
      continue;
    }
    for (std::size_t f = 0; f < key.dims[d].size(); ++f) {
      for (const Cut& cut : key.dims[d][f].cuts) {
        if (!cut.is_virtual()) result[cut.mesh_dim] = FactorShard(dim, static_cast<std::int32_t>(f));
      }
    }
  }
  return result;
}

Spec Spec::make(const TensorMeta& meta, const Mesh& mesh, const Placements& given) {
  // One Replicate stands for all mesh dims.
  const bool everywhere = given.size() == 1 && mesh.ndim() > 1 && given[0].is_replicate();
  Placements all;
  if (everywhere) all.assign(static_cast<std::size_t>(mesh.ndim()), Replicate());
  const Placements& placements = everywhere ? all : given;
  if (auto known = find_by_placements(meta, mesh, placements)) return Spec(std::move(known));
  SpecKey key{meta, mesh, {}, {}};
  InlineVec<PublicCuts, 4> cuts;
  read_placements(meta, mesh, placements, cuts, key.partials);
  check_partials(meta, key.partials);
  for (std::size_t d = 0; d < cuts.size(); ++d) {
    if (cuts[d].empty()) {
      key.dims.push_back({Factor{meta.shape()[d], {}}});
      continue;
    }
    auto dim = read_public(meta.shape()[d], cuts[d]);
    if (!dim) {
      fail_unsupported("spec", {.what = dim.reason(),
                                .got = describe(meta, mesh, placements),
                                .expected = "an order, one strided shard, or pieces of one size"});
    }
    key.dims.push_back(std::move(*dim));
  }
  return Spec(intern(key));
}

Spec Spec::make(const TensorMeta& meta, const Mesh& mesh, const Placements& placements, const ShardOrder& order) {
  SpecKey key{meta, mesh, {}, {}};
  InlineVec<PublicCuts, 4> cuts;
  read_placements(meta, mesh, placements, cuts, key.partials);
  check_partials(meta, key.partials);
  const auto refuse = [&](const std::string& what, std::int64_t tensor_dim) {
    fail_invalid("spec", {.what = what,
                          .got = "the order of tensor dim " + std::to_string(tensor_dim) + " in " +
                                 describe(meta, mesh, placements),
                          .expected = "every mesh dim with a Shard on the tensor dim, once"});
  };
  for (std::size_t d = 0; d < cuts.size(); ++d) {
    const auto tensor_dim = static_cast<std::int64_t>(d);
    Factor factor{meta.shape()[d], {}};
    const auto entry =
        std::find_if(order.begin(), order.end(), [&](const ShardOrderEntry& e) { return e.tensor_dim == tensor_dim; });
    if (entry == order.end()) {
      if (!cuts[d].empty()) refuse("a sharded tensor dim has no order", tensor_dim);
      key.dims.push_back({factor});
      continue;
    }
    for (std::int64_t mesh_dim : entry->mesh_dims) {
      const auto cut =
          std::find_if(cuts[d].begin(), cuts[d].end(), [&](const PublicCut& c) { return c.mesh_dim == mesh_dim; });
      if (cut == cuts[d].end()) refuse("mesh dim " + std::to_string(mesh_dim) + " is not one that cuts it", tensor_dim);
      if (cut->split_factor != 1) refuse("an order and a StridedShard together", tensor_dim);
      factor.cuts.push_back({cut->mesh_dim, cut->count});
      cuts[d].erase(static_cast<std::size_t>(cut - cuts[d].begin()));
    }
    if (!cuts[d].empty()) refuse("the order leaves a mesh dim out", tensor_dim);
    key.dims.push_back(coalesce({factor}));
  }
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (order[i].tensor_dim < 0 || order[i].tensor_dim >= meta.ndim() || order[i].mesh_dims.empty() ||
        (i > 0 && order[i].tensor_dim <= order[i - 1].tensor_dim)) {
      refuse("an entry is empty, out of range or out of order", order[i].tensor_dim);
    }
  }
  return Spec(intern(key));
}

OrReason<Spec> Spec::from_dims(const TensorMeta& meta, const Mesh& mesh, const DimLayouts& dims,
                               const Partials& partials) {
  SpecKey key{meta, mesh, dims, partials};
  check_dims(key);
  check_partials(meta, partials);
  for (DimLayout& dim : key.dims) {
    dim = coalesce(dim);
    if (dim.size() > kMaxFactors) {
      return Reason{"a tensor dim would have " + std::to_string(dim.size()) + " factors, more than " +
                    std::to_string(kMaxFactors)};
    }
  }
  return Spec(intern(key));
}

Spec expect_spec(OrReason<Spec> spec, std::string_view where) {
  if (!spec) fail_unsupported(where, {.what = spec.reason()});
  return *spec;
}

Spec with_placement_on(const Spec& spec, std::int64_t mesh_dim, const Placement& placement) {
  DimLayouts dims = spec.dims();
  for (DimLayout& dim : dims) {
    for (Factor& factor : dim) {
      Cuts others;
      for (const Cut& cut : factor.cuts) {
        if (cut.mesh_dim != mesh_dim) others.push_back(cut);
      }
      factor.cuts = others;
    }
  }
  Partials partials = spec.partials();
  partials[static_cast<std::size_t>(mesh_dim)].reset();
  if (placement.is_partial()) partials[static_cast<std::size_t>(mesh_dim)] = placement.op();
  if (placement.is_shard()) {
    const auto ndim = static_cast<std::int64_t>(dims.size());
    const std::int64_t dim = placement.dim() < 0 ? placement.dim() + ndim : placement.dim();
    if (dim < 0 || dim >= ndim || placement.kind() != Placement::Kind::kShard) {
      fail_invalid("with_placement_on", {.what = "a placement that the tensor cannot take here",
                                         .got = placement.to_string() + " on mesh dim " + std::to_string(mesh_dim) +
                                                " of " + spec.to_string(),
                                         .expected = "R, P, or a plain S of one of its dims"});
    }
    dims[static_cast<std::size_t>(dim)][0].cuts.push_back(
        {static_cast<std::int32_t>(mesh_dim), spec.mesh().size(mesh_dim)});
  }
  return expect_spec(Spec::from_dims(spec.meta(), spec.mesh(), dims, partials), "with_placement_on");
}

std::uint64_t Spec::stable_hash() const noexcept { return data_->stable_hash(); }
const TensorMeta& Spec::meta() const noexcept { return data_->key().meta; }
const Mesh& Spec::mesh() const noexcept { return data_->key().mesh; }
const DimLayouts& Spec::dims() const noexcept { return data_->key().dims; }
const Partials& Spec::partials() const noexcept { return data_->key().partials; }
const Placements& Spec::placements() const noexcept { return data_->placements(); }
bool Spec::is_replicated() const noexcept { return data_->replicated(); }
bool Spec::has_partial() const noexcept { return data_->has_partial(); }

ShardOrder Spec::shard_order() const {
  ShardOrder result;
  for (std::size_t d = 0; d < dims().size(); ++d) {
    ShardOrderEntry entry{static_cast<std::int64_t>(d), {}};
    for (const Factor& factor : dims()[d]) {
      for (const Cut& cut : factor.cuts) {
        if (!cut.is_virtual()) entry.mesh_dims.push_back(cut.mesh_dim);
      }
    }
    if (!entry.mesh_dims.empty()) result.push_back(std::move(entry));
  }
  return result;
}

std::int64_t Spec::num_shards() const {
  std::int64_t result = 1;
  for (std::int64_t count : num_shards_per_dim()) result *= count;
  return result;
}

Dims Spec::num_shards_per_dim() const {
  Dims result(dims().size(), 1);
  for (std::size_t d = 0; d < dims().size(); ++d) {
    for (const Factor& factor : dims()[d]) {
      for (const Cut& cut : factor.cuts) result[d] *= cut.is_virtual() ? 1 : cut.count;
    }
  }
  return result;
}

std::optional<std::int64_t> Spec::tensor_dim_of(std::int64_t mesh_dim) const {
  if (mesh_dim < 0 || mesh_dim >= mesh().ndim()) return std::nullopt;
  const Placement& placement = placements()[mesh_dim];
  if (!placement.is_shard()) return std::nullopt;
  return placement.dim();
}

InternStats spec_intern_stats() { return spec_table().stats(); }

}  // namespace dtensor
