// Optimizers in one kernel, gradient scaling, and lists for results: each tensor where it lies.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include "dtensor/comm/world.h"
#include "dtensor/core/error.h"
#include "dtensor/runtime/clip.h"
#include "dtensor/runtime/dispatch.h"
#include "dtensor/runtime/payload.h"
#include "dtensor/runtime/record.h"
#include "dtensor/runtime/tensor.h"
#include "dtensor/testing/parts.h"
#include "dtensor/testing/plain_call.h"
#include "tests/runtime/helpers.h"

namespace dtensor {
namespace {

using testing::error_of;
using testing::numbers;
using testing::PlainCall;
using Tensors = std::vector<at::Tensor>;
const c10::IValue none;

bool has_kernel(const char* op) {
  const auto found = c10::Dispatcher::singleton().findSchema({std::string("aten::") + op, ""});
  return found && found->hasKernelForDispatchKey(c10::DispatchKey::CPU);
}

std::vector<c10::IValue> adam(const Tensors& params, const Tensors& grads, const Tensors& first,
                              const Tensors& second) {
  Tensors steps;
  for (std::size_t i = 0; i < params.size(); ++i) steps.push_back(at::full({}, 2.0, at::kFloat));
  return {params, grads, first, second, Tensors{}, steps, 0.01, 0.9, 0.99, 0.1, 1e-8, false, false, none, none};
}
void step(const std::vector<c10::IValue>& args) {
  const PlainCall call("aten::_fused_adam_", args);
  call.run(call.tensors());
}

const std::vector<std::vector<std::int64_t>> kShapes = {{5, 4}, {3}, {2, 3}};

// Parameters of several shapes, as this layout says of each.
Tensors laid(double start, const DeviceMesh& mesh, const std::vector<Placements>& placements) {
  Tensors result;
  for (std::size_t i = 0; i < kShapes.size(); ++i) {
    result.push_back(distribute_tensor(numbers(kShapes[i], start + static_cast<double>(i)), mesh, placements[i]));
  }
  return result;
}
Tensors plain(double start) {
  Tensors result;
  for (std::size_t i = 0; i < kShapes.size(); ++i)
    result.push_back(numbers(kShapes[i], start + static_cast<double>(i)));
  return result;
}

void expect_all(const Tensors& got, const Tensors& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(testing::difference(DTensor(got[i]).full_tensor(), expected[i]), "") << i;
  }
}

TEST(FusedOptimizer, RunsWhereItsParametersLie) {
  if (!has_kernel("_fused_adam_")) GTEST_SKIP() << "libtorch 1.13 has no such kernel for CPUs";
  const Tensors p = plain(0), g = plain(10), m = plain(20), v = {p[0].square(), p[1].square(), p[2].square()};
  const auto squares = [](const Tensors& of) { return Tensors{of[0].square(), of[1].square(), of[2].square()}; };
  step(adam(p, g, m, v));
  run_ranks(4, [&](World& world) {
    const at::NoGradGuard no_grad;
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2, 2}, {"dp", "tp"});
    const std::vector<Placements> as = {{Shard(0), Shard(0)}, {Replicate(), Shard(0)}, {Shard(1), Replicate()}};
    const Tensors mine = laid(0, mesh, as), grads = laid(10, mesh, as), first = laid(20, mesh, as),
                  second = squares(mine);
    {
      const CommPolicyGuard nothing_is_sent(CommPolicy::kForbid);
      step(adam(mine, grads, first, second));
    }
    expect_all(mine, p);
    expect_all(first, m);
    expect_all(second, v);
  });
}

