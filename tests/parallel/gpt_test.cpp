// A transformer that knows nothing of meshes, trained in every parallel way: the losses are those of a single device,
// and what is sent is what a hand-written version would send.
#include <gtest/gtest.h>

#include <map>

#include "tests/parallel/gpt_training.h"

namespace dtensor::testing {
namespace {

struct Way {
  std::string mesh;  // as Mesh::parse reads it
  bool fsdp = false, sequence = false, loss = false;
  std::string optimizer = "AdamW";
};

std::string name_of(const Way& way) {
  std::string name = way.mesh;
  for (char& c : name) {
    if (c == '=') c = '_';
    if (c == ',') c = '_';
  }
  return name + (way.fsdp ? "_fsdp" : "") + (way.sequence ? "_sp" : "") + (way.loss ? "_lp" : "") + "_" + way.optimizer;
}
void PrintTo(const Way& way, std::ostream* out) { *out << name_of(way); }

class GptTraining : public ::testing::TestWithParam<Way> {};

constexpr std::int64_t kSteps = 50, kBatch = 5;

const std::vector<double>& expected_losses(const std::string& optimizer) {
  static auto* known = new std::map<std::string, std::vector<double>>();
  auto& losses = (*known)[optimizer];
  if (losses.empty()) {
    Gpt plain = make_gpt(small_gpt());
    losses = train_gpt(plain, small_gpt(), optimizer, kBatch, kSteps, [](const at::Tensor& t) { return t; });
  }
  return losses;
}

TEST_P(GptTraining, LossesAreThoseOfOneDevice) {
  const Way& way = GetParam();
  const std::vector<double>& expected = expected_losses(way.optimizer);
  EXPECT_LT(expected.back(), 0.95 * expected.front());
  const Mesh mesh = Mesh::parse(way.mesh);
  run_ranks(mesh.size(), [&](World& world) {
    const DeviceMesh ranks = init_device_mesh(world, at::kCPU, mesh);
    Gpt model = make_gpt(small_gpt());
    distribute_gpt(model, ranks, {.fsdp = way.fsdp, .sequence_parallel = way.sequence, .loss_parallel = way.loss});
    const std::vector<double> losses = train_gpt(model, small_gpt(), way.optimizer, kBatch, kSteps,
                                                 [&](const at::Tensor& t) { return distribute_batch(t, ranks); });
    for (std::size_t i = 0; i < losses.size(); ++i) {
      ASSERT_NEAR(losses[i], expected[i], 1e-10 * std::abs(expected[i])) << "step " << i;
    }
    for (const auto& item : model->named_parameters()) {
      ASSERT_EQ(DTensor(item.value().grad()).spec(), DTensor(item.value()).spec()) << item.key();
    }
  });
}

std::vector<Way> ways() {
  std::vector<Way> result;
  for (const char* optimizer : {"SGD", "AdamW"}) {
    for (const char* mesh : {"dp=2", "dp=3", "dp=4"}) {
      result.push_back({.mesh = mesh, .optimizer = optimizer});
      result.push_back({.mesh = mesh, .fsdp = true, .optimizer = optimizer});
    }
    result.push_back({.mesh = "replica=2,dp=2", .fsdp = true, .optimizer = optimizer});
  }
  for (const char* mesh : {"tp=2", "tp=3", "tp=4", "dp=2,tp=2"}) {
    result.push_back({.mesh = mesh});
    result.push_back({.mesh = mesh, .sequence = true});
    result.push_back({.mesh = mesh, .sequence = true, .loss = true, .optimizer = "SGD"});
  }
  result.push_back({.mesh = "dp=2,tp=2", .fsdp = true});
  result.push_back({.mesh = "dp=2,tp=2", .fsdp = true, .sequence = true, .loss = true, .optimizer = "SGD"});
  result.push_back({.mesh = "replica=2,dp=2,tp=2", .fsdp = true});
  result.push_back({.mesh = "replica=2,dp=2,tp=2", .fsdp = true, .sequence = true, .loss = true});
  return result;
}

INSTANTIATE_TEST_SUITE_P(Ways, GptTraining, ::testing::ValuesIn(ways()),
                         [](const auto& way) { return name_of(way.param); });

// ---- what is sent

struct Sent {
  std::map<std::string, std::int64_t> count;  // "all-reduce tp"
  std::map<std::string, std::int64_t> bytes;
};

// Of one training step, after two that warm up. Even sizes, as papers count.
Sent sent_by(const std::string& mesh_text, const Parallelism& how, const GptOptions& options, bool backward = true) {
  const Mesh mesh = Mesh::parse(mesh_text);
  Sent sent;
  run_ranks(mesh.size(), [&](World& world) {
    const DeviceMesh ranks = init_device_mesh(world, at::kCPU, mesh);
    Gpt model = make_gpt(options);
    distribute_gpt(model, ranks, how);
    const auto optimizer = make_optimizer("AdamW", model->parameters());
    for (int step = 0; step < 3; ++step) {
      const Text data = text_of(options, 8, step);
      const at::Tensor text = distribute_batch(data.text, ranks), next = distribute_batch(data.next, ranks);
      const CommRecorder recorder;
      if (backward) {
        optimizer->zero_grad();
        model->loss(text, next).backward();
        optimizer->step();
      } else {
        model->forward(text);
      }
      if (step < 2 || world.rank() != 0) continue;
      for (const CommEvent& event : recorder.events()) {
        // A small sum may come to all by one exchange of its parts.
        const std::string kind = (event.collective == "exchange" ? "all-reduce" : event.collective) + " " + event.group;
        ++sent.count[kind];
        sent.bytes[kind] += event.bytes;
      }
      if (::testing::Test::HasFailure() || std::getenv("SHOW_EVENTS")) std::cout << recorder.to_string();
    }
  });
  return sent;
}

GptOptions even_gpt(std::int64_t layers) {
  return {.vocabulary = 256, .context = 32, .width = 64, .heads = 4, .layers = layers};
}

// Between two depths, so that what comes before and after the blocks does not count.
std::map<std::string, std::int64_t> per_block(const std::string& mesh, const Parallelism& how, bool backward = true) {
  const auto one = sent_by(mesh, how, even_gpt(1), backward).count;
  auto two = sent_by(mesh, how, even_gpt(2), backward).count;
  for (const auto& [name, count] : one) two[name] -= count;
  std::erase_if(two, [](const auto& entry) { return entry.second == 0; });
  return two;
}

using Counts = std::map<std::string, std::int64_t>;

TEST(GptCommunication, TensorParallelReducesTwiceForwardAndTwiceBackward) {
  EXPECT_EQ(per_block("tp=4", {}, false), (Counts{{"all-reduce tp", 2}}));
  EXPECT_EQ(per_block("tp=4", {}), (Counts{{"all-reduce tp", 4}}));
}

TEST(GptCommunication, SequenceParallelGathersAndScattersTheSameVolume) {
  const Parallelism how{.sequence_parallel = true};
  EXPECT_EQ(per_block("tp=4", how, false), (Counts{{"all-gather tp", 2}, {"reduce-scatter tp", 2}}));
  EXPECT_EQ(per_block("tp=4", how), (Counts{{"all-gather tp", 4}, {"reduce-scatter tp", 4}}));
}

TEST(GptCommunication, FullyShardedUnitsGatherTwiceAndScatterOnce) {
  EXPECT_EQ(per_block("dp=4", {.fsdp = true}, false), (Counts{{"all-gather dp", 1}}));
  EXPECT_EQ(per_block("dp=4", {.fsdp = true}), (Counts{{"all-gather dp", 2}, {"reduce-scatter dp", 1}}));
}

TEST(GptCommunication, DataParallelReducesInOneBucket) {
  EXPECT_EQ(per_block("dp=4", {}), Counts());
  // One more are two numbers: the sum of the losses, and of their weights, over all of the batch.
  const Sent sent = sent_by("dp=4", {}, even_gpt(2));
  EXPECT_EQ(sent.count, (Counts{{"all-reduce dp", 2}}));
}

}  // namespace
}  // namespace dtensor::testing
