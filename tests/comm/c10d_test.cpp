#include <ATen/Context.h>
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <cstdlib>
#include <filesystem>
#include <regex>

#include "dtensor/comm/c10d.h"
#include "tests/comm/c10d_processes.h"
#include "tests/comm/errors.h"

// Every rank is a process of its own (c10d_rank.cpp); this one never starts a rank itself.
namespace dtensor {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::Ended;
using testing::error_of;
using testing::Processes;

int free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  bind(fd, reinterpret_cast<sockaddr*>(&address), size);
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  close(fd);
  return ntohs(address.sin_port);
}

std::vector<std::string> command(const std::string& scenario, int port, int rank, int size, milliseconds timeout,
                                 const std::vector<std::string>& more, const std::string& host = "127.0.0.1") {
  std::vector<std::string> result = {C10D_RANK,
                                     scenario,
                                     host,
                                     std::to_string(port),
                                     std::to_string(rank),
                                     std::to_string(size),
                                     std::to_string(timeout.count())};
  result.insert(result.end(), more.begin(), more.end());
  return result;
}

std::vector<Ended> run_world(const std::string& scenario, int size, milliseconds timeout,
                             const std::vector<std::string>& more = {}) {
  const int port = free_port();
  Processes processes;
  for (int rank = 0; rank < size; ++rank) processes.start(command(scenario, port, rank, size, timeout, more));
  return processes.finish(seconds(100));
}

void expect_fine(const std::vector<Ended>& ended) {
  for (std::size_t rank = 0; rank < ended.size(); ++rank) {
    EXPECT_EQ(ended[rank].code, 0) << "rank " << rank << " (signal " << ended[rank].signal
                                   << "): " << ended[rank].output;
  }
}

// The rank ended with an error; its text, and how long after the call it came.
struct Failed {
  std::string text;
  long milliseconds = -1;
};
Failed failure_of(const Ended& ended) {
  EXPECT_FALSE(ended.late);
  EXPECT_EQ(ended.code, 3) << ended.output;
  std::smatch match;
  if (!std::regex_search(ended.output, match, std::regex("error after (\\d+) ms: (.*)"))) {
    ADD_FAILURE() << "no error in: " << ended.output;
    return {};
  }
  return {match[2], std::stol(match[1])};
}

class C10dContract : public ::testing::TestWithParam<int> {};
TEST_P(C10dContract, Holds) { expect_fine(run_world("contract", GetParam(), seconds(60))); }
INSTANTIATE_TEST_SUITE_P(Ranks, C10dContract, ::testing::Values(1, 2, 3, 4, 7));

TEST(C10d, GroupsMayBeMadeInAnyOrder) { expect_fine(run_world("orders", 4, seconds(30))); }

TEST(C10d, WhatNobodyWaitedForStillArrives) { expect_fine(run_world("parting", 3, seconds(30))); }

TEST(C10d, MessagesPassACollectiveThatIsUnderWay) { expect_fine(run_world("interleaved", 2, seconds(10))); }

TEST(C10d, ListensOnLoopbackAlone) {
  const auto ended = run_world("listen", 3, seconds(30));
  expect_fine(ended);
  int seen = 0;
  for (const Ended& rank : ended) {
    const std::regex line("listens at ([0-9A-F]+):");
    for (std::sregex_iterator at(rank.output.begin(), rank.output.end(), line), end; at != end; ++at) {
      EXPECT_EQ((*at)[1], "0100007F") << rank.output;  // 127.0.0.1
      ++seen;
    }
  }
  EXPECT_GE(seen, 2);  // rank 0's rendezvous, looked at twice
}

TEST(C10d, NamesTheRankThatWasKilled) {
  for (const int victim : {0, 1, 2}) {
    const auto ended = run_world("killed", 3, seconds(30), {std::to_string(victim)});
    for (int rank = 0; rank < 3; ++rank) {
      const Ended& one = ended[static_cast<std::size_t>(rank)];
      if (rank == victim) {
        EXPECT_EQ(one.signal, SIGKILL);
        continue;
      }
      const Failed failed = failure_of(one);
      EXPECT_CONTAINS(failed.text, "[all_reduce] rank " + std::to_string(victim) + " was lost");
      EXPECT_CONTAINS(failed.text, "gloo group \"world\" {0,1,2}");
      EXPECT_CONTAINS(failed.text, " all_reduce(max, Float, 1048576 elements)");
      EXPECT_LT(failed.milliseconds, 100 + 2000);
    }
  }
}

