// Ranks that disagree are told who, what and where it began; ranks that only differ are not disturbed.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <mutex>
#include <random>

#include "dtensor/comm/c10d.h"
#include "tests/comm/launch_process.h"
#include "tests/runtime/disagreements.h"

namespace dtensor::testing {
namespace {

constexpr std::int64_t kRanks = 3;

class OnThreads : public ::testing::TestWithParam<RankProgram> {};

std::vector<std::string> errors_of(const RankProgram& program) {
  std::vector<std::string> errors(kRanks);
  run_ranks(kRanks, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {kRanks}, {"x"});
    errors[static_cast<std::size_t>(world.rank())] =
        error_of([&] { program.run(world, mesh, world.rank() == kRanks - 1); });
    world.leave("it is done");  // without a last look at what was written
  });
  return errors;
}

TEST_P(OnThreads, EndAlike) {
  for (const std::string& error : errors_of(GetParam())) {
    EXPECT_NE(error.find(GetParam().expected.empty() ? "no error" : GetParam().expected), std::string::npos) << error;
    if (!GetParam().expected.empty()) {
      EXPECT_NE(error.find("rank "), std::string::npos) << error;
    }
  }
}

std::string name_of(const ::testing::TestParamInfo<RankProgram>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Disagreement, OnThreads, ::testing::ValuesIn(disagreements()), name_of);
INSTANTIATE_TEST_SUITE_P(Harmless, OnThreads, ::testing::ValuesIn(harmless_differences()), name_of);

// The two sides and the operator where they part stand in the error.
TEST(Agreement, NamesBothSidesAndTheFirstDifference) {
  for (const RankProgram& program : disagreements()) {
    if (program.name != "ExtraOperator") continue;
    const std::string error = errors_of(program)[0];
    EXPECT_NE(error.find("rank 2"), std::string::npos) << error;
    EXPECT_NE(error.find("first difference: "), std::string::npos) << error;
    EXPECT_NE(error.find("aten::mul"), std::string::npos) << error;
    EXPECT_NE(error.find("for aten::_local_scalar_dense"), std::string::npos) << error;
  }
}

// Nothing was ever sent: the end of the world tells.
TEST(Agreement, LooksAtReplicasAtTheEndOfAWorld) {
  const auto train = [](double odd_start) {
    return error_of([&] {
      run_ranks(kRanks, [&](World& world) {
        const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {kRanks}, {"x"});
        auto model = replicated_model(mesh);
        torch::optim::SGD optimizer(model->parameters(), 0.1);
        step(model, optimizer, numbers({5, 4}, world.rank() == 1 ? odd_start : 2));
      });
    });
  };
  EXPECT_EQ(train(2), "no error");
  const std::string error = train(3);
  EXPECT_NE(error.find("diverged"), std::string::npos) << error;
  EXPECT_NE(error.find("argument \"mat1\" of aten::addmm"), std::string::npos) << error;
}

// A rank that returns early has left; the others say so.
TEST(Agreement, NoticesAnEarlyReturn) {
  std::vector<std::string> errors(kRanks);
  run_ranks(kRanks, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {kRanks}, {"x"});
    const DTensor x = from_local(numbers({4, 6}), mesh, {Shard(0)});
    total(x);
    if (world.rank() == 1) return;
    errors[static_cast<std::size_t>(world.rank())] = error_of([&] { total(x * 2); });
    world.leave("it is done");
  });
  for (const std::int64_t rank : {0, 2}) {
    EXPECT_NE(errors[static_cast<std::size_t>(rank)].find("rank 1 left"), std::string::npos)
        << errors[static_cast<std::size_t>(rank)];
  }
}

// A batch {Shard(0), Replicate()} has other values for every index of dp, and must have the same along tp.
TEST(Agreement, ComparesValuesOnlyAlongReplicatedMeshDims) {
  const auto sum = [](bool along_tp) {
    return error_of([&] {
      run_ranks(4, [&](World& world) {
        const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2, 2}, {"dp", "tp"});
        const std::int64_t index = along_tp ? mesh.local_rank("tp") : mesh.local_rank("dp");
        const DTensor x = from_local(numbers({4, 6}, static_cast<double>(index)), mesh, {Shard(0), Replicate()});
        const DTensor w = distribute_tensor(numbers({6, 8}), mesh, {Replicate(), Shard(1)}, {.source = 0});
        total(at::mm(x, w).relu());
      });
    });
  };
  EXPECT_EQ(sum(false), "no error");
  EXPECT_NE(sum(true).find("diverged"), std::string::npos) << sum(true);
}

