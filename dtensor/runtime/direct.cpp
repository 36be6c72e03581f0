// The operators that are called most, without boxing: where a call of the kind was decided before, and the operator
// runs on the parts as they lie, it is called on them directly. All else goes the general way.
#include <ATen/core/IListRef.h>
#include <ATen/core/boxing/impl/boxing.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_log_softmax_backward_data_ops.h>
#include <ATen/ops/_log_softmax_ops.h>
#include <ATen/ops/_softmax_backward_data_ops.h>
#include <ATen/ops/_softmax_ops.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addcdiv_ops.h>
#include <ATen/ops/addcmul_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/cat_ops.h>
#include <ATen/ops/clone_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/gelu_backward_ops.h>
#include <ATen/ops/gelu_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <ATen/ops/relu_ops.h>
#include <ATen/ops/silu_ops.h>
#include <ATen/ops/sqrt_ops.h>
#include <ATen/ops/sub_ops.h>
#include <ATen/ops/sum_ops.h>
#include <ATen/ops/t_ops.h>
#include <ATen/ops/threshold_backward_ops.h>
#include <ATen/ops/transpose_ops.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <type_traits>

#include "dtensor/runtime/backward.h"
#include "dtensor/runtime/decisions_impl.h"
#include "dtensor/runtime/provenance.h"
#include "dtensor/runtime/register.h"

namespace dtensor {
namespace {

struct Operator {
  Operator(const char* name, const char* overload)
      : handle(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload)), info(handle) {}
  c10::OperatorHandle handle;
  OpInfo info;
};

using List = at::MaterializedITensorListRef;
using MaybeTensor = c10::optional<at::Tensor>;

bool is_there(const MaybeTensor& tensor) { return tensor && tensor->defined(); }

// ---- what is asked of each argument, by its type

// A tensor that this way can take: not one that has to be gathered first, and no copy that stands for a view.
struct Usable {
  const OpInfo& info;
  Payload* first = nullptr;

  bool operator()(const at::Tensor& tensor) {
    if (!has_payload(tensor)) return false;
    Payload& payload = payload_of(tensor);
    if (!first) first = &payload;
    if (payload.mesh != first->mesh && payload.mesh->context() != first->mesh->context()) return false;
    if (payload.unit || payload.lost_alias || payload.expanded) return false;
    if (info.accumulates && payload.unreduced()) return false;
    return !info.returns_alias || !payload.traits || !payload.traits->style;
  }
  bool operator()(const MaybeTensor& tensor) { return !is_there(tensor) || (*this)(*tensor); }
  bool operator()(const List& list) {
    return std::all_of(list.begin(), list.end(), [this](const at::Tensor& tensor) { return (*this)(tensor); });
  }
  template <class Static>
  bool operator()(const Static&) {
    return true;
  }
};

struct AddOperands {
  CallKey& key;

  void operator()(std::size_t arg, const at::Tensor& tensor) { key.add_operand(arg, 0, payload_of(tensor)); }
  void operator()(std::size_t arg, const MaybeTensor& tensor) {
    if (is_there(tensor)) (*this)(arg, *tensor);
  }
  void operator()(std::size_t arg, const List& list) {
    std::size_t item = 0;
    for (const at::Tensor& tensor : list) key.add_operand(arg, item++, payload_of(tensor));
  }
  template <class Static>
  void operator()(std::size_t, const Static&) {}
};

struct AddStatics {
  CallKey& key;
  const OpInfo& info;

  void operator()(std::size_t, const at::Tensor&) {}
  void operator()(std::size_t, const MaybeTensor&) {}
  void operator()(std::size_t, const List&) {}
  void operator()(std::size_t arg, at::IntArrayRef ints) { key.add_static(info.args[arg].key, ints); }
  void operator()(std::size_t arg, const at::OptionalIntArrayRef& ints) {
    if (ints) return (*this)(arg, *ints);
    key.add_static(info.args[arg].key, c10::IValue());
  }
  template <class Static>
  void operator()(std::size_t arg, const Static& value) {
    key.add_static(info.args[arg].key, c10::IValue(value));
  }
};

struct Boxed {
  c10::IValue operator()(const List& list) {
    c10::List<at::Tensor> copies;
    copies.reserve(list.size());
    for (const at::Tensor& tensor : list) copies.push_back(tensor);
    return copies;
  }
  c10::IValue operator()(const at::OptionalIntArrayRef& ints) { return ints ? c10::IValue(*ints) : c10::IValue(); }
  template <class Value>
  c10::IValue operator()(const Value& value) {
    return c10::IValue(value);
  }
};

// Operands in their order, then numbers that are not in the key.
struct AddProvenance {
  CallProvenance& made;
  const OpInfo& info;

