#pragma once

// The arithmetic of random values, one element or one pair at a time, for every processor: what is compiled with other
// vector instructions, or for a GPU, gives the same bits. So: no function of libm but the square root (which IEEE
// fixes), no fused multiply-add (these files are compiled with -ffp-contract=off and -fmad=false), no table.
//
// Everything is static: the same name compiled with other instructions must never be merged by the linker.

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define DTENSOR_RANDOM_INLINE static __host__ __device__ inline
#else
#define DTENSOR_RANDOM_INLINE static inline __attribute__((always_inline))
#endif

namespace dtensor::random_math {

// ---- Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3)

static constexpr std::uint32_t kMultiplier0 = 0xD2511F53u;
static constexpr std::uint32_t kMultiplier1 = 0xCD9E8D57u;
static constexpr std::uint32_t kWeyl0 = 0x9E3779B9u;
static constexpr std::uint32_t kWeyl1 = 0xBB67AE85u;
static constexpr int kRounds = 10;

struct Block {
  std::uint32_t word[4];
};

DTENSOR_RANDOM_INLINE Block philox(Block x, std::uint32_t key0, std::uint32_t key1) {
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t p0 = static_cast<std::uint64_t>(kMultiplier0) * x.word[0];
    const std::uint64_t p1 = static_cast<std::uint64_t>(kMultiplier1) * x.word[2];
    const auto high0 = static_cast<std::uint32_t>(p0 >> 32);
    const auto high1 = static_cast<std::uint32_t>(p1 >> 32);
    x = {{high1 ^ x.word[1] ^ key0, static_cast<std::uint32_t>(p1), high0 ^ x.word[3] ^ key1,
          static_cast<std::uint32_t>(p0)}};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return x;
}

// ---- bits as numbers

template <class To, class From>
DTENSOR_RANDOM_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// Exact for values below 2^52, without an instruction that only new processors have as a vector.
DTENSOR_RANDOM_INLINE double to_double(std::uint64_t below_2_52) {
  return bits_as<double>(below_2_52 | 0x4330000000000000u) - 4503599627370496.0;
}

// [0, 1), 24 bits.
DTENSOR_RANDOM_INLINE float unit(std::uint32_t bits) {
  return static_cast<float>(static_cast<std::int32_t>(bits >> 8)) * 0x1p-24f;
}
// [0, 1), 53 bits.
DTENSOR_RANDOM_INLINE double unit(std::uint64_t bits) {
  return to_double(bits >> 32) * 0x1p-32 + to_double((bits >> 11) & 0x1FFFFFu) * 0x1p-53;
}
// (0, 1), and never 1: the middle of one of 2^32 or 2^52 equal parts.
DTENSOR_RANDOM_INLINE double inside(std::uint32_t bits) { return to_double(bits) * 0x1p-32 + 0x1p-33; }
DTENSOR_RANDOM_INLINE double inside(std::uint64_t bits) {
  return to_double(bits >> 32) * 0x1p-32 + (to_double((bits >> 12) & 0xFFFFFu) * 0x1p-52 + 0x1p-53);
}

// The upper half of the product: an even spread of 64 bits over 0 … range-1. range 0 stands for 2^64.
DTENSOR_RANDOM_INLINE std::uint64_t scaled(std::uint64_t bits, std::uint64_t range) {
  const std::uint64_t a0 = bits & 0xFFFFFFFFu, a1 = bits >> 32, b0 = range & 0xFFFFFFFFu, b1 = range >> 32;
  const std::uint64_t low = a0 * b0, middle = a1 * b0 + (low >> 32), cross = a0 * b1 + (middle & 0xFFFFFFFFu);
  const std::uint64_t high = a1 * b1 + (middle >> 32) + (cross >> 32);
  return range == 0 ? bits : high;
}

// ---- elementary functions; polynomials fitted for the least relative error

// x in [2^-126, 2^127]. Error below 1 ulp.
DTENSOR_RANDOM_INLINE float log_of(float x) {
  const auto bits = bits_as<std::int32_t>(x);
  const std::int32_t exponent = (bits - 0x3F3504F3) >> 23;  // x = 2^exponent * m, m in [sqrt(1/2), sqrt(2))
  const float f = bits_as<float>(bits - exponent * (1 << 23)) - 1.0f;
  float p = -0.07634329795837402f;
  p = p * f + 0.12761414051055908f;
  p = p * f - 0.13160169124603271f;
  p = p * f + 0.14201781153678894f;
  p = p * f - 0.1662336140871048f;
  p = p * f + 0.20001226663589478f;
  p = p * f - 0.2500081956386566f;
  p = p * f + 0.3333333134651184f;
  const float square = f * f;
  const auto e = static_cast<float>(exponent);
  return e * 0.693145751953125f + (f + ((f * square) * p + (e * 1.42860677e-06f - 0.5f * square)));
}

// x in [2^-1022, 2^1023].
DTENSOR_RANDOM_INLINE double log_of(double x) {
  const auto bits = bits_as<std::uint64_t>(x);
  // x = 2^exponent * m, m in [sqrt(1/2), sqrt(2)); the exponent is kept non-negative, 1023 too large, for its shift.
  const std::uint64_t biased = (bits + (0x3FF0000000000000u - 0x3FE6A09E667F3BCDu)) >> 52;
  const double m = bits_as<double>(bits - (biased << 52) + 0x3FF0000000000000u);
  const double e = to_double(biased) - 1023.0;
  const double f = m - 1.0;
  const double s = f / (m + 1.0);
  const double z = s * s;
  double p = 0x1.0f62037dc952bp-3;
  p = p * z + 0x1.0f5ce75c8fa58p-3;
  p = p * z + 0x1.3b20aa2e1f862p-3;
  p = p * z + 0x1.745cde3dfa2c8p-3;
  p = p * z + 0x1.c71c7258e1bc4p-3;
  p = p * z + 0x1.249249242b5a7p-2;
  p = p * z + 0x1.9999999999dfep-2;
  p = p * z + 0x1.5555555555555p-1;
  // 2s = f - s*f, with the error of s where it does not matter.
  return e * 0x1.62e42fefp-1 + (f + (e * 0x1.473de6af278edp-34 - (s * f - s * (z * p))));
}

struct SinCos32 {
  float sin, cos;
};
// Of bits / 2^32 turns.
DTENSOR_RANDOM_INLINE SinCos32 sin_cos_turns(std::uint32_t bits) {
  const std::uint32_t quadrant = (bits + (1u << 29)) >> 30;  // the nearest multiple of a quarter turn; 4 is 0
  const float t = static_cast<float>(static_cast<std::int32_t>(bits - (quadrant << 30))) * 0x1.921fb6p-30f;
  const float z = t * t;
  const float s = t + t * z * ((-0.0001951729936990887f * z + 0.008332177996635437f) * z - 0.16666655242443085f);
  const float c =
      1.0f + z * (((2.4438451873720624e-05f * z - 0.001388736767694354f) * z + 0.04166664555668831f) * z - 0.5f);
  const auto sb = bits_as<std::uint32_t>(s);
  const auto cb = bits_as<std::uint32_t>(c);
  const std::uint32_t swap = 0u - (quadrant & 1);
  const std::uint32_t sin_sign = (quadrant & 2) << 30;
  const std::uint32_t cos_sign = ((quadrant + 1) & 2) << 30;
  return {bits_as<float>(((cb & swap) | (sb & ~swap)) ^ sin_sign),
          bits_as<float>(((sb & swap) | (cb & ~swap)) ^ cos_sign)};
}

struct SinCos64 {
  double sin, cos;
};
DTENSOR_RANDOM_INLINE SinCos64 sin_cos_turns(std::uint64_t bits) {
  const std::uint64_t quadrant = ((bits >> 32) + (1u << 29)) >> 30;
  const double t = (unit(bits) * 4.0 - to_double(quadrant)) * 0x1.921fb54442d18p+0;
  const double z = t * t;
  double s = -0x1.aaa5740d27833p-41;
  s = s * z + 0x1.6120930e48dc0p-33;
  s = s * z - 0x1.ae645298cc8aep-26;
  s = s * z + 0x1.71de3a5339d36p-19;
  s = s * z - 0x1.a01a01a018ae8p-13;
  s = s * z + 0x1.111111111110bp-7;
  s = s * z - 0x1.5555555555555p-3;
  s = t + t * z * s;
  double c = 0x1.aac5dce7db29ep-45;
  c = c * z - 0x1.939338a9ae351p-37;
  c = c * z + 0x1.1eed8ca4036f7p-29;
  c = c * z - 0x1.27e4fb75fdc39p-22;
  c = c * z + 0x1.a01a01a018deep-16;
  c = c * z - 0x1.6c16c16c16c10p-10;
  c = c * z + 0x1.5555555555555p-5;
  c = 1.0 + z * (z * c - 0.5);
  const auto sb = bits_as<std::uint64_t>(s);
  const auto cb = bits_as<std::uint64_t>(c);
  const std::uint64_t swap = std::uint64_t{0} - (quadrant & 1);
  const std::uint64_t sin_sign = (quadrant & 2) << 62;
  const std::uint64_t cos_sign = ((quadrant + 1) & 2) << 62;
  return {bits_as<double>(((cb & swap) | (sb & ~swap)) ^ sin_sign),
          bits_as<double>(((sb & swap) | (cb & ~swap)) ^ cos_sign)};
}

// Any number; infinite above 709.8, 0 below -745.2.
DTENSOR_RANDOM_INLINE double exp_of(double x) {
  x = x < 800.0 ? x : 800.0;
  x = x > -800.0 ? x : -800.0;
  const double shifted = x * 0x1.71547652b82fep+0 + 0x1.8p52;  // the nearest integer, in the lowest bits
  const double n = shifted - 0x1.8p52;
  const double r = (x - n * 0x1.62e42fefp-1) - n * 0x1.473de6af278edp-34;
  double p = 0x1.1f9dd724d2833p-29;
  p = p * r + 0x1.af6cbf4820e8fp-26;
  p = p * r + 0x1.27e4bf4220e98p-22;
  p = p * r + 0x1.71ddef9b7cea2p-19;
  p = p * r + 0x1.a01a01b44c276p-16;
  p = p * r + 0x1.a01a01b3b8160p-13;
  p = p * r + 0x1.6c16c16c135adp-10;
  p = p * r + 0x1.111111110ebbap-7;
  p = p * r + 0x1.555555555555ep-5;
  p = p * r + 0x1.555555555555cp-3;
  p = p * r + 0.5;
  p = 1.0 + (r + r * r * p);
  // Times 2^n in two steps: n can be twice what one factor holds.
  const std::uint64_t biased = bits_as<std::uint64_t>(shifted) - bits_as<std::uint64_t>(0x1.8p52) + 2048;  // n + 2048
  const std::uint64_t half = biased >> 1;
  const double first = bits_as<double>((half - 1) << 52);
  const double second = bits_as<double>((biased - half - 1) << 52);
  return p * first * second;
}

// ---- distributions, from bits

#if defined(__CUDACC__)
DTENSOR_RANDOM_INLINE double square_root(double x) { return ::sqrt(x); }
DTENSOR_RANDOM_INLINE float square_root(float x) { return ::sqrtf(x); }
#else
DTENSOR_RANDOM_INLINE double square_root(double x) { return __builtin_sqrt(x); }
DTENSOR_RANDOM_INLINE float square_root(float x) { return __builtin_sqrtf(x); }
#endif

// from + unit * (to - from), and never `to` by rounding: `last` is the largest value below it.
template <class Real, class Bits>
DTENSOR_RANDOM_INLINE Real uniform(Bits bits, Real from, Real width, Real last) {
  const Real value = unit(bits) * width + from;
  return value < last ? value : last;
}

struct Normals32 {
  float first, second;
};
struct Normals64 {
  double first, second;
};
// Box and Muller: two independent normal values of two independent uniform ones.
DTENSOR_RANDOM_INLINE Normals32 normals(std::uint32_t radius, std::uint32_t angle) {
  const float u = static_cast<float>(static_cast<std::int32_t>(radius >> 1)) * 0x1p-31f + 0x1p-32f;  // (0, 1]
  const float r = square_root(-2.0f * log_of(u));
  const SinCos32 at = sin_cos_turns(angle);
  return {r * at.cos, r * at.sin};
}
DTENSOR_RANDOM_INLINE Normals64 normals(std::uint64_t radius, std::uint64_t angle) {
  const double u = unit(radius) + 0x1p-53;  // (0, 1]
  const double r = square_root(-2.0 * log_of(u));
  const SinCos64 at = sin_cos_turns(angle);
  return {r * at.cos, r * at.sin};
}

// u in (0, 1) below.
DTENSOR_RANDOM_INLINE double exponential(double u, double scale, double least) {
  const double value = -log_of(u) * scale;
  return value > least ? value : least;
}
// The smallest k >= 1 with 1 - (1-p)^k >= 1 - u; inverse = 1 / log(1-p).
DTENSOR_RANDOM_INLINE double geometric(double u, double inverse) {
  const double k = log_of(u) * inverse;
  // ceil, for values below 2^52; larger ones are whole.
  const double whole = (k + 0x1p52) - 0x1p52;
  const double up = whole < k ? whole + 1.0 : whole;
  const double result = k < 0x1p51 ? up : k;
  return result < 1.0 ? 1.0 : result;
}
// Half a turn times u in (0, 1), never at its ends: the middle of one of 2^32 or 2^51 equal parts.
DTENSOR_RANDOM_INLINE std::uint64_t half_turn(std::uint32_t bits) {
  return (static_cast<std::uint64_t>(bits) << 31) | (std::uint64_t{1} << 30);
}
DTENSOR_RANDOM_INLINE std::uint64_t half_turn(std::uint64_t bits) {
  return ((bits >> 13) << 12) | (std::uint64_t{1} << 11);
}
// tan(pi * (u - 1/2)).
template <class Bits>
DTENSOR_RANDOM_INLINE double cauchy(Bits bits, double median, double sigma) {
  const SinCos64 at = sin_cos_turns(half_turn(bits));
  return median - sigma * (at.cos / at.sin);
}

}  // namespace dtensor::random_math
