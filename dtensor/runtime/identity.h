#pragma once

#include "dtensor/core/placement.h"

namespace at {
class Tensor;
}

namespace dtensor {

// Fills a tensor with what changes nothing when it is reduced with other parts: -0.0 for a sum of floats (+0.0 would
// turn -0.0 into 0.0), the largest value for min, 1 for a product, …
void fill_identity(const at::Tensor& tensor, ReduceOp op);

}  // namespace dtensor
