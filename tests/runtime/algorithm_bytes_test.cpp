// How little the algorithms over cut dims send, and what they send it for.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

#include "dtensor/comm/world.h"
#include "dtensor/runtime/explain.h"
#include "dtensor/runtime/record.h"
#include "tests/runtime/compare.h"

namespace dtensor {
namespace {

using testing::error_of;
using testing::expect_parts;
using testing::integers;
using testing::numbers;

constexpr std::int64_t kRows = 256, kClasses = 4096, kRanks = 4;
constexpr std::int64_t kSlice = kRows * 4;                            // one float for each row
constexpr std::int64_t kAll = kRows * kClasses * 4 / kRanks * 3 / 4;  // the least that turning the cut would bring

void on_class_sharded(const std::function<void(const DTensor& logits, const DTensor& target)>& run) {
  run_ranks(kRanks, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {kRanks}, {"tp"});
    const DTensor x = distribute_tensor(numbers({kRows, kClasses}).to(at::kFloat), mesh, {Shard(1)});
    const DTensor target = distribute_tensor(integers({kRows}, kClasses), mesh, {Replicate()});
    run(x, target);
  });
}

TEST(AlgorithmBytes, SlicesAreSentAndNoLogits) {
  on_class_sharded([](const DTensor& x, const DTensor&) {
    const std::vector<std::pair<const char*, std::function<at::Tensor()>>> calls = {
        {"aten::_softmax", [&] { return at::softmax(x, 1); }},
        {"aten::_log_softmax", [&] { return at::log_softmax(x, 1); }},
        {"aten::logsumexp", [&] { return x.logsumexp(1); }},
        {"aten::linalg_vector_norm", [&] { return at::linalg_vector_norm(x, 2, {{1}}); }},
        {"aten::var.correction", [&] { return x.var(1); }},
        {"aten::native_layer_norm", [&] { return at::layer_norm(x, {kClasses}); }},
        {"aten::argmax", [&] { return x.argmax(1); }},
        {"aten::max.dim", [&] { return std::get<0>(x.max(1)); }},
        {"aten::cumsum", [&] { return x.cumsum(1); }},
        {"aten::topk", [&] { return std::get<0>(x.topk(4, 1)); }},
    };
    for (const auto& [name, call] : calls) {
      SCOPED_TRACE(name);
      CommRecorder recorder;
      call();
      ASSERT_FALSE(recorder.events().empty());
      EXPECT_LT(recorder.bytes() * 15, kAll) << recorder.to_string();
      for (const CommEvent& event : recorder.events()) EXPECT_EQ(event.op, name) << recorder.to_string();
    }
  });
}

TEST(AlgorithmBytes, SoftmaxSendsTwoSlices) {
  on_class_sharded([](const DTensor& x, const DTensor&) {
    CommRecorder recorder;
    at::softmax(x, 1);
    ASSERT_EQ(recorder.events().size(), 2) << recorder.to_string();
    // The largest and the sum of every row; at most every other rank's are read.
    EXPECT_LE(recorder.bytes(), 2 * kSlice * (kRanks - 1)) << recorder.to_string();
    EXPECT_NE(recorder.events()[0].reason.find("softmax(1)"), std::string::npos) << recorder.to_string();
  });
}

TEST(AlgorithmBytes, CrossEntropyNeverGathersLogits) {
  on_class_sharded([](const DTensor& x, const DTensor& target) {
    at::Tensor logits = x.detach().requires_grad_(true);
    CommRecorder recorder;
    const at::Tensor loss = at::cross_entropy_loss(logits, target);
    loss.backward();
    // The largest, the sum, the loss with its weight; going back, the sum of the gradients.
    EXPECT_LE(recorder.events().size(), 4) << recorder.to_string();
    EXPECT_LE(recorder.bytes(), 3 * kSlice * (kRanks - 1) + 2 * 4 * (kRanks - 1)) << recorder.to_string();
    EXPECT_EQ(DTensor(logits.grad()).placements(), Placements{Shard(1)});
  });
}

