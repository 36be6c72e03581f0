// Kernels of our own for the random operators: which values an operator draws, and into what.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <map>
#include <mutex>

#include "dtensor/core/error.h"
#include "dtensor/core/text.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/provenance.h"
#include "dtensor/runtime/random_impl.h"
#include "dtensor/runtime/register.h"

namespace dtensor {
namespace {

MaybeGenerator generator_of(const LocalCall& call) {
  for (std::size_t i = 0; i < call.info.args.size(); ++i) {
    if (call.arg(i).isGenerator()) return call.arg(i).toGenerator();
  }
  return {};
}

// ---- what is drawn

// "uniform" of "aten::uniform_", "aten::uniform.out"; "rand" of "aten::rand_like".
std::string base_of(const std::string& name) {
  std::string base = name.substr(6, std::min(name.find('.'), name.size()) - 6);
  if (base.back() == '_') base.pop_back();
  for (const std::string end : {"_like", "_functional"}) {
    if (base.size() > end.size() && base.ends_with(end)) base.resize(base.size() - end.size());
  }
  return base;
}

// All that the type has from 0 on; for floating types all integers that follow each other.
Draw any_integer(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return Draw::integers(0, (1u << 11) + 1);
    case DType::kBF16:
      return Draw::integers(0, (1u << 8) + 1);
    case DType::kF32:
      return Draw::integers(0, (1u << 24) + 1);
    case DType::kF64:
      return Draw::integers(0, (std::uint64_t{1} << 53) + 1);
    case DType::kBool:
      return Draw::integers(0, 2);
    case DType::kI8:
    case DType::kI16:
    case DType::kI32:
    case DType::kI64:
      return Draw::integers(0, std::uint64_t{1} << (element_size(dtype) * 8 - 1));
    default:
      return Draw::integers(0, element_size(dtype) == 8 ? 0 : std::uint64_t{1} << (element_size(dtype) * 8));
  }
}

// random_(from, to): to none, up to the largest of the type.
Draw random_integers(const RandomCall& call, DType dtype) {
  if (!call.has("to")) {
    if (!call.has("from")) return any_integer(dtype);
    const std::int64_t from = call.integer("from");
    const std::uint64_t end = any_integer(dtype).range;
    return Draw::integers(from, end - static_cast<std::uint64_t>(from));
  }
  return integers_of(call.has("from") ? call.integer("from") : 0, call.integer("to"), dtype, call.name());
}

using MakeDraw = Draw (*)(const RandomCall& call, DType dtype);

const std::map<std::string, MakeDraw>& fills() {
  static const std::map<std::string, MakeDraw> table = {
      {"bernoulli", [](const RandomCall& call, DType) { return Draw::bernoulli(call.number("p")); }},
      {"cauchy",
       [](const RandomCall& call, DType) { return Draw::cauchy(call.number("median"), call.number("sigma")); }},
      {"exponential", [](const RandomCall& call, DType) { return Draw::exponential(call.number("lambd")); }},
      {"geometric", [](const RandomCall& call, DType) { return Draw::geometric(call.number("p")); }},
      {"log_normal",
       [](const RandomCall& call, DType) { return Draw::log_normal(call.number("mean"), call.number("std")); }},
      {"normal", [](const RandomCall& call, DType) { return Draw::normal(call.number("mean"), call.number("std")); }},
      {"rand", [](const RandomCall&, DType) { return Draw::uniform(0, 1); }},
      {"randint",
       [](const RandomCall& call, DType dtype) {
         return integers_of(call.has("low") ? call.integer("low") : 0, call.integer("high"), dtype, call.name());
       }},
      {"randn", [](const RandomCall&, DType) { return Draw::normal(0, 1); }},
      {"random", &random_integers},
      {"randperm", [](const RandomCall& call, DType) { return Draw::permutation(call.integer("n")); }},
      {"uniform", [](const RandomCall& call, DType) { return Draw::uniform(call.number("from"), call.number("to")); }},
  };
  return table;
}

// ---- into what

void check_size(const RandomCall& call, const at::Tensor& out) {
  std::vector<std::int64_t> size;
  if (call.has("size")) {
    size = call.at("size").toIntVector();
  } else if (call.has("n")) {
    size = {call.integer("n")};
  } else {
    size = call.tensor("self").sizes().vec();
  }
  if (out.sizes() == at::IntArrayRef(size)) return;
  fail_invalid(call.name(), {.what = "the tensor given for the result has another shape",
                             .got = payload_of(out).spec.to_string(),
                             .expected = "[" + join_numbers(size) + "]"});
}

at::Tensor new_like_self(const RandomCall& call) {
  const at::Tensor self = call.tensor("self");
  at::TensorOptions options;
  if (call.has("dtype")) options = options.dtype(call.at("dtype").toScalarType());
  c10::optional<at::MemoryFormat> format;
  if (call.has("memory_format")) format = call.at("memory_format").toMemoryFormat();
  return at::empty_like(self, options, format);
}

void run_fill(RandomCall& call) {
  at::Tensor target;
  if (call.is_in_place()) {
    target = call.tensor("self");
  } else if (call.has("out")) {
    target = call.tensor("out");
    check_size(call, target);
  } else {
    target = new_like_self(call);
  }
  WatchedMemory::before_write(payload_of(target).local());
  const Draw draw = fills().at(base_of(call.name()))(call, payload_of(target).spec.meta().dtype());
  fill_random(target, call.key(), draw, call.name());
  call.finish({target});
}

// ---- registration

class RandomKernel final : public c10::OperatorKernel {
 public:
  explicit RandomKernel(RandomHandler handler) : handler_(handler) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    std::call_once(once_, [&] { info_ = std::make_unique<OpInfo>(op); });
    const at::AutoDispatchBelowADInplaceOrView below;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(
        c10::DispatchKeySet({c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA}));
    RandomCall call(*info_, op, stack);
    handler_(call);
  }

