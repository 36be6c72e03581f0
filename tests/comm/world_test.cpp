#include "dtensor/comm/world.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <future>
#include <mutex>
#include <set>
#include <thread>

#include "dtensor/comm/threads.h"
#include "tests/comm/errors.h"

namespace dtensor {
namespace {

using testing::error_of;

std::int64_t sum_over(Communicator& group, std::int64_t value) {
  const auto buffer = at::full({1}, static_cast<double>(value), at::kLong);
  group.all_reduce(buffer, ReduceOp::kSum)->wait();
  return buffer.item<std::int64_t>();
}

TEST(RunRanks, RunsEveryRankOnce) {
  std::mutex mutex;
  std::set<std::int64_t> seen;
  run_ranks(5, [&](World& world) {
    EXPECT_EQ(world.size(), 5);
    EXPECT_EQ(world.backend(), "threads");
    EXPECT_EQ(sum_over(*world.group(), world.rank()), 10);
    const std::lock_guard lock(mutex);
    EXPECT_TRUE(seen.insert(world.rank()).second);
  });
  EXPECT_EQ(seen.size(), 5u);
}

TEST(RunRanks, RethrowsTheFirstErrorAndReleasesTheRest) {
  std::atomic<int> released = 0;
  const auto run = [&] {
    run_ranks(3, [&](World& world) {
      const auto group = world.group();
      group->barrier()->wait();
      if (world.rank() == 1) throw std::out_of_range("row 7");
      try {
        group->barrier()->wait();
      } catch (const Error& error) {
        EXPECT_CONTAINS(error.what(), "rank 1 left threads group \"world\" {0,1,2}; got its error: row 7");
        ++released;
        throw;
      }
    });
  };
  try {
    run();
    FAIL() << "nothing was thrown";
  } catch (const std::out_of_range& error) {
    EXPECT_STREQ(error.what(), "row 7");
  }
  EXPECT_EQ(released, 2);
}

TEST(RunRanks, SurvivesThingsThatAreNoExceptions) {
  EXPECT_THROW(run_ranks(2,
                         [](World& world) {
                           if (world.rank() == 0) throw 7;
                           EXPECT_CONTAINS(error_of([&] { world.group()->barrier()->wait(); }),
                                           "something that is no std::exception");
                         }),
               int);
}

TEST(RunRanks, LeavesThreadCountsAsTheyWere) {
  const int before = at::get_num_threads();
  const auto of_new_thread = [] { return std::async(std::launch::async, [] { return at::get_num_threads(); }).get(); };
  const int before_elsewhere = of_new_thread();
  run_ranks(2, [](World&) { at::set_num_threads(1); });
  EXPECT_EQ(at::get_num_threads(), before);
  EXPECT_EQ(of_new_thread(), before_elsewhere);
  EXPECT_ANY_THROW(run_ranks(2, [](World&) {
    at::set_num_threads(1);
    throw std::runtime_error("no");
  }));
  EXPECT_EQ(of_new_thread(), before_elsewhere);
}

TEST(RunRanks, KeepsTheCallersGradMode) {
  const at::NoGradGuard guard;
  run_ranks(2, [](World&) { EXPECT_FALSE(at::GradMode::is_enabled()); });
}

TEST(RunRanks, RefusesWhatCannotBe) {
  EXPECT_CONTAINS(error_of([] { run_ranks(0, [](World&) {}); }), "[threads] a process cannot run this many ranks");
  EXPECT_EQ(error_of([] { run_ranks(2, [](World&) {}, {.backend = "gloo"}); }),
            "[run_ranks] the ranks are threads; got backend gloo; expected threads; try World::from_env, in processes");
}

TEST(RunRanks, RefusesCudaMeshes) {
  EXPECT_EQ(
      error_of([] { run_ranks(2, [](World& world) { init_device_mesh(world, at::kCUDA, {2}); }); }),
      "[init_device_mesh] ranks that are threads cannot have a CUDA mesh: one thread of autograd serves a device; "
      "got 2 thread ranks; expected one process per GPU; try dtensor run --backend nccl");
}

TEST(World, GroupsOfMeshDims) {
  run_ranks(6, [](World& world) {
    const auto mesh = init_device_mesh(world, at::kCPU, {2, 3}, {"dp", "tp"});
    const std::int64_t me = world.rank();
    EXPECT_EQ(mesh.rank(), me);
    const auto tp = world.group(mesh, "tp"), dp = world.group(mesh, 0);
    EXPECT_EQ(tp->ranks(), (std::vector<std::int64_t>{me / 3 * 3, me / 3 * 3 + 1, me / 3 * 3 + 2}));
    EXPECT_EQ(dp->ranks(), (std::vector<std::int64_t>{me % 3, me % 3 + 3}));
    EXPECT_EQ(dp->describe(),
              "threads group \"dp\" {" + std::to_string(me % 3) + "," + std::to_string(me % 3 + 3) + "}");
    EXPECT_EQ(sum_over(*tp, me), me < 3 ? 3 : 12);
    EXPECT_EQ(sum_over(*dp, me), 2 * (me % 3) + 3);
    // A sub-mesh, and another mesh with the same groups, share them.
    EXPECT_EQ(world.group(mesh["tp"], 0), tp);
    EXPECT_EQ(world.group(init_device_mesh(world, at::kCPU, {2, 3}), 1), tp);
    EXPECT_EQ(sum_over(*world.group(mesh.flatten_all("all"), 0), 1), 6);
    EXPECT_EQ(world.group(mesh), world.group());
    EXPECT_EQ(world.group(mesh["tp"]), tp);
  });
}

// Ranks 1 and 3 are outside, go their own way at once, and nobody waits for them.
TEST(World, RanksOutsideAMeshTakePartInNothing) {
  run_ranks(4, [](World& world) {
    const auto mesh = init_device_mesh(world, at::kCPU, Mesh::from_ranks({2}, {2, 0}, {"tp"}));
    if (!mesh.contains_me()) {
      EXPECT_EQ(error_of([&] { world.group(mesh, "tp"); }),
                "[World::group] this rank is not in the mesh, and has no group of it; got rank " +
                    std::to_string(world.rank()) + " and 2(tp) of [2,0]; try DeviceMesh::contains_me");
      return;
    }
    EXPECT_EQ(world.group(mesh, "tp")->rank(), world.rank() == 2 ? 0 : 1);
    EXPECT_EQ(sum_over(*world.group(mesh, "tp"), world.rank()), 2);
  });
}

TEST(World, MeshDimsCanHaveTheirOwnTimeout) {
  const auto start = std::chrono::steady_clock::now();
  std::atomic<bool> timed_out = false;
  const std::string text = error_of([&] {
    run_ranks(2, [&](World& world) {
      const auto mesh =
          init_device_mesh(world, at::kCPU, {2}, {"tp"}, {{"tp", {.timeout = std::chrono::milliseconds(50)}}});
      world.group()->barrier()->wait();  // the same ranks, with the world's timeout
      if (world.rank() == 0) {
        try {
          world.group(mesh, "tp")->barrier()->wait();
        } catch (const std::exception&) {
          timed_out = true;
          throw;
        }
      }
      // Who leaves earlier is another error.
      for (int ms = 0; ms < 1000 && !timed_out; ++ms) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
  });
  EXPECT_CONTAINS(text,
                  "[barrier] timed out after 50 ms in threads group \"tp\" {0,1}; got #1 barrier() without rank 1");
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(1050));
}

TEST(World, MeshDimOptionsAreChecked) {
  run_ranks(2, [](World& world) {
    const auto with = [&](const MeshDimOptions& options) {
      init_device_mesh(world, at::kCPU, {2}, {"tp"}, {{"tp", options}});
    };
    EXPECT_CONTAINS(error_of([&] { with({.backend = "glue"}); }), "there is no such backend; got 'glue'");
    EXPECT_CONTAINS(error_of([&] { with({.backend = "gloo"}); }),
                    "this world cannot have groups of another backend; got gloo in a world of threads");
    with({.backend = "threads", .timeout = std::chrono::seconds(5)});
    EXPECT_CONTAINS(error_of([&] { with({.timeout = std::chrono::seconds(6)}); }),
                    "was given other options; got {0,1}");
    EXPECT_CONTAINS(error_of([&] { init_device_mesh(world, at::kCPU, {2}, {"tp"}, {{"pp", {}}}); }), "pp");
  });
}

TEST(World, ChecksMeshesAgainstItsSize) {
  run_ranks(2, [](World& world) {
    EXPECT_CONTAINS(error_of([&] { init_device_mesh(world, at::kCPU, {3}); }), "3");
    EXPECT_EQ(error_of([&] { init_device_mesh(world, at::kMeta, {2}); }),
              "[init_device_mesh] meshes are made of CPUs or CUDA devices; got meta");
  });
}

TEST(World, OverGivenGroups) {
  const auto transports = make_thread_transports(2);
  const auto rank = [&](std::int64_t me) {
    World world(me, 2);
    EXPECT_CONTAINS(error_of([&] { world.group(); }),
                    "nothing to make one with; got {0,1}; try World::use_group first");
    world.use_group(transports[std::size_t(me)]->make_group({0, 1}, {.name = "given"}));
    const auto mesh = init_device_mesh(world, at::kCPU, {2}, {"tp"});
    EXPECT_EQ(world.group(mesh, "tp")->describe(), "threads group \"given\" {0,1}");
    EXPECT_EQ(sum_over(*world.group(mesh, "tp"), me), 1);
  };
  std::thread other([&] { rank(1); });
  rank(0);
  other.join();
  EXPECT_EQ(error_of([] { World(2, 2); }), "[World] the rank is not in the world; got 2 of 2");
}

TEST(World, ThatEndsInAnExceptionSaysSo) {
  const auto transports = make_thread_transports(2);
  std::thread other([&] {
    try {
      const World world(transports[1]);
      throw std::runtime_error("no");
    } catch (const std::runtime_error&) {
    }
  });
  World world(transports[0]);
  EXPECT_CONTAINS(error_of([&] { world.group()->barrier()->wait(); }), "got its error: an exception ended it");
  other.join();
}

TEST(World, ThatWasLeftMakesNoGroups) {
  World world(make_thread_transports(2)[0]);
  world.leave();
  EXPECT_EQ(error_of([&] { world.group(); }), "[World::group] this rank has left its world");
}

TEST(World, FromEnvIsAloneWithoutVariables) {
  for (const char* name : {"RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "DTENSOR_BACKEND"})
    unsetenv(name);
  auto world = World::from_env();
  EXPECT_EQ(world.rank(), 0);
  EXPECT_EQ(world.size(), 1);
  EXPECT_EQ(world.backend(), "threads");
  EXPECT_EQ(sum_over(*world.group(), 5), 5);
}

TEST(World, FromEnvChecksBackends) {
  setenv("RANK", "1", 1);
  setenv("WORLD_SIZE", "2", 1);
  unsetenv("MASTER_PORT");
  EXPECT_EQ(
      error_of([] { World::from_env({.backend = "threads"}); }),
      "[World] processes cannot be joined by threads; got backend threads in a world of 2 processes; expected gloo, "
      "nccl or mpi; try run_ranks, for ranks that are threads of one process");
  EXPECT_EQ(
      error_of([] { World::from_env(); }),
      "[World] nothing says where the ranks meet; got no MASTER_PORT; expected MASTER_ADDR and MASTER_PORT, alike "
      "on all ranks; try dtensor run, torchrun, or mpirun with the mpi backend");
  EXPECT_CONTAINS(error_of([] { World::from_env({.backend = "glue"}); }), "there is no such backend; got 'glue'");
  unsetenv("RANK");
  unsetenv("WORLD_SIZE");
}

}  // namespace
}  // namespace dtensor
