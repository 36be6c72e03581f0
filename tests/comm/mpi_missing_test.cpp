#include <gtest/gtest.h>

#include "dtensor/comm/mpi.h"
#include "tests/comm/errors.h"

namespace dtensor::testing {
namespace {

// Built with no_mpi.cpp itself, so that it is tested where there is an MPI as well.
TEST(NoMpi, SaysThatItWasNotBuilt) {
  EXPECT_FALSE(mpi_was_built());
  EXPECT_EQ(error_of([] { make_mpi_transport(std::chrono::seconds(1)); }),
            "[mpi] this library was built without MPI; expected Open MPI when it is configured; try installing "
            "libopenmpi-dev and building again with -DDTENSOR_MPI=ON, or DTENSOR_BACKEND=gloo with dtensor run or "
            "torchrun");
  try {
    make_mpi_transport(std::chrono::seconds(1));
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kNotSupported);
  }
}

}  // namespace
}  // namespace dtensor::testing
