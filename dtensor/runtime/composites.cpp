// Operators that libtorch makes of others, and in which it mixes plain tensors of its own with the caller's, or reads
// data: here they are told that these tensors are the same on all ranks, or given the data.
#include <ATen/WrapDimUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "dtensor/core/error.h"
#include "dtensor/runtime/dispatch.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/payload.h"
#include "dtensor/runtime/register.h"
#include "dtensor/runtime/tensor.h"

namespace dtensor {
namespace {

// The mesh of the first distributed tensor among the arguments.
std::shared_ptr<const DeviceMesh> mesh_among(const torch::jit::Stack& stack, std::size_t arguments) {
  for (std::size_t i = stack.size() - arguments; i < stack.size(); ++i) {
    if (stack[i].isTensor() && has_payload(stack[i].toTensor())) return payload_of(stack[i].toTensor()).mesh;
    if (!stack[i].isTensorList()) continue;
    for (const at::Tensor& tensor : stack[i].toTensorVector()) {
      if (has_payload(tensor)) return payload_of(tensor).mesh;
    }
  }
  return nullptr;
}

// Plain tensors that come up meanwhile are libtorch's own constants. Where it writes the result into one of them, that
// is the same on all ranks: a replica.
void mixes_constants(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const ImplicitReplication guard;
  const std::shared_ptr<const DeviceMesh> mesh = mesh_among(*stack, op.schema().arguments().size());
  run_made_of_others(op, keys, stack);
  if (!mesh || !mesh->contains_me()) return;
  const Placements whole(static_cast<std::size_t>(mesh->ndim()), Replicate());
  for (std::size_t r = 0; r < op.schema().returns().size(); ++r) {
    c10::IValue& value = (*stack)[stack->size() - 1 - r];
    if (!value.isTensor() || !value.toTensor().defined() || has_payload(value.toTensor())) continue;
    value = at::Tensor(from_local(value.toTensor(), *mesh, whole));
  }
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

// (data, batch sizes, …): libtorch writes the result into a plain tensor, and reads the sizes. Full tensors do.
void pads_full(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const std::size_t arguments = op.schema().arguments().size();
  const std::shared_ptr<const DeviceMesh> mesh = mesh_among(*stack, arguments);
  for (const std::size_t i : {stack->size() - arguments, stack->size() - arguments + 1}) {
    c10::IValue& value = (*stack)[i];
    if (has_payload(value.toTensor())) value = DTensor(value.toTensor()).full_tensor();
  }
  op.callBoxed(stack);
  c10::IValue& padded = (*stack)[stack->size() - 2];
  const Placements whole(static_cast<std::size_t>(mesh->ndim()), Replicate());
  padded = at::Tensor(from_local(padded.toTensor(), *mesh, whole));
}

// (self, number of classes): libtorch writes ones into a plain tensor of zeros; comparing keeps the layout.
void compares_classes(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  std::int64_t classes = torch::jit::pop(*stack).toInt();
  const at::Tensor self = torch::jit::pop(*stack).toTensor();
  const auto refuse = [&](const std::string& what, const std::string& got) {
    fail_invalid(op.schema().name(), {.what = what, .got = got});
  };
  if (self.scalar_type() != at::kLong) {
    refuse("one_hot is only applicable to index tensors of type LongTensor", meta_of(self).to_string());
  }
  if (self.numel() == 0) {
    if (classes <= 0) refuse("cannot infer the number of classes from an empty tensor", meta_of(self).to_string());
  } else {
    const std::int64_t lowest = self.min().item<std::int64_t>(), highest = self.max().item<std::int64_t>();
    if (lowest < 0) refuse("class values must be non-negative", std::to_string(lowest));
    if (classes == -1) classes = highest + 1;
    if (classes < 1) refuse("the number of classes must be positive", std::to_string(classes));
    if (highest >= classes) {
      refuse("class values must be smaller than the number of classes",
             std::to_string(highest) + " of " + std::to_string(classes));
    }
  }
  const ImplicitReplication guard;
  const at::Tensor all = at::arange(classes, c10::TensorOptions().dtype(at::kLong).device(self.device()));
  stack->emplace_back(self.unsqueeze(-1).eq(all).to(at::kLong));
}

// (self, repeats, dim, size of the result): copies side by side, which keeps the layout.
void repeats_each(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  torch::jit::drop(*stack, 1);
  const c10::IValue named = torch::jit::pop(*stack);
  const std::int64_t repeats = torch::jit::pop(*stack).toInt();
  at::Tensor self = torch::jit::pop(*stack).toTensor();
  if (repeats < 0)
    fail_invalid("aten::repeat_interleave", {.what = "repeats must be non-negative", .got = std::to_string(repeats)});
  if (named.isNone() || self.dim() == 0) self = self.flatten();
  const std::int64_t dim = named.isNone() ? 0 : at::maybe_wrap_dim(named.toInt(), self.dim());
  std::vector<std::int64_t> sizes = self.sizes().vec();
  sizes.insert(sizes.begin() + dim + 1, repeats);
  const at::Tensor copies = self.unsqueeze(dim + 1).expand(sizes).clone(at::MemoryFormat::Contiguous);
  stack->emplace_back(copies.flatten(dim, dim + 1));
}

// (self, size): libtorch changes the strides of the result in place where it lies by channels.
void averages_planes(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const at::Tensor self = (*stack)[stack->size() - 2].toTensor();
  const std::vector<std::int64_t> size = stack->back().toIntVector();
  const bool one = size.size() == 2 && size[0] == 1 && size[1] == 1;
  if (!one || self.dim() != 4 || self.suggest_memory_format() != at::MemoryFormat::ChannelsLast) {
    return mixes_constants(op, keys, stack);
  }
  torch::jit::drop(*stack, 2);
  stack->emplace_back(self.permute({0, 2, 3, 1}).mean({1, 2}, true).permute({0, 3, 1, 2}));
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

// (self, from): Tensor::set_data asks it, which is what Module::clone and torch::load give values to parameters by.
void needs_same_kind(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const at::Tensor from = torch::jit::pop(*stack).toTensor(), self = torch::jit::pop(*stack).toTensor();
  const auto text = [](const at::Tensor& tensor) {
    return has_payload(tensor) ? payload_of(tensor).spec.to_string() : "plain " + meta_of(tensor).to_string();
  };
  if (has_payload(self) != has_payload(from)) {
    fail_unsupported(
        "set_data",
        {.what = "a plain tensor cannot take over a distributed value, nor the other way round",
         .got = text(from) + " for a tensor that is " + text(self),
         .expected = "both distributed, or both plain",
         .advice = has_payload(from) ? "instead of Module::clone or torch::load: make a new module, distribute "
                                       "it alike, and copy_ each parameter or use load_checkpoint"
                                     : "copy_ into the parameter, or load_checkpoint instead of torch::load"});
  }
  stack->emplace_back(self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set()));
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
    {"_has_compatible_shallow_copy_type", "", kernel<&needs_same_kind>},
    {"_pack_padded_sequence_backward", ""},
    {"_pad_packed_sequence", "", kernel<&pads_full>},
    {"adaptive_avg_pool2d", "", kernel<&averages_planes>},
    {"combinations", ""},
    {"ctc_loss", "IntList", kernel<&reads_lengths>},
    {"ctc_loss", "Tensor", kernel<&reads_lengths>},
    {"embedding_bag", ""},
    {"embedding_bag", "padding_idx"},
    {"gru", "data", kernel<&reads_second>},
    {"gru", "input"},
    {"gru_cell", ""},
    {"linalg_matrix_rank", ""},
    {"linalg_matrix_rank", "atol_rtol_float"},
    {"linalg_matrix_rank", "atol_rtol_tensor"},
    {"linalg_matrix_rank", "tol_tensor"},
    {"linalg_pinv", ""},
    {"linalg_pinv", "atol_rtol_float"},
    {"linalg_pinv", "rcond_tensor"},
    {"linalg_vander", ""},
    {"lstm", "data", kernel<&reads_second>},
    {"lstm", "input"},
    {"lstm_cell", ""},
    {"max_pool1d", "", kernel<&finds_places>},
    {"nanquantile", ""},
    {"nanquantile", "scalar"},
    {"one_hot", "", kernel<&compares_classes>},
    {"pinverse", ""},
    {"quantile", ""},
    {"quantile", "scalar"},
    {"repeat_interleave", "self_Tensor", kernel<&reads_second>},
    {"repeat_interleave", "self_int", kernel<&repeats_each>},
    {"rnn_relu", "data", kernel<&reads_second>},
    {"rnn_relu", "input"},
    {"rnn_relu_cell", ""},
    {"rnn_tanh", "data", kernel<&reads_second>},
    {"rnn_tanh", "input"},
    {"rnn_tanh_cell", ""},
    {"scaled_dot_product_attention", ""},
    {"tensor_split", "tensor_indices_or_sections", kernel<&reads_second>},
    {"unravel_index", ""},
    {"vander", ""},
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
