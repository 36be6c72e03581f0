// Plain tensors beside distributed ones, as ordinary programs have them: each case against the plain run.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dtensor/comm/world.h"
#include "dtensor/runtime/dispatch.h"
#include "dtensor/runtime/factories.h"
#include "dtensor/runtime/record.h"
#include "dtensor/runtime/tensor.h"
#include "tests/runtime/helpers.h"

namespace dtensor {
namespace {

using testing::error_of;
using testing::numbers;
using torch::indexing::Slice;
namespace F = torch::nn::functional;

at::Tensor whole(const at::Tensor& tensor) { return is_dtensor(tensor) ? DTensor(tensor).full_tensor() : tensor; }

using Program = std::function<at::Tensor(const at::Tensor& x)>;  // x: f64[6,4]

// On several meshes and layouts, with the gradient of x.
void expect_as_plain(const Program& program) {
  at::Tensor full = numbers({6, 4}).requires_grad_();
  const at::Tensor expected = program(full);
  at::Tensor gradient;
  if (expected.requires_grad()) {
    expected.pow(2).sum().backward();
    gradient = full.grad();
  }
  for (const std::int64_t ranks : {1, 2, 3, 4}) {
    for (const Placement& placement : {Placement(Replicate()), Placement(Shard(0)), Placement(Shard(1))}) {
      run_ranks(ranks, [&](World& world) {
        const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {ranks}, {"x"});
        const at::Tensor x = distribute_tensor(full.detach(), mesh, {placement}).requires_grad_();
        const at::Tensor result = program(x);
        EXPECT_TRUE(at::allclose(whole(result).detach(), expected.detach(), 1e-12, 1e-12, true))
            << ranks << " ranks, " << to_string(Placements{placement}) << '\n'
            << whole(result) << expected;
        if (!gradient.defined()) return;
        result.pow(2).sum().backward();
        ASSERT_TRUE(x.grad().defined());
        EXPECT_TRUE(at::allclose(whole(x.grad()), gradient, 1e-12, 1e-12, true)) << ranks << " ranks";
      });
    }
  }
}

TEST(PlainOperand, IsAReplicaInPointwiseOperators) {
  expect_as_plain([](const at::Tensor& x) { return x + torch::arange(4); });
  expect_as_plain([](const at::Tensor& x) { return numbers({6, 4}, 3) * x; });
  expect_as_plain([](const at::Tensor& x) { return torch::tensor({0.5}, at::kDouble) * x; });
  expect_as_plain([](const at::Tensor& x) { return torch::where(torch::arange(4) > 1, x, numbers({6, 4}, 2)); });
}

TEST(PlainOperand, MasksAndPositions) {
  expect_as_plain([](const at::Tensor& x) {
    const at::Tensor scores = x.mm(x.t());
    const at::Tensor mask = torch::triu(torch::ones({6, 6}, at::kBool), 1);
    return scores.masked_fill(mask, -std::numeric_limits<double>::infinity()).softmax(-1);
  });
  expect_as_plain([](const at::Tensor& x) { return F::embedding(torch::arange(5), x); });
  expect_as_plain([](const at::Tensor& x) { return x.index({torch::tensor({5, 0, 3})}); });
  expect_as_plain([](const at::Tensor& x) { return x.index_select(0, torch::tensor({1, 1, 4})); });
  expect_as_plain([](const at::Tensor& x) { return x.gather(1, torch::tensor({{0, 3}, {1, 2}, {2, 2}})); });
}

TEST(PlainOperand, LabelsAndWeights) {
  expect_as_plain([](const at::Tensor& x) { return F::cross_entropy(x, torch::tensor({0, 1, 2, 3, 0, 1})); });
  expect_as_plain([](const at::Tensor& x) {
    return F::cross_entropy(x, torch::arange(6).remainder(4),
                            F::CrossEntropyFuncOptions().weight(numbers({4}, 2).abs()));
  });
  expect_as_plain([](const at::Tensor& x) {
    return F::binary_cross_entropy_with_logits(x, torch::ones({6, 4}, at::kDouble));
  });
  expect_as_plain([](const at::Tensor& x) { return F::mse_loss(x, numbers({6, 4}, 5)); });
}

TEST(PlainOperand, Matrices) {
  expect_as_plain([](const at::Tensor& x) { return x.mm(torch::eye(4, at::kDouble)); });
  expect_as_plain([](const at::Tensor& x) { return numbers({3, 6}).mm(x); });
  expect_as_plain([](const at::Tensor& x) { return torch::cat({x, numbers({2, 4}, 4)}); });
  expect_as_plain([](const at::Tensor& x) {
    return F::conv1d(x.unsqueeze(1), numbers({2, 1, 3}), F::Conv1dFuncOptions().padding(1));
  });
}

// It stays plain, and holds the full result on every rank.
TEST(PlainOperand, IsWrittenInPlace) {
  const auto expect_plain = [](const Program& program) {
    expect_as_plain([&](const at::Tensor& x) {
      at::Tensor result = program(x);
      EXPECT_FALSE(is_dtensor(result));
      return result;
    });
  };
  expect_plain([](const at::Tensor& x) {
    const torch::NoGradGuard no_grad;
    return torch::zeros({3, 4}, at::kDouble).scatter_add_(0, torch::arange(24).view({6, 4}).remainder(3), x);
  });
  expect_plain([](const at::Tensor& x) {
    const torch::NoGradGuard no_grad;
    return torch::zeros({2, 4}, x.options()).index_add_(0, torch::tensor({0, 1, 1, 0, 1, 0}), x);
  });
  expect_plain([](const at::Tensor& x) {
    const torch::NoGradGuard no_grad;
    at::Tensor sum = numbers({6, 4}, 7);
    sum += x;
    sum.mul_(x);
    return sum;
  });
  expect_plain([](const at::Tensor& x) {
    const torch::NoGradGuard no_grad;
    at::Tensor copy = torch::empty({6, 4}, at::kDouble);
    copy.copy_(x);
    return copy;
  });
  expect_plain([](const at::Tensor& x) {
    const torch::NoGradGuard no_grad;
    at::Tensor out = torch::empty({6, 6}, at::kDouble);
    torch::mm_out(out, x, x.t());
    return out;
  });
  // Under autograd.
  expect_plain([](const at::Tensor& x) {
    at::Tensor sum = torch::zeros({6, 4}, at::kDouble);
    sum += x * 2;
    return sum;
  });
}

// A write is a gather or a reduction: recorded, and forbidden where communication is.
TEST(PlainOperand, CommunicationIsSeen) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    const at::Tensor x = distribute_tensor(numbers({6, 4}), mesh, {Shard(0)});
    at::Tensor sum = torch::zeros({6, 4}, at::kDouble);
    CommRecorder recorder;
    sum += x;
    EXPECT_GT(recorder.bytes(), 0);
    const CommPolicyGuard forbidden(CommPolicy::kForbid);
    EXPECT_NE(error_of([&] { sum += x; }).find("communication that the policy does not allow"), std::string::npos);
    EXPECT_TRUE(at::equal(sum, numbers({6, 4})));
    // Reading one needs none.
    EXPECT_EQ(error_of([&] { static_cast<void>(x + torch::arange(4)); }), "no error");
  });
}

