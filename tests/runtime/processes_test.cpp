// The same training as threads, as processes over Gloo and under mpirun: the same losses everywhere.
#include <gtest/gtest.h>

#include <cmath>
#include <sstream>

#include "dtensor/comm/c10d.h"
#include "tests/comm/launch_process.h"
#include "tests/runtime/process_training.h"

namespace dtensor::testing {
namespace {

std::vector<double> on_threads(std::int64_t ranks) {
  std::vector<double> losses;
  run_ranks(ranks, [&](World& world) {
    const std::vector<double> mine = losses_of(world);
    if (world.rank() == 0) losses = mine;
  });
  return losses;
}

void expect_losses(const std::string& out, std::int64_t ranks, const std::string& backend) {
  const std::vector<double> expected = on_threads(ranks);
  ASSERT_EQ(expected.size(), 5);
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    const std::string start = "rank " + std::to_string(rank) + " on " + backend + ":";
    const std::size_t at = out.find(start);
    ASSERT_NE(at, std::string::npos) << start << " is not in\n" << out;
    std::istringstream line(out.substr(at + start.size(), out.find('\n', at) - at - start.size()));
    for (const double loss : expected) {
      double got = 0;
      line >> got;
      EXPECT_NEAR(got, loss, 1e-12 * std::abs(loss)) << start;
    }
  }
}

TEST(Processes, TrainOverGloo) {
  for (const std::int64_t ranks : {2, 3}) {
    Process process({LAUNCH_MAIN, "run", "-n", std::to_string(ranks), "--", PROCESS_RANK}, {{"OMP_NUM_THREADS", "1"}});
    const auto result = process.finish(100);
    ASSERT_EQ(result.code, 0) << result.out << result.err;
    expect_losses(result.out, ranks, "gloo");
  }
}

TEST(Processes, TrainOverNccl) {
  if (!nccl_was_built() || !at::hasCUDA()) GTEST_SKIP() << "needs a libtorch with CUDA, and a GPU";
  for (const std::int64_t ranks : {1, 2, 4}) {
    Process process({LAUNCH_MAIN, "run", "-n", std::to_string(ranks), "--backend", "nccl", "--", PROCESS_RANK},
                    {{"OMP_NUM_THREADS", "1"}});
    const auto result = process.finish(100);
    ASSERT_EQ(result.code, 0) << result.out << result.err;
    expect_losses(result.out, ranks, "nccl");
  }
}

TEST(Processes, TrainUnderMpirun) {
  if (std::string(MPIRUN).empty()) GTEST_SKIP() << "built without MPI";
  const auto result = under_mpirun(MPIRUN, 4, {PROCESS_RANK}, 100);
  ASSERT_EQ(result.code, 0) << result.out << result.err;
  expect_losses(result.out, 4, "mpi");
}

}  // namespace
}  // namespace dtensor::testing
