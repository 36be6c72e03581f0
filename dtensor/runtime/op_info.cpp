#include "dtensor/runtime/op_info_impl.h"

#include <algorithm>

#include "dtensor/core/provenance.h"

namespace dtensor {
namespace {

using c10::TypeKind;

OpInfo::ArgKind kind_of(const c10::Argument& argument) {
  const c10::TypePtr type = argument.real_type();
  const auto inner = [](const c10::TypePtr& t) { return t->containedType(0); };
  const auto is_optional = [](const c10::TypePtr& t) { return t->kind() == TypeKind::OptionalType; };
  if (type->kind() == TypeKind::TensorType) return OpInfo::ArgKind::kTensor;
  if (is_optional(type)) {
    if (inner(type)->kind() == TypeKind::TensorType) return OpInfo::ArgKind::kTensor;
    if (inner(type)->kind() == TypeKind::ScalarTypeType) return OpInfo::ArgKind::kDType;
    return OpInfo::ArgKind::kOther;
  }
  if (type->kind() == TypeKind::ScalarTypeType) return OpInfo::ArgKind::kDType;
  if (type->kind() != TypeKind::ListType) return OpInfo::ArgKind::kOther;
  const c10::TypePtr element = inner(type);
  if (element->kind() == TypeKind::TensorType) return OpInfo::ArgKind::kTensorList;
  if (is_optional(element) && inner(element)->kind() == TypeKind::TensorType) {
    return OpInfo::ArgKind::kOptionalTensorList;
  }
  return OpInfo::ArgKind::kOther;
}

bool is_generator(const c10::Argument& argument) {
  c10::TypePtr type = argument.real_type();
  if (type->kind() == TypeKind::OptionalType) type = type->containedType(0);
  return type->kind() == TypeKind::GeneratorType;
}

// Is a value that the schema marks with this alias set the same memory as the other?
bool same_alias(const c10::AliasInfo* a, const c10::AliasInfo* b) {
  if (!a || !b) return false;
  for (const auto& symbol : a->beforeSets()) {
    if (b->beforeSets().count(symbol)) return true;
  }
  return false;
}

// Arguments that are written although their schema does not say so.
struct UnmarkedWrite {
  const char* op;
  std::size_t arg;
};
constexpr UnmarkedWrite kUnmarkedWrites[] = {
    {"aten::cudnn_batch_norm", 3},  {"aten::cudnn_batch_norm", 4},  {"aten::miopen_batch_norm", 3},
    {"aten::miopen_batch_norm", 4}, {"aten::native_batch_norm", 3}, {"aten::native_batch_norm", 4},
    {"aten::rrelu_with_noise", 1},
};

bool writes_unmarked(const std::string& name, std::size_t arg) {
  return std::any_of(std::begin(kUnmarkedWrites), std::end(kUnmarkedWrites),
                     [&](const UnmarkedWrite& write) { return name == write.op && arg == write.arg; });
}

}  // namespace

OpInfo::OpInfo(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  rule = find_rule(name);
  scales = rule && std::any_of(rule->rule->carries.begin(), rule->rule->carries.end(),
                               [](const Carry& carry) { return !carry.factors.empty(); });
  accumulates = name == "aten::add_.Tensor";
  reads_real = name == "aten::view_as_real";
  reads_memory = name == "aten::as_strided";
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    const bool written = (argument.alias_info() && argument.alias_info()->isWrite()) || writes_unmarked(name, i);
    drops = drops || argument.name() == "dropout_p" || argument.name() == "dropout";
    takes_generator = takes_generator || is_generator(argument);
    writes = writes || written;
    if (written && argument.is_out()) out = true;
    const KeyUse key = rule ? key_use(*rule->rule, i) : KeyUse::kPlain;
    args.push_back({argument.name(), kind_of(argument), written, key});
    const bool is_static = args.back().kind == ArgKind::kOther || args.back().kind == ArgKind::kDType;
    if (!is_static) tensor_args.push_back(i);
    if (is_static && key != KeyUse::kNothing) key_args.push_back(i);
  }
  in_place = writes && !out && !args.empty() && args[0].written;
  for (const c10::Argument& result : schema.returns()) {
    Return r;
    const auto kind = kind_of(result);
    r.is_tensor = kind == ArgKind::kTensor;
    r.is_list = kind == ArgKind::kTensorList;
    for (std::size_t i = 0; i < args.size(); ++i) {
      const c10::Argument& argument = schema.arguments()[i];
      if (!same_alias(result.alias_info(), argument.alias_info())) continue;
      if (args[i].written) {
        r.written_arg = static_cast<int>(i);
      } else {
        r.alias = true;
      }
    }
    // The results of a split share memory with its operand through a wildcard in the list's elements.
    if (r.is_list && result.alias_info()) r.alias = true;
    returns_alias = returns_alias || r.alias;
    returns.push_back(r);
  }
  // Where a view begins depends on all that it is told, also where its layout does not.
  if (returns_alias) {
    key_args.clear();
    for (std::size_t i = 0; i < args.size(); ++i) {
      if (args[i].kind != ArgKind::kOther && args[i].kind != ArgKind::kDType) continue;
      args[i].key = KeyUse::kValue;
      key_args.push_back(i);
    }
  }
  copies = !returns_alias && !writes && schema.name().ends_with("_copy");
  const std::string plain = in_place ? plain_name(name) : name;
  identity = stable_hash(plain);
  if (plain == "aten::add.Tensor") flow = Flow::kSum;
  if (name == "aten::clone") flow = Flow::kSame;
  if (name == "aten::copy_") flow = Flow::kCopy;
  for (const char* only_writes : {"aten::copy_", "aten::fill_", "aten::zero_"}) {
    const std::string_view start = only_writes;
    if (name == start || name.rfind(std::string(start) + '.', 0) == 0) reads_self = false;
  }
  for (std::size_t i = 0; i < args.size(); ++i) {
    plain_names.push_back("the plain tensor given as argument \"" + args[i].name + "\" of " + name);
    if (args[i].kind == ArgKind::kOther && args[i].key != KeyUse::kValue) number_args.push_back(i);
  }
}

std::optional<c10::OperatorHandle> plain_form(const OpInfo& info) {
  if (!info.in_place || !form_of(info.name).in_place) return std::nullopt;
  const std::string plain = plain_name(info.name);
  const std::size_t dot = std::min(plain.find('.'), plain.size());
  const std::string overload = dot == plain.size() ? "" : plain.substr(dot + 1);
  const auto op = c10::Dispatcher::singleton().findSchema({plain.substr(0, dot), overload});
  if (!op || op->schema().arguments().size() != info.args.size()) return std::nullopt;
  return *op;
}

}  // namespace dtensor
