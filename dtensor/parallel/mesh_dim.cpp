#include "dtensor/parallel/mesh_dim.h"

#include <algorithm>
#include <string>

#include "dtensor/core/error.h"

namespace dtensor {

MeshDim mesh_dim_of(const DeviceMesh& mesh, std::string_view where) {
  if (mesh.ndim() != 1) {
    fail_invalid(where, {.what = "a mesh of several dims",
                         .got = mesh.to_string(),
                         .expected = "one dim",
                         .advice = mesh.names().empty() ? "a mesh with names, and one of them: mesh[\"tp\"]"
                                                        : "mesh[\"" + mesh.names().back() + "\"]"});
  }
  const DeviceMesh& root = mesh.root();
  if (root.ndim() == 1) return {root, 0};
  const auto& names = root.names();
  const auto found = std::find(names.begin(), names.end(), mesh.names().empty() ? "" : mesh.names()[0]);
  if (found == names.end()) {
    fail_invalid(where, {.what = "a mesh dim that is not one of the whole mesh's",
                         .got = mesh.to_string() + " of " + root.to_string(),
                         .advice = "one of its dims, by name"});
  }
  return {root, found - names.begin()};
}

}  // namespace dtensor
