// Are the numbers random? Moments, distances between distribution functions, correlations; with fixed seeds, at levels
// that a right generator misses once in ten thousand choices of the seed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>

#include "dtensor/core/random.h"

namespace dtensor {
namespace {

constexpr std::int64_t kCount = 1 << 17;

std::vector<double> drawn(const Draw& draw, DType dtype, const RandomKey& key, std::int64_t first = 0) {
  std::vector<double> result(kCount);
  if (dtype == DType::kF64) {
    draw_elements(key, draw, dtype, first, kCount, result.data());
  } else {
    std::vector<float> small(kCount);
    draw_elements(key, draw, DType::kF32, first, kCount, small.data());
    std::copy(small.begin(), small.end(), result.begin());
  }
  return result;
}

// Kolmogorov and Smirnov's distance times the root of n; above 2.23 once in ten thousand.
double distance(std::vector<double> values, const std::function<double(double)>& cdf) {
  std::sort(values.begin(), values.end());
  double worst = 0;
  const auto n = static_cast<double>(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double f = cdf(values[i]);
    worst = std::max({worst, f - static_cast<double>(i) / n, static_cast<double>(i + 1) / n - f});
  }
  return worst * std::sqrt(n);
}

// In units of its deviation, 1/sqrt(n), where the two are independent.
double correlation(const std::vector<double>& a, const std::vector<double>& b, std::size_t lag = 0) {
  const std::size_t n = a.size() - lag;
  double ma = 0, mb = 0;
  for (std::size_t i = 0; i < n; ++i) ma += a[i], mb += b[i + lag];
  ma /= static_cast<double>(n), mb /= static_cast<double>(n);
  double ab = 0, aa = 0, bb = 0;
  for (std::size_t i = 0; i < n; ++i) {
    ab += (a[i] - ma) * (b[i + lag] - mb);
    aa += (a[i] - ma) * (a[i] - ma);
    bb += (b[i + lag] - mb) * (b[i + lag] - mb);
  }
  return ab / std::sqrt(aa * bb) * std::sqrt(static_cast<double>(n));
}

double normal_cdf(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }

struct Case {
  const char* name;
  Draw draw;
  std::function<double(double)> cdf;
};

std::vector<Case> continuous() {
  return {{"uniform", Draw::uniform(-1, 3), [](double x) { return (x + 1) / 4; }},
          {"normal", Draw::normal(2, 0.5), [](double x) { return normal_cdf((x - 2) / 0.5); }},
          {"log_normal", Draw::log_normal(0.5, 0.75), [](double x) { return normal_cdf((std::log(x) - 0.5) / 0.75); }},
          {"exponential", Draw::exponential(2), [](double x) { return 1 - std::exp(-2 * x); }},
          {"cauchy", Draw::cauchy(1, 2), [](double x) { return 0.5 + std::atan((x - 1) / 2) / M_PI; }}};
}

TEST(RandomStatistics, DistributionsAreTheirs) {
  for (const Case& c : continuous()) {
    for (const DType dtype : {DType::kF32, DType::kF64}) {
      for (const std::uint64_t seed : {1u, 2u, 3u}) {
        EXPECT_LT(distance(drawn(c.draw, dtype, random_key(seed, 0, 0)), c.cdf), 2.23) << c.name << " seed " << seed;
      }
    }
  }
}

TEST(RandomStatistics, Moments) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    double mean = 0, square = 0, cube = 0, fourth = 0;
    for (const double z : drawn(Draw::normal(0, 1), dtype, random_key(11, 0, 0))) {
      mean += z, square += z * z, cube += z * z * z, fourth += z * z * z * z;
    }
    const double n = kCount, root = std::sqrt(n);
    EXPECT_LT(std::abs(mean / n) * root, 4);
    EXPECT_LT(std::abs(square / n - 1) * root / std::sqrt(2.0), 4);
    EXPECT_LT(std::abs(cube / n) * root / std::sqrt(15.0), 4);
    EXPECT_LT(std::abs(fourth / n - 3) * root / std::sqrt(96.0), 4);
    mean = square = 0;
    for (const double u : drawn(Draw::uniform(0, 1), dtype, random_key(12, 0, 0))) mean += u, square += u * u;
    EXPECT_LT(std::abs(mean / n - 0.5) * root * std::sqrt(12.0), 4);
    EXPECT_LT(std::abs(square / n - 1.0 / 3) * root / std::sqrt(4.0 / 45), 4);
  }
}

TEST(RandomStatistics, TailsAreThere) {
  // Of 2^22 normals about 2.4 are beyond 5, and 11,300 beyond 3.
  constexpr std::int64_t kMany = 1 << 22;
  std::vector<float> values(kMany);
  draw_elements(random_key(4, 0, 0), Draw::normal(0, 1), DType::kF32, 0, kMany, values.data());
  const auto beyond = [&](float limit) {
    return std::count_if(values.begin(), values.end(), [&](float z) { return std::abs(z) > limit; });
  };
  const double expected = kMany * 2 * (1 - normal_cdf(3));
  EXPECT_LT(std::abs(static_cast<double>(beyond(3)) - expected), 4 * std::sqrt(expected));
  EXPECT_GE(beyond(5), 1);
  EXPECT_LE(beyond(5), 10);
}

