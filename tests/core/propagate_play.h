#pragma once

#include <cmath>
#include <functional>
#include <limits>
#include <map>

#include "tests/core/rule_call.h"
#include "tests/core/sweep.h"

// Plays a decision on small tensors: every rank runs the local call on its part, the results are put together as their
// specs say, and must be what the operator gives on the whole. Partial operands are split unevenly, with parts that a
// wrong rule does not survive. Kernels know nothing of ranks.
namespace dtensor::play_rules {

struct Array {
  Dims shape;
  std::vector<double> data;
  static Array filled(const Dims& shape, double value) {
    std::int64_t n = 1;
    for (std::int64_t size : shape) n *= size;
    return {shape, std::vector<double>(static_cast<std::size_t>(n), value)};
  }
  // Of an index with more dims, and with size-1 dims that broadcast.
  double at(const Dims& index) const {
    std::int64_t flat = 0;
    for (std::size_t d = 0; d < shape.size(); ++d) {
      flat = flat * shape[d] + (shape[d] == 1 ? 0 : index[index.size() - shape.size() + d]);
    }
    return data[static_cast<std::size_t>(flat)];
  }
};

// Calls fn for each index of the shape, in row-major order.
template <class Fn>
void for_each_index(const Dims& shape, Fn fn) {
  for (std::int64_t size : shape) {
    if (size == 0) return;
  }
  Dims index(shape.size(), 0);
  for (;;) {
    fn(static_cast<const Dims&>(index));
    std::size_t d = shape.size();
    while (d > 0 && ++index[d - 1] == shape[d - 1]) index[--d] = 0;
    if (d == 0) return;
  }
}

template <class Fn>
Array make_array(const Dims& shape, Fn value) {
  Array result{shape, {}};
  for_each_index(shape, [&](const Dims& index) { result.data.push_back(value(index)); });
  return result;
}

struct LocalCall {
  std::vector<Array> operands;  // numbers as 0-d arrays
  std::vector<StaticArg> args;  // by schema position
};
using Kernel = std::function<std::vector<Array>(const LocalCall&)>;
using Kernels = std::map<std::string, Kernel, std::less<>>;

inline double identity_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMin:
      return std::numeric_limits<double>::infinity();
    case ReduceOp::kMax:
      return -std::numeric_limits<double>::infinity();
    case ReduceOp::kProduct:
    case ReduceOp::kAnd:
      return 1;
    default:
      return 0;
  }
}

inline double combine(ReduceOp op, double a, double b) {
  switch (op) {
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kMax:
      return std::max(a, b);
    case ReduceOp::kProduct:
      return a * b;
    case ReduceOp::kAnd:
      return a != 0 && b != 0;
    case ReduceOp::kOr:
      return a != 0 || b != 0;
    default:
      return a + b;
  }
}

// Parts that reduce to the value: far from it and from each other.
inline std::vector<double> split_value(sweep::Random& random, ReduceOp op, double value, std::int64_t count) {
  std::vector<double> parts;
  for (std::int64_t i = 0; i < count; ++i) parts.push_back(static_cast<double>(random.below(9)) - 4);
  const auto at = static_cast<std::size_t>(random.below(count));
  const double whole = op == ReduceOp::kAvg ? value * static_cast<double>(count) : value;
  double rest = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) rest += i == at ? 0 : parts[i];
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (op == ReduceOp::kMin) parts[i] = value + std::abs(parts[i]);
    if (op == ReduceOp::kMax) parts[i] = value - std::abs(parts[i]);
    if (op == ReduceOp::kProduct) parts[i] = 1;
  }
  parts[at] = op == ReduceOp::kSum || op == ReduceOp::kAvg ? whole - rest : value;
  return parts;
}

// What every rank holds of a tensor, by rank.
using Locals = std::map<std::int64_t, Array>;

