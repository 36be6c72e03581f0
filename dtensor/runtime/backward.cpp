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
#include <typeinfo>

#include "dtensor/core/error.h"
#include "dtensor/runtime/accumulate.h"
#include "dtensor/runtime/buckets.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/redistribute.h"

namespace dtensor {
namespace {

// Carried by libtorch into the threads of a backward pass; used by nothing in it.
c10::DebugInfoKind accumulation_kind() { return c10::DebugInfoKind::TEST_INFO; }

}  // namespace

bool accumulating() { return c10::ThreadLocalDebugInfo::get(accumulation_kind()) != nullptr; }

GradientAccumulation::GradientAccumulation() : guard_(accumulation_kind(), std::make_shared<c10::DebugInfoBase>()) {}

namespace {

// While gradients are accumulated, and when this one meets one that was.
bool stays_unreduced(const at::Tensor& leaf, const at::Tensor& gradient, const Spec& home) {
  if (payload_of(gradient).spec == home || gradient.requires_grad()) return false;
  if (accumulating()) return true;
  const at::Tensor sum = leaf.grad();
  return has_payload(sum) && payload_of(sum).unreduced().has_value();
}

// To a gradient that only its leaf has got, in the leaf's hook: libtorch's lists, and the hook's own.
constexpr std::size_t kReferencesInHook = TORCH_VERSION_MAJOR >= 2 ? 3 : 4;

// Does anything but the payload refer to the memory of its local tensor?
bool shares_memory(const at::Tensor& local) {
  return local.defined() && (local.use_count() > 1 || local.storage().use_count() > 1);
}

}  // namespace

at::Tensor left_unreduced(const at::Tensor& gradient, const Spec& home, std::shared_ptr<GradientBucket> bucket) {
  Payload& payload = payload_of(gradient);
  at::Tensor result = wrap(at::Tensor(), home, payload.mesh, {.provenance = payload.provenance});
  const at::Tensor& local = payload.local();
  // Other leaves may have got the same gradient, or views of it, and write there.
  const bool copies = gradient.use_count() > kReferencesInHook || shares_memory(local);
  payload_of(result).set_unreduced(
      {payload.spec, copies ? local.clone() : local, std::move(bucket), copies ? Source() : Source(gradient)});
  return result;
}

namespace {

// The program may put a plain tensor into `.grad()` of a distributed leaf: it is the same on all ranks. It takes the
// layout of the leaf's gradient, so that autograd can add to it.
void distribute_plain_sum(const at::Tensor& leaf, const Spec& home, const std::shared_ptr<const DeviceMesh>& mesh) {
  const at::Tensor sum = leaf.grad();
  if (!sum.defined() || has_payload(sum)) return;
  const Dims& shape = home.meta().shape();
  if (sum.sizes() != at::IntArrayRef(shape.data(), shape.size())) {
    fail_invalid("backward", {.what = "the plain tensor in .grad() has another shape than the distributed leaf",
                              .got = meta_of(sum).to_string(),
                              .expected = home.meta().to_string(),
                              .advice = "reset .grad(), or assign distribute_tensor(gradient, mesh, placements)"});
  }
  const at::NoGradGuard no_grad;
  leaf.mutable_grad() = redistribute(as_replica(sum, mesh), with_dtype(home, sum.scalar_type()), mesh, {}).clone();
}

// Moves a leaf's gradient to the layout of the leaf. It belongs to the leaf's autograd state, where
// bring_gradient_home finds it by its type.
class HomeHook {
 public:
  explicit HomeHook(const at::Tensor& leaf) : leaf_(leaf.getIntrusivePtr()) {}

  at::TensorBase operator()(const at::TensorBase& gradient) const {
    auto impl = leaf_.lock();
    if (!gradient.defined() || !impl) return gradient;
    return bring_home(at::Tensor(std::move(impl)), at::Tensor(gradient));
  }