// With a scale the gradients are written; where an infinity was found nothing is.
TEST(FusedOptimizer, ScalesBackAndSkips) {
  if (!has_kernel("_fused_adam_")) GTEST_SKIP() << "libtorch 1.13 has no such kernel for CPUs";
  for (const float found : {0.0F, 1.0F}) {
    const auto args = [&](const Tensors& p, const Tensors& g, const Tensors& m, const Tensors& v, const Tensors& most) {
      std::vector<c10::IValue> all = adam(p, g, m, v);
      all[4] = most;
      all[11] = true;
      all[13] = at::full({}, 4.0, at::kFloat);
      all[14] = at::full({}, found, at::kFloat);
      return all;
    };
    const auto squares = [](const Tensors& of) { return Tensors{of[0].square(), of[1].square(), of[2].square()}; };
    const Tensors p = plain(0), g = plain(10), m = plain(20), v = squares(p), most = squares(g);
    step(args(p, g, m, v, most));
    run_ranks(3, [&](World& world) {
      const at::NoGradGuard no_grad;
      const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3});
      const std::vector<Placements> cut = {{Shard(0)}, {Shard(0)}, {Shard(0)}};  // a rank has nothing of the last
      const std::vector<Placements> other = {{Shard(1)}, {Replicate()}, {Partial()}};
      const Tensors mine = laid(0, mesh, cut), grads = laid(10, mesh, other), first = laid(20, mesh, cut),
                    second = squares(mine), largest = squares(grads);
      step(args(mine, grads, first, second, largest));
      expect_all(mine, p);
      expect_all(grads, g);
      expect_all(first, m);
      expect_all(second, v);
      expect_all(largest, most);
      EXPECT_EQ(DTensor(grads[2]).placements(), other[2]);
    });
  }
}

// Gradients that lie elsewhere come, and stay where they are.
TEST(FusedOptimizer, BringsGradientsToParameters) {
  if (!has_kernel("_fused_adam_")) GTEST_SKIP() << "libtorch 1.13 has no such kernel for CPUs";
  const Tensors p = plain(0), g = plain(10), m = plain(20), v = {p[0].square(), p[1].square(), p[2].square()};
  step(adam(p, g, m, v));
  run_ranks(3, [&](World& world) {
    const at::NoGradGuard no_grad;
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3});
    const std::vector<Placements> cut = {{Shard(0)}, {Shard(0)}, {Shard(1)}};
    const std::vector<Placements> other = {{Shard(1)}, {Replicate()}, {Shard(0)}};
    const Tensors mine = laid(0, mesh, cut), grads = laid(10, mesh, other), first = laid(20, mesh, cut),
                  second = {mine[0].square(), mine[1].square(), mine[2].square()};
    CommRecorder recorder;
    step(adam(mine, grads, first, second));
    EXPECT_EQ(recorder.events().size(), 2U) << recorder.to_string();  // what is whole is cut without asking
    expect_all(mine, p);
    expect_all(first, m);
    expect_all(grads, g);
    EXPECT_EQ(DTensor(grads[0]).placements(), other[0]);
  });
}

TEST(FusedOptimizer, TakesParametersOfDifferentMeshesAndPlainOnes) {
  if (!has_kernel("_fused_adam_")) GTEST_SKIP() << "libtorch 1.13 has no such kernel for CPUs";
  const Tensors p = plain(0), g = plain(10), m = plain(20), v = {p[0].square(), p[1].square(), p[2].square()};
  step(adam(p, g, m, v));
  run_ranks(4, [&](World& world) {
    const at::NoGradGuard no_grad;
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2, 2}, {"a", "b"});
    const auto at = [&](double start) {
      return Tensors{distribute_tensor(numbers(kShapes[0], start), mesh, {Shard(0), Replicate()}),
                     distribute_tensor(numbers(kShapes[1], start + 1), mesh["b"], {Shard(0)}),
                     numbers(kShapes[2], start + 2)};
    };
    const Tensors mine = at(0), second = {mine[0].square(), mine[1].square(), mine[2].square()};
    step(adam(mine, at(10), at(20), second));
    expect_all({mine[0], mine[1]}, {p[0], p[1]});
    EXPECT_EQ(testing::difference(mine[2], p[2]), "");
  });
}

