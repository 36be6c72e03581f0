#pragma once

#include "dtensor/runtime/factories.h"
#include "dtensor/runtime/module.h"
#include "dtensor/runtime/tensor.h"

namespace dtensor {

// While it lives, calls on this thread that leave out the mesh mean this one. The inner of two scopes counts.
//
//   const MeshScope scope(mesh);
//   DTensor x = zeros({8, 4}, {Shard(0)});
class MeshScope {
 public:
  explicit MeshScope(const DeviceMesh& mesh);
  ~MeshScope();
  MeshScope(const MeshScope&) = delete;
  MeshScope& operator=(const MeshScope&) = delete;

  // The mesh of the innermost scope; an error where there is none, which names the call.
  static const DeviceMesh& current(std::string_view where);

 private:
  const DeviceMesh mesh_;
  const MeshScope* const before_;
};

DTensor distribute_tensor(const at::Tensor& full, const Placements& placements, const DistributeOptions& options = {},
                          std::source_location where = std::source_location::current());
DTensor from_local(const at::Tensor& local, const Placements& placements, const FromLocalOptions& options = {});
DTensor empty(at::IntArrayRef sizes, const Placements& placements, const at::TensorOptions& options = {});
DTensor zeros(at::IntArrayRef sizes, const Placements& placements, const at::TensorOptions& options = {});
DTensor ones(at::IntArrayRef sizes, const Placements& placements, const at::TensorOptions& options = {});
DTensor full(at::IntArrayRef sizes, const at::Scalar& value, const Placements& placements,
             const at::TensorOptions& options = {});
void distribute_module(torch::nn::Module& module, const PlaceParameter& place,
                       const DistributeModuleOptions& options = {});

}  // namespace dtensor
