// How the library feels in use: scopes, hooks, accumulation, long runs, and what wrong use says.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

#include "dtensor/comm/world.h"
#include "dtensor/runtime/accumulate.h"
#include "dtensor/runtime/dispatch.h"
#include "dtensor/runtime/mesh_scope.h"
#include "dtensor/runtime/record.h"
#include "tests/runtime/helpers.h"

namespace dtensor {
namespace {

using testing::error_of;
using testing::numbers;

at::Tensor whole(const at::Tensor& tensor) { return DTensor(tensor).full_tensor(); }

TEST(MeshScope, SuppliesTheMesh) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    const DeviceMesh other = init_device_mesh(world, at::kCPU, {1, 2}, {"a", "b"});
    EXPECT_EQ(error_of([] {
                zeros({4, 2}, {Shard(0)});
              }),
              "[zeros] no mesh is given, and there is no scope that has one; expected a mesh among the arguments, or a "
              "MeshScope on this thread; try const MeshScope scope(mesh)");
    const MeshScope scope(mesh);
    const at::Tensor full = numbers({4, 2});
    EXPECT_EQ(distribute_tensor(full, {Shard(0)}).spec(), distribute_tensor(full, mesh, {Shard(0)}).spec());
    EXPECT_EQ(ones({4, 2}, {Shard(1)}).mesh(), mesh);
    {
      const MeshScope inner(other);
      EXPECT_EQ(ones({4, 2}, {Replicate(), Shard(1)}).mesh(), other);
    }
    EXPECT_TRUE(at::equal(whole(from_local(full, {Shard(0)})), at::cat({full, full})));
    torch::nn::Linear linear(4, 2);
    distribute_module(*linear, [](const std::string&, const at::Tensor&) -> Placements { return {Shard(0)}; });
    EXPECT_EQ(DTensor(linear->weight).mesh(), mesh);
  });
}

TEST(Hooks, RunAroundTheModule) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    torch::nn::Linear linear(4, 3);
    linear->to(at::kDouble);
    const torch::NoGradGuard no_grad;
    linear->weight.copy_(numbers({3, 4}));
    linear->bias.copy_(numbers({3}, 2));
    const at::Tensor x = numbers({5, 4}, 3);
    const at::Tensor expected = linear->forward(x);
    distribute_module(linear, mesh);
    const auto hooked = with_hooks(
        linear, [&](const at::Tensor& plain) { return distribute_tensor(plain, mesh, {Shard(0)}); },
        [](const at::Tensor& result) { return DTensor(result).full_tensor(); });
    EXPECT_TRUE(at::allclose(hooked->forward(x), expected));
    EXPECT_EQ(hooked->named_parameters().keys(), (std::vector<std::string>{"module.weight", "module.bias"}));
  });
}

// Two micro-batches, the parameter replicated, the batch cut: each gradient is a Partial.
TEST(Accumulation, ReducesOnce) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"dp"});
    const at::Tensor w = numbers({3, 4}).requires_grad_(true);
    const at::Tensor dw = distribute_tensor(w, mesh, {Replicate()});
    const auto backward = [&](double start) {
      const at::Tensor x = numbers({5, 4}, start);
      at::linear(x, w).pow(2).sum().backward();
      at::linear(distribute_tensor(x, mesh, {Shard(0)}), dw).pow(2).sum().backward();
    };
    const CommRecorder recorder;
    {
      const GradientAccumulation guard;
      backward(1);
      backward(2);
    }
    backward(3);
    EXPECT_EQ(recorder.events().size(), 0) << recorder.to_string();
    EXPECT_EQ(DTensor(dw.grad()).placements(), Placements{Replicate()});
    EXPECT_TRUE(at::allclose(whole(dw.grad()), w.grad()));
    ASSERT_EQ(recorder.events().size(), 1) << recorder.to_string();
    EXPECT_EQ(recorder.events()[0].op, "gradient");
    EXPECT_TRUE(at::allclose(whole(dw.grad()), w.grad()));
    backward(4);  // as ever
    EXPECT_TRUE(at::allclose(whole(dw.grad()), w.grad()));
  });
}

TEST(Accumulation, OneGradientOfTwoLeavesStaysTwo) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"dp"});
    const at::Tensor a = zeros({4}, mesh, {Replicate()}, at::kDouble).requires_grad_(true);
    const at::Tensor b = zeros({4}, mesh, {Replicate()}, at::kDouble).requires_grad_(true);
    const at::Tensor x = distribute_tensor(numbers({6, 4}), mesh, {Shard(0)});
    {
      const GradientAccumulation guard;
      (x * (a + b)).sum().backward();
      (x * a).sum().backward();
    }
    EXPECT_TRUE(at::allclose(whole(b.grad()), numbers({6, 4}).sum(0)));
    EXPECT_TRUE(at::allclose(whole(a.grad()), 2 * numbers({6, 4}).sum(0)));
  });
}