TEST(FusedOptimizer, RefusesWhatDoesNotBelongTogether) {
  if (!has_kernel("_fused_adam_")) GTEST_SKIP() << "libtorch 1.13 has no such kernel for CPUs";
  run_ranks(2, [&](World& world) {
    const at::NoGradGuard no_grad;
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2});
    const std::vector<Placements> cut = {{Shard(0)}, {Shard(0)}, {Shard(0)}};
    const Tensors p = laid(0, mesh, cut);
    EXPECT_EQ(
        error_of([&] { step(adam(plain(10), p, p, p)); }),
        "[aten::_fused_adam_] a plain tensor beside a distributed one; got f64[5,4]; expected tensors of one index "
        "that are all distributed, or all plain; try distribute_tensor(tensor, mesh, placements)");
    EXPECT_EQ(error_of([&] { step(adam(p, {p[0]}, p, p)); }),
              "[aten::_fused_adam_] lists of different lengths; got 1 tensors as argument \"grads\"; expected 3");
  });
}

// A rank that has found nothing must know, too, and scalers keep plain tensors.
TEST(Unscaling, FoundInfIsTheSameOnAllRanks) {
  if (!has_kernel("_amp_foreach_non_finite_check_and_unscale_"))
    GTEST_SKIP() << "libtorch 1.13 has no such kernel for CPUs";
  run_ranks(4, [&](World& world) {
    const at::NoGradGuard no_grad;
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {4});
    for (const bool bad : {false, true}) {
      at::Tensor whole = numbers({6, 2}).to(at::kFloat);
      if (bad) whole[5][1] = std::numeric_limits<float>::infinity();
      const Tensors grads = {distribute_tensor(whole, mesh, {Shard(0)}),
                             distribute_tensor(numbers({3}).to(at::kFloat), mesh, {Replicate()})};
      const at::Tensor found = at::zeros({1}, at::kFloat);
      CommRecorder recorder;
      const PlainCall call("aten::_amp_foreach_non_finite_check_and_unscale_",
                           {grads, found, at::full({1}, 0.5, at::kFloat)});
      call.run(call.tensors());
      EXPECT_EQ(found.item<float>(), bad ? 1.0F : 0.0F);
      EXPECT_EQ(recorder.events().size(), 1U) << recorder.to_string();
      EXPECT_EQ(testing::difference(DTensor(grads[0]).full_tensor(), whole * 0.5), "");
    }
  });
}

// Ranks that are not in the mesh have no gradients, and no scale to show.
TEST(Unscaling, TakesRanksOutsideTheMesh) {
  if (!has_kernel("_amp_foreach_non_finite_check_and_unscale_"))
    GTEST_SKIP() << "libtorch 1.13 has no such kernel for CPUs";
  run_ranks(3, [&](World& world) {
    const at::NoGradGuard no_grad;
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, Mesh::from_ranks({2}, {0, 2}));
    at::Tensor whole = numbers({6, 2}).to(at::kFloat);
    whole[5][1] = std::numeric_limits<float>::infinity();
    const auto replica = [&](const at::Tensor& t) { return distribute_tensor(t, mesh, {Replicate()}); };
    const Tensors grads = {distribute_tensor(whole, mesh, {Shard(0)})};
    const DTensor found = replica(at::zeros({1}, at::kFloat));
    const PlainCall call("aten::_amp_foreach_non_finite_check_and_unscale_",
                         {grads, found, replica(at::full({1}, 0.5, at::kFloat))});
    call.run(call.tensors());
    if (!mesh.contains_me()) return;
    EXPECT_EQ(found.to_local().item<float>(), 1.0F);
    EXPECT_EQ(testing::difference(DTensor(grads[0]).full_tensor(), whole * 0.5), "");
  });
}

TEST(ListOut, SplitsIntoWhatIsGiven) {
  run_ranks(2, [&](World& world) {
    const at::NoGradGuard no_grad;
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2});
    if (!c10::Dispatcher::singleton().findSchema({"aten::split_with_sizes_copy", "out"})) return;
    const at::Tensor x = numbers({5, 4});
    const Tensors outs = {distribute_tensor(at::zeros({2, 4}, at::kDouble), mesh, {Shard(1)}),
                          distribute_tensor(at::zeros({3, 4}, at::kDouble), mesh, {Shard(0)})};
    const auto split = [&](const Tensors& into) {
      const PlainCall call("aten::split_with_sizes_copy.out",
                           {distribute_tensor(x, mesh, {Shard(0)}), std::vector<std::int64_t>{2, 3}, 0, into});
      call.run(call.tensors());
    };
    split(outs);
    expect_all(outs, x.split_with_sizes({2, 3}));
    EXPECT_NE(error_of([&] { split({outs[0]}); }).find("not of their number and shapes"), std::string::npos);
  });
}