TEST(C10d, TellsWhyARankLeft) {
  const auto ended = run_world("thrower", 3, seconds(30), {"1"});
  EXPECT_EQ(ended[1].code, 0) << ended[1].output;
  for (const std::size_t rank : {0, 2}) {
    const Failed failed = failure_of(ended[rank]);
    EXPECT_CONTAINS(failed.text, "[all_reduce] rank 1 left after an error: out of cheese");
    EXPECT_LT(failed.milliseconds, 2000);
  }
}

TEST(C10d, ARankThatFinishedEarlyReleasesTheOthers) {
  const auto ended = run_world("leaves", 3, seconds(30), {"2"});
  EXPECT_EQ(ended[2].code, 0) << ended[2].output;
  for (const std::size_t rank : {0, 1}) {
    const Failed failed = failure_of(ended[rank]);
    EXPECT_CONTAINS(failed.text, "rank 2 left: it had finished");
    EXPECT_LT(failed.milliseconds, 2000);
  }
}

TEST(C10d, TimesOutNamesTheMissingAndPoisons) {
  const auto ended = run_world("late", 3, milliseconds(1000));
  EXPECT_EQ(ended[2].code, 0) << ended[2].output;
  for (const std::size_t rank : {0, 1}) {
    EXPECT_CONTAINS(ended[rank].output, "first: [all_reduce] ");
    EXPECT_CONTAINS(ended[rank].output, "no word from rank 2 within 1000 ms");
    EXPECT_CONTAINS(ended[rank].output, "in gloo group \"world\" {0,1,2} during #1 all_reduce(sum, Float, 4 elements)");
    const Failed failed = failure_of(ended[rank]);
    EXPECT_CONTAINS(failed.text, "[barrier] gloo group \"world\" {0,1,2} is poisoned by an earlier failure");
    EXPECT_LT(failed.milliseconds, 2000);
  }
}

TEST(C10d, AMemberThatNeverMakesTheGroup) {
  const auto ended = run_world("no-member", 3, milliseconds(1000));
  EXPECT_EQ(ended[2].code, 0) << ended[2].output;
  for (const std::size_t rank : {0, 1}) {
    const Failed failed = failure_of(ended[rank]);
    EXPECT_CONTAINS(failed.text, "rank 2 never came to make the group {0,1,2}");
    EXPECT_LT(failed.milliseconds, 2000);
  }
}

TEST(C10d, ARankThatNeverComes) {
  const int port = free_port();
  Processes processes;
  // Long enough for the three to start at different times on a busy machine.
  for (const int rank : {0, 1, 3}) processes.start(command("listen", port, rank, 4, milliseconds(4000), {}));
  for (const Ended& one : processes.finish(seconds(30))) {
    const Failed failed = failure_of(one);
    EXPECT_CONTAINS(failed.text, "rank 2 never came to 127.0.0.1:" + std::to_string(port));
    EXPECT_LT(failed.milliseconds, 5000);
  }
}

TEST(C10d, RankZeroNeverComes) {
  const int port = free_port();
  Processes processes;
  processes.start(command("listen", port, 1, 2, milliseconds(500), {}));
  const Failed failed = failure_of(processes.finish(seconds(30))[0]);
  EXPECT_CONTAINS(failed.text, "rank 0 never came: nothing answers at 127.0.0.1:" + std::to_string(port));
  EXPECT_LT(failed.milliseconds, 1500);
}

