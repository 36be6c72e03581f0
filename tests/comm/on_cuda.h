#pragma once

#include "dtensor/comm/communicator.h"

namespace dtensor::testing {

// A transport for CUDA tensors seen as one for CPU tensors, so that the contract, which thinks in host memory, can be
// run on it: buffers are copied to the device before each call and back when it is waited for.
TransportPtr on_cuda(TransportPtr transport);

}  // namespace dtensor::testing
