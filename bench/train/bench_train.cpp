// Tokens per second of the transformer of examples/gpt, beside plain libtorch on the same cores, in turns.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "examples/gpt/train.h"

namespace {

double plain_speed(const Tokens& tokens, const TrainOptions& options) {
  return train(tokens, options, nullptr, [](std::int64_t, double, const TrainResult&) {}).tokens_per_second();
}

double our_speed(const Tokens& tokens, const TrainOptions& options, const dtensor::Mesh& mesh) {
  double speed = 0;
  dtensor::run_ranks(mesh.size(), [&](dtensor::World& world) {
    const dtensor::DeviceMesh ranks = dtensor::init_device_mesh(world, options.device, mesh);
    const TrainResult result = train(tokens, options, &ranks, [](std::int64_t, double, const TrainResult&) {});
    if (world.rank() == 0) speed = result.tokens_per_second();
  });
  return speed;
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 3;
  std::string text;
  for (int i = 0; i < 60000; ++i) text += static_cast<char>(' ' + (i * 7 + i / 13) % 95);
  const Tokens tokens(text);
  std::printf("%u cores; tokens/s, the best of %d rounds\n", std::thread::hardware_concurrency(), rounds);
  std::printf("%7s  %-16s %12s %12s  %s\n", "width", "ranks (threads)", "plain", "dtensor", "ratio");
  struct Way {
    const char* mesh;
    bool fsdp;
  };
  for (const std::int64_t width : {64, 128, 256, 512}) {
    TrainOptions options;
    options.model = {.vocabulary = tokens.vocabulary(), .context = 64, .width = width, .heads = 4, .layers = 2};
    options.batch = 16;
    options.steps = width < 512 ? 14 : 8;
    for (const Way& way : {Way{"dp=1", false}, Way{"dp=2", false}, Way{"dp=2", true}, Way{"tp=2", false}}) {
      options.parallel.fsdp = way.fsdp;
      double plain = 0, ours = 0;
      for (int round = 0; round < rounds; ++round) {
        plain = std::max(plain, plain_speed(tokens, options));
        ours = std::max(ours, our_speed(tokens, options, dtensor::Mesh::parse(way.mesh)));
      }
      std::printf("%7ld  %-16s %12.0f %12.0f  %.2f\n", static_cast<long>(width),
                  (std::string(way.mesh) + (way.fsdp ? " fsdp" : "")).c_str(), plain, ours, ours / plain);
      std::fflush(stdout);
    }
  }
}
