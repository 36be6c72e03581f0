// bench_random: filling 16M elements beside libtorch's own fill, one thread each, in turns; best of several rounds. The
// distributed tensor is on one rank: all that is measured is the drawing.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>

#include "dtensor/comm/world.h"
#include "dtensor/runtime/factories.h"
#include "dtensor/runtime/random.h"

namespace dtensor {
namespace {

double milliseconds(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

void run(World& world) {
  const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {1});
  constexpr std::int64_t kSize = std::int64_t{1} << 24;
  struct Case {
    const char* name;
    c10::ScalarType type;
    std::function<void(at::Tensor&)> fill;
  };
  const Case cases[] = {
      {"uniform_ f32", at::kFloat, [](at::Tensor& x) { x.uniform_(); }},
      {"normal_ f32", at::kFloat, [](at::Tensor& x) { x.normal_(); }},
      {"uniform_ f64", at::kDouble, [](at::Tensor& x) { x.uniform_(); }},
      {"normal_ f64", at::kDouble, [](at::Tensor& x) { x.normal_(); }},
      {"uniform_ bf16", at::kBFloat16, [](at::Tensor& x) { x.uniform_(); }},
      {"normal_ bf16", at::kBFloat16, [](at::Tensor& x) { x.normal_(); }},
      {"bernoulli_ bool", at::kBool, [](at::Tensor& x) { x.bernoulli_(0.1); }},
      {"random_ i64", at::kLong, [](at::Tensor& x) { x.random_(1000); }},
      {"exponential_ f32", at::kFloat, [](at::Tensor& x) { x.exponential_(); }},
  };
  std::printf("16M elements, one thread\n");
  for (const Case& c : cases) {
    at::Tensor plain = at::empty({kSize}, c.type);
    at::Tensor ours = empty({kSize}, mesh, {Shard(0)}, c.type);
    double best_plain = 1e30, best_ours = 1e30;
    for (int round = 0; round < 7; ++round) {
      best_plain = std::min(best_plain, milliseconds([&] { c.fill(plain); }));
      best_ours = std::min(best_ours, milliseconds([&] { c.fill(ours); }));
    }
    std::printf("%-18s libtorch %8.1f ms   ours %8.1f ms   %.2fx as fast\n", c.name, best_plain, best_ours,
                best_plain / best_ours);
  }
}

}  // namespace
}  // namespace dtensor

int main() {
  at::set_num_threads(1);
  dtensor::run_ranks(1, [](dtensor::World& world) { dtensor::run(world); });
}
