// Tokens per second of the transformer of examples/gpt, beside plain libtorch on the same cores, in turns.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include <torch/version.h>

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

struct Way {
  std::string mesh;  // "": plain libtorch
  bool fsdp = false;
};

double speed(const Way& way, std::int64_t width) {
  std::string text;
  for (int i = 0; i < 60000; ++i) text += static_cast<char>(' ' + (i * 7 + i / 13) % 95);
  const Tokens tokens(text);
  TrainOptions options;
  options.model = {.vocabulary = tokens.vocabulary(), .context = 64, .width = width, .heads = 4, .layers = 2};
  options.batch = 32;
  options.steps = width < 512 ? 16 : 8;
  options.parallel.fsdp = way.fsdp;
  return way.mesh.empty() ? plain_speed(tokens, options) : our_speed(tokens, options, dtensor::Mesh::parse(way.mesh));
}

// In a process of its own: OpenMP keeps the threads of whoever ran before, and makes everyone's wait shorter for it.
double speed_alone(const std::string& self, const Way& way, std::int64_t width) {
  const std::string command = self + " --one '" + way.mesh + "' " + (way.fsdp ? "1 " : "0 ") + std::to_string(width);
  std::FILE* const pipe = popen(command.c_str(), "r");
  double result = 0;
  if (pipe == nullptr || std::fscanf(pipe, "%lf", &result) != 1) {
    std::fprintf(stderr, "%s gave no speed\n", command.c_str());
    std::exit(1);
  }
  pclose(pipe);
  return result;
}

}  // namespace

// bench_train [rounds]; bench_train --one MESH FSDP WIDTH is one measurement.
int main(int argc, char** argv) {
  if (argc == 5 && std::string(argv[1]) == "--one") {
    std::printf("%f\n", speed({argv[2], std::string(argv[3]) == "1"}, std::atol(argv[4])));
    return 0;
  }
  const int rounds = argc > 1 ? std::max(1, std::atoi(argv[1])) : 5;
  std::printf("libtorch %s, %u cores; tokens/s, the best of %d rounds; the median of their ratios\n", TORCH_VERSION,
              std::thread::hardware_concurrency(), rounds);
  std::printf("%7s  %-16s %12s %12s  %s\n", "width", "ranks (threads)", "plain", "dtensor", "ratio");
  for (const std::int64_t width : {64, 128, 256, 512}) {
    for (const Way& way : {Way{"dp=1"}, Way{"dp=2"}, Way{"dp=2", true}, Way{"tp=2"}}) {
      double plain = 0, ours = 0;
      std::vector<double> ratios;
      for (int round = 0; round < rounds; ++round) {
        const double plain_now = speed_alone(argv[0], {}, width), ours_now = speed_alone(argv[0], way, width);
        plain = std::max(plain, plain_now);
        ours = std::max(ours, ours_now);
        ratios.push_back(ours_now / plain_now);
      }
      std::nth_element(ratios.begin(), ratios.begin() + rounds / 2, ratios.end());
      std::printf("%7ld  %-16s %12.0f %12.0f  %.2f\n", static_cast<long>(width),
                  (way.mesh + (way.fsdp ? " fsdp" : "")).c_str(), plain, ours,
                  ratios[static_cast<std::size_t>(rounds / 2)]);
      std::fflush(stdout);
    }
  }
}
