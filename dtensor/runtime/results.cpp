// What an operator's results will be as a whole: asked of libtorch's meta kernels, else known here, else tried out.
#include <ATen/WrapDimUtils.h>
#include <ATen/core/List.h>
#include <ATen/native/TypeProperties.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/neg.h>
#include <torch/version.h>

#include <algorithm>
#include <functional>
#include <map>
#include <string_view>

#include "dtensor/runtime/dispatch_impl.h"
#include "dtensor/runtime/meta.h"

namespace dtensor {
namespace {

at::Tensor meta_tensor(const TensorMeta& meta) {
  return at::empty_strided({meta.shape().data(), meta.shape().size()}, {meta.stride().data(), meta.stride().size()},
                           c10::TensorOptions().dtype(scalar_type_of(meta.dtype())).device(c10::DeviceType::Meta));
}

// How large the result of looking up by a mask is, only the mask's values say.
bool has_mask(const LocalCall& call) {
  return std::any_of(call.operands.begin(), call.operands.end(), [&](const Operand& operand) {
    const auto type = operand.tensor.scalar_type();
    return call.info.args[operand.arg].kind == OpInfo::ArgKind::kOptionalTensorList &&
           (type == c10::ScalarType::Bool || type == c10::ScalarType::Byte);
  });
}

// The call's arguments with other tensors for the distributed ones.
torch::jit::Stack with_tensors(const LocalCall& call, const std::function<at::Tensor(std::size_t operand)>& tensor_of,
                               bool numbers = false) {
  torch::jit::Stack stack(call.stack.end() - static_cast<std::ptrdiff_t>(call.info.args.size()), call.stack.end());
  for (std::size_t i = 0; i < call.operands.size(); ++i) {
    const Operand& operand = call.operands[i];
    if (!operand.payload && !numbers) continue;
    c10::IValue& value = stack[operand.arg];
    if (call.info.args[operand.arg].kind == OpInfo::ArgKind::kTensor) {
      value = tensor_of(i);
    } else if (value.isTensorList()) {
      auto list = value.toTensorList().copy();
      list.set(operand.item, tensor_of(i));
      value = std::move(list);
    } else {
      auto list = value.to<c10::List<c10::optional<at::Tensor>>>().copy();
      list.set(operand.item, tensor_of(i));
      value = std::move(list);
    }
  }
  return stack;
}

std::vector<std::optional<TensorMeta>> metas_on(const torch::jit::Stack& stack) {
  std::vector<std::optional<TensorMeta>> results;
  const auto add = [&](const at::Tensor& tensor) {
    if (tensor.defined()) {
      results.emplace_back(meta_of(tensor));
    } else {
      results.emplace_back();
    }
  };
  for (const c10::IValue& value : stack) {
    if (value.isTensor()) add(value.toTensor());
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) add(tensor);
    }
  }
  return results;
}

// In libtorch 1.13 that of convolutions is made of others that have none.
bool fails_without_data(const LocalCall& call) {
  return TORCH_VERSION_MAJOR < 2 && call.info.name.rfind("aten::convolution", 0) == 0;
}

// The operator itself on tensors without data.
// An operand that may be a plain number.
TensorMeta meta_at(const LocalCall& call, std::size_t i) {
  const Operand& operand = call.operands[i];
  return operand.payload ? operand.payload->spec.meta() : meta_of(operand.tensor);
}

// The call on tensors without data. Numbers come as they are: some kernels read them, as others do not take them beside
// tensors without data.
torch::jit::Stack results_without_data(const LocalCall& call, bool numbers) {
  const auto tensor_of = [&](std::size_t i) {
    at::Tensor tensor = meta_tensor(meta_at(call, i));
    if (call.operands[i].tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    return tensor;
  };
  torch::jit::Stack stack = with_tensors(call, tensor_of, numbers);
  // Results without data, too, where a device is named.
  for (c10::IValue& value : stack) {
    if (value.isDevice()) value = c10::IValue();
  }
  call.op.callBoxed(&stack);
  return stack;
}

GlobalResults from_meta_kernel(const LocalCall& call) {
  // Asked first: finding out by the exception that calling it throws takes milliseconds.
  if (has_mask(call) || fails_without_data(call) || !call.op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta))
    return std::nullopt;
  const bool has_numbers =
      std::any_of(call.operands.begin(), call.operands.end(), [](const Operand& o) { return !o.payload; });
  try {
    return metas_on(results_without_data(call, false));
  } catch (const c10::NotImplementedError&) {
    return std::nullopt;
  } catch (const c10::Error&) {
    if (!has_numbers) throw;
  }
  return metas_on(results_without_data(call, true));
}

