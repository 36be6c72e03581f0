#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dtensor/core/spec.h"

namespace c10 {
class OperatorHandle;
}

namespace dtensor::testing {

// A call of an operator on plain tensors, which can be made again with other ones in their place.
class PlainCall {
 public:
  // `op` is "aten::add.Tensor"; arguments that are left out have their defaults. Errors: what is no operator.
  PlainCall(const std::string& op, std::vector<c10::IValue> args);
  ~PlainCall();
  PlainCall(const PlainCall&) = delete;
  PlainCall& operator=(const PlainCall&) = delete;

  const std::string& op() const { return op_; }
  // All tensors among the arguments, those of lists one by one.
  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  bool writes() const { return !written_.empty(); }
  // The arguments with other tensors.
  std::vector<c10::IValue> with(const std::vector<at::Tensor>& tensors) const;
  // The results, lists one by one, and then the tensors that the operator writes to; numbers as tensors.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& tensors) const;

 private:
  std::string op_;
  std::unique_ptr<c10::OperatorHandle> handle_;
  std::vector<c10::IValue> args_;
  std::vector<at::Tensor> tensors_;
  std::vector<std::size_t> written_;  // among the tensors
};

// On one mesh dim: Replicate, every Shard, and every Partial that the type has.
std::vector<Placement> placements_for(const at::Tensor& tensor);

// `S(0),R; P(sum),R`
std::string to_string(const std::vector<Spec>& layout);

}  // namespace dtensor::testing
