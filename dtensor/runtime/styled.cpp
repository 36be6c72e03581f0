// Operators that have a weight: libtorch's C++ modules have no hooks, so what a parallel style asks of a module's input
// and result rides on its weight, and is done here. Weights with a style, and their views, carry a dispatch key above
// autograd's that nothing else has; other tensors never come by.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <string_view>

#include "dtensor/runtime/payload.h"
#include "dtensor/runtime/register.h"

namespace dtensor {
namespace {

struct Weighted {
  const char* name;
  const char* overload;
  std::size_t input;  // the places of the two among the arguments
  std::size_t weight;
};
// What torch::nn's modules with a weight call. Derivatives of these call others, so backward passes are left alone.
constexpr Weighted kWeighted[] = {
    {"addmm", "", 1, 2},
    {"conv1d", "", 0, 1},
    {"conv1d", "padding", 0, 1},
    {"conv2d", "", 0, 1},
    {"conv2d", "padding", 0, 1},
    {"conv3d", "", 0, 1},
    {"conv3d", "padding", 0, 1},
    {"conv_transpose1d", "", 0, 1},
    {"conv_transpose2d", "input", 0, 1},
    {"conv_transpose3d", "input", 0, 1},
    {"embedding", "", 1, 0},
    {"group_norm", "", 0, 2},
    {"layer_norm", "", 0, 2},
    {"linear", "", 0, 1},
    {"matmul", "", 0, 1},
    {"rms_norm", "", 0, 2},
};

class StyledKernel final : public c10::OperatorKernel {
 public:
  explicit StyledKernel(const Weighted& places)
      : places_(places), is_lookup_(std::string_view(places.name) == "embedding") {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) const {
    const std::size_t first = stack->size() - op.schema().arguments().size();
    const c10::IValue& weight = (*stack)[first + places_.weight];
    std::shared_ptr<ParameterStyle> style;
    if (weight.isTensor() && has_payload(weight.toTensor())) {
      const auto& traits = payload_of(weight.toTensor()).traits;
      if (traits) style = traits->lookup && is_lookup_ ? traits->lookup : traits->style;
    }
    const c10::impl::ExcludeDispatchKeyGuard below(kStyledKey);
    if (style) gather(op, stack);
    if (style) (*stack)[first + places_.input] = style->input((*stack)[first + places_.input].toTensor());
    op.callBoxed(stack);
    if (style) stack->back() = style->output(stack->back().toTensor());
  }

 private:
  // libtorch compares the types of a convolution's arguments before it calls another operator: parameters that are
  // gathered in another type must have it by then.
  static void gather(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const std::size_t first = stack->size() - op.schema().arguments().size();
    const GatherUnit::OneCall one_call;
    for (std::size_t i = first; i < stack->size(); ++i) {
      const c10::IValue& value = (*stack)[i];
      if (!value.isTensor() || !has_payload(value.toTensor()) || !payload_of(value.toTensor()).unit) continue;
      const at::Tensor tensor = value.toTensor();
      (*stack)[i] = payload_for(tensor, GatherUnit::Use::kRead).unit->gathered(tensor);
    }
  }

  const Weighted places_;
  const bool is_lookup_;
};

}  // namespace

void register_styled() {
  auto* any = new torch::Library(torch::Library::IMPL, "_", kStyledKey, __FILE__, __LINE__);
  any->fallback(torch::CppFunction::makeFallthrough());
  auto* library = new torch::Library(torch::Library::IMPL, "aten", kStyledKey, __FILE__, __LINE__);
  for (const Weighted& weighted : kWeighted) {
    const auto op = c10::Dispatcher::singleton().findSchema({std::string("aten::") + weighted.name, weighted.overload});
    if (!op) continue;
    const std::string overload = weighted.overload;
    const std::string name = weighted.name + (overload.empty() ? overload : "." + overload);
    library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<StyledKernel>(weighted)));
  }
}

}  // namespace dtensor
