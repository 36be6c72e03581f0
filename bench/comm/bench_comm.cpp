// Threads, Gloo and Open MPI side by side in one run: all-reduce of float, 8 bytes and 1 KB to 64 MB, on 2 and 4 ranks.
//   bench_comm [--ranks 2,4] [--backends threads,gloo,mpi,native-gloo,native-mpi] [--svg comm.svg]
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "bench/comm/measure.h"
#include "dtensor/comm/launch.h"
#include "dtensor/comm/mpi.h"
#include "dtensor/comm/world.h"

extern char** environ;

namespace dtensor::bench {
namespace {

std::vector<Sample> measure_world(World& world) {
  const auto group = world.group();
  const auto views = views_of_sizes();
  auto samples =
      measure({.all_reduce = [&](std::int64_t bytes) { group->all_reduce(views.at(bytes), ReduceOp::kSum)->wait(); },
               .barrier = [&] { group->barrier()->wait(); },
               .largest =
                   [&](float mine) {
                     const auto number = at::full({1}, mine, at::kFloat);
                     group->all_reduce(number, ReduceOp::kMax)->wait();
                     return number.item<float>();
                   }});
  if (world.rank() != 0) samples.clear();
  return samples;
}

std::string read_file(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// One rank of a measurement by processes.
int be_a_rank(const std::string& backend, const std::string& result, const std::string& meeting) {
  std::vector<Sample> samples;
  if (backend == "native-mpi") {
    samples = measure_native_mpi();
  } else if (backend == "native-gloo") {
    const auto environment = read_environment();
    samples = measure_native_gloo(meeting, static_cast<int>(environment.rank), static_cast<int>(environment.size));
  } else {
    auto world = World::from_env({.backend = backend});
    samples = measure_world(world);
  }
  if (!samples.empty()) std::ofstream(result) << to_text(samples);
  return 0;
}

int run_program(const std::vector<std::string>& command) {
  std::vector<char*> words;
  for (const auto& word : command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  pid_t pid = 0;
  int status = 0;
  if (posix_spawnp(&pid, words[0], nullptr, nullptr, words.data(), environ) != 0) return 127;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

std::vector<Sample> measure_backend(const std::string& self, const std::string& backend, std::int64_t ranks) {
  std::vector<Sample> samples;
  if (backend == "threads") {
    run_ranks(ranks, [&](World& world) {
      auto mine = measure_world(world);
      if (!mine.empty()) samples = std::move(mine);
    });
    return samples;
  }
  const auto folder = std::filesystem::temp_directory_path() / ("bench_comm." + std::to_string(getpid()));
  std::filesystem::create_directory(folder);
  const std::string result = folder / "result";
  std::vector<std::string> command = {self, "--as-rank", backend, "--result", result, "--meeting", folder / "store"};
  int code = 0;
  if (backend == "mpi" || backend == "native-mpi") {
    std::vector<std::string> mpirun = {DTENSOR_MPIRUN, "--oversubscribe",    "--bind-to", "none",
                                       "-n",           std::to_string(ranks)};
    mpirun.insert(mpirun.end(), command.begin(), command.end());
    code = run_program(mpirun);
  } else {
    code = launch({.command = command, .ranks = ranks});
  }
  if (code == 0) samples = from_text(read_file(result));
  // Not remove_all: beside libtorch 2.11's own copy of it, it crashes.
  for (const auto& entry : std::filesystem::directory_iterator(folder)) std::filesystem::remove(entry);
  std::filesystem::remove(folder);
  if (samples.empty())
    std::fprintf(stderr, "bench_comm: %s on %ld ranks ended with %d\n", backend.c_str(), ranks, code);
  return samples;
}

void print_table(const std::vector<Series>& series, std::int64_t ranks) {
  std::printf("\nall-reduce of float, %ld ranks: us (GB/s)\n%10s", ranks, "bytes");
  for (const Series& line : series) {
    if (line.ranks == ranks) std::printf("  %20s", line.backend.c_str());
  }
  for (std::size_t i = 0; i < message_sizes().size(); ++i) {
    std::printf("\n%10ld", message_sizes()[i]);
    for (const Series& line : series) {
      if (line.ranks != ranks) continue;
      const Sample& sample = line.samples[i];
      std::printf("  %11.1f (%6.2f)", sample.seconds * 1e6, static_cast<double>(sample.bytes) / sample.seconds * 1e-9);
    }
  }
  std::printf("\n");
  std::fflush(stdout);
}

// More ranks than cores: what a small all-reduce takes, and how much of the processors it burns.
void print_crowd(std::int64_t ranks) {
  constexpr int kTimes = 2000;
  rusage before{}, after{};
  getrusage(RUSAGE_SELF, &before);
  const auto start = std::chrono::steady_clock::now();
  run_ranks(ranks, [&](World& world) {
    const auto buffer = at::zeros({2}, at::kFloat);
    for (int i = 0; i < kTimes; ++i) world.group()->all_reduce(buffer, ReduceOp::kMax)->wait();
  });
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  getrusage(RUSAGE_SELF, &after);
  const auto cpu = [](const rusage& usage) {
    return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
  };
  std::printf("threads, %ld ranks on %u cores, 8 bytes: %.1f us each, processors busy for %.2f of %u\n", ranks,
              std::thread::hardware_concurrency(), seconds / kTimes * 1e6, (cpu(after) - cpu(before)) / seconds,
              std::thread::hardware_concurrency());
}

// What the goals speak of.
void print_goals(const std::vector<Series>& series) {
  for (const Series& line : series) {
    if (line.backend != "threads" || line.ranks != 2) continue;
    const Sample& large = line.samples.back();
    const double copy = copy_seconds(large.bytes);
    std::printf("\nthreads, 2 ranks, 8 bytes: %.2f us\n", line.samples.front().seconds * 1e6);
    std::printf("threads, 2 ranks, 64 MB: %.2f ms; memcpy of 64 MB on both at once: %.2f ms; ratio %.2f\n",
                large.seconds * 1e3, copy * 1e3, copy / large.seconds);
  }
  for (const std::int64_t ranks : {4, 8}) print_crowd(ranks);
  for (const Series& line : series) {
    for (const Series& base : series) {
      if (base.backend != "threads" || base.ranks != line.ranks || line.backend == "threads") continue;
      double worst = 1e9;
      std::int64_t where = 0;
      for (std::size_t i = 0; i < line.samples.size(); ++i) {
        const double ahead = line.samples[i].seconds / base.samples[i].seconds;
        if (ahead < worst) {
          worst = ahead;
          where = line.samples[i].bytes;
        }
      }
      std::printf("threads ahead of %s on %ld ranks by at least %.2f (at %ld bytes)\n", line.backend.c_str(),
                  line.ranks, worst, where);
    }
  }
}

}  // namespace
}  // namespace dtensor::bench

int main(int argc, char** argv) {
  using namespace dtensor::bench;
  std::vector<std::int64_t> ranks = {2, 4};
  std::vector<std::string> backends = {"threads", "gloo", "native-gloo"};
  if (dtensor::mpi_was_built()) backends.insert(backends.end(), {"mpi", "native-mpi"});
  std::string svg = "bench_comm.svg", as_rank, result, meeting;
  CLI::App app("all-reduce on threads, Gloo and Open MPI, side by side");
  app.add_option("--ranks", ranks)->delimiter(',');
  app.add_option("--backends", backends, "threads, gloo, mpi and, without dtensor, native-gloo, native-mpi")
      ->delimiter(',');
  app.add_option("--svg", svg, "the plot");
  app.add_option("--as-rank", as_rank)->group("");
  app.add_option("--result", result)->group("");
  app.add_option("--meeting", meeting)->group("");
  CLI11_PARSE(app, argc, argv);
  if (!as_rank.empty()) return be_a_rank(as_rank, result, meeting);

  setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 0);
  setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 0);
  setenv("OMP_NUM_THREADS", "1", 0);
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  std::vector<Series> series;
  for (const std::int64_t n : ranks) {
    for (const std::string& backend : backends) {
      auto samples = measure_backend(self, backend, n);
      if (samples.size() == message_sizes().size()) series.push_back({backend, n, std::move(samples)});
    }
    print_table(series, n);
  }
  print_goals(series);
  std::ofstream(svg) << draw_svg(series);
  std::printf("plot: %s\n", svg.c_str());
  return series.size() == ranks.size() * backends.size() ? 0 : 1;
}