bool is_elementwise(const OpRule& rule) {
  return !rule.dims_arg && std::all_of(rule.inputs.begin(), rule.inputs.end(), [](const TensorPattern& pattern) {
    return pattern.dims.size() == 1 && pattern.dims[0].kind == DimToken::Kind::kEllipsis;
  });
}

// A tensor of this shape that lies densely, its dims in the same order in memory.
TensorMeta in_order_of(const TensorMeta& meta, const Dims& shape, DType dtype) {
  std::vector<std::size_t> order;  // innermost first
  for (std::size_t d = shape.size(); d-- > 0;) order.push_back(d);
  const Dims& stride = meta.stride();
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return stride[a] < stride[b]; });
  Dims result(shape.size(), 1);
  std::int64_t next = 1;
  for (const std::size_t d : order) {
    result[d] = next;
    next *= std::max<std::int64_t>(shape[d], 1);
  }
  const TensorMeta by_rows(shape, dtype);
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] > 1 && result[d] != by_rows.stride()[d]) return {shape, result, dtype};
  }
  return by_rows;
}

at::Tensor small_tensor(const TensorMeta& meta, double value, c10::Device device) {
  const Dims &shape = meta.shape(), &stride = meta.stride();
  return at::empty_strided({shape.data(), shape.size()}, {stride.data(), stride.size()},
                           c10::TensorOptions().dtype(scalar_type_of(meta.dtype())).device(device))
      .fill_(value);
}

// Operands of at most `most` elements along every dim that may be cut.
std::vector<TensorMeta> shrink_operands(const LocalCall& call, const CallLetters& letters, std::int64_t most) {
  std::vector<TensorMeta> small;
  for (std::size_t i = 0; i < call.operands.size(); ++i) {
    if (!call.operands[i].payload) {
      small.emplace_back(Dims{}, DType::kF32);
      continue;
    }
    const TensorMeta& meta = call.operands[i].payload->spec.meta();
    Dims shape = meta.shape();
    for (std::size_t d = 0; d < shape.size(); ++d) {
      if (letters.operands[i][d] != kNoLetter) shape[d] = std::min(shape[d], most);
    }
    small.push_back(in_order_of(meta, shape, meta.dtype()));
  }
  return small;
}

// Calls the operator on operands of these shapes that are filled with one value.
std::vector<std::optional<TensorMeta>> call_on_small(const LocalCall& call, const std::vector<TensorMeta>& small) {
  const OpRule& rule = *call.info.rule->rule;
  // Elementwise something may be divided by them; elsewhere they may be indices.
  const double value = is_elementwise(rule) ? 1 : 0;
  torch::jit::Stack stack = with_tensors(call, [&](std::size_t operand) {
    return small_tensor(small[operand], value, call.operands[operand].tensor.device());
  });
  if (rule.scaled) {
    const std::int64_t whole = call.operands[0].payload->spec.meta().shape()[rule.scaled->dim];
    c10::IValue& arg = stack[rule.scaled->arg];
    if (arg.isInt() && whole > 0) arg = arg.toInt() * small[0].shape()[rule.scaled->dim] / whole;
  }
  call.op.callBoxed(&stack);
  return metas_on(stack);
}