inline Locals scatter(sweep::Random& random, const Spec& spec, const Array& whole) {
  // Every element as its parts, one reduction after the other, by the coordinate on the Partial mesh dims.
  Dims parts_shape;
  for (std::int64_t m = 0; m < spec.mesh().ndim(); ++m) {
    parts_shape.push_back(spec.partials()[m] ? spec.mesh().shape()[m] : 1);
  }
  std::vector<Array> elements;
  for (double value : whole.data) {
    Array parts = Array::filled(Dims(parts_shape.size(), 1), value);
    for (std::size_t m = 0; m < parts_shape.size(); ++m) {
      if (!spec.partials()[m]) continue;
      Dims wider = parts.shape;
      wider[m] = parts_shape[m];
      Array next = Array::filled(wider, 0);
      std::vector<std::vector<double>> split;
      for (double part : parts.data) split.push_back(split_value(random, *spec.partials()[m], part, parts_shape[m]));
      std::size_t flat = 0;
      for_each_index(wider, [&](const Dims& at) {
        std::int64_t from = 0;
        for (std::size_t d = 0; d < at.size(); ++d) from = from * parts.shape[d] + (d == m ? 0 : at[d]);
        next.data[flat++] = split[static_cast<std::size_t>(from)][static_cast<std::size_t>(at[m])];
      });
      parts = std::move(next);
    }
    elements.push_back(std::move(parts));
  }
  Locals locals;
  sweep::for_each_coordinate(spec.mesh(), [&](const Dims& at) {
    Array local{spec.local_shape(at), {}};
    for (std::int64_t i : sweep::elements_of(box_of(spec, at), spec.meta().shape())) {
      local.data.push_back(elements[static_cast<std::size_t>(i)].at(at));
    }
    locals[spec.mesh().rank_at(at)] = std::move(local);
  });
  return locals;
}

// The whole from the parts, or what is wrong with them: another shape than the spec's, replicas that differ.
inline OrReason<Array> gather(const Spec& spec, const Locals& locals) {
  const Dims mesh = spec.mesh().shape();
  std::map<std::int64_t, std::map<std::int64_t, double>> parts;  // element, place on the Partial mesh dims
  std::string wrong;
  sweep::for_each_coordinate(spec.mesh(), [&](const Dims& at) {
    const Array& local = locals.at(spec.mesh().rank_at(at));
    if (!(local.shape == spec.local_shape(at))) {
      wrong = "a local result is [" + join_numbers(local.shape) + "], not as in " + spec.to_string();
      return;
    }
    std::int64_t place = 0;
    for (std::size_t m = 0; m < mesh.size(); ++m) place = place * mesh[m] + (spec.partials()[m] ? at[m] : 0);
    std::size_t i = 0;
    for (std::int64_t element : sweep::elements_of(box_of(spec, at), spec.meta().shape())) {
      const double value = local.data[i++];
      const auto [known, fresh] = parts[element].emplace(place, value);
      if (!fresh && known->second != value) wrong = "replicas differ at element " + std::to_string(element);
    }
  });
  if (!wrong.empty()) return Reason{wrong};
  Array whole = Array::filled(spec.meta().shape(), std::numeric_limits<double>::quiet_NaN());
  ReduceOp op = ReduceOp::kSum;
  double divisor = 1;
  for (std::size_t m = 0; m < mesh.size(); ++m) {
    if (!spec.partials()[m]) continue;
    op = *spec.partials()[m] == ReduceOp::kAvg ? ReduceOp::kSum : *spec.partials()[m];
    if (*spec.partials()[m] == ReduceOp::kAvg) divisor *= static_cast<double>(mesh[m]);
  }
  for (const auto& [element, values] : parts) {
    double value = identity_of(op);
    for (const auto& [place, part] : values) value = combine(op, value, part);
    whole.data[static_cast<std::size_t>(element)] = value / divisor;
  }
  return whole;
}

