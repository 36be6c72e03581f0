// Saving and loading 2 GB on two ranks, beside dd on the same disk and memcpy in the same memory, in one run.
//   bench_checkpoint [FOLDER] [MEGABYTES]
#include <ATen/ops/full.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>

#include "dtensor/checkpoint/checkpoint.h"
#include "dtensor/checkpoint/folders.h"
#include "dtensor/comm/world.h"
#include "dtensor/runtime/factories.h"

namespace {

using namespace dtensor;
constexpr int kRanks = 2;
constexpr std::int64_t kTensors = 16;
constexpr int kRounds = 5;

double seconds_of(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Files leave the system's memory, so that the next read is from the disk.
void forget(const std::string& folder) {
  for (const std::string& name : names_in(folder)) {
    const std::string path = folder + "/" + name;
    if (is_folder(path)) {
      forget(path);
      continue;
    }
    const int fd = ::open(path.c_str(), O_RDONLY);
    ::fsync(fd);
    ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    ::close(fd);
  }
}

void shell(const std::string& command) {
  if (std::system(command.c_str()) != 0) {
    std::fprintf(stderr, "failed: %s\n", command.c_str());
    std::exit(1);
  }
}

// As many dd as there are ranks, each with its share.
void dd(const std::string& arguments, const std::string& folder, std::int64_t megabytes) {
  std::string command;
  for (int r = 0; r < kRanks; ++r) {
    const std::string file = folder + "/dd" + std::to_string(r);
    std::string one = arguments;
    for (std::size_t at = 0; (at = one.find("FILE")) != std::string::npos;) one.replace(at, 4, file);
    command += "dd bs=1M count=" + std::to_string(megabytes / kRanks) + " " + one + " 2>/dev/null & ";
  }
  shell(command + "wait");
}

void copy_memory(std::int64_t megabytes) {
  const std::int64_t bytes = megabytes / kRanks << 20;
  std::vector<std::thread> threads;
  static std::vector<std::vector<char>> from(kRanks), to(kRanks);
  for (int r = 0; r < kRanks; ++r) {
    from[r].resize(static_cast<std::size_t>(bytes), 1);
    to[r].resize(static_cast<std::size_t>(bytes));
  }
  for (int r = 0; r < kRanks; ++r) {
    threads.emplace_back([r, bytes] { std::memcpy(to[r].data(), from[r].data(), static_cast<std::size_t>(bytes)); });
  }
  for (std::thread& thread : threads) thread.join();
}

struct Best {
  double seconds = 1e9;
  void take(double value) { seconds = std::min(seconds, value); }
};

}  // namespace

int main(int argc, char** argv) {
  const std::string base = argc > 1 ? argv[1] : "/tmp";
  const std::int64_t megabytes = argc > 2 ? std::atoll(argv[2]) : 2048;
  const std::string folder = base + "/bench-checkpoint-" + std::to_string(::getpid());
  make_folders(folder);
  const std::int64_t rows = (megabytes << 20) / kTensors / 4 / 4096;
  Best dd_write, save, dd_cold, load_cold, dd_warm, load_warm, load_other, memory, async_stop;
  copy_memory(megabytes);
  for (int round = 0; round < kRounds; ++round) {
    dd_write.take(seconds_of([&] { dd("if=/dev/zero of=FILE conv=fdatasync", folder, megabytes); }));
    forget(folder);
    dd_cold.take(seconds_of([&] { dd("if=FILE of=/dev/null", folder, megabytes); }));
    dd_warm.take(seconds_of([&] { dd("if=FILE of=/dev/null", folder, megabytes); }));
    shell("rm -f " + folder + "/dd*");
    memory.take(seconds_of([&] { copy_memory(megabytes); }));
    run_ranks(kRanks, [&](World& world) {
      const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {kRanks}, {"x"});
      NamedTensors tensors, others;
      for (std::int64_t i = 0; i < kTensors; ++i) {
        tensors["t" + std::to_string(i)] = full({rows, 4096}, static_cast<double>(i) + 0.5, mesh, {Shard(0)});
      }
      const auto timed = [&](Best& best, const std::function<void()>& work) {
        world.group()->barrier()->wait();
        const double time = seconds_of([&] {
          work();
          world.group()->barrier()->wait();
        });
        if (world.rank() == 0) best.take(time);
      };
      const std::string where = folder + "/run";
      timed(save, [&] { save_checkpoint(where, tensors, {.step = 0}); });
      world.group()->barrier()->wait();
      if (world.rank() == 0) forget(where);
      world.group()->barrier()->wait();
      timed(load_cold, [&] { load_checkpoint(where, tensors); });
      timed(load_warm, [&] { load_checkpoint(where, tensors); });
      PendingSave pending = [&] {
        PendingSave started = save_checkpoint_async(where, tensors, {.step = 1});
        return started;
      }();
      pending.wait();
      timed(async_stop, [&] { pending = save_checkpoint_async(where, tensors, {.step = 1}); });
      pending.wait();
      for (auto& [name, tensor] : tensors) tensor = full({rows, 4096}, 0, mesh, {Shard(1)});
      timed(load_other, [&] { load_checkpoint(where, tensors); });
    });
    shell("rm -rf " + folder + "/run");
  }
  remove_all(folder);
  const double gigabytes = static_cast<double>(megabytes) / 1024;
  const auto line = [&](const char* what, const Best& ours, const char* beside, const Best& theirs) {
    std::printf("%-34s %6.2f GB/s   %-30s %6.2f GB/s   %5.2f of it\n", what, gigabytes / ours.seconds, beside,
                gigabytes / theirs.seconds, theirs.seconds / ours.seconds);
  };
  std::printf("%.1f GB in %lld tensors on %d ranks, in %s; best of %d, interleaved\n", gigabytes,
              static_cast<long long>(kTensors), kRanks, base.c_str(), kRounds);
  line("save, on the disk at the end", save, "dd conv=fdatasync", dd_write);
  line("load, from the disk", load_cold, "dd from the disk", dd_cold);
  line("load, from the system's memory", load_warm, "dd from the system's memory", dd_warm);
  line("load, from the system's memory", load_warm, "memcpy", memory);
  line("load S(0) as S(1), from memory", load_other, "memcpy", memory);
  line("what an asynchronous save stops", async_stop, "memcpy", memory);
}
