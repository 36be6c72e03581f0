#include "dtensor/comm/launch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include "dtensor/comm/launch_impl.h"
#include "tests/comm/errors.h"
#include "tests/comm/launch_process.h"

namespace dtensor::testing {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::set<std::string> line_set(const std::string& text) {
  const auto lines = lines_of(text);
  return {lines.begin(), lines.end()};
}

class Launch : public ::testing::Test {
 protected:
  // `dtensor run OPTIONS… -- sh -c SCRIPT`; all that comes of it carries this test's mark.
  Process start(const Words& options, const std::string& script, Process::Environment environment = {}) {
    Words command = {DTENSOR_LAUNCH_MAIN, "run"};
    command.insert(command.end(), options.begin(), options.end());
    for (const char* word : {"--", "/bin/sh", "-c"}) command.push_back(word);
    command.push_back(script);
    environment["DTENSOR_TEST_MARK"] = mark_;
    return Process(command, environment);
  }
  Process::Result run(const Words& options, const std::string& script, const Process::Environment& environment = {}) {
    const auto result = start(options, script, environment).finish(60);
    EXPECT_FALSE(result.timed_out) << result.out << result.err;
    return result;
  }

  // Processes that still run with this test's mark, after at most a few seconds for them to go.
  int left_behind(double seconds = 5) {
    int count = 0;
    for (int tries = 0; tries <= static_cast<int>(seconds * 20); ++tries) {
      count = 0;
      for (const auto& entry : fs::directory_iterator("/proc")) {
        std::ifstream file(entry.path() / "environ", std::ios::binary);
        std::stringstream text;
        text << file.rdbuf();
        if (text.str().find("DTENSOR_TEST_MARK=" + mark_) != std::string::npos) ++count;
      }
      if (count == 0) return 0;
      usleep(50'000);
    }
    return count;
  }

  void TearDown() override { EXPECT_EQ(left_behind(), 0) << "a process was left behind"; }

  std::string mark_ = std::to_string(getpid()) + "." + ::testing::UnitTest::GetInstance()->current_test_info()->name();
};

TEST_F(Launch, GivesTorchrunsVariables) {
  const auto result =
      run({"-n", "3", "--backend", "gloo", "--master-port", "23456"},
          "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $DTENSOR_BACKEND");
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(line_set(result.out),
            (std::set<std::string>{"[0] 0 3 0 3 127.0.0.1 23456 gloo", "[1] 1 3 1 3 127.0.0.1 23456 gloo",
                                   "[2] 2 3 2 3 127.0.0.1 23456 gloo"}));
  EXPECT_EQ(result.err, "");
}

TEST_F(Launch, FindsOneFreePortForAllRanks) {
  const auto result = run({"-n", "2"}, "echo $MASTER_PORT");
  auto lines = lines_of(result.out);
  ASSERT_EQ(lines.size(), 2U);
  std::sort(lines.begin(), lines.end());
  EXPECT_EQ(lines[0].substr(4), lines[1].substr(4));
  EXPECT_GT(std::stoi(lines[0].substr(4)), 1023);
}

TEST_F(Launch, KeepsTheCallersThreadCountAndSetsItOtherwise) {
  unsetenv("OMP_NUM_THREADS");
  EXPECT_CONTAINS(run({"-n", "1000000"}, "true").err, "out of range");
  EXPECT_EQ(run({"-n", "1"}, "test \"$OMP_NUM_THREADS\" -ge 1").code, 0);
  EXPECT_EQ(run({"-n", "1"}, "echo $OMP_NUM_THREADS", {{"OMP_NUM_THREADS", "7"}}).out, "[0] 7\n");
}

TEST_F(Launch, GivesAllRanksOneSecretPerJob) {
  std::set<std::string> jobs;
  for (int job = 0; job < 2; ++job) {
    const auto lines = lines_of(run({"-n", "3"}, "echo $DTENSOR_SECRET", {{"DTENSOR_SECRET", ""}}).out);
    ASSERT_EQ(lines.size(), 3U);
    for (const std::string& line : lines) {
      EXPECT_EQ(line.size(), 4U + 64U);
      EXPECT_EQ(line.find_first_not_of("0123456789abcdef", 4), std::string::npos);
      jobs.insert(line.substr(4));
    }
  }
  EXPECT_EQ(jobs.size(), 2U);
}

TEST_F(Launch, KeepsTheCallersSecret) {
  const auto result = run({"-n", "2"}, "echo $DTENSOR_SECRET", {{"DTENSOR_SECRET", "one-for-two-launchers"}});
  EXPECT_EQ(line_set(result.out), (std::set<std::string>{"[0] one-for-two-launchers", "[1] one-for-two-launchers"}));
  const auto refused = run({"-n", "2"}, "true", {{"DTENSOR_SECRET", "hunter2"}});
  EXPECT_EQ(refused.code, 2);
  EXPECT_CONTAINS(refused.err, "[dtensor run] DTENSOR_SECRET has the wrong length; got 7 characters");
  EXPECT_EQ(refused.err.find("hunter2"), std::string::npos);
}

TEST_F(Launch, PassesWordsAsTheyAre) {
  Process process(
      {DTENSOR_LAUNCH_MAIN, "run", "-n", "1", "--", "/bin/echo", "-n", "--timeout", "--", "a b", "$x 'y'\""});
  EXPECT_EQ(process.finish().out, "[0] --timeout -- a b $x 'y'\"\n");
}

TEST_F(Launch, GivesRanksAnEmptyInput) { EXPECT_EQ(run({"-n", "1"}, "cat; echo end").out, "[0] end\n"); }

TEST_F(Launch, RunsThirtyTwoRanks) {
  const auto result = run({"-n", "32"}, "echo out; echo err >&2");
  EXPECT_EQ(result.code, 0);
  std::set<std::string> out, err;
  for (int rank = 0; rank < 32; ++rank) {
    out.insert("[" + std::to_string(rank) + "] out");
    err.insert("[" + std::to_string(rank) + "] err");
  }
  EXPECT_EQ(line_set(result.out), out);
  EXPECT_EQ(line_set(result.err), err);
}

TEST_F(Launch, KeepsLinesWhole) {
  // Long lines in many writes, a line in two parts, a last line without its end.
  const auto result = run({"-n", "4"},
                          "for i in 1 2 3; do head -c 200000 /dev/zero | tr '\\0' $RANK; echo; done; "
                          "printf part; sleep 0.2; echo ial; printf end");
  const auto lines = lines_of(result.out);
  ASSERT_EQ(lines.size(), 4U * 5U);
  EXPECT_EQ(result.out.back(), '\n');
  for (int rank = 0; rank < 4; ++rank) {
    const std::string name = std::to_string(rank), prefix = "[" + name + "] ";
    const std::string whole = prefix + std::string(200'000, name[0]);
    EXPECT_EQ(std::count(lines.begin(), lines.end(), whole), 3);
    EXPECT_EQ(std::count(lines.begin(), lines.end(), prefix + "partial"), 1);
    EXPECT_EQ(std::count(lines.begin(), lines.end(), prefix + "end"), 1);
  }
}

TEST_F(Launch, CutsEndlessLines) {
  const auto result = run({"-n", "1"}, "head -c 3000000 /dev/zero | tr '\\0' x");
  const auto lines = lines_of(result.out);
  EXPECT_GE(lines.size(), 2U);
  std::size_t total = 0;
  for (const auto& line : lines) {
    EXPECT_EQ(line.substr(0, 5), "[0] x");
    EXPECT_LT(line.size(), launch_impl::kLongestLine + 70'000);
    total += line.size() - 4;
  }
  EXPECT_EQ(total, 3'000'000U);
}

TEST_F(Launch, ReturnsTheFirstFailuresCode) {
  const auto result = run({"-n", "3"}, "if [ $RANK = 1 ]; then exit 7; fi; sleep 100; exit 9");
  EXPECT_EQ(result.code, 7);
  EXPECT_LT(result.seconds, 20);
  EXPECT_CONTAINS(result.err, "[dtensor run] rank 1 failed with exit code 7; ending the other ranks\n");
}

TEST_F(Launch, WaitsForRanksThatSucceedLater) {
  const auto result = run({"-n", "2"}, "sleep 0.$RANK; echo done");
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(lines_of(result.out).size(), 2U);
}

TEST_F(Launch, SaysWhichSignalEndedARank) {
  const auto result = run({"-n", "3"}, "if [ $RANK = 2 ]; then kill -KILL $$; fi; sleep 100");
  EXPECT_EQ(result.code, 128 + SIGKILL);
  EXPECT_LT(result.seconds, 20);
  EXPECT_CONTAINS(result.err, "[dtensor run] rank 2 was ended by signal 9 (Killed); ending the other ranks\n");
}

TEST_F(Launch, KillsWhoeverHangsAfterAFailure) {
  const auto result = run({"-n", "3", "--grace", "1"},
                          "if [ $RANK = 0 ]; then sleep 0.5; exit 3; fi; trap '' TERM; while :; do sleep 1; done");
  EXPECT_EQ(result.code, 3);
  EXPECT_GT(result.seconds, 1.4);
  EXPECT_LT(result.seconds, 12);
}

TEST_F(Launch, EndsWhatRanksHaveStarted) {
  const auto result = run({"-n", "2"}, "sleep 1000 & sleep 1000 & if [ $RANK = 0 ]; then exit 5; fi; wait");
  EXPECT_EQ(result.code, 5);
  EXPECT_EQ(left_behind(), 0);
  EXPECT_EQ(run({"-n", "2"}, "sleep 1000 & exit 0").code, 0);
}

TEST_F(Launch, LeavesNothingWhenItIsKilled) {
  auto process = start({"-n", "2"}, "sleep 1000 & echo ready $RANK; wait");
  ASSERT_TRUE(process.wait_for("[0] ready") && process.wait_for("[1] ready"));
  process.signal(SIGKILL);
  EXPECT_EQ(left_behind(), 0);
}

TEST_F(Launch, ForwardsSignals) {
  for (const auto& [number, name] : {std::pair{SIGTERM, "TERM"}, {SIGINT, "INT"}, {SIGHUP, "HUP"}}) {
    auto process = start({"-n", "2"}, std::string("trap 'echo got; exit 0' ") + name +
                                          "; echo ready $RANK; while :; do sleep 0.05; done");
    ASSERT_TRUE(process.wait_for("[0] ready") && process.wait_for("[1] ready"));
    process.signal(number);
    const auto result = process.finish(30);
    EXPECT_EQ(result.code, 0) << name << result.err;
    EXPECT_CONTAINS(result.out, "[0] got");
    EXPECT_CONTAINS(result.out, "[1] got");
  }
}

TEST_F(Launch, ForwardsUserSignalsAndGoesOn) {
  auto process = start({"-n", "1", "--grace", "0"},
                       "trap 'echo got' USR1; trap 'echo end; exit 4' USR2; echo ready; "
                       "while :; do sleep 0.05; done");
  ASSERT_TRUE(process.wait_for("ready"));
  process.signal(SIGUSR1);
  ASSERT_TRUE(process.wait_for("got"));
  process.signal(SIGUSR2);
  EXPECT_EQ(process.finish(30).code, 4);
}

TEST_F(Launch, EndsBySignal) {
  auto process = start({"-n", "2"}, "echo ready $RANK; exec sleep 1000");
  ASSERT_TRUE(process.wait_for("[0] ready") && process.wait_for("[1] ready"));
  process.signal(SIGTERM);
  const auto result = process.finish(30);
  EXPECT_EQ(result.code, 128 + SIGTERM);
  EXPECT_CONTAINS(result.err, "was ended by signal 15");
}

TEST_F(Launch, KillsOnTheSecondSignal) {
  auto process =
      start({"-n", "2", "--grace", "300"}, "trap 'echo no' INT; echo ready $RANK; while :; do sleep 0.05; done");
  ASSERT_TRUE(process.wait_for("[0] ready") && process.wait_for("[1] ready"));
  process.signal(SIGINT);
  ASSERT_TRUE(process.wait_for("[0] no"));
  process.signal(SIGINT);
  EXPECT_EQ(process.finish(30).code, 128 + SIGKILL);
}

TEST_F(Launch, EndsRanksThatTakeTooLong) {
  const auto result = run({"-n", "2", "--timeout", "0.5"}, "if [ $RANK = 0 ]; then exit 0; fi; exec sleep 1000");
  EXPECT_EQ(result.code, 124);
  EXPECT_LT(result.seconds, 20);
  EXPECT_CONTAINS(result.err,
                  "[dtensor run] the ranks did not end in time, ending them; got rank 1 running after 500 ms");
}

TEST_F(Launch, EndsWhenNobodyReads) {
  const auto result = Process({"/bin/sh", "-c", std::string(DTENSOR_LAUNCH_MAIN) + " run -n 2 -- yes | head -n 1"},
                              {{"DTENSOR_TEST_MARK", mark_}})
                          .finish(30);
  EXPECT_FALSE(result.timed_out);
  EXPECT_EQ(lines_of(result.out).size(), 1U);
}

TEST_F(Launch, RefusesWhatMakesNoSense) {
  const std::vector<std::pair<Words, std::string>> cases = {
      {{"-n", "0"}, "[dtensor run] the number of ranks is out of range; got -n 0; expected 1 to 65536"},
      {{"-n", "-3"}, "got -n -3"},
      {{}, "the number of ranks is out of range"},
      {{"-n", "2", "--backend", "mpi"},
       "[dtensor run] ranks over mpi are started by mpirun; got --backend mpi; expected "
       "gloo or nccl; try mpirun -n 2 /bin/sh"},
      {{"-n", "2", "--backend", "threads"}, "this backend does not join processes"},
      {{"-n", "2", "--master-port", "65536"}, "the port is out of range; got --master-port 65536"},
      {{"-n", "2", "--master-addr", "a b"}, "this is not an address"},
      {{"-n", "2", "--timeout", "-1"}, "the time is out of range; got --timeout -1"},
      {{"-n", "2", "--grace", "nan"}, "the time is out of range"},
      {{"-n", "2", "--hosts", "a,,b"}, "the list of hosts has an entry that is none; got '' in 'a,,b'"},
      {{"-n", "2", "--hosts", "-oProxyCommand=x"}, "the list of hosts has an entry that is none"},
      {{"-n", "2", "--hosts", "a,a"}, "a host is listed twice; got 'a'"},
      {{"-n", "5", "--hosts", "a:2,b:2"}, "the ranks do not fit the hosts; got -n 5"},
  };
  for (const auto& [options, message] : cases) {
    const auto result = run(options, "echo started");
    EXPECT_EQ(result.code, 2) << message;
    EXPECT_CONTAINS(result.err, message);
    EXPECT_EQ(result.out, "");
  }
  for (const char* program : {"./not-there", "not-there-either", "/tmp"}) {
    Process process({DTENSOR_LAUNCH_MAIN, "run", "-n", "2", "--", program});
    const auto result = process.finish();
    EXPECT_EQ(result.code, 2);
    EXPECT_CONTAINS(result.err, std::string("[dtensor run] the program cannot be run; got '") + program + "'");
  }
  Process nothing({DTENSOR_LAUNCH_MAIN, "run", "-n", "2"});
  EXPECT_CONTAINS(nothing.finish().err, "[dtensor run] there is no program to run");
  Process unknown({DTENSOR_LAUNCH_MAIN, "run", "-n", "2", "--wrong", "--", "true"});
  EXPECT_NE(unknown.finish().code, 0);
}

TEST_F(Launch, RefusesAFileThatIsNoProgram) {
  const fs::path file = fs::temp_directory_path() / ("launch_test." + mark_);
  std::ofstream(file) << "not a program";
  fs::permissions(file, fs::perms::owner_all);
  Process process({DTENSOR_LAUNCH_MAIN, "run", "-n", "2", "--", file.string()});
  const auto result = process.finish();
  EXPECT_EQ(result.code, 2);
  EXPECT_CONTAINS(result.err, "(Exec format error)");
  fs::remove(file);
}

// ---- other hosts

TEST(LaunchHosts, AreRead) {
  EXPECT_EQ(parse_hosts("a"), (std::vector<LaunchHost>{{"a", 0}}));
  EXPECT_EQ(parse_hosts("a,user@b.example:2"), (std::vector<LaunchHost>{{"a", 0}, {"user@b.example", 2}}));
  for (const char* text :
       {"", ",", "a,", ":2", "a:", "a:0", "a:-1", "a:2:3", "a:1234567", "a b", "a;b", "@a", "a@", "-a"}) {
    EXPECT_CONTAINS(error_of([&] { parse_hosts(text); }), "the list of hosts has an entry that is none");
  }
}

TEST(LaunchHosts, ShareTheRanks) {
  const auto spread = [](std::int64_t ranks, const std::string& hosts) {
    return launch_impl::spread_ranks({.command = {"x"}, .ranks = ranks, .hosts = parse_hosts(hosts)});
  };
  using Counts = std::vector<std::int64_t>;
  EXPECT_EQ(spread(4, "a,b:2"), (Counts{2, 2}));
  EXPECT_EQ(spread(5, "a,b"), (Counts{3, 2}));
  EXPECT_EQ(spread(0, "a,b:2"), (Counts{1, 2}));
  EXPECT_EQ(spread(4, "a:3,b:1"), (Counts{3, 1}));
  EXPECT_CONTAINS(error_of([&] { spread(2, "a,b:2"); }), "the ranks do not fit the hosts");
  EXPECT_CONTAINS(error_of([&] { spread(3, "a:1,b:1"); }), "expected -n 2");
}

TEST(LaunchHosts, WordsAreQuotedForTheShell) {
  EXPECT_EQ(launch_impl::shell_quoted("a b"), "'a b'");
  EXPECT_EQ(launch_impl::shell_quoted("it's $x"), "'it'\\''s $x'");
}

// An ssh that runs the command here as sshd does: in a session of its own, which outlives the connection.
class LaunchSsh : public Launch {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("launch_test." + mark_);
    fs::create_directories(folder_);
    std::ofstream(folder_ / "ssh") << "#!/bin/sh\n"
                                      "while [ \"$1\" != -- ]; do shift; done\n"
                                      "[ \"$2\" = unreachable ] && exit 255\n"
                                      "exec setsid --wait env -u RANK HOST=\"$2\" /bin/sh -c \"$3\"\n";
    fs::permissions(folder_ / "ssh", fs::perms::owner_all);
  }
  void TearDown() override {
    Launch::TearDown();
    fs::remove_all(folder_);
  }
  Process::Environment path() const { return {{"PATH", folder_.string() + ":" + std::getenv("PATH")}}; }

  fs::path folder_;
};

TEST_F(LaunchSsh, IsAskedForWhenItIsMissing) {
  const auto result = run({"-n", "2", "--hosts", "localhost,elsewhere"}, "true", {{"PATH", "/nowhere"}});
  EXPECT_EQ(result.code, 2);
  EXPECT_CONTAINS(result.err,
                  "[dtensor run] ranks on other hosts are started through ssh, and there is none in PATH; expected "
                  "OpenSSH's client; try installing openssh-client, or starting each host's ranks there\n");
}

TEST_F(LaunchSsh, RunsRanksOfOtherHosts) {
  auto environment = path();
  environment["DTENSOR_NOTE"] = "it's \"here\"";
  environment["SECRET"] = "local";
  const auto result =
      run({"-n", "4", "--hosts", "near:1,far:3", "--master-port", "2345"},
          "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $HOST \"$DTENSOR_NOTE\"; "
          "echo err >&2; cat",
          environment);
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(
      line_set(result.out),
      (std::set<std::string>{"[0] 0 4 0 1 near 2345 near it's \"here\"", "[1] 1 4 0 3 near 2345 far it's \"here\"",
                             "[2] 2 4 1 3 near 2345 far it's \"here\"", "[3] 3 4 2 3 near 2345 far it's \"here\""}));
  EXPECT_EQ(lines_of(result.err).size(), 4U);
}

// Every rank looks at the command lines of all processes: the launcher's, ssh's, the shells', other ranks'.
TEST_F(LaunchSsh, SendsTheSecretThroughStandardInput) {
  const std::string script =
      "echo $DTENSOR_SECRET; cat; "
      "for f in /proc/[0-9]*/cmdline; do "
      "case \"$(tr '\\0' ' ' < $f 2>/dev/null)\" in *\"$DTENSOR_SECRET\"*) echo seen in $f;; esac; done";
  for (const std::string given : {"", "a-secret-that-the-caller-gave's"}) {
    auto environment = path();
    environment["DTENSOR_SECRET"] = given;
    const auto result = run({"-n", "3", "--hosts", "localhost:1,far:2"}, script, environment);
    EXPECT_EQ(result.code, 0) << result.err;
    std::set<std::string> secrets;
    const auto lines = lines_of(result.out);
    EXPECT_EQ(lines.size(), 3U) << result.out;
    for (const std::string& line : lines) secrets.insert(line.substr(4));
    ASSERT_EQ(secrets.size(), 1U) << result.out;
    if (!given.empty()) {
      EXPECT_EQ(*secrets.begin(), given);
    } else {
      EXPECT_EQ(secrets.begin()->size(), 64U);
    }
  }
}

TEST_F(LaunchSsh, RanksHereAndThere) {
  const auto result =
      run({"--hosts", "localhost:1,far:1", "--master-addr", "10.0.0.1"}, "echo $RANK $MASTER_ADDR $PWD", path());
  const std::string folder = fs::current_path().string();
  EXPECT_EQ(line_set(result.out), (std::set<std::string>{"[0] 0 10.0.0.1 " + folder, "[1] 1 10.0.0.1 " + folder}));
}

TEST_F(LaunchSsh, FailuresComeBack) {
  const auto result = run({"-n", "2", "--hosts", "near,far"}, "if [ $RANK = 1 ]; then exit 9; fi; sleep 1000", path());
  EXPECT_EQ(result.code, 9);
  EXPECT_LT(result.seconds, 20);
  EXPECT_CONTAINS(result.err, "rank 1 on far failed with exit code 9; ending the other ranks");
  EXPECT_EQ(left_behind(), 0);
  const auto signalled = run({"-n", "1", "--hosts", "far"}, "kill -KILL $$", path());
  EXPECT_EQ(signalled.code, 128 + SIGKILL);
}

TEST_F(LaunchSsh, SaysWhenItCannotConnect) {
  const auto result = run({"-n", "1", "--hosts", "unreachable"}, "true", path());
  EXPECT_EQ(result.code, 255);
  EXPECT_CONTAINS(result.err, "which is also what ssh says when it cannot connect");
}

TEST_F(LaunchSsh, SignalsReachRanksOfOtherHosts) {
  auto process = start({"-n", "1", "--hosts", "far"},
                       "trap 'echo got; exit 6' INT; echo ready; while :; do sleep 0.05; done", path());
  ASSERT_TRUE(process.wait_for("ready"));
  process.signal(SIGINT);
  const auto result = process.finish(30);
  EXPECT_EQ(result.code, 6);
  EXPECT_CONTAINS(result.out, "[0] got");
}

TEST_F(LaunchSsh, KillsRanksOfOtherHostsThatHang) {
  const auto result =
      run({"-n", "2", "--hosts", "near,far", "--grace", "1"},
          "if [ $RANK = 0 ]; then sleep 0.5; exit 3; fi; trap '' TERM; sleep 1000 & while :; do sleep 1; done", path());
  EXPECT_EQ(result.code, 3);
  EXPECT_LT(result.seconds, 15);
  EXPECT_EQ(left_behind(), 0);
}

TEST_F(LaunchSsh, LeavesNothingOnOtherHostsWhenItIsKilled) {
  auto process = start({"-n", "1", "--hosts", "far", "--grace", "1"},
                       "trap '' TERM; sleep 1000 & echo ready; while :; do sleep 1; done", path());
  ASSERT_TRUE(process.wait_for("ready"));
  process.signal(SIGKILL);
  EXPECT_EQ(left_behind(15), 0);
}

}  // namespace
}  // namespace dtensor::testing
