#pragma once

#include <cstdint>
#include <vector>

#include "dtensor/comm/communicator.h"

namespace dtensor {

// Ranks that are threads of this process: one transport per rank, each to be used by its own thread (or threads).
//
// Buffers are read and written in place, by whoever waits: an operation ends once every member has issued it and any
// one of them waits (or asks whether it is done); there is no other thread. So the order in which ranks wait for what
// they have issued cannot deadlock. A group's collectives take effect in the order of their issue. A send meets its
// receive: it ends when the receiver has the data. Fingerprints are always compared, whatever the options say.
//
// A rank that leaves fails every operation that it has not issued, on the ranks that wait for it; what it has issued
// still ends. Destroying a transport is leaving.
std::vector<TransportPtr> make_thread_transports(std::int64_t size);

}  // namespace dtensor
