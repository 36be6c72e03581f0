// bench_redistribute: 64 MB between layouts beside plain copies, and a small one beside the bare collective, on ranks
// that are threads. Everything in one run; the best of several rounds, since other programs only ever add to it.
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <malloc.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "dtensor/comm/world.h"
#include "dtensor/core/plan.h"
#include "dtensor/runtime/execute.h"

namespace dtensor {
namespace {

// From the first rank's start to the last one's end: where ranks share cores they do not run at the same time.
double seconds_of(Communicator& group, std::int64_t calls, const std::function<void()>& call) {
  const auto now = [] { return std::chrono::steady_clock::now().time_since_epoch().count(); };
  const at::Tensor times = at::empty({2}, at::kLong);
  auto* time = times.data_ptr<std::int64_t>();
  group.barrier()->wait();
  time[0] = -now();
  for (std::int64_t i = 0; i < calls; ++i) call();
  time[1] = now();
  group.all_reduce(times, ReduceOp::kMax)->wait();
  return static_cast<double>(time[0] + time[1]) * 1e-9 / static_cast<double>(calls);
}

double best_of(std::int64_t rounds, const std::function<double()>& measure) {
  double best = measure();
  for (std::int64_t i = 1; i < rounds; ++i) best = std::min(best, measure());
  return best;
}

struct Large {
  const char* from;
  const char* to;
};

// The bound: every rank copies, at the same time and within its own memory, half of what it must read and write.
void large(World& world, const DeviceMesh& mesh, const Large& which) {
  constexpr std::int64_t kRows = 4096;
  const auto group = world.group(mesh);
  const TensorMeta meta({kRows, kRows}, DType::kF32);
  const Spec from = Spec::make(meta, mesh, parse_placements(which.from));
  const Spec to = Spec::make(meta, mesh, parse_placements(which.to));
  const Dims at = *mesh.coordinate();
  const Dims shape = from.local_shape(at);
  const at::Tensor local = at::ones({shape.data(), shape.size()}, at::kFloat);
  const std::int64_t parts = from.has_partial() ? mesh.size() : 1;
  const std::int64_t bytes = to.local_bytes(at) * (parts + 1) / 2;
  const Plan plan = make_plan(from, to);

  const double ours = best_of(12, [&] { return seconds_of(*group, 1, [&] { execute(mesh, plan, local); }); });
  // The copy takes memory for its target, as the redistribution does.
  const at::Tensor source = at::ones({bytes}, at::kByte);
  const double copies = best_of(12, [&] {
    return seconds_of(*group, 1, [&] {
      const at::Tensor target = at::empty({bytes}, at::kByte);
      std::memcpy(target.data_ptr(), source.data_ptr(), static_cast<std::size_t>(bytes));
    });
  });
  if (world.rank() == 0) {
    std::printf("%5ld  64 MB %-4s -> %-4s   %8.2f ms   copies %8.2f ms   %.2f of the bound\n",
                static_cast<long>(mesh.size()), which.from, which.to, ours * 1e3, copies * 1e3, copies / ours);
  }
}

void small(World& world, const DeviceMesh& mesh) {
  const auto group = world.group(mesh);
  const TensorMeta meta({512}, DType::kF32);
  const Plan plan = make_plan(Spec::make(meta, mesh, {Shard(0)}), Spec::make(meta, mesh, {Replicate()}));
  const std::int64_t each = 512 / mesh.size();
  const std::vector<std::int64_t> counts(static_cast<std::size_t>(mesh.size()), each);
  const at::Tensor local = at::ones({each}, at::kFloat);
  const at::Tensor output = at::empty({512}, at::kFloat);
  const double ours = best_of(10, [&] { return seconds_of(*group, 2000, [&] { execute(mesh, plan, local); }); });
  const double bare =
      best_of(10, [&] { return seconds_of(*group, 2000, [&] { group->all_gather(output, local, counts)->wait(); }); });
  if (world.rank() == 0) {
    std::printf("%5ld  512 floats S(0) -> R   %8.2f us   all-gather %6.2f us   %.2f us over it\n",
                static_cast<long>(mesh.size()), ours * 1e6, bare * 1e6, (ours - bare) * 1e6);
  }
}

}  // namespace
}  // namespace dtensor

int main() {
  const auto on_ranks = [](const auto& body) {
    for (const std::int64_t ranks : {2, 4}) {
      dtensor::run_ranks(ranks, [&](dtensor::World& world) {
        body(world, dtensor::init_device_mesh(world, at::kCPU, {ranks}, {"x"}));
      });
    }
  };
  std::printf("ranks  what\n");
  std::fflush(stdout);
  // Large ones in a process of their own, where freed memory stays with the program and is used again: fresh pages from
  // the system cost more than the copies into them, and who gets some would decide.
  const pid_t child = fork();
  if (child == 0) {
    mallopt(M_MMAP_MAX, 0);
    mallopt(M_TRIM_THRESHOLD, 2'000'000'000);
    mallopt(M_ARENA_MAX, 1);
    on_ranks([](dtensor::World& world, const dtensor::DeviceMesh& mesh) {
      for (const dtensor::Large& which :
           {dtensor::Large{"S(0)", "S(1)"}, {"S(0)", "R"}, {"S(1)", "R"}, {"P", "S(0)"}, {"P", "S(1)"}}) {
        dtensor::large(world, mesh, which);
      }
    });
    std::fflush(stdout);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  on_ranks([](dtensor::World& world, const dtensor::DeviceMesh& mesh) { dtensor::small(world, mesh); });
  return child > 0 && status == 0 ? 0 : 1;
}