// A plain leaf gets a plain gradient, equal on all ranks; a hook for each tensor, not for each use.
TEST(PlainOperand, GetsAPlainGradient) {
  at::Tensor w = numbers({4}).requires_grad_();
  const at::Tensor x = numbers({6, 4}, 2);
  for (int i = 0; i < 3; ++i) x.mv(w.sigmoid() * w).pow(2).sum().backward();
  for (const Placement& placement : {Placement(Replicate()), Placement(Shard(0)), Placement(Shard(1))}) {
    run_ranks(3, [&](World& world) {
      const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3}, {"x"});
      const at::Tensor mine = numbers({4}).requires_grad_();
      const at::Tensor data = distribute_tensor(x, mesh, {placement});
      for (int i = 0; i < 3; ++i) data.mv(mine.sigmoid() * mine).pow(2).sum().backward();
      ASSERT_TRUE(mine.grad().defined());
      EXPECT_FALSE(is_dtensor(mine.grad()));
      EXPECT_TRUE(at::allclose(mine.grad(), w.grad(), 1e-12));
      const auto grads = torch::autograd::grad({data.mv(mine).sum()}, {mine});
      EXPECT_FALSE(is_dtensor(grads[0]));
      EXPECT_TRUE(at::allclose(grads[0], x.sum(0), 1e-12));
    });
  }
}

