#include "tests/testing/chain.h"

#include <ATen/ATen.h>

#include <chrono>
#include <limits>
#include <sstream>

#include "dtensor/comm/world.h"
#include "dtensor/core/error.h"
#include "dtensor/runtime/dispatch.h"
#include "dtensor/runtime/payload.h"
#include "dtensor/runtime/tensor.h"
#include "dtensor/testing/parts.h"

namespace dtensor::testing {
namespace {

using sweep::Random;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

at::Tensor random_values(Random& random, const Dims& shape, bool special) {
  std::int64_t n = 1;
  for (const std::int64_t size : shape) n *= size;
  std::vector<double> values;
  for (std::int64_t i = 0; i < n; ++i) {
    double value = (static_cast<double>(random.below(33)) - 16) / 8;
    if (special && random.chance(6)) value = random.pick(std::vector<double>{kNaN, kInf, -kInf, -0.0});
    values.push_back(value);
  }
  return at::tensor(values, at::kDouble).view({shape.data(), shape.size()});
}

Spec random_spec(Random& random, const Mesh& mesh, const Dims& shape, bool special) {
  sweep::Case one = sweep::random_case(random, mesh, shape, !special);
  // Of a value that is not finite no uneven parts can be made, but for max and min.
  static const std::vector<ReduceOp> kinds = {ReduceOp::kSum, ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax,
                                              ReduceOp::kMin};
  const ReduceOp kind = random.pick(kinds);
  for (Placement& placement : one.placements) {
    if (placement.is_partial()) placement = Partial(kind);
  }
  return one.spec(DType::kF64);
}

// The inputs, as leaves or not, and everything that was made of them.
struct Run {
  Tensors leaves;
  Tensors pool;
  bool backward = false;
  std::string why_not;  // of the backward pass
};

bool is_kinked(const Chain& chain) {
  return chain.special ||
         std::any_of(chain.steps.begin(), chain.steps.end(), [](const ChainStep& step) { return step.kinked; });
}

void start_pool(Run& run, bool gradients) {
  for (at::Tensor& leaf : run.leaves) {
    if (gradients) leaf.requires_grad_(true);
    run.pool.push_back(leaf * 1);  // not a leaf: it may be written to
  }
}

at::Tensor loss_of(const Run& run) { return (run.pool.back() * run.pool.back()).sum(); }

Run plain_run(const Chain& chain) {
  Run run;
  for (const at::Tensor& input : chain.inputs) run.leaves.push_back(input.clone());
  const bool gradients = !is_kinked(chain);
  start_pool(run, gradients);
  for (const ChainStep& step : chain.steps) run.pool.push_back(step.run(run.pool));
  if (!gradients || !run.pool.back().requires_grad()) return run;
  try {
    loss_of(run).backward();
    run.backward = true;
  } catch (const c10::Error& error) {
    run.why_not = error.what_without_backtrace();  // something that it needs was written to
  }
  return run;
}

struct Part {
  Spec spec;
  at::Tensor local;
};
// No value where reading it is refused: a view that had to be copied and is out of date.
std::optional<Part> part_of(const at::Tensor& tensor) {
  try {
    return Part{payload_of(tensor).spec, DTensor(tensor.detach()).to_local().clone()};
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kInvalidArgument) throw;
    return std::nullopt;
  }
}

// What a rank has at the end.
struct Record {
  std::vector<std::optional<Part>> pool;
  std::vector<std::optional<Part>> gradients;
  at::Tensor full;
  std::string refused;
};

Record rank_run(const Chain& chain, World& world, const std::vector<Tensors>& parts, bool gradients, bool backward) {
  const auto mesh = std::make_shared<const DeviceMesh>(init_device_mesh(world, at::kCPU, Mesh::make(chain.mesh)));
  const DecideGuard decide({.cost = CostModel(chain.cost), .nth = chain.nth});
  const ImplicitReplication indices_are_plain;
  Record record;
  Run run;
  try {
    for (std::size_t i = 0; i < parts.size(); ++i) {
      run.leaves.push_back(wrap(parts[i][static_cast<std::size_t>(world.rank())].clone(), chain.specs[i], mesh));
    }
    start_pool(run, gradients);
    for (const ChainStep& step : chain.steps) run.pool.push_back(step.run(run.pool));
    if (backward) loss_of(run).backward();
    for (const at::Tensor& tensor : run.pool) record.pool.push_back(part_of(tensor));
    for (const at::Tensor& leaf : run.leaves) {
      record.gradients.push_back(leaf.grad().defined() ? part_of(leaf.grad()) : std::nullopt);
    }
    record.full = DTensor(run.pool.back()).full_tensor().detach().clone();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kInvalidArgument && error.kind() != ErrorKind::kNotSupported) throw;
    record.refused = error.what();
  }
  return record;
}

std::string wrong_whole(const std::vector<Part>& parts, const at::Tensor& expected) {
  Tensors locals;
  for (const Part& part : parts) {
    if (!(part.spec == parts[0].spec)) return "has another spec on another rank: " + part.spec.to_string();
    locals.push_back(part.local);
  }
  const auto whole = whole_of(parts[0].spec, locals);
  if (!whole) return whole.reason();
  const std::string text = difference(*whole, expected);
  return text.empty() ? text : text + " (" + parts[0].spec.to_string() + ")";
}