  void operator()(std::size_t arg, const at::Tensor& tensor) {
    if (arg != 0 || info.reads_self) made.add_operand(payload_of(tensor).provenance);
  }
  void operator()(std::size_t arg, const MaybeTensor& tensor) {
    if (is_there(tensor)) (*this)(arg, *tensor);
  }
  void operator()(std::size_t, const List& list) {
    for (const at::Tensor& tensor : list) made.add_operand(payload_of(tensor).provenance);
  }
  template <class Static>
  void operator()(std::size_t, const Static&) {}
};

struct AddNumbers {
  CallProvenance& made;
  const OpInfo& info;

  void operator()(std::size_t arg, const c10::Scalar& value) {
    const KeyUse use = info.args[arg].key;
    const bool whole = value.isIntegral(/*includeBool=*/true);
    if (use == KeyUse::kValue || (use == KeyUse::kPlain && whole)) return;
    made.add_number(number_word(value), whole ? value.toLong() == 1 : value.isFloatingPoint() && value.toDouble() == 1);
  }
  void operator()(std::size_t arg, double value) {
    if (info.args[arg].key != KeyUse::kValue) made.add_number(number_word(value), value == 1);
  }
  void operator()(std::size_t arg, std::int64_t value) { add_whole(arg, value); }
  void operator()(std::size_t arg, bool value) { add_whole(arg, value ? 1 : 0); }
  template <class Other>
  void operator()(std::size_t arg, const Other& value) {
    if constexpr (std::is_same_v<Other, at::Tensor> || std::is_same_v<Other, MaybeTensor> ||
                  std::is_same_v<Other, List>) {
      return;
    } else {
      const KeyUse use = info.args[arg].key;
      if (info.args[arg].kind != OpInfo::ArgKind::kOther || use == KeyUse::kValue || use == KeyUse::kPlain) return;
      made.add_number(number_word(Boxed{}(value)), false);
    }
  }

 private:
  void add_whole(std::size_t arg, std::int64_t value) {
    const KeyUse use = info.args[arg].key;
    if (use != KeyUse::kValue && use != KeyUse::kPlain) made.add_number(number_word(value), value == 1);
  }
};

struct BringGradientsHome {
  void operator()(const at::Tensor& tensor) { bring_gradient_home(tensor, payload_of(tensor)); }
  void operator()(const MaybeTensor& tensor) {
    if (is_there(tensor)) (*this)(*tensor);
  }
  void operator()(const List& list) {
    for (const at::Tensor& tensor : list) (*this)(tensor);
  }
  template <class Static>
  void operator()(const Static&) {}
};

// What the operator gets in place of the argument.
struct Local {
  const Prepared& prepared;

  // Written in place, it is this part that is written.
  at::Tensor& operator()(std::size_t, const at::Tensor& tensor) {
    return const_cast<at::Tensor&>(payload_of(tensor).local());
  }
  MaybeTensor operator()(std::size_t, const MaybeTensor& tensor) {
    return is_there(tensor) ? MaybeTensor(payload_of(*tensor).local()) : tensor;
  }
  List operator()(std::size_t, const List& list) {
    List locals;
    locals.reserve(list.size());
    for (const at::Tensor& tensor : list) locals.emplace_back(payload_of(tensor).local());
    return locals;
  }
  at::IntArrayRef operator()(std::size_t arg, at::IntArrayRef ints) {
    if (prepared.rewrites.empty() || prepared.rewrites[0].first != arg) return ints;
    return {prepared.sizes.data(), prepared.sizes.size()};
  }
  template <class Static>
  const Static& operator()(std::size_t, const Static& value) {
    return value;
  }
};

// ---- the kernel

// Lists are looked up once.
template <class Value>
Value& shown(Value& value) {
  return value;
}
inline List shown(const at::ITensorListRef& list) { return list.materialize(); }

// As the operator's signature has it.
template <class Value>
const Value& as_argument(const Value& value) {
  return value;
}
inline at::Tensor& as_argument(at::Tensor& value) { return value; }

template <class Op, class Schema = typename Op::schema>
struct Direct;

template <class Op, class Result, class... Args>
struct Direct<Op, Result(Args...)> {
  static constexpr bool kInPlace = std::is_reference_v<Result>;

