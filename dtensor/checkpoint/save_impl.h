#pragma once

#include <map>
#include <string>

#include "dtensor/checkpoint/checkpoint.h"
#include "dtensor/checkpoint/reader.h"

namespace dtensor {

struct Party;

// save_checkpoint and load_checkpoint, with numbers beside the tensors.
SaveReport save_tensors(const std::string& dir, const NamedTensors& tensors, const SaveOptions& options,
                        const std::map<std::string, std::string>& state);
PendingSave save_tensors_async(const std::string& dir, const NamedTensors& tensors, const SaveOptions& options,
                               const std::map<std::string, std::string>& state);

// The checkpoint that all ranks read.
Checkpoint open_together(const std::string& dir, const Party& party);
// `ignored` says of which names it does not matter that nobody asked for them.
LoadReport load_tensors(Checkpoint& checkpoint, const Party& party, const NamedTensors& tensors,
                        const LoadOptions& options, const std::function<bool(const std::string&)>& ignored = {});

}  // namespace dtensor
