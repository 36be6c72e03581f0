#pragma once

// The body of random_kernel_*: included once by each, and compiled for the instructions that its file is given.

#include "dtensor/core/random_math.h"
#include "dtensor/core/random_plan.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dtensor {
namespace {

using namespace random_math;

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
constexpr int kLanes = kBytes / 8;  // blocks at a time, one in each 64-bit lane
using Lanes = std::uint64_t __attribute__((vector_size(kBytes)));
using HalfLanes = std::uint32_t __attribute__((vector_size(kBytes / 2)));

// The full product of the lower halves; the upper ones may hold anything.
inline __attribute__((always_inline)) Lanes multiply(Lanes a, Lanes b) {
#if defined(__AVX512F__)
  // With a mask of ones: GCC 12 takes the form without one for the use of something uninitialized.
  return reinterpret_cast<Lanes>(
      _mm512_maskz_mul_epu32(0xFF, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<Lanes>(_mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__SSE2__)
  return reinterpret_cast<Lanes>(_mm_mul_epu32(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
  return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu);
#endif
}

struct Words {
  alignas(64) std::uint32_t word[4][RandomTask::kMaxBlocks];
};

void philox_blocks(const RandomTask& task, int count, Words& out) {
  const Lanes zero = {};
  const Lanes m0 = zero + kMultiplier0;
  const Lanes m1 = zero + kMultiplier1;
  for (int i = 0; i < count; i += kLanes) {
    Lanes x0;
    std::memcpy(&x0, task.blocks + i, sizeof(x0));
    Lanes x1 = x0 >> 32;
    Lanes x2 = zero + task.call;
    Lanes x3 = zero;  // draw
    std::uint32_t key0 = task.key[0];
    std::uint32_t key1 = task.key[1];
#pragma GCC unroll 10
    for (int round = 0; round < kRounds; ++round) {
      const Lanes p0 = multiply(x0, m0);
      const Lanes p1 = multiply(x2, m1);
      x0 = (p1 >> 32) ^ x1 ^ key0;
      x1 = p1;
      x2 = (p0 >> 32) ^ x3 ^ key1;
      x3 = p0;
      key0 += kWeyl0;
      key1 += kWeyl1;
    }
    const Lanes all[4] = {x0, x1, x2, x3};
    for (int w = 0; w < 4; ++w) {
      const HalfLanes low = __builtin_convertvector(all[w], HalfLanes);
      std::memcpy(&out.word[w][i], &low, sizeof(low));
    }
  }
}

// value(bits) for each of a block's four words, or two pairs of them.
template <class Out, class Fn>
inline __attribute__((always_inline)) void each32(const Words& words, int count, void* to, Fn value) {
  auto* __restrict out = static_cast<Out*>(to);
  for (int i = 0; i < count; ++i) {
    out[4 * i] = value(words.word[0][i]);
    out[4 * i + 1] = value(words.word[1][i]);
    out[4 * i + 2] = value(words.word[2][i]);
    out[4 * i + 3] = value(words.word[3][i]);
  }
}

inline __attribute__((always_inline)) std::uint64_t joined(std::uint32_t low, std::uint32_t high) {
  return low | (static_cast<std::uint64_t>(high) << 32);
}

template <class Out, class Fn>
inline __attribute__((always_inline)) void each64(const Words& words, int count, void* to, Fn value) {
  auto* __restrict out = static_cast<Out*>(to);
  for (int i = 0; i < count; ++i) {
    out[2 * i] = value(joined(words.word[0][i], words.word[1][i]));
    out[2 * i + 1] = value(joined(words.word[2][i], words.word[3][i]));
  }
}

// value(normal) for each normal of two pairs of words, or of one pair of 64 bits.
template <class Out, class Fn>
inline __attribute__((always_inline)) void each_normal32(const Words& words, int count, void* to, Fn value) {
  auto* __restrict out = static_cast<Out*>(to);
  for (int i = 0; i < count; ++i) {
    const Normals32 a = normals(words.word[0][i], words.word[1][i]);
    const Normals32 b = normals(words.word[2][i], words.word[3][i]);
    out[4 * i] = value(a.first);
    out[4 * i + 1] = value(a.second);
    out[4 * i + 2] = value(b.first);
    out[4 * i + 3] = value(b.second);
  }
}

template <class Out, class Fn>
inline __attribute__((always_inline)) void each_normal64(const Words& words, int count, void* to, Fn value) {
  auto* __restrict out = static_cast<Out*>(to);
  for (int i = 0; i < count; ++i) {
    const Normals64 a = normals(joined(words.word[0][i], words.word[1][i]), joined(words.word[2][i], words.word[3][i]));
    out[2 * i] = value(a.first);
    out[2 * i + 1] = value(a.second);
  }
}

void run_task(const RandomTask& task) {
  const int count = (task.count + RandomTask::kRound - 1) / RandomTask::kRound * RandomTask::kRound;
  Words words;
  philox_blocks(task, count, words);
  const double a = task.a, b = task.b, c = task.c;
  const auto fa = static_cast<float>(a), fb = static_cast<float>(b), fc = static_cast<float>(c);
  switch (task.work) {
    case RandomWork::kUniform32:
      return each32<float>(words, count, task.out, [=](std::uint32_t bits) { return uniform(bits, fa, fb, fc); });
    case RandomWork::kUniform64:
      return each64<double>(words, count, task.out, [=](std::uint64_t bits) { return uniform(bits, a, b, c); });
    case RandomWork::kNormal32:
      return each_normal32<float>(words, count, task.out, [=](float z) { return z * fb + fa; });
    case RandomWork::kNormal64:
      return each_normal64<double>(words, count, task.out, [=](double z) { return z * b + a; });
    case RandomWork::kLogNormal32:
      return each_normal32<double>(words, count, task.out,
                                   [=](float z) { return exp_of(static_cast<double>(z) * b + a); });
    case RandomWork::kLogNormal64:
      return each_normal64<double>(words, count, task.out, [=](double z) { return exp_of(z * b + a); });
    case RandomWork::kExponential32:
      return each32<double>(words, count, task.out,
                            [=](std::uint32_t bits) { return exponential(inside(bits), a, c); });
    case RandomWork::kExponential64:
      return each64<double>(words, count, task.out,
                            [=](std::uint64_t bits) { return exponential(inside(bits), a, c); });
    case RandomWork::kCauchy32:
      return each32<double>(words, count, task.out, [=](std::uint32_t bits) { return cauchy(bits, a, b); });
    case RandomWork::kCauchy64:
      return each64<double>(words, count, task.out, [=](std::uint64_t bits) { return cauchy(bits, a, b); });
    case RandomWork::kGeometric64:
      return each64<double>(words, count, task.out, [=](std::uint64_t bits) { return geometric(inside(bits), a); });
    case RandomWork::kBernoulli32: {
      const auto below = static_cast<std::uint32_t>(task.range - 1);  // range 1 … 2^32
      return each32<std::uint8_t>(words, count, task.out,
                                  [=](std::uint32_t bits) { return static_cast<std::uint8_t>(bits <= below); });
    }
    case RandomWork::kUnit32:
      return each32<double>(words, count, task.out, [=](std::uint32_t bits) { return to_double(bits) * 0x1p-32; });
    case RandomWork::kIntegers64: {
      const std::uint64_t low = task.low, range = task.range;
      return each64<std::int64_t>(words, count, task.out, [=](std::uint64_t bits) {
        return static_cast<std::int64_t>(low + scaled(bits, range));
      });
    }
  }
}

}  // namespace
}  // namespace dtensor
