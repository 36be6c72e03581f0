#include "dtensor/runtime/backward.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/version.h>
#if TORCH_VERSION_MAJOR >= 2
#include <torch/csrc/autograd/graph_task.h>
#endif

#include "dtensor/runtime/redistribute.h"

namespace dtensor {

bool in_backward() {
#if TORCH_VERSION_MAJOR >= 2
  return torch::autograd::get_current_graph_task_id() != -1;
#else
  // Version 1 says it in one way only: callbacks can be added to a backward pass, and to nothing else.
  try {
    torch::autograd::Engine::get_default_engine().queue_callback([] {});
    return true;
  } catch (const c10::Error&) {
    return false;
  }
#endif
}

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
