// `dtensor train` as a user starts it: ranks of every kind give the losses of plain libtorch.
#include <gtest/gtest.h>

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <map>

#include "tests/comm/launch_process.h"

namespace dtensor::testing {
namespace {

Process::Result train(std::vector<std::string> words) {
  words.insert(words.begin(), {TRAIN_TOOL, "train", "--quiet"});
  Process process(words, {{"OMPI_MCA_btl_base_warn_component_unused", "0"}, {"OMP_NUM_THREADS", "1"}});
  return process.finish(240);
}

// Three heads, and as many letters as the text has: neither can be divided by two.
std::vector<std::string> small(std::vector<std::string> words) {
  words.insert(words.end(), {"--data", TRAIN_TEXT, "--steps", "50", "--batch", "5", "--context", "12", "--width", "24",
                             "--heads", "3", "--layers", "2", "--dtype", "f64", "--compare"});
  return words;
}

void expect_same_losses(const std::vector<std::string>& words) {
  const auto result = train(small(words));
  ASSERT_EQ(result.code, 0) << result.out << result.err;
  const std::string start = "losses over 50 steps: ";
  const std::size_t at = result.out.find(start);
  ASSERT_NE(at, std::string::npos) << result.out;
  EXPECT_LT(std::strtod(result.out.c_str() + at + start.size(), nullptr), 1e-10) << result.out;
}

TEST(Train, Threads) {
  expect_same_losses({"--mesh", "dp=2,tp=2"});
  expect_same_losses({"--mesh", "replica=2,dp=2,tp=2", "--fsdp", "--sequence-parallel", "--loss-parallel"});
}

TEST(Train, ProcessesOverGloo) {
  expect_same_losses({"--mesh", "dp=3", "--fsdp", "--ranks", "processes"});
  expect_same_losses({"--mesh", "dp=2,tp=2", "--fsdp", "--sequence-parallel", "--ranks", "processes"});
  expect_same_losses({"--mesh", "dp=2,tp=2", "--ranks", "processes"});
}

TEST(Train, UnderMpirun) {
  if (std::string(MPIRUN).empty()) GTEST_SKIP() << "built without MPI";
  expect_same_losses({"--mesh", "dp=2,tp=2", "--fsdp", "--sequence-parallel", "--loss-parallel", "--ranks", "mpi"});
  expect_same_losses({"--mesh", "dp=2", "--ranks", "mpi"});
}

TEST(Train, WritesTheLosses) {
  const std::string csv = ::testing::TempDir() + "/losses.csv", svg = ::testing::TempDir() + "/losses.svg";
  const auto result = train({"--data", TRAIN_TEXT, "--steps", "3", "--width", "8", "--heads", "2", "--layers", "1",
                             "--mesh", "dp=2", "--csv", csv, "--svg", svg});
  ASSERT_EQ(result.code, 0) << result.err;
  std::ifstream file(csv);
  std::string line;
  std::getline(file, line);
  EXPECT_EQ(line, "step,2(dp) threads");
  int lines = 0;
  while (std::getline(file, line)) ++lines;
  EXPECT_EQ(lines, 3);
  std::ifstream picture(svg);
  std::getline(picture, line);
  EXPECT_EQ(line.rfind("<svg ", 0), 0) << line;
}

// step -> loss, as it was written.
std::map<int, std::string> losses_in(const std::string& csv) {
  std::map<int, std::string> losses;
  std::ifstream file(csv);
  std::string line;
  std::getline(file, line);
  while (std::getline(file, line)) {
    const std::size_t comma = line.find(',');
    losses[std::atoi(line.c_str())] = line.substr(comma + 1);
  }
  return losses;
}

TEST(Train, ResumesToTheBit) {
  const std::string folder = ::testing::TempDir() + "/train_resume_" + std::to_string(getpid());
  const auto run = [&](const std::string& mesh, const std::string& name, std::vector<std::string> more) {
    const std::string csv = folder + "." + name + ".csv";
    std::vector<std::string> words = {"--data",    TRAIN_TEXT, "--batch", "5",        "--context", "12",      "--width",
                                      "24",        "--heads",  "3",       "--layers", "1",         "--dtype", "f64",
                                      "--dropout", "0.1",      "--csv",   csv,        "--mesh",    mesh};
    words.insert(words.end(), more.begin(), more.end());
    const auto result = train(words);
    EXPECT_EQ(result.code, 0) << result.out << result.err;
    return losses_in(csv);
  };
  const auto whole = run("dp=2,tp=2", "whole", {"--steps", "12", "--fsdp"});
  const auto first = run("dp=2,tp=2", "first", {"--steps", "7", "--fsdp", "--save", folder});
  const auto rest = run("dp=2,tp=2", "rest", {"--steps", "12", "--fsdp", "--resume", folder});
  const auto other = run("tp=3", "other", {"--steps", "12", "--resume", folder});
  ASSERT_EQ(whole.size(), 12u);
  ASSERT_EQ(rest.size(), 5u);
  ASSERT_EQ(other.size(), 5u);
  for (int step = 0; step < 12; ++step) {
    EXPECT_EQ(step < 7 ? first.at(step) : rest.at(step), whole.at(step)) << "step " << step;
    if (step < 7) continue;
    const double expected = std::strtod(whole.at(step).c_str(), nullptr);
    EXPECT_NEAR(std::strtod(other.at(step).c_str(), nullptr), expected, 1e-10 * expected) << "step " << step;
  }
}

TEST(Train, SaysWhatIsWrong) {
  const auto error = [](std::vector<std::string> words) {
    const auto result = train(std::move(words));
    EXPECT_EQ(result.code, 2) << result.out;
    return result.err;
  };
  EXPECT_EQ(error({"--data", "/nowhere.txt"}),
            "dtensor: [dtensor train] the text cannot be read; got \"/nowhere.txt\"; try --data file.txt\n");
  EXPECT_EQ(error({"--data", TRAIN_TEXT, "--mesh", "rows=2"}),
            "dtensor: [dtensor train] a mesh dim without a meaning; got rows; expected dp, tp or replica\n");
  EXPECT_EQ(error({"--data", TRAIN_TEXT, "--mesh", "tp=2", "--fsdp"}),
            "dtensor: [dtensor train] --fsdp without a mesh dim to shard over; got tp=2; expected one named dp\n");
  EXPECT_EQ(error({"--data", TRAIN_TEXT, "--heads", "5"}),
            "dtensor: [dtensor train] heads that do not divide the width; got 5 of 64; expected a divisor\n");
  EXPECT_NE(error({"--data", TRAIN_TEXT, "--dtype", "f8"}).find("f8"), std::string::npos);
}

}  // namespace
}  // namespace dtensor::testing
