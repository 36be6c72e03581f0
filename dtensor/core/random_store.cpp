#include "dtensor/core/random_store_impl.h"

#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>

#include "dtensor/core/error.h"

namespace dtensor {
namespace {

// 16-bit floating types, by their bits.
struct Half {
  std::uint16_t bits;
};
struct BFloat {
  std::uint16_t bits;
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

// To nearest, ties to even.
void round_into(float x, BFloat& out) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  out.bits = static_cast<std::uint16_t>(nan ? 0x7FC0u : (bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16);
}

void round_into(float x, Half& out) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  std::uint32_t result;
  if (magnitude > 0x7F800000u) {
    result = 0x7E00u;
  } else if (magnitude >= 0x477FF000u) {  // 65520 and more
    result = 0x7C00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: multiples of 2^-24, which adding 1/2 rounds to
    result = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3F000000u;
  } else {
    result = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1)) >> 13;
  }
  out.bits = static_cast<std::uint16_t>(result | ((bits >> 16) & 0x8000u));
}

// The largest value not above x, for finite x.
void round_down_into(float x, BFloat& out) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  out.bits = static_cast<std::uint16_t>((bits + (bits >> 31) * 0xFFFFu) >> 16);
}

void round_down_into(float x, Half& out) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  const std::uint32_t negative = bits >> 31;
  // Below 2^-14: whole multiples of 2^-24.
  const float multiples = std::bit_cast<float>(magnitude < 0x38800000u ? magnitude : 0) * 0x1p24f;
  const auto whole = static_cast<std::int32_t>(multiples);
  const std::uint32_t up = negative & (static_cast<float>(whole) < multiples ? 1u : 0u);
  const std::uint32_t small = static_cast<std::uint32_t>(whole) + up;
  const std::uint32_t large = (magnitude - 0x38000000u + negative * 0x1FFFu) >> 13;
  out.bits = static_cast<std::uint16_t>((magnitude < 0x38800000u ? small : large) | (negative << 15));
}

template <class Out, class In>
void store_as(const In* in, std::int64_t count, void* to, bool down) {
  auto* out = static_cast<Out*>(to);
  if constexpr (std::is_same_v<Out, In>) {
    std::memcpy(out, in, static_cast<std::size_t>(count) * sizeof(Out));
  } else if constexpr (std::is_same_v<Out, Half> || std::is_same_v<Out, BFloat>) {
    for (std::int64_t i = 0; i < count; ++i) {
      if (down) {
        round_down_into(static_cast<float>(in[i]), out[i]);
      } else {
        round_into(static_cast<float>(in[i]), out[i]);
      }
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
  if (dtype == DType::kF16) {
    Half half{};
    round_into(narrow, half);
    return to_float(half);
  }
  if (dtype == DType::kBF16) {
    BFloat half{};
    round_into(narrow, half);
    return to_float(half);
  }
  return value;
}

}  // namespace dtensor
