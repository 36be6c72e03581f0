#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dtensor/core/mesh.h"
#include "dtensor/core/propagate.h"

namespace dtensor {

struct LocalCall;
struct Prepared;

// A call that an algorithm runs in place of the operator, because some mesh dims (the algorithm's) cut tensor dims that
// the operator needs whole. It sees this rank's parts of the operands, which lie as the decision wants them, and gives
// this rank's parts of the results. What it has to know of other parts it merges or gathers: slices, never operands.
class AlgorithmCall {
 public:
  AlgorithmCall(const LocalCall& call, const Prepared& prepared);

  const std::string& op() const { return op_; }  // "aten::_softmax"
  const Decision& decision() const { return decision_; }

  // By position in the schema. A tensor: this rank's part; undefined where the argument is absent.
  const c10::IValue& arg(std::size_t i) const { return args_[i]; }
  std::size_t num_args() const { return args_.size(); }
  at::Tensor tensor(std::size_t i) const;
  const Spec& spec(std::size_t i) const { return *specs_[i]; }
  // The dims that an argument names: an int, a list, or (absent or empty) all dims of argument 0.
  std::vector<std::int64_t> named_dims(std::size_t i) const;
  std::int64_t named_dim(std::size_t i) const { return named_dims(i).at(0); }

  // The part of a slice that this rank has: argument i's dims, but along `over` as many as all have of them (mostly 1),
  // any type. Reduced over the algorithm's mesh dims that cut nothing else of it; on others it stays cut, or Partial,
  // as the argument is.
  at::Tensor merged(const at::Tensor& part, std::size_t i, const std::vector<std::int64_t>& over, ReduceOp op) const;
  // The same for a part of result k.
  at::Tensor merged_result(const at::Tensor& part, std::size_t k, ReduceOp op) const;
  // Several numbers at once, each of which lies as result k, a number, does: [n].
  at::Tensor merged_numbers(const at::Tensor& parts, std::size_t k, ReduceOp op) const;

  // Pieces that are as long along `dim` on every rank of the algorithm's mesh dims, and otherwise like argument i: one
  // after the other. pieces() says whose they are, as coordinates that differ from this rank's on these mesh dims only.
  at::Tensor gathered(const at::Tensor& piece, std::size_t i, std::int64_t dim) const;
  std::vector<Dims> pieces() const;
  const Dims& at() const { return at_; }

  // One message to each rank of pieces(), in their order, and one of so many elements from each; this rank's own stays
  // here. They are parts of argument i; most: the bytes that come to the rank that gets most.
  std::vector<at::Tensor> exchanged(const std::vector<at::Tensor>& sent, const std::vector<std::int64_t>& counts,
                                    std::size_t i, std::int64_t most) const;

  // The local shape of a result; a tensor with as many elements in that shape.
  at::IntArrayRef shape(std::size_t k) const;
  at::Tensor shaped(const at::Tensor& tensor, std::size_t k) const;
  c10::ScalarType type(std::size_t k) const;

 private:
  at::Tensor moved(const at::Tensor& part, const TensorMeta& meta, const DimLayouts& from_dims,
                   const Partials& from_partials, const DimLayouts& to_dims, const Partials& to_partials) const;

  const std::string& op_;
  const Decision& decision_;
  const std::vector<Dims>& shapes_;
  std::shared_ptr<const DeviceMesh> mesh_;
  Dims at_;
  std::vector<c10::IValue> args_;
  std::vector<const Spec*> specs_;
};

using AlgorithmFn = std::vector<at::Tensor> (*)(const AlgorithmCall&);
struct NamedAlgorithm {
  std::string_view name;  // as rules say it
  AlgorithmFn run;
};
// One table per family.
std::span<const NamedAlgorithm> softmax_algorithms();
std::span<const NamedAlgorithm> norm_algorithms();
std::span<const NamedAlgorithm> order_algorithms();
std::span<const NamedAlgorithm> index_algorithms();
std::span<const NamedAlgorithm> loss_algorithms();
std::span<const NamedAlgorithm> product_algorithms();
std::span<const NamedAlgorithm> window_algorithms();

// An error when there is none.
AlgorithmFn find_algorithm(std::string_view name);

// The arguments on the stack, tensors as local parts, are replaced by the local results; written ones are written.
void run_algorithm(LocalCall& call, const Prepared& prepared);

// ---- what several families need

// Sums of half and bfloat16 are made in float, as libtorch does.
at::Tensor widened(const at::Tensor& tensor);
// Sizes with 1 along these dims.
std::vector<std::int64_t> slice_sizes(const at::Tensor& tensor, const std::vector<std::int64_t>& over);
// amax and amin with size 1 along `over`; where there is nothing, the identity.
at::Tensor extreme(const at::Tensor& tensor, const std::vector<std::int64_t>& over, ReduceOp op);

// Where the elements of a tensor dim lie: on this rank, or elsewhere.
struct Located {
  at::Tensor position;  // in the local part; `elsewhere` where this rank does not hold it
  at::Tensor inside;    // bool
};
// Of global indices along dim `dim` of argument i. `elsewhere`: `held()` or -1, whatever suits. An error where one is
// out of range.
Located locate(const AlgorithmCall& call, std::size_t i, std::int64_t dim, const at::Tensor& index,
               std::int64_t elsewhere);
// The global indices of these local positions.
at::Tensor globally(const AlgorithmCall& call, std::size_t i, std::int64_t dim, const at::Tensor& position);

}  // namespace dtensor
