// Communication that is seen, explained and forbidden; factories; the API's errors.
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/poisson.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <sstream>

#include "dtensor/comm/world.h"
#include "dtensor/core/error.h"
#include "dtensor/runtime/dispatch.h"
#include "dtensor/runtime/explain.h"
#include "dtensor/runtime/factories.h"
#include "dtensor/runtime/record.h"
#include "dtensor/runtime/tensor.h"
#include "tests/runtime/helpers.h"

namespace dtensor {
namespace {

using testing::error_of;
using testing::numbers;

TEST(Record, SeesWhatOperatorsNeed) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"tp"});
    const DTensor x = distribute_tensor(numbers({4, 6}), mesh, {Shard(0)});
    const DTensor w = distribute_tensor(numbers({6, 8}), mesh, {Replicate()});
    CommRecorder recorder;
    at::mm(x, w);
    EXPECT_TRUE(recorder.events().empty()) << recorder.to_string();
    x.redistribute({Shard(1)});
    ASSERT_EQ(recorder.events().size(), 1) << recorder.to_string();
    EXPECT_EQ(recorder.events()[0].op, "redistribute");
    EXPECT_EQ(recorder.events()[0].group, "tp");
    EXPECT_EQ(recorder.events()[0].ranks, 2);
    EXPECT_EQ(recorder.events()[0].bytes, 2 * 3 * 8);
    recorder.clear();
    x.sum().item<double>();
    ASSERT_EQ(recorder.events().size(), 1) << recorder.to_string();
    EXPECT_EQ(recorder.events()[0].op, "aten::_local_scalar_dense");
    EXPECT_EQ(recorder.bytes(), 8);
  });
}

// A linear layer on a sequence-sharded input, forward and backward, moves nothing but the weight's gradient.
TEST(Record, ASequenceShardedLinearCommunicatesNothing) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"tp"});
    const DTensor x = distribute_tensor(numbers({3, 5, 4}).requires_grad_(true), mesh, {Shard(1)});
    const DTensor w = distribute_tensor(numbers({7, 4}), mesh, {Replicate()});
    CommRecorder recorder;
    const at::Tensor y = at::linear(x, w);
    EXPECT_EQ(DTensor(y).placements(), Placements{Shard(1)});
    y.backward(at::ones_like(y));
    EXPECT_TRUE(recorder.events().empty()) << recorder.to_string();
    EXPECT_EQ(DTensor(x.grad()).placements(), Placements{Shard(1)});
  });
}

TEST(Record, ForbidsWhatWasNotAskedFor) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"tp"});
    const DTensor x = distribute_tensor(numbers({4, 6}), mesh, {Shard(0)});
    const DTensor parts = from_local(numbers({4}), mesh, {Partial()});
    const CommPolicyGuard guard(CommPolicy::kForbid);
    const std::string error = error_of([&] { parts.relu(); });
    EXPECT_EQ(
        error.find("[aten::relu] communication that the policy does not allow; got from f64[4] @ 2(tp) : P(sum) to"), 0)
        << error;
    EXPECT_EQ(error_of([&] { x.relu(); }), "no error");
    EXPECT_EQ(error_of([&] { x.full_tensor(); }), "no error") << "it was asked for";
  });
}

TEST(Explain, SaysTheRuleTheWayAndTheOthers) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"tp"});
    const DTensor x = distribute_tensor(numbers({4, 6}), mesh, {Shard(0)});
    const DTensor w = distribute_tensor(numbers({6, 8}), mesh, {Shard(0)});
    const std::string text = explain("mm", at::Tensor(x), at::Tensor(w));
    EXPECT_NE(text.find("operand  f64[4,6] @ 2(tp) : S(0)\n"), std::string::npos) << text;
    EXPECT_NE(text.find("rule     aten::mm: mk,kn->mn"), std::string::npos) << text;
    EXPECT_NE(text.find("\nchosen   "), std::string::npos) << text;
    EXPECT_NE(text.find("\nnot by   "), std::string::npos) << text;
    EXPECT_EQ(error_of([] { explain("no_such_thing"); }),
              "[explain] there is no such operator; got aten::no_such_thing; expected its name with its overload, "
              "\"aten::add.Tensor\"");
  });
}