 private:
  const RandomHandler handler_;
  std::once_flag once_;
  std::unique_ptr<OpInfo> info_;
};

std::string text_of(const c10::OperatorName& name) {
  return name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
}

}  // namespace

// ---- calls

RandomCall::RandomCall(const OpInfo& info, const c10::OperatorHandle& op, torch::jit::Stack* stack)
    : call_{info, op, *stack, {}, nullptr} {
  collect(call_);
  for (Operand& operand : call_.operands) {
    if (!operand.payload) {  // a number
      operand.tensor = as_replica(operand.tensor, call_.mesh);
      operand.payload = &payload_of(operand.tensor);
    }
    if (*operand.payload->mesh == mesh()) continue;
    fail_invalid(name(), {.what = "the operands are on different meshes",
                          .got = mesh().to_string() + " and " + operand.payload->mesh->to_string(),
                          .advice = "redistribute(mesh, placements)"});
  }
  key_ = next_random_key(mesh(), generator_of(call_));
}

std::optional<std::size_t> RandomCall::index_of(std::string_view arg) const {
  for (std::size_t i = 0; i < call_.info.args.size(); ++i) {
    if (call_.info.args[i].name == arg) return i;
  }
  return std::nullopt;
}

bool RandomCall::has(std::string_view arg) const {
  const auto index = index_of(arg);
  return index && !call_.arg(*index).isNone();
}

const c10::IValue& RandomCall::at(std::string_view arg) const { return call_.arg(index_of(arg).value()); }

at::Tensor RandomCall::tensor(std::string_view arg) const {
  const std::size_t index = index_of(arg).value();
  for (const Operand& operand : call_.operands) {
    if (operand.arg == index) return operand.tensor;
  }
  return call_.arg(index).toTensor();
}

double RandomCall::number(std::string_view arg) const { return at(arg).toScalar().toDouble(); }

std::int64_t RandomCall::integer(std::string_view arg) const {
  const c10::IValue& value = at(arg);
  return value.isTensor() ? value.toTensor().item().toLong() : value.toInt();
}

