// Tokens per second of the transformer of examples/gpt, beside plain libtorch on the same cores. All train at once,
// each in a process of its own, and take turns of a few steps: what else the machine does meets them all alike.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <torch/version.h>

#include "examples/gpt/train.h"

namespace {

constexpr std::int64_t kBatch = 32, kContext = 64;
// The first of a turn's steps is not counted: its memory is not in the caches. On a GPU a step takes milliseconds, and
// more of them are cheap.
constexpr int kStepsOfATurn = 3, kStepsOfATurnOnGpu = 20;

struct Way {
  const char* mesh;  // "": plain libtorch
  bool fsdp;
  const char* name;
  const char* upstream;  // what upstream.py calls it, if it does
};
constexpr Way kWays[] = {{"", false, "plain", nullptr},
                         {"dp=1", false, "dp=1", nullptr},
                         {"dp=2", false, "dp=2", "dp"},
                         {"dp=2", true, "dp=2 fsdp", "fsdp"},
                         {"tp=2", false, "tp=2", "tp"}};

// Where the ranks of one training wait for their turn; whoever comes last tells what the last one took.
class Turns {
 public:
  Turns(std::int64_t ranks, int steps) : ranks_(ranks), steps_(steps) {}

  void after_step() {
    std::unique_lock lock(mutex_);
    const std::int64_t step = step_;
    if (++arrived_ < ranks_) {
      changed_.wait(lock, [&] { return step_ != step; });
      return;
    }
    const auto now = std::chrono::steady_clock::now();
    const std::int64_t in_turn = step % steps_;
    if (in_turn == 0) start_ = now;
    if (in_turn == steps_ - 1) {
      std::printf("%.9f\n", std::chrono::duration<double>(now - start_).count() / static_cast<double>(steps_ - 1));
      std::fflush(stdout);
      if (std::getchar() == EOF) std::_Exit(0);
    }
    arrived_ = 0;
    ++step_;
    changed_.notify_all();
  }

 private:
  const std::int64_t ranks_, steps_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t arrived_ = 0, step_ = 0;
  std::chrono::steady_clock::time_point start_;
};

// Trains until nobody gives it a turn any more.
void train_in_turns(const Way& way, std::int64_t width, bool cuda) {
  std::string text;
  for (int i = 0; i < 60000; ++i) text += static_cast<char>(' ' + (i * 7 + i / 13) % 95);
  const Tokens tokens(text);
  TrainOptions options;
  options.model = {.vocabulary = tokens.vocabulary(), .context = kContext, .width = width, .heads = 4, .layers = 2};
  options.batch = kBatch;
  options.device = cuda ? at::kCUDA : at::kCPU;
  options.steps = std::numeric_limits<std::int64_t>::max();
  options.parallel.fsdp = way.fsdp;
  const bool plain = *way.mesh == '\0';
  const dtensor::Mesh mesh = dtensor::Mesh::parse(plain ? "dp=1" : way.mesh);
  Turns turns(mesh.size(), cuda ? kStepsOfATurnOnGpu : kStepsOfATurn);
  const auto progress = [&](std::int64_t, double, const TrainResult&) { turns.after_step(); };
  if (plain) {
    train(tokens, options, nullptr, progress);
    return;
  }
  dtensor::run_ranks(mesh.size(), [&](dtensor::World& world) {
    const dtensor::DeviceMesh ranks = dtensor::init_device_mesh(world, options.device, mesh);
    train(tokens, options, &ranks, progress);
  });
}

// One training in a process of its own: OpenMP keeps the threads of whoever ran before in a process.
class Contender {
 public:
  explicit Contender(std::vector<std::string> command) {
    std::array<int, 2> to{}, from{};
    if (pipe(to.data()) != 0 || pipe(from.data()) != 0 || (pid_ = fork()) < 0) give_up("cannot start a process");
    if (pid_ == 0) {
      dup2(to[0], STDIN_FILENO);
      dup2(from[1], STDOUT_FILENO);
      for (int file = 3; file < 256; ++file) close(file);
      std::vector<char*> words;
      for (std::string& word : command) words.push_back(word.data());
      words.push_back(nullptr);
      execvp(words[0], words.data());
      std::_Exit(1);
    }
    close(to[0]);
    close(from[1]);
    to_ = fdopen(to[1], "w");
    from_ = fdopen(from[0], "r");
    read_seconds();  // the first turn comes unasked: memory, decisions
  }
  Contender(const Contender&) = delete;
  Contender& operator=(const Contender&) = delete;
  ~Contender() {
    std::fclose(to_);
    std::fclose(from_);
    waitpid(pid_, nullptr, 0);
  }