// Handles of another rank, or of another world, beside one's own.
TEST(Agreement, RefusesTensorsOfAnotherRank) {
  std::vector<at::Tensor> shared(2);
  std::mutex mutex;
  std::vector<std::string> errors(2);
  run_ranks(2, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    const at::Tensor mine = from_local(numbers({4}, static_cast<double>(world.rank())), mesh, {Replicate()});
    {
      const std::lock_guard lock(mutex);
      shared[static_cast<std::size_t>(world.rank())] = mine;
    }
    world.group()->barrier()->wait();
    const at::Tensor other = shared[static_cast<std::size_t>(1 - world.rank())];
    errors[static_cast<std::size_t>(world.rank())] = error_of([&] { static_cast<void>(mine + other); });
    world.group()->barrier()->wait();
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("the operands belong to different ranks"), std::string::npos) << error;
  }
  run_ranks(2, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    const at::Tensor mine = from_local(numbers({4}), mesh, {Replicate()});
    const at::Tensor other = shared[static_cast<std::size_t>(world.rank())];
    const std::string error = error_of([&] { static_cast<void>(mine + other); });
    EXPECT_NE(error.find("the operands belong to different worlds"), std::string::npos) << error;
  });
}

// Uneven parts without sizes: an error at the first collective, on all ranks.
TEST(Agreement, NoticesUnevenFromLocal) {
  std::vector<std::string> errors(4);
  run_ranks(4, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {4}, {"x"});
    const std::int64_t rows = world.rank() < 2 ? 3 : 2;
    errors[static_cast<std::size_t>(world.rank())] = error_of([&] {
      from_local(numbers({rows, 5}), mesh, {Shard(0)}).mean().item<double>();
    });
    world.leave("it is done");
  });
  for (const std::string& error : errors) EXPECT_NE(error.find("from_local"), std::string::npos) << error;
}

// DTENSOR_CHECK=values: the first operator after which replicas differ is named.
TEST(Agreement, ChecksValuesOfEveryResult) {
  const CheckLevel before = set_check_level(CheckLevel::kValues);
  std::vector<std::string> errors(2);
  run_ranks(2, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    const DTensor x = from_local(numbers({4, 4}), mesh, {Replicate()});
    errors[static_cast<std::size_t>(world.rank())] = error_of([&] {
      const at::Tensor y = x + 1;
      if (world.rank() == 1) DTensor(y).to_local().add_(1);  // a write that no operator sees
      static_cast<void>(y.relu());
    });
    world.leave("it is done");
  });
  set_check_level(before);
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("[aten::relu] replicas hold different values"), std::string::npos) << error;
  }
}

// ---- random programs in which one rank throws, returns or does something else at a random place

enum class Fault : std::uint8_t { kThrow, kReturn, kOperator, kScalar, kCollective };

void random_program(std::uint32_t seed, const DeviceMesh& mesh, std::int64_t odd_rank) {
  std::mt19937 random(seed);
  const auto draw = [&](std::uint32_t n) { return random() % n; };
  at::Tensor x = from_local(numbers({4, 6}, static_cast<double>(draw(5))), mesh, {Shard(0)});
  at::Tensor y = from_local(numbers({4, 6}, 2), mesh, {Shard(0)});
  const std::uint32_t length = 6 + draw(10), at = draw(length);
  const auto fault = static_cast<Fault>(draw(5));
  for (std::uint32_t i = 0; i < length; ++i) {
    const std::uint32_t kind = draw(7);
    const double scalar = 1 + 0.5 * draw(3);
    const bool odd = i == at && mesh.rank() == odd_rank;
    if (odd && fault == Fault::kThrow) throw std::runtime_error("this rank gives up");
    if (odd && fault == Fault::kReturn) return;
    if (odd && fault == Fault::kOperator) x = x.sin();
    if (odd && fault == Fault::kScalar) x = x.mul(1.25);
    if (odd && fault == Fault::kCollective) DTensor(y).redistribute({Shard(0)}).full_tensor();
    switch (kind) {
      case 0:
        x = x.mul(scalar);
        break;
      case 1:
        x = x + y;
        break;
      case 2:
        x = x.tanh();
        break;
      case 3:
        x = DTensor(x).redistribute({Shard(1)}).redistribute({Shard(0)});
        break;
      case 4:
        x = x / (1 + x.abs().sum());
        break;
      case 5:
        x = x.softmax(0);
        break;
      default:
        std::swap(x, y);
        break;
    }
  }
  // Both may be replicated by now, and reading a replica compares nothing: one more collective.
  DTensor(x + y).redistribute({Shard(0)}).full_tensor();
}

