#include "dtensor/checkpoint/checksum.h"

#include <algorithm>
#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dtensor {
namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78;  // reflected

// tables[k][b]: what byte b does to the remainder with k bytes after it.
constexpr auto make_tables() {
  std::array<std::array<std::uint32_t, 256>, 8> tables{};
  for (std::uint32_t b = 0; b < 256; ++b) {
    std::uint32_t value = b;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) ? kPolynomial : 0);
    tables[0][b] = value;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t b = 0; b < 256; ++b) {
      tables[k][b] = (tables[k - 1][b] >> 8) ^ tables[0][tables[k - 1][b] & 0xff];
    }
  }
  return tables;
}
constexpr auto kTables = make_tables();

std::uint64_t word_at(const unsigned char* at) {
  std::uint64_t word = 0;
  std::memcpy(&word, at, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  word = __builtin_bswap64(word);
#endif
  return word;
}

std::uint32_t by_tables(std::uint32_t crc, const unsigned char* at, std::size_t bytes) {
  for (; bytes >= 8; bytes -= 8, at += 8) {
    const std::uint64_t word = word_at(at) ^ crc;
    crc = 0;
    for (std::size_t k = 0; k < 8; ++k) crc ^= kTables[7 - k][(word >> (8 * k)) & 0xff];
  }
  for (; bytes > 0; --bytes, ++at) crc = (crc >> 8) ^ kTables[0][(crc ^ *at) & 0xff];
  return crc;
}

#if defined(__x86_64__)
// What `kLane` bytes of zeros after it do to a remainder, by its four bytes: joins lanes that were computed apart.
constexpr std::size_t kLane = 1024;
constexpr auto make_shift() {
  std::array<std::array<std::uint32_t, 256>, 4> shift{};
  // The effect is linear: of the single bits first, then of bytes.
  std::array<std::uint32_t, 32> bits{};
  for (std::size_t bit = 0; bit < 32; ++bit) {
    std::uint32_t value = 1u << bit;
    for (std::size_t zero = 0; zero < kLane; ++zero) value = (value >> 8) ^ kTables[0][value & 0xff];
    bits[bit] = value;
  }
  for (std::size_t byte = 0; byte < 4; ++byte) {
    for (std::size_t b = 0; b < 256; ++b) {
      for (std::size_t bit = 0; bit < 8; ++bit) {
        if ((b >> bit) & 1) shift[byte][b] ^= bits[8 * byte + bit];
      }
    }
  }
  return shift;
}
constexpr auto kShift = make_shift();

std::uint32_t shifted(std::uint32_t crc) {
  return kShift[0][crc & 0xff] ^ kShift[1][(crc >> 8) & 0xff] ^ kShift[2][(crc >> 16) & 0xff] ^ kShift[3][crc >> 24];
}

bool has_instruction() {
  static const bool has = __builtin_cpu_supports("sse4.2");
  return has;
}

bool has_wide_product() {
  static const bool has =
      has_instruction() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
  return has;
}

// Three lanes at a time: the instruction takes three cycles, and one can start in each.
__attribute__((target("sse4.2"))) std::uint32_t by_instruction(std::uint32_t start, const unsigned char* at,
                                                               std::size_t bytes) {
  std::uint64_t crc = start;
  for (; bytes >= 3 * kLane; bytes -= 3 * kLane, at += 3 * kLane) {
    std::uint64_t second = 0;
    std::uint64_t third = 0;
    for (std::size_t i = 0; i < kLane; i += 8) {
      crc = __builtin_ia32_crc32di(crc, word_at(at + i));
      second = __builtin_ia32_crc32di(second, word_at(at + kLane + i));
      third = __builtin_ia32_crc32di(third, word_at(at + 2 * kLane + i));
    }
    crc = shifted(shifted(static_cast<std::uint32_t>(crc)) ^ static_cast<std::uint32_t>(second)) ^ third;
  }
  for (; bytes >= 8; bytes -= 8, at += 8) crc = __builtin_ia32_crc32di(crc, word_at(at));
  auto rest = static_cast<std::uint32_t>(crc);
  for (; bytes > 0; --bytes, ++at) rest = __builtin_ia32_crc32qi(rest, *at);
  return rest;
}

// x^e modulo the polynomial, in the upper half of a word: by it a word is moved on when the product, which comes out
// one bit lower than the words are read, is counted in.
constexpr long long power(int e) {
  std::uint32_t value = 0x80000000;
  for (int i = 0; i < e; ++i) value = (value >> 1) ^ ((value & 1) ? kPolynomial : 0);
  return static_cast<long long>(static_cast<std::uint64_t>(value) << 32);
}

// Blocks of 256 bytes, each multiplied into the next without carries: what is left at the end is a block with the same
// remainder as all of them. Copies them past the caches, if so told. Pre: bytes >= 256; `to` aligned to 64.
constexpr std::size_t kBlock = 256;
template <bool kCopies>
__attribute__((target("avx512f,vpclmulqdq,sse4.2"))) std::uint32_t by_folding(std::uint32_t start,
                                                                              const unsigned char* at,
                                                                              std::size_t bytes, unsigned char* to) {
  constexpr int kBits = 8 * kBlock;
  constexpr long long low = power(kBits + 63);
  constexpr long long high = power(kBits - 1);
  const __m512i by = _mm512_set_epi64(high, low, high, low, high, low, high, low);
  __m512i sum[4];
  for (std::size_t i = 0; i < 4; ++i) {
    sum[i] = _mm512_loadu_si512(at + 64 * i);
    if constexpr (kCopies) _mm512_stream_si512(reinterpret_cast<__m512i*>(to + 64 * i), sum[i]);
  }
  sum[0] = _mm512_xor_si512(sum[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(start))));
  std::size_t done = kBlock;
  for (; done + kBlock <= bytes; done += kBlock) {
    for (std::size_t i = 0; i < 4; ++i) {
      const __m512i data = _mm512_loadu_si512(at + done + 64 * i);
      if constexpr (kCopies) _mm512_stream_si512(reinterpret_cast<__m512i*>(to + done + 64 * i), data);
      sum[i] = _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(sum[i], by, 0x00),
                                         _mm512_clmulepi64_epi128(sum[i], by, 0x11), data, 0x96);  // xor of the three
    }
  }
  unsigned char block[kBlock];
  for (std::size_t i = 0; i < 4; ++i) _mm512_storeu_si512(block + 64 * i, sum[i]);
  if constexpr (kCopies) {
    _mm_sfence();
    std::memcpy(to + done, at + done, bytes - done);
  }
  return by_instruction(by_instruction(0, block, kBlock), at + done, bytes - done);
}
#endif

}  // namespace

