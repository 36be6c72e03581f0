#pragma once

#include <ATen/core/Tensor.h>

#include <iosfwd>
#include <optional>
#include <string>

#include "dtensor/core/mesh.h"
#include "dtensor/core/plan.h"
#include "dtensor/core/spec.h"

namespace dtensor {

struct RedistributeOptions {
  PlanOptions plan = {};
  // Leave it under way; the first use waits for it.
  bool async = false;
  // What is sent, forward and backward, where that is not the tensor's own type; results are cast back.
  std::optional<c10::ScalarType> forward_dtype = {};
  std::optional<c10::ScalarType> backward_dtype = {};
};

struct ToLocalOptions {
  // How the gradient of the local tensor lies; the tensor's own placements (Replicate for Partial) unless said.
  std::optional<Placements> grad_placements = {};
};

struct FromLocalOptions {
  // The global shape; found from the local ones (which then must be even along sharded dims) when not given.
  std::optional<Dims> shape = {};
  // The global strides, alike on all ranks; row-major unless said.
  std::optional<Dims> stride = {};
  // Compare shape and type over all ranks first; the replicas' values too.
  bool check = false;
  // How the local tensor's gradient lies; the placements given (Replicate for Partial) unless said.
  std::optional<Placements> grad_placements = {};
};

// A handle to a distributed tensor, with no state of its own: one logical tensor whose parts the ranks of a mesh hold.
// It is an at::Tensor, and every operator, module and optimizer of libtorch takes it.
class DTensor : public at::Tensor {
 public:
  DTensor() = default;
  // An error when the tensor is not distributed.
  DTensor(at::Tensor tensor);  // NOLINT(google-explicit-constructor): a handle is a handle

  const DeviceMesh& mesh() const;
  const Placements& placements() const;
  const Spec& spec() const;

  // This rank's part, sharing memory; undefined on ranks outside the mesh. Differentiable.
  at::Tensor to_local(const ToLocalOptions& options = {}) const;
  // The whole tensor on every rank of the mesh. Differentiable.
  at::Tensor full_tensor() const;
  // The same tensor laid out otherwise. Differentiable: the gradient goes the other way. Errors: what make_plan says.
  DTensor redistribute(const Placements& placements, const RedistributeOptions& options = {}) const;
  DTensor redistribute(const DeviceMesh& mesh, const Placements& placements,
                       const RedistributeOptions& options = {}) const;
};

bool is_dtensor(const at::Tensor& tensor);

// A whole tensor, given alike on all ranks (no communication; it keeps its order in memory, channels_last for one) or
// on `source` alone (it is sent from there, and lies by rows: the others' tensors say shape and type only).
struct DistributeOptions {
  std::optional<std::int64_t> source = {};  // a world rank
};
DTensor distribute_tensor(const at::Tensor& full, const DeviceMesh& mesh, const Placements& placements,
                          const DistributeOptions& options = {});
// Every rank's part as one distributed tensor, sharing memory with it where it lies as the strides say (else it is
// copied). Differentiable.
DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements,
                   const FromLocalOptions& options = {});

// `DTensor f32[8,6] @ 2(tp) : S(0)` and, where the rank has it, its part.
std::ostream& operator<<(std::ostream& out, const DTensor& tensor);

// Where a gradient of a tensor with this spec lies: the same, Replicate where it is Partial.
Spec home_of(const Spec& spec);

}  // namespace dtensor
