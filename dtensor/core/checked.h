#pragma once

#include <cstdint>
#include <limits>
#include <optional>

namespace dtensor {

inline constexpr std::int64_t kInt64Max = std::numeric_limits<std::int64_t>::max();

// Arithmetic on sizes that come from outside: no value when the result does not fit in int64.
inline std::optional<std::int64_t> checked_mul(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) return std::nullopt;
  return result;
}

// The product of non-negative sizes. A zero anywhere gives 0 however large the others are.
template <class Range>
std::optional<std::int64_t> checked_product(const Range& sizes) {
  for (std::int64_t size : sizes) {
    if (size == 0) return 0;
  }
  std::int64_t product = 1;
  for (std::int64_t size : sizes) {
    if (__builtin_mul_overflow(product, size, &product)) return std::nullopt;
  }
  return product;
}

inline constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0); }

}  // namespace dtensor
