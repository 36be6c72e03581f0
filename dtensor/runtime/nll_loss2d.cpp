// aten::nll_loss2d, of pixels: that of a list of them. Its own kernels know classes only as the second dim.
#include <ATen/core/Reduction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/nll_loss.h>
#include <torch/library.h>

#include "dtensor/core/error.h"
#include "dtensor/runtime/payload.h"
#include "dtensor/runtime/register.h"

namespace dtensor {
namespace {

at::Tensor nll_loss2d(const at::Tensor& self, const at::Tensor& target, const c10::optional<at::Tensor>& weight,
                      std::int64_t reduction, std::int64_t ignore_index) {
  const bool fits = self.dim() == 4 && target.dim() == 3 && self.size(0) == target.size(0) &&
                    self.size(2) == target.size(1) && self.size(3) == target.size(2);
  if (!fits) {
    fail_invalid("aten::nll_loss2d", {.what = "the input and the target do not belong together",
                                      .got = c10::str(self.sizes(), " and ", target.sizes()),
                                      .expected = "[N, C, H, W] and [N, H, W]"});
  }
  const at::Tensor pixels = self.permute({0, 2, 3, 1}).reshape({-1, self.size(1)});
  const at::Tensor loss = at::nll_loss(pixels, target.reshape({-1}), weight, reduction, ignore_index);
  return reduction == at::Reduction::None ? loss.reshape(target.sizes()) : loss;
}

void kernel(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const std::vector<c10::IValue> args = torch::jit::pop(*stack, 5);
  stack->emplace_back(nll_loss2d(args[0].toTensor(), args[1].toTensor(), args[2].toOptional<at::Tensor>(),
                                 args[3].toInt(), args[4].toInt()));
}

}  // namespace

void register_nll_loss2d() {
  // With autograd above, and without it (inference mode).
  for (const auto key : {c10::DispatchKey::AutogradPrivateUse3, kDTensorKey}) {
    auto* library = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    library->impl("nll_loss2d", torch::CppFunction::makeFromBoxedFunction<&kernel>());
  }
}

}  // namespace dtensor
