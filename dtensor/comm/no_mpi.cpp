#include "dtensor/comm/mpi.h"
#include "dtensor/core/error.h"

namespace dtensor {

bool mpi_was_built() { return false; }

TransportPtr make_mpi_transport(std::chrono::milliseconds) {
  fail_unsupported("mpi", {.what = "this library was built without MPI",
                           .expected = "Open MPI when it is configured",
                           .advice = "installing libopenmpi-dev and building again with -DDTENSOR_MPI=ON, or "
                                     "DTENSOR_BACKEND=gloo with dtensor run or torchrun"});
}

}  // namespace dtensor
