#pragma once

#include <cstddef>
#include <cstdint>

namespace dtensor {

// Accumulates words into a 64-bit hash. The same words give the same hash in every process, so hashes may be compared
// across ranks (as fingerprints); they are not meant to withstand an adversary.
class Hasher {
 public:
  void add(std::uint64_t word) noexcept {
    state_ = (state_ ^ word) * 0x9E3779B97F4A7C15ull;
    state_ ^= state_ >> 29;
  }
  template <class Range>
  void add_all(const Range& words) noexcept {
    add(words.size());
    for (const auto& word : words) add(static_cast<std::uint64_t>(word));
  }
  std::size_t value() const noexcept { return static_cast<std::size_t>(state_ ^ (state_ >> 32)); }

 private:
  std::uint64_t state_ = 0x243F6A8885A308D3ull;
};

}  // namespace dtensor