TEST(PlainOperand, TrainsWithAnOptimizer) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    const at::Tensor plain_x = numbers({6, 4}, 2), y = numbers({6}, 3);
    const at::Tensor x = distribute_tensor(plain_x, mesh, {Shard(0)});
    at::Tensor w = numbers({4}).requires_grad_(), reference = numbers({4}).requires_grad_();
    torch::optim::Adam mine({w}, 0.1), theirs({reference}, 0.1);
    for (int i = 0; i < 5; ++i) {
      mine.zero_grad();
      theirs.zero_grad();
      (x.mv(w) - y).pow(2).mean().backward();
      (plain_x.mv(reference) - y).pow(2).mean().backward();
      mine.step();
      theirs.step();
    }
    EXPECT_TRUE(at::allclose(w, reference, 1e-12));
  });
}

TEST(PlainOperand, CanBeRefused) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    const at::Tensor x = distribute_tensor(numbers({6, 4}), mesh, {Shard(0)});
    const PlainOperandsGuard strict(PlainOperands::kRefuse);
    EXPECT_EQ(
        error_of([&] { static_cast<void>(x + torch::arange(4)); }),
        "[aten::add.Tensor] a plain tensor among distributed ones; got i64[4] as argument \"other\"; expected "
        "distributed tensors or numbers, since this program refuses plain operands; try "
        "distribute_tensor(tensor, mesh, placements), or PlainOperandsGuard(PlainOperands::kReplicate) where it is "
        "equal on all ranks");
    EXPECT_EQ(error_of([&] { static_cast<void>(x + 2 * torch::tensor(1.0)); }), "no error");
    const ImplicitReplication allowed;
    EXPECT_EQ(error_of([&] { static_cast<void>(x + torch::arange(4)); }), "no error");
  });
}

// An input on mesh["dp"] for a model on the whole mesh, as PyTorch's tutorials write it.
TEST(SubMesh, OperandCountsAsReplicatedOverTheOtherDims) {
  const at::Tensor x = numbers({6, 4}), w = numbers({4, 8}, 2);
  const at::Tensor leaf = x.clone().requires_grad_(), weight = w.clone().requires_grad_();
  leaf.mm(weight).relu().pow(2).sum().backward();
  run_ranks(4, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2, 2}, {"dp", "tp"});
    const DeviceMesh rows = mesh["dp"];
    for (const Placement& place : {Placement(Replicate()), Placement(Shard(0)), Placement(Shard(1))}) {
      const at::Tensor input = distribute_tensor(x, rows, {Shard(0)}).requires_grad_();
      const at::Tensor model = distribute_tensor(w, mesh, {Replicate(), place}).requires_grad_();
      const at::Tensor y = input.mm(model).relu();
      EXPECT_TRUE(at::allclose(whole(y), x.mm(w).relu(), 1e-12));
      y.pow(2).sum().backward();
      EXPECT_TRUE(at::allclose(whole(model.grad()), weight.grad(), 1e-12));
      EXPECT_EQ(DTensor(input.grad()).mesh(), rows);
      EXPECT_TRUE(at::allclose(whole(input.grad()), leaf.grad(), 1e-12));
    }
  });
}

TEST(SubMesh, OperandIsComparedOverTheOtherDims) {
  const std::string error = error_of([] {
    run_ranks(4, [](World& world) {
      const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2, 2}, {"dp", "tp"});
      const double start = static_cast<double>(mesh.local_rank("tp"));
      const at::Tensor input = from_local(numbers({3, 4}, start), mesh["dp"], {Shard(0)});
      const at::Tensor model = distribute_tensor(numbers({4, 8}), mesh, {Replicate(), Shard(1)});
      static_cast<void>(input.mm(model).sum().item<double>());
    });
  });
  EXPECT_NE(error.find("diverged"), std::string::npos) << error;
}

TEST(Placements, OneReplicateStandsForAllMeshDims) {
  run_ranks(4, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2, 2}, {"dp", "tp"});
    const DTensor x = distribute_tensor(numbers({4, 4}), mesh, {Replicate()});
    EXPECT_EQ(to_string(x.placements()), "R,R");
    EXPECT_EQ(to_string(zeros({4}, mesh, {Replicate()}).placements()), "R,R");
    EXPECT_EQ(to_string(x.redistribute({Shard(0), Shard(1)}).redistribute({Replicate()}).placements()), "R,R");
    EXPECT_NE(error_of([&] { distribute_tensor(numbers({4, 4}), mesh, {Shard(0)}); }), "no error");
  });
}

}  // namespace
}  // namespace dtensor
