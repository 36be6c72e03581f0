// A transformer block as a program writes it, under the usual ways to cut it: what is sent is what one would send by
// hand, forward and backward, and nothing else.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>

#include "dtensor/comm/world.h"
#include "dtensor/runtime/record.h"
#include "dtensor/runtime/tensor.h"

namespace dtensor {
namespace {

constexpr std::int64_t kBatch = 4, kLength = 64, kWidth = 128, kHeads = 4, kHidden = 512, kWords = 4096;

using Parameters = std::map<std::string, at::Tensor>;

at::Tensor numbers(at::IntArrayRef sizes, double start) {
  std::int64_t n = 1;
  for (const std::int64_t size : sizes) n *= size;
  return at::arange(n, at::kDouble).mul(0.61).add(start).sin().mul(0.05).view(sizes);
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

// Where a program by hand says how tensors lie: what goes into and comes out of parts that are cut. Into them the value
// is replicated already, and its gradient, which every rank has a part of, is summed; out of them the value is summed.
struct Borders {
  bool attention = false, mlp = false, words = false;
};

at::Tensor into(bool border, const at::Tensor& x) {
  return border ? from_local(DTensor(x).to_local(), DTensor(x).mesh(), {Replicate()}) : x;
}
at::Tensor out_of(bool border, const at::Tensor& x) { return border ? DTensor(x).redistribute({Replicate()}) : x; }

at::Tensor heads_of(const at::Tensor& x) { return x.view({kBatch, kLength, kHeads, kWidth / kHeads}).transpose(1, 2); }

at::Tensor attention(const at::Tensor& x, const Parameters& p) {
  const at::Tensor q = heads_of(at::linear(x, p.at("q"))), k = heads_of(at::linear(x, p.at("k"))),
                   v = heads_of(at::linear(x, p.at("v")));
  const at::Tensor scores = at::softmax(at::matmul(q, k.transpose(-1, -2)) * 0.7, -1);
  return at::linear(at::matmul(scores, v).transpose(1, 2).reshape({kBatch, kLength, kWidth}), p.at("o"));
}

at::Tensor loss_of(const at::Tensor& tokens, const at::Tensor& targets, const Parameters& p, const Borders& border) {
  at::Tensor x = out_of(border.words, at::embedding(p.at("embedding"), tokens));
  const at::Tensor first = into(border.attention, at::layer_norm(x, {kWidth}, p.at("norm1")));
  x = x + out_of(border.attention, attention(first, p));
  const at::Tensor second = into(border.mlp, at::layer_norm(x, {kWidth}, p.at("norm2")));
  x = x + out_of(border.mlp, at::linear(at::gelu(at::linear(second, p.at("up"))), p.at("down")));
  const at::Tensor logits = at::linear(into(border.words, x), p.at("head"));
  return at::cross_entropy_loss(logits.reshape({-1, kWords}), targets.reshape({-1}));
}

struct Cut {
  Placement tokens = Replicate();
  std::map<std::string, Placement> parameters = {};  // the others are replicated
  Borders borders = {};
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
  const at::Tensor expected = loss_of(tokens, targets, plain, {});
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
    const at::Tensor loss = loss_of(x, y, mine, cut.borders);
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

// Bytes of a double each: what lies between the parts of the block, and the parameters.
constexpr std::int64_t kStream = kBatch * kLength * kWidth * 8, kSquare = kWidth * kWidth * 8;
std::string bytes(std::int64_t n) { return " " + std::to_string(n); }

// All gradients of replicated parameters whose inputs are cut: one sum each, from the loss back.
std::vector<std::string> sums_of_gradients() {
  std::vector<std::string> result;
  for (const std::int64_t n : {kWords * kWidth * 8, kWidth * kHidden * 8, kHidden * kWidth * 8, kWidth * 8, kSquare,
                               kSquare, kSquare, kSquare, kWidth * 8, kWords * kWidth * 8}) {
    result.push_back("exchange redistribute" + bytes(n));  // what two ranks do for an all-reduce
  }
  return result;
}
// The loss is a sum and a count, which go together.
const std::vector<std::string> kLoss = {"exchange nll_loss_forward 16"};

TEST(TransformerTraffic, BatchIsDataParallel) {
  const Traffic traffic = run({.tokens = Shard(0)});
  EXPECT_EQ(lines(traffic.forward), lines(kLoss));
  EXPECT_EQ(lines(traffic.backward), lines(sums_of_gradients()));
}

TEST(TransformerTraffic, HeadsAreMegatron) {
  const Traffic traffic = run(
      {.parameters =
           {{"q", Shard(0)}, {"k", Shard(0)}, {"v", Shard(0)}, {"o", Shard(1)}, {"up", Shard(0)}, {"down", Shard(1)}},
       .borders = {.attention = true, .mlp = true}});
  // One sum after each part, and one of its gradient; nothing within, and no gradient of a parameter.
  const std::vector<std::string> two(2, "exchange redistribute" + bytes(kStream));
  EXPECT_EQ(lines(traffic.forward), lines(two));
  EXPECT_EQ(lines(traffic.backward), lines(two));
}

TEST(TransformerTraffic, VocabularyIsCutInEmbeddingAndLoss) {
  const Traffic traffic =
      run({.parameters = {{"embedding", Shard(0)}, {"head", Shard(0)}}, .borders = {.words = true}});
  // The rows that a rank has are summed; of the logits the largest and the sum of every slice are told, never
  // themselves.
  const std::string slice = bytes(kBatch * kLength * 8), stream = bytes(kStream);
  std::vector<std::string> forward = {"exchange redistribute" + stream, "exchange _log_softmax" + slice,
                                      "exchange _log_softmax" + slice};
  forward.insert(forward.end(), kLoss.begin(), kLoss.end());
  EXPECT_EQ(lines(traffic.forward), lines(forward));
  EXPECT_EQ(lines(traffic.backward),
            lines({"exchange _log_softmax_backward_data" + slice, "exchange redistribute" + stream}));
}

TEST(TransformerTraffic, SequenceGathersKeysAndValues) {
  const Traffic traffic = run({.tokens = Shard(1)});
  const std::string half = bytes(kStream / 2);
  std::vector<std::string> forward(2, "all-gather bmm" + half);
  forward.insert(forward.end(), kLoss.begin(), kLoss.end());
  EXPECT_EQ(lines(traffic.forward), lines(forward));
  // Beside the sums: keys and values again, and the way back of their gradients. By hand that is a reduce-scatter of
  // each; here they stay sums until they are added up, which takes one reduce-scatter, and the gathers of the inputs of
  // k and v, whose gradients are sums anyway: one transfer more.
  std::vector<std::string> others;
  std::size_t sums = 0;
  for (const std::string& line : traffic.backward) {
    if (line.rfind("exchange redistribute", 0) == 0)
      ++sums;
    else
      others.push_back(line);
  }
  EXPECT_EQ(sums, 10);
  EXPECT_EQ(lines(others), lines({"all-gather bmm" + half, "all-gather bmm" + half, "all-gather mm" + half,
                                  "all-gather mm" + half, "reduce-scatter add.Tensor" + half}));
}

}  // namespace
}  // namespace dtensor