 private:
  // The leaf as it is now: the program may have given it another value since (set_data).
  at::Tensor bring_home(const at::Tensor& leaf, const at::Tensor& gradient) const {
    if (!has_payload(leaf) || leaf.sizes() != gradient.sizes()) return gradient;
    const std::shared_ptr<const DeviceMesh> mesh = payload_of(leaf).mesh;
    const std::shared_ptr<ParameterTraits> traits = payload_of(leaf).traits;
    const Spec home = traits && traits->home ? *traits->home : home_of(payload_of(leaf).spec);
    distribute_plain_sum(leaf, home, mesh);
    if (!has_payload(gradient)) {
      // libtorch's own (of max.dim and the like), the same on all ranks.
      return redistribute(distribute_plain_gradient(gradient, mesh), home, mesh, {});
    }
    if (traits && traits->bucket && traits->bucket->takes(gradient, home))
      return traits->bucket->arrived(gradient, home);
    if (home.meta().dtype() == payload_of(gradient).spec.meta().dtype()) {
      if (stays_unreduced(leaf, gradient, home)) return left_unreduced(gradient, home);
      return redistribute(gradient, home, mesh, {.async = true});
    }
    // Of the type that libtorch knows the leaf by (of a parameter that was gathered in another one); the leaf's own
    // when the backward pass has ended.
    torch::autograd::Engine::get_default_engine().queue_callback(
        [weak = leaf_, type = scalar_type_of(home.meta().dtype())] {
          auto impl = weak.lock();
          if (!impl) return;
          const at::Tensor owner(std::move(impl));
          const at::Tensor sum = owner.grad();
          if (!has_payload(sum) || payload_of(sum).unreduced() || sum.scalar_type() == type) return;
          const at::NoGradGuard no_grad;
          owner.mutable_grad() = sum.to(type);
        });
    return redistribute(gradient, with_dtype(home, gradient.scalar_type()), mesh, {.async = true});
  }

  const WeakTensor leaf_;
};

bool has_home_hook(const torch::autograd::AutogradMeta& meta) {
  if (!meta.cpp_hooks_list_) return false;
  for (const auto& hook : *meta.cpp_hooks_list_) {
    if (hook.target<HomeHook>()) return true;
  }
  return false;
}

}  // namespace

void bring_gradient_home(const at::Tensor& tensor, Payload& payload) {
  if (!tensor.requires_grad() || !tensor.is_leaf()) return;
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  // `hooked` alone proves nothing: another leaf's state may have had this address. But where it differs, another thread
  // may be adding the hook now.
  if (payload.hooked.load(std::memory_order_acquire) == meta && has_home_hook(*meta)) return;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (!has_home_hook(*meta)) static_cast<const at::TensorBase&>(tensor).register_hook(HomeHook(tensor));
  payload.hooked.store(meta, std::memory_order_release);
}

namespace {

#if TORCH_VERSION_MAJOR < 2
thread_local int evaluating = 0;
#endif

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
      if (leaf && !has_payload(leaf->variable)) {  // a plain leaf's gradient is plain
        gradient = DTensor(gradient).full_tensor();
        continue;
      }
      const bool knows = leaf != nullptr;
      const Payload& payload = payload_of(knows ? leaf->variable : gradient);
      const Spec home = payload.traits && payload.traits->home ? *payload.traits->home : home_of(payload.spec);
      if (payload_of(gradient).spec != home) gradient = redistribute(gradient, home, payload.mesh, {});
    }
    return gradients;
  }

#if TORCH_VERSION_MAJOR < 2
 protected:
  // All that a backward pass runs on a thread runs in here: nodes, hooks and callbacks.
  void thread_main(const std::shared_ptr<torch::autograd::GraphTask>& task) override {
    struct Evaluating {
      Evaluating() { ++evaluating; }
      ~Evaluating() { --evaluating; }
    };
    const Evaluating guard;
    Engine::thread_main(task);
  }
#endif
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

bool in_backward() {
#if TORCH_VERSION_MAJOR >= 2
  return torch::autograd::get_current_graph_task_id() != -1;
#else
  auto& engine = torch::autograd::Engine::get_default_engine();
  if (typeid(engine) == typeid(HomeEngine)) return evaluating > 0;
  // Another engine, Python's: version 1 lets callbacks be added in a backward pass, and throws elsewhere. This takes
  // half a millisecond.
  try {
    engine.queue_callback([] {});
    return true;
  } catch (const c10::Error&) {
    return false;
  }
#endif
}

bool add_unreduced(Payload& sum, Payload& more) {
  auto& into = sum.unreduced();
  const auto& from = more.unreduced();
  // What is there was reduced: this comes on top, with the rest of its bucket.
  if (!into && from && from->bucket) {
    static_cast<void>(sum.local());
    sum.set_unreduced(*from);
    sum.provenance.add(more.provenance);
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
  sum.provenance.add(more.provenance);
  if (into->local.defined()) into->local = into->local.add(from->local.to(into->local.scalar_type()));
  return true;
}

}  // namespace dtensor
