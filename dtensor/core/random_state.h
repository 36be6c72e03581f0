#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "dtensor/core/random.h"

namespace dtensor {

// Where a rank stands in its random numbers: a value that can be kept, compared, printed and read again.
struct RandomState {
  std::uint64_t seed = 0;
  std::uint64_t stream = 0;                      // that the next call draws from
  std::map<std::uint64_t, std::uint64_t> calls;  // made so far, by stream; those without any are left out

  // `seed 7, stream 0, calls 0:12 5:3`
  std::string to_string() const;
  static RandomState parse(std::string_view text);
  friend bool operator==(const RandomState&, const RandomState&) = default;
};

// One rank's random numbers. It is a part of the rank's context, so threads can be ranks; may be used by several
// threads. Stream 0 is the one that all ranks draw from together, call by call; the others are for programs whose ranks
// differ.
class RandomSource {
 public:
  RandomSource();

  // The key of one logical call of the current stream.
  RandomKey next();
  // Of one that draws its 64 bits from a generator of the program's.
  RandomKey next_from(std::uint64_t bits);

  // From the start, in all streams.
  void seed(std::uint64_t seed);
  RandomState state() const;
  void set_state(const RandomState& state);

  // What all ranks must have alike: the number of calls of stream 0 in the lower 40 bits, above them a digest of the
  // seed and of what generators gave. Others may hold it longer than this lives.
  using Progress = std::shared_ptr<const std::atomic<std::uint64_t>>;
  Progress progress() const { return progress_; }
  static std::uint64_t calls_of(std::uint64_t progress) { return progress & 0xFFFFFFFFFFu; }

 private:
  void publish();

  mutable std::mutex mutex_;
  RandomState state_;
  std::uint64_t drawn_ = 0;  // digest of what generators gave
  std::shared_ptr<std::atomic<std::uint64_t>> progress_;
};

}  // namespace dtensor