// The results of the call from those of the small one: a dim that may be cut has the same size in operands and results,
// and no other depends on it.
GlobalResults enlarge_results(const LocalCall& call, const std::vector<TensorMeta>& small,
                              std::vector<std::optional<TensorMeta>> results) {
  OpCall probed = describe(call, results);
  for (std::size_t i = 0; i < probed.operands.size(); ++i) {
    if (!probed.operands[i]) continue;
    const Mesh mesh = probed.operands[i]->mesh();
    probed.operands[i] = Spec::make(small[i], mesh, Placements(static_cast<std::size_t>(mesh.ndim()), Replicate()));
  }
  const auto found = letters_of(*call.info.rule->rule, probed);
  if (!found) return {};
  std::map<std::int16_t, std::int64_t> sizes;
  for (std::size_t i = 0; i < call.operands.size(); ++i) {
    for (std::size_t d = 0; d < found->operands[i].size() && call.operands[i].payload; ++d) {
      std::int64_t& size = sizes[found->operands[i][d]];
      size = std::max(size, call.operands[i].payload->spec.meta().shape()[d]);
    }
  }
  for (std::size_t k = 0; k < results.size(); ++k) {
    if (!results[k]) continue;
    Dims shape = results[k]->shape();
    for (std::size_t d = 0; d < shape.size(); ++d) {
      if (found->results[k][d] != kNoLetter) shape[d] = sizes.at(found->results[k][d]);
    }
    results[k] = in_order_of(*results[k], shape, results[k]->dtype());
  }
  return results;
}

// The operator itself on small operands, where this libtorch has no meta kernel. Two elements along each dim show the
// memory order of the results. One element is tried where two do not fit to a dim that must stay whole: it broadcasts.
GlobalResults from_probe(const LocalCall& call) {
  const OpInfo& info = call.info;
  if (!info.rule || info.rule->rule->kind != RuleKind::kFactors || info.takes_generator) return {};
  if (info.in_place || info.out) return {};
  const OpRule& rule = *info.rule->rule;
  const auto letters = letters_of(rule, describe(call, std::vector<std::optional<TensorMeta>>(rule.outputs.size())));
  if (!letters) return {};
  for (const std::int64_t most : {2, 1}) {
    const std::vector<TensorMeta> small = shrink_operands(call, *letters, most);
    std::vector<std::optional<TensorMeta>> results;
    try {
      results = call_on_small(call, small);
    } catch (const c10::Error&) {
      continue;  // that will not do: a matrix to be inverted, or sizes that do not fit
    }
    return enlarge_results(call, small, std::move(results));
  }
  return {};
}

// Operators without a meta kernel in some libtorch (1.13 has none for relu), by what their results look like.
enum class Look : std::uint8_t {
  kLike0,              // the first operand
  kJoined,             // the first operand in the order of memory that cat gives
  kLike1,              // the second, or the first two together where they broadcast
  kLayerNorm,          // the input, and mean and rstd over its normalized dims
  kLayerNormBackward,  // like the input, the weight and the bias
  kBool,               // the first operand, as bool
  kReal,               // the first operand, as real numbers
  kFloating,           // the first operand, integers as floats
  kBroadcast,          // all operands together, the type that they are promoted to
  kBroadcastBool,      // all operands together, as bool
  kBroadcast12,        // the second and the third (where)
  kScalar,             // one number of the first operand's type
  kReduced,            // the first operand without the dims that the rule's words name
  kEmbedding,          // rows of the first operand for the second
  kEmbeddingBackward,  // as many rows as the third argument says
  kSelected,           // the first operand with the second's number of elements along a dim
  kBins,               // as many numbers of the first operand's type as the second argument says
  kGrouped,            // products of matrices, some of them cut into groups
  kScaledProduct,      // a product of matrices, of the type that is asked for
  kGroupNorm,          // the input, and mean and rstd of the groups of each sample
  kBatchNorm,          // the input, in training mean and rstd of its channels, and what some forms keep in reserve
};