inline StaticArg rewritten(const Rewrite& rewrite, const Decision& decision, const Dims& at) {
  switch (rewrite.kind) {
    case Rewrite::Kind::kValue:
      return rewrite.value;
    case Rewrite::Kind::kLocalStride:
      return StaticArg::integers(decision.outputs[rewrite.index]->local_stride(at));
    case Rewrite::Kind::kLocalShape:
      return calls::ints(decision.outputs[rewrite.index]->local_shape(at));
    case Rewrite::Kind::kScaled:
      break;
  }
  const Spec& spec = *decision.inputs[0];
  const std::int64_t local = spec.local_shape(at)[rewrite.index];
  const std::int64_t global = spec.meta().shape()[rewrite.index];
  Dims values = rewrite.value.as_ints();
  for (std::int64_t& value : values) value = global == 0 ? 0 : value * local / global;
  return rewrite.value.kind() == StaticArg::Kind::kInt ? calls::i(values[0]) : calls::ints(values);
}

inline std::vector<Array> run_local(const OpCall& call, const Decision& decision, const Kernels& kernels,
                                    LocalCall local, const Dims& at) {
  const LocalWork& work = decision.local;
  const auto fill = [&](ReduceOp op) {
    std::vector<Array> results;
    for (const auto& output : decision.outputs)
      results.push_back(Array::filled(output->local_shape(at), identity_of(op)));
    return results;
  };
  const bool owner = std::all_of(work.once.begin(), work.once.end(),
                                 [&](std::int64_t m) { return at[static_cast<std::size_t>(m)] == 0; });
  if (!owner && work.others == LocalWork::Others::kKeep) return {local.operands[0]};
  if (!owner) return fill(work.others_op);
  if (work.identity && local.operands[0].data.empty()) return fill(*work.identity);
  for (const Rewrite& rewrite : decision.rewrites) {
    if (rewrite.arg >= local.args.size()) local.args.resize(rewrite.arg + 1);
    local.args[rewrite.arg] = rewritten(rewrite, decision, at);
  }
  auto results = kernels.at(work.op.empty() ? std::string(call.name) : work.op)(local);
  for (Array& result : results) {
    for (double& value : result.data) value /= static_cast<double>(work.divide_by);
  }
  return results;
}

inline LocalCall whole_call(const OpCall& call, std::vector<Array> operands) {
  LocalCall whole{std::move(operands), {}};
  for (const ArgRef& arg : call.args) whole.args.push_back(arg.constant);
  return whole;
}

// What the decision gives that the operator does not give on the whole; nothing when they agree.
inline std::optional<std::string> mismatch(const OpCall& call, const Decision& decision,
                                           const std::vector<Array>& operands, const Kernels& kernels,
                                           sweep::Random& random) {
  const std::vector<Array> expected = kernels.at(std::string(call.name))(whole_call(call, operands));
  std::vector<Locals> inputs;
  for (std::size_t k = 0; k < operands.size(); ++k) {
    inputs.push_back(call.operands[k] ? scatter(random, *decision.inputs[k], operands[k]) : Locals());
  }
  const Mesh& mesh = decision.inputs[0]->mesh();
  std::vector<Locals> outputs(expected.size());
  sweep::for_each_coordinate(mesh, [&](const Dims& at) {
    std::vector<Array> locals;
    for (std::size_t k = 0; k < operands.size(); ++k) {
      locals.push_back(call.operands[k] ? inputs[k].at(mesh.rank_at(at)) : operands[k]);
    }
    auto results = run_local(call, decision, kernels, whole_call(call, std::move(locals)), at);
    for (std::size_t k = 0; k < expected.size(); ++k) outputs[k][mesh.rank_at(at)] = std::move(results[k]);
  });
  for (std::size_t k = 0; k < expected.size(); ++k) {
    const auto whole = gather(*decision.outputs[k], outputs[k]);
    if (!whole) return whole.reason();
    for (std::size_t e = 0; e < whole->data.size(); ++e) {
      const double want = expected[k].data[e];
      const double got = whole->data[e];
      if (got == want || std::abs(got - want) <= 1e-9 * (1 + std::abs(want))) continue;
      return "element " + std::to_string(e) + " of result " + std::to_string(k) + " is " + std::to_string(got) +
             " instead of " + std::to_string(want);
    }
  }
  return std::nullopt;
}

}  // namespace dtensor::play_rules
