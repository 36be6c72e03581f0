#pragma once

#include <ATen/core/Generator.h>
#include <c10/util/Optional.h>

#include "dtensor/core/random_state.h"
#include "dtensor/runtime/tensor.h"

namespace dtensor {

class World;

// Random values belong to the tensor: they depend on the seed, the stream, the number of random calls before and the
// element's index in the whole tensor; not on the mesh, the placements, the number of ranks or the device. The state
// lives in the rank's world. See docs/random.md.

// All streams start again from this seed. Every rank calls it, with the same seed; torch::manual_seed is not looked at.
void manual_seed(World& world, std::uint64_t seed);

RandomState random_state(const World& world);
RandomState random_state(const DeviceMesh& mesh);
void set_random_state(World& world, const RandomState& state);

// While one lives, this rank's random calls draw from a stream of their own: for programs whose ranks do not all make
// the same calls. Stream 0 is the common one, and the only one that ranks are compared by.
class RandomStream {
 public:
  RandomStream(const World& world, std::uint64_t stream);
  RandomStream(const DeviceMesh& mesh, std::uint64_t stream);
  ~RandomStream();
  RandomStream(const RandomStream&) = delete;
  RandomStream& operator=(const RandomStream&) = delete;

 private:
  RandomStream(std::shared_ptr<RankContext> context, std::uint64_t stream);
  std::shared_ptr<RankContext> context_;
  std::uint64_t before_;
};

// While one lives, random calls draw what they drew from this state on; afterwards they go on where they were. For
// computing something again, as activation checkpointing does.
//   const RandomState before = random_state(mesh);  y = block(x);  …  { RandomScope again(mesh, before); y = block(x);
//   }
class RandomScope {
 public:
  RandomScope(const World& world, const RandomState& state);
  RandomScope(const DeviceMesh& mesh, const RandomState& state);
  ~RandomScope();
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;

 private:
  RandomScope(std::shared_ptr<RankContext> context, const RandomState& state);
  std::shared_ptr<RankContext> context_;
  RandomState before_;
};

// New tensors, each rank making its own part alone. Options: dtype and requires_grad. A generator, which must be in the
// same state on all ranks, gives one 64-bit draw for the call. Errors: Partial placements.
using MaybeGenerator = c10::optional<at::Generator>;
DTensor rand(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements,
             const at::TensorOptions& options = {}, const MaybeGenerator& generator = {});
DTensor randn(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements,
              const at::TensorOptions& options = {}, const MaybeGenerator& generator = {});
// low <= value < high; i64 unless the options say otherwise.
DTensor randint(std::int64_t low, std::int64_t high, at::IntArrayRef sizes, const DeviceMesh& mesh,
                const Placements& placements, const at::TensorOptions& options = {},
                const MaybeGenerator& generator = {});
// A permutation of 0 … n-1; i64 unless the options say otherwise.
DTensor randperm(std::int64_t n, const DeviceMesh& mesh, const Placements& placements,
                 const at::TensorOptions& options = {}, const MaybeGenerator& generator = {});

}  // namespace dtensor