TEST(AlgorithmBytes, TheMeanOverACutBatchSendsTwoNumbers) {
  run_ranks(kRanks, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {kRanks}, {"dp"});
    const DTensor x = distribute_tensor(numbers({kRows, kClasses}).to(at::kFloat), mesh, {Shard(0)});
    const DTensor target = distribute_tensor(integers({kRows}, kClasses), mesh, {Shard(0)});
    at::Tensor logits = x.detach().requires_grad_(true);
    CommRecorder recorder;
    at::cross_entropy_loss(logits, target).backward();
    EXPECT_EQ(recorder.events().size(), 1) << recorder.to_string();
    EXPECT_LE(recorder.bytes(), 2 * 4 * (kRanks - 1)) << recorder.to_string();
  });
}

TEST(AlgorithmBytes, AnEmbeddingWithACutVocabularySendsNothing) {
  run_ranks(kRanks, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {kRanks}, {"tp"});
    const DTensor weight = distribute_tensor(numbers({kClasses, 8}).requires_grad_(true), mesh, {Shard(0)});
    const DTensor indices = distribute_tensor(integers({64}, kClasses), mesh, {Replicate()});
    CommRecorder recorder;
    const at::Tensor y = at::embedding(weight, indices);
    EXPECT_EQ(DTensor(y).placements(), Placements{Partial()});
    EXPECT_EQ(DTensor(weight.index_select(0, indices)).placements(), Placements{Partial()});
    EXPECT_TRUE(recorder.events().empty()) << recorder.to_string();
    const DTensor more = distribute_tensor(numbers({64, 8}), mesh, {Replicate()});
    EXPECT_EQ(DTensor(weight.index_add(0, indices, more)).placements(), Placements{Shard(0)});
    EXPECT_TRUE(recorder.events().empty()) << recorder.to_string();
    DTensor(y).redistribute({Replicate()}).sum().backward();
    EXPECT_EQ(DTensor(weight.grad()).placements(), Placements{Shard(0)});
    ASSERT_EQ(recorder.events().size(), 1) << recorder.to_string();
    EXPECT_EQ(recorder.events()[0].op, "redistribute");
  });
}

// What is sorted must be whole: the cut moves to another dim, and nothing is gathered unless there is none.
TEST(AlgorithmBytes, SortsMoveTheCutToAnotherDim) {
  run_ranks(kRanks, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {kRanks}, {"tp"});
    const at::Tensor full = numbers({512, 1024}).to(at::kFloat);
    const DTensor x = distribute_tensor(full, mesh, {Shard(1)});
    constexpr std::int64_t kTurned = 512 * 1024 / kRanks * 3 / 4 * 4;
    struct Sort {
      const char* name;
      std::function<at::Tensor(const at::Tensor&)> run;
      Placements gives;
    };
    const std::vector<Sort> sorts = {
        {"sort", [](const at::Tensor& t) { return std::get<0>(t.sort(1)); }, {Shard(0)}},
        {"sort, places", [](const at::Tensor& t) { return std::get<1>(t.sort(1)); }, {Shard(0)}},
        {"sort, stable", [](const at::Tensor& t) { return std::get<0>(t.sort(true, -1, true)); }, {Shard(0)}},
        {"argsort", [](const at::Tensor& t) { return t.argsort(std::int64_t{1}); }, {Shard(0)}},
        {"kthvalue", [](const at::Tensor& t) { return std::get<0>(t.kthvalue(7, 1)); }, {Shard(0)}},
        {"median", [](const at::Tensor& t) { return std::get<0>(t.median(1)); }, {Shard(0)}},
        {"mode", [](const at::Tensor& t) { return std::get<0>(t.round().mode(1)); }, {Shard(0)}},
        {"msort", [](const at::Tensor& t) { return t.t().msort(); }, {Shard(1)}},
    };
    for (const Sort& sort : sorts) {
      SCOPED_TRACE(sort.name);
      CommRecorder recorder;
      const at::Tensor y = sort.run(x);
      ASSERT_EQ(recorder.events().size(), 1) << recorder.to_string();
      EXPECT_EQ(recorder.bytes(), kTurned) << recorder.to_string();
      EXPECT_NE(recorder.events()[0].collective, "all-gather") << recorder.to_string();
      EXPECT_EQ(DTensor(y).placements(), sort.gives);
      expect_parts(y, sort.run(full), 0, sort.name);
    }
    CommRecorder recorder;
    std::get<0>(x.sort(0));
    EXPECT_TRUE(recorder.events().empty()) << recorder.to_string();
    const DTensor line = distribute_tensor(full.reshape({-1}), mesh, {Shard(0)});
    const at::Tensor y = std::get<0>(line.sort(0));
    ASSERT_EQ(recorder.events().size(), 1) << recorder.to_string();
    EXPECT_EQ(recorder.events()[0].collective, "all-gather");
    EXPECT_EQ(DTensor(y).placements(), Placements{Replicate()});
  });
}

