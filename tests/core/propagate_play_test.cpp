#include <gtest/gtest.h>

#include "tests/core/propagate_play.h"

// Every row against brute force: any specs of the operands, every candidate, every rank.
namespace dtensor {
namespace {

using namespace calls;
using namespace play_rules;

Dims broadcast_shape(const Dims& a, const Dims& b) {
  Dims shape = a.size() >= b.size() ? a : b;
  const Dims& shorter = a.size() >= b.size() ? b : a;
  for (std::size_t d = 0; d < shorter.size(); ++d) {
    std::int64_t& size = shape[shape.size() - shorter.size() + d];
    if (size == 1) size = shorter[d];
  }
  return shape;
}

Kernel unary(double (*fn)(double)) {
  return [fn](const LocalCall& call) {
    const Array& x = call.operands[0];
    return std::vector{make_array(x.shape, [&](const Dims& at) { return fn(x.at(at)); })};
  };
}

Kernel binary(double (*fn)(double, double)) {
  return [fn](const LocalCall& call) {
    const Array& a = call.operands[0];
    const Array& b = call.operands[1];
    return std::vector{
        make_array(broadcast_shape(a.shape, b.shape), [&](const Dims& at) { return fn(a.at(at), b.at(at)); })};
  };
}

Kernel scalar(double (*fn)(double, double)) {
  return [fn](const LocalCall& call) {
    const Array& x = call.operands[0];
    return std::vector{make_array(x.shape, [&](const Dims& at) { return fn(x.at(at), call.args[1].as_double()); })};
  };
}

Array matmul(const Array& x, const Array& w) {
  return make_array({x.shape[0], w.shape[1]}, [&](const Dims& at) {
    double sum = 0;
    for (std::int64_t k = 0; k < x.shape[1]; ++k) sum += x.at({at[0], k}) * w.at({k, at[1]});
    return sum;
  });
}

// Over dims() of argument 1, or all of them; keepdim in argument 2.
Array reduced(const LocalCall& call, ReduceOp op, bool mean = false) {
  const Array& x = call.operands[0];
  const auto ndim = static_cast<std::int64_t>(x.shape.size());
  InlineVec<bool, 8> gone(x.shape.size(), call.args[1].as_ints().empty());
  for (std::int64_t d : call.args[1].as_ints()) gone[d < 0 ? d + ndim : d] = true;
  const bool keep = call.args.size() > 2 && call.args[2].as_bool();
  Dims kept;  // shape with size 1 where reduced
  Dims shape;
  double count = 1;
  for (std::size_t d = 0; d < x.shape.size(); ++d) {
    kept.push_back(gone[d] ? 1 : x.shape[d]);
    if (!gone[d] || keep) shape.push_back(kept.back());
    if (gone[d]) count *= static_cast<double>(x.shape[d]);
  }
  Array result = Array::filled(kept, identity_of(op));
  for_each_index(x.shape, [&](const Dims& at) {
    std::int64_t flat = 0;
    for (std::size_t d = 0; d < kept.size(); ++d) flat = flat * kept[d] + (gone[d] ? 0 : at[d]);
    double& value = result.data[static_cast<std::size_t>(flat)];
    value = combine(op, value, x.at(at));
  });
  for (double& value : result.data) value /= mean ? count : 1;
  result.shape = shape;
  return result;
}

Array sliced(const Array& x, std::int64_t dim, std::int64_t start, std::int64_t end, std::int64_t step) {
  Dims shape = x.shape;
  shape[dim] = std::max<std::int64_t>(0, (end - start + step - 1) / step);
  return make_array(shape, [&](Dims at) {
    at[dim] = start + at[dim] * step;
    return x.at(at);
  });
}

std::vector<Array> split_by(const Array& x, const Dims& sizes, std::int64_t dim) {
  std::vector<Array> parts;
  std::int64_t start = 0;
  for (std::int64_t size : sizes) {
    parts.push_back(sliced(x, dim, start, start + size, 1));
    start += size;
  }
  return parts;
}

// Without broadcasting; nothing (0) where the index lies outside, as happens with a wrong row.
double* strict_find(Array& x, const Dims& index) {
  std::int64_t flat = 0;
  for (std::size_t d = 0; d < x.shape.size(); ++d) {
    if (index[d] >= x.shape[d]) return nullptr;
    flat = flat * x.shape[d] + index[d];
  }
  return &x.data[static_cast<std::size_t>(flat)];
}
double strict_at(Array x, const Dims& index) {
  const double* found = strict_find(x, index);
  return found ? *found : 0;
}

Kernels make_kernels() {
  Kernels k;
  k["aten::add.Tensor"] = k["aten::add_.Tensor"] = binary([](double a, double b) { return a + b; });
  k["aten::mul.Tensor"] = k["aten::mul_.Tensor"] = binary([](double a, double b) { return a * b; });
  k["aten::div.Tensor"] = binary([](double a, double b) { return a / (b * b + 1); });
  k["aten::maximum"] = binary([](double a, double b) { return std::max(a, b); });
  k["aten::copy_"] = [](const LocalCall& call) {
    return std::vector{make_array(call.operands[0].shape, [&](const Dims& at) { return call.operands[1].at(at); })};
  };
  k["aten::relu"] = unary([](double x) { return std::max(x, 0.0); });
  k["aten::neg"] = unary([](double x) { return -x; });
  k["aten::square"] = unary([](double x) { return x * x; });
  k["aten::clone"] = unary([](double x) { return x; });
  k["aten::add.Scalar"] = scalar([](double x, double c) { return x + c; });
  k["aten::mul.Scalar"] = scalar([](double x, double c) { return x * c; });
  k["aten::fill_.Scalar"] = scalar([](double, double c) { return c; });
  k["aten::where.self"] = [](const LocalCall& call) {
    const auto& o = call.operands;
    return std::vector{make_array(broadcast_shape(broadcast_shape(o[0].shape, o[1].shape), o[2].shape),
                                  [&](const Dims& at) { return o[0].at(at) > 0 ? o[1].at(at) : o[2].at(at); })};
  };
  k["aten::mm"] = [](const LocalCall& call) { return std::vector{matmul(call.operands[0], call.operands[1])}; };
  k["aten::addmm"] = [](const LocalCall& call) {
    const Array product = matmul(call.operands[1], call.operands[2]);
    return std::vector{
        make_array(product.shape, [&](const Dims& at) { return call.operands[0].at(at) + product.at(at); })};
  };
  k["aten::dot"] = [](const LocalCall& call) {
    Array x = call.operands[0];
    Array y = call.operands[1];
    x.shape = {1, x.shape[0]};
    y.shape = {y.shape[0], 1};
    Array result = matmul(x, y);
    result.shape = {};
    return std::vector{result};
  };
  k["aten::sum.dim_IntList"] = [](const LocalCall& call) { return std::vector{reduced(call, ReduceOp::kSum)}; };
  k["aten::mean.dim"] = [](const LocalCall& call) { return std::vector{reduced(call, ReduceOp::kSum, true)}; };
  k["aten::amax"] = [](const LocalCall& call) {
    const Array result = reduced(call, ReduceOp::kMax);
    const bool throws = !result.data.empty() && call.operands[0].data.empty();
    return std::vector{throws ? Array{{-1}, {}} : result};
  };
  k["aten::mse_loss"] = [](const LocalCall& call) {
    LocalCall squares{binary([](double a, double b) { return (a - b) * (a - b); })(call),
                      {{}, StaticArg(), flag(false)}};
    const std::int64_t reduction = call.args[2].as_int();
    return reduction == 0 ? squares.operands : std::vector{reduced(squares, ReduceOp::kSum, reduction == 1)};
  };
  k["aten::cumsum"] = [](const LocalCall& call) {
    const Array& x = call.operands[0];
    const std::int64_t dim = call.args[1].as_int();
    return std::vector{make_array(x.shape, [&](Dims at) {
      double sum = x.at(at);
      while (at[dim]-- > 0) sum += x.at(at);
      return sum;
    })};
  };
  k["aten::embedding"] = [](const LocalCall& call) {
    const Array& w = call.operands[0];
    const Array& ids = call.operands[1];
    Dims shape = ids.shape;
    shape.push_back(w.shape[1]);
    return std::vector{make_array(shape, [&](const Dims& at) {
      const double id = ids.at(Dims(at.begin(), at.end() - 1));
      return w.at({static_cast<std::int64_t>(std::abs(id)) % w.shape[0], at.back()});
    })};
  };
  k["aten::cat"] = [](const LocalCall& call) {
    const Array& a = call.operands[0];
    const Array& b = call.operands[1];
    const std::int64_t dim = call.args[1].as_int();
    Dims shape = a.shape;
    shape[dim] += b.shape[dim];
    return std::vector{make_array(shape, [&](Dims at) {
      if (at[dim] < a.shape[dim]) return a.at(at);
      at[dim] -= a.shape[dim];
      return b.at(at);
    })};
  };
  k["aten::gather"] = [](const LocalCall& call) {
    const std::int64_t dim = call.args[1].as_int();
    return std::vector{make_array(call.operands[1].shape, [&](Dims at) {
      const double id = call.operands[1].at(at);
      at[dim] = static_cast<std::int64_t>(std::abs(id)) % std::max<std::int64_t>(1, call.operands[0].shape[dim]);
      return strict_at(call.operands[0], at);
    })};
  };
  k["aten::scatter_add"] = [](const LocalCall& call) {
    const std::int64_t dim = call.args[1].as_int();
    Array result = call.operands[0];
    for_each_index(call.operands[1].shape, [&](Dims at) {
      const double value = strict_at(call.operands[2], at);
      at[dim] = static_cast<std::int64_t>(std::abs(call.operands[1].at(at))) % result.shape[dim];
      if (double* target = strict_find(result, at)) *target += value;
    });
    return std::vector{result};
  };
  k["aten::select_backward"] = [](const LocalCall& call) {
    const std::int64_t dim = call.args[2].as_int();
    return std::vector{make_array(call.args[1].as_ints(), [&](Dims at) {
      if (at[dim] != call.args[3].as_int()) return 0.0;
      at.erase(static_cast<std::size_t>(dim));
      return call.operands[0].at(at);
    })};
  };
  k["aten::t"] = [](const LocalCall& call) {
    const Array& x = call.operands[0];
    return std::vector{make_array({x.shape[1], x.shape[0]}, [&](const Dims& at) { return x.at({at[1], at[0]}); })};
  };
  k["aten::view"] = k["aten::_unsafe_view"] = [](const LocalCall& call) {
    return std::vector{Array{call.args[1].as_ints(), call.operands[0].data}};
  };
  k["aten::squeeze"] = [](const LocalCall& call) {
    Dims shape;
    for (std::int64_t size : call.operands[0].shape) {
      if (size != 1) shape.push_back(size);
    }
    return std::vector{Array{shape, call.operands[0].data}};
  };
  k["aten::expand"] = [](const LocalCall& call) {
    return std::vector{make_array(call.args[1].as_ints(), [&](const Dims& at) { return call.operands[0].at(at); })};
  };
  k["aten::select.int"] = [](const LocalCall& call) {
    const std::int64_t dim = call.args[1].as_int();
    Dims shape = call.operands[0].shape;
    shape.erase(static_cast<std::size_t>(dim));
    return std::vector{make_array(shape, [&](Dims at) {
      at.insert(static_cast<std::size_t>(dim), call.args[2].as_int());
      return call.operands[0].at(at);
    })};
  };
  k["aten::slice.Tensor"] = [](const LocalCall& call) {
    const auto& a = call.args;
    return std::vector{sliced(call.operands[0], a[1].as_int(), a[2].as_int(), a[3].as_int(), a[4].as_int())};
  };
  k["aten::split_with_sizes"] = [](const LocalCall& call) {
    return split_by(call.operands[0], call.args[1].as_ints(), call.args[2].as_int());
  };
  return k;
}

const Kernels& kernels() {
  static const Kernels all = make_kernels();
  return all;
}

// One shape of call: the operands' shapes (empty: a number) and the static arguments.
struct Shape {
  std::string name;
  std::vector<std::optional<Dims>> operands;
  std::vector<StaticArg> statics;
  bool list = false;  // the operands are one list
  // A static argument that stands between the tensors, after so many of them.
  std::size_t between_after = 0;
  StaticArg between = {};
};

std::vector<Shape> shapes() {
  const StaticArg none;
  std::vector<Shape> result;
  const std::vector<Dims> some = {{5, 4}, {3, 7}, {1, 6}, {2, 1}, {0, 3}};
  for (const char* name : {"aten::add.Tensor", "aten::mul.Tensor", "aten::div.Tensor", "aten::maximum"}) {
    for (const Dims& shape : some) result.push_back({name, {shape, shape}, {num(1)}});
    result.push_back({name, {{{5, 4}}, {{4}}}, {num(1)}});
    result.push_back({name, {{{1, 4}}, {{5, 1}}}, {num(1)}});
    result.push_back({name, {{{5, 4}}, {Dims{}}}, {num(1)}});
    result.push_back({name, {{{5, 4}}, std::nullopt}, {num(1)}});
  }
  for (const char* name : {"aten::add_.Tensor", "aten::mul_.Tensor", "aten::copy_"}) {
    result.push_back({name, {{{5, 4}}, {{5, 4}}}, {num(1)}});
    result.push_back({name, {{{5, 4}}, {{4}}}, {num(1)}});
  }
  for (const char* name : {"aten::relu", "aten::neg", "aten::square", "aten::clone"}) {
    for (const Dims& shape : some) result.push_back({name, {shape}, {}});
  }
  for (double c : {-2.0, 0.0, 3.0}) {
    for (const char* name : {"aten::add.Scalar", "aten::mul.Scalar", "aten::fill_.Scalar"}) {
      result.push_back({name, {{{5, 4}}}, {num(c)}});
    }
  }
  result.push_back({"aten::where.self", {{{5, 4}}, {{5, 1}}, {{5, 4}}}, {}});
  for (const Dims& mkn : {Dims{5, 4, 3}, Dims{2, 7, 5}, Dims{1, 3, 2}, Dims{3, 1, 4}}) {
    const Dims x = {mkn[0], mkn[1]};
    const Dims w = {mkn[1], mkn[2]};
    result.push_back({"aten::mm", {x, w}, {}});
    result.push_back({"aten::addmm", {Dims{mkn[2]}, x, w}, {}});
    result.push_back({"aten::addmm", {Dims{mkn[0], 1}, x, w}, {}});
  }
  result.push_back({"aten::dot", {{{7}}, {{7}}}, {}});
  for (const char* name : {"aten::sum.dim_IntList", "aten::mean.dim", "aten::amax"}) {
    for (const Dims& dims : {Dims{0}, Dims{-1}, Dims{0, 1}, Dims{}}) {
      for (const bool keep : {false, true}) result.push_back({name, {{{5, 4}}}, {ints(dims), flag(keep), none}});
    }
  }
  for (std::int64_t reduction : {0, 1, 2}) result.push_back({"aten::mse_loss", {{{5, 4}}, {{5, 4}}}, {i(reduction)}});
  result.push_back({"aten::cumsum", {{{5, 4}}}, {i(1)}});
  result.push_back({"aten::embedding", {{{5, 4}}, {{3, 2}}}, {}});
  for (const Dims& index : {Dims{5, 3}, Dims{1, 3}, Dims{2, 4}}) {
    result.push_back({"aten::gather", {{{5, 4}}, index}, {}, false, 1, i(1)});
    result.push_back({"aten::scatter_add", {{{5, 4}}, index, index}, {}, false, 1, i(1)});
  }
  result.push_back({"aten::select_backward", {{{5}}}, {ints({4, 5}), i(0), i(2)}});
  result.push_back({"aten::cat", {{{5, 4}}, {{2, 4}}}, {i(0)}, true});
  result.push_back({"aten::t", {{{5, 4}}}, {}});
  for (const char* name : {"aten::view", "aten::_unsafe_view"}) {
    for (const Dims& to : {Dims{24}, Dims{2, 12}, Dims{4, 6}, Dims{2, 3, 2, 2}}) {
      result.push_back({name, {{{6, 4}}}, {ints(to)}});
    }
  }
  result.push_back({"aten::squeeze", {{{5, 1, 2}}}, {}});
  result.push_back({"aten::expand", {{{5, 1}}}, {ints({3, 5, 4})}});
  for (std::int64_t dim : {0, 1}) {
    result.push_back({"aten::select.int", {{{5, 4}}}, {i(dim), i(2)}});
    result.push_back({"aten::slice.Tensor", {{{6, 4}}}, {i(dim), i(0), i(2), i(1)}});
    result.push_back({"aten::slice.Tensor", {{{6, 4}}}, {i(dim), i(1), i(4), i(2)}});
    result.push_back({"aten::split_with_sizes", {{{6, 4}}}, {ints({2, 6 - 2 * dim - 2}), i(dim)}});
  }
  return result;
}

// One dim of a spec as two factors with the cuts on the minor one, or with a virtual cut before them, where it has any.
Spec refactored(sweep::Random& random, const Spec& spec) {
  DimLayouts dims = spec.dims();
  for (DimLayout& dim : dims) {
    if (dim.size() > 1 || dim[0].cuts.empty() || dim[0].size < 2) continue;
    std::int64_t major = 2 + random.below(dim[0].size - 1);
    while (dim[0].size % major != 0) --major;
    if (random.chance(2))
      dim = {Factor{major, {}}, Factor{dim[0].size / major, dim[0].cuts}};
    else
      dim[0].cuts.insert(0, Cut{Cut::kVirtual, major});
    break;
  }
  return *Spec::from_dims(spec.meta(), spec.mesh(), dims, spec.partials());
}

// A random spec of an operand: shards in any order, factored dims, virtual cuts, and one kind of Partial.
Spec random_spec(sweep::Random& random, const Mesh& mesh, const Dims& shape) {
  static const std::vector<ReduceOp> kinds = {ReduceOp::kSum, ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax,
                                              ReduceOp::kMin};
  sweep::Case one = sweep::random_case(random, mesh, shape);
  const ReduceOp kind = random.pick(kinds);
  for (Placement& placement : one.placements) {
    if (placement.is_partial()) placement = Partial(kind);
  }
  const Spec spec = one.spec(DType::kF64);
  return random.chance(3) ? refactored(random, spec) : spec;
}

Array random_array(sweep::Random& random, const Dims& shape) {
  return make_array(shape, [&](const Dims&) { return static_cast<double>(random.below(11)) - 5; });
}

struct Played {
  OpCall call;
  std::vector<Array> operands;
};

Played make_call(sweep::Random& random, const Shape& shape, const Mesh& mesh) {
  Played played{{shape.name, {}, {}, {}}, {}};
  for (const auto& operand : shape.operands) {
    const std::size_t given = played.call.operands.size();
    if (given > 0 && given == shape.between_after) played.call.args.push_back(ArgRef::value(shape.between));
    if (!shape.list) played.call.args.push_back(ArgRef::tensors(given));
    played.operands.push_back(random_array(random, operand.value_or(Dims{})));
    played.call.operands.push_back(operand ? std::optional(random_spec(random, mesh, *operand)) : std::nullopt);
  }
  if (shape.list) played.call.args.push_back(ArgRef::tensors(0, played.call.operands.size()));
  for (const StaticArg& arg : shape.statics) played.call.args.push_back(ArgRef::value(arg));
  const auto results = kernels().at(shape.name)(whole_call(played.call, played.operands));
  for (const Array& result : results) played.call.outputs.emplace_back(TensorMeta(result.shape, DType::kF64));
  return played;
}

const std::vector<Dims> kMeshes = {{2}, {3}, {2, 2}, {3, 2}, {2, 1, 2}};

TEST(PropagatePlay, EveryCandidateGivesWhatTheWholeGives) {
  sweep::Random random(20261115);
  std::int64_t decisions = 0;
  std::int64_t refused = 0;
  for (const Shape& shape : shapes()) {
    const auto found = find_rule(shape.name);
    ASSERT_TRUE(found) << shape.name;
    for (const Dims& mesh_shape : kMeshes) {
      for (std::int64_t round = 0; round < sweep::rounds(20); ++round) {
        const Played played = make_call(random, shape, Mesh::make(mesh_shape));
        const auto all = candidates(*found->rule, played.call);
        if (!all) {
          ASSERT_TRUE(shape.name == "aten::view" || found->in_place) << shape.name << ": " << all.reason();
          ++refused;
          continue;
        }
        const auto chosen = decide(*found->rule, played.call);
        ASSERT_TRUE(chosen);
        ASSERT_EQ(shown(played.call, chosen), shown(played.call, all->front().decision));
        for (const Candidate& candidate : *all) {
          const auto wrong = mismatch(played.call, candidate.decision, played.operands, kernels(), random);
          ASSERT_FALSE(wrong) << shape.name << ": " << shown(played.call, candidate.decision) << ": " << *wrong;
          ++decisions;
        }
      }
    }
  }
  EXPECT_GT(decisions, sweep::rounds(20) * 2000);
  EXPECT_GT(refused, 0);
}

bool caught(const RuleText& wrong) {
  sweep::Random random(7);
  const OpRule rule = parse_rule(wrong);
  for (const Shape& shape : shapes()) {
    if (shape.name != wrong.name) continue;
    for (std::int64_t round = 0; round < 100; ++round) {
      const Played played = make_call(random, shape, Mesh::make(kMeshes[static_cast<std::size_t>(round) % 5]));
      const auto all = candidates(rule, played.call);
      if (!all) continue;
      for (const Candidate& candidate : *all) {
        if (mismatch(played.call, candidate.decision, played.operands, kernels(), random)) return true;
      }
    }
  }
  return false;
}

// The check above is worth something: rows that are wrong do not pass it.
TEST(PropagatePlay, WrongRowsAreCaught) {
  for (const RuleText& wrong : std::vector<RuleText>{
           {"aten::mul.Tensor", "...,...->...", "linear(0,1)"},
           {"aten::add.Tensor", "...,...->...", "linear(0)"},
           {"aten::add.Scalar", "...->...", "linear(0)"},
           {"aten::mul.Scalar", "...->...", "up(0)"},
           {"aten::relu", "...->...", "linear(0)"},
           {"aten::neg", "...->...", "up(0)"},
           {"aten::square", "...->...", "up(0)"},
           {"aten::maximum", "...,...->...", "linear(0,1)"},
           {"aten::div.Tensor", "...,...->...", "linear(1)"},
           {"aten::where.self", "...,...,...->...", "same(1)"},
           {"aten::mm", "mk,kn->mn", "linear(0,1)"},
           {"aten::mm", "mk,ln->mn", ""},
           {"aten::addmm", "mn,mk,kn->mn", ""},
           {"aten::sum.dim_IntList", "...->~", "dims(1) keepdim(2) reduce(max)"},
           {"aten::mean.dim", "...->~", "dims(1) keepdim(2) reduce(sum)"},
           {"aten::amax", "...->~", "dims(1) keepdim(2) reduce(max) linear(0)"},
           {"aten::mse_loss", "...,...->~", "reduction(2:given)"},
           {"aten::cumsum", "...->...", ""},
           {"aten::embedding", "vd,...->...d", ""},
           {"aten::gather", "...,...->...", ""},
           {"aten::scatter_add", "...,...,...->...", "dims(1)"},
       }) {
    EXPECT_TRUE(caught(wrong)) << wrong.name << " " << wrong.pattern << " " << wrong.words;
  }
}

}  // namespace
}  // namespace dtensor