TEST(Factories, MakeEveryRanksPart) {
  run_ranks(3, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3}, {"x"});
    EXPECT_TRUE(at::equal(ones({5, 2}, mesh, {Shard(0)}).full_tensor(), at::ones({5, 2})));
    EXPECT_TRUE(at::equal(full({5}, 3, mesh, {Partial()}).full_tensor(), at::full({5}, 3.0)));
    EXPECT_TRUE(at::equal(full({5}, 3, mesh, {Partial(ReduceOp::kMin)}).full_tensor(), at::full({5}, 3.0)));
    const DTensor z = zeros({4}, mesh, {Replicate()}, at::TensorOptions().dtype(at::kLong));
    EXPECT_TRUE(at::equal(z.full_tensor(), at::zeros({4}, at::kLong)));
    EXPECT_TRUE(empty({4}, mesh, {Replicate()}, at::TensorOptions().requires_grad(true)).requires_grad());
  });
}

TEST(FromLocal, ChecksThatTheRanksAgree) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    const auto uneven = at::ones({world.rank() == 0 ? 3 : 2, 4});
    EXPECT_EQ(from_local(uneven, mesh, {Shard(0)}, {.shape = Dims{5, 4}}).sizes(), at::IntArrayRef({5, 4}));
    EXPECT_EQ(
        error_of([&] { from_local(uneven, mesh, {Shard(0)}, {.check = true}); }),
        "[from_local] the ranks disagree about the tensor; got another shape, type, placement or requires_grad on "
        "rank 1 than on rank 0; expected the same global shape, type, placements and requires_grad everywhere");
    const auto leaf = at::ones({2, 4}).requires_grad_(world.rank() == 0);
    EXPECT_NE(error_of([&] { from_local(leaf, mesh, {Shard(0)}, {.check = true}); }).find("requires_grad on rank 1"),
              std::string::npos);
    const auto different = at::full({2}, static_cast<double>(world.rank()));
    EXPECT_EQ(
        error_of([&] { from_local(different, mesh, {Replicate()}, {.check = true}); }),
        "[from_local] replicas hold different values; got ranks 0 and 1 with f32[2] @ 2(x) : R; expected the same "
        "bits where the mesh replicates");
    EXPECT_EQ(error_of([&] {
                from_local(different, mesh, {Replicate(), Replicate()});
              }),
              "[from_local] one placement per mesh dim is needed; got R,R on 2(x); expected 1");
  });
}

TEST(Printing, SaysTheSpecAndThePart) {
  run_ranks(1, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {1}, {"x"});
    std::ostringstream out;
    out << distribute_tensor(at::ones({2}), mesh, {Shard(0)});
    EXPECT_EQ(out.str(), "DTensor f32[2] @ 1(x) : S(0), on rank 0\n 1\n 1\n[ CPUFloatType{2} ]");
    EXPECT_EQ(error_of([] { DTensor(at::ones({2})); }),
              "[DTensor] the tensor is not distributed; got f32[2] on cpu; try distribute_tensor or from_local");
  });
}

TEST(NoRule, IsRefusedWhenAskedTo) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    const DTensor x = distribute_tensor(numbers({4, 4}), mesh, {Shard(0)});
    const NoRuleGuard guard(NoRule::kRefuse);
    EXPECT_EQ(error_of([&] { at::bincount(x.to(at::kLong)); }).find("[aten::bincount]"), 0);
    EXPECT_NE(error_of([&] { at::bincount(x.to(at::kLong)); }).find("has no rule"), std::string::npos);
    // Its ranks would draw different numbers.
    EXPECT_NE(error_of([&] { at::poisson(x); }).find("random operator without a rule"), std::string::npos);
  });
}

}  // namespace
}  // namespace dtensor