  double turn() {  // seconds of a step
    std::fputc('\n', to_);
    std::fflush(to_);
    return read_seconds();
  }

 private:
  [[noreturn]] static void give_up(const char* why) {
    std::fprintf(stderr, "bench_train: %s\n", why);
    std::exit(1);
  }
  double read_seconds() {
    double seconds = 0;
    if (std::fscanf(from_, "%lf", &seconds) != 1) give_up("a training ended");
    return seconds;
  }

  pid_t pid_ = -1;
  std::FILE *to_ = nullptr, *from_ = nullptr;
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

}  // namespace

// bench_train [rounds [python upstream.py]], or bench_train cuda [rounds] for one rank on a GPU.
// bench_train --one WAY WIDTH DEVICE is one of the trainings.
int main(int argc, char** argv) {
  std::vector<std::string> args(argv + 1, argv + argc);
  if (args.size() == 4 && args[0] == "--one") {
    const auto way = static_cast<std::size_t>(std::atoi(args[1].c_str()));
    train_in_turns(kWays[way % std::size(kWays)], std::atol(args[2].c_str()), args[3] == "cuda");
    return 0;
  }
  const bool cuda = !args.empty() && args[0] == "cuda";
  if (cuda) args.erase(args.begin());
  const int rounds = args.empty() ? 15 : std::atoi(args[0].c_str());
  if (rounds < 1) {
    std::fprintf(stderr, "[bench_train] not a number of rounds; got %s; expected 1 or more\n", args[0].c_str());
    return 2;
  }
  std::printf("libtorch %s, %s; tokens/s and their ratio to plain in the same round, medians of %d rounds\n",
              TORCH_VERSION, cuda ? "a GPU" : (std::to_string(std::thread::hardware_concurrency()) + " cores").c_str(),
              rounds);
  std::printf("%7s  %-16s %12s  %-10s %12s\n", "width", "ranks", "tokens/s", "of plain", "upstream");
  const std::size_t ways = cuda ? 2 : std::size(kWays);
  for (const std::int64_t width : {64, 128, 256, 512, 1024}) {
    if (width == (cuda ? 64 : 1024)) continue;
    const std::string columns = std::to_string(width);
    std::vector<std::unique_ptr<Contender>> ours, upstreams;
    for (std::size_t way = 0; way < ways; ++way) {
      ours.push_back(std::make_unique<Contender>(
          std::vector<std::string>{"/proc/self/exe", "--one", std::to_string(way), columns, cuda ? "cuda" : "cpu"}));
      upstreams.emplace_back();
      if (args.size() < 3 || !kWays[way].upstream) continue;
      upstreams.back() = std::make_unique<Contender>(
          std::vector<std::string>{args[1], args[2], "--one", kWays[way].upstream, columns});
    }
    std::vector<std::vector<double>> speeds(ways), ratios(ways), upstream_speeds(ways);
    for (int round = 0; round < rounds; ++round) {
      for (std::size_t way = 0; way < ways; ++way) {
        speeds[way].push_back(kBatch * kContext / ours[way]->turn());
        ratios[way].push_back(speeds[way].back() / speeds[0].back());
        if (upstreams[way]) upstream_speeds[way].push_back(kBatch * kContext / upstreams[way]->turn());
      }
    }
    for (std::size_t way = 0; way < ways; ++way) {
      std::printf("%7ld  %-16s %12.0f  %-10.2f", static_cast<long>(width), kWays[way].name, median(speeds[way]),
                  median(ratios[way]));
      if (upstreams[way]) std::printf(" %12.0f", median(upstream_speeds[way]));
      std::printf("\n");
    }
    std::fflush(stdout);
  }
}
