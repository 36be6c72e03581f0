#pragma once

#include <chrono>

#include "dtensor/comm/communicator.h"

namespace dtensor {

// Was this library built with MPI?
bool mpi_was_built();

// This process's way to its peers under mpirun (or alone, without it). Initialises MPI unless the program did, and then
// finalises it when the process exits. All ranks of MPI_COMM_WORLD must call it; `timeout` is how long it waits for
// them, and how long leave() waits for operations under way. Later calls give the same transport's groups.
//
// Operations move on while some thread of the process waits for one of them or asks whether it is done: MPI has no
// thread of its own for that. They are made of MPI's non-blocking sends and receives, so that ranks which are missing
// can be named, sizes above 2^31 work, and groups need nobody but their members.
// When the library was built without MPI, this throws Error(kNotSupported).
TransportPtr make_mpi_transport(std::chrono::milliseconds timeout);

}  // namespace dtensor
