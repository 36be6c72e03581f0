#pragma once

#include "dtensor/runtime/payload.h"

namespace dtensor {

// Is this thread running a backward pass? libtorch mixes plain tensors in there.
bool in_backward();

// Was this backward pass started under a GradientAccumulation?
bool accumulating();

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// The gradient as it is, shown as one that lies at `home`.
at::Tensor left_unreduced(const at::Tensor& gradient, const Spec& home, std::shared_ptr<GradientBucket> bucket = {});

// When the tensor is a leaf that needs a gradient: from now on its gradient arrives in its own placement (Replicate
// where it is Partial), its redistribution started as soon as the gradient is there.
void bring_gradient_home(const at::Tensor& tensor, Payload& payload);

// A gradient that libtorch or a custom function made, a plain tensor: it is the same on all ranks. Differentiable.
at::Tensor distribute_plain_gradient(const at::Tensor& gradient, const std::shared_ptr<const DeviceMesh>& mesh);

// Both are gradients that were left unreduced and lie alike: adds the second to the first, without communication.
bool add_unreduced(Payload& sum, Payload& more);

}  // namespace dtensor
