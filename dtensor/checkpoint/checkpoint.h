#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dtensor/core/mesh.h"

namespace torch::optim {
class Optimizer;
}

namespace dtensor {

// Checkpoints: folders of .safetensors files that any other number of ranks, any mesh and any placements can read, and
// other programs as far as tensors are whole. See docs/checkpoints.md.
//
// Every rank of the world calls these functions, with the same names and options. The world is that of the distributed
// tensors, or of the mesh in the options; a program without either is alone. Tensors that are not distributed are the
// same on all ranks, and are written once. An error on one rank is an error on all of them, with the same text.

// Distributed tensors, of any mesh and placements but Partial, or plain ones.
using NamedTensors = std::map<std::string, at::Tensor>;

struct SaveProgress {
  std::int64_t written = 0;  // bytes, by this rank
  std::int64_t total = 0;    // that it has to write
};

struct SaveOptions {
  // The number of the checkpoint, from which its folder has its name; the one after the last unless said.
  std::optional<std::int64_t> step = {};
  // The program's own words; given back by load_checkpoint.
  std::map<std::string, std::string> metadata = {};
  // Remove all but the last so many, once this one is complete; 0 removes none.
  std::int64_t keep = 0;
  // Whose world saves, where no tensor says it.
  std::optional<DeviceMesh> mesh = {};
  // Where the world is in its random numbers (rank 0's state) is saved too.
  bool random = true;
  // Called now and then by the thread that writes, and at the end.
  std::function<void(const SaveProgress&)> progress = {};
  // How long to wait for a save that is still under way, and (asynchronously) for the other ranks' files.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
};

struct SaveReport {
  std::string path;        // of the checkpoint
  std::int64_t bytes = 0;  // of tensors, written by this rank
  std::int64_t total = 0;  // by all of them
};

// Saves into a folder of its own in `dir`. When it returns, the checkpoint is complete and on the disk; when it throws,
// or the program is killed, the checkpoints before are as they were, and there is no other.
SaveReport save_checkpoint(const std::string& dir, const NamedTensors& tensors, const SaveOptions& options = {});

// A save that goes on while the program does.
class PendingSave {
 public:
  class State;
  explicit PendingSave(std::shared_ptr<State> state) : state_(std::move(state)) {}
  bool done() const;
  // Until the checkpoint is complete (on rank 0: and old ones are removed); throws what went wrong. Every rank may do
  // this when it likes.
  SaveReport wait();

 private:
  std::shared_ptr<State> state_;
};

// Copies the tensors, and returns: they may change then. Files are written, and the checkpoint is completed, behind.
// The next save and the end of the world wait for it.
PendingSave save_checkpoint_async(const std::string& dir, const NamedTensors& tensors, const SaveOptions& options = {});

// Which types may differ between the checkpoint and the tensors.
enum class Convert : std::uint8_t { kNone, kFloats, kAll };

struct LoadOptions {
  // All tensors must be in the checkpoint, and no others; else the report says which were not.
  bool strict = true;
  Convert convert = Convert::kFloats;
  std::optional<DeviceMesh> mesh = {};
  // The world's random numbers go on where they were when this was saved. Unless said: when an optimizer is loaded.
  std::optional<bool> random = {};
};

struct LoadReport {
  std::string path;
  std::optional<std::int64_t> step;
  std::map<std::string, std::string> metadata;
  std::string random;                   // RandomState as text; empty when there is none
  std::vector<std::string> loaded;      // names
  std::vector<std::string> missing;     // asked for, not in the checkpoint; left as they were
  std::vector<std::string> unexpected;  // in the checkpoint, not asked for
  std::vector<std::string> converted;   // from another type
  std::int64_t bytes_needed = 0;        // of this rank's parts, as the files have them
  std::int64_t bytes_read = 0;          // of the blocks that have them, each of which is verified
  std::int64_t files_opened = 0;
};

// Reads into the tensors, in place. `dir` is what save_checkpoint was given (the newest is taken), one checkpoint, a
// folder of safetensors files with their index or a .safetensors file of whole tensors written by others. Each rank
// reads the blocks (of 256 KiB) that have elements of its parts, and no others; nobody ever holds more than its part
// and one block. Every block is compared with its checksum, on any layout; a block that is damaged is an error on all
// ranks, which names the file, the bytes and the tensor. Checkpoints of older versions have no checksums of blocks,
// other programs' files have none at all: they are loaded with one warning. Errors before anything is changed: names
// (if strict), shapes, types; errors while reading leave tensors that are neither.
LoadReport load_checkpoint(const std::string& dir, const NamedTensors& tensors, const LoadOptions& options = {});

// A module's parameters and buffers under their own names; an optimizer's state as optimizer.<parameter>.<what>, its
// numbers and options beside it. SGD, Adam, AdamW, RMSprop and Adagrad. An optimizer that never stepped can be loaded
// into. Loading with an optimizer resumes: step, options, state and random numbers are what they were.
SaveReport save_checkpoint(const std::string& dir, const torch::nn::Module& module, const SaveOptions& options = {});
SaveReport save_checkpoint(const std::string& dir, const torch::nn::Module& module,
                           const torch::optim::Optimizer& optimizer, const SaveOptions& options = {});
PendingSave save_checkpoint_async(const std::string& dir, const torch::nn::Module& module,
                                  const torch::optim::Optimizer& optimizer, const SaveOptions& options = {});
// Without an optimizer, what the checkpoint has of one is not unexpected.
LoadReport load_checkpoint(const std::string& dir, torch::nn::Module& module, const LoadOptions& options = {});
LoadReport load_checkpoint(const std::string& dir, torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                           const LoadOptions& options = {});

}  // namespace dtensor