// Each rank gets the row before its part and the row after it, if there is one, in one exchange; going back the rows of
// the input again for the gradient of the weight, and what the neighbours add to its own.
TEST(AlgorithmBytes, AConvolutionOverCutPlanesExchangesTheRowsBetween) {
  constexpr std::int64_t kRow = 2 * 32 * 64 * 4;  // of a batch of 2 with 32 channels, in floats
  run_ranks(kRanks, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {kRanks}, {"cp"});
    at::Tensor x = distribute_tensor(numbers({2, 32, 86, 64}).to(at::kFloat), mesh, {Shard(2)}).requires_grad_(true);
    at::Tensor weight =
        distribute_tensor(numbers({32, 32, 3, 3}).to(at::kFloat), mesh, {Replicate()}).requires_grad_(true);
    const std::int64_t neighbours = world.rank() == 0 || world.rank() == kRanks - 1 ? 1 : 2;
    CommRecorder recorder;
    const at::Tensor y = at::conv2d(x, weight, {}, 1, 1);
    EXPECT_EQ(DTensor(y).placements(), Placements{Shard(2)});
    ASSERT_EQ(recorder.events().size(), 1) << recorder.to_string();
    const CommEvent event = recorder.events()[0];
    EXPECT_EQ(event.collective, "exchange");
    EXPECT_EQ(event.group, "cp");
    EXPECT_EQ(event.ranks, kRanks);
    EXPECT_EQ(event.bytes, neighbours * kRow);
    EXPECT_EQ(event.op, "aten::convolution");
    EXPECT_NE(event.reason.find("row convolution(2); a halo of 32.8 kB; "), std::string::npos) << event.reason;
    recorder.clear();
    const auto [gx, gw, gb] = at::convolution_backward(y.detach(), x.detach(), weight.detach(), c10::nullopt, {1, 1},
                                                       {1, 1}, {1, 1}, false, {0, 0}, 1, {true, true, false});
    EXPECT_EQ(DTensor(gx).placements(), Placements{Shard(2)});
    EXPECT_EQ(DTensor(gw).placements(), Placements{Partial()});
    ASSERT_EQ(recorder.events().size(), 2) << recorder.to_string();
    for (const CommEvent& one : recorder.events()) EXPECT_EQ(one.bytes, neighbours * kRow) << recorder.to_string();
    // Without a gradient of the weight nobody needs the input.
    recorder.clear();
    at::convolution_backward(y.detach(), x.detach(), weight.detach(), c10::nullopt, {1, 1}, {1, 1}, {1, 1}, false,
                             {0, 0}, 1, {true, false, false});
    EXPECT_EQ(recorder.events().size(), 1) << recorder.to_string();
    // Windows of one element read nothing else.
    recorder.clear();
    at::conv2d(x, weight.narrow(2, 0, 1).narrow(3, 0, 1));
    EXPECT_TRUE(recorder.events().empty()) << recorder.to_string();
    const CommPolicyGuard forbidden(CommPolicy::kForbid);
    const std::string error = error_of([&] { at::conv2d(x, weight, {}, 1, 1); });
    EXPECT_NE(error.find("[aten::convolution] communication that the policy does not allow; got what overlaps of "
                         "f32[2,32,86,64] @ 4(cp) : S(2), "),
              std::string::npos)
        << error;
    EXPECT_TRUE(recorder.events().empty()) << recorder.to_string();
  });
}

