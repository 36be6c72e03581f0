#pragma once

#include <ATen/core/Tensor.h>

#include <iosfwd>
#include <optional>
#include <source_location>
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
  // The global strides, alike on all ranks. Where they are not given: the order of the local tensor's dims, which then
  // must be the same on all ranks; row-major where the shape is given, or the local tensor does not lie densely.
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

// Whose values a distributed tensor gets. Without options: those of the first rank of the mesh (of each row of a
// sub-mesh, such as mesh["tp"]).
struct DistributeOptions {
  // The rank whose values all ranks take: an index in the mesh, 0 the first, the same in every row. Nothing is compared
  // then, and the tensor may be undefined on the other ranks: shape, type and memory order come from the source.
  std::optional<std::int64_t> source = {};
  // The ranks pass equal values: nothing but a checksum is sent, and a difference is an error that names the ranks.
  bool equal_copies = false;
};
// A full tensor as a distributed one, in its memory order (channels_last, for example). Every rank of the mesh calls
// it. Without a source the ranks compare checksums of what they pass: normally all are equal, and each copies its local
// tensor out of its own; if they differ, all get the values of the first rank, with one warning for each place in the
// program. A rank outside the mesh passes a tensor of the same shape and type, whose values are not looked at.
// For a rank's own part of a tensor, such as its batch, see from_local.
DTensor distribute_tensor(const at::Tensor& full, const DeviceMesh& mesh, const Placements& placements,
                          const DistributeOptions& options = {},
                          std::source_location where = std::source_location::current());
// Every rank's part as one distributed tensor, sharing memory with it where it lies as the strides say (else it is
// copied). Differentiable.
DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements,
                   const FromLocalOptions& options = {});

// Prints `DTensor f32[8,6] @ 2(tp) : S(0), on rank 0` and the values of the local tensor. Never communicates: values
// that are still on their way, or out of date, are left out, and the text says so. `std::cout << tensor` does the same
// where the handle is an at::Tensor.
std::ostream& operator<<(std::ostream& out, const DTensor& tensor);

// Where a gradient of a tensor with this spec lies: the same, Replicate where it is Partial.
Spec home_of(const Spec& spec);

}  // namespace dtensor
