#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/any_value.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "dtensor/runtime/tensor.h"

namespace dtensor {

// The placements of a parameter or buffer, by its name in the module ("layers.0.weight") and its value.
using PlaceParameter = std::function<Placements(const std::string& name, const at::Tensor& parameter)>;

struct DistributeModuleOptions {
  // Whose values the module gets, as in DistributeOptions: the first rank's unless named. Values that differ are no
  // mistake here, since every process starts from a seed of its own: no warning is given.
  std::optional<std::int64_t> source = {};
  // The ranks have equal values: nothing but a checksum is sent, and a difference is an error that names the parameter.
  bool equal_copies = false;
  // Gradients are reduced together, by one collective, up to so many bytes; 0: each by itself.
  std::int64_t bucket_bytes = std::int64_t{25} << 20;
};

// Turns every parameter and buffer of the module into a distributed tensor, in place: the module's class, its members
// and an optimizer that was made before see them. Parameters that are registered several times stay one. Without
// `place` all are replicated. Gradients that are already there are distributed alike.
// All ranks of the mesh (of each row of a sub-mesh) get the values of one of them. Checksums are compared first, and
// only tensors that differ are sent, through one buffer of at most 32 MB. Tensors on the meta device become local
// tensors without values, to be drawn (the module's reset_parameters) or loaded: no rank ever holds the full ones, and
// nothing is sent. Tensors on this mesh already keep their values. A buffer that is a view (a mask) becomes a tensor of
// its own; other handles that share its memory outside of the module keep the plain values. Errors, before anything is
// changed: two tensors of the module that share memory with each other; a tensor that is distributed over another mesh;
// other names, shapes or types on some ranks.
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

// Makes the tensor that this handle refers to a distributed one, for all who hold it. What distribute_module does to
// each parameter.
void distribute_in_place(const at::Tensor& tensor, const DeviceMesh& mesh, const Placements& placements,
                         const DistributeOptions& options = {});

}  // namespace dtensor

// torch::nn::Sequential asks its input for its exact type: a DTensor goes in as the at::Tensor that it is.
template <>
struct torch::nn::AnyValue::Holder<dtensor::DTensor> : torch::nn::AnyValue::Holder<at::Tensor> {
  explicit Holder(const dtensor::DTensor& tensor) noexcept
      : torch::nn::AnyValue::Holder<at::Tensor>(static_cast<const at::Tensor&>(tensor)) {}
};