std::uint32_t checksum(const void* data, std::size_t bytes, std::uint32_t before) {
  const auto* at = static_cast<const unsigned char*>(data);
#if defined(__x86_64__)
  if (has_wide_product() && bytes >= kBlock) return ~by_folding<false>(~before, at, bytes, nullptr);
  if (has_instruction()) return ~by_instruction(~before, at, bytes);
#endif
  return checksum_by_tables(at, bytes, before);
}

std::uint32_t copy_with_checksum(void* to, const void* from, std::size_t bytes, std::uint32_t before) {
  auto* out = static_cast<unsigned char*>(to);
  const auto* in = static_cast<const unsigned char*>(from);
#if defined(__x86_64__)
  if (has_wide_product() && bytes >= kBlock && reinterpret_cast<std::uintptr_t>(to) % 64 == 0) {
    return ~by_folding<true>(~before, in, bytes, out);
  }
#endif
  constexpr std::size_t kChunk = 16 << 10;  // stays in the cache between the two
  for (std::size_t at = 0; at < bytes; at += kChunk) {
    const std::size_t n = std::min(kChunk, bytes - at);
    std::memcpy(out + at, in + at, n);
    before = checksum(in + at, n, before);
  }
  return before;
}

std::uint32_t checksum_by_tables(const void* data, std::size_t bytes, std::uint32_t before) {
  return ~by_tables(~before, static_cast<const unsigned char*>(data), bytes);
}

namespace {

// The product of two polynomials modulo the polynomial of the checksum; the highest bit is x^0.
std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (std::uint32_t bit = 0x80000000; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b >> 1) ^ ((b & 1) ? kPolynomial : 0);
  }
  return product;
}

// By it a checksum is multiplied when so many bytes follow.
std::uint32_t power_of_bytes(std::uint64_t bytes) {
  std::uint32_t power = 0x80000000;
  for (std::uint32_t square = 0x00800000; bytes != 0; bytes >>= 1, square = multiply(square, square)) {
    if (bytes & 1) power = multiply(power, square);
  }
  return power;
}

}  // namespace

std::uint32_t join_checksums(const std::vector<std::uint32_t>& blocks, std::int64_t bytes, std::int64_t block_bytes) {
  if (blocks.empty()) return 0;
  const std::uint32_t full = power_of_bytes(static_cast<std::uint64_t>(block_bytes));
  const auto rest = bytes - static_cast<std::int64_t>(blocks.size() - 1) * block_bytes;
  std::uint32_t sum = 0;
  for (std::size_t i = 0; i + 1 < blocks.size(); ++i) sum = multiply(full, sum) ^ blocks[i];
  return multiply(power_of_bytes(static_cast<std::uint64_t>(rest)), sum) ^ blocks.back();
}

std::string checksum_text(std::uint32_t value) {
  std::string text(8, '0');
  for (std::size_t i = 8; i-- > 0; value >>= 4) text[i] = "0123456789abcdef"[value & 15];
  return text;
}

std::optional<std::uint32_t> parse_checksum(std::string_view text) {
  if (text.size() != 8) return std::nullopt;
  std::uint32_t value = 0;
  for (const char c : text) {
    if (c >= '0' && c <= '9') {
      value = value * 16 + static_cast<std::uint32_t>(c - '0');
    } else if (c >= 'a' && c <= 'f') {
      value = value * 16 + static_cast<std::uint32_t>(c - 'a' + 10);
    } else {
      return std::nullopt;
    }
  }
  return value;
}

}  // namespace dtensor
