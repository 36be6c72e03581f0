#include "dtensor/comm/mpi.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/comm/errors.h"
#include "tests/comm/launch_process.h"

namespace dtensor::testing {
namespace {

// mpirun -n SIZE mpi_ranks NAME, on however few cores and as whoever runs the tests.
Process::Result run_ranks(int size, const std::string& name, double seconds = 100) {
  const Process::Result result = under_mpirun(DTENSOR_MPIRUN, size, {DTENSOR_MPI_RANKS, name}, seconds);
  EXPECT_FALSE(result.timed_out) << name << "\n" << result.out << result.err;
  return result;
}

// The lines that a rank said.
std::string said_by(int rank, const std::string& text) {
  const std::string start = "rank " + std::to_string(rank) + ": ";
  std::string lines;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    if (text.compare(at, start.size(), start) == 0)
      lines += text.substr(at + start.size(), end - at - start.size()) + "\n";
    at = end + 1;
  }
  return lines;
}

class MpiContract : public ::testing::TestWithParam<int> {};

TEST_P(MpiContract, HoldsWithFingerprints) {
  const auto result = run_ranks(GetParam(), "contract");
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  for (int rank = 0; rank < GetParam(); ++rank) EXPECT_EQ(said_by(rank, result.out), "done\n");
}

TEST_P(MpiContract, HoldsWithoutFingerprints) {
  const auto result = run_ranks(GetParam(), "contract_plain");
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  for (int rank = 0; rank < GetParam(); ++rank) EXPECT_EQ(said_by(rank, result.out), "done\n");
}

INSTANTIATE_TEST_SUITE_P(Ranks, MpiContract, ::testing::Values(1, 2, 3, 4, 7), ::testing::PrintToStringParamName());

TEST(Mpi, WorksWithoutMpirun) {
  Process process({DTENSOR_MPI_RANKS, "contract"}, {{"OMP_NUM_THREADS", "1"}});
  const auto result = process.finish(60);
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  EXPECT_EQ(said_by(0, result.out), "done\n");
}

TEST(Mpi, WasBuilt) { EXPECT_TRUE(mpi_was_built()); }

TEST(Mpi, MovesMoreBytesThanAnIntCounts) {
  const auto result = run_ranks(2, "large");
  EXPECT_EQ(result.code, 0) << result.out << result.err;
}

TEST(Mpi, TakesMoreOperationsThanItHasTags) {
  const auto result = run_ranks(2, "many");
  EXPECT_EQ(result.code, 0) << result.out << result.err;
}

TEST(Mpi, EndsOperationsThatNobodyWaitsFor) {
  const auto result = run_ranks(3, "dropped");
  EXPECT_EQ(result.code, 0) << result.out << result.err;
}

TEST(Mpi, ServesAProgramThatHasMpiItself) {
  const auto result = run_ranks(2, "in_a_program_with_mpi");
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_CONTAINS(said_by(rank, result.out), "sum 2.0");
    EXPECT_CONTAINS(said_by(rank, result.out), "initialised MPI for its main thread alone");
  }
}

TEST(Mpi, NamesTheRankThatIsMissing) {
  const auto result = run_ranks(3, "missing");
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  for (int rank = 0; rank < 2; ++rank) {
    const std::string said = said_by(rank, result.out);
    // The first to give up tells the other, who may not have come to its own timeout yet.
    const bool timed_out = contains(said,
                                    "[all_reduce] timed out after 700 ms in mpi group \"all\" {0,1,2}; got #2 "
                                    "all_reduce(sum, Float, 4 elements) without rank 2; expected the same call");
    EXPECT_TRUE(timed_out || contains(said, "reported: [all_reduce] timed out after 700 ms")) << said;
    EXPECT_CONTAINS(said, "[barrier] mpi group \"all\" {0,1,2} is poisoned; got an earlier failure: ");
  }
  EXPECT_CONTAINS(said_by(2, result.out), "is poisoned; got an earlier failure: rank ");
  EXPECT_CONTAINS(said_by(2, result.out), "timed out after 700 ms");
}

