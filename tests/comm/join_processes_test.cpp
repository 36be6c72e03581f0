// Worlds of real processes: who may join them, under which launcher, and which rank a failure is blamed on.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/stat.h>

#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "dtensor/comm/rendezvous_impl.h"
#include "tests/comm/errors.h"
#include "tests/comm/launch_process.h"

namespace dtensor::testing {
namespace {

using Settings = Process::Environment;

const std::string kSecret = "0f1e2d3c4b5a69788796a5b4c3d2e1f0";

// Nothing of how the tests themselves were started.
Settings with(Settings more) {
  Settings settings = {{"RANK", ""},
                       {"WORLD_SIZE", ""},
                       {"MASTER_ADDR", ""},
                       {"MASTER_PORT", ""},
                       {"DTENSOR_BACKEND", ""},
                       {"DTENSOR_SECRET", ""},
                       {"DTENSOR_ALLOW_NO_SECRET", ""},
                       {"TORCHELASTIC_RUN_ID", ""},
                       {"OMP_NUM_THREADS", "1"},
                       {"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                       {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}};
  for (auto& [name, value] : more) settings[name] = value;
  return settings;
}

// Two ranks of world_rank on Gloo, started by hand with these settings each.
std::vector<Process::Result> two_ranks(const Settings& zero, const Settings& one) {
  const int port = rendezvous::listen_on("127.0.0.1", 0).port;
  std::vector<std::unique_ptr<Process>> ranks;
  for (const int rank : {0, 1}) {
    Settings settings =
        with({{"RANK", std::to_string(rank)}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", std::to_string(port)}});
    for (const auto& [name, value] : rank == 0 ? zero : one) settings[name] = value;
    ranks.push_back(std::make_unique<Process>(std::vector<std::string>{WORLD_RANK, "gloo"}, settings));
  }
  // Where rank 1 is refused, rank 0 would wait for it until its timeout.
  std::vector<Process::Result> results(2);
  results[1] = ranks[1]->finish(60);
  results[0] = ranks[0]->finish(results[1].code == 0 ? 60 : 1);
  return results;
}

void expect_fine(const std::vector<Process::Result>& results) {
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    EXPECT_EQ(results[rank].code, 0) << results[rank].out << results[rank].err;
    EXPECT_CONTAINS(results[rank].out, "rank " + std::to_string(rank) + " of 2 on gloo is fine");
    EXPECT_EQ(results[rank].err.find(kSecret), std::string::npos);
  }
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

// An IPv4 address of this machine that others could reach; empty when there is none.
std::string address_of_this_machine() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return {};
  std::string found;
  for (const ifaddrs* at = list; at != nullptr; at = at->ifa_next) {
    if (at->ifa_addr == nullptr || at->ifa_addr->sa_family != AF_INET) continue;
    if ((at->ifa_flags & IFF_LOOPBACK) != 0 || (at->ifa_flags & IFF_UP) == 0) continue;
    char text[INET_ADDRSTRLEN];
    const auto* address = reinterpret_cast<const sockaddr_in*>(at->ifa_addr);
    if (inet_ntop(AF_INET, &address->sin_addr, text, sizeof text) != nullptr) found = text;
  }
  freeifaddrs(list);
  return found;
}

TEST(JoinProcesses, ByHandWithOneSecret) {
  expect_fine(two_ranks({{"DTENSOR_SECRET", kSecret}}, {{"DTENSOR_SECRET", kSecret}}));
}

TEST(JoinProcesses, ByHandWithTwoSecrets) {
  const auto results = two_ranks({{"DTENSOR_SECRET", kSecret}}, {{"DTENSOR_SECRET", kSecret + "0"}});
  EXPECT_EQ(results[1].code, 1);
  EXPECT_EQ(
      results[1].out,
      "failed: [rendezvous] rank 1 does not know the secret of this job: DTENSOR_SECRET is not the one of rank 0\n");
}

TEST(JoinProcesses, ByHandOneWithoutTheSecret) {
  const auto results = two_ranks({{"DTENSOR_SECRET", kSecret}}, {});
  EXPECT_EQ(results[1].code, 1);
  EXPECT_CONTAINS(results[1].out, "asks for the secret of its job, and this rank has none");
}

TEST(JoinProcesses, ShortSecretsAreRefused) {
  const auto results = two_ranks({{"DTENSOR_SECRET", "hunter2"}}, {{"DTENSOR_SECRET", "hunter2"}});
  for (const auto& result : results) {
    EXPECT_CONTAINS(result.out, "failed: [environment] DTENSOR_SECRET has the wrong length; got 7 characters");
    EXPECT_EQ((result.out + result.err).find("hunter2"), std::string::npos);
  }
}

// A rank 0 that others could reach, without a secret: refused by hand, unless the user asks for it.
TEST(JoinProcesses, BeyondLoopbackWithoutASecret) {
  const std::string address = address_of_this_machine();
  if (address.empty()) GTEST_SKIP() << "this machine has no address but loopback";
  const Settings remote = {{"MASTER_ADDR", address}};
  for (const auto& result : two_ranks(remote, remote)) {
    EXPECT_EQ(result.code, 1) << result.err;
    EXPECT_CONTAINS(result.out,
                    "failed: [rendezvous] a job without a secret may only listen on a loopback address; got "
                    "MASTER_ADDR '" +
                        address + "' and no DTENSOR_SECRET");
  }
  Settings asked = remote;
  asked["DTENSOR_ALLOW_NO_SECRET"] = "1";
  for (const auto& result : two_ranks(asked, asked)) {
    EXPECT_EQ(result.code, 0) << result.out << result.err;
    EXPECT_EQ(count(result.err, "secret"), 0u) << "who asks for it is not warned";
  }
  Settings secret = remote;
  secret["DTENSOR_SECRET"] = kSecret;
  for (const auto& result : two_ranks(secret, secret)) {
    EXPECT_EQ(result.code, 0) << result.out << result.err;
    EXPECT_EQ(count(result.err, "secret"), 0u);
  }
}

// torchrun and srun give an address by themselves: that works, with one warning for the whole job.
TEST(JoinProcesses, TorchrunAndSrunWarnOnce) {
  const std::string address = address_of_this_machine();
  if (address.empty()) GTEST_SKIP() << "this machine has no address but loopback";
  const auto slurm = [&](const char* rank) {
    return Settings{{"RANK", ""},
                    {"WORLD_SIZE", ""},
                    {"SLURM_PROCID", rank},
                    {"SLURM_STEP_NUM_TASKS", "2"},
                    {"SLURM_LOCALID", rank},
                    {"MASTER_ADDR", address}};
  };
  const Settings torchrun = {{"TORCHELASTIC_RUN_ID", "none"}, {"MASTER_ADDR", address}};
  for (const auto& results : {two_ranks(torchrun, torchrun), two_ranks(slurm("0"), slurm("1"))}) {
    expect_fine(results);
    EXPECT_EQ(count(results[0].err, "this job has no secret, so anyone who can reach " + address + " may join it"), 1u)
        << results[0].err;
    EXPECT_EQ(count(results[1].err, "secret"), 0u) << results[1].err;
  }
  const Settings here = {{"TORCHELASTIC_RUN_ID", "none"}, {"MASTER_ADDR", "localhost"}};
  for (const auto& result : two_ranks(here, here)) EXPECT_EQ(count(result.err, "secret"), 0u) << result.err;
  Settings with_secret = torchrun;
  with_secret["DTENSOR_SECRET"] = kSecret;
  for (const auto& result : two_ranks(with_secret, with_secret)) EXPECT_EQ(count(result.err, "secret"), 0u);
}

// ---- mpi

class JoinMpi : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::string(MPIRUN).empty()) GTEST_SKIP() << "this build has no MPI";
  }
};

TEST_F(JoinMpi, OutsideMpirunIsAnError) {
  const auto alone = Process({WORLD_RANK, "mpi"}, with({{"DTENSOR_BACKEND", "mpi"}})).finish(60);
  EXPECT_EQ(alone.code, 1);
  EXPECT_EQ(alone.out,
            "failed: [World] the backend mpi joins processes that mpirun started; got a process that was started "
            "without it; expected mpirun, also for one rank; try mpirun -n 1 program, or another backend "
            "(DTENSOR_BACKEND)\n");
  const auto launched =
      Process({LAUNCH_MAIN, "run", "-n", "2", "--", WORLD_RANK, "mpi"}, with({{"DTENSOR_BACKEND", "mpi"}})).finish(60);
  EXPECT_EQ(launched.code, 1);
  EXPECT_CONTAINS(launched.out, " of 2, started by something else");
  EXPECT_CONTAINS(launched.out, "try mpirun -n 2 program");
  const auto slurm = Process({WORLD_RANK, "mpi"}, with({{"DTENSOR_BACKEND", "mpi"},
                                                        {"SLURM_PROCID", "1"},
                                                        {"SLURM_STEP_NUM_TASKS", "4"},
                                                        {"SLURM_LOCALID", "1"}}))
                         .finish(60);
  EXPECT_EQ(slurm.code, 1);
  EXPECT_CONTAINS(slurm.out, "got rank 1 of 4, started by something else");
}

TEST_F(JoinMpi, OneRankUnderMpirunIsAWorld) {
  const auto result = Process({MPIRUN, "--oversubscribe", "--bind-to", "none", "-n", "1", WORLD_RANK, "mpi"},
                              with({{"DTENSOR_BACKEND", "mpi"}}))
                          .finish(60);
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  EXPECT_CONTAINS(result.out, "rank 0 of 1 on mpi is fine");
}

// ---- the rank that a failure is blamed on

TEST(LaunchCause, IsTheRankThatLeftFirst) {
  for (const auto& [how, code] : {std::pair{"returns", 3}, {"caught", 3}, {"throws", 4}}) {
    const auto result = Process({LAUNCH_MAIN, "run", "-n", "3", "--", LEAVE_RANK, how}, with({})).finish(60);
    EXPECT_FALSE(result.timed_out);
    EXPECT_EQ(result.code, code) << how << result.out << result.err;
    EXPECT_CONTAINS(result.err, "[dtensor run] rank 1 failed with exit code " + std::to_string(code));
    EXPECT_EQ(count(result.err, "[dtensor run]"), 1u) << result.err;
  }
}

// Rank 1 runs through an ssh that starts it here.
TEST(LaunchCause, MayBeOnAnotherHost) {
  std::string folder = "/tmp/join_processes_XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  std::ofstream(folder + "/ssh") << "#!/bin/sh\nwhile [ \"$1\" != -- ]; do shift; done\n"
                                    "exec setsid --wait /bin/sh -c \"$3\"\n";
  chmod((folder + "/ssh").c_str(), 0700);
  const auto result = Process({LAUNCH_MAIN, "run", "--hosts", "localhost:1,far:2", "--master-addr", "127.0.0.1", "--",
                               LEAVE_RANK, "returns"},
                              with({{"PATH", folder + ":" + std::getenv("PATH")}}))
                          .finish(60);
  unlink((folder + "/ssh").c_str());
  rmdir(folder.c_str());
  EXPECT_EQ(result.code, 3) << result.out << result.err;
  EXPECT_CONTAINS(result.err, "[dtensor run] rank 1 on far failed with exit code 3");
}

}  // namespace
}  // namespace dtensor::testing