struct Divergence {
  std::string how;
  std::string most;  // what the others do, as the error shows it
  std::string odd;   // what the last rank does
};
class C10dDiverges : public ::testing::TestWithParam<Divergence> {};
TEST_P(C10dDiverges, ShowsBothSides) {
  const auto ended = run_world("diverges", 3, seconds(30), {GetParam().how});
  for (const Ended& one : ended) {
    const Failed failed = failure_of(one);
    EXPECT_CONTAINS(failed.text, "the ranks of gloo group \"world\" {0,1,2} diverged");
    EXPECT_CONTAINS(failed.text, "rank 0: " + GetParam().most);
    EXPECT_CONTAINS(failed.text, "rank 2: " + GetParam().odd);
    EXPECT_LT(failed.milliseconds, 2000);
  }
}
INSTANTIATE_TEST_SUITE_P(
    Ways, C10dDiverges,
    ::testing::Values(
        Divergence{"operation", "#1 all_reduce(sum, Float, 4 elements)", "#1 barrier()"},
        Divergence{"dtype", "#1 all_reduce(sum, Float, 4 elements)", "#1 all_reduce(sum, Double, 4 elements)"},
        Divergence{"size", "#1 all_reduce(sum, Float, 400000 elements)", "#1 all_reduce(sum, Float, 500000 elements)"},
        Divergence{"order", "#1 all_reduce(sum, Float, 4 elements)", "#1 broadcast(Float, 4 elements, root 0)"},
        Divergence{"message", "receive(Float, 5 elements, tag 0)", "send(Float, 7 elements, tag 0)"}),
    [](const auto& way) { return way.param.how; });

// A launcher's store, as torchrun's: the ranks find each other through it.
TEST(C10d, MeetsThroughTheStoreOfALauncher) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  Processes processes;
  for (int rank = 0; rank < 3; ++rank) {
    processes.start(command("agent:orders", store->getPort(), rank, 3, seconds(30), {}));
  }
  expect_fine(processes.finish(seconds(60)));
}

TEST(C10d, AdoptsGroupsOfTheProgram) {
  std::string folder = (std::filesystem::temp_directory_path() / "dtensor_adopt_XXXXXX").string();
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const auto ended = run_world("adopted", 3, seconds(30), {folder});
  // Not remove_all: beside libtorch 2.11's own copy of it, it crashes.
  for (const auto& entry : std::filesystem::directory_iterator(folder)) std::filesystem::remove(entry);
  std::filesystem::remove(folder);
  expect_fine(ended);
}

// Beyond loopback ranks need a secret.
class WithSecret {
 public:
  WithSecret() { setenv("DTENSOR_SECRET", "0123456789abcdef0123456789abcdef", 1); }
  ~WithSecret() { unsetenv("DTENSOR_SECRET"); }
};

// Two network namespaces, joined by a pair of virtual interfaces: two hosts, as far as sockets can tell.
class TwoHosts {
 public:
  TwoHosts() {
    const std::string id = std::to_string(getpid());
    first_ = "dta" + id;
    second_ = "dtb" + id;
    const std::string a = "va" + id, b = "vb" + id;
    ready_ = ip("netns add " + first_) && ip("netns add " + second_) &&
             ip("link add " + a + " type veth peer name " + b) && ip("link set " + a + " netns " + first_) &&
             ip("link set " + b + " netns " + second_) && ip("-n " + first_ + " addr add 10.77.0.1/24 dev " + a) &&
             ip("-n " + second_ + " addr add 10.77.0.2/24 dev " + b) && ip("-n " + first_ + " link set " + a + " up") &&
             ip("-n " + second_ + " link set " + b + " up") && ip("-n " + first_ + " link set lo up") &&
             ip("-n " + second_ + " link set lo up");
  }
  ~TwoHosts() {
    ip("netns del " + first_);
    ip("netns del " + second_);
  }
  bool ready() const { return ready_; }
  const std::string& of_rank(int rank) const { return rank % 2 == 0 ? first_ : second_; }

 private:
  static bool ip(const std::string& arguments) {
    return std::system(("ip " + arguments + " 2>/dev/null").c_str()) == 0;
  }
  std::string first_, second_;
  bool ready_ = false;
};

