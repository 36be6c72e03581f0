#pragma once

#include <functional>
#include <string>

#include "dtensor/checkpoint/reader.h"

namespace dtensor {

// Checkpoints into other ones, without libtorch and without ever holding more of a tensor than 64 MiB (where its rows
// are not longer than that).
using TensorFilter = std::function<bool(const std::string& name)>;

// Is this tensor state of an optimizer, `optimizer.<parameter>.<what>` with a parameter that is in the checkpoint too?
bool is_optimizer_state(const Checkpoint& checkpoint, const std::string& name);

// What to take over. The numbers of the optimizer (its options, steps) are left out when one of its tensors is, so that
// nobody resumes from the rest.
struct Selection {
  TensorFilter chosen = {};  // all unless given
  bool optimizer = true;     // false: no state of the optimizer, tensors or numbers
};

// All selected tensors, whole, in one .safetensors file that any reader takes; replaces a file that is there in one
// step. Returns the bytes of tensors.
std::int64_t merge_checkpoint(Checkpoint& from, const std::string& file, const Selection& selection = {});

// The selected tensors in the layouts that `place` gives them, as ranks 0 … n-1 of the mesh would have saved them, into
// a folder of checkpoints. Returns the checkpoint's path.
using PlaceStored = std::function<Spec(const std::string& name, const TensorMeta& meta)>;
std::string reshard_checkpoint(Checkpoint& from, const std::string& root, std::int64_t ranks, const PlaceStored& place,
                               const Selection& selection = {});

}  // namespace dtensor
