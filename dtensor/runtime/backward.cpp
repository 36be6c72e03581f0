#include "dtensor/runtime/backward.h"

#include <torch/csrc/autograd/variable.h>

#include "dtensor/runtime/redistribute.h"

namespace dtensor {

void bring_gradient_home(const at::Tensor& tensor, Payload& payload) {
  if (!tensor.requires_grad() || !tensor.is_leaf()) return;
  const void* state = torch::autograd::impl::get_autograd_meta(tensor);
  if (payload.hooked == state) return;
  payload.hooked = state;
  tensor.register_hook([home = home_of(payload.spec), mesh = payload.mesh](const at::Tensor& gradient) {
    if (!gradient.defined() || !has_payload(gradient)) return gradient;
    return redistribute(gradient, home, mesh, {.async = true});
  });
}

}  // namespace dtensor