TEST(C10d, WorksAcrossTwoHosts) {
  const TwoHosts hosts;
  const WithSecret secret;
  if (!hosts.ready()) GTEST_SKIP() << "network namespaces may not be created here (needs root and iproute2)";
  Processes processes;
  for (int rank = 0; rank < 4; ++rank) {
    std::vector<std::string> line = {"ip", "netns", "exec", hosts.of_rank(rank)};
    for (const auto& word : command("contract", 29500, rank, 4, seconds(60), {}, "10.77.0.1")) line.push_back(word);
    processes.start(line);
  }
  expect_fine(processes.finish(seconds(100)));
}

TEST(C10d, ListensOnTheGivenAddressAlone) {
  const TwoHosts hosts;
  const WithSecret secret;
  if (!hosts.ready()) GTEST_SKIP() << "network namespaces may not be created here (needs root and iproute2)";
  Processes processes;
  for (int rank = 0; rank < 2; ++rank) {
    std::vector<std::string> line = {"ip", "netns", "exec", hosts.of_rank(rank)};
    for (const auto& word : command("listen", 29500, rank, 2, seconds(60), {}, "10.77.0.1")) line.push_back(word);
    processes.start(line);
  }
  const auto ended = processes.finish(seconds(60));
  expect_fine(ended);
  for (std::size_t rank = 0; rank < 2; ++rank) {
    const std::regex line("listens at ([0-9A-F]+):");
    const std::string& output = ended[rank].output;
    for (std::sregex_iterator at(output.begin(), output.end(), line), end; at != end; ++at) {
      EXPECT_EQ((*at)[1], rank == 0 ? "01004D0A" : "02004D0A") << output;  // 10.77.0.1 and 10.77.0.2
    }
  }
  EXPECT_CONTAINS(ended[0].output, "listens at 01004D0A:733C");  // port 29500
}

// The same error on both hosts, at once.
TEST(C10d, NeedsASecretAcrossTwoHosts) {
  const TwoHosts hosts;
  if (!hosts.ready()) GTEST_SKIP() << "network namespaces may not be created here (needs root and iproute2)";
  unsetenv("DTENSOR_SECRET");
  Processes processes;
  for (int rank = 0; rank < 2; ++rank) {
    std::vector<std::string> line = {"ip", "netns", "exec", hosts.of_rank(rank)};
    for (const auto& word : command("orders", 29500, rank, 2, seconds(60), {}, "10.77.0.1")) line.push_back(word);
    processes.start(line);
  }
  for (const Ended& ended : processes.finish(seconds(30))) {
    EXPECT_CONTAINS(failure_of(ended).text,
                    "a job without a secret may only listen on a loopback address; got "
                    "MASTER_ADDR '10.77.0.1' and no DTENSOR_SECRET");
  }
}

TEST(C10d, RefusesWrongArguments) {
  EXPECT_CONTAINS(error_of([] { make_c10d_transport({}, "pigeons"); }), "no backend of c10d; got 'pigeons'");
  EXPECT_CONTAINS(error_of([] { make_c10d_transport({.port = 1, .rank = 2, .size = 2}, "gloo"); }), "rank 2 of 2");
  EXPECT_CONTAINS(error_of([] { make_c10d_transport({.port = 0, .rank = 0, .size = 2}, "gloo"); }), "no port; got 0");
  EXPECT_CONTAINS(error_of([] { make_c10d_transport({.port = 65536, .rank = 0, .size = 2}, "gloo"); }), "got 65536");
  EXPECT_CONTAINS(error_of([] { make_c10d_transport({.timeout = milliseconds(0)}, "gloo"); }), "must be positive");
}

class NcclContract : public ::testing::TestWithParam<int> {};
TEST_P(NcclContract, Holds) {
  if (!nccl_was_built() || !at::hasCUDA()) GTEST_SKIP() << "needs a libtorch with CUDA, and a GPU";
  expect_fine(run_world("nccl", GetParam(), seconds(60)));
}
INSTANTIATE_TEST_SUITE_P(Ranks, NcclContract, ::testing::Values(1, 2, 4));

TEST(C10d, NcclIsThereOrSaysWhyNot) {
  if (nccl_was_built()) GTEST_SKIP() << "this build has NCCL";
  EXPECT_CONTAINS(error_of([] { make_c10d_transport({}, "nccl"); }), "this build has no NCCL");
}

}  // namespace
}  // namespace dtensor
