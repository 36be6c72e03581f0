#include "dtensor/runtime/identity.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>

#include <limits>

namespace dtensor {
namespace {

// The least value of a type with an order, or the largest.
c10::Scalar extreme(c10::ScalarType type, bool largest) {
  if (c10::isFloatingType(type)) {
    const double infinity = std::numeric_limits<double>::infinity();
    return largest ? infinity : -infinity;
  }
  const auto of = [&](auto value) {
    using Limits = std::numeric_limits<decltype(value)>;
    return c10::Scalar(static_cast<std::int64_t>(largest ? Limits::max() : Limits::lowest()));
  };
  switch (type) {
    case c10::ScalarType::Bool:
      return c10::Scalar(largest);
    case c10::ScalarType::Byte:
      return of(std::uint8_t{});
    case c10::ScalarType::Char:
      return of(std::int8_t{});
    case c10::ScalarType::Short:
      return of(std::int16_t{});
    case c10::ScalarType::Int:
      return of(std::int32_t{});
    default:
      return of(std::int64_t{});
  }
}

c10::Scalar identity_of(c10::ScalarType type, ReduceOp op) {
  const bool is_bool = type == c10::ScalarType::Bool;
  switch (op) {
    case ReduceOp::kProduct:
      return 1;
    case ReduceOp::kMin:
      return extreme(type, true);
    case ReduceOp::kMax:
      return extreme(type, false);
    case ReduceOp::kAnd:
      if (type == c10::ScalarType::Byte) return 255;
      return is_bool ? c10::Scalar(true) : c10::Scalar(-1);
    case ReduceOp::kOr:
    case ReduceOp::kXor:
      return is_bool ? c10::Scalar(false) : c10::Scalar(0);
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      break;
  }
  if (c10::isComplexType(type)) return c10::Scalar(c10::complex<double>(-0.0, -0.0));
  return c10::isFloatingType(type) ? c10::Scalar(-0.0) : c10::Scalar(0);
}

}  // namespace

void fill_identity(const at::Tensor& tensor, ReduceOp op) { tensor.fill_(identity_of(tensor.scalar_type(), op)); }

}  // namespace dtensor
