#pragma once

#include <string_view>

#include "dtensor/core/mesh.h"

namespace dtensor {

// One dim of a mesh, given as `mesh["tp"]` or as a mesh of one dim: the whole mesh and the dim's place in it.
struct MeshDim {
  const DeviceMesh& mesh;
  std::int64_t dim;
};
// Errors: more dims than one; a dim that the whole mesh does not have (made by flatten).
MeshDim mesh_dim_of(const DeviceMesh& mesh, std::string_view where);

}  // namespace dtensor
