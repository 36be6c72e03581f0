#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "dtensor/core/inline_vec.h"
#include "dtensor/core/placement.h"

namespace dtensor {

enum class DType : std::uint8_t {
  kBool,
  kU8,
  kU16,
  kU32,
  kU64,
  kI8,
  kI16,
  kI32,
  kI64,
  kF8E4M3,
  kF8E5M2,
  kBF16,
  kF16,
  kF32,
  kF64,
  kC32,
  kC64,
  kC128,
};

// `f32`, `bf16`, `i64`, `c64`, …
std::string_view to_string(DType dtype);
std::optional<DType> dtype_from(std::string_view name);
std::int64_t element_size(DType dtype);
bool is_floating(DType dtype);
bool is_complex(DType dtype);
// Integers and bool.
bool is_integral(DType dtype);
// Can values of this type be reduced by op? avg needs a floating type, and/or/xor an integral one, min/max an order;
// bool has min, max, and, or, xor.
bool can_reduce(DType dtype, ReduceOp op);

// What is known of a tensor as a whole, wherever it lies: its size on every dim, its strides in elements and its type.
class TensorMeta {
 public:
  // Row-major strides.
  TensorMeta(Dims shape, DType dtype);
  TensorMeta(Dims shape, Dims stride, DType dtype);
  // `f32[8,6]`, `f32[8,6]{1,8}` with strides that are not row-major, `f32[]` for 0-d.
  static TensorMeta parse(std::string_view text);

  const Dims& shape() const noexcept { return shape_; }
  const Dims& stride() const noexcept { return stride_; }
  DType dtype() const noexcept { return dtype_; }
  std::int64_t ndim() const noexcept { return static_cast<std::int64_t>(shape_.size()); }
  std::int64_t numel() const noexcept { return numel_; }
  std::int64_t nbytes() const noexcept { return numel_ * element_size(dtype_); }
  std::string to_string() const;
  std::size_t hash() const noexcept { return hash_; }

  friend bool operator==(const TensorMeta& a, const TensorMeta& b) {
    return a.hash_ == b.hash_ && a.dtype_ == b.dtype_ && a.shape_ == b.shape_ && a.stride_ == b.stride_;
  }

 private:
  Dims shape_;
  Dims stride_;
  DType dtype_;
  std::int64_t numel_;
  std::size_t hash_ = 0;
};

Dims row_major_stride(const Dims& shape);

}  // namespace dtensor