// Nothing hangs: every program ends in an error, in time.
TEST(Agreement, RandomProgramsWithOneOddRankEnd) {
  const char* text = std::getenv("DTENSOR_ODD_PROGRAMS");
  const auto count = static_cast<std::uint32_t>(text ? std::atoi(text) : 60);
  const char* given = std::getenv("DTENSOR_ODD_SEED");
  const auto seed = given ? static_cast<std::uint32_t>(std::strtoul(given, nullptr, 10)) : std::random_device()();
  std::printf("seed %u\n", seed);
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::uint32_t mine = seed + i;
    const std::int64_t ranks = 2 + mine % 3, odd = mine / 3 % ranks;
    const auto began = std::chrono::steady_clock::now();
    const std::string error = error_of([&] {
      run_ranks(ranks,
                [&](World& world) {
                  random_program(mine, init_device_mesh(world, at::kCPU, {ranks}, {"x"}), odd);
                  world.group()->barrier()->wait();
                },
                {.timeout = std::chrono::seconds(20)});
    });
    EXPECT_NE(error, "no error") << "program " << mine;
    EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(15)) << "program " << mine;
  }
}

// ---- processes: one start of the program runs all, each on a group of its own

constexpr std::int64_t kProcesses = 4;  // with enough orders for all programs

void expect_all(const std::string& out) {
  for (const auto& programs : {disagreements(), harmless_differences()}) {
    for (const RankProgram& program : programs) {
      for (std::int64_t rank = 0; rank < kProcesses; ++rank) {
        const std::string start = "rank " + std::to_string(rank) + " " + program.name +
                                  (program.expected.empty() ? " (harmless)" : "") + ": ";
        const std::size_t at = out.find(start);
        ASSERT_NE(at, std::string::npos) << start << " is not in\n" << out;
        const std::string line = out.substr(at, out.find('\n', at) - at);
        EXPECT_NE(line.find(program.expected.empty() ? "no error" : program.expected), std::string::npos) << line;
      }
    }
  }
}

TEST(Agreement, HoldsOverGloo) {
  Process process({LAUNCH_MAIN, "run", "-n", std::to_string(kProcesses), "--", AGREEMENT_RANK},
                  {{"OMP_NUM_THREADS", "1"}});
  const auto result = process.finish(100);
  ASSERT_EQ(result.code, 0) << result.out << result.err;
  expect_all(result.out);
}

TEST(Agreement, HoldsUnderMpirun) {
  if (std::string(MPIRUN).empty()) GTEST_SKIP() << "built without MPI";
  const auto result = under_mpirun(MPIRUN, kProcesses, {AGREEMENT_RANK}, 100);
  ASSERT_EQ(result.code, 0) << result.out << result.err;
  expect_all(result.out);
}

// A program that only writes replicas must not seem to have succeeded.
TEST(Agreement, FailsAtTheEndOfAProcess) {
  Process process({LAUNCH_MAIN, "run", "-n", "2", "--", AGREEMENT_RANK, "train-apart"}, {{"OMP_NUM_THREADS", "1"}});
  const auto result = process.finish(100);
  EXPECT_NE(result.code, 0) << result.out;
  EXPECT_NE(result.err.find("diverged"), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("of aten::addmm"), std::string::npos) << result.err;
}

}  // namespace
}  // namespace dtensor::testing
