// Operators that libtorch makes of others, and in which it mixes plain tensors of its own with the caller's, or reads
// data: here they are told that these tensors are the same on all ranks, or given the data.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include "dtensor/runtime/dispatch.h"
#include "dtensor/runtime/payload.h"
#include "dtensor/runtime/register.h"
#include "dtensor/runtime/tensor.h"

namespace dtensor {
namespace {

// The operator's own kernel, which is the same for every device.
void run_composite(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

// Plain tensors that come up meanwhile are libtorch's own constants.
void mixes_constants(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const ImplicitReplication guard;
  run_composite(op, stack);
}

// The second argument says where to split: its values are needed on every rank.
void reads_second(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  c10::IValue& places = (*stack)[stack->size() - op.schema().arguments().size() + 1];
  if (places.isTensor() && has_payload(places.toTensor())) places = DTensor(places.toTensor()).full_tensor().cpu();
  const ImplicitReplication guard;
  run_composite(op, stack);
}

// Lists of tensors, one call for each.
void takes_each(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  run_composite(op, stack);
}

struct Composite {
  const char* name;
  const char* overload;
  bool reads_second;
};
constexpr Composite kComposites[] = {
    {"combinations", "", false},
    {"gru", "input", false},
    {"lstm", "input", false},
    {"nanquantile", "", false},
    {"nanquantile", "scalar", false},
    {"one_hot", "", false},
    {"quantile", "", false},
    {"quantile", "scalar", false},
    {"rnn_relu", "input", false},
    {"rnn_tanh", "input", false},
    {"scaled_dot_product_attention", "", false},
    {"tensor_split", "tensor_indices_or_sections", true},
    {"unravel_index", "", false},
};

std::string registered_name(const std::string& name, const std::string& overload) {
  return overload.empty() ? name : name + "." + overload;
}

}  // namespace

bool takes_lists(const c10::OperatorName& name) { return name.name.rfind("aten::_foreach_", 0) == 0; }

void register_composites() {
  auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradPrivateUse3, __FILE__, __LINE__);
  auto* below = new torch::Library(torch::Library::IMPL, "aten", kDTensorKey, __FILE__, __LINE__);
  for (const Composite& composite : kComposites) {
    const auto op =
        c10::Dispatcher::singleton().findSchema({std::string("aten::") + composite.name, composite.overload});
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) continue;
    const std::string full = registered_name(composite.name, composite.overload);
    for (torch::Library* at : {library, below}) {
      at->impl(full.c_str(), composite.reads_second ? torch::CppFunction::makeFromBoxedFunction<&reads_second>()
                                                    : torch::CppFunction::makeFromBoxedFunction<&mixes_constants>());
    }
  }
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!takes_lists(name)) continue;
    below->impl(registered_name(name.name.substr(6), name.overload_name).c_str(),
                torch::CppFunction::makeFromBoxedFunction<&takes_each>());
  }
}

}  // namespace dtensor
