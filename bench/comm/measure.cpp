#include "bench/comm/measure.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstring>
#include <sstream>
#include <thread>

namespace dtensor::bench {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// The same on all ranks. Rounds are short and many where messages are small: some of them fall between two turns of
// other programs.
struct Effort {
  int rounds, times;
};
Effort effort(std::int64_t bytes) {
  const auto within = [&](std::int64_t total, std::int64_t least, std::int64_t most) {
    return static_cast<int>(std::clamp<std::int64_t>((total << 20) / std::max<std::int64_t>(bytes, 1), least, most));
  };
  return {.rounds = within(16, 6, 20), .times = within(8, 2, 100)};
}

}  // namespace

const std::vector<std::int64_t>& message_sizes() {
  static const std::vector<std::int64_t> sizes = [] {
    std::vector<std::int64_t> list = {8};
    for (std::int64_t bytes = 1 << 10; bytes <= 64 << 20; bytes *= 4) list.push_back(bytes);
    return list;
  }();
  return sizes;
}

std::map<std::int64_t, at::Tensor> views_of_sizes() {
  const auto buffer = at::zeros({message_sizes().back() / 4}, at::kFloat);
  std::map<std::int64_t, at::Tensor> views;
  for (const std::int64_t bytes : message_sizes()) views[bytes] = buffer.narrow(0, 0, bytes / 4);
  return views;
}

std::vector<Sample> measure(const Subject& subject) {
  std::vector<Sample> samples;
  for (const std::int64_t bytes : message_sizes()) {
    constexpr float kLongest = 1;  // second, for all rounds but the first few
    const auto [rounds, times] = effort(bytes);
    const auto begin = Clock::now();
    double best = 0;
    for (int round = 0; round < rounds; ++round) {  // the first one warms up
      subject.barrier();
      const auto start = Clock::now();
      for (int i = 0; i < times; ++i) subject.all_reduce(bytes);
      const double seconds = seconds_since(start) / times;
      if (round == 1 || (round > 1 && seconds < best)) best = seconds;
      if (round >= 3 && subject.largest(static_cast<float>(seconds_since(begin))) > kLongest) break;
    }
    samples.push_back({bytes, best});
  }
  return samples;
}

double copy_seconds(std::int64_t bytes) {
  constexpr int kRounds = 6;
  double best = 1e9;
  std::barrier together(2);
  const auto copy = [&](bool timed) {
    std::vector<char> from(static_cast<std::size_t>(bytes), 1), to(static_cast<std::size_t>(bytes), 2);
    for (int round = 0; round < kRounds; ++round) {
      together.arrive_and_wait();
      const auto start = Clock::now();
      std::memcpy(to.data(), from.data(), from.size());
      asm volatile("" : : "r"(to.data()) : "memory");
      together.arrive_and_wait();
      if (timed) best = std::min(best, seconds_since(start));
    }
  };
  std::thread other([&] { copy(false); });
  copy(true);
  other.join();
  return best;
}

std::string to_text(const std::vector<Sample>& samples) {
  std::ostringstream text;
  text.precision(9);
  for (const Sample& sample : samples) text << sample.bytes << ' ' << sample.seconds << '\n';
  return text.str();
}

std::vector<Sample> from_text(const std::string& text) {
  std::istringstream stream(text);
  std::vector<Sample> samples;
  for (Sample sample; stream >> sample.bytes >> sample.seconds;) samples.push_back(sample);
  return samples;
}

}  // namespace dtensor::bench
