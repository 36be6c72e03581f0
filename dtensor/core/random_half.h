#pragma once

// f32 as f16 and bf16, by their bits, on any device.

#include "dtensor/core/random_math.h"

namespace dtensor::random_math {

// To nearest, ties to even.
DTENSOR_RANDOM_INLINE std::uint16_t bfloat_nearest(float x) {
  const auto bits = bits_as<std::uint32_t>(x);
  const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return static_cast<std::uint16_t>(nan ? 0x7FC0u : (bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16);
}
DTENSOR_RANDOM_INLINE std::uint16_t half_nearest(float x) {
  const auto bits = bits_as<std::uint32_t>(x);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  // Below 2^-14: multiples of 2^-24, which adding 1/2 rounds to.
  const std::uint32_t small = bits_as<std::uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3F000000u;
  const std::uint32_t normal = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1)) >> 13;
  const std::uint32_t finite = magnitude < 0x38800000u ? small : normal;
  const std::uint32_t beyond = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;  // 65520 and more are infinite
  return static_cast<std::uint16_t>((magnitude < 0x477FF000u ? finite : beyond) | ((bits >> 16) & 0x8000u));
}
// The largest value not above x, for finite x.
DTENSOR_RANDOM_INLINE std::uint16_t bfloat_down(float x) {
  const auto bits = bits_as<std::uint32_t>(x);
  return static_cast<std::uint16_t>((bits + (bits >> 31) * 0xFFFFu) >> 16);
}
DTENSOR_RANDOM_INLINE std::uint16_t half_down(float x) {
  const auto bits = bits_as<std::uint32_t>(x);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  const std::uint32_t negative = bits >> 31;
  // Below 2^-14: whole multiples of 2^-24.
  const float multiples = bits_as<float>(magnitude < 0x38800000u ? magnitude : 0) * 0x1p24f;
  const auto whole = static_cast<std::int32_t>(multiples);
  const std::uint32_t up = negative & (static_cast<float>(whole) < multiples ? 1u : 0u);
  const std::uint32_t small = static_cast<std::uint32_t>(whole) + up;
  const std::uint32_t large = (magnitude - 0x38000000u + negative * 0x1FFFu) >> 13;
  return static_cast<std::uint16_t>((magnitude < 0x38800000u ? small : large) | (negative << 15));
}

}  // namespace dtensor::random_math