const std::map<std::string_view, Look>& looks() {
  static const std::map<std::string_view, Look> table = {
      {"aten::_batch_norm_no_update", Look::kBatchNorm},
      {"aten::_grouped_mm", Look::kGrouped},
      {"aten::_native_batch_norm_legit", Look::kBatchNorm},
      {"aten::_scaled_mm", Look::kScaledProduct},
      {"aten::abs", Look::kReal},
      {"aten::cholesky", Look::kLike0},
      {"aten::cholesky_inverse", Look::kLike0},
      {"aten::dot", Look::kScalar},
      {"aten::embedding", Look::kEmbedding},
      {"aten::embedding_dense_backward", Look::kEmbeddingBackward},
      {"aten::flip", Look::kLike0},
      {"aten::hardswish", Look::kLike0},
      {"aten::hardswish_", Look::kLike0},
      {"aten::hardswish_backward", Look::kLike1},
      {"aten::hardtanh", Look::kLike0},
      {"aten::hardtanh_", Look::kLike0},
      {"aten::hardtanh_backward", Look::kLike1},
      {"aten::histc", Look::kBins},
      {"aten::index_add", Look::kLike0},
      {"aten::index_add_", Look::kLike0},
      {"aten::index_select", Look::kSelected},
      {"aten::isnan", Look::kBool},
      {"aten::log_sigmoid_backward", Look::kLike1},
      {"aten::logical_and", Look::kBroadcastBool},
      {"aten::logical_or", Look::kBroadcastBool},
      {"aten::logical_xor", Look::kBroadcastBool},
      {"aten::logit", Look::kFloating},
      {"aten::logsumexp", Look::kReduced},
      {"aten::max", Look::kScalar},
      {"aten::min", Look::kScalar},
      {"aten::mse_loss_backward", Look::kLike1},
      {"aten::native_batch_norm", Look::kBatchNorm},
      {"aten::native_dropout_backward", Look::kLike0},
      {"aten::native_group_norm", Look::kGroupNorm},
      {"aten::native_layer_norm", Look::kLayerNorm},
      {"aten::native_layer_norm_backward", Look::kLayerNormBackward},
      {"aten::relu", Look::kLike0},
      {"aten::relu_", Look::kLike0},
      {"aten::roll", Look::kJoined},
      {"aten::rrelu_with_noise_backward", Look::kLike1},
      {"aten::rsub.Tensor", Look::kBroadcast},
      {"aten::std.correction", Look::kReduced},
      {"aten::std_mean.correction", Look::kReduced},
      {"aten::var.correction", Look::kReduced},
      {"aten::var_mean.correction", Look::kReduced},
      {"aten::vdot", Look::kScalar},
      {"aten::where.self", Look::kBroadcast12},
  };
  return table;
}

TensorMeta row_major(const TensorMeta& meta, DType dtype) { return {meta.shape(), dtype}; }

// The order of memory that an elementwise function of these operands gives its result: asked of one that can be called
// without data in every libtorch.
TensorMeta elementwise(const std::vector<TensorMeta>& operands, DType dtype) {
  at::Tensor result;
  for (const TensorMeta& meta : operands) {
    const at::Tensor one = meta_tensor(TensorMeta(meta.shape(), meta.stride(), DType::kF32));
    result = result.defined() ? at::add(result, one) : operands.size() == 1 ? at::neg(one) : one;
  }
  TensorMeta meta = meta_of(result);
  return {meta.shape(), meta.stride(), dtype};
}
TensorMeta elementwise(const TensorMeta& meta) { return elementwise({meta}, meta.dtype()); }

// All shapes together, and the type of those from `first` on.
TensorMeta broadcast(const LocalCall& call, std::size_t first, std::size_t last) {
  std::vector<TensorMeta> metas;
  at::native::ResultTypeState types = {};
  for (std::size_t i = 0; i < last; ++i) {
    metas.push_back(meta_at(call, i));
    if (i >= first) types = at::native::update_result_type_state(call.operands[i].tensor, types);
  }
  return elementwise(metas, dtype_of(at::native::result_type(types)));
}

// Of norms the types of statistics and the order of results differ between versions and kernels: the operator is asked,
// with small tensors that lie in the same order. `shape_of`: their shapes; `sizes`: static arguments that go with them.
std::vector<std::optional<TensorMeta>> of_small(const LocalCall& call,
                                                const std::function<Dims(const TensorMeta& meta)>& shape_of,
                                                const std::vector<std::pair<std::size_t, c10::IValue>>& sizes) {
  torch::jit::Stack stack = with_tensors(call, [&](std::size_t i) {
    const TensorMeta meta = meta_at(call, i);
    return small_tensor(in_order_of(meta, shape_of(meta), meta.dtype()), 1, call.operands[i].tensor.device());
  });
  for (const auto& [arg, value] : sizes) stack[arg] = value;
  call.op.callBoxed(&stack);
  return metas_on(stack);
}
Dims one_or_two(const Dims& shape) {
  Dims result = shape;
  for (std::int64_t& size : result) size = std::clamp<std::int64_t>(size, 1, 2);
  return result;
}