TEST(RandomStatistics, CountsAreTheirs) {
  // Chi-squared in units of its deviation.
  const auto excess = [](const std::map<std::int64_t, double>& expected, const std::vector<std::int64_t>& values) {
    std::map<std::int64_t, double> counts;
    for (const std::int64_t v : values) ++counts[std::min(v, expected.rbegin()->first)];
    double chi = 0;
    for (const auto& [value, e] : expected) chi += (counts[value] - e) * (counts[value] - e) / e;
    const double freedom = static_cast<double>(expected.size()) - 1;
    return (chi - freedom) / std::sqrt(2 * freedom);
  };
  std::vector<std::int64_t> values(kCount);
  std::map<std::int64_t, double> expected;
  for (std::int64_t k = 0; k < 37; ++k) expected[k] = static_cast<double>(kCount) / 37;
  draw_elements(random_key(21, 0, 0), Draw::integers(0, 37), DType::kI64, 0, kCount, values.data());
  EXPECT_LT(excess(expected, values), 4.5);

  expected.clear();
  for (std::int64_t k = 1; k < 20; ++k) expected[k] = kCount * 0.3 * std::pow(0.7, static_cast<double>(k - 1));
  expected[20] = kCount * std::pow(0.7, 19);
  draw_elements(random_key(22, 0, 0), Draw::geometric(0.3), DType::kI64, 0, kCount, values.data());
  EXPECT_LT(excess(expected, values), 4.5);

  draw_elements(random_key(23, 0, 0), Draw::bernoulli(0.2), DType::kI64, 0, kCount, values.data());
  expected = {{0, kCount * 0.8}, {1, kCount * 0.2}};
  EXPECT_LT(excess(expected, values), 8);
}

TEST(RandomStatistics, PermutationsAreEquallyLikely) {
  // All 24 of four, over calls; where a large one sends its first elements; how many stay.
  std::map<std::vector<std::int64_t>, double> counts;
  constexpr int kCalls = 24000;
  for (std::uint64_t call = 0; call < kCalls; ++call) {
    std::vector<std::int64_t> values(4);
    draw_elements(random_key(31, 0, call), Draw::permutation(4), DType::kI64, 0, 4, values.data());
    ++counts[values];
  }
  ASSERT_EQ(counts.size(), 24u);
  double chi = 0;
  for (const auto& [permutation, count] : counts) chi += (count - 1000) * (count - 1000) / 1000;
  EXPECT_LT((chi - 23) / std::sqrt(46.0), 4.5);

  constexpr std::int64_t kSize = 5003;
  std::vector<double> first, second;
  double fixed = 0;
  for (std::uint64_t call = 0; call < 4000; ++call) {
    std::vector<std::int64_t> values(64);
    draw_elements(random_key(32, 0, call), Draw::permutation(kSize), DType::kI64, 100, 64, values.data());
    first.push_back((static_cast<double>(values[0]) + 0.5) / kSize);
    second.push_back((static_cast<double>(values[1]) + 0.5) / kSize);
    for (std::int64_t i = 0; i < 64; ++i) fixed += values[static_cast<std::size_t>(i)] == 100 + i;
  }
  EXPECT_LT(distance(first, [](double x) { return x; }), 2.23);
  EXPECT_LT(distance(second, [](double x) { return x; }), 2.23);
  EXPECT_LT(std::abs(correlation(first, second)), 4);
  const double expected = 4000.0 * 64 / kSize;
  EXPECT_LT(std::abs(fixed - expected), 4 * std::sqrt(expected));
}

TEST(RandomStatistics, NothingIsCorrelated) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    for (const Draw& draw : {Draw::uniform(0, 1), Draw::normal(0, 1)}) {
      const std::vector<double> base = drawn(draw, dtype, random_key(41, 0, 0));
      for (std::size_t lag = 1; lag <= 17; ++lag) EXPECT_LT(std::abs(correlation(base, base, lag)), 4) << "lag " << lag;
      const auto squared = [](std::vector<double> values) {
        for (double& v : values) v *= v;
        return values;
      };
      for (std::size_t lag = 1; lag <= 5; ++lag) {
        EXPECT_LT(std::abs(correlation(squared(base), squared(base), lag)), 4.5) << "squares, lag " << lag;
      }
      EXPECT_LT(std::abs(correlation(base, drawn(draw, dtype, random_key(41, 0, 1)))), 4) << "the next call";
      EXPECT_LT(std::abs(correlation(base, drawn(draw, dtype, random_key(41, 1, 0)))), 4) << "another stream";
      EXPECT_LT(std::abs(correlation(base, drawn(draw, dtype, random_key(42, 0, 0)))), 4) << "another seed";
      EXPECT_LT(std::abs(correlation(base, drawn(draw, dtype, random_key(41, 0, std::uint64_t{1} << 32)))), 4);
      EXPECT_LT(std::abs(correlation(base, drawn(draw, dtype, random_key(41, 0, 0), kCount))), 4) << "further on";
    }
  }
}

}  // namespace
}  // namespace dtensor
