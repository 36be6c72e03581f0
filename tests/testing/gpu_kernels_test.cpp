// Kernels that only GPUs have: attention and norms forward and backward, on parts and as a whole. One rank, which
// decides as many would.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torch/version.h>

#include <algorithm>
#include <functional>
#include <iostream>
#include <numeric>
#include <optional>

#include "dtensor/comm/world.h"
#include "dtensor/runtime/dispatch.h"
#include "dtensor/runtime/record.h"
#include "dtensor/runtime/tensor.h"
#include "dtensor/testing/parts.h"
#include "dtensor/testing/plain_call.h"
#include "tests/testing/calls.h"

namespace dtensor::testing {
namespace {

using Tensors = std::vector<at::Tensor>;
using Args = std::vector<c10::IValue>;
const c10::IValue none;

bool exists(const std::string& op) { return c10::Dispatcher::singleton().findSchema({op, ""}).has_value(); }

at::Tensor halves(std::vector<std::int64_t> sizes, double start) {
  return floats(std::move(sizes), start).sin().to(at::kCUDA, at::kHalf);
}

// In the order of memory that it has, on which kernels count: distribute_tensor lays out by rows.
at::Tensor placed(const at::Tensor& tensor, const DeviceMesh& mesh, std::optional<std::int64_t> cut) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(tensor.dim())), back(order.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int64_t a, std::int64_t b) { return tensor.stride(a) > tensor.stride(b); });
  for (std::size_t i = 0; i < order.size(); ++i)
    back[static_cast<std::size_t>(order[i])] = static_cast<std::int64_t>(i);
  const Placement where = cut ? Placement(Shard(back[static_cast<std::size_t>(*cut)])) : Placement(Replicate());
  return distribute_tensor(tensor.permute(order), mesh, {where}).permute(back);
}

// Each operand of four dims laid out so, the others replicated; nothing may be sent, or run without a rule.
Tensors distributed(const std::string& op, const Args& args, const DeviceMesh& mesh, std::int64_t dim) {
  const PlainCall call(op, args);
  Tensors operands;
  for (const at::Tensor& tensor : call.tensors()) {
    operands.push_back(placed(tensor, mesh, tensor.dim() >= 3 ? std::optional(dim) : std::nullopt));
  }
  const NoRuleGuard strict(NoRule::kRefuse);
  const CommPolicyGuard nothing_is_sent(CommPolicy::kForbid);
  return call.run(operands);
}

Tensors plain(const std::string& op, const Args& args) {
  const PlainCall call(op, args);
  return call.run(call.tensors());
}

// The first ones that are floating: the others are places for states of random numbers.
void expect_alike(const Tensors& got, const Tensors& expected, std::size_t count, const std::string& op) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t k = 0; k < count; ++k) {
    if (!expected[k].defined()) continue;
    ASSERT_TRUE(is_dtensor(got[k])) << op << " " << k;
    const at::Tensor whole = DTensor(got[k]).full_tensor();
    EXPECT_TRUE(at::allclose(whole.to(at::kFloat), expected[k].to(at::kFloat), 1e-3, 1e-3)) << op << " " << k;
  }
}

struct Attention {
  std::string op;
  Args forward;
  // (gradient, forward's arguments, its results)
  std::function<Args(const at::Tensor&, const Args&, const Tensors&)> backward;
};

c10::IValue number(const at::Tensor& value) { return value.item<std::int64_t>(); }

std::vector<Attention> kernels(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal) {
  return {
      {"aten::_scaled_dot_product_flash_attention",
       {q, k, v, 0.0, causal, false, none},
       [causal](const at::Tensor& g, const Args& f, const Tensors& r) {
         return Args{g,   f[0],   f[1], f[2], r[0], r[1], r[2], r[3], number(r[4]), number(r[5]),
                     0.0, causal, r[6], r[7], none};
       }},
      {"aten::_scaled_dot_product_efficient_attention",
       {q, k, v, none, true, 0.0, causal, none},
       [causal](const at::Tensor& g, const Args& f, const Tensors& r) {
         return Args{g,
                     f[0],
                     f[1],
                     f[2],
                     at::Tensor(),
                     r[0],
                     r[1],
                     r[2],
                     r[3],
                     0.0,
                     c10::List<bool>({true, true, true, false}),
                     causal,
                     none};
       }},
      {"aten::_scaled_dot_product_cudnn_attention",
       {q, k, v, none, true, 0.0, causal, false, none},
       [causal](const at::Tensor& g, const Args& f, const Tensors& r) {
         return Args{g,    f[0], f[1],         f[2],         r[0], r[1],   r[6], r[7], at::Tensor(),
                     r[2], r[3], number(r[4]), number(r[5]), 0.0,  causal, none};
       }},
  };
}

