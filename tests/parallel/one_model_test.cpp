// One model by default, under parallelize_module and fully_shard; programs without a seed, a source or a guard.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>

#include "dtensor/dtensor.h"
#include "tests/comm/launch_process.h"
#include "tests/parallel/ordinary_programs.h"
#include "tests/runtime/helpers.h"

namespace dtensor::testing {
namespace {

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(double value) {
    up = register_module("up", torch::nn::Linear(4, 6));
    down = register_module("down", torch::nn::Linear(6, 4));
    mask = register_buffer("mask", torch::tril(torch::full({4, 4}, value)).view({1, 1, 4, 4}));
    const at::NoGradGuard no_grad;
    for (at::Tensor& p : parameters()) p.fill_(value);
  }
  torch::nn::Linear up{nullptr}, down{nullptr};
  at::Tensor mask;
};
TORCH_MODULE(Block);

void expect_values(const Block& block, double value) {
  for (const at::Tensor& p : block->parameters()) {
    const at::Tensor full = DTensor(p.detach()).full_tensor();
    EXPECT_TRUE(at::equal(full, at::full_like(full, value)));
  }
  EXPECT_TRUE(at::equal(DTensor(block->mask).full_tensor(), at::tril(at::full({4, 4}, value)).view({1, 1, 4, 4})));
}

template <class Fn>
void on_mesh(Fn fn) {
  run_ranks(4, [&](World& world) {
    fn(init_device_mesh(world, at::kCPU, {2, 2}, {"dp", "tp"}), static_cast<double>(world.rank() + 1));
  });
}

const ParallelPlan kPlan = {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}};

TEST(OneModel, ParallelizeModuleTakesTheRootsFirstRank) {
  on_mesh([](const DeviceMesh& mesh, double mine) {
    Block block(mine), named(mine), equal(7);
    parallelize_module(block, mesh["tp"], kPlan);
    expect_values(block, 1);
    parallelize_module(named, mesh["tp"], kPlan, {.source = 3});
    expect_values(named, 4);
    parallelize_module(equal, mesh["tp"], kPlan, {.equal_copies = true});
    expect_values(equal, 7);
    Block differs(mine);
    const std::string error = error_of([&] { parallelize_module(differs, mesh["tp"], kPlan, {.equal_copies = true}); });
    EXPECT_NE(error.find("[parallelize_module] equal_copies"), std::string::npos) << error;
    EXPECT_NE(error.find("\"up.weight\""), std::string::npos) << error;
    EXPECT_NE(error.find("of ranks 1,2,3 differ from those of rank 0"), std::string::npos) << error;
    EXPECT_FALSE(is_dtensor(differs->mask));
    EXPECT_NE(error_of([&] { parallelize_module(differs, mesh["tp"], kPlan, {.source = 4}); }).find("0 to 3"),
              std::string::npos);
  });
}

TEST(OneModel, FullyShardTakesTheRootsFirstRank) {
  on_mesh([](const DeviceMesh& mesh, double mine) {
    Block block(mine), named(mine), equal(7), differs(mine);
    fully_shard(block, mesh["dp"]);
    expect_values(block, 1);
    fully_shard(named, mesh["dp"], {.source = 2});
    expect_values(named, 3);
    fully_shard(equal, mesh["dp"], {.equal_copies = true});
    expect_values(equal, 7);
    const std::string error = error_of([&] { fully_shard(differs, mesh["dp"], {.equal_copies = true}); });
    EXPECT_NE(error.find("[fully_shard] equal_copies"), std::string::npos) << error;
  });
}

TEST(OneModel, DistributedParametersKeepTheirValues) {
  on_mesh([](const DeviceMesh& mesh, double mine) {
    Block block(mine);
    distribute_in_place(block->up->weight, mesh, {Replicate(), Replicate()}, {.source = 1});
    parallelize_module(block, mesh["tp"], kPlan);
    fully_shard(block, mesh["dp"]);
    EXPECT_TRUE(at::equal(DTensor(block->up->weight.detach()).full_tensor(), at::full({6, 4}, 2.0)));
    EXPECT_TRUE(at::equal(DTensor(block->down->weight.detach()).full_tensor(), at::full({4, 6}, 1.0)));
  });
}

TEST(OneModel, SharedMemoryIsRefusedByName) {
  on_mesh([](const DeviceMesh& mesh, double) {
    struct SharedImpl : torch::nn::Module {
      SharedImpl() {
        const at::Tensor base = torch::ones({4, 4});
        register_parameter("weight", base);
        register_buffer("alias", base.detach());
      }
    };
    SharedImpl shared;
    for (const std::string& error :
         {error_of([&] { parallelize_module(shared, mesh["tp"], {}); }),
          error_of([&] { fully_shard(shared, mesh["dp"]); }), error_of([&] { distribute_module(shared, mesh); })}) {
      EXPECT_NE(error.find("share memory"), std::string::npos) << error;
      EXPECT_NE(error.find("\"weight\" and \"alias\""), std::string::npos) << error;
    }
  });
}

// ---- programs

// CI runs each once or twice; ORDINARY_RUNS=30 repeats them.
int runs() {
  const char* text = std::getenv("ORDINARY_RUNS");
  return text ? std::atoi(text) : 1;
}

TEST(OrdinaryPrograms, TrainOneModelOnThreads) {
  for (int i = 0; i < runs(); ++i) {
    for (const std::int64_t ranks : {2, 3}) {
      run_ranks(ranks, [](World& world) { EXPECT_EQ(run_ordinary_programs(world), ""); });
    }
  }
}

void expect_all_right(const Process::Result& result, std::int64_t ranks, const std::string& backend) {
  ASSERT_EQ(result.code, 0) << result.out << result.err;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    const std::string line = "rank " + std::to_string(rank) + " on " + backend + ": all right";
    EXPECT_NE(result.out.find(line), std::string::npos) << line << " is not in\n" << result.out << result.err;
  }
}

TEST(OrdinaryPrograms, TrainOneModelOverGloo) {
  for (int i = 0; i < runs(); ++i) {
    Process process({LAUNCH_MAIN, "run", "-n", "3", "--", ORDINARY_RANK}, {{"OMP_NUM_THREADS", "1"}});
    expect_all_right(process.finish(150), 3, "gloo");
  }
}

TEST(OrdinaryPrograms, TrainOneModelUnderMpirun) {
  if (std::string(MPIRUN).empty()) GTEST_SKIP() << "built without MPI";
  for (int i = 0; i < runs(); ++i) {
    expect_all_right(under_mpirun(MPIRUN, 2, {ORDINARY_RANK}, 150), 2, "mpi");
  }
}

}  // namespace
}  // namespace dtensor::testing
