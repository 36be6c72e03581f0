// Operators that libtorch makes of others, and in which it mixes plain tensors of its own with the caller's, or reads
// data: here they are told that these tensors are the same on all ranks, or given the data.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "dtensor/core/error.h"
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

// Its values are needed on every rank.
void read_here(c10::IValue& value) {
  if (value.isTensor() && has_payload(value.toTensor())) value = DTensor(value.toTensor()).full_tensor().cpu();
}

// The second argument says where to split.
void reads_second(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  read_here((*stack)[stack->size() - op.schema().arguments().size() + 1]);
  mixes_constants(op, keys, stack);
}

// (log probabilities, targets, lengths of both, …): the lengths are read, which may be tensors.
void reads_lengths(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  for (const std::size_t i : {2, 3}) read_here((*stack)[stack->size() - op.schema().arguments().size() + i]);
  mixes_constants(op, keys, stack);
}

// Without gradients libtorch reads the data of what lies on a CPU; the form that says where it was found does not.
void finds_places(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  c10::Dispatcher::singleton().findSchemaOrThrow("aten::max_pool1d_with_indices", "").callBoxed(stack);
  torch::jit::drop(*stack, 1);
}

// Nothing was normalised, and what runs on goes on as it is; all who had a part in it have a gradient of zeros.
void leaves_nothing(std::size_t first, torch::jit::Stack* stack) {
  const at::Tensor input = (*stack)[first].toTensor();
  at::Tensor out = input.clone();
  const auto given = [&](std::size_t i) { return (*stack)[first + i].toOptional<at::Tensor>().value_or(at::Tensor()); };
  if (given(1).defined()) out = out.mul(given(1).select(0, 0));
  if (given(2).defined()) out = out.add(given(2).select(0, 0));
  stack->resize(first);
  const at::Tensor none = at::empty({0}, input.options());
  const at::Tensor reserved = at::empty({0}, c10::TensorOptions().dtype(at::kByte).device(input.device()));
  torch::jit::push(*stack, out, none, none, reserved, std::int64_t{0});
}

// Of batch norms libtorch would choose one by the device, whose results mean something to a kernel of the device's
// maker alone: (input, weight, bias, running mean, running variance, training, momentum, eps, may choose).
void takes_native(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  static const auto native = c10::Dispatcher::singleton().findSchemaOrThrow("aten::native_batch_norm", "");
  torch::jit::pop(*stack);
  const std::size_t first = stack->size() - native.schema().arguments().size();
  const at::Tensor input = (*stack)[first].toTensor();
  // The kernels do not look whether there is one number for each channel.
  for (std::size_t i = 1; i < 5 && input.dim() >= 2; ++i) {
    const c10::IValue& value = (*stack)[first + i];
    if (!value.isTensor() || !value.toTensor().defined() || value.toTensor().numel() == input.size(1)) continue;
    fail_invalid("aten::batch_norm", {.what = "not one number for each channel",
                                      .got = std::to_string(value.toTensor().numel()) + " as argument \"" +
                                             native.schema().arguments()[i].name() + "\"",
                                      .expected = std::to_string(input.size(1))});
  }
  if (input.numel() == 0) return leaves_nothing(first, stack);
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
    {"ctc_loss", "IntList", kernel<&reads_lengths>},
    {"ctc_loss", "Tensor", kernel<&reads_lengths>},
    {"embedding_bag", ""},
    {"embedding_bag", "padding_idx"},
    {"gru", "input"},
    {"gru_cell", ""},
    {"lstm", "input"},
    {"lstm_cell", ""},
    {"max_pool1d", "", kernel<&finds_places>},
    {"nanquantile", ""},
    {"nanquantile", "scalar"},
    {"one_hot", ""},
    {"quantile", ""},
    {"quantile", "scalar"},
    {"rnn_relu", "input"},
    {"rnn_relu_cell", ""},
    {"rnn_tanh", "input"},
    {"rnn_tanh_cell", ""},
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