TEST(GpuAttention, RunsOnBatchesAndHeads) {
  if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no GPU";
  const at::NoGradGuard no_grad;
  const at::Tensor q = halves({4, 2, 64, 32}, 0), k = halves({4, 2, 96, 32}, 1), v = halves({4, 2, 96, 32}, 2);
  for (const bool causal : {false, true}) {
    const at::Tensor keys = causal ? k.slice(2, 0, 64).contiguous() : k;
    const at::Tensor values = causal ? v.slice(2, 0, 64).contiguous() : v;
    for (const Attention& kernel : kernels(q, keys, values, causal)) {
      if (!exists(kernel.op)) continue;
      Tensors expected;
      try {
        expected = plain(kernel.op, kernel.forward);
      } catch (const std::exception& error) {
        std::cout << kernel.op << " does not run on this GPU: " << std::string(error.what()).substr(0, 200) << '\n';
        continue;
      }
      const Args backward = kernel.backward(halves({4, 2, 64, 32}, 3), kernel.forward, expected);
      const Tensors gradients = plain(kernel.op + "_backward", backward);
      run_ranks(1, [&](World& world) {
        const at::NoGradGuard none_here;
        const DeviceMesh mesh = init_device_mesh(world, at::kCUDA, {1});
        for (const std::int64_t dim : {0, 1}) {
          const Tensors got = distributed(kernel.op, kernel.forward, mesh, dim);
          expect_alike(got, expected, 2, kernel.op);
          EXPECT_EQ(DTensor(got[0]).placements(), Placements{Shard(dim)}) << kernel.op;
          EXPECT_EQ(DTensor(got[1]).placements(), Placements{Shard(dim)}) << kernel.op;
          const Tensors mine = distributed(kernel.op + "_backward", backward, mesh, dim);
          expect_alike(mine, gradients, 3, kernel.op + "_backward");
          EXPECT_EQ(DTensor(mine[0]).placements(), Placements{Shard(dim)}) << kernel.op;
        }
      });
    }
  }
}

// A maker's kernels for batch norms and fused RMS norms: by their rows, and by their algorithms.
TEST(GpuNorms, RunOnBatchesAndOverCutDims) {
  if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no GPU";
  const auto numbers = [](std::vector<std::int64_t> sizes, double start) {
    return floats(std::move(sizes), start).sin().to(at::kCUDA, at::kFloat);
  };
  using Run = std::function<at::Tensor(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& mean,
                                       const at::Tensor& variance)>;
  const std::vector<std::pair<std::string, Run>> runs = {
    {"batch norm in training",
     [](const auto& x, const auto& weight, const auto& mean, const auto& variance) {
       return at::batch_norm(x, weight, weight, mean, variance, true, 0.1, 1e-5, true);
     }},
    {"batch norm in use",
     [](const auto& x, const auto& weight, const auto& mean, const auto& variance) {
       return at::batch_norm(x, weight, weight, mean, variance, false, 0.1, 1e-5, true);
     }},
    {"group norm",
     [](const auto& x, const auto& weight, const auto&, const auto&) { return at::group_norm(x, 2, weight, weight); }},
#if TORCH_VERSION_MAJOR >= 2 && TORCH_VERSION_MINOR >= 9
    {"rms norm",
     [](const auto& x, const auto& weight, const auto&, const auto&) { return at::rms_norm(x, {8}, weight); }},
#endif
  };
  for (const auto& [name, run] : runs) {
    const at::Tensor x = numbers({6, 8, 4, 8}, 0), weight = numbers({8}, 1);
    const auto whole = [&](const auto& lay) {
      const at::Tensor input = lay(x.clone()).requires_grad_(true), scale = lay(weight.clone()).requires_grad_(true);
      const at::Tensor mean = lay(numbers({8}, 2)), variance = lay(numbers({8}, 3).abs().add(0.5));
      const at::Tensor y = run(input, scale, mean, variance);
      (y * y * y).sum().backward();
      return Tensors{y.detach(), input.grad(), scale.grad(), mean, variance};
    };
    const Tensors expected = whole([](const at::Tensor& t) { return t; });
    run_ranks(1, [&](World& world) {
      const DeviceMesh mesh = init_device_mesh(world, at::kCUDA, {1});
      for (const bool algorithms : {false, true}) {
        for (const std::int64_t dim : {0, 1, 2, 3}) {
          const DecideGuard guard({.algorithms_first = algorithms});
          const NoRuleGuard strict(NoRule::kRefuse);
          const Tensors got = whole([&](const at::Tensor& t) -> at::Tensor {
            return distribute_tensor(t, mesh, {t.dim() > 1 ? Placement(Shard(dim)) : Placement(Replicate())});
          });
          SCOPED_TRACE(name + " S(" + std::to_string(dim) + ")" + (algorithms ? " by its algorithm" : ""));
          expect_alike(got, expected, got.size(), name);
        }
      }
    });
  }
}

