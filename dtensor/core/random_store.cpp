#include "dtensor/core/random_store.h"

#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>

#include "dtensor/core/error.h"
#include "dtensor/core/random_half.h"

namespace dtensor {
namespace {

// 16-bit floating types, by their bits.
struct Half {
  std::uint16_t bits;
  static Half nearest(float x) { return {random_math::half_nearest(x)}; }
  static Half down(float x) { return {random_math::half_down(x)}; }
};
struct BFloat {
  std::uint16_t bits;
  static BFloat nearest(float x) { return {random_math::bfloat_nearest(x)}; }
  static BFloat down(float x) { return {random_math::bfloat_down(x)}; }
};

float to_float(BFloat x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16); }

float to_float(Half x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = x.bits & 0x7FFFu;
  float value;
  if (magnitude >= 0x7C00u) {
    value = std::bit_cast<float>(0x7F800000u | ((magnitude & 0x3FFu) << 13));
  } else if (magnitude >= 0x400u) {
    value = std::bit_cast<float>((magnitude << 13) + 0x38000000u);
  } else {
    value = static_cast<float>(magnitude) * 0x1p-24f;
  }
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | sign);
}

template <class Out, class In>
void store_as(const In* in, std::int64_t count, void* to, bool down) {
  auto* out = static_cast<Out*>(to);
  if constexpr (std::is_same_v<Out, In>) {
    std::memcpy(out, in, static_cast<std::size_t>(count) * sizeof(Out));
  } else if constexpr (std::is_same_v<Out, Half> || std::is_same_v<Out, BFloat>) {
    for (std::int64_t i = 0; i < count; ++i) {
      const auto value = static_cast<float>(in[i]);
      out[i] = down ? Out::down(value) : Out::nearest(value);
    }
  } else if constexpr (std::is_integral_v<Out> && std::is_floating_point_v<In>) {
    constexpr auto kMax = std::numeric_limits<Out>::max();
    for (std::int64_t i = 0; i < count; ++i) {
      out[i] = in[i] < static_cast<In>(kMax) ? static_cast<Out>(in[i]) : kMax;
    }
  } else {
    for (std::int64_t i = 0; i < count; ++i) out[i] = static_cast<Out>(in[i]);
  }
}

template <class In>
void store_from(const In* in, std::int64_t count, DType dtype, void* out, bool down) {
  switch (dtype) {
    case DType::kBool:
      return store_as<bool>(in, count, out, down);
    case DType::kU8:
      return store_as<std::uint8_t>(in, count, out, down);
    case DType::kU16:
      return store_as<std::uint16_t>(in, count, out, down);
    case DType::kU32:
      return store_as<std::uint32_t>(in, count, out, down);
    case DType::kU64:
      return store_as<std::uint64_t>(in, count, out, down);
    case DType::kI8:
      return store_as<std::int8_t>(in, count, out, down);
    case DType::kI16:
      return store_as<std::int16_t>(in, count, out, down);
    case DType::kI32:
      return store_as<std::int32_t>(in, count, out, down);
    case DType::kI64:
      return store_as<std::int64_t>(in, count, out, down);
    case DType::kBF16:
      return store_as<BFloat>(in, count, out, down);
    case DType::kF16:
      return store_as<Half>(in, count, out, down);
    case DType::kF32:
      return store_as<float>(in, count, out, down);
    case DType::kF64:
      return store_as<double>(in, count, out, down);
    default:
      fail(ErrorKind::kInternal, "store_random", {.what = "no such elements", .got = std::string(to_string(dtype))});
  }
}

}  // namespace

bool is_stored_as_is(RandomValue value, DType dtype) {
  switch (value) {
    case RandomValue::kFloat:
      return dtype == DType::kF32;
    case RandomValue::kFloatDown:
      return false;
    case RandomValue::kDouble:
      return dtype == DType::kF64;
    case RandomValue::kByte:
      return dtype == DType::kU8 || dtype == DType::kBool;
    case RandomValue::kInt:
      return dtype == DType::kI64;
  }
  return false;
}

void store_random(RandomValue value, const void* values, std::int64_t from, std::int64_t count, DType dtype,
                  void* out) {
  switch (value) {
    case RandomValue::kFloat:
    case RandomValue::kFloatDown:
      return store_from(static_cast<const float*>(values) + from, count, dtype, out, value == RandomValue::kFloatDown);
    case RandomValue::kDouble:
      return store_from(static_cast<const double*>(values) + from, count, dtype, out, false);
    case RandomValue::kByte:
      return store_from(static_cast<const std::uint8_t*>(values) + from, count, dtype, out, false);
    case RandomValue::kInt:
      return store_from(static_cast<const std::int64_t*>(values) + from, count, dtype, out, false);
  }
}

double rounded_to(DType dtype, double value) {
  const auto narrow = static_cast<float>(value);
  if (dtype == DType::kF32) return narrow;
  if (dtype == DType::kF16) return to_float(Half::nearest(narrow));
  if (dtype == DType::kBF16) return to_float(BFloat::nearest(narrow));
  return value;
}

}  // namespace dtensor
