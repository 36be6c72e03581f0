#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace dtensor {

// torch::nn::utils::clip_grad_norm_ for parameters that may lie on different meshes, or be plain: the norm of all
// gradients together, each counted once however it lies, and the gradients scaled down where it is larger than
// max_norm. The norm is the same on every rank. Errors: a gradient on a mesh that this rank is not in; a norm that is
// infinite or no number, if that is asked for (no gradient is changed then).
double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2.0,
                       bool error_if_nonfinite = false);

}  // namespace dtensor
