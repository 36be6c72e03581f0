// Modules whose weights are drawn in place, and training with dropout: on any ranks as on one.
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/adam.h>

#include <cmath>
#include <cstring>

#include "dtensor/comm/world.h"
#include "dtensor/runtime/dispatch.h"
#include "dtensor/runtime/factories.h"
#include "dtensor/runtime/init.h"
#include "dtensor/runtime/module.h"
#include "dtensor/runtime/random.h"
#include "tests/runtime/helpers.h"

namespace dtensor {
namespace {

using testing::error_of;
using testing::numbers;

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         (x.nbytes() == 0 || std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()) == 0);
}

// One head of attention and a feed-forward part, with dropout where it usually is.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(std::int64_t width, double p)
      : query(register_module("query", torch::nn::Linear(width, width))),
        key(register_module("key", torch::nn::Linear(width, width))),
        value(register_module("value", torch::nn::Linear(width, width))),
        out(register_module("out", torch::nn::Linear(width, width))),
        up(register_module("up", torch::nn::Linear(width, 2 * width))),
        down(register_module("down", torch::nn::Linear(2 * width, width))),
        first(register_module("first", torch::nn::LayerNorm(std::vector<std::int64_t>{width}))),
        second(register_module("second", torch::nn::LayerNorm(std::vector<std::int64_t>{width}))),
        drop(register_module("drop", torch::nn::Dropout(p))),
        scale(1 / std::sqrt(static_cast<double>(width))) {}

  torch::Tensor forward(const torch::Tensor& x) {
    const auto h = first(x);
    const auto weights = torch::matmul(query(h), key(h).transpose(1, 2)).mul(scale).softmax(-1);
    const auto y = x + drop(out(torch::matmul(drop(weights), value(h))));
    return y + drop(down(torch::gelu(up(second(y)))));
  }

  void reset_parameters() {
    for (auto* linear : {&query, &key, &value, &out, &up, &down}) (*linear)->reset_parameters();
    for (auto* norm : {&first, &second}) (*norm)->reset_parameters();
  }

  torch::nn::Linear query, key, value, out, up, down;
  torch::nn::LayerNorm first, second;
  torch::nn::Dropout drop;
  double scale;
};
TORCH_MODULE(Block);

// Batches over the first mesh dim, the weights' rows over the last of two.
std::vector<double> losses_on(const Dims& shape) {
  std::vector<double> losses;
  std::int64_t ranks = 1;
  for (const std::int64_t size : shape) ranks *= size;
  run_ranks(ranks, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, shape);
    const bool wide = mesh.ndim() == 2;
    const NoRuleGuard guard(NoRule::kRefuse);
    manual_seed(world, 3);
    Block block(6, 0.25);
    block->to(at::kDouble);
    distribute_module(block, mesh, [&](const std::string& name, const at::Tensor&) {
      const bool split = name.find("up.") == 0 || name.find("query.") == 0;
      return wide ? Placements{Replicate(), split ? Placement(Shard(0)) : Placement(Replicate())}
                  : Placements{Replicate()};
    });
    block->reset_parameters();
    torch::optim::Adam optimizer(block->parameters(), torch::optim::AdamOptions(0.01));
    const Placements rows = wide ? Placements{Shard(0), Replicate()} : Placements{Shard(0)};
    const DTensor x = distribute_tensor(numbers({7, 5, 6}), mesh, rows);
    const DTensor target = distribute_tensor(numbers({7, 5, 6}, 2), mesh, rows);
    for (int step = 0; step < 20; ++step) {
      optimizer.zero_grad();
      const at::Tensor loss = (block(x) - target).pow(2).mean();
      loss.backward();
      optimizer.step();
      const double value = loss.item<double>();
      if (world.rank() == 0) losses.push_back(value);
    }
  });
  return losses;
}

TEST(RandomTraining, DropoutTransformerHasTheSameLossesEverywhere) {
  const std::vector<double> one = losses_on({1});
  ASSERT_EQ(one.size(), 20u);
  EXPECT_LT(one.back(), one.front());
  for (const Dims& shape : {Dims{2}, Dims{3}, Dims{4}, Dims{2, 2}}) {
    const std::vector<double> many = losses_on(shape);
    ASSERT_EQ(many.size(), one.size());
    for (std::size_t i = 0; i < one.size(); ++i) {
      EXPECT_NEAR(many[i], one[i], 1e-12 * one[i])
          << "step " << i << " on " << shape.size() << "-d mesh of " << shape[0];
    }
  }
}

void expect_parts(const torch::nn::Module& sharded, const torch::nn::Module& whole, const DeviceMesh& mesh,
                  const std::string& placements) {
  const auto expected = whole.named_parameters();
  for (const auto& item : sharded.named_parameters()) {
    const DTensor got = item.value();
    const at::Tensor full = DTensor(expected[item.key()]).to_local().detach();
    const DTensor part = distribute_tensor(full, mesh, parse_placements(placements));
    EXPECT_EQ(got.spec(), part.spec());
    EXPECT_TRUE(same_bytes(got.to_local().detach(), part.to_local())) << item.key() << " " << placements;
    EXPECT_TRUE(got.requires_grad());
  }
}

