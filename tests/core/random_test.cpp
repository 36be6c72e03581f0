// Random values by global index: the published vectors, and each element alone against all of them together.
#include "dtensor/core/random.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <set>

#include "dtensor/core/random_math.h"
#include "dtensor/core/random_plan.h"
#include "dtensor/core/random_state.h"
#include "dtensor/core/random_store.h"
#include "tests/core/expect_error.h"
#include "tests/core/sweep.h"

namespace dtensor {
namespace {

using Bytes = std::vector<unsigned char>;

const std::vector<Draw>& draws() {
  static const std::vector<Draw> list = {
      Draw::uniform(0, 1),     Draw::uniform(-2, -1),   Draw::normal(0, 1),
      Draw::normal(-3, 0.25),  Draw::log_normal(1, 2),  Draw::exponential(1.5),
      Draw::cauchy(0, 1),      Draw::geometric(0.3),    Draw::bernoulli(0.25),
      Draw::bernoulli(0),      Draw::bernoulli(1),      Draw::integers(-7, 100),
      Draw::permutation(2000), Draw::permutation(6000), {.kind = Draw::Kind::kUnit32},
      Draw::integers(0, 0)};
  return list;
}

constexpr DType kTypes[] = {DType::kBool, DType::kU8,  DType::kI8,  DType::kI16,  DType::kI32,   DType::kI64,
                            DType::kU16,  DType::kU32, DType::kU64, DType::kF16,  DType::kBF16,  DType::kF32,
                            DType::kF64,  DType::kC32, DType::kC64, DType::kC128, DType::kF8E4M3};

Bytes elements(const RandomKey& key, const Draw& draw, DType dtype, std::int64_t first, std::int64_t count) {
  Bytes result(static_cast<std::size_t>(count * element_size(dtype)), 0xAB);
  draw_elements(key, draw, dtype, first, count, result.data());
  return result;
}

std::vector<float> floats(const RandomKey& key, const Draw& draw, std::int64_t first, std::int64_t count) {
  std::vector<float> result(static_cast<std::size_t>(count));
  draw_elements(key, draw, DType::kF32, first, count, result.data());
  return result;
}

TEST(Random, PhiloxGivesThePublishedVectors) {
  using Block = std::array<std::uint32_t, 4>;
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}), (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr std::uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(philox4x32({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// The layout that a kernel on another device has to follow.
TEST(Random, AnElementIsALaneOfItsBlock) {
  const RandomKey key = random_key(42, 3, (std::uint64_t{7} << 32) + 9);
  EXPECT_EQ(key.call, 9u);
  const auto mixed = philox4x32({3, 0, 7, 3}, {42, 0});
  EXPECT_EQ(key.key, (std::array{mixed[0], mixed[1]}));
  for (const std::int64_t i : {std::int64_t{0}, std::int64_t{5}, std::int64_t{1} << 35, (std::int64_t{1} << 40) + 3}) {
    const auto block4 =
        philox4x32({static_cast<std::uint32_t>(i / 4), static_cast<std::uint32_t>(i / 4 >> 32), 9, 0}, key.key);
    EXPECT_EQ(floats(key, Draw::uniform(0, 1), i, 1)[0], static_cast<float>(block4[i % 4] >> 8) * 0x1p-24f);
    const auto block2 =
        philox4x32({static_cast<std::uint32_t>(i / 2), static_cast<std::uint32_t>(i / 2 >> 32), 9, 0}, key.key);
    double value = 0;
    draw_elements(key, Draw::uniform(0, 1), DType::kF64, i, 1, &value);
    const std::uint64_t bits = block2[i % 2 * 2] | (std::uint64_t{block2[i % 2 * 2 + 1]} << 32);
    EXPECT_EQ(value, static_cast<double>(bits >> 11) * 0x1p-53);
    std::int64_t whole = 0;
    draw_elements(key, Draw::integers(0, 0), DType::kI64, i, 1, &whole);
    EXPECT_EQ(static_cast<std::uint64_t>(whole), bits);
  }
}

TEST(Random, SeedsStreamsAndCallsAreFarApart) {
  std::set<std::pair<std::uint64_t, std::uint32_t>> seen;
  for (const std::uint64_t seed : {0u, 1u, 2u, 1u << 31}) {
    for (const std::uint64_t stream : {0u, 1u, 2u}) {
      for (const std::uint64_t call : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << 32}) {
        const RandomKey key = random_key(seed, stream, call);
        EXPECT_TRUE(seen.insert({key.key[0] | (std::uint64_t{key.key[1]} << 32), key.call}).second);
      }
    }
  }
}

TEST(Random, EachElementAloneIsWhatItIsAmongOthers) {
  const RandomKey key = random_key(5, 0, 1);
  constexpr std::int64_t kCount = 1500;
  for (const Draw& draw : draws()) {
    for (const DType dtype : kTypes) {
      if (!can_draw(draw, dtype)) continue;
      SCOPED_TRACE(draw.to_string() + " as " + std::string(to_string(dtype)));
      const std::size_t size = static_cast<std::size_t>(element_size(dtype));
      const Bytes all = elements(key, draw, dtype, 0, kCount);
      for (std::int64_t i = 0; i < kCount; i += 1 + i % 7) {
        const Bytes one = elements(key, draw, dtype, i, 1);
        ASSERT_EQ(0, std::memcmp(one.data(), all.data() + static_cast<std::size_t>(i) * size, size)) << i;
      }
      for (const std::int64_t first : {1, 2, 3, 31, 1021}) {
        const Bytes tail = elements(key, draw, dtype, first, kCount - first);
        ASSERT_EQ(0, std::memcmp(tail.data(), all.data() + static_cast<std::size_t>(first) * size, tail.size()));
      }
    }
  }
}

TEST(Random, AllInstructionsGiveTheSameBits) {
#if defined(__x86_64__)
  std::vector<RandomKernel> kernels = {&random_kernel_portable};
  if (__builtin_cpu_supports("avx2")) kernels.push_back(&random_kernel_avx2);
  if (random_kernel() == &random_kernel_avx512) kernels.push_back(&random_kernel_avx512);
  std::vector<std::uint64_t> blocks(RandomTask::kMaxBlocks);
  for (std::size_t i = 0; i < blocks.size(); ++i) blocks[i] = i * 0x9E3779B97F4A7C15u;
  for (int work = 0; work <= static_cast<int>(RandomWork::kIntegers64); ++work) {
    std::vector<std::vector<double>> results;
    for (const RandomKernel kernel : kernels) {
      std::vector<double> out(RandomTask::kMaxBlocks * 4, 0.0);
      for (std::uint32_t call = 0; call < 16; ++call) {
        RandomTask task{{11, 22},
                        call,
                        static_cast<RandomWork>(work),
                        blocks.data(),
                        RandomTask::kMaxBlocks,
                        0.3,
                        0.7,
                        0.99,
                        5,
                        1000,
                        out.data()};
        kernel(task);
      }
      results.push_back(out);
    }
    for (const auto& result : results) {
      EXPECT_EQ(0, std::memcmp(result.data(), results[0].data(), result.size() * sizeof(double))) << "work " << work;
    }
  }
#endif
}

// Every rank draws what it holds; put together it is what one rank draws alone.
TEST(Random, ShardsArePartsOfTheWhole) {
  sweep::Random random(7);
  const auto meshes = sweep::mesh_shapes(8, 3);
  for (std::int64_t round = 0; round < sweep::rounds(2000); ++round) {
    const Mesh mesh = Mesh::make(random.pick(meshes));
    const sweep::Case c = sweep::random_case(random, mesh, sweep::random_shape(random, 3, 13), false);
    const Draw& draw = random.pick(draws());
    if (draw.kind == Draw::Kind::kPermutation) continue;
    const DType dtype = random.pick(std::vector<DType>(std::begin(kTypes), std::end(kTypes)));
    if (!can_draw(draw, dtype)) continue;
    const Spec spec = c.spec(dtype);
    SCOPED_TRACE(draw.to_string() + " of " + spec.to_string());
    const RandomKey key = random_key(9, 0, static_cast<std::uint64_t>(round));
    const auto size = static_cast<std::size_t>(element_size(dtype));
    const Bytes all = elements(key, draw, dtype, 0, spec.meta().numel());
    sweep::for_each_coordinate(mesh, [&](const Dims& at) {
      Bytes local(static_cast<std::size_t>(spec.local_bytes(at)), 0xCD);
      draw_local(key, draw, spec, at, local.data());
      std::size_t place = 0;
      for (const std::int64_t element : sweep::elements_of(box_of(spec, at), spec.meta().shape())) {
        ASSERT_EQ(
            0, std::memcmp(local.data() + place * size, all.data() + static_cast<std::size_t>(element) * size, size));
        ++place;
      }
    });
  }
}

TEST(Random, PermutationsArePermutations) {
  for (const std::int64_t n : {1, 2, 3, 10, 4096, 4097, 5000, 8192, 8193, 100003}) {
    for (const std::uint64_t call : {0u, 1u}) {
      std::vector<std::int64_t> values(static_cast<std::size_t>(n));
      draw_elements(random_key(1, 0, call), Draw::permutation(n), DType::kI64, 0, n, values.data());
      std::sort(values.begin(), values.end());
      for (std::int64_t i = 0; i < n; ++i) ASSERT_EQ(values[static_cast<std::size_t>(i)], i);
    }
  }
}

TEST(Random, UniformValuesStayBelowTheirEnd) {
  const RandomKey key = random_key(3, 0, 0);
  // 1 - 2^-24 in f32 is 1 in a rounded bf16 or f16.
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    for (const auto& [from, to] :
         {std::pair{0.0, 1.0}, {-2.0, -1.0}, {-1.0, 1.0}, {0.1, 0.2}, {0.0, 6.2e-5}, {1000.0, 1001.0}}) {
      constexpr std::int64_t kCount = 1 << 16;
      const Bytes values = elements(key, Draw::uniform(from, to), dtype, 0, kCount);
      const double first = rounded_to(dtype, from), end = rounded_to(dtype, to);
      for (std::int64_t i = 0; i < kCount; ++i) {
        std::uint16_t bits = 0;
        std::memcpy(&bits, values.data() + 2 * i, 2);
        const double value =
            dtype == DType::kBF16
                ? std::bit_cast<float>(std::uint32_t{bits} << 16)
                : ((bits & 0x7C00) == 0 ? std::ldexp(bits & 0x3FF, -24)
                                        : std::ldexp((bits & 0x3FF) + 1024, ((bits >> 10) & 31) - 25)) *
                      (bits & 0x8000 ? -1 : 1);
        ASSERT_TRUE(first <= value && (value < end || first == end)) << from << ' ' << to << ": " << value;
      }
    }
  }
  for (const float value : floats(key, Draw::uniform(1, std::nextafter(1.0f, 2.0f)), 0, 1000)) EXPECT_EQ(value, 1.0f);
  for (const float value : floats(key, Draw::uniform(4, 4), 0, 1000)) EXPECT_EQ(value, 4.0f);
}

TEST(Random, BernoulliIsAComparisonWithUnits) {
  const RandomKey key = random_key(3, 1, 0);
  constexpr std::int64_t kCount = 5000;
  std::vector<double> units(kCount);
  draw_elements(key, {.kind = Draw::Kind::kUnit32}, DType::kF64, 0, kCount, units.data());
  for (const double p : {0.0, 1e-9, 0.3, 0.5, 0.999999, 1.0}) {
    const Bytes values = elements(key, Draw::bernoulli(p), DType::kBool, 0, kCount);
    for (std::int64_t i = 0; i < kCount; ++i)
      ASSERT_EQ(values[static_cast<std::size_t>(i)] != 0, units[static_cast<std::size_t>(i)] < p);
  }
}

// The polynomials against libm.
TEST(Random, ElementaryFunctionsAreAccurate) {
  double log32 = 0, log64 = 0, sin32 = 0, sin64 = 0, exp64 = 0;
  const auto ulps = [](auto value, long double exact) {
    using Real = decltype(value);
    const long double ulp = std::nextafter(std::abs(static_cast<Real>(exact)), std::numeric_limits<Real>::infinity()) -
                            std::abs(static_cast<Real>(exact));
    return static_cast<double>(std::abs(static_cast<long double>(value) - exact) / ulp);
  };
  const long double kTurn = 6.283185307179586476925286766559L;
  for (std::uint32_t i = 1; i < 200000; ++i) {
    const std::uint32_t bits = i * 2654435761u;
    const float x = (static_cast<float>(bits >> 8) + 1) * 0x1p-24f;
    log32 = std::max(log32, x == 1 ? 0 : ulps(random_math::log_of(x), std::log(static_cast<long double>(x))));
    const std::uint64_t wide = i * 0x9E3779B97F4A7C15u;
    const double y = random_math::inside(wide);
    log64 = std::max(log64, ulps(random_math::log_of(y), std::log(static_cast<long double>(y))));
    const double e = 1400 * y - 700;
    exp64 = std::max(exp64, ulps(random_math::exp_of(e), std::exp(static_cast<long double>(e))));
    const auto small = random_math::sin_cos_turns(bits);
    // Near the zeros at half turns the angle's own rounding counts, so the error is measured against 1.
    sin32 = std::max<double>(sin32, std::abs(small.sin - std::sin(kTurn * bits * 0x1p-32L)) / 0x1p-24);
    sin32 = std::max<double>(sin32, std::abs(small.cos - std::cos(kTurn * bits * 0x1p-32L)) / 0x1p-24);
    const auto large = random_math::sin_cos_turns(wide);
    const long double angle = kTurn * static_cast<long double>(wide >> 11) * 0x1p-53L;
    sin64 = std::max<double>(sin64, std::abs(large.sin - std::sin(angle)) / 0x1p-53);
    sin64 = std::max<double>(sin64, std::abs(large.cos - std::cos(angle)) / 0x1p-53);
  }
  EXPECT_LT(log32, 2);
  EXPECT_LT(log64, 2);
  EXPECT_LT(exp64, 2);
  EXPECT_LT(sin32, 2);
  EXPECT_LT(sin64, 2);
}

TEST(Random, StatesGoAroundThroughText) {
  RandomSource source;
  source.seed(~std::uint64_t{0} - 6);
  source.next();
  RandomState state = source.state();
  EXPECT_EQ(state.to_string(), "seed -7, stream 0, calls 0:1");
  state.stream = 5;
  source.set_state(state);
  EXPECT_EQ(source.next(), random_key(state.seed, 5, 0));
  EXPECT_EQ(source.state().to_string(), "seed -7, stream 5, calls 0:1 5:1");
  EXPECT_EQ(RandomState::parse(source.state().to_string()), source.state());
  EXPECT_ERROR(RandomState::parse("seed 7"), kInvalidArgument,
               "[RandomState] missing ',' at column 7; got 'seed 7'; expected seed 7, stream 0, calls 0:12 5:3");
  // Only the common stream is compared between ranks.
  EXPECT_EQ(RandomSource::calls_of(*source.progress()), 1u);
  const std::uint64_t before = *source.progress();
  source.next();
  EXPECT_EQ(*source.progress(), before);
}

TEST(Random, WhatCannotBeDrawnIsSaid) {
  float value = 0;
  EXPECT_ERROR(Draw::normal(0, -1), kInvalidArgument, "[normal] a deviation is not negative; got -1.000000");
  EXPECT_ERROR(Draw::geometric(1), kInvalidArgument,
               "[geometric] the probability must be between 0 and 1, and neither of them; got 1.000000");
  EXPECT_ERROR(Draw::uniform(1, 0), kInvalidArgument,
               "[uniform] the interval ends before it starts; got from 1.000000 to 0.000000; expected from <= to");
  EXPECT_ERROR(draw_elements({}, Draw::normal(0, 1), DType::kI32, 0, 1, &value), kNotSupported,
               "[random] there are no such values of this type; got normal(0.000000, 1.000000) as i32");
}

}  // namespace
}  // namespace dtensor
