// Operators that libtorch makes of others, and in which it mixes plain tensors of its own with the caller's, or reads
// data: here they are told that these tensors are the same on all ranks, or given the data.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "dtensor/runtime/dispatch.h"
#include "dtensor/runtime/payload.h"
#include "dtensor/runtime/register.h"
#include "dtensor/runtime/tensor.h"

namespace dtensor {
namespace {

// Plain tensors that come up meanwhile are libtorch's own constants.
void mixes_constants(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const ImplicitReplication guard;
  run_made_of_others(op, keys, stack);
}

// The second argument says where to split: its values are needed on every rank.
void reads_second(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  c10::IValue& places = (*stack)[stack->size() - op.schema().arguments().size() + 1];
  if (places.isTensor() && has_payload(places.toTensor())) places = DTensor(places.toTensor()).full_tensor().cpu();
  const ImplicitReplication guard;
  run_made_of_others(op, keys, stack);
}

// Without gradients libtorch reads the data of what lies on a CPU; the form that says where it was found does not.
void finds_places(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  c10::Dispatcher::singleton().findSchemaOrThrow("aten::max_pool1d_with_indices", "").callBoxed(stack);
  torch::jit::drop(*stack, 1);
}

// Of batch norms libtorch would choose one by the device, whose results mean something to a kernel of the device's
// maker alone: (input, weight, bias, running mean, running variance, training, momentum, eps, may choose).
void takes_native(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  static const auto native = c10::Dispatcher::singleton().findSchemaOrThrow("aten::native_batch_norm", "");
  torch::jit::pop(*stack);
  const at::Tensor input = (*stack)[stack->size() - native.schema().arguments().size()].toTensor();
  native.callBoxed(stack);
  const at::Tensor reserved = at::empty({0}, c10::TensorOptions().dtype(at::kByte).device(input.device()));
  torch::jit::push(*stack, reserved, std::int64_t{0});
}

template <void (*run)(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack*)>
torch::CppFunction kernel() {
  return torch::CppFunction::makeFromBoxedFunction<run>();
}

struct Composite {
  const char* name;
  const char* overload;
  torch::CppFunction (*make)() = kernel<&mixes_constants>;
};
constexpr Composite kComposites[] = {
    {"_batch_norm_impl_index", "", kernel<&takes_native>},
    {"combinations", ""},
    {"gru", "input"},
    {"lstm", "input"},
    {"max_pool1d", "", kernel<&finds_places>},
    {"nanquantile", ""},
    {"nanquantile", "scalar"},
    {"one_hot", ""},
    {"quantile", ""},
    {"quantile", "scalar"},
    {"rnn_relu", "input"},
    {"rnn_tanh", "input"},
    {"scaled_dot_product_attention", ""},
    {"tensor_split", "tensor_indices_or_sections", kernel<&reads_second>},
    {"unravel_index", ""},
};

}  // namespace

void register_composites() {
  auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradPrivateUse3, __FILE__, __LINE__);
  auto* below = new torch::Library(torch::Library::IMPL, "aten", kDTensorKey, __FILE__, __LINE__);
  for (const Composite& composite : kComposites) {
    const auto op =
        c10::Dispatcher::singleton().findSchema({std::string("aten::") + composite.name, composite.overload});
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) continue;
    const std::string full = composite.name + (*composite.overload ? "." + std::string(composite.overload) : "");
    for (torch::Library* at : {library, below}) at->impl(full.c_str(), composite.make());
  }
}

}  // namespace dtensor
