#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <vector>

#include "dtensor/comm/communicator.h"

namespace c10d {
class ProcessGroup;
class ProcessGroupGloo;
}  // namespace c10d

namespace dtensor {

// A Communicator over a process group that the program already has; it must be able to send and receive CPU tensors
// (Gloo). `ranks` are the members' world ranks in the group's order. While the Communicator lives, the program may use
// the group for collectives of its own, and for messages with tags below 2^30. A failure or a timeout ends the group
// for both. All members adopt it, with the same options.
CommunicatorPtr adopt_group(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::vector<std::int64_t>& ranks,
                            const GroupOptions& options);
// In libtorch 2 this is a backend, not a process group.
CommunicatorPtr adopt_group(const c10::intrusive_ptr<c10d::ProcessGroupGloo>& group,
                            const std::vector<std::int64_t>& ranks, const GroupOptions& options);

}  // namespace dtensor