GlobalResults layer_norm(const LocalCall& call) {
  const TensorMeta& input = call.operands[0].payload->spec.meta();
  Dims stats = input.shape();
  const auto normalized = call.arg(1).toIntVector();
  if (normalized.size() > stats.size()) return std::nullopt;
  for (std::size_t d = stats.size() - normalized.size(); d < stats.size(); ++d) stats[d] = 1;
  for (std::size_t d = 0; d < normalized.size(); ++d) {
    if (normalized[d] != input.shape()[input.shape().size() - normalized.size() + d]) return std::nullopt;
  }
  const Dims inner = one_or_two(Dims(normalized.begin(), normalized.end()));
  const auto small = of_small(call, [](const TensorMeta& meta) { return one_or_two(meta.shape()); },
                              {{1, c10::IValue(std::vector<std::int64_t>(inner.begin(), inner.end()))}});
  std::vector<std::optional<TensorMeta>> results = {in_order_of(*small[0], input.shape(), small[0]->dtype())};
  for (std::size_t r = 1; r < small.size(); ++r) results.emplace_back(TensorMeta(stats, small[r]->dtype()));
  return results;
}

// (input, weight, bias, N, C, HxW, groups, eps)
GlobalResults group_norm(const LocalCall& call) {
  const TensorMeta& input = call.operands[0].payload->spec.meta();
  const std::int64_t groups = call.arg(6).toInt();
  if (input.ndim() < 2 || groups < 1 || input.shape()[1] % groups != 0) return std::nullopt;
  const std::int64_t channels = std::clamp(input.shape()[1], groups, 2 * groups);
  const auto shape_of = [&](const TensorMeta& meta) {
    Dims shape = one_or_two(meta.shape());
    shape[meta.ndim() == 1 ? 0 : 1] = channels;
    return shape;
  };
  const Dims shape = shape_of(input);
  std::int64_t plane = 1;
  for (std::size_t d = 2; d < shape.size(); ++d) plane *= shape[d];
  const auto small = of_small(call, shape_of, {{3, shape[0]}, {4, channels}, {5, plane}});
  const Dims stats = {input.shape()[0], groups};
  return std::vector<std::optional<TensorMeta>>{in_order_of(*small[0], input.shape(), small[0]->dtype()),
                                                TensorMeta(stats, small[1]->dtype()),
                                                TensorMeta(stats, small[2]->dtype())};
}

// Which of the three are wanted stands in the last argument.
GlobalResults layer_norm_backward(const LocalCall& call) {
  const auto mask = call.arg(call.info.args.size() - 1).toBoolList();
  std::vector<std::optional<TensorMeta>> results;
  const std::size_t args[] = {1, 5, 6};  // input, weight, bias
  for (std::size_t r = 0; r < 3; ++r) {
    results.emplace_back();
    for (const Operand& operand : call.operands) {
      if (operand.arg == args[r] && operand.payload && mask.get(r)) {
        results.back() = row_major(operand.payload->spec.meta(), operand.payload->spec.meta().dtype());
      }
    }
  }
  return results;
}

// By the words of the row; of a complex tensor variances are real and means are not. Of integers libtorch has its own
// ideas, by version.
GlobalResults reduced(const LocalCall& call) {
  const TensorMeta& input = call.operands[0].payload->spec.meta();
  if (is_integral(input.dtype())) return std::nullopt;
  const OpRule& rule = *call.info.rule->rule;
  const c10::IValue& named = call.arg(*rule.dims_arg);
  const bool keep = call.arg(*rule.keepdim_arg).toBool();
  std::vector<bool> gone(input.shape().size(), !named.isIntList() || named.toIntList().empty());
  if (named.isIntList() && !gone.empty()) {
    for (const std::int64_t d : named.toIntVector()) {
      gone[static_cast<std::size_t>(at::maybe_wrap_dim(d, input.ndim()))] = true;
    }
  }
  Dims shape;
  for (std::size_t d = 0; d < gone.size(); ++d) {
    if (!gone[d] || keep) shape.push_back(gone[d] ? 1 : input.shape()[d]);
  }
  const bool real = call.info.name != "aten::logsumexp";
  const DType first = real ? dtype_of(c10::toRealValueType(scalar_type_of(input.dtype()))) : input.dtype();
  std::vector<std::optional<TensorMeta>> results = {TensorMeta(shape, first)};
  if (call.info.returns.size() == 2) results.emplace_back(TensorMeta(shape, input.dtype()));
  return results;
}

