#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>

#include "dtensor/runtime/tensor.h"

namespace dtensor {

// How a parameter or buffer is to lie, by its name in the module ("layers.0.weight") and its value.
using PlaceParameter = std::function<Placements(const std::string& name, const at::Tensor& parameter)>;

struct DistributeModuleOptions {
  // The values that all ranks take are this world rank's; without it every rank's own, which must be equal.
  std::optional<std::int64_t> source = {};
};

// Turns every parameter and buffer of the module into a distributed tensor, in place: the module's class, its members
// and an optimizer that was made before see them. Parameters that are registered several times stay one. Without
// `place` all are replicated. Gradients that are already there are distributed alike. Tensors on the meta device become
// parts without values, to be drawn (the module's reset_parameters) or loaded: nobody ever holds them whole.
// Errors, before anything is changed: a parameter that has views or shares memory with another tensor, or that is
// distributed over another mesh. Those that are on this mesh already are left alone.
void distribute_module(torch::nn::Module& module, const DeviceMesh& mesh, const PlaceParameter& place = {},
                       const DistributeModuleOptions& options = {});

template <class Impl>
void distribute_module(torch::nn::ModuleHolder<Impl>& module, const DeviceMesh& mesh, const PlaceParameter& place = {},
                       const DistributeModuleOptions& options = {}) {
  distribute_module(static_cast<torch::nn::Module&>(*module.ptr()), mesh, place, options);
}

// The tensor that this handle, and all who hold it, refer to becomes a distributed one. What distribute_module does to
// each parameter.
void distribute_in_place(const at::Tensor& tensor, const DeviceMesh& mesh, const Placements& placements,
                         const DistributeOptions& options = {});

}  // namespace dtensor
