#include <gtest/gtest.h>

#include <string>

#include "tests/comm/errors.h"
#include "tests/comm/launch_process.h"

namespace dtensor::testing {
namespace {

// Nothing of how the tests themselves were started.
Process::Environment clean(Process::Environment more = {}) {
  Process::Environment settings = {{"RANK", ""},
                                   {"WORLD_SIZE", ""},
                                   {"MASTER_ADDR", ""},
                                   {"MASTER_PORT", ""},
                                   {"DTENSOR_BACKEND", ""},
                                   {"OMP_NUM_THREADS", "1"},
                                   {"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                                   {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}};
  for (auto& [name, value] : more) settings[name] = value;
  return settings;
}

void expect_fine(const std::vector<std::string>& command, int ranks, const std::string& backend,
                 const Process::Environment& more = {}) {
  Process process(command, clean(more));
  const auto result = process.finish(90);
  EXPECT_FALSE(result.timed_out);
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  for (int rank = 0; rank < ranks; ++rank) {
    EXPECT_CONTAINS(result.out,
                    "rank " + std::to_string(rank) + " of " + std::to_string(ranks) + " on " + backend + " is fine\n");
  }
}

TEST(WorldProcesses, Alone) { expect_fine({WORLD_RANK, "threads"}, 1, "threads"); }

TEST(WorldProcesses, AloneOnGloo) { expect_fine({WORLD_RANK, "gloo"}, 1, "gloo", {{"DTENSOR_BACKEND", "gloo"}}); }

TEST(WorldProcesses, ByTheLauncher) {
  expect_fine({LAUNCH_MAIN, "run", "-n", "3", "--", WORLD_RANK, "gloo"}, 3, "gloo");
}

TEST(WorldProcesses, BadEnvironmentIsAnError) {
  Process process({WORLD_RANK, "gloo"}, clean({{"RANK", "abc"}, {"WORLD_SIZE", "2"}}));
  const auto result = process.finish(60);
  EXPECT_EQ(result.code, 1);
  EXPECT_EQ(result.out,
            "failed: [environment] RANK is not a number; got 'abc'; expected a number from 0 to 16777216\n");
}

// Under mpirun, where there is one.
class WorldMpi : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::string(MPIRUN).empty()) GTEST_SKIP() << "this build has no MPI";
  }
  static std::vector<std::string> mpirun(int ranks, const std::vector<std::string>& command) {
    std::vector<std::string> all = {MPIRUN, "--oversubscribe", "--bind-to", "none", "-n", std::to_string(ranks)};
    all.insert(all.end(), command.begin(), command.end());
    return all;
  }
};

TEST_F(WorldMpi, IsTheDefault) { expect_fine(mpirun(3, {WORLD_RANK, "mpi"}), 3, "mpi"); }

// Rank 0 is in none of the second mesh's groups and still holds their rendezvous.
TEST_F(WorldMpi, MeshDimsMayTalkThroughGloo) { expect_fine(mpirun(3, {WORLD_RANK, "mpi", "gloo"}), 3, "mpi"); }

}  // namespace
}  // namespace dtensor::testing
