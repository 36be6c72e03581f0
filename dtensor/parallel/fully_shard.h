#pragma once

#include <torch/nn/module.h>

#include <optional>

#include "dtensor/core/mesh.h"

namespace dtensor {

struct FullyShardOptions {
  // Let go of what was gathered for the forward pass, and gather it again for the backward pass. Without it memory is
  // traded for one gather less.
  bool reshard_after_forward = true;
  // Gather the next unit, in the order of the pass before, while this one is used. Where ranks are threads there is
  // nobody who could do it meanwhile.
  bool prefetch = true;
  // What parameters are while they are gathered (bf16, say), and what their gradients are reduced in; the parameters'
  // own type unless said.
  std::optional<c10::ScalarType> param_dtype = {};
  std::optional<c10::ScalarType> reduce_dtype = {};
  // Whose values the plain parameters and buffers get, as in DistributeOptions, by the index in the root mesh: the
  // first rank's unless named.
  std::optional<std::int64_t> source = {};
  bool equal_copies = false;
};

// Cuts each of the module's parameters, gradients and so the optimizer's states into one part per rank of the mesh dim,
// along dim 0 (ZeRO-3, FSDP), in place. The parameters of one call form a unit: they are gathered by one collective
// when the first of them is used, forward and backward, and let go when another unit is used; their gradients are
// reduce-scattered together. Those that are in a unit already are left to it, so inner modules come first:
//
//   for (auto& block : *model->blocks) fully_shard(*block, mesh["dp"]);
//   fully_shard(*model, mesh["dp"]);
//   optimizer = AdamW(model->parameters());        // steps the parts
//   loss(model->forward(distribute_tensor(x, mesh, {Shard(0), …}))).backward();
//
// Composes with parallelize_module over another dim of the same mesh, done before; dims that replicate the parameters
// and cut the batch make it HSDP. `.grad()` and the parameters show their parts outside of forward and backward passes,
// and in forward passes without gradients (NoGradGuard, InferenceMode). After a forward pass that no backward pass
// follows, the last unit stays gathered until the next pass; where that pass had gradients, its parameters keep
// `param_dtype` until then. Inputs of Linear, convolutions and norms are cast to `param_dtype`.
// All ranks of the root mesh get the values of one of them, as with distribute_module; parameters that are distributed
// already keep theirs, and tensors on the meta device stay without values.
// Errors, before anything is changed: a mesh of more dims, parameters on another mesh, 0-d parameters, tensors that
// share memory with each other, other names, shapes or types on some ranks.
void fully_shard(torch::nn::Module& module, const DeviceMesh& mesh, const FullyShardOptions& options = {});

template <class Impl>
void fully_shard(torch::nn::ModuleHolder<Impl>& module, const DeviceMesh& mesh, const FullyShardOptions& options = {}) {
  fully_shard(static_cast<torch::nn::Module&>(*module.ptr()), mesh, options);
}

// Bytes of parameters that are gathered on this rank now, in all units; the largest sum so far.
struct GatheredBytes {
  std::int64_t now = 0;
  std::int64_t peak = 0;
};
GatheredBytes gathered_bytes(const DeviceMesh& mesh);

}  // namespace dtensor
