#include "dtensor/core/checksum.h"

#include <cstring>

#include "dtensor/core/hash.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dtensor {
namespace {

// Eight 64-bit lanes take one stripe at a time. A lane adds the product of the two halves of its word, mixed with a key
// that changes from stripe to stripe, and its neighbour's word as it is: moved, swapped and changed words all show.
constexpr std::size_t kLanes = 8;
constexpr std::size_t kStripe = kLanes * sizeof(std::uint64_t);
constexpr std::uint64_t kStep = 0x9E3779B97F4A7C15ull;
alignas(64) constexpr std::uint64_t kKeys[kLanes] = {
    0x452821E638D01377ull, 0xBE5466CF34E90C6Cull, 0xC0AC29B7C97C50DDull, 0x3F84D5B5B5470917ull,
    0x9216D5D98979FB1Bull, 0xD1310BA698DFB5ACull, 0x2FFD72DBD01ADFB7ull, 0xB8E1AFED6A267E96ull};

struct Lanes {
  alignas(64) std::uint64_t sums[kLanes] = {};
  std::uint64_t stripes = 0;
};

void add_stripes(Lanes& lanes, const unsigned char* data, std::size_t count) {
  for (std::size_t s = 0; s < count; ++s, ++lanes.stripes, data += kStripe) {
    const std::uint64_t shift = lanes.stripes * kStep;
    for (std::size_t i = 0; i < kLanes; ++i) {
      std::uint64_t word = 0;
      std::memcpy(&word, data + 8 * i, 8);
      const std::uint64_t mixed = word ^ (kKeys[i] + shift);
      lanes.sums[i] += (mixed & 0xFFFFFFFFull) * (mixed >> 32);
      lanes.sums[i ^ 1] += word;
    }
  }
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void add_stripes_avx2(Lanes& lanes, const unsigned char* data, std::size_t count) {
  const __m256i step = _mm256_set1_epi64x(static_cast<long long>(kStep));
  const __m256i shift = _mm256_set1_epi64x(static_cast<long long>(lanes.stripes * kStep));
  __m256i low = _mm256_load_si256(reinterpret_cast<const __m256i*>(lanes.sums));
  __m256i high = _mm256_load_si256(reinterpret_cast<const __m256i*>(lanes.sums + 4));
  __m256i low_key = _mm256_add_epi64(_mm256_load_si256(reinterpret_cast<const __m256i*>(kKeys)), shift);
  __m256i high_key = _mm256_add_epi64(_mm256_load_si256(reinterpret_cast<const __m256i*>(kKeys + 4)), shift);
  for (std::size_t s = 0; s < count; ++s, data += kStripe) {
    const __m256i low_word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
    const __m256i high_word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + 32));
    const __m256i low_mixed = _mm256_xor_si256(low_word, low_key);
    const __m256i high_mixed = _mm256_xor_si256(high_word, high_key);
    low = _mm256_add_epi64(low, _mm256_mul_epu32(low_mixed, _mm256_srli_epi64(low_mixed, 32)));
    high = _mm256_add_epi64(high, _mm256_mul_epu32(high_mixed, _mm256_srli_epi64(high_mixed, 32)));
    low = _mm256_add_epi64(low, _mm256_shuffle_epi32(low_word, _MM_SHUFFLE(1, 0, 3, 2)));
    high = _mm256_add_epi64(high, _mm256_shuffle_epi32(high_word, _MM_SHUFFLE(1, 0, 3, 2)));
    low_key = _mm256_add_epi64(low_key, step);
    high_key = _mm256_add_epi64(high_key, step);
  }
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes.sums), low);
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes.sums + 4), high);
  lanes.stripes += count;
}
#endif

template <class AddStripes>
std::uint64_t checksum_by(const void* data, std::size_t bytes, AddStripes add) noexcept {
  Lanes lanes;
  const auto* at = static_cast<const unsigned char*>(data);
  const std::size_t whole = bytes / kStripe;
  if (whole > 0) add(lanes, at, whole);
  if (const std::size_t rest = bytes % kStripe; rest > 0) {
    unsigned char last[kStripe] = {};
    std::memcpy(last, at + whole * kStripe, rest);
    add_stripes(lanes, last, 1);
  }
  Hasher hasher;
  hasher.add(bytes);
  for (const std::uint64_t sum : lanes.sums) hasher.add(sum);
  return hasher.value();
}

}  // namespace

std::uint64_t portable_checksum(const void* data, std::size_t bytes) noexcept {
  return checksum_by(data, bytes, add_stripes);
}

std::uint64_t checksum(const void* data, std::size_t bytes) noexcept {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
  if (has_avx2) return checksum_by(data, bytes, add_stripes_avx2);
#endif
  return portable_checksum(data, bytes);
}

std::uint64_t sampled_checksum(const void* data, std::size_t bytes) noexcept {
  if (bytes <= kCompleteBytes) return checksum(data, bytes);
  constexpr std::size_t kEnd = 4096, kLine = 64, kLines = 64;
  const auto* at = static_cast<const unsigned char*>(data);
  Hasher hasher;
  hasher.add(bytes);
  hasher.add(checksum(at, kEnd));
  hasher.add(checksum(at + bytes - kEnd, kEnd));
  unsigned char lines[kLines * kLine];
  const std::size_t apart = (bytes - 2 * kEnd) / kLines / kLine * kLine;
  for (std::size_t i = 0; i < kLines; ++i) std::memcpy(lines + i * kLine, at + kEnd + i * apart, kLine);
  hasher.add(checksum(lines, sizeof lines));
  return hasher.value();
}

}  // namespace dtensor
