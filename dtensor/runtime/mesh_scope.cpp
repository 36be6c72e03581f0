#include "dtensor/runtime/mesh_scope.h"

#include "dtensor/core/error.h"

namespace dtensor {
namespace {

thread_local const MeshScope* innermost = nullptr;

}  // namespace

MeshScope::MeshScope(const DeviceMesh& mesh) : mesh_(mesh), before_(innermost) { innermost = this; }
MeshScope::~MeshScope() { innermost = before_; }

const DeviceMesh& MeshScope::current(std::string_view where) {
  if (!innermost) {
    fail_invalid(where, {.what = "no mesh is given, and there is no scope that has one",
                         .expected = "a mesh among the arguments, or a MeshScope on this thread",
                         .advice = "const MeshScope scope(mesh)"});
  }
  return innermost->mesh_;
}

DTensor distribute_tensor(const at::Tensor& full, const Placements& placements, const DistributeOptions& options,
                          std::source_location where) {
  return distribute_tensor(full, MeshScope::current("distribute_tensor"), placements, options, where);
}

DTensor from_local(const at::Tensor& local, const Placements& placements, const FromLocalOptions& options) {
  return from_local(local, MeshScope::current("from_local"), placements, options);
}

DTensor empty(at::IntArrayRef sizes, const Placements& placements, const at::TensorOptions& options) {
  return empty(sizes, MeshScope::current("empty"), placements, options);
}

DTensor zeros(at::IntArrayRef sizes, const Placements& placements, const at::TensorOptions& options) {
  return zeros(sizes, MeshScope::current("zeros"), placements, options);
}

DTensor ones(at::IntArrayRef sizes, const Placements& placements, const at::TensorOptions& options) {
  return ones(sizes, MeshScope::current("ones"), placements, options);
}

DTensor full(at::IntArrayRef sizes, const at::Scalar& value, const Placements& placements,
             const at::TensorOptions& options) {
  return full(sizes, value, MeshScope::current("full"), placements, options);
}

void distribute_module(torch::nn::Module& module, const PlaceParameter& place, const DistributeModuleOptions& options) {
  distribute_module(module, MeshScope::current("distribute_module"), place, options);
}

}  // namespace dtensor