// Ranks of a 2x2 mesh that each hold a quarter of a plane: one exchange with all three others.
TEST(AlgorithmBytes, AConvolutionOverPlanesCutBothWaysExchangesOnce) {
  run_ranks(4, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2, 2}, {"h", "w"});
    const DTensor x = distribute_tensor(numbers({1, 32, 64, 48}), mesh, {Shard(2), Shard(3)});
    const DTensor weight = distribute_tensor(numbers({2, 32, 3, 3}), mesh, {Replicate(), Replicate()});
    CommRecorder recorder;
    const DTensor y = at::conv2d(x, weight, {}, 1, 1);
    EXPECT_EQ(y.placements(), (Placements{Shard(2), Shard(3)}));
    ASSERT_EQ(recorder.events().size(), 1) << recorder.to_string();
    EXPECT_EQ(recorder.bytes(), (33 * 25 - 32 * 24) * 32 * 8) << recorder.to_string();
    EXPECT_EQ(recorder.events()[0].group, "h_w");
  });
}

// Over a cut batch, or cut planes: in training twice a number for each channel forward, and once two of them
// back, of each rank; in use none.
TEST(AlgorithmBytes, ABatchNormSendsANumberForEachChannel) {
  constexpr std::int64_t kChannels = 64;
  for (const std::int64_t cut : {0, 2}) {
    run_ranks(kRanks, [&](World& world) {
      const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {kRanks}, {"dp"});
      const auto whole = [&](const at::Tensor& t) { return distribute_tensor(t.to(at::kFloat), mesh, {Replicate()}); };
      const at::Tensor x =
          distribute_tensor(numbers({18, kChannels, 94, 32}).to(at::kFloat), mesh, {Shard(cut)}).requires_grad_(true);
      const at::Tensor weight = whole(numbers({kChannels})), bias = whole(numbers({kChannels}));
      const at::Tensor mean = whole(at::zeros({kChannels})), variance = whole(at::ones({kChannels}));
      CommRecorder recorder;
      const at::Tensor y = at::batch_norm(x, weight, bias, mean, variance, true, 0.1, 1e-5, true);
      EXPECT_EQ(DTensor(y).placements(), Placements{Shard(cut)});
      EXPECT_EQ(DTensor(mean).placements(), Placements{Replicate()});
      ASSERT_EQ(recorder.events().size(), 2) << recorder.to_string();
      for (const CommEvent& event : recorder.events()) {
        EXPECT_EQ(event.op, "aten::native_batch_norm");
        EXPECT_LE(event.bytes, (kRanks - 1) * kChannels * 4);
      }
      recorder.clear();
      const at::Tensor gradient = torch::autograd::grad({y}, {x}, {at::ones_like(y)})[0];
      EXPECT_EQ(DTensor(gradient).placements(), Placements{Shard(cut)});
      ASSERT_EQ(recorder.events().size(), 1) << recorder.to_string();
      EXPECT_LE(recorder.bytes(), 2 * (kRanks - 1) * kChannels * 4) << recorder.to_string();
      recorder.clear();
      at::batch_norm(x, weight, bias, mean, variance, false, 0.1, 1e-5, true);
      EXPECT_TRUE(recorder.events().empty()) << recorder.to_string();
    });
  }
  // Channels never meet.
  run_ranks(kRanks, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {kRanks}, {"tp"});
    const CommPolicyGuard forbidden(CommPolicy::kForbid);
    const at::Tensor x = distribute_tensor(numbers({3, 6, 5}), mesh, {Shard(1)});
    const at::Tensor some = distribute_tensor(numbers({6}).abs(), mesh, {Shard(0)});
    for (const bool training : {true, false}) {
      const at::Tensor y = at::batch_norm(x, some, some, some.clone(), some.clone(), training, 0.1, 1e-5, true);
      EXPECT_EQ(DTensor(y).placements(), Placements{Shard(1)});
    }
  });
}

TEST(AlgorithmBytes, ASmallTensorIsMovedInstead) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"tp"});
    const DTensor x = distribute_tensor(numbers({4, 6}), mesh, {Shard(1)});
    const std::string text = explain("_softmax", at::Tensor(x), std::int64_t{1}, false);
    EXPECT_NE(text.find("softmax(1)"), std::string::npos) << text;
    const DTensor whole = distribute_tensor(numbers({4, 6}), mesh, {Shard(0)});
    CommRecorder recorder;
    EXPECT_EQ(DTensor(at::softmax(whole, 1)).placements(), Placements{Shard(0)});
    EXPECT_TRUE(recorder.events().empty()) << recorder.to_string();
  });
}

}  // namespace
}  // namespace dtensor
