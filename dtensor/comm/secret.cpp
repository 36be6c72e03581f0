#include <sys/random.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <vector>

#include "dtensor/comm/secret_impl.h"
#include "dtensor/core/error.h"

namespace dtensor::secrets {
namespace {

constexpr std::size_t kBlock = 64;
constexpr std::size_t kShortest = 16;
constexpr std::size_t kLongest = 1024;

constexpr std::array<std::uint32_t, 64> kRounds = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

class Sha256 {
 public:
  void add(std::span<const std::uint8_t> bytes) {
    length_ += bytes.size();
    while (!bytes.empty()) {
      const std::size_t count = std::min(bytes.size(), kBlock - filled_);
      std::copy_n(bytes.begin(), count, block_.begin() + static_cast<std::ptrdiff_t>(filled_));
      filled_ += count;
      bytes = bytes.subspan(count);
      if (filled_ == kBlock) take_block();
    }
  }

  Digest finish() {
    const std::uint64_t bits = length_ * 8;
    const std::uint8_t one = 0x80, zero = 0;
    add({&one, 1});
    while (filled_ != kBlock - 8) add({&zero, 1});
    std::array<std::uint8_t, 8> length;
    for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<std::uint8_t>(bits >> (56 - 8 * i));
    add(length);
    Digest digest;
    for (std::size_t i = 0; i < digest.size(); ++i) {
      digest[i] = static_cast<std::uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
    }
    return digest;
  }

 private:
  void take_block() {
    std::array<std::uint32_t, 64> w;
    for (std::size_t i = 0; i < 16; ++i) {
      w[i] = std::uint32_t{block_[4 * i]} << 24 | std::uint32_t{block_[4 * i + 1]} << 16 |
             std::uint32_t{block_[4 * i + 2]} << 8 | std::uint32_t{block_[4 * i + 3]};
    }
    for (std::size_t i = 16; i < 64; ++i) {
      const std::uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
      const std::uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    auto [a, b, c, d, e, f, g, h] = state_;
    for (std::size_t i = 0; i < 64; ++i) {
      const std::uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const std::uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRounds[i] + w[i];
      const std::uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const std::uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g;
      g = f;
      f = e;
      e = d + t1;
      d = c;
      c = b;
      b = a;
      a = t1 + t2;
    }
    const std::array<std::uint32_t, 8> after = {a, b, c, d, e, f, g, h};
    for (std::size_t i = 0; i < 8; ++i) state_[i] += after[i];
    filled_ = 0;
  }

  std::array<std::uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::uint8_t, kBlock> block_{};
  std::size_t filled_ = 0;
  std::uint64_t length_ = 0;
};

std::span<const std::uint8_t> as_bytes(std::string_view text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

}  // namespace

Digest sha256(std::span<const std::uint8_t> message) {
  Sha256 hash;
  hash.add(message);
  return hash.finish();
}

Digest hmac_sha256(std::span<const std::uint8_t> key, std::span<const std::uint8_t> message) {
  std::array<std::uint8_t, kBlock> inner{}, outer{};
  if (key.size() > kBlock) {
    const Digest shorter = sha256(key);
    std::copy(shorter.begin(), shorter.end(), inner.begin());
  } else {
    std::copy(key.begin(), key.end(), inner.begin());
  }
  for (std::size_t i = 0; i < kBlock; ++i) {
    outer[i] = inner[i] ^ 0x5c;
    inner[i] ^= 0x36;
  }
  Sha256 first;
  first.add(inner);
  first.add(message);
  const Digest digest = first.finish();
  Sha256 second;
  second.add(outer);
  second.add(digest);
  return second.finish();
}

bool equal_in_constant_time(std::span<const std::uint8_t> left, std::span<const std::uint8_t> right) {
  if (left.size() != right.size()) return false;
  volatile std::uint8_t difference = 0;  // or the compiler might stop at the first one
  for (std::size_t i = 0; i < left.size(); ++i) difference = difference | (left[i] ^ right[i]);
  return difference == 0;
}

Digest random_digest() {
  Digest result;
  std::size_t filled = 0;
  while (filled < result.size()) {
    const ssize_t got = getrandom(result.data() + filled, result.size() - filled, 0);
    if (got > 0) {
      filled += static_cast<std::size_t>(got);
    } else if (errno != EINTR) {
      fail(ErrorKind::kInternal, "secret",
           {.what = "the operating system gives no random bytes", .got = std::strerror(errno)});
    }
  }
  return result;
}

std::string make_secret() {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (const std::uint8_t byte : random_digest()) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

void check_secret(std::string_view where, std::string_view name, std::string_view secret) {
  if (secret.empty()) return;
  if (secret.size() < kShortest || secret.size() > kLongest) {
    fail_invalid(where, {.what = std::string(name) + " has the wrong length",
                         .got = std::to_string(secret.size()) + " characters",
                         .expected = std::to_string(kShortest) + " to " + std::to_string(kLongest),
                         .advice = "the output of: openssl rand -hex 32"});
  }
  if (!std::all_of(secret.begin(), secret.end(), [](unsigned char c) { return c > ' ' && c < 0x7f; })) {
    fail_invalid(where, {.what = std::string(name) + " has a character that a secret may not have",
                         .expected = "printable ASCII without blanks",
                         .advice = "the output of: openssl rand -hex 32"});
  }
}

Digest prove(std::string_view secret, Role role, const Handshake& handshake) {
  constexpr std::string_view kPurpose = "dtensor rendezvous 2";
  std::vector<std::uint8_t> message(kPurpose.begin(), kPurpose.end());
  message.push_back(static_cast<std::uint8_t>(role));
  for (const std::int64_t number : {handshake.rank, handshake.size}) {
    for (int i = 0; i < 8; ++i)
      message.push_back(static_cast<std::uint8_t>(static_cast<std::uint64_t>(number) >> 8 * i));
  }
  message.insert(message.end(), handshake.client_nonce.begin(), handshake.client_nonce.end());
  message.insert(message.end(), handshake.server_nonce.begin(), handshake.server_nonce.end());
  return hmac_sha256(as_bytes(secret), message);
}

}  // namespace dtensor::secrets
