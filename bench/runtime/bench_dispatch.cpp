// bench_dispatch: what a call on a distributed tensor costs beside the same call on a plain one, on one rank. Best of
// several rounds, plain and distributed taken in turn, since other programs only ever add to it.
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>

#include "dtensor/comm/world.h"
#include "dtensor/runtime/dispatch.h"
#include "dtensor/runtime/module.h"
#include "dtensor/runtime/tensor.h"

namespace dtensor {
namespace {

double once(std::int64_t calls, const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  for (std::int64_t i = 0; i < calls; ++i) call();
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() /
         static_cast<double>(calls);
}

void compare(const char* name, std::int64_t calls, const std::function<void()>& plain,
             const std::function<void()>& ours) {
  plain();
  ours();
  double best_plain = 1e30, best_ours = 1e30;
  for (int round = 0; round < 10; ++round) {
    best_plain = std::min(best_plain, once(calls, plain));
    best_ours = std::min(best_ours, once(calls, ours));
  }
  std::printf("%-22s plain %10.0f ns   distributed %10.0f ns   over it %8.0f ns   %.2fx\n", name, best_plain, best_ours,
              best_ours - best_plain, best_ours / best_plain);
}

torch::nn::Sequential mlp() {
  torch::nn::Sequential net;
  for (int i = 0; i < 8; ++i) {
    net->push_back(torch::nn::Linear(64, 64));
    net->push_back(torch::nn::ReLU());
  }
  return net;
}

void step(torch::nn::Sequential& net, torch::optim::AdamW& optimizer, const at::Tensor& x) {
  optimizer.zero_grad();
  net->forward(x).pow(2).mean().backward();
  optimizer.step();
}

// 24 blocks of LayerNorm, Linear and GELU: a step that is long enough to hide nothing and short enough to show it all.
void on_gpu(World& world) {
  const DeviceMesh mesh = init_device_mesh(world, at::kCUDA, {1}, {"x"});
  const auto blocks = [] {
    torch::nn::Sequential net;
    for (int i = 0; i < 24; ++i) {
      net->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({1024})));
      net->push_back(torch::nn::Linear(1024, 1024));
      net->push_back(torch::nn::GELU());
    }
    net->to(at::kCUDA);
    return net;
  };
  torch::nn::Sequential plain = blocks(), ours = blocks();
  distribute_module(ours, mesh);
  torch::optim::AdamW plain_steps(plain->parameters(), torch::optim::AdamWOptions(1e-3));
  torch::optim::AdamW our_steps(ours->parameters(), torch::optim::AdamWOptions(1e-3));
  const at::Tensor x = torch::randn({2048, 1024}, at::kCUDA);
  const at::Tensor dx = distribute_tensor(x, mesh, {Shard(0)});
  const auto timed = [&](torch::nn::Sequential& net, torch::optim::AdamW& optimizer, const at::Tensor& input) {
    step(net, optimizer, input);
    torch::cuda::synchronize();
  };
  compare(
      "24 blocks, one GPU", 20, [&] { timed(plain, plain_steps, x); }, [&] { timed(ours, our_steps, dx); });
}

void run(World& world) {
  const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {1}, {"x"});
  const Placements rows = {Shard(0)};
  {
    const torch::NoGradGuard no_grad;
    const at::Tensor a = torch::randn({8, 8}), b = torch::randn({8, 8});
    const at::Tensor da = distribute_tensor(a, mesh, rows), db = distribute_tensor(b, mesh, {Replicate()}),
                     dc = distribute_tensor(b, mesh, rows);
    compare(
        "add 8x8", 20'000, [&] { at::add(a, b); }, [&] { at::add(da, dc); });
    compare(
        "mm 8x8", 20'000, [&] { at::mm(a, b); }, [&] { at::mm(da, db); });
    compare(
        "t 8x8", 20'000, [&] { a.t(); }, [&] { da.t(); });
    compare(
        "add_ 8x8", 20'000, [&] { a.add_(b); }, [&] { da.add_(dc); });
    compare(
        "view 8x8", 20'000,
        [&] {
          a.view({4, 2, 8});
        },
        [&] {
          da.view({4, 2, 8});
        });
    compare(
        "sum 8x8", 20'000, [&] { a.sum(); }, [&] { da.sum(); });
    const std::vector<at::Tensor> plain(8, a), ours(8, da);
    compare(
        "cat of 8, dim 1", 10'000, [&] { at::cat(plain, 1); }, [&] { at::cat(ours, 1); });
    compare(
        "from_local", 20'000, [] {}, [&] { from_local(a, mesh, rows); });
    const DTensor handle(da);
    compare(
        "to_local", 20'000, [] {}, [&] { handle.to_local(); });
    std::int64_t n = 8;
    compare(
        "new shape: add", 200, [] {},
        [&] {
          ++n;
          const at::Tensor local = at::empty({n, 3});
          const at::Tensor x = from_local(local, mesh, rows);
          at::add(x, x);
        });
  }
  torch::nn::Sequential plain = mlp(), ours = mlp();
  distribute_module(ours, mesh);
  torch::optim::AdamW plain_steps(plain->parameters(), torch::optim::AdamWOptions(1e-3));
  torch::optim::AdamW our_steps(ours->parameters(), torch::optim::AdamWOptions(1e-3));
  const at::Tensor x = torch::randn({32, 64});
  const at::Tensor dx = distribute_tensor(x, mesh, rows);
  step(plain, plain_steps, x);
  step(ours, our_steps, dx);
  compare(
      "AdamW step, 16 params", 50, [&] { plain_steps.step(); }, [&] { our_steps.step(); });
  compare(
      "MLP training step", 50, [&] { step(plain, plain_steps, x); }, [&] { step(ours, our_steps, dx); });
  if (at::hasCUDA()) on_gpu(world);
  const DispatchStats stats = dispatch_stats();
  std::printf("decisions: %zu kept, %llu found, %llu made\n", stats.entries,
              static_cast<unsigned long long>(stats.hits), static_cast<unsigned long long>(stats.misses));
}

}  // namespace
}  // namespace dtensor

int main() {
  torch::set_num_threads(1);
  std::printf("libtorch %s\n", TORCH_VERSION);
  dtensor::run_ranks(1, dtensor::run);
}