// What libtorch chooses for scaled_dot_product_attention, with gradients.
TEST(GpuAttention, ThroughAutograd) {
  if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no GPU";
  if (!exists("aten::scaled_dot_product_attention")) GTEST_SKIP() << "this libtorch has none";
  const Tensors whole = {halves({4, 2, 64, 32}, 0), halves({4, 2, 64, 32}, 1), halves({4, 2, 64, 32}, 2)};
  const auto attend = [](Tensors inputs) {
    for (at::Tensor& input : inputs) input = input.detach().requires_grad_(true);
    const PlainCall call("aten::scaled_dot_product_attention", {inputs[0], inputs[1], inputs[2]});
    const at::Tensor out = call.run(inputs)[0];
    out.square().sum().backward();
    return Tensors{out.detach(), inputs[0].grad(), inputs[1].grad(), inputs[2].grad()};
  };
  const Tensors expected = attend(whole);
  run_ranks(1, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCUDA, {1});
    Tensors mine;
    for (const at::Tensor& tensor : whole) mine.push_back(distribute_tensor(tensor, mesh, {Shard(1)}));
    const NoRuleGuard strict(NoRule::kRefuse);
    expect_alike(attend(mine), expected, 4, "scaled_dot_product_attention");
  });
}

// Eight-bit products, with scales of one element and of rows.
TEST(GpuProducts, OfScaledEights) {
  if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no GPU";
#if TORCH_VERSION_MAJOR >= 2
  const at::NoGradGuard no_grad;
  const at::Tensor a = floats({32, 64}).sin().to(at::kCUDA, at::kFloat8_e4m3fn);
  const at::Tensor b = floats({48, 64}).sin().to(at::kCUDA, at::kFloat8_e4m3fn).t();
  const auto options = at::TensorOptions().device(at::kCUDA).dtype(at::kFloat);
  for (const bool rows : {false, true}) {
    const Args args = {a,
                       b,
                       at::full(rows ? at::IntArrayRef{32, 1} : at::IntArrayRef{}, 0.5, options),
                       at::full(rows ? at::IntArrayRef{1, 48} : at::IntArrayRef{}, 2.0, options),
                       none,
                       none,
                       at::kBFloat16,
                       false};
    Tensors expected;
    try {
      expected = plain("aten::_scaled_mm", args);
    } catch (const std::exception& error) {
      std::cout << "_scaled_mm does not run on this GPU: " << std::string(error.what()).substr(0, 200) << '\n';
      continue;
    }
    run_ranks(1, [&](World& world) {
      const at::NoGradGuard none_here;
      const DeviceMesh mesh = init_device_mesh(world, at::kCUDA, {1});
      const PlainCall call("aten::_scaled_mm", args);
      Tensors operands;
      for (const at::Tensor& tensor : call.tensors()) operands.push_back(placed(tensor, mesh, std::nullopt));
      operands[0] = distribute_tensor(a, mesh, {Shard(0)});
      if (rows) operands[2] = distribute_tensor(call.tensors()[2], mesh, {Shard(0)});
      const NoRuleGuard strict(NoRule::kRefuse);
      const CommPolicyGuard nothing_is_sent(CommPolicy::kForbid);
      const Tensors got = call.run(operands);
      expect_alike(got, expected, 1, "_scaled_mm");
      EXPECT_EQ(DTensor(got[0]).placements(), Placements{Shard(0)});
    });
  }
#endif
}

}  // namespace
}  // namespace dtensor::testing
