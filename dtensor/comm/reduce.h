#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <span>
#include <vector>

#include "dtensor/core/placement.h"

namespace at {
class Tensor;
}

namespace dtensor {

// Core's can_reduce for torch's types.
bool can_reduce(c10::ScalarType dtype, ReduceOp op);

// out[i] = parts[0][i] op parts[1][i] op …, in that order, on the calling thread; `out` may be one of the parts. The
// same parts give the same bits on every rank, whichever slice of a buffer they are called for.
//   * f16, bf16 (and f8) accumulate in float and are rounded once;
//   * avg is exact enough not to overflow where the average does not;
//   * min and max propagate NaN; integers wrap; bool is normalised to 0 and 1.
// A reduction that the dtype does not have is an error.
void reduce_parts(ReduceOp op, c10::ScalarType dtype, void* out, std::span<const void* const> parts,
                  std::int64_t count);

// The same of whole tensors, on any device, by libtorch's operators.
at::Tensor reduce_tensors(ReduceOp op, const std::vector<at::Tensor>& parts);

}  // namespace dtensor
