#include "dtensor/core/tensor_meta.h"

#include <algorithm>
#include <array>

#include "dtensor/core/checked.h"
#include "dtensor/core/error.h"
#include "dtensor/core/hash.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

struct DTypeRow {
  std::string_view name;
  std::int64_t bytes;
};

// In the order of DType.
constexpr std::array<DTypeRow, 18> kDTypes = {{{"bool", 1},
                                               {"u8", 1},
                                               {"u16", 2},
                                               {"u32", 4},
                                               {"u64", 8},
                                               {"i8", 1},
                                               {"i16", 2},
                                               {"i32", 4},
                                               {"i64", 8},
                                               {"f8e4m3", 1},
                                               {"f8e5m2", 1},
                                               {"bf16", 2},
                                               {"f16", 2},
                                               {"f32", 4},
                                               {"f64", 8},
                                               {"c32", 4},
                                               {"c64", 8},
                                               {"c128", 16}}};

// Bytes must be countable too: the largest element has 16.
void check_sizes(const Dims& shape, const Dims& stride) {
  for (std::int64_t size : shape) {
    if (size < 0) {
      fail_invalid("tensor_meta", {.what = "a size is negative", .got = "[" + join_numbers(shape) + "]"});
    }
  }
  if (stride.size() != shape.size()) {
    fail_invalid("tensor_meta",
                 {.what = "sizes and strides differ in number",
                  .got = std::to_string(shape.size()) + " sizes and " + std::to_string(stride.size()) + " strides"});
  }
  std::int64_t reach = 0;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    const auto span = checked_mul(std::max<std::int64_t>(shape[i], 1), stride[i]);
    if (stride[i] < 0 || !span || __builtin_add_overflow(reach, *span, &reach)) {
      fail_invalid("tensor_meta", {.what = "the strides are negative or overflow",
                                   .got = "[" + join_numbers(shape) + "]{" + join_numbers(stride) + "}"});
    }
  }
}

std::int64_t checked_numel(const Dims& shape) {
  const auto numel = checked_product(shape);
  if (!numel || *numel > kInt64Max / 16) {
    fail_invalid(
        "tensor_meta",
        {.what = "the sizes overflow", .got = "[" + join_numbers(shape) + "]", .expected = "fewer than 2^59 elements"});
  }
  return *numel;
}

std::size_t hash_of(const Dims& shape, const Dims& stride, DType dtype) {
  Hasher hasher;
  hasher.add(static_cast<std::uint64_t>(dtype));
  hasher.add_all(shape);
  hasher.add_all(stride);
  return hasher.value();
}

}  // namespace

std::string_view to_string(DType dtype) { return kDTypes[static_cast<std::size_t>(dtype)].name; }

std::optional<DType> dtype_from(std::string_view name) {
  for (std::size_t i = 0; i < kDTypes.size(); ++i) {
    if (kDTypes[i].name == name) return static_cast<DType>(i);
  }
  return std::nullopt;
}

std::int64_t element_size(DType dtype) { return kDTypes[static_cast<std::size_t>(dtype)].bytes; }
bool is_floating(DType dtype) { return dtype >= DType::kF8E4M3 && dtype <= DType::kF64; }
bool is_complex(DType dtype) { return dtype >= DType::kC32; }
bool is_integral(DType dtype) { return dtype <= DType::kI64; }

bool can_reduce(DType dtype, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kProduct:
      return dtype != DType::kBool;
    case ReduceOp::kAvg:
      return !is_integral(dtype);
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return !is_complex(dtype);
    case ReduceOp::kAnd:
    case ReduceOp::kOr:
    case ReduceOp::kXor:
      return is_integral(dtype);
  }
  return false;
}

Dims row_major_stride(const Dims& shape) {
  Dims stride(shape.size(), 1);
  for (std::size_t i = shape.size(); i-- > 1;) stride[i - 1] = stride[i] * (shape[i] > 1 ? shape[i] : 1);
  return stride;
}

TensorMeta::TensorMeta(Dims shape, DType dtype)
    : shape_(std::move(shape)), dtype_(dtype), numel_(checked_numel(shape_)) {
  check_sizes(shape_, Dims(shape_.size(), 1));
  Dims counted = shape_;  // with a zero among them the strides could still overflow
  for (std::int64_t& size : counted) size = size > 1 ? size : 1;
  checked_numel(counted);
  stride_ = row_major_stride(shape_);
  hash_ = hash_of(shape_, stride_, dtype_);
}

TensorMeta::TensorMeta(Dims shape, Dims stride, DType dtype) : TensorMeta(std::move(shape), dtype) {
  check_sizes(shape_, stride);
  stride_ = std::move(stride);
  hash_ = hash_of(shape_, stride_, dtype_);
}

std::string TensorMeta::to_string() const {
  std::string text = std::string(dtensor::to_string(dtype_)) + "[" + join_numbers(shape_) + "]";
  if (!(stride_ == row_major_stride(shape_))) text += "{" + join_numbers(stride_) + "}";
  return text;
}

TensorMeta TensorMeta::parse(std::string_view text) {
  Scanner in(text, "parse_tensor", "a tensor such as f32[8,6] or f32[8,6]{1,8}");
  const std::string_view name = in.name();
  const auto dtype = dtype_from(name);
  if (!dtype) in.fail_here("unknown type " + in_quotes(name));
  Dims shape;
  in.expect("[");
  if (!in.take("]")) {
    do shape.push_back(in.size());
    while (in.take(","));
    in.expect("]");
  }
  Dims stride = shape;
  const bool strided = in.take("{");
  if (strided) {
    stride.clear();
    if (!in.take("}")) {
      do stride.push_back(in.size());
      while (in.take(","));
      in.expect("}");
    }
  }
  in.expect_end();
  return strided ? TensorMeta(std::move(shape), std::move(stride), *dtype) : TensorMeta(std::move(shape), *dtype);
}

}  // namespace dtensor
