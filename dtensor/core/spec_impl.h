#pragma once

#include "dtensor/core/spec.h"

namespace dtensor {

// What a spec is made of, and its key in the table of specs.
struct SpecKey {
  TensorMeta meta;
  Mesh mesh;
  DimLayouts dims;
  Partials partials;

  std::size_t hash() const;
  friend bool operator==(const SpecKey& a, const SpecKey& b) {
    return a.mesh == b.mesh && a.meta == b.meta && a.dims == b.dims && a.partials == b.partials;
  }
};

class SpecData {
 public:
  explicit SpecData(const SpecKey& key);
  const SpecKey& key() const noexcept { return key_; }
  const Placements& placements() const noexcept { return placements_; }
  bool replicated() const noexcept { return replicated_; }
  bool has_partial() const noexcept { return has_partial_; }

 private:
  static Placements derive_placements(const SpecKey& key);

  SpecKey key_;
  Placements placements_;
  bool replicated_ = true;
  bool has_partial_ = false;
};

}  // namespace dtensor
