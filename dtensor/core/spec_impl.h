#pragma once

#include "dtensor/core/spec.h"

namespace dtensor {

// What a spec is made of, and its key in the table of specs.
struct SpecKey {
  TensorMeta meta;
  Mesh mesh;
  DimLayouts dims;
  Partials partials;

  friend bool operator==(const SpecKey& a, const SpecKey& b) {
    return a.mesh == b.mesh && a.meta == b.meta && a.dims == b.dims && a.partials == b.partials;
  }
};

// The public words for it: plain and strided shards where they can say it, FactorShards where not.
Placements derive_placements(const SpecKey& key);

// Specs are hashed by their public words, so that they can be looked up by those before anything else is computed.
std::size_t hash_of(const TensorMeta& meta, const Mesh& mesh, const Placements& placements);

class SpecData {
 public:
  explicit SpecData(const SpecKey& key);
  const SpecKey& key() const noexcept { return key_; }
  const Placements& placements() const noexcept { return placements_; }
  bool replicated() const noexcept { return replicated_; }
  bool has_partial() const noexcept { return has_partial_; }
  std::uint64_t stable_hash() const noexcept { return stable_hash_; }

 private:
  SpecKey key_;
  Placements placements_;
  bool replicated_ = true;
  bool has_partial_ = false;
  std::uint64_t stable_hash_ = 0;
};

}  // namespace dtensor
