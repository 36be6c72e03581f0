#include <ATen/core/Tensor.h>

#include "dtensor/comm/reduce.h"

namespace dtensor {
namespace {

at::Tensor combine(ReduceOp op, const at::Tensor& a, const at::Tensor& b) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return a.add(b);
    case ReduceOp::kProduct:
      return a.mul(b);
    case ReduceOp::kMin:
      return a.minimum(b);
    case ReduceOp::kMax:
      return a.maximum(b);
    case ReduceOp::kAnd:
      return a.bitwise_and(b);
    case ReduceOp::kOr:
      return a.bitwise_or(b);
    case ReduceOp::kXor:
      return a.bitwise_xor(b);
  }
  return a;
}

}  // namespace

at::Tensor reduce_tensors(ReduceOp op, const std::vector<at::Tensor>& parts) {
  const auto type = parts[0].scalar_type();
  const bool sums = op == ReduceOp::kSum || op == ReduceOp::kAvg || op == ReduceOp::kProduct;
  auto wide = type;
  if (sums && (type == at::kHalf || type == at::kBFloat16)) wide = at::kFloat;
  // Wider than the sum of any number of ranks can need; a float would not hold the sum of two large bf16.
  if (op == ReduceOp::kAvg && c10::isFloatingType(type)) wide = at::kDouble;
  if (op == ReduceOp::kAvg && type == at::kComplexFloat) wide = at::kComplexDouble;
  const bool narrow = op == ReduceOp::kAvg && (type == at::kDouble || type == at::kComplexDouble);
  const auto count = static_cast<double>(parts.size());
  at::Tensor result;
  for (const at::Tensor& each : parts) {
    at::Tensor part = each.to(wide);
    if (narrow) part = part.div(count);  // there is nothing wider
    result = result.defined() ? combine(op, result, part) : part;
  }
  if (op == ReduceOp::kAvg && !narrow) result = result.div(count);
  return result.to(type);
}

}  // namespace dtensor
