#pragma once

#include <c10/core/ScalarType.h>

#include "dtensor/core/tensor_meta.h"

namespace at {
class Tensor;
}

namespace dtensor {

// Between torch's types and core's. A type that core does not know is an error that names it.
DType dtype_of(c10::ScalarType type);
c10::ScalarType scalar_type_of(DType dtype);

// Shape, strides and type of a (dense) tensor.
TensorMeta meta_of(const at::Tensor& tensor);

}  // namespace dtensor
