#pragma once

// Ways for ranks to disagree, and ways to differ that harm nobody: on threads, and in processes over Gloo and MPI.
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "dtensor/comm/world.h"
#include "dtensor/runtime/factories.h"
#include "dtensor/runtime/module.h"
#include "dtensor/runtime/random.h"
#include "dtensor/runtime/tensor.h"
#include "tests/runtime/helpers.h"

namespace dtensor::testing {

struct RankProgram {
  std::string name;
  // `odd`: this rank is the one that differs.
  std::function<void(World& world, const DeviceMesh& mesh, bool odd)> run;
  std::string expected = {};  // in every rank's error; empty: no error
};

inline double total(const at::Tensor& tensor) { return tensor.sum().item<double>(); }

// A step of a model that is replicated everywhere; each rank takes the batch that it is given.
inline void step(torch::nn::Linear& model, torch::optim::SGD& optimizer, const at::Tensor& batch) {
  optimizer.zero_grad();
  model->forward(batch).pow(2).mean().backward();
  optimizer.step();
}

inline torch::nn::Linear replicated_model(const DeviceMesh& mesh) {
  torch::nn::Linear model(4, 3);
  model->to(at::kDouble);
  {
    const torch::NoGradGuard no_grad;
    model->weight.copy_(numbers({3, 4}));
    model->bias.copy_(numbers({3}, 2));
  }
  distribute_module(*model, mesh, [&](const std::string&, const at::Tensor&) {
    return Placements(static_cast<std::size_t>(mesh.ndim()), Replicate());
  });
  return model;
}

inline std::vector<RankProgram> disagreements() {
  const auto leaf = [](const DeviceMesh& mesh, double start = 0.1) {
    const at::Tensor mine = numbers({4, 6}, start + static_cast<double>(mesh.rank()));
    return from_local(mine, mesh, {Shard(0)});
  };
  std::vector<RankProgram> all;
  all.push_back({"BatchOfItsOwn",
                 [](World&, const DeviceMesh& mesh, bool odd) {
                   auto model = replicated_model(mesh);
                   torch::optim::SGD optimizer(model->parameters(), 0.1);
                   step(model, optimizer, numbers({5, 4}, odd ? 1 : 2));
                   model->weight.sum().item<double>();
                   // Nothing was sent so far: the next collective over the mesh tells.
                   total(zeros({8, 2}, mesh, {Shard(0)}, at::kDouble));
                 },
                 "argument \"mat1\" of aten::addmm"});
  all.push_back({"Shape",
                 [](World&, const DeviceMesh& mesh, bool odd) {
                   total(from_local(numbers({odd ? 6 : 4, 8}), mesh, {Shard(0)}));
                 },
                 "diverged"});
  all.push_back({"Placement",
                 [](World&, const DeviceMesh& mesh, bool odd) {
                   const at::Tensor full = numbers({12, 12});
                   total(from_local(odd ? full.narrow(1, 0, 4) : full.narrow(0, 0, 4), mesh,
                                    {odd ? Placement(Shard(1)) : Placement(Shard(0))}));
                 },
                 "from_local"});
  all.push_back({"OrderOfCollectives",
                 [leaf](World&, const DeviceMesh& mesh, bool odd) {
                   const DTensor a = leaf(mesh), b = leaf(mesh, 5);
                   (odd ? b : a).full_tensor();
                   (odd ? a : b).full_tensor();
                 },
                 "diverged"});
  all.push_back({"ExtraOperator",
                 [leaf](World&, const DeviceMesh& mesh, bool odd) {
                   at::Tensor x = leaf(mesh);
                   if (odd) x = x * 2;
                   total(x);
                 },
                 "aten::mul"});
  all.push_back({"Scalar", [leaf](World&, const DeviceMesh& mesh, bool odd) { total(leaf(mesh).mul(odd ? 2.5 : 2.0)); },
                 "aten::mul"});
  all.push_back({"Type",
                 [](World&, const DeviceMesh& mesh, bool odd) {
                   const at::Tensor mine = numbers({4, 6});
                   total(from_local(odd ? mine.to(at::kFloat) : mine, mesh, {Shard(0)}));
                 },
                 "diverged"});
  all.push_back({"Seed",
                 [](World& world, const DeviceMesh& mesh, bool odd) {
                   manual_seed(world, odd ? 8 : 7);
                   total(randn({6, 4}, mesh, {Shard(0)}));
                 },
                 "diverged"});
  all.push_back({"NumberOfRandomCalls",
                 [](World& world, const DeviceMesh& mesh, bool odd) {
                   manual_seed(world, 7);
                   if (odd) rand({6, 4}, mesh, {Shard(0)});
                   total(randn({6, 4}, mesh, {Shard(0)}));
                 },
                 "diverged"});
  all.push_back({"PlainMask",
                 [leaf](World&, const DeviceMesh& mesh, bool odd) {
                   at::Tensor mask = torch::tril(torch::ones({4 * mesh.size(), 6}, at::kBool));
                   if (odd) mask[3][5] = true;
                   total(leaf(mesh).masked_fill(mask, 0.0));
                 },
                 "argument \"mask\" of aten::masked_fill"});
  all.push_back({"SkippedStep",
                 [](World&, const DeviceMesh& mesh, bool odd) {
                   auto model = replicated_model(mesh);
                   torch::optim::SGD optimizer(model->parameters(), 0.1);
                   for (int i = 0; i < 3; ++i) {
                     if (odd && i == 1) continue;
                     step(model, optimizer, distribute_tensor(numbers({6, 4}, i), mesh, {Shard(0)}, {.source = 0}));
                   }
                   total(model->forward(distribute_tensor(numbers({6, 4}), mesh, {Shard(0)}, {.source = 0})));
                 },
                 "diverged"});
  all.push_back({"ItemOfDifferentTensors",
                 [leaf](World&, const DeviceMesh& mesh, bool odd) {
                   const at::Tensor a = leaf(mesh), b = leaf(mesh, 5);
                   (odd ? b : a).sum().item<double>();
                 },
                 "diverged"});
  return all;
}

inline std::vector<RankProgram> harmless_differences() {
  const auto sharded = [](const DeviceMesh& mesh) { return from_local(numbers({4, 6}), mesh, {Shard(0)}); };
  std::vector<RankProgram> all;
  all.push_back({"ExtraOperator", [sharded](World&, const DeviceMesh& mesh, bool odd) {
                   const at::Tensor x = sharded(mesh);
                   if (odd) static_cast<void>((x * 2).relu());
                   total(x);
                 }});
  all.push_back({"ExtraReplicatedLeaf", [sharded](World&, const DeviceMesh& mesh, bool odd) {
                   if (odd) static_cast<void>(from_local(numbers({3}), mesh, {Replicate()}) + 1);
                   total(sharded(mesh));
                   total(from_local(numbers({3}, 4), mesh, {Replicate()}) + sharded(mesh).sum());
                 }});
  all.push_back({"ExtraPlainOperand", [sharded](World&, const DeviceMesh& mesh, bool odd) {
                   const at::Tensor x = sharded(mesh);
                   if (odd) static_cast<void>(x + torch::arange(6));
                   total(x);
                 }});
  all.push_back({"ItemOfAReplica", [sharded](World&, const DeviceMesh& mesh, bool odd) {
                   const at::Tensor x = from_local(numbers({1}), mesh, {Replicate()});
                   if (odd) static_cast<void>(x.item<double>());
                   total(sharded(mesh) * x);
                 }});
  all.push_back({"WriteToItsOwnShard", [sharded](World&, const DeviceMesh& mesh, bool odd) {
                   const DTensor x = sharded(mesh);
                   if (odd) x.to_local().add_(1);
                   total(x * 2);
                 }});
  all.push_back({"KeptGradient", [](World&, const DeviceMesh& mesh, bool odd) {
                   at::Tensor kept;
                   auto model = replicated_model(mesh);
                   torch::optim::SGD optimizer(model->parameters(), 0.1);
                   if (odd) model->weight.register_hook([&](const at::Tensor& gradient) { kept = gradient; });
                   for (int i = 0; i < 3; ++i) {
                     const at::Tensor batch = from_local(numbers({2, 4}, i), mesh, {Shard(0)});
                     step(model, optimizer, batch);
                   }
                   total(model->forward(from_local(numbers({2, 4}), mesh, {Shard(0)})));
                 }});
  all.push_back({"EveryRankItsOwnBatch", [](World&, const DeviceMesh& mesh, bool) {
                   auto model = replicated_model(mesh);
                   torch::optim::SGD optimizer(model->parameters(), 0.1);
                   for (int i = 0; i < 3; ++i) {
                     step(model, optimizer, from_local(numbers({2, 4}, i + mesh.rank()), mesh, {Shard(0)}));
                   }
                 }});
  return all;
}

}  // namespace dtensor::testing
