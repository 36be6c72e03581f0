#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/any_value.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "dtensor/runtime/tensor.h"

namespace dtensor {

// How a parameter or buffer is to lie, by its name in the module ("layers.0.weight") and its value.
using PlaceParameter = std::function<Placements(const std::string& name, const at::Tensor& parameter)>;

struct DistributeModuleOptions {
  // The values that all ranks take are this world rank's; without it every rank's own, which must be equal.
  std::optional<std::int64_t> source = {};
  // Gradients are reduced together, by one collective, up to so many bytes; 0: each by itself.
  std::int64_t bucket_bytes = std::int64_t{25} << 20;
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

// What to do with a tensor on its way into a module, or out of it.
using TensorHook = std::function<at::Tensor(const at::Tensor&)>;

// A module with hooks around its forward, which libtorch's own have not: the input goes through `input`, the result
// through `output`. Its parameters are the module's own, under the name "module".
//
//   distribute_module(net, mesh, place);
//   auto hooked = with_hooks(net, [&](const at::Tensor& x) { return distribute_tensor(x, mesh, {Shard(0)}); },
//                            [](const at::Tensor& y) { return DTensor(y).full_tensor(); });
//   at::Tensor y = hooked->forward(plain);
template <class Impl>
class HookedModule final : public torch::nn::Module {
 public:
  HookedModule(std::shared_ptr<Impl> inner, TensorHook input, TensorHook output)
      : inner_(register_module("module", std::move(inner))), input_(std::move(input)), output_(std::move(output)) {}

  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = inner_->forward(input_ ? input_(x) : x);
    return output_ ? output_(y) : y;
  }

 private:
  const std::shared_ptr<Impl> inner_;
  const TensorHook input_;
  const TensorHook output_;
};

template <class Impl>
std::shared_ptr<HookedModule<Impl>> with_hooks(const torch::nn::ModuleHolder<Impl>& module, TensorHook input,
                                               TensorHook output = {}) {
  return std::make_shared<HookedModule<Impl>>(module.ptr(), std::move(input), std::move(output));
}

// The tensor that this handle, and all who hold it, refer to becomes a distributed one. What distribute_module does to
// each parameter.
void distribute_in_place(const at::Tensor& tensor, const DeviceMesh& mesh, const Placements& placements,
                         const DistributeOptions& options = {});
// An error where this cannot be done: the tensor has views, or shares memory with another. `where` and `name` are for
// the message.
void check_own_memory(std::string_view where, const std::string& name, const at::Tensor& tensor);
// The same with a spec, for a tensor that is given alike on all ranks, or that is distributed over this mesh already.
void distribute_in_place(const at::Tensor& tensor, const DeviceMesh& mesh, const Spec& spec);

}  // namespace dtensor

// torch::nn::Sequential asks its input for its exact type: a DTensor goes in as the at::Tensor that it is.
template <>
struct torch::nn::AnyValue::Holder<dtensor::DTensor> : torch::nn::AnyValue::Holder<at::Tensor> {
  explicit Holder(const dtensor::DTensor& tensor) noexcept
      : torch::nn::AnyValue::Holder<at::Tensor>(static_cast<const at::Tensor&>(tensor)) {}
};