TEST(Mpi, KeepsBuffersAfterATimeout) {
  const auto result = run_ranks(2, "keeps_buffers");
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  EXPECT_CONTAINS(said_by(0, result.out), "[broadcast] timed out after 300 ms");
}

TEST(Mpi, NamesTheRankThatHasNotMadeTheGroup) {
  const auto result = run_ranks(2, "absent");
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  EXPECT_CONTAINS(said_by(0, result.out), "[all_reduce] timed out after 500 ms in mpi group \"all\" {0,1}");
  EXPECT_CONTAINS(said_by(0, result.out), "without rank 1");
}

TEST(Mpi, TellsTheOthersWhyARankFailed) {
  const auto result = run_ranks(3, "fails");
  EXPECT_LT(result.seconds, 60) << "the timeout is five minutes";
  for (const int rank : {0, 2}) {
    EXPECT_CONTAINS(said_by(rank, result.out),
                    "rank 1 left mpi group \"all\" {0,1,2}; got its error: the disk is full");
  }
}

TEST(Mpi, TellsTheOthersThatARankHasFinished) {
  for (const char* name : {"finishes_early", "exits"}) {
    const auto result = run_ranks(2, name);
    EXPECT_CONTAINS(said_by(0, result.out), "rank 1 left mpi group \"all\" {0,1}; got no more calls from it");
  }
}

TEST(Mpi, KeepsWhatARankSentBeforeItLeft) {
  const auto result = run_ranks(3, "leaves_when_done");
  EXPECT_EQ(result.code, 0) << result.out << result.err;
}

TEST(Mpi, KeepsWhatARankSentLongBeforeItIsRead) {
  const auto result = run_ranks(3, "looks_late");
  EXPECT_EQ(result.code, 0) << result.out << result.err;
}

TEST(Mpi, EndsTheJobWhenAPeerHangs) {
  const auto result = run_ranks(2, "hangs", 60);
  EXPECT_NE(result.code, 0);
  EXPECT_CONTAINS(said_by(0, result.out), "[barrier] timed out after 500 ms in mpi group \"all\" {0,1}");
}

TEST(Mpi, EndsWithAKilledRank) {
  const auto result = run_ranks(3, "killed");
  EXPECT_EQ(result.code, 137) << result.out << result.err;
  EXPECT_LT(result.seconds, 60) << "the timeout is five minutes";
  EXPECT_CONTAINS(result.err, "rank 1");
  EXPECT_CONTAINS(result.err, "signal 9");
}

TEST(Mpi, ShowsBothSidesOfADivergence) {
  const auto result = run_ranks(3, "diverges");
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_CONTAINS(
        said_by(rank, result.out),
        "the ranks of mpi group \"all\" {0,1,2} diverged; got rank 0: #2 all_reduce(sum, Float, 4 elements), "
        "rank 2: #2 barrier(); expected the same call on every rank");
    EXPECT_CONTAINS(said_by(rank, result.out), "is poisoned");
  }
}

TEST(Mpi, SeesSizesThatDifferWithoutFingerprints) {
  const auto result = run_ranks(3, "diverges_plainly");
  for (int rank = 0; rank < 3; ++rank) EXPECT_CONTAINS(said_by(rank, result.out), "diverged; got ");
}

TEST(Mpi, TellsRanksItHadNotHeardOf) {
  const auto result = run_ranks(5, "diverges_behind");
  for (int rank = 0; rank < 5; ++rank) EXPECT_CONTAINS(said_by(rank, result.out), "diverged; got ");
}

TEST(Mpi, ChecksMessagesToo) {
  const auto result = run_ranks(2, "other_message");
  EXPECT_CONTAINS(said_by(1, result.out),
                  "diverged; got rank 0: send(Float, 6 elements, tag 5), rank 1: receive(Int, 6 elements, tag 5)");
  EXPECT_CONTAINS(said_by(0, result.out), "[send] the tag is out of range in mpi group \"all\" {0,1}; got 1048576");
}

}  // namespace
}  // namespace dtensor::testing