Provenance RandomCall::provenance() const {
  CallProvenance made(call_.info, mix(call_.info.identity, provenance_word(key_)));
  for (const Operand& operand : call_.operands) {
    made.add_word(operand.payload->spec.stable_hash());
    if (!call_.info.args[operand.arg].written) made.add_operand(operand.payload->provenance);
  }
  for (std::size_t i = 0; i < call_.info.args.size(); ++i) {
    if (call_.info.args[i].kind == OpInfo::ArgKind::kOther) made.add_word(number_word(call_.arg(i)));
  }
  return made.result();
}

void RandomCall::finish(std::initializer_list<at::Tensor> results) {
  const Provenance made = provenance();
  torch::jit::drop(call_.stack, call_.info.args.size());
  note_made(mesh(), made.made, call_.info.name, 0, 0);
  std::size_t output = 0;
  for (const at::Tensor& result : results) {
    note_written(result, payload_of(result), of_output(made, output++));
    const auto written = std::find_if(call_.operands.begin(), call_.operands.end(), [&](const Operand& operand) {
      return operand.plain.defined() && operand.tensor.is_same(result);
    });
    call_.stack.emplace_back(written == call_.operands.end() ? result : written->plain);
  }
}

RandomHandler random_handler(const std::string& name) {
  static const std::map<std::string, RandomHandler> special = {
      {"aten::bernoulli", &run_bernoulli_of},
      {"aten::bernoulli.Tensor", &run_bernoulli_of},
      {"aten::bernoulli.Tensor_out", &run_bernoulli_of},
      {"aten::bernoulli.out", &run_bernoulli_of},
      {"aten::bernoulli_.Tensor", &run_bernoulli_of},
      {"aten::multinomial", &run_multinomial},
      {"aten::multinomial.out", &run_multinomial},
      {"aten::native_dropout", &run_native_dropout},
      {"aten::native_dropout.out", &run_native_dropout},
      {"aten::normal.Tensor_Tensor", &run_normal_of},
      {"aten::normal.Tensor_Tensor_out", &run_normal_of},
      {"aten::normal.Tensor_float", &run_normal_of},
      {"aten::normal.Tensor_float_out", &run_normal_of},
      {"aten::normal.float_Tensor", &run_normal_of},
      {"aten::normal.float_Tensor_out", &run_normal_of},
      {"aten::rrelu_with_noise", &run_rrelu_with_noise},
      {"aten::rrelu_with_noise.out", &run_rrelu_with_noise},
      {"aten::rrelu_with_noise_", &run_rrelu_with_noise},
  };
  const auto found = special.find(name);
  if (found != special.end()) return found->second;
  if (name.rfind("aten::", 0) != 0) return nullptr;
  const std::string base = base_of(name);
  if (!fills().count(base)) return nullptr;
  // New tensors of given sizes are plain ones.
  const bool sized = base.rfind("rand", 0) == 0 && base != "random" && name.find("_like") == std::string::npos;
  if ((sized || name == "aten::normal.float_float") && name.find("out") == std::string::npos) return nullptr;
  return &run_fill;
}

bool has_random_kernel(const c10::OperatorName& name) { return random_handler(text_of(name)) != nullptr; }

void register_random() {
  using Library = torch::Library;
  static auto* ours = new Library(Library::IMPL, "aten", kDTensorKey, __FILE__, __LINE__);
  static auto* composite =
      new Library(Library::IMPL, "aten", c10::DispatchKey::AutogradPrivateUse3, __FILE__, __LINE__);
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const RandomHandler handler = random_handler(text_of(name));
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (!handler || !op || !op->hasSchema()) continue;
    const std::string text = text_of(name).substr(6);
    const auto kernel = [&] {
      return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<RandomKernel>(handler));
    };
    ours->impl(text.c_str(), kernel());
    if (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd))
      composite->impl(text.c_str(), kernel());
  }
  register_noise();
}

}  // namespace dtensor
