// Ranks that are processes: what they save is what others load, and a rank that is killed breaks nothing.
#include <gtest/gtest.h>

#include <random>

#include "tests/checkpoint/store.h"
#include "tests/comm/launch_process.h"

namespace dtensor::testing {
namespace {

Process::Result run(std::int64_t ranks, std::vector<std::string> arguments) {
  std::vector<std::string> command = {LAUNCH_MAIN, "run", "-n", std::to_string(ranks), "--", CHECKPOINT_RANK};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return Process(command, {{"OMP_NUM_THREADS", "1"}}).finish(100);
}

TEST(Processes, SaveOnThreeLoadOnTwo) {
  const Folder folder;
  const auto saved = run(3, {"save", folder.path()});
  ASSERT_EQ(saved.code, 0) << saved.out << saved.err;
  EXPECT_EQ(list_steps(folder.path()), (std::vector<std::int64_t>{0, 1}));
  EXPECT_TRUE(Checkpoint::open(folder.path()).verify().empty());
  const auto loaded = run(2, {"load", folder.path()});
  ASSERT_EQ(loaded.code, 0) << loaded.out << loaded.err;
  EXPECT_NE(loaded.out.find("rank 1 of 2 has its parts"), std::string::npos) << loaded.out;
}

TEST(Processes, SaveUnderMpirunLoadOnThree) {
  if (std::string(MPIRUN).empty()) GTEST_SKIP() << "built without MPI";
  const Folder folder;
  const auto saved = under_mpirun(MPIRUN, 2, {CHECKPOINT_RANK, "save", folder.path()}, 100);
  ASSERT_EQ(saved.code, 0) << saved.out << saved.err;
  const auto again = under_mpirun(MPIRUN, 3, {CHECKPOINT_RANK, "load", folder.path()}, 100);
  ASSERT_EQ(again.code, 0) << again.out << again.err;
  EXPECT_NE(again.out.find("rank 2 of 3 has its parts"), std::string::npos) << again.out;
  const auto loaded = run(3, {"load", folder.path()});
  ASSERT_EQ(loaded.code, 0) << loaded.out << loaded.err;
}

TEST(Processes, ARankIsKilled) {
  const Folder folder;
  std::mt19937 random(3);
  for (int round = 0; round < 4; ++round) {
    const auto result = run(3, {"loop", folder.path(), std::to_string(round % 3), std::to_string(random() % 30'000)});
    EXPECT_NE(result.code, 0);
    EXPECT_FALSE(result.timed_out);
    const std::vector<std::int64_t> steps = list_steps(folder.path());
    ASSERT_FALSE(steps.empty());
    for (const std::int64_t step : steps) {
      EXPECT_TRUE(Checkpoint::open(folder / step_name(step)).verify().empty()) << step;
    }
  }
}

}  // namespace
}  // namespace dtensor::testing
