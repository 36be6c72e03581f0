#include "dtensor/comm/env.h"

#include <gtest/gtest.h>

#include <map>

#include "tests/comm/errors.h"

namespace dtensor {
namespace {

using testing::error_of;
using Settings = std::map<std::string, std::string>;

LaunchEnvironment read(const Settings& settings) {
  return read_environment([&](const char* name) {
    const auto found = settings.find(name);
    return found == settings.end() ? nullptr : found->second.c_str();
  });
}

std::string error_with(const Settings& settings) {
  return error_of([&] { read(settings); });
}

TEST(Environment, IsAWorldOfOneWithoutVariables) {
  const auto environment = read({});
  EXPECT_EQ(environment.launcher, Launcher::kNone);
  EXPECT_EQ(environment.rank, 0);
  EXPECT_EQ(environment.size, 1);
  EXPECT_EQ(environment.master_address, "127.0.0.1");
  EXPECT_EQ(environment.backend, "");
}

TEST(Environment, OfTorchrun) {
  const auto environment = read({{"RANK", "5"},
                                 {"WORLD_SIZE", "8"},
                                 {"LOCAL_RANK", "1"},
                                 {"MASTER_ADDR", "node-3.cluster"},
                                 {"MASTER_PORT", "29500"},
                                 {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                 {"TORCHELASTIC_RESTART_COUNT", "2"},
                                 {"OMPI_COMM_WORLD_RANK", "7"},
                                 {"DTENSOR_BACKEND", "gloo"}});
  EXPECT_EQ(environment.launcher, Launcher::kTorchrun);
  EXPECT_EQ(environment.rank, 5);
  EXPECT_EQ(environment.size, 8);
  EXPECT_EQ(environment.local_rank, 1);
  EXPECT_EQ(environment.master_address, "node-3.cluster");
  EXPECT_EQ(environment.master_port, 29500);
  EXPECT_TRUE(environment.agent_store);
  EXPECT_EQ(environment.attempt, "2");
  EXPECT_EQ(environment.backend, "gloo");
}

TEST(Environment, OfOpenMpi) {
  Settings settings = {{"OMPI_COMM_WORLD_RANK", "2"},
                       {"OMPI_COMM_WORLD_SIZE", "4"},
                       {"OMPI_COMM_WORLD_LOCAL_RANK", "2"},
                       {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}};
  auto environment = read(settings);
  EXPECT_EQ(environment.launcher, Launcher::kOpenMpi);
  EXPECT_EQ(environment.rank, 2);
  EXPECT_EQ(environment.size, 4);
  EXPECT_EQ(environment.local_rank, 2);
  EXPECT_EQ(environment.master_address, "127.0.0.1");
  EXPECT_EQ(environment.master_port, std::nullopt);
  settings["OMPI_COMM_WORLD_LOCAL_SIZE"] = "2";
  EXPECT_EQ(read(settings).master_address, "") << "several hosts: loopback cannot be right";
  settings["MASTER_ADDR"] = "10.0.0.1";
  EXPECT_EQ(read(settings).master_address, "10.0.0.1");
}

TEST(Environment, OfSlurm) {
  Settings settings = {{"SLURM_PROCID", "3"},
                       {"SLURM_STEP_NUM_TASKS", "6"},
                       {"SLURM_LOCALID", "1"},
                       {"SLURM_STEP_NUM_NODES", "2"},
                       {"SLURM_JOB_ID", "1234"},
                       {"SLURM_STEP_ID", "0"},
                       {"SLURM_STEP_NODELIST", "gpu[03-05,9],login1"}};
  auto environment = read(settings);
  EXPECT_EQ(environment.launcher, Launcher::kSlurm);
  EXPECT_EQ(environment.rank, 3);
  EXPECT_EQ(environment.size, 6);
  EXPECT_EQ(environment.local_rank, 1);
  EXPECT_EQ(environment.master_address, "gpu03");
  ASSERT_TRUE(environment.master_port);
  EXPECT_GE(*environment.master_port, 20000);
  EXPECT_LT(*environment.master_port, 32000);
  settings["SLURM_PROCID"] = "4";
  EXPECT_EQ(read(settings).master_port, environment.master_port) << "ranks must agree on it";
  settings["SLURM_STEP_NODELIST"] = "a,b";
  EXPECT_EQ(read(settings).master_address, "a");
  settings["SLURM_STEP_NODELIST"] = "rack[1-2]-ib,b";
  EXPECT_EQ(read(settings).master_address, "rack1-ib");
  settings["SLURM_STEP_NUM_NODES"] = "1";
  EXPECT_EQ(read(settings).master_address, "127.0.0.1");
  // In a batch script, outside srun, there is no step: the program is alone.
  settings.erase("SLURM_STEP_NUM_TASKS");
  EXPECT_EQ(read(settings).size, 1);
}

TEST(Environment, HasTheSecretUnderEveryLauncher) {
  const std::string secret = "0123456789abcdef";
  for (Settings settings : {Settings{},
                            {{"RANK", "0"}, {"WORLD_SIZE", "2"}},
                            {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "2"}},
                            {{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}}}) {
    EXPECT_EQ(read(settings).secret, "");
    EXPECT_FALSE(read(settings).allow_no_secret);
    settings["DTENSOR_SECRET"] = secret;
    settings["DTENSOR_ALLOW_NO_SECRET"] = "1";
    EXPECT_EQ(read(settings).secret, secret);
    EXPECT_TRUE(read(settings).allow_no_secret);
  }
  EXPECT_EQ(error_with({{"DTENSOR_SECRET", "hunter2"}}),
            "[environment] DTENSOR_SECRET has the wrong length; got 7 characters; expected 16 to 1024; try the output "
            "of: openssl rand -hex 32");
  EXPECT_EQ(error_with({{"DTENSOR_ALLOW_NO_SECRET", "yes"}}),
            "[environment] DTENSOR_ALLOW_NO_SECRET is not a number; got 'yes'; expected a number from 0 to 1");
}

TEST(Environment, KnowsTorchrunFromItsVariables) {
  const Settings by_hand = {{"RANK", "0"}, {"WORLD_SIZE", "2"}};
  Settings torchrun = by_hand;
  torchrun["TORCHELASTIC_RUN_ID"] = "none";
  EXPECT_FALSE(read(by_hand).torchelastic);
  EXPECT_TRUE(read(torchrun).torchelastic);
}

TEST(Environment, ErrorsNameTheVariable) {
  EXPECT_EQ(error_with({{"RANK", "abc"}, {"WORLD_SIZE", "4"}}),
            "[environment] RANK is not a number; got 'abc'; expected a number from 0 to 16777216");
  EXPECT_EQ(error_with({{"RANK", "1x"}, {"WORLD_SIZE", "4"}}),
            "[environment] RANK is not a number; got '1x'; expected a number from 0 to 16777216");
  EXPECT_EQ(error_with({{"RANK", "-1"}, {"WORLD_SIZE", "4"}}),
            "[environment] RANK is out of range; got '-1'; expected a number from 0 to 16777216");
  EXPECT_EQ(error_with({{"RANK", "99999999999999999999"}, {"WORLD_SIZE", "4"}}),
            "[environment] RANK is out of range; got '99999999999999999999'; expected a number from 0 to 16777216");
  EXPECT_EQ(error_with({{"RANK", "4"}, {"WORLD_SIZE", "4"}}), "[environment] RANK is not below WORLD_SIZE; got 4 of 4");
  EXPECT_EQ(error_with({{"RANK", "0"}}), "[environment] RANK is set and WORLD_SIZE is not; expected both");
  EXPECT_EQ(error_with({{"WORLD_SIZE", "2"}}), "[environment] WORLD_SIZE is set and RANK is not; expected both");
  EXPECT_EQ(error_with({{"RANK", "0"}, {"WORLD_SIZE", "0"}}),
            "[environment] WORLD_SIZE is out of range; got '0'; expected a number from 1 to 16777216");
  EXPECT_EQ(error_with({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "2"}}),
            "[environment] LOCAL_RANK is out of range; got '2'; expected a number from 0 to 1");
  EXPECT_EQ(error_with({{"MASTER_PORT", "65536"}}),
            "[environment] MASTER_PORT is out of range; got '65536'; expected a number from 1 to 65535");
  EXPECT_EQ(error_with({{"MASTER_PORT", "0"}}),
            "[environment] MASTER_PORT is out of range; got '0'; expected a number from 1 to 65535");
  EXPECT_EQ(error_with({{"MASTER_ADDR", "a b\n"}}),
            "[environment] MASTER_ADDR is not the name or address of a host; got 'a b\\x0a'");
  EXPECT_EQ(error_with({{"DTENSOR_BACKEND", "glue"}}),
            "[environment: DTENSOR_BACKEND] there is no such backend; got 'glue'; expected threads, gloo, nccl or mpi");
  EXPECT_EQ(error_with({{"OMPI_COMM_WORLD_RANK", "9"}, {"OMPI_COMM_WORLD_SIZE", "4"}}),
            "[environment] OMPI_COMM_WORLD_RANK is not below OMPI_COMM_WORLD_SIZE; got 9 of 4");
}

}  // namespace
}  // namespace dtensor
