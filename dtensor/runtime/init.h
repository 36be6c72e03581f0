#pragma once

#include <ATen/core/Tensor.h>

namespace dtensor {

// torch::nn::init::orthogonal_ and sparse_ for distributed tensors: libtorch's draw plain tensors from the rank's
// default generator, which are different on ranks that have different seeds. The others of torch::nn::init work as they
// are. Values do not depend on the mesh or the placements. Each rank makes the full matrix for a moment. Plain tensors
// are left to libtorch.
//
// A tensor whose rows, flattened, are orthonormal times `gain` (its columns where there are more rows).
void orthogonal_(const at::Tensor& tensor, double gain = 1);
// Normal values with this deviation; in each column ceil(sparsity * rows) of them are 0.
void sparse_(const at::Tensor& tensor, double sparsity, double std = 0.01);

}  // namespace dtensor
