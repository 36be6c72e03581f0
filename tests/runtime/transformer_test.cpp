// A transformer block as a program writes it, under the usual ways to cut it: what is sent is what one would send by
// hand, forward and backward, and nothing else.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <iostream>
#include <map>

#include "dtensor/comm/world.h"
#include "dtensor/runtime/record.h"
#include "dtensor/runtime/tensor.h"

namespace dtensor {
namespace {

constexpr std::int64_t kBatch = 4, kLength = 6, kWidth = 8, kHeads = 4, kHidden = 16, kWords = 12;

using Parameters = std::map<std::string, at::Tensor>;

at::Tensor numbers(at::IntArrayRef sizes, double start) {
  std::int64_t n = 1;
  for (const std::int64_t size : sizes) n *= size;
  return at::arange(n, at::kDouble).mul(0.61).add(start).sin().mul(0.5).view(sizes);
}

Parameters whole_parameters() {
  Parameters p;
  p["embedding"] = numbers({kWords, kWidth}, 1);
  p["norm1"] = numbers({kWidth}, 2);
  p["norm2"] = numbers({kWidth}, 3);
  for (const char* name : {"q", "k", "v", "o"}) p[name] = numbers({kWidth, kWidth}, static_cast<double>(name[0]));
  p["up"] = numbers({kHidden, kWidth}, 4);
  p["down"] = numbers({kWidth, kHidden}, 5);
  p["head"] = numbers({kWords, kWidth}, 6);
  return p;
}

at::Tensor heads_of(const at::Tensor& x) {
  return x.view({kBatch, kLength, kHeads, kWidth / kHeads}).transpose(1, 2);
}

at::Tensor attention(const at::Tensor& x, const Parameters& p) {
  const at::Tensor q = heads_of(at::linear(x, p.at("q"))), k = heads_of(at::linear(x, p.at("k"))),
                   v = heads_of(at::linear(x, p.at("v")));
  const at::Tensor scores = at::softmax(at::matmul(q, k.transpose(-1, -2)) * 0.7, -1);
  return at::linear(at::matmul(scores, v).transpose(1, 2).reshape({kBatch, kLength, kWidth}), p.at("o"));
}

at::Tensor loss_of(const at::Tensor& tokens, const at::Tensor& targets, const Parameters& p) {
  at::Tensor x = at::embedding(p.at("embedding"), tokens);
  x = x + attention(at::layer_norm(x, {kWidth}, p.at("norm1")), p);
  x = x + at::linear(at::gelu(at::linear(at::layer_norm(x, {kWidth}, p.at("norm2")), p.at("up"))), p.at("down"));
  const at::Tensor logits = at::linear(x, p.at("head"));
  return at::cross_entropy_loss(logits.reshape({-1, kWords}), targets.reshape({-1}));
}

struct Cut {
  Placement tokens = Replicate();
  std::map<std::string, Placement> parameters = {};  // the others are replicated
};

// `all-reduce _softmax 384`, for each collective
std::vector<std::string> said(const CommRecorder& recorder) {
  std::vector<std::string> result;
  for (const CommEvent& event : recorder.events()) {
    result.push_back(event.collective + " " + event.op.substr(event.op.find(':') == std::string::npos ? 0 : 6) + " " +
                     std::to_string(event.bytes));
  }
  return result;
}

struct Traffic {
  std::vector<std::string> forward, backward;
};

Traffic run(const Cut& cut) {
  const Parameters whole = whole_parameters();
  const at::Tensor tokens = at::arange(kBatch * kLength, at::kLong).mul(5).remainder(kWords).view({kBatch, kLength});
  const at::Tensor targets = tokens.mul(7).add(3).remainder(kWords);
  Parameters plain;
  for (const auto& [name, value] : whole) plain[name] = value.clone().requires_grad_(true);
  const at::Tensor expected = loss_of(tokens, targets, plain);
  expected.backward();
  Traffic traffic;
  run_ranks(2, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"tp"});
    const auto on = [&](const at::Tensor& t, const Placement& placement) -> at::Tensor {
      return distribute_tensor(t, mesh, {placement});
    };
    Parameters mine;
    for (const auto& [name, value] : whole) {
      const auto found = cut.parameters.find(name);
      mine[name] = on(value, found == cut.parameters.end() ? Placement(Replicate()) : found->second);
      mine[name].requires_grad_(true);
    }
    const at::Tensor x = on(tokens, cut.tokens), y = on(targets, cut.tokens);
    CommRecorder recorder;
    const at::Tensor loss = loss_of(x, y, mine);
    const std::vector<std::string> forward = said(recorder);
    recorder.clear();
    loss.backward();
    for (auto& [name, value] : mine) DTensor(value.grad()).to_local();  // what is not home yet comes home
    if (world.rank() == 0) traffic = {forward, said(recorder)};
    EXPECT_TRUE(at::allclose(DTensor(loss).full_tensor(), expected, 1e-10, 1e-12));
    for (const auto& [name, value] : plain) {
      EXPECT_TRUE(at::allclose(DTensor(mine[name].grad()).full_tensor(), value.grad(), 1e-9, 1e-11)) << name;
    }
  });
  return traffic;
}

std::string lines(const std::vector<std::string>& list) {
  std::string text;
  for (const std::string& line : list) text += line + '\n';
  return text;
}

TEST(TransformerTraffic, BatchIsDataParallel) {
  const Traffic traffic = run({.tokens = Shard(0)});
  std::cout << "FORWARD\n" << lines(traffic.forward) << "BACKWARD\n" << lines(traffic.backward);
}

TEST(TransformerTraffic, HeadsAreMegatron) {
  const Traffic traffic = run({.parameters = {{"q", Shard(0)},
                                              {"k", Shard(0)},
                                              {"v", Shard(0)},
                                              {"o", Shard(1)},
                                              {"up", Shard(0)},
                                              {"down", Shard(1)}}});
  std::cout << "FORWARD\n" << lines(traffic.forward) << "BACKWARD\n" << lines(traffic.backward);
}

TEST(TransformerTraffic, VocabularyIsCutInEmbeddingAndLoss) {
  const Traffic traffic = run({.parameters = {{"embedding", Shard(0)}, {"head", Shard(0)}}});
  std::cout << "FORWARD\n" << lines(traffic.forward) << "BACKWARD\n" << lines(traffic.backward);
}

TEST(TransformerTraffic, SequenceGathersKeysAndValues) {
  const Traffic traffic = run({.tokens = Shard(1)});
  std::cout << "FORWARD\n" << lines(traffic.forward) << "BACKWARD\n" << lines(traffic.backward);
}

}  // namespace
}  // namespace dtensor