std::int64_t resident_kib() {
  std::ifstream file("/proc/self/statm");
  std::int64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE) / 1024;
}

TEST(LongRuns, ChangingNumbersDecideNothingAnew) {
  run_ranks(1, [](World& world) {
    const torch::NoGradGuard no_grad;
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {1}, {"x"});
    const at::Tensor x = zeros({2, 2}, mesh, {Shard(0)}, at::kDouble);
    for (int i = 0; i < 1000; ++i) x.add_(x, 0.5 + i).mul_(0.1 * i);
    const auto before = dispatch_stats();
    const std::int64_t memory = resident_kib();
    for (int i = 0; i < 500'000; ++i) x.add_(x, 0.5 + i).mul_(0.1 * i);
    EXPECT_EQ(dispatch_stats().misses, before.misses);
    EXPECT_LT(resident_kib() - memory, 4 * 1024);
  });
}

TEST(LongRuns, AHundredThousandShapesFitIntoBoundedMemory) {
  run_ranks(1, [](World& world) {
    const torch::NoGradGuard no_grad;
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {1}, {"x"});
    const auto calls = [&](std::int64_t first, std::int64_t end) {
      for (std::int64_t n = first; n < end; ++n) {
        const at::Tensor x = from_local(at::empty({n % 317 + 1, n / 317 + 1}), mesh, {Shard(0)});
        x.t();
      }
    };
    calls(1, 40'000);  // until the caches are full
    const std::int64_t memory = resident_kib();
    calls(40'000, 100'000);
    EXPECT_LT(resident_kib() - memory, 24 * 1024);
    EXPECT_LT(dispatch_stats().entries, 20'000);
  });
}

// ---- wrong use: one error, alike on all ranks, before anything is sent

TEST(WrongUse, SaysWhatIsWrong) {
  run_ranks(4, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {4}, {"x"});
    const DeviceMesh square = init_device_mesh(world, at::kCPU, {2, 2}, {"a", "b"});
    const at::Tensor a = distribute_tensor(numbers({6, 4}), mesh, {Shard(0)});
    const at::Tensor b = distribute_tensor(numbers({6, 4}), square, {Shard(0), Replicate()});
    const at::Tensor partial = from_local(numbers({6, 4}), mesh, {Partial()});
    const auto says = [](const std::function<void()>& call, const std::vector<std::string>& parts) {
      const std::string error = error_of(call);
      for (const std::string& part : parts) EXPECT_NE(error.find(part), std::string::npos) << error;
    };
    says([&] { at::add(a, b); },
         {"[aten::add.Tensor] the operands are on different meshes", "@ 4(x) : S(0)", "@ 2x2(a,b) : S(0),R", "try "});
    says(
        [&] {
          const PlainOperandsGuard strict(PlainOperands::kRefuse);
          at::add(a, numbers({6, 4}));
        },
        {"[aten::add.Tensor] a plain tensor among distributed ones", "as argument \"other\"",
         "expected distributed tensors or numbers", "try distribute_tensor(tensor, mesh, placements)"});
    says([&] { a.view({4, 6}); }, {"[aten::view]", "f64[6,4] @ 4(x) : S(0)", "try "});
    says(
        [&] {
          at::Tensor self = partial.clone();
          self.unsqueeze_(9);
        },
        {"Dimension out of range"});
    says(
        [&] {
          DTensor(a).redistribute({Shard(0), Shard(1)});
        },
        {"[redistribute] one placement per mesh dim is needed", "got S(0),S(1) on", "expected 1"});
    says([&] { DTensor(a).redistribute({Shard(5)}); }, {"dim", "5"});
    says(
        [&] {
          from_local(numbers({3, 4}), mesh, {Shard(0)}, {.shape = Dims{6, 4}});
        },
        {"[from_local] the local tensor is not this rank's part", "got [3,4]", "expected ["});
    says([&] { DTensor handle{numbers({2})}; },
         {"[DTensor] the tensor is not distributed", "f64[2] on cpu", "try distribute_tensor or from_local"});
    std::ostringstream stream;
    says([&] { torch::save(a, stream); }, {"a distributed tensor has no data of its own", "try to_local()"});
    says([&] { a.resize_({2, 2}); }, {"[aten::resize_] a distributed tensor's memory cannot be exchanged"});
    says(
        [&] {
          distribute_module(*torch::nn::Linear(2, 2), mesh,
                            [](const std::string&, const at::Tensor&) -> Placements { return {Shard(7)}; });
        },
        {"7"});
    // A result that has no gradient, where one is asked for, is libtorch's own error.
    const at::Tensor leaf = distribute_tensor(numbers({6, 4}).requires_grad_(true), mesh, {Shard(0)});
    says([&] { leaf.argmax().to(at::kDouble).backward(); }, {"does not require grad"});
    says([&] { leaf.detach().sum().backward(); }, {"does not require grad"});
    world.group()->barrier()->wait();  // and all ranks are still together
  });
}

}  // namespace
}  // namespace dtensor
