#pragma once

// All that distributing the transformer of model.h takes.
#include <dtensor/dtensor.h>

#include "examples/gpt/model.h"

struct Parallelism {
  bool fsdp = false;               // cut parameters over "dp", else replicate them
  bool sequence_parallel = false;  // cut activations between the tensor-parallel parts over "tp"
  bool loss_parallel = false;      // leave the logits cut over the vocabulary
  dtensor::FullyShardOptions fsdp_options = {};
};

// The mesh's dims are found by name: "tp" tensor parallel, "dp" data parallel, "replica" data parallel around "dp".
inline void distribute_gpt(Gpt& model, const dtensor::DeviceMesh& mesh, const Parallelism& how) {
  using namespace dtensor;
  const auto has = [&](const char* name) {
    return std::find(mesh.names().begin(), mesh.names().end(), name) != mesh.names().end();
  };
  if (has("tp")) {
    // Between the parallel parts activations are whole, or cut along the sequence.
    const Placement between = how.sequence_parallel ? Placement(Shard(1)) : Placement(Replicate());
    const std::int64_t heads = model->blocks->ptr(0)->as<BlockImpl>()->heads;
    ParallelPlan plan = {
        {"tokens", RowwiseParallel({.output = between})},
        {"blocks.*.wq", ColwiseParallel({.blocks = heads})},
        {"blocks.*.wk", ColwiseParallel({.blocks = heads})},
        {"blocks.*.wv", ColwiseParallel({.blocks = heads})},
        {"blocks.*.wo", RowwiseParallel({.output = between, .blocks = heads})},
        {"blocks.*.up", ColwiseParallel()},
        {"blocks.*.down", RowwiseParallel({.output = between})},
        {"head", ColwiseParallel({.output = how.loss_parallel ? Placement(Shard(-1)) : Placement(Replicate())})},
    };
    if (how.sequence_parallel) {
      for (const char* name : {"blocks.*.norm1", "blocks.*.norm2", "norm"}) plan.emplace_back(name, SequenceParallel());
    }
    parallelize_module(model, mesh["tp"], plan);
  }
  if (how.fsdp) {
    for (const auto& block : *model->blocks) fully_shard(*block, mesh["dp"], how.fsdp_options);
    fully_shard(model, mesh["dp"], how.fsdp_options);
  } else {
    distribute_module(model, mesh);
  }
}

// A batch, the same on all ranks, as the model takes it: cut over the data-parallel dims.
inline at::Tensor distribute_batch(const at::Tensor& batch, const dtensor::DeviceMesh& mesh) {
  dtensor::Placements placements;
  for (const std::string& name : mesh.names()) {
    placements.push_back(name == "tp" ? dtensor::Placement(dtensor::Replicate())
                                      : dtensor::Placement(dtensor::Shard(0)));
  }
  return dtensor::distribute_tensor(batch, mesh, placements);
}