Dims with_last(Dims shape, std::int64_t size) {
  shape.push_back(size);
  return shape;
}

TensorMeta selected(const LocalCall& call) {
  const TensorMeta& self = call.operands[0].payload->spec.meta();
  Dims shape = self.shape();
  if (shape.empty()) return self;
  shape[at::maybe_wrap_dim(call.arg(1).toInt(), self.ndim())] = meta_at(call, 1).numel();
  return {shape, self.dtype()};
}

// The type that an argument asks for, if it does.
DType asked_type(const LocalCall& call, std::size_t arg, DType otherwise) {
  const c10::IValue& type = call.arg(arg);
  return type.isNone() ? otherwise : dtype_of(type.toScalarType());
}

// (self, mat2, ends of groups): of two matrices there is one product for each group; else groups are side by side.
TensorMeta grouped(const LocalCall& call) {
  const TensorMeta& a = call.operands[0].payload->spec.meta();
  const TensorMeta& b = call.operands[1].payload->spec.meta();
  Dims shape = {a.shape()[a.ndim() - 2], b.shape()[b.ndim() - 1]};
  if (a.ndim() == 3 && b.ndim() == 3) shape.insert(0, a.shape()[0]);
  if (a.ndim() == 2 && b.ndim() == 2) shape.insert(0, call.operands[2].payload->spec.meta().numel());
  return {shape, asked_type(call, 4, a.dtype())};
}

// (input, weight, bias, running mean, running variance, …)
GlobalResults batch_norm(const LocalCall& call) {
  const TensorMeta& input = call.operands[0].payload->spec.meta();
  if (input.ndim() < 2) return std::nullopt;
  auto results = of_small(call, [](const TensorMeta& meta) { return one_or_two(meta.shape()); }, {});
  results[0] = in_order_of(*results[0], input.shape(), results[0]->dtype());
  for (std::size_t r : {1, 2}) {
    if (results[r] && results[r]->numel() > 0) results[r] = TensorMeta(Dims{input.shape()[1]}, results[r]->dtype());
  }
  return results;
}

GlobalResults from_table(const LocalCall& call) {
  const auto look = looks().find(call.info.name);
  if (look == looks().end()) return std::nullopt;
  const auto meta = [&](std::size_t i) { return meta_at(call, i); };
  using One = std::vector<std::optional<TensorMeta>>;
  switch (look->second) {
    case Look::kLike0:
      return One{call.info.in_place ? meta(0) : elementwise(meta(0))};
    case Look::kJoined:
      if (meta(0).ndim() == 0) return One{meta(0)};
      return One{meta_of(at::cat({meta_tensor(meta(0))}, 0))};
    case Look::kLike1:
      return One{broadcast(call, 0, 2)};
    case Look::kLayerNorm:
      return layer_norm(call);
    case Look::kLayerNormBackward:
      return layer_norm_backward(call);
    case Look::kBool:
      return One{elementwise({meta(0)}, DType::kBool)};
    case Look::kReal:
      return One{elementwise({meta(0)}, dtype_of(c10::toRealValueType(scalar_type_of(meta(0).dtype()))))};
    case Look::kFloating:
      return One{elementwise({meta(0)}, is_integral(meta(0).dtype())
                                            ? dtype_of(c10::typeMetaToScalarType(c10::get_default_dtype()))
                                            : meta(0).dtype())};
    case Look::kBroadcast:
      return One{broadcast(call, 0, call.operands.size())};
    case Look::kBroadcastBool: {
      const TensorMeta all = broadcast(call, 0, call.operands.size());
      return One{TensorMeta(all.shape(), all.stride(), DType::kBool)};
    }
    case Look::kBroadcast12:
      return One{broadcast(call, 1, 3)};
    case Look::kScalar:
      return One{TensorMeta({}, meta(0).dtype())};
    case Look::kReduced:
      return reduced(call);
    case Look::kEmbedding:
      return One{TensorMeta(with_last(meta(1).shape(), meta(0).shape()[1]), meta(0).dtype())};
    case Look::kEmbeddingBackward:
      return One{TensorMeta({call.arg(2).toInt(), meta(0).shape()[meta(1).shape().size()]}, meta(0).dtype())};
    case Look::kSelected:
      return One{selected(call)};
    case Look::kBins:
      return One{TensorMeta(Dims{call.arg(1).toInt()}, meta(0).dtype())};
    case Look::kGrouped:
      return One{grouped(call)};
    case Look::kScaledProduct:
      return One{TensorMeta({meta(0).shape()[0], meta(1).shape()[1]}, asked_type(call, 6, meta(0).dtype()))};
    case Look::kGroupNorm:
      return group_norm(call);
    case Look::kBatchNorm:
      return batch_norm(call);
  }
  return std::nullopt;
}

