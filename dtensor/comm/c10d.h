#pragma once

#include <string>

#include "dtensor/comm/communicator.h"
#include "dtensor/comm/rendezvous.h"

namespace dtensor {

// Processes that meet at a rendezvous and talk through libtorch's c10d. Returns when all ranks have come; else, within
// the timeout, the error names those missing. `backend` is "gloo" (CPU tensors) or "nccl" (CUDA tensors, where libtorch
// has it). Sockets are bound to the address by which this host reaches rank 0: with 127.0.0.1 nothing is reachable
// from outside. Beyond loopback addresses there must be a secret (Rendezvous::secret), or the caller's word that there
// need not be one.
//
// Rank 0 holds the rendezvous: its transport, when destroyed, first waits for the others to leave.
TransportPtr make_c10d_transport(const Rendezvous& rendezvous, const std::string& backend);

// Does this build have NCCL?
bool nccl_was_built();

}  // namespace dtensor
