#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "dtensor/runtime/tensor.h"

namespace dtensor {

struct LocalMapOptions {
  // How the operands must lie, one entry each; they are redistributed where they lie otherwise. Empty: as they lie.
  std::vector<Placements> in = {};
  // How the gradients of the local operands lie; Partial where every rank adds its own to a replica. Empty: as the
  // operands (Replicate where they are Partial).
  std::vector<Placements> in_gradients = {};
  // The global shape of the result, where its shards are uneven.
  std::optional<Dims> shape = {};
};

// Runs a function of plain tensors on this rank's parts, and says how its results together are one tensor: a way out
// for what no rule can say. Differentiable. An error on ranks outside the mesh.
//   const DTensor y = local_map([](const auto& x) { return my_kernel(x[0], x[1]); }, {a, b}, {Shard(0)});
using LocalFunction = std::function<at::Tensor(const std::vector<at::Tensor>& locals)>;
DTensor local_map(const LocalFunction& function, const std::vector<DTensor>& operands, const Placements& out,
                  const LocalMapOptions& options = {});

}  // namespace dtensor
