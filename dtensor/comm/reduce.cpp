#include "dtensor/comm/reduce.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <complex>
#include <limits>
#include <string>
#include <type_traits>

#if TORCH_VERSION_MAJOR >= 2
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>
#endif

#include "dtensor/core/error.h"
#include "dtensor/core/tensor_meta.h"

namespace dtensor {
namespace {

using Parts = std::span<const void* const>;

// Accumulators live in a block on the stack: it stays in the first-level cache, and since nothing can alias it, every
// loop below is vectorised although `out` may be one of the parts.
constexpr std::int64_t kBlock = 1024;

template <class T>
const T* part_at(Parts parts, std::size_t part, std::int64_t offset) {
  return static_cast<const T*>(parts[part]) + offset;
}

// A few parts at once, without a block in between. `out` is one of them or apart from all, so element i of it is read
// by its own turn only.
template <std::size_t n, class T, class Combine, class Finish>
void reduce_together(T* out, Parts parts, std::int64_t count, Combine combine, Finish finish) {
  std::array<const T*, n> from;
  for (std::size_t p = 0; p < n; ++p) from[p] = part_at<T>(parts, p, 0);
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC ivdep
#endif
  for (std::int64_t i = 0; i < count; ++i) {
    T acc = combine(from[0][i], from[1][i]);
    if constexpr (n > 2) acc = combine(acc, from[2][i]);
    if constexpr (n > 3) acc = combine(acc, from[3][i]);
    out[i] = finish(acc);
  }
}

// T is what lies in memory, Acc what is computed with.
template <class T, class Acc, class Combine, class Finish>
void reduce_blocks(T* out, Parts parts, std::int64_t count, Combine combine, Finish finish) {
  if constexpr (std::is_same_v<T, Acc>) {
    if (parts.size() == 2) return reduce_together<2>(out, parts, count, combine, finish);
    if (parts.size() == 3) return reduce_together<3>(out, parts, count, combine, finish);
    if (parts.size() == 4) return reduce_together<4>(out, parts, count, combine, finish);
  }
  Acc acc[kBlock];
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    const std::int64_t n = std::min(kBlock, count - begin);
    const T* first = part_at<T>(parts, 0, begin);
    for (std::int64_t i = 0; i < n; ++i) acc[i] = static_cast<Acc>(first[i]);
    for (std::size_t p = 1; p < parts.size(); ++p) {
      const T* part = part_at<T>(parts, p, begin);
      for (std::int64_t i = 0; i < n; ++i) acc[i] = combine(acc[i], static_cast<Acc>(part[i]));
    }
    T* to = out + begin;
    for (std::int64_t i = 0; i < n; ++i) to[i] = static_cast<T>(finish(acc[i]));
  }
}

template <class T, class Acc, class Combine>
void reduce_blocks(T* out, Parts parts, std::int64_t count, Combine combine) {
  reduce_blocks<T, Acc>(out, parts, count, combine, [](Acc value) { return value; });
}

// Pre: the plain sum of element i overflowed, or a part is not finite.
double average_scaled(Parts parts, std::int64_t i) {
  int shift = 0;
  while ((std::size_t{1} << shift) < parts.size()) ++shift;
  double sum = 0;
  bool finite = true;
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const double value = *part_at<double>(parts, p, i);
    finite = finite && std::isfinite(value);
    sum += std::ldexp(value, -shift);
  }
  const double average = sum / std::ldexp(static_cast<double>(parts.size()), -shift);
  // Rounding may still carry the average of the largest numbers one step too far.
  constexpr double kLargest = std::numeric_limits<double>::max();
  return finite ? std::clamp(average, -kLargest, kLargest) : average;
}

// No wider type is at hand for double: the few elements whose sum overflows are averaged again, scaled down.
void average_doubles(double* out, Parts parts, std::int64_t count) {
  const auto size = static_cast<double>(parts.size());
  double acc[kBlock];
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    const std::int64_t n = std::min(kBlock, count - begin);
    std::copy_n(part_at<double>(parts, 0, begin), n, acc);
    for (std::size_t p = 1; p < parts.size(); ++p) {
      const double* part = part_at<double>(parts, p, begin);
      for (std::int64_t i = 0; i < n; ++i) acc[i] += part[i];
    }
    double trace = 0;  // 0, or NaN when an element is not finite
    for (std::int64_t i = 0; i < n; ++i) trace += acc[i] * 0.0;
    if (trace == 0) {
      for (std::int64_t i = 0; i < n; ++i) acc[i] /= size;
    } else {
      for (std::int64_t i = 0; i < n; ++i) {
        acc[i] = std::isfinite(acc[i]) ? acc[i] / size : average_scaled(parts, begin + i);
      }
    }
    std::copy_n(acc, n, out + begin);
  }
}

