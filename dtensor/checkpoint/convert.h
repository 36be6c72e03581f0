#pragma once

#include <functional>
#include <string>

#include "dtensor/checkpoint/reader.h"

namespace dtensor {

// Checkpoints into other ones, without libtorch and without ever holding more of a tensor than 64 MiB (where its rows
// are not longer than that).
using TensorFilter = std::function<bool(const std::string& name)>;

// All chosen tensors, whole, in one .safetensors file that any reader takes; replaces a file that is there in one step.
// Returns the bytes of tensors.
std::int64_t merge_checkpoint(Checkpoint& from, const std::string& file, const TensorFilter& chosen = {});

// The chosen tensors in the layouts that `place` gives them, as ranks 0 … n-1 of the mesh would have saved them, into a
// folder of checkpoints. Returns the checkpoint's path.
using PlaceStored = std::function<Spec(const std::string& name, const TensorMeta& meta)>;
std::string reshard_checkpoint(Checkpoint& from, const std::string& root, std::int64_t ranks, const PlaceStored& place,
                               const TensorFilter& chosen = {});

}  // namespace dtensor