  static const Operator& self() {
    static const auto* op = new Operator(Op::name, Op::overload_name);
    return *op;
  }

  static Result call(Args... args) { return run(std::index_sequence_for<Args...>(), shown(args)...); }

 private:
  template <std::size_t... I, class... Shown>
  static Result run(std::index_sequence<I...>, Shown&&... args) {
    const OpInfo& info = self().info;
    Usable usable{info};
    if ((usable(args) && ...) && usable.first) {
      CallKey key(info, usable.first->mesh->rank());
      (AddOperands{key}(I, args), ...);
      (AddStatics{key, info}(I, args), ...);
      const std::shared_ptr<const Prepared> prepared = Decisions::of_this_thread().find(key.hash(), key.words());
      if (prepared && prepared->as_it_lies && check_level() != CheckLevel::kValues) {
        Decisions::of_this_thread().count_found();
        const c10::impl::ExcludeDispatchKeyGuard below(kAboveUs);
        if (at::GradMode::is_enabled()) (BringGradientsHome{}(args), ...);
        CallProvenance made(info, prepared->identity);
        (AddProvenance{made, info}(I, args), ...);
        (AddNumbers{made, info}(I, args), ...);
        const Provenance provenance = made.result();
        note_made(*usable.first->mesh, provenance.made, info.name, made.operand(0), made.operand(1));
        Local local{*prepared};
        // In order, as braces are and arguments are not: what is reduced now is reduced with ranks of the general way.
        const std::tuple<decltype(local(I, args))...> locals{local(I, args)...};
        if constexpr (kInPlace) {
          WatchedMemory::before_write(std::get<0>(locals));
          Op::call(as_argument(std::get<I>(locals))...);
          const at::Tensor& self = first(args...);
          note_written(self, payload_of(self), provenance);
          return first(args...);
        } else {
          return wrapped(Op::call(as_argument(std::get<I>(locals))...), *prepared, provenance, *usable.first, args...);
        }
      }
    }
    torch::jit::Stack stack;
    stack.reserve(sizeof...(Args));
    (stack.push_back(Boxed{}(args)), ...);
    run_boxed(info, self().handle, &stack);
    if constexpr (kInPlace) {
      return first(args...);
    } else {
      return c10::impl::PopResult<Result>::call(stack);
    }
  }

  template <class First, class... Rest>
  static First& first(First& argument, Rest&...) {
    return argument;
  }