template <class Acc>
constexpr auto kMinOf = [](Acc a, Acc b) { return a < b || a != a ? a : b; };
template <class Acc>
constexpr auto kMaxOf = [](Acc a, Acc b) { return a > b || a != a ? a : b; };

// Half types compute in float; their averages, and those of float, in double, which cannot overflow.
template <class T>
void reduce_floats(ReduceOp op, void* to, Parts parts, std::int64_t count) {
  using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;
  T* out = static_cast<T*>(to);
  switch (op) {
    case ReduceOp::kSum:
      return reduce_blocks<T, Acc>(out, parts, count, [](Acc a, Acc b) { return a + b; });
    case ReduceOp::kProduct:
      return reduce_blocks<T, Acc>(out, parts, count, [](Acc a, Acc b) { return a * b; });
    case ReduceOp::kMin:
      return reduce_blocks<T, Acc>(out, parts, count, kMinOf<Acc>);
    case ReduceOp::kMax:
      return reduce_blocks<T, Acc>(out, parts, count, kMaxOf<Acc>);
    case ReduceOp::kAvg:
      if constexpr (std::is_same_v<T, double>) {
        return average_doubles(out, parts, count);
      } else {
        const auto size = static_cast<double>(parts.size());
        return reduce_blocks<T, double>(
            out, parts, count, [](double a, double b) { return a + b; },
            [size](double sum) { return static_cast<float>(sum / size); });
      }
    default:
      return;  // refused by can_reduce
  }
}

// Signed sums wrap, in unsigned arithmetic.
template <class T>
void reduce_integers(ReduceOp op, void* to, Parts parts, std::int64_t count) {
  using Wrap = std::conditional_t<(sizeof(T) < 4), std::uint32_t, std::make_unsigned_t<T>>;
  using Bits = std::make_unsigned_t<T>;
  T* out = static_cast<T*>(to);
  switch (op) {
    case ReduceOp::kSum:
      return reduce_blocks<T, Wrap>(out, parts, count, [](Wrap a, Wrap b) { return a + b; });
    case ReduceOp::kProduct:
      return reduce_blocks<T, Wrap>(out, parts, count, [](Wrap a, Wrap b) { return a * b; });
    case ReduceOp::kMin:
      return reduce_blocks<T, T>(out, parts, count, [](T a, T b) { return a < b ? a : b; });
    case ReduceOp::kMax:
      return reduce_blocks<T, T>(out, parts, count, [](T a, T b) { return a > b ? a : b; });
    case ReduceOp::kAnd:
      return reduce_blocks<T, Bits>(out, parts, count, [](Bits a, Bits b) { return static_cast<Bits>(a & b); });
    case ReduceOp::kOr:
      return reduce_blocks<T, Bits>(out, parts, count, [](Bits a, Bits b) { return static_cast<Bits>(a | b); });
    case ReduceOp::kXor:
      return reduce_blocks<T, Bits>(out, parts, count, [](Bits a, Bits b) { return static_cast<Bits>(a ^ b); });
    case ReduceOp::kAvg:
      return;  // refused by can_reduce
  }
}

// A byte of a bool tensor; anything but 0 is true.
struct BoolByte {
  std::uint8_t byte;
  BoolByte() = default;
  explicit BoolByte(std::uint8_t value) : byte(value) {}
  explicit operator std::uint8_t() const { return byte != 0; }
};

