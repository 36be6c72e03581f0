#include "dtensor/core/checksum.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

namespace dtensor {
namespace {

std::vector<unsigned char> bytes_of(std::size_t size, unsigned seed = 1) {
  std::mt19937 generator(seed);
  std::vector<unsigned char> bytes(size);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(generator());
  return bytes;
}

// Machines with and without AVX2 must agree.
TEST(Checksum, IsTheSameInBothForms) {
  for (const std::size_t size : {0, 1, 7, 63, 64, 65, 127, 128, 1000, 4096, 100003}) {
    const auto bytes = bytes_of(size);
    EXPECT_EQ(checksum(bytes.data(), size), portable_checksum(bytes.data(), size)) << size;
  }
}

TEST(Checksum, IsAKnownValue) {
  const auto bytes = bytes_of(1000);
  EXPECT_EQ(checksum(bytes.data(), 1000), checksum(bytes_of(1000).data(), 1000));
  EXPECT_NE(checksum(bytes.data(), 1000), checksum(bytes.data(), 999));
}

TEST(Checksum, SeesEveryChangedBit) {
  auto bytes = bytes_of(200);
  std::set<std::uint64_t> seen = {checksum(bytes.data(), bytes.size())};
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
    EXPECT_TRUE(seen.insert(checksum(bytes.data(), bytes.size())).second) << bit;
    bytes[bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
  }
}

TEST(Checksum, SeesSwappedWordsAndZeros) {
  std::vector<std::uint64_t> words(64, 0);
  std::set<std::uint64_t> seen;
  for (std::size_t n = 0; n <= words.size(); ++n) EXPECT_TRUE(seen.insert(checksum(words.data(), 8 * n)).second) << n;
  words[3] = 5;
  const std::uint64_t before = checksum(words.data(), 512);
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (i == 3) continue;
    std::swap(words[3], words[i]);
    EXPECT_NE(checksum(words.data(), 512), before) << i;
    std::swap(words[3], words[i]);
  }
}

TEST(Checksum, SamplesLargeMemory) {
  auto bytes = bytes_of(kCompleteBytes + 12345);
  const std::uint64_t before = sampled_checksum(bytes.data(), bytes.size());
  for (const std::size_t at : {std::size_t{0}, std::size_t{4095}, bytes.size() - 1, bytes.size() - 4096}) {
    bytes[at] ^= 1;
    EXPECT_NE(sampled_checksum(bytes.data(), bytes.size()), before) << at;
    bytes[at] ^= 1;
  }
  EXPECT_EQ(sampled_checksum(bytes.data(), bytes.size()), before);
  EXPECT_NE(sampled_checksum(bytes.data(), bytes.size() - 1), before);
  EXPECT_EQ(sampled_checksum(bytes.data(), 1000), checksum(bytes.data(), 1000));
}

}  // namespace
}  // namespace dtensor
