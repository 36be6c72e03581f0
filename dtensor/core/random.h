#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "dtensor/core/spec.h"

namespace dtensor {

// Random numbers that belong to a tensor: value = f(seed, stream, call, global row-major index of the element). Which
// rank computes it, beside which others, with which instructions, does not matter to a single bit. See docs/random.md.

// Philox 4x32-10 of the paper.
std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key);

// One call's numbers: Philox's key, mixed from the seed, the stream and the upper half of the call number, and the
// lower half. The counter of element i is {i / lanes (64 bits), call, draw}.
struct RandomKey {
  std::array<std::uint32_t, 2> key = {0, 0};
  std::uint32_t call = 0;
  friend bool operator==(const RandomKey&, const RandomKey&) = default;
};
RandomKey random_key(std::uint64_t seed, std::uint64_t stream, std::uint64_t call);

// What to draw. Errors of the makers: parameters that no distribution has, in libtorch's words as far as it has them.
struct Draw {
  enum class Kind : std::uint8_t {
    kUniform,      // a + (b-a) * [0, 1), never b; 24 bits for f32 and less, 53 for f64
    kNormal,       // mean a, deviation b
    kLogNormal,    // exp of that
    kExponential,  // rate a; never 0
    kCauchy,       // median a, scale b
    kGeometric,    // number of trials up to the first success, which has probability a
    kBernoulli,    // 1 with probability a, else 0; 2^-32 is the grain
    kIntegers,     // low … low + range - 1
    kUnit32,       // [0, 1), 32 bits, in f64: below p exactly where a Bernoulli draw with p gives 1
    kPermutation,  // element i of a permutation of 0 … range-1
  };
  Kind kind = Kind::kUniform;
  double a = 0;
  double b = 1;
  std::int64_t low = 0;
  std::uint64_t range = 0;  // 0 stands for 2^64

  static Draw uniform(double from, double to);
  static Draw normal(double mean, double deviation);
  static Draw log_normal(double mean, double deviation);
  static Draw exponential(double rate);
  static Draw cauchy(double median, double sigma);
  static Draw geometric(double p);
  static Draw bernoulli(double p);
  static Draw integers(std::int64_t low, std::uint64_t range);
  static Draw permutation(std::int64_t n);

  std::string to_string() const;
};

// Are there such values of the type? Uniform, normal and the like need a floating or (uniform and normal) complex one.
bool can_draw(const Draw& draw, DType dtype);

// Elements first … first + count - 1 of a tensor of this type, one after the other. Pre: can_draw.
// Complex values are two real ones, elements 2i and 2i+1; their normals have the deviation over sqrt(2) each.
void draw_elements(const RandomKey& key, const Draw& draw, DType dtype, std::int64_t first, std::int64_t count,
                   void* out);
// What the rank at a coordinate holds, row-major and dense.
void draw_local(const RandomKey& key, const Draw& draw, const Spec& spec, const Dims& coordinate, void* out);

}  // namespace dtensor