// Weights drawn where they lie are those of a model that was drawn whole.
TEST(RandomTraining, ModulesDrawTheirWeightsInPlace) {
  run_ranks(4, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2, 2});
    Block whole(7, 0.1);
    distribute_module(whole, mesh);
    manual_seed(world, 12);
    whole->reset_parameters();
    for (const char* text : {"S(0),S(0)", "S(0),R", "R,S(0)"}) {
      Block sharded(7, 0.1);
      distribute_module(sharded, mesh, [&](const std::string&, const at::Tensor&) { return parse_placements(text); });
      manual_seed(world, 12);
      sharded->reset_parameters();
      expect_parts(*sharded, *whole, mesh, text);
    }
  });
}

// A module that makes its weights on the meta device: they are never whole on any rank.
struct TallImpl : torch::nn::Module {
  explicit TallImpl(c10::DeviceType device)
      : weight(register_parameter("weight", at::empty({9, 5}, at::TensorOptions().device(device)))),
        bias(register_parameter("bias", at::empty({9}, at::TensorOptions().device(device)))) {}
  void reset_parameters() {
    torch::nn::init::kaiming_normal_(weight);
    torch::nn::init::uniform_(bias, -1, 1);
  }
  at::Tensor weight, bias;
};
TORCH_MODULE(Tall);

TEST(RandomTraining, WeightsNeedNeverBeWhole) {
  run_ranks(4, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {4});
    Tall whole(at::kCPU), sharded(at::kMeta);
    distribute_module(whole, mesh);
    distribute_module(sharded, mesh, [](const std::string&, const at::Tensor&) { return Placements{Shard(0)}; });
    for (Tall module : {whole, sharded}) {
      manual_seed(world, 12);
      module->reset_parameters();
    }
    expect_parts(*sharded, *whole, mesh, "S(0)");
    at::mm(sharded->weight, DTensor(rand({5, 2}, mesh, {Replicate()}))).sum().backward();
    EXPECT_EQ(DTensor(sharded->weight.grad()).spec(), DTensor(sharded->weight).spec());
  });
}

TEST(RandomTraining, Initialisers) {
  namespace init = torch::nn::init;
  const std::vector<std::pair<const char*, std::function<void(at::Tensor)>>> all = {
      {"uniform_", [](const at::Tensor& w) { init::uniform_(w, -1, 2); }},
      {"normal_", [](const at::Tensor& w) { init::normal_(w, 1, 2); }},
      {"xavier_uniform_", [](const at::Tensor& w) { init::xavier_uniform_(w); }},
      {"xavier_normal_", [](const at::Tensor& w) { init::xavier_normal_(w, 0.5); }},
      {"kaiming_uniform_", [](const at::Tensor& w) { init::kaiming_uniform_(w, 2.0); }},
      {"kaiming_normal_", [](const at::Tensor& w) { init::kaiming_normal_(w); }},
      {"constant_", [](const at::Tensor& w) { init::constant_(w, 3); }},
      {"ones_", [](const at::Tensor& w) { init::ones_(w); }},
      {"zeros_", [](const at::Tensor& w) { init::zeros_(w); }},
      {"eye_", [](const at::Tensor& w) { init::eye_(w); }},
      {"orthogonal_", [](const at::Tensor& w) { orthogonal_(w, 2); }},
      {"sparse_", [](const at::Tensor& w) { sparse_(w, 0.5); }},
      // A normal distribution cut off at two deviations, as it is usually drawn.
      {"truncated", [](const at::Tensor& w) { w.uniform_(-0.95, 0.95).erfinv_().mul_(std::sqrt(2.0)).clamp_(-2, 2); }},
  };
  run_ranks(3, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3});
    const at::NoGradGuard no_grad;
    for (const auto& [name, fill] : all) {
      manual_seed(world, 4);
      const DTensor whole = rand({5, 7}, mesh, {Replicate()});
      fill(whole);
      for (const std::int64_t dim : {0, 1}) {
        manual_seed(world, 4);
        const DTensor sharded = rand({5, 7}, mesh, {Shard(dim)});
        fill(sharded);
        const DTensor part = distribute_tensor(whole.to_local(), mesh, {Shard(dim)});
        EXPECT_TRUE(same_bytes(sharded.to_local(), part.to_local())) << name << " S(" << dim << ")";
      }
    }
    DTensor w = rand({6, 4}, mesh, {Shard(0)});
    // libtorch's own draw plain tensors from each rank's generator, which are equal on all ranks, and copy them.
    torch::manual_seed(3);
    init::orthogonal_(w);
    EXPECT_TRUE(at::allclose(w.full_tensor().t().mm(w.full_tensor()), at::eye(4), 1e-5, 1e-5));
    for (const Dims& shape : {Dims{6, 4}, Dims{4, 6}, Dims{3, 2, 2}}) {
      const DTensor t = zeros({shape.data(), shape.size()}, mesh, {Shard(0)}, at::kDouble);
      orthogonal_(t, 3);
      const at::Tensor flat = t.full_tensor().view({shape[0], -1});
      const at::Tensor square = flat.size(0) > flat.size(1) ? flat.t().mm(flat) : flat.mm(flat.t());
      EXPECT_TRUE(at::allclose(square, at::eye(square.size(0), at::kDouble) * 9, 1e-10, 1e-10));
    }
    sparse_(w, 0.4, 2);  // 3 of 6 rows, rounded up
    EXPECT_TRUE(at::equal(w.full_tensor().eq(0).sum(0), at::full({4}, 3, at::kLong)));
    EXPECT_EQ(error_of([&] { sparse_(w, 1.5); }), "[sparse_] a part of the values; got 1.500000; expected from 0 to 1");
  });
}

}  // namespace
}  // namespace dtensor
