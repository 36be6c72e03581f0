#include "dtensor/runtime/meta.h"

#include <ATen/core/Tensor.h>
#include <torch/version.h>

#include <array>
#include <utility>

#include "dtensor/core/error.h"

namespace dtensor {
namespace {

constexpr auto kTypes = std::to_array<std::pair<c10::ScalarType, DType>>({
  {c10::ScalarType::Bool, DType::kBool}, {c10::ScalarType::Byte, DType::kU8}, {c10::ScalarType::Char, DType::kI8},
      {c10::ScalarType::Short, DType::kI16}, {c10::ScalarType::Int, DType::kI32}, {c10::ScalarType::Long, DType::kI64},
      {c10::ScalarType::BFloat16, DType::kBF16}, {c10::ScalarType::Half, DType::kF16},
      {c10::ScalarType::Float, DType::kF32}, {c10::ScalarType::Double, DType::kF64},
      {c10::ScalarType::ComplexHalf, DType::kC32}, {c10::ScalarType::ComplexFloat, DType::kC64},
      {c10::ScalarType::ComplexDouble, DType::kC128},
#if TORCH_VERSION_MAJOR >= 2
      {c10::ScalarType::UInt16, DType::kU16}, {c10::ScalarType::UInt32, DType::kU32},
      {c10::ScalarType::UInt64, DType::kU64}, {c10::ScalarType::Float8_e4m3fn, DType::kF8E4M3},
      {c10::ScalarType::Float8_e5m2, DType::kF8E5M2},
#endif
});

// Asked for every result.
constexpr auto kByDType = [] {
  std::array<c10::ScalarType, 256> types{};
  types.fill(c10::ScalarType::Undefined);
  for (const auto& [torch_type, dtype] : kTypes) types[static_cast<std::uint8_t>(dtype)] = torch_type;
  return types;
}();

}  // namespace

DType dtype_of(c10::ScalarType type) {
  for (const auto& [torch_type, dtype] : kTypes) {
    if (torch_type == type) return dtype;
  }
  fail_unsupported("dtype", {.what = "tensors of this type cannot be distributed", .got = c10::toString(type)});
}

c10::ScalarType scalar_type_of(DType dtype) {
  const c10::ScalarType type = kByDType[static_cast<std::uint8_t>(dtype)];
  if (type != c10::ScalarType::Undefined) return type;
  fail_unsupported("dtype", {.what = "this libtorch does not have the type",
                             .got = std::string(to_string(dtype)),
                             .expected = "a type of libtorch " TORCH_VERSION});
}

TensorMeta meta_of(const at::Tensor& tensor) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  return TensorMeta(Dims(sizes.begin(), sizes.end()), Dims(strides.begin(), strides.end()),
                    dtype_of(tensor.scalar_type()));
}

}  // namespace dtensor
