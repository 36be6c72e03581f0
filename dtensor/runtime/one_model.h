#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dtensor/core/mesh.h"
#include "dtensor/core/spec.h"
#include "dtensor/runtime/tensor.h"

namespace dtensor {

// A tensor that is about to be distributed, with its name in the module, for messages.
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
  bool may_overwrite = false;  // nobody needs its plain values any more
};

// An error, the same on all ranks, if the options contradict each other or name a source that the mesh does not have.
void check_source(std::string_view where, const DeviceMesh& mesh, const DistributeOptions& options);

// Gives the plain tensors the values of one rank of the mesh (of each row of a sub-mesh): of `source`, else of the
// first. Every rank of the mesh calls it, with the same names, shapes and types. First a few words are exchanged, with
// a checksum of all values; only tensors that differ are sent, together, through one buffer of at most kSendBytes. With
// a source nothing is compared and every tensor is sent. Afterwards `tensors` holds the values: dense tensors, equal to
// the bit on all ranks, in the memory order of the source; they may be the tensors that were given. Those that may be
// overwritten are, unless others share their memory. Tensors on the meta device stay there, and if all of them are
// nothing is sent. Errors, on all ranks of the mesh: other names, shapes or types than the source has; with
// equal_copies other values. Returns the world ranks that passed other values than the first rank, which are known
// where values were compared.
inline constexpr std::int64_t kSendBytes = std::int64_t{32} << 20;
std::vector<std::int64_t> share_values(std::string_view where, std::vector<NamedTensor>& tensors,
                                       const DeviceMesh& mesh, const DistributeOptions& options);

// The words of the rank with this index in the mesh (in its row), on every rank of the row.
std::vector<std::int64_t> broadcast_words(const DeviceMesh& mesh, std::vector<std::int64_t> words, std::int64_t source);

// The shape, the type and the memory order of a tensor that is distributed: its own order where it is dense
// (channels_last, by columns), else row-major.
TensorMeta dense_meta(const at::Tensor& tensor);

// A full tensor that is equal on all ranks, as a distributed one: each rank copies its local tensor out of it, nothing
// is sent. Without gradient.
at::Tensor distribute_replica(const at::Tensor& full, const Spec& spec, const DeviceMesh& mesh);

// Turns plain tensors into distributed ones, in place. Their values are shared first, also those of their gradients.
struct ToDistribute {
  std::string name;
  at::Tensor tensor;
  Spec spec;
  bool keeps_order = false;  // the memory order is the spec's, whatever the source's is
};
// Errors, before anything is changed: what share_values says, tensors that share memory with each other, views that
// were computed from a tensor which requires a gradient.
void distribute_all(std::string_view where, const std::vector<ToDistribute>& tensors, const DeviceMesh& mesh,
                    const DistributeOptions& options);

// Moves a distributed tensor to another spec of its mesh, in place, with its gradient.
void redistribute_in_place(const at::Tensor& tensor, const Spec& spec);

}  // namespace dtensor
