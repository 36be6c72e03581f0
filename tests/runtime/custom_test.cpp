// Ways out: functions on local parts, and rules for the program's own operators.
#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/torch.h>

#include "dtensor/comm/world.h"
#include "dtensor/core/rule.h"
#include "dtensor/runtime/local_map.h"
#include "dtensor/runtime/record.h"
#include "dtensor/runtime/tensor.h"
#include "tests/runtime/helpers.h"

namespace dtensor {
namespace {

using testing::error_of;
using testing::numbers;

at::Tensor scaled_mm(const at::Tensor& a, const at::Tensor& b, double scale) { return at::mm(a, b).mul(scale); }

// An operator of the program, with a kernel for CPUs only.
TORCH_LIBRARY(dtensor_test, library) { library.def("scaled_mm(Tensor a, Tensor b, float scale) -> Tensor"); }
TORCH_LIBRARY_IMPL(dtensor_test, CPU, library) { library.impl("scaled_mm", scaled_mm); }
TORCH_LIBRARY_IMPL(dtensor_test, Meta, library) { library.impl("scaled_mm", scaled_mm); }

at::Tensor call_scaled_mm(const at::Tensor& a, const at::Tensor& b, double scale) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("dtensor_test::scaled_mm", "")
                             .typed<at::Tensor(const at::Tensor&, const at::Tensor&, double)>();
  return op.call(a, b, scale);
}

TEST(RegisterRule, MakesAnOperatorOfTheProgramDistributed) {
  register_rule("dtensor_test::scaled_mm", "mk,kn->mn", "linear(0) linear(1)");
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    const at::Tensor a = numbers({5, 4}), b = numbers({4, 3}, 0.8);
    const at::NoGradGuard no_grad;
    const DTensor rows = distribute_tensor(a, mesh, {Shard(0)}), whole = distribute_tensor(b, mesh, {Replicate()});
    CommRecorder recorder;
    const DTensor y = call_scaled_mm(rows, whole, 2.5);
    EXPECT_EQ(y.placements(), Placements{Shard(0)});
    EXPECT_TRUE(recorder.events().empty()) << recorder.to_string();
    EXPECT_TRUE(at::allclose(y.full_tensor(), scaled_mm(a, b, 2.5)));
    const DTensor inner = distribute_tensor(a, mesh, {Shard(1)}), outer = distribute_tensor(b, mesh, {Shard(0)});
    const DTensor z = call_scaled_mm(inner, outer, -1.5);
    EXPECT_EQ(z.placements(), Placements{Partial()});
    EXPECT_TRUE(at::allclose(z.full_tensor(), scaled_mm(a, b, -1.5)));
  });
  EXPECT_EQ(error_of([] { register_rule("dtensor_test::scaled_mm", "mk,kn->mn"); }),
            "[register_rule] the operator was given another rule; got dtensor_test::scaled_mm: mk,kn->mn; expected "
            "dtensor_test::scaled_mm: mk,kn->mn linear(0) linear(1)");
}

TEST(LocalMap, RunsOnThePartsAndIsDifferentiable) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    at::Tensor full = numbers({5, 4}).requires_grad_(true), weight = numbers({4}, 0.8).requires_grad_(true);
    const DTensor x = distribute_tensor(full, mesh, {Shard(0)}), w = distribute_tensor(weight, mesh, {Replicate()});
    const auto function = [](const std::vector<at::Tensor>& t) { return (t[0] * t[1]).exp(); };
    const DTensor y =
        local_map(function, {x, w}, {Shard(0)}, {.in_gradients = {{Shard(0)}, {Partial()}}, .shape = Dims{5, 4}});
    const at::Tensor expected = function({full, weight});
    EXPECT_TRUE(at::allclose(y.full_tensor(), expected));
    y.sum().backward();
    expected.sum().backward();
    EXPECT_TRUE(at::allclose(DTensor(x.grad()).full_tensor(), full.grad()));
    EXPECT_TRUE(at::allclose(DTensor(w.grad()).full_tensor(), weight.grad()));
    EXPECT_EQ(DTensor(w.grad()).placements(), Placements{Replicate()});
    // Operands are brought where the function wants them.
    const DTensor z = local_map([](const auto& t) { return t[0].sum(1); }, {x}, {Partial()}, {.in = {{Shard(1)}}});
    EXPECT_TRUE(at::allclose(z.full_tensor().detach(), full.detach().sum(1)));
    EXPECT_EQ(error_of([&] {
                local_map(function, {x, w}, {Shard(0)}, {.in = {{Shard(0)}}});
              }),
              "[local_map] placements must be given for every operand or for none; got 1; expected 2");
  });
}

}  // namespace
}  // namespace dtensor