std::string compare(const std::vector<Record>& records, const Run& plain) {
  const auto on_all = [&](auto part_at) {
    std::vector<Part> parts;
    for (const Record& record : records) parts.push_back(part_at(record));
    return parts;
  };
  for (std::size_t i = 0; i < plain.pool.size(); ++i) {
    bool readable = true;
    for (const Record& record : records) readable = readable && record.pool[i];
    if (!readable) continue;
    const std::string wrong =
        wrong_whole(on_all([&](const Record& record) { return *record.pool[i]; }), plain.pool[i].detach());
    if (!wrong.empty()) return "t" + std::to_string(i) + " " + wrong;
  }
  for (const Record& record : records) {
    const std::string wrong = difference(record.full, plain.pool.back().detach());
    if (!wrong.empty()) return "full_tensor() " + wrong;
    if (!same_bits(record.full, records[0].full)) return "full_tensor() is not the same on all ranks";
  }
  for (std::size_t i = 0; i < plain.leaves.size() && plain.backward; ++i) {
    const at::Tensor& expected = plain.leaves[i].grad();
    const std::string what = "the gradient of t" + std::to_string(i) + " ";
    for (const Record& record : records) {
      if (record.gradients[i].has_value() != expected.defined()) return what + "is there, or is not";
    }
    if (!expected.defined()) continue;
    const std::string wrong = wrong_whole(on_all([&](const Record& record) { return *record.gradients[i]; }), expected);
    if (!wrong.empty()) return what + wrong;
  }
  return {};
}

}  // namespace

std::string Chain::to_string() const {
  std::ostringstream out;
  out << "seed " << seed << (nth > 0 ? ", way " + std::to_string(nth) : std::string()) << '\n';
  for (std::size_t i = 0; i < specs.size(); ++i) out << "  t" << i << " = " << specs[i].to_string() << '\n';
  for (std::size_t i = 0; i < steps.size(); ++i) {
    out << "  t" << specs.size() + i << " = " << steps[i].text << (steps[i].kinked ? "    (no gradients)" : "") << '\n';
  }
  return out.str();
}

Chain make_chain(std::uint64_t seed) {
  Random random(seed * 2654435761u + 12345);
  static const std::vector<Dims> meshes = {{2}, {3}, {4}, {2, 2}, {2, 2}, {1, 2}};
  static const std::vector<Dims> shapes = {{5, 4}, {4, 6}, {6, 4}, {3}, {4}, {2, 3, 4},
                                           {1, 4}, {5, 1}, {4, 4}, {},  {6}};
  Chain chain;
  chain.seed = seed;
  chain.mesh = random.pick(meshes);
  const Mesh mesh = Mesh::make(chain.mesh);
  chain.special = random.chance(8);
  const std::int64_t inputs = 1 + random.below(3);
  for (std::int64_t i = 0; i < inputs; ++i) {
    Dims shape = random.pick(shapes);
    if (i > 0 && random.chance(2)) shape = chain.specs[0].meta().shape();
    if (random.chance(20) && !shape.empty()) shape[0] = 0;
    chain.inputs.push_back(random_values(random, shape, chain.special));
    chain.specs.push_back(random_spec(random, mesh, shape, chain.special));
  }
  chain.cost.link.message_ps = 1 + random.below(20'000'000);
  chain.cost.link.kib_ps = 1 + random.below(20'000'000);
  chain.cost.step_ps = 1 + random.below(20'000'000);
  chain.cost.local_kib_ps = 1 + random.below(20'000'000);
  if (random.chance(3)) chain.nth = 1 + random.below(5);

  Run run;
  for (const at::Tensor& input : chain.inputs) run.leaves.push_back(input.clone());
  start_pool(run, true);
  const std::int64_t length = 3 + random.below(4);
  for (int tries = 0; tries < 200 && static_cast<std::int64_t>(chain.steps.size()) < length; ++tries) {
    ChainStep step = random_step(random, run.pool);
    if (chain.special && step.multiplies) continue;
    // On copies: a step that fails must not have written anything.
    Tensors copies;
    for (const at::Tensor& tensor : run.pool) copies.push_back(tensor.detach().clone());
    try {
      if (step.run(copies).numel() > 2000) continue;
      run.pool.push_back(step.run(run.pool));
      chain.steps.push_back(std::move(step));
    } catch (const c10::Error&) {
      continue;  // the shapes do not fit
    }
  }
  return chain;
}

ChainResult play(const Chain& chain) {
  ChainResult result;
  const Run plain = plain_run(chain);
  std::vector<Tensors> parts;
  for (std::size_t i = 0; i < chain.inputs.size(); ++i) {
    parts.push_back(parts_of(chain.inputs[i], chain.specs[i], chain.seed + i));
  }
  const std::int64_t size = Mesh::make(chain.mesh).size();
  std::vector<Record> records(static_cast<std::size_t>(size));
  const bool gradients = !is_kinked(chain);
  try {
    run_ranks(size,
              [&](World& world) {
                records[static_cast<std::size_t>(world.rank())] =
                    rank_run(chain, world, parts, gradients, plain.backward);
              },
              {.timeout = std::chrono::seconds(30)});
  } catch (const std::exception& error) {
    result.wrong = error.what();
    return result;
  }
  for (const Record& record : records) {
    if (record.refused != records[0].refused) {
      result.wrong = "ranks do not refuse alike: " + records[0].refused + " and " + record.refused;
      return result;
    }
  }
  result.refused = records[0].refused;
  result.backward = plain.backward;
  if (result.refused.empty()) result.wrong = compare(records, plain);
  return result;
}

}  // namespace dtensor::testing
