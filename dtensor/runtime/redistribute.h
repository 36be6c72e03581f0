#pragma once

#include <memory>

#include "dtensor/runtime/payload.h"
#include "dtensor/runtime/tensor.h"

namespace dtensor {

// DTensor::redistribute, with specs: any layout, of this mesh or another one.
at::Tensor redistribute(const at::Tensor& tensor, const Spec& to, std::shared_ptr<const DeviceMesh> mesh,
                        const RedistributeOptions& options);
// The same without autograd.
at::Tensor redistribute_now(const at::Tensor& tensor, const Spec& to, std::shared_ptr<const DeviceMesh> mesh,
                            const RedistributeOptions& options);

// The tensor itself; its gradient comes by here, and goes on as the tensor lies (Replicate where it is Partial).
at::Tensor with_gradient_at_home(const at::Tensor& tensor);

// The same layout, of elements of another type.
Spec with_dtype(const Spec& spec, c10::ScalarType type);

// The result; where it has memory of the source's, one count of writes: autograd sees what is written through either.
at::Tensor counted_with(at::Tensor result, const at::Tensor& source);

// Do all ranks of the mesh say the same shape and type, and do replicas hold the same bits? An error on all of them if
// not.
void check_agreement(const DeviceMesh& mesh, const Spec& spec, const at::Tensor& local,
                     const std::string& where = "from_local");

}  // namespace dtensor
