#include "dtensor/runtime/backward.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/version.h>
#if TORCH_VERSION_MAJOR >= 2
#include <torch/csrc/autograd/graph_task.h>
#endif

#include <mutex>

#include "dtensor/runtime/accumulate.h"
#include "dtensor/runtime/buckets.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/redistribute.h"

namespace dtensor {
namespace {

// Carried by libtorch into the threads of a backward pass; used by nothing in it.
c10::DebugInfoKind accumulation_kind() { return c10::DebugInfoKind::TEST_INFO; }

}  // namespace

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

bool accumulating() { return c10::ThreadLocalDebugInfo::get(accumulation_kind()) != nullptr; }

GradientAccumulation::GradientAccumulation() : guard_(accumulation_kind(), std::make_shared<c10::DebugInfoBase>()) {}

namespace {

// While gradients are accumulated, and when this one meets one that was.
bool stays_unreduced(const WeakTensor& leaf, const at::Tensor& gradient, const Spec& home) {
  if (payload_of(gradient).spec == home || gradient.requires_grad()) return false;
  if (accumulating()) return true;
  auto impl = leaf.lock();
  if (!impl) return false;
  const at::Tensor sum = at::Tensor(std::move(impl)).grad();
  return has_payload(sum) && payload_of(sum).unreduced().has_value();
}

}  // namespace

at::Tensor left_unreduced(const at::Tensor& gradient, const Spec& home, std::shared_ptr<GradientBucket> bucket) {
  Payload& payload = payload_of(gradient);
  at::Tensor result = wrap(at::Tensor(), home, payload.mesh);
  payload_of(result).set_unreduced({payload.spec, payload.local(), std::move(bucket), Source(gradient)});
  return result;
}

void bring_gradient_home(const at::Tensor& tensor, Payload& payload) {
  if (!tensor.requires_grad() || !tensor.is_leaf()) return;
  const void* state = torch::autograd::impl::get_autograd_meta(tensor);
  if (payload.hooked.load(std::memory_order_acquire) == state) return;
  static std::mutex mutex;  // several threads may use it first
  const std::lock_guard lock(mutex);
  if (payload.hooked == state) return;
  if (!payload.traits) payload.traits = std::make_shared<ParameterTraits>();
  tensor.register_hook([here = home_of(payload.spec), mesh = payload.mesh, traits = payload.traits,
                        leaf = WeakTensor(tensor.getIntrusivePtr())](const at::Tensor& gradient) {
    if (!gradient.defined()) return gradient;
    // It was given another value (set_data), and with it another hook.
    if (auto impl = leaf.lock()) {
      const at::Tensor owner(std::move(impl));
      if (has_payload(owner) && payload_of(owner).traits && payload_of(owner).traits != traits) return gradient;
    }
    const Spec& home = traits->home ? *traits->home : here;
    if (!has_payload(gradient)) {
      // libtorch's own (of max.dim and the like), the same on all ranks.
      return gradient.requires_grad() ? gradient : redistribute(as_replica(gradient, mesh), home, mesh, {});
    }
    const std::shared_ptr<GradientBucket>& bucket = traits->bucket;
    if (bucket && bucket->takes(gradient, home)) return bucket->arrived(gradient, home);
    if (home.meta().dtype() == payload_of(gradient).spec.meta().dtype()) {
      if (stays_unreduced(leaf, gradient, home)) return left_unreduced(gradient, home);
      return redistribute(gradient, home, mesh, {.async = true});
    }
    // Of the type that libtorch knows the leaf by (of a parameter that was gathered in another one); the leaf's own
    // when the backward pass has ended.
    torch::autograd::Engine::get_default_engine().queue_callback([leaf, type = scalar_type_of(home.meta().dtype())] {
      auto impl = leaf.lock();
      if (!impl) return;
      const at::Tensor owner(std::move(impl));
      const at::Tensor sum = owner.grad();
      if (!has_payload(sum) || payload_of(sum).unreduced() || sum.scalar_type() == type) return;
      const at::NoGradGuard no_grad;
      owner.mutable_grad() = sum.to(type);
    });
    return redistribute(gradient, with_dtype(home, gradient.scalar_type()), mesh, {.async = true});
  });
  payload.hooked = state;
}

namespace {

// torch::autograd::grad takes gradients out before the hooks of leaves have seen them (version 1), and inner tensors
// have none: what it returns is brought home here.
class HomeEngine final : public torch::autograd::Engine {
 public:
  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs, bool keep_graph,
                                         bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    torch::autograd::variable_list gradients =
        Engine::execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
    const c10::AutoGradMode differentiable(create_graph);
    for (std::size_t i = 0; i < outputs.size() && i < gradients.size(); ++i) {
      at::Tensor& gradient = gradients[i];
      if (!has_payload(gradient) || payload_of(gradient).unreduced()) continue;
      const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(outputs[i].function.get());
      const bool knows = leaf && has_payload(leaf->variable);
      const Payload& payload = payload_of(knows ? leaf->variable : gradient);
      const Spec home = payload.traits && payload.traits->home ? *payload.traits->home : home_of(payload.spec);
      if (payload_of(gradient).spec != home) gradient = redistribute(gradient, home, payload.mesh, {});
    }
    return gradients;
  }
};

// Only in place of libtorch's own: Python has another.
const bool installed = [] {
  using torch::autograd::Engine;
  if (&Engine::get_default_engine() != &Engine::get_base_engine()) return false;
  torch::autograd::set_default_engine_stub([]() -> Engine& {
    static Engine& engine = *new HomeEngine;
    return engine;
  });
  return true;
}();

}  // namespace

bool add_unreduced(Payload& sum, Payload& more) {
  auto& into = sum.unreduced();
  const auto& from = more.unreduced();
  // What is there was reduced: this comes on top, with the rest of its bucket.
  if (!into && from && from->bucket) {
    static_cast<void>(sum.local());
    sum.set_unreduced(*from);
    return true;
  }
  if (!into || !from) return false;
  // What was accumulated may have the wider type that it is to be reduced in.
  const Spec more_of_it = from->spec.meta().dtype() == into->spec.meta().dtype()
                              ? from->spec
                              : with_dtype(from->spec, scalar_type_of(into->spec.meta().dtype()));
  if (!(into->spec == more_of_it)) return false;
  // Not in place: the part may be another leaf's too.
  into->source.check();
  from->source.check();
  into->source = {};
  if (into->local.defined()) into->local = into->local.add(from->local.to(into->local.scalar_type()));
  return true;
}

}  // namespace dtensor
