// aten::nll_loss2d, of pixels: that of a list of them. Its own kernels know classes only as the second dim.
#include <ATen/core/Reduction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/nll_loss.h>
#include <ATen/ops/nll_loss_backward.h>
#include <ATen/ops/nll_loss_forward.h>
#include <torch/library.h>

#include "dtensor/core/error.h"
#include "dtensor/runtime/payload.h"
#include "dtensor/runtime/register.h"

namespace dtensor {
namespace {

// A list of pixels in place of planes of them.
struct Pixels {
  at::Tensor self, target;
};

Pixels pixels_of(const char* op, const at::Tensor& self, const at::Tensor& target) {
  const bool fits = self.dim() == 4 && target.dim() == 3 && self.size(0) == target.size(0) &&
                    self.size(2) == target.size(1) && self.size(3) == target.size(2);
  if (!fits) {
    fail_invalid(op, {.what = "the input and the target do not belong together",
                      .got = c10::str(self.sizes(), " and ", target.sizes()),
                      .expected = "[N, C, H, W] and [N, H, W]"});
  }
  return {self.permute({0, 2, 3, 1}).reshape({-1, self.size(1)}), target.reshape({-1})};
}

at::Tensor in_planes(const at::Tensor& each, std::int64_t reduction, const at::Tensor& target) {
  return reduction == at::Reduction::None ? each.reshape(target.sizes()) : each;
}

// (self, target, weight, reduction, ignored class)
void run(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const std::vector<c10::IValue> args = torch::jit::pop(*stack, 5);
  const at::Tensor self = args[0].toTensor(), target = args[1].toTensor();
  const Pixels pixels = pixels_of("aten::nll_loss2d", self, target);
  const std::int64_t reduction = args[3].toInt();
  const at::Tensor loss =
      at::nll_loss(pixels.self, pixels.target, args[2].toOptional<at::Tensor>(), reduction, args[4].toInt());
  stack->emplace_back(in_planes(loss, reduction, target));
}

// The same below autograd, for those who call it: (loss, total weight).
void run_forward(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const std::vector<c10::IValue> args = torch::jit::pop(*stack, 5);
  const at::Tensor self = args[0].toTensor(), target = args[1].toTensor();
  const Pixels pixels = pixels_of("aten::nll_loss2d_forward", self, target);
  const std::int64_t reduction = args[3].toInt();
  const auto [loss, total] =
      at::nll_loss_forward(pixels.self, pixels.target, args[2].toOptional<at::Tensor>(), reduction, args[4].toInt());
  stack->emplace_back(in_planes(loss, reduction, target));
  stack->emplace_back(total);
}

// (gradient, self, target, weight, reduction, ignored class, total weight)
void run_backward(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const std::vector<c10::IValue> args = torch::jit::pop(*stack, 7);
  const at::Tensor self = args[1].toTensor();
  const Pixels pixels = pixels_of("aten::nll_loss2d_backward", self, args[2].toTensor());
  const std::int64_t reduction = args[4].toInt();
  const at::Tensor grad = reduction == at::Reduction::None ? args[0].toTensor().reshape({-1}) : args[0].toTensor();
  const at::Tensor result = at::nll_loss_backward(grad, pixels.self, pixels.target, args[3].toOptional<at::Tensor>(),
                                                  reduction, args[5].toInt(), args[6].toTensor());
  stack->emplace_back(
      result.reshape({self.size(0), self.size(2), self.size(3), self.size(1)}).permute({0, 3, 1, 2}).contiguous());
}

}  // namespace

bool has_nll_loss2d_kernel(const c10::OperatorName& name) {
  return name.overload_name.empty() &&
         (name.name == "aten::nll_loss2d_forward" || name.name == "aten::nll_loss2d_backward");
}

void register_nll_loss2d() {
  using torch::CppFunction;
  // With autograd above, and without it (inference mode).
  for (const auto key : {c10::DispatchKey::AutogradPrivateUse3, kDTensorKey}) {
    auto* library = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    library->impl("nll_loss2d", CppFunction::makeFromBoxedFunction<&run>());
    if (key != kDTensorKey) continue;
    library->impl("nll_loss2d_forward", CppFunction::makeFromBoxedFunction<&run_forward>());
    library->impl("nll_loss2d_backward", CppFunction::makeFromBoxedFunction<&run_backward>());
  }
}

}  // namespace dtensor