  template <class First, class... Rest>
  static at::Tensor wrapped(at::Tensor result, const Prepared& prepared, const Provenance& provenance,
                            const Payload& of, const First& base, const Rest&...) {
    const Spec& spec = *prepared.decision.outputs[0];
    if constexpr (std::is_same_v<First, at::Tensor>) {
      if (self().info.returns_alias) {
        const std::int64_t within = prepared.offsets.empty() ? 0 : prepared.offsets[0];
        return wrap(std::move(result), spec, of.mesh,
                    {.base = &base, .provenance = provenance, .offset = base.storage_offset() + within});
      }
    }
    return wrap(in_order(std::move(result), prepared, 0), spec, of.mesh, {.provenance = provenance});
  }
  template <class... Results, class... Rest>
  static std::tuple<Results...> wrapped(std::tuple<Results...> results, const Prepared& prepared,
                                        const Provenance& provenance, const Payload& of, const Rest&...) {
    std::size_t output = 0;
    const auto one = [&](at::Tensor& result) {
      const std::optional<Spec>& spec = prepared.decision.outputs[output];
      if (spec) {
        result = wrap(in_order(std::move(result), prepared, output), *spec, of.mesh,
                      {.provenance = of_output(provenance, output)});
      }
      ++output;
    };
    std::apply([&](Results&... result) { (one(result), ...); }, results);
    return results;
  }
};

// Their sizes come as ints: symbolic ones are never distributed.
struct View {
  using schema = at::Tensor(const at::Tensor&, at::IntArrayRef);
  static constexpr const char* name = "aten::view";
  static constexpr const char* overload_name = "";
  static at::Tensor call(const at::Tensor& tensor, at::IntArrayRef sizes) { return tensor.view(sizes); }
};
struct UnsafeView {
  using schema = at::Tensor(const at::Tensor&, at::IntArrayRef);
  static constexpr const char* name = "aten::_unsafe_view";
  static constexpr const char* overload_name = "";
  static at::Tensor call(const at::Tensor& tensor, at::IntArrayRef sizes) { return at::_unsafe_view(tensor, sizes); }
};
struct Expand {
  using schema = at::Tensor(const at::Tensor&, at::IntArrayRef, bool);
  static constexpr const char* name = "aten::expand";
  static constexpr const char* overload_name = "";
  static at::Tensor call(const at::Tensor& tensor, at::IntArrayRef sizes, bool implicit) {
    return tensor.expand(sizes, implicit);
  }
};
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
struct LayerNorm {
  using schema = Three(const at::Tensor&, at::IntArrayRef, const MaybeTensor&, const MaybeTensor&, double);
  static constexpr const char* name = "aten::native_layer_norm";
  static constexpr const char* overload_name = "";
  static Three call(const at::Tensor& x, at::IntArrayRef shape, const MaybeTensor& weight, const MaybeTensor& bias,
                    double eps) {
    return at::native_layer_norm(x, shape, weight, bias, eps);
  }
};
struct LayerNormBackward {
  using schema = Three(const at::Tensor&, const at::Tensor&, at::IntArrayRef, const at::Tensor&, const at::Tensor&,
                       const MaybeTensor&, const MaybeTensor&, std::array<bool, 3>);
  static constexpr const char* name = "aten::native_layer_norm_backward";
  static constexpr const char* overload_name = "";
  static Three call(const at::Tensor& gradient, const at::Tensor& x, at::IntArrayRef shape, const at::Tensor& mean,
                    const at::Tensor& rstd, const MaybeTensor& weight, const MaybeTensor& bias,
                    std::array<bool, 3> mask) {
    return at::native_layer_norm_backward(gradient, x, shape, mean, rstd, weight, bias, mask);
  }
};

struct Kernel {
  const Operator& (*op)();
  torch::CppFunction (*make)();
};
template <class Op>
Kernel kernel() {
  return {&Direct<Op>::self, [] { return torch::CppFunction(TORCH_FN((Direct<Op>::call))); }};
}

const std::vector<Kernel>& kernels() {
  namespace ops = at::_ops;
  static const auto* all = new std::vector<Kernel>{
      kernel<ops::_log_softmax>(),
      kernel<ops::_log_softmax_backward_data>(),
      kernel<ops::_softmax>(),
      kernel<ops::_softmax_backward_data>(),
      kernel<ops::add_Tensor>(),
      kernel<ops::add__Tensor>(),
      kernel<ops::add__Scalar>(),
      kernel<ops::addcdiv_>(),
      kernel<ops::addcmul_>(),
      kernel<ops::addmm>(),
      kernel<ops::bmm>(),
      kernel<ops::cat>(),
      kernel<ops::clone>(),
      kernel<ops::div_Tensor>(),
      kernel<ops::div_Scalar>(),
      kernel<ops::gelu>(),
      kernel<ops::gelu_backward>(),
      kernel<ops::mm>(),
      kernel<ops::mul_Tensor>(),
      kernel<ops::mul_Scalar>(),
      kernel<ops::mul__Tensor>(),
      kernel<ops::mul__Scalar>(),
      kernel<ops::relu>(),
      kernel<ops::silu>(),
      kernel<ops::sqrt>(),
      kernel<ops::sub_Tensor>(),
      kernel<ops::sum>(),
      kernel<ops::sum_dim_IntList>(),
      kernel<ops::t>(),
      kernel<ops::transpose_int>(),
      kernel<ops::threshold_backward>(),
      kernel<Expand>(),
      kernel<LayerNorm>(),
      kernel<LayerNormBackward>(),
      kernel<UnsafeView>(),
      kernel<View>(),
  };
  return *all;
}

}  // namespace

void register_direct() {
  auto* library = new torch::Library(torch::Library::IMPL, "aten", kDTensorKey, __FILE__, __LINE__);
  for (const Kernel& kernel : kernels()) library->impl(kernel.op().info.name.substr(6).c_str(), kernel.make());
}

bool has_direct_kernel(const c10::OperatorName& name) {
  const auto is = [&](const Kernel& kernel) { return kernel.op().handle.operator_name() == name; };
  return std::any_of(kernels().begin(), kernels().end(), is);
}

}  // namespace dtensor
