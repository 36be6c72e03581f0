// aten::reshape: a view where the layout allows one, else the tensor is redistributed first. libtorch's own is made of
// `view`, which must not move anything.
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_unsafe_view.h>
#include <torch/library.h>

#include <unordered_map>

#include "dtensor/core/error.h"
#include "dtensor/core/hash.h"
#include "dtensor/core/propagate.h"
#include "dtensor/core/view.h"
#include "dtensor/runtime/backward.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/redistribute.h"
#include "dtensor/runtime/register.h"

namespace dtensor {
namespace {

// Where the tensor must lie for this shape to be a view of it; chosen as for any operator.
Spec viewable(const Spec& spec, const Dims& shape) {
  const auto rule = find_rule("aten::_unsafe_view");
  const OpCall call{"aten::_unsafe_view",
                    {spec},
                    {ArgRef::tensors(0), ArgRef::value(StaticArg::integers(shape))},
                    {TensorMeta(shape, spec.meta().dtype())}};
  const auto decision = decide(*rule->rule, call);
  if (!decision) fail_invalid("aten::reshape", {.what = decision.reason(), .got = spec.to_string()});
  return *decision->inputs[0];
}

// Does a view of this shape exist? Working it out takes microseconds, and a model asks the same again and again.
bool is_view(const Spec& spec, const Dims& shape) {
  struct Question {
    Spec spec;
    Dims shape;
    bool operator==(const Question& other) const { return shape == other.shape && spec == other.spec; }
  };
  struct Hash {
    std::size_t operator()(const Question& question) const {
      Hasher hasher;
      hasher.add(question.spec.hash());
      hasher.add_all(question.shape);
      return hasher.value();
    }
  };
  thread_local std::unordered_map<Question, bool, Hash> answers;
  const auto [answer, is_new] = answers.try_emplace({spec, shape});
  if (is_new) answer->second = static_cast<bool>(reshape(spec, shape));
  const bool exists = answer->second;
  if (answers.size() >= 4096) answers.clear();  // a program whose shapes never come again
  return exists;
}

at::Tensor reshaped(const at::Tensor& self, at::IntArrayRef wanted) {
  const auto sizes = at::infer_size(wanted, self.numel());
  if (!at::detail::computeStride(self.sizes(), self.strides(), sizes)) {
    return at::_unsafe_view(self.clone(at::MemoryFormat::Contiguous), sizes);
  }
  Payload& payload = payload_of(self);
  const Dims shape(sizes.begin(), sizes.end());
  if (is_view(payload.spec, shape)) return self.view(sizes);
  const at::Tensor result = redistribute(self, viewable(payload.spec, shape), payload.mesh, {}).view(sizes);
  payload_of(result).lost_alias = payload.lost_alias ? payload.lost_alias : LostAlias(self, payload.local());
  return result;
}

}  // namespace

void register_reshape() {
  // With autograd above, and without it (inference mode).
  for (const auto key : {c10::DispatchKey::AutogradPrivateUse3, kDTensorKey}) {
    auto* library = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    library->impl("reshape", TORCH_FN(reshaped));
  }
}

}  // namespace dtensor
