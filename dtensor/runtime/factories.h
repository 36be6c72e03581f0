#pragma once

#include "dtensor/runtime/tensor.h"

namespace dtensor {

// New tensors, each rank making its own part alone. A Partial holds the value once: index 0 has it, the others the
// identity. Options: dtype and requires_grad; the device is the mesh's.
DTensor empty(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements,
              const at::TensorOptions& options = {});
DTensor zeros(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements,
              const at::TensorOptions& options = {});
DTensor ones(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements,
             const at::TensorOptions& options = {});
DTensor full(at::IntArrayRef sizes, const at::Scalar& value, const DeviceMesh& mesh, const Placements& placements,
             const at::TensorOptions& options = {});

}  // namespace dtensor