void reduce_bools(ReduceOp op, void* to, Parts parts, std::int64_t count) {
  using Byte = std::uint8_t;
  BoolByte* out = static_cast<BoolByte*>(to);
  switch (op) {
    case ReduceOp::kMin:
    case ReduceOp::kAnd:
      return reduce_blocks<BoolByte, Byte>(out, parts, count, [](Byte a, Byte b) { return static_cast<Byte>(a & b); });
    case ReduceOp::kMax:
    case ReduceOp::kOr:
      return reduce_blocks<BoolByte, Byte>(out, parts, count, [](Byte a, Byte b) { return static_cast<Byte>(a | b); });
    case ReduceOp::kXor:
      return reduce_blocks<BoolByte, Byte>(out, parts, count, [](Byte a, Byte b) { return static_cast<Byte>(a ^ b); });
    default:
      return;  // refused by can_reduce
  }
}

// (re, im) as they lie in memory.
template <class T>
struct Pair {
  T re, im;
  Pair() = default;
  template <class Other>
  explicit Pair(Pair<Other> other) : re(static_cast<T>(other.re)), im(static_cast<T>(other.im)) {}
  Pair(T real, T imaginary) : re(real), im(imaginary) {}
};

// Sums and averages of complex numbers are those of their parts.
template <class T>
void reduce_complex(ReduceOp op, void* to, Parts parts, std::int64_t count) {
  if (op != ReduceOp::kProduct) return reduce_floats<T>(op, to, parts, 2 * count);
  using Acc = Pair<std::conditional_t<std::is_same_v<T, double>, double, float>>;
  reduce_blocks<Pair<T>, Acc>(static_cast<Pair<T>*>(to), parts, count,
                              [](Acc a, Acc b) { return Acc(a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re); });
}

using Kernel = void (*)(ReduceOp, void*, Parts, std::int64_t);

Kernel kernel_of(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Double:
      return reduce_floats<double>;
    case c10::ScalarType::Float:
      return reduce_floats<float>;
    case c10::ScalarType::Half:
      return reduce_floats<c10::Half>;
    case c10::ScalarType::BFloat16:
      return reduce_floats<c10::BFloat16>;
    case c10::ScalarType::ComplexDouble:
      return reduce_complex<double>;
    case c10::ScalarType::ComplexFloat:
      return reduce_complex<float>;
    case c10::ScalarType::ComplexHalf:
      return reduce_complex<c10::Half>;
    case c10::ScalarType::Long:
      return reduce_integers<std::int64_t>;
    case c10::ScalarType::Int:
      return reduce_integers<std::int32_t>;
    case c10::ScalarType::Short:
      return reduce_integers<std::int16_t>;
    case c10::ScalarType::Char:
      return reduce_integers<std::int8_t>;
    case c10::ScalarType::Byte:
      return reduce_integers<std::uint8_t>;
    case c10::ScalarType::Bool:
      return reduce_bools;
#if TORCH_VERSION_MAJOR >= 2
    case c10::ScalarType::UInt64:
      return reduce_integers<std::uint64_t>;
    case c10::ScalarType::UInt32:
      return reduce_integers<std::uint32_t>;
    case c10::ScalarType::UInt16:
      return reduce_integers<std::uint16_t>;
    case c10::ScalarType::Float8_e4m3fn:
      return reduce_floats<c10::Float8_e4m3fn>;
    case c10::ScalarType::Float8_e5m2:
      return reduce_floats<c10::Float8_e5m2>;
#endif
    default:
      return nullptr;
  }
}

// Some type of core that is reduced as this one is.
DType representative(c10::ScalarType dtype) {
  if (dtype == c10::ScalarType::Bool) return DType::kBool;
  if (c10::isIntegralType(dtype, /*includeBool=*/false)) return DType::kI64;
  return c10::isComplexType(dtype) ? DType::kC64 : DType::kF32;
}

}  // namespace

bool can_reduce(c10::ScalarType dtype, ReduceOp op) {
  return kernel_of(dtype) != nullptr && can_reduce(representative(dtype), op);
}

void reduce_parts(ReduceOp op, c10::ScalarType dtype, void* out, std::span<const void* const> parts,
                  std::int64_t count) {
  if (!can_reduce(dtype, op)) {
    fail_invalid("reduce", {.what = "values of this type have no such reduction",
                            .got = std::string(to_string(op)) + " of " + c10::toString(dtype)});
  }
  if (count > 0 && !parts.empty()) kernel_of(dtype)(op, out, parts, count);
}

}  // namespace dtensor