// In place there is nothing new.
GlobalResults from_written(const LocalCall& call) {
  if (!call.info.in_place || call.info.returns.size() != 1 || call.info.returns[0].written_arg != 0) return {};
  if (!call.info.returns[0].is_tensor) return {};
  return std::vector<std::optional<TensorMeta>>{call.operands[0].payload->spec.meta()};
}

// Batch norms: meta kernels promise the batch's statistics, which the kernels give in training alone.
void drop_statistics(const LocalCall& call, std::vector<std::optional<TensorMeta>>& results) {
  static constexpr std::pair<std::string_view, std::size_t> kTraining[] = {
      {"aten::native_batch_norm", 5},
      {"aten::_native_batch_norm_legit", 5},
      {"aten::_native_batch_norm_legit.no_stats", 3}};
  for (const auto& [name, training] : kTraining) {
    if (call.info.name != name || call.arg(training).toBool()) continue;
    for (std::size_t r = 1; r < results.size(); ++r) {
      if (results[r]) results[r] = TensorMeta(Dims{0}, results[r]->dtype());
    }
  }
}

// Attention for CPUs: up to libtorch 2.11 the meta kernel says that the sums are float, which they are not of doubles.
void widen_sums(const LocalCall& call, std::vector<std::optional<TensorMeta>>& results) {
  if (call.info.name != "aten::_scaled_dot_product_flash_attention_for_cpu" || results.size() != 2) return;
  if (results[0]->dtype() == DType::kF64)
    results[1] = TensorMeta(results[1]->shape(), results[1]->stride(), DType::kF64);
}

}  // namespace

std::vector<std::int64_t> view_offsets(const LocalCall& call) {
  std::vector<std::int64_t> offsets;
  if (!call.op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return offsets;
  torch::jit::Stack stack =
      with_tensors(call, [&](std::size_t operand) { return meta_tensor(call.operands[operand].payload->spec.meta()); });
  call.op.callBoxed(&stack);
  for (const c10::IValue& value : stack) {
    if (value.isTensor()) offsets.push_back(value.toTensor().storage_offset());
    if (!value.isTensorList()) continue;
    for (const at::Tensor& tensor : value.toTensorVector()) offsets.push_back(tensor.storage_offset());
  }
  return offsets;
}

GlobalResults global_results(const LocalCall& call) {
  // A kernel that is made of others has to be called to learn that one of those has none for tensors without data. That
  // of index_add does not take an empty index in libtorch 1.13, where the operator itself does.
  const bool index_add = call.info.name.rfind("aten::index_add", 0) == 0;
  // Those of norms say another order of memory and other types of statistics than kernels give.
  const auto look = looks().find(call.info.name);
  const bool norm = look != looks().end() && (look->second == Look::kLayerNorm || look->second == Look::kGroupNorm ||
                                              look->second == Look::kBatchNorm);
  if (index_add || norm || !call.op.hasKernelForDispatchKey(c10::DispatchKey::Meta)) {
    if (auto results = from_table(call)) return results;
  }
  if (auto results = from_meta_kernel(call)) {
    drop_statistics(call, *results);
    widen_sums(call, *results);
    return results;
  }
  if (auto results = from_table(call)) return results;
  if (auto results = from_written(call)) return results;
  return from_probe(call);
}

}  // namespace dtensor
