#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dtensor/core/mesh.h"
#include "dtensor/core/placement.h"

namespace dtensor {

// How activations come into a module and leave it, on the mesh dim that the module is parallelized over; on the others
// they stay as they are. Negative dims count from the last.
struct StyleOptions {
  std::optional<Placement> input = {};
  std::optional<Placement> output = {};
  // The cut dim consists of so many blocks (attention heads), and is cut between them: what follows may then split it
  // into [blocks, rest] without communication, also where the mesh does not divide the blocks.
  std::int64_t blocks = 1;
};

// What parallelize_module does to one module: how its parameters are cut, and how its activations lie. A value.
struct ParallelStyle {
  enum class Kind : std::uint8_t { kColwise, kRowwise, kSequence, kInput, kOutput };
  Kind kind;
  StyleOptions options;
};

// Linear by columns of the product (weight S(0), bias S(0)), Embedding by columns (weight S(1)). Takes Replicate, gives
// Shard(-1), unless said otherwise.
struct ColwiseParallel : ParallelStyle {
  explicit ColwiseParallel(const StyleOptions& given = {});
};
// Linear by rows (weight S(1), bias whole): takes Shard(-1). Embedding by rows, the vocabulary (weight S(0)): takes
// Replicate. Gives Replicate (an all-reduce); Shard(1) makes it a reduce-scatter over the sequence.
struct RowwiseParallel : ParallelStyle {
  explicit RowwiseParallel(const StyleOptions& given = {});
};
// LayerNorm, RMSNorm, Dropout on activations that are cut along `dim`, the sequence; their parameters stay whole.
struct SequenceParallel : ParallelStyle {
  explicit SequenceParallel(std::int64_t dim = 1);
};
// What comes into the operators with a weight (linear, embedding, layer and RMS norm) of the module and of those in it
// that have no style of their own; what a module with a weight of its own gives.
struct PrepareModuleInput : ParallelStyle {
  explicit PrepareModuleInput(const Placement& layout);
};
struct PrepareModuleOutput : ParallelStyle {
  explicit PrepareModuleOutput(const Placement& layout);
};

// Names of modules as named_modules() gives them, and their styles. `*` stands for any one part between dots; the empty
// name is the module itself. Where several names fit, the last one holds.
using ParallelPlan = std::vector<std::pair<std::string, ParallelStyle>>;

struct ParallelizeOptions {
  // Whose values the module gets, as in DistributeOptions, by the index in the root mesh: the first rank's unless
  // named.
  std::optional<std::int64_t> source = {};
  bool equal_copies = false;
};

// Cuts the parameters of a module in place, as the plan says, over `mesh`: a mesh of one dim, or one dim of a larger
// one (`mesh["tp"]`), whose other dims then replicate them and are free for data parallelism and fully_shard. All other
// parameters and buffers are replicated over the root mesh. The module's code stays as it is.
// All ranks of the root mesh get the values of one of them, as with distribute_module. Parameters that are distributed
// already keep their values.
//
//   parallelize_module(*model, mesh["tp"], {{"layers.*.wq", ColwiseParallel()}, {"layers.*.wo", RowwiseParallel()}});
//
// C++ modules have no hooks: the layouts ride on the weights, and the operators that use these follow them. An input
// that several of them use (wq, wk, wv) is moved once.
// Errors, before anything is changed: a mesh of more dims, a name that fits no module (the nearest ones are listed), a
// style that does not know the module's kind, tensors that share memory with each other or are on another mesh, other
// names, shapes or types on some ranks.
void parallelize_module(torch::nn::Module& module, const DeviceMesh& mesh, const ParallelPlan& plan,
                        const ParallelizeOptions& options = {});

template <class Impl>
void parallelize_module(torch::nn::ModuleHolder<Impl>& module, const DeviceMesh& mesh, const ParallelPlan& plan,
                        const ParallelizeOptions& options = {}) {
  parallelize_module(static_cast<torch::nn::Module&>(*module.ptr()), mesh, plan, options);
}

}  // namespace dtensor
