#pragma once

#include <optional>

#include "dtensor/core/spec.h"
#include "dtensor/runtime/payload.h"

namespace dtensor {

// Which dims of `mesh` the dims of `sub` are, where `sub` is a sub-mesh of it (`mesh["dp"]`, or some of its dims).
std::optional<MeshDims> dims_within(const Mesh& sub, const Mesh& mesh);

// The same layout on the larger mesh, replicated over its other dims.
Spec lift(const Spec& spec, const Mesh& mesh, const MeshDims& dims);

// A tensor of a sub-mesh as one of the mesh: the same memory. Its values are compared over the other dims.
at::Tensor lift(const at::Tensor& tensor, const std::shared_ptr<const DeviceMesh>& mesh, const MeshDims& dims);

}  // namespace dtensor