// ---- clipping

// Gradients, as they are: of parameters that lie the same way.
Tensors with_gradients(const Tensors& gradients) {
  Tensors parameters;
  for (const at::Tensor& gradient : gradients) {
    parameters.push_back(at::zeros_like(gradient).requires_grad_(true));
    parameters.back().mutable_grad() = gradient;
  }
  return parameters;
}

TEST(Clipping, IsThatOfTheWholeForAnyNorm) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto gradients = [] { return Tensors{numbers({5, 4}), numbers({2}, 3), at::zeros({3}, at::kDouble)}; };
  for (const double type : {2.0, 1.0, 0.5, 0.0, -1.0, 3.0, kInfinity, -kInfinity}) {
    const Tensors plain = with_gradients(gradients());
    const double norm = torch::nn::utils::clip_grad_norm_(plain, 0.3, type);
    run_ranks(4, [&](World& world) {
      const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {4});
      const Tensors whole = gradients();
      const Tensors mine = with_gradients({distribute_tensor(whole[0], mesh, {Shard(0)}),
                                           distribute_tensor(whole[1], mesh, {Shard(0)}),  // two ranks have nothing
                                           distribute_tensor(whole[2], mesh, {Replicate()})});
      EXPECT_NEAR(clip_grad_norm_(mine, 0.3, type), norm, 1e-9) << type;
      for (std::size_t i = 0; i < mine.size(); ++i) {
        EXPECT_EQ(testing::difference(DTensor(mine[i].grad()).full_tensor(), plain[i].grad()), "") << type;
      }
    });
  }
}

// The norm of all is of the widest type, whichever gradient is first.
TEST(Clipping, TakesGradientsOfDifferentTypesAndNone) {
  const auto gradients = [] {
    return Tensors{at::ones({4}, at::kBFloat16), at::full({4}, 1e5, at::kFloat), at::ones({4}, at::kDouble)};
  };
  const Tensors plain = with_gradients(gradients());
  const double norm = torch::nn::utils::clip_grad_norm_(plain, 1e5);
  run_ranks(2, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2});
    Tensors mine;
    for (const at::Tensor& gradient : gradients()) mine.push_back(distribute_tensor(gradient, mesh, {Shard(0)}));
    mine = with_gradients(mine);
    // The norm of the floats is a float.
    EXPECT_NEAR(clip_grad_norm_(mine, 1e5), norm, 1e-7 * norm);
    for (std::size_t i = 0; i < mine.size(); ++i) {
      EXPECT_EQ(testing::difference(DTensor(mine[i].grad()).full_tensor(), plain[i].grad()), "") << i;
    }
    EXPECT_EQ(clip_grad_norm_({}, 1), 0);
    EXPECT_EQ(clip_grad_norm_({mine[0].detach()}, 1), 0);
  });
}

// One rank alone has what is no number: all say so, and nothing was scaled.
TEST(Clipping, RefusesNormsThatAreNoNumbers) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2});
    for (const double bad : {std::nan(""), HUGE_VAL}) {
      const at::Tensor gradient = at::full({4}, 3.0, at::kDouble);
      gradient[3] = bad;
      const Tensors mine = with_gradients({distribute_tensor(gradient, mesh, {Shard(0)})});
      const std::string error = testing::error_of([&] { clip_grad_norm_(mine, 1, 2.0, true); });
      EXPECT_NE(error.find("no finite number"), std::string::npos) << error;
      EXPECT_EQ(DTensor(mine[0].grad()).full_tensor()[0].item<double>(), 3);
      EXPECT_FALSE(std::isfinite(clip_grad_norm_(mine, 1)));
    }
  });
}

}  // namespace
}  // namespace dtensor
