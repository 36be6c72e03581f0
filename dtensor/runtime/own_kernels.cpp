// Operators that have a kernel of their own below autograd, because no row can say what they do.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_pack_padded_sequence.h>
#include <ATen/ops/diag_embed.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>
#include <torch/version.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>

#include "dtensor/core/error.h"
#include "dtensor/core/text.h"
#include "dtensor/runtime/dispatch_impl.h"
#include "dtensor/runtime/identity.h"
#include "dtensor/runtime/lists_impl.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/record.h"
#include "dtensor/runtime/redistribute.h"
#include "dtensor/runtime/register.h"
#include "dtensor/runtime/tensor.h"

namespace dtensor {
namespace {

using Tensors = std::vector<at::Tensor>;

const std::string kComputedOnce = "its bits may differ between ranks: all take those of the first";
const std::string kReadsValues = "its values are read: the tensor is brought together";
const std::string kMeansMemory = "it means memory: the tensor is brought together";

// `out` forms of what has a kernel of its own, or gives a list: the plain form, copied into what was given.

struct OutForm {
  const char* name;
  const char* plain;  // its overload
};
constexpr OutForm kOutForms[] = {
    {"aten::as_strided_copy.out", ""},
    {"aten::as_strided_scatter.out", ""},
    {"aten::diag.out", ""},
    {"aten::nll_loss2d_backward.grad_input", ""},
    {"aten::nll_loss2d_forward.output", ""},
    {"aten::split_copy.Tensor_out", "Tensor"},
    {"aten::split_with_sizes_copy.out", ""},
    {"aten::unbind_copy.int_out", "int"},
};

const OutForm* find_out_form(const std::string& name) {
  const auto at =
      std::find_if(std::begin(kOutForms), std::end(kOutForms), [&](const OutForm& form) { return name == form.name; });
  return at == std::end(kOutForms) ? nullptr : at;
}

Tensors tensors_in(const std::vector<c10::IValue>& values) {
  Tensors result;
  for (const c10::IValue& value : values) {
    const Tensors some = value.isTensorList() ? value.toTensorVector() : Tensors{value.toTensor()};
    result.insert(result.end(), some.begin(), some.end());
  }
  return result;
}

void run_out(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const std::string name = schema.name() + "." + schema.overload_name();
  const auto is_out = [](const c10::Argument& argument) { return argument.is_out(); };
  const auto count =
      static_cast<std::size_t>(std::count_if(schema.arguments().begin(), schema.arguments().end(), is_out));
  const std::vector<c10::IValue> given = torch::jit::pop(*stack, count);
  const auto plain = c10::Dispatcher::singleton().findSchemaOrThrow(schema.name().c_str(), find_out_form(name)->plain);
  plain.callBoxed(stack);
  const Tensors results = tensors_in(torch::jit::pop(*stack, plain.schema().returns().size()));
  const Tensors outs = tensors_in(given);
  bool fits = outs.size() == results.size();
  for (std::size_t i = 0; i < outs.size(); ++i) fits = fits && outs[i].sizes() == results[i].sizes();
  if (!fits) {
    const auto text = [](const Tensors& tensors) {
      return join(tensors, ", ", [](const at::Tensor& tensor) { return meta_of(tensor).to_string(); });
    };
    fail_invalid(name, {.what = "the tensors given for the results are not of their number and shapes",
                        .got = text(outs),
                        .expected = text(results)});
  }
  for (std::size_t i = 0; i < outs.size(); ++i) outs[i].copy_(results[i]);
  for (std::size_t r = 0; r < schema.returns().size(); ++r) stack->push_back(given[r]);
}

// (self, device)
void run_is_pinned(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  c10::IValue& self = (*stack)[stack->size() - op.schema().arguments().size()];
  if (const at::Tensor local = payload_of(self.toTensor()).local(); local.defined()) {
    self = local;
    return op.callBoxed(stack);
  }
  torch::jit::drop(*stack, op.schema().arguments().size());
  stack->emplace_back(false);
}

// Means memory: what is read or written is whole, and lies as it shows.
at::Tensor whole_copy(const at::Tensor& self, const std::string& op) {
  const Spec& spec = payload_of(self).spec;
  check_no_gaps(spec, op);
  const Placements whole(static_cast<std::size_t>(spec.mesh().ndim()), Replicate());
  return redistribute_now(self, Spec::make(spec.meta(), spec.mesh(), whole), payload_of(self).mesh, {}).clone();
}
at::Tensor strided(const at::Tensor& copy, const at::Tensor& self, const c10::IValue* args) {
  const std::int64_t offset = args[2].isInt() ? args[2].toInt() - self.storage_offset() : 0;
  return copy.as_strided(args[0].toIntVector(), args[1].toIntVector(), offset);
}

// (self, size, stride, offset)
void run_as_strided_copy(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const std::vector<c10::IValue> args = torch::jit::pop(*stack, 4);
  const CommCause cause(op.schema().name(), kMeansMemory);
  const at::Tensor self = args[0].toTensor();
  stack->emplace_back(
      strided(whole_copy(self, op.schema().name()), self, &args[1]).clone(at::MemoryFormat::Contiguous));
}

// (self, src, size, stride, offset)
void run_as_strided_scatter(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const std::vector<c10::IValue> args = torch::jit::pop(*stack, 5);
  const CommCause cause(op.schema().name(), kMeansMemory);
  const at::Tensor self = args[0].toTensor(), result = whole_copy(self, op.schema().name());
  strided(result, self, &args[2]).copy_(args[1].toTensor());
  stack->emplace_back(result);
}

// (self, diagonal); libtorch 1.13 makes it of a plain tensor.
void run_diag(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const std::int64_t diagonal = torch::jit::pop(*stack).toInt();
  const at::Tensor self = torch::jit::pop(*stack).toTensor();
  stack->emplace_back(self.dim() == 1 ? at::diag_embed(self, diagonal) : self.diagonal(diagonal).clone());
}

// (input, lengths, batch first): how many sequences go on at each step is read by those who use it, so it stays plain.
void run_pack(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const bool batch_first = torch::jit::pop(*stack).toBool();
  const at::Tensor lengths = torch::jit::pop(*stack).toTensor(), input = torch::jit::pop(*stack).toTensor();
  const CommCause cause(op.schema().name(), kReadsValues);
  const auto read = [](const at::Tensor& tensor) {
    return has_payload(tensor) ? DTensor(tensor).full_tensor() : tensor;
  };
  const std::shared_ptr<const DeviceMesh> mesh = payload_of(has_payload(input) ? input : lengths).mesh;
  auto [data, steps] = at::_pack_padded_sequence(read(input), read(lengths), batch_first);
  stack->emplace_back(as_replica(data, mesh));
  stack->emplace_back(steps);
}

// A result that ranks computed for themselves: all take the first one's.
at::Tensor from_first(const at::Tensor& result, const std::shared_ptr<const DeviceMesh>& mesh) {
  const Dims at = *mesh->coordinate();
  if (result.numel() == 0 || mesh->size() == 1) return as_replica(result, mesh);
  at::Tensor part = result;
  if (std::any_of(at.begin(), at.end(), [](std::int64_t index) { return index != 0; })) {
    part = at::empty_like(result);
    fill_identity(part, ReduceOp::kSum);
  }
  const auto spec = [&](const Placement& placement) {
    return Spec::make(meta_of(result), *mesh, Placements(static_cast<std::size_t>(mesh->ndim()), placement));
  };
  return redistribute_now(wrap(part, spec(Partial()), mesh), spec(Replicate()), mesh, {});
}

// (self, other, rcond, driver): the bits of the answer depend on where in memory the operands are.
void run_lstsq(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  std::shared_ptr<const DeviceMesh> mesh;
  const CommCause cause(op.schema().name(), kComputedOnce);
  const std::size_t first = stack->size() - op.schema().arguments().size();
  for (std::size_t i : {first, first + 1}) {
    const at::Tensor tensor = (*stack)[i].toTensor();
    if (!has_payload(tensor)) continue;
    mesh = payload_of(tensor).mesh;
    (*stack)[i] = DTensor(tensor).full_tensor();
  }
  if (!mesh->contains_me()) {
    fail_unsupported(op.schema().name(), {.what = "this rank is not in the tensor's mesh, and has no value of it",
                                          .got = "rank " + std::to_string(mesh->rank()) + " and " + mesh->to_string()});
  }
  op.callBoxed(stack);
  for (std::size_t r = 0; r < op.schema().returns().size(); ++r) {
    c10::IValue& value = (*stack)[stack->size() - op.schema().returns().size() + r];
    value = from_first(value.toTensor(), mesh);
  }
}

// libtorch 1.13 has paths for channels_last that do not look at the scales, and takes what has one channel for it.
constexpr bool kNearestForgetsScales = TORCH_VERSION_MAJOR < 2;

// The channels of a tensor whose shards may have one, and so another order of memory than the whole, are put together.
at::Tensor with_all_channels(const at::Tensor& self) {
  const Spec& spec = payload_of(self).spec;
  DimLayouts dims = spec.dims();
  if (dims.size() < 2 || spec.meta().shape()[1] == 1) return self;
  dims[1] = {Factor{spec.meta().shape()[1], {}}};
  if (dims == spec.dims()) return self;
  const Spec to = expect_spec(Spec::from_dims(spec.meta(), spec.mesh(), dims, spec.partials()), "upsample");
  return redistribute_now(self, to, payload_of(self).mesh, {});
}

// (self, …, scales)
void run_nearest(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  static std::mutex mutex;
  static auto* known = new std::map<const c10::FunctionSchema*, std::unique_ptr<OpInfo>>();
  const OpInfo* info = nullptr;
  {
    const std::lock_guard lock(mutex);
    auto& entry = (*known)[&op.schema()];
    if (!entry) entry = std::make_unique<OpInfo>(op);
    info = entry.get();
  }
  const c10::IValue& last = stack->back();
  c10::IValue& self = (*stack)[stack->size() - op.schema().arguments().size()];
  static const std::string* reason = new std::string("shards of one channel would be scaled otherwise");
  const CommCause cause(info->name, *reason);
  if (!last.isNone() && has_payload(self.toTensor())) self = with_all_channels(self.toTensor());
  run_boxed(*info, op, stack);
}

bool is_nearest(const std::string& base) {
  return base.rfind("aten::upsample_nearest", 0) == 0 || base.rfind("aten::_upsample_nearest_exact", 0) == 0;
}

using Kernel = void (*)(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack*);

Kernel kernel_of(const c10::OperatorName& name) {
  const std::string& base = name.name;
  const bool fused = base.rfind("aten::_fused_ad", 0) == 0 || base.rfind("aten::_fused_sgd", 0) == 0;
  const bool unscale = base.rfind("aten::_amp_foreach_non_finite_check_and_unscale", 0) == 0;
  if (fused && base.back() == '_') return run_optimizer;
  if (unscale && base.back() == '_') return run_unscale;
  // Lists of tensors, one call for each.
  if (fused || unscale || base.rfind("aten::_foreach_", 0) == 0) return run_made_of_others;
  // libtorch 1.13 makes them of the others below autograd, later ones above.
  if (base.rfind("aten::upsample_", 0) == 0 && name.overload_name.rfind("vec", 0) == 0) return run_made_of_others;
  if (!name.overload_name.empty()) return find_out_form(base + "." + name.overload_name) ? run_out : nullptr;
  if (kNearestForgetsScales && is_nearest(base)) return run_nearest;
  if (base == "aten::allclose" || base == "aten::is_same_size") return run_made_of_others;
  if (base == "aten::as_strided_copy") return run_as_strided_copy;
  if (base == "aten::as_strided_scatter") return run_as_strided_scatter;
  if (base == "aten::diag") return run_diag;
  if (base == "aten::_pack_padded_sequence") return run_pack;
  if (base == "aten::linalg_lstsq") return run_lstsq;
  return base == "aten::is_pinned" ? run_is_pinned : nullptr;
}

class OwnKernel final : public c10::OperatorKernel {
 public:
  explicit OwnKernel(Kernel run) : run_(run) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    run_(op, keys, stack);
  }

 private:
  const Kernel run_;
};

}  // namespace

void run_made_of_others(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

bool has_own_kernel(const c10::OperatorName& name) { return kernel_of(name) || has_nll_loss2d_kernel(name); }

void register_own_kernels() {
  auto* library = new torch::Library(torch::Library::IMPL, "aten", kDTensorKey, __FILE__, __LINE__);
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const Kernel kernel = kernel_of(name);
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!kernel || !op || op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) continue;
    const std::string text = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(text.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<OwnKernel>(kernel)));
  }
}

}  // namespace dtensor
