#include <gtest/gtest.h>

#include "tests/core/propagate_kernels.h"

// Every row against brute force: any specs of the operands, every candidate, every rank.
namespace dtensor {
namespace {

using namespace calls;
using namespace play_rules;

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
  for (const char* name : {"aten::minimum", "aten::sub.Tensor", "aten::gt.Tensor", "aten::threshold_backward"}) {
    result.push_back({name, {{{5, 4}}, {{5, 4}}}, {num(1)}});
  }
  result.push_back({"aten::masked_fill.Scalar", {{{5, 4}}, {{5, 1}}}, {num(2)}});
  for (const char* name : {"aten::addcmul", "aten::addcdiv", "aten::lerp.Tensor"}) {
    result.push_back({name, {{{5, 4}}, {{5, 4}}, {{1, 4}}}, {}});
  }
  result.push_back({"aten::where.self", {{{5, 4}}, {{5, 1}}, {{5, 4}}}, {}});
  for (const Dims& mkn : {Dims{5, 4, 3}, Dims{2, 7, 5}, Dims{1, 3, 2}, Dims{3, 1, 4}}) {
    const Dims x = {mkn[0], mkn[1]};
    const Dims w = {mkn[1], mkn[2]};
    result.push_back({"aten::mm", {x, w}, {}});
    result.push_back({"aten::addmm", {Dims{mkn[2]}, x, w}, {}});
    result.push_back({"aten::addmm", {Dims{mkn[0], 1}, x, w}, {}});
  }
  result.push_back({"aten::mv", {{{5, 4}}, {{4}}}, {}});
  result.push_back({"aten::bmm", {{{2, 3, 4}}, {{2, 4, 3}}}, {}});
  result.push_back({"aten::linear", {{{2, 3, 4}}, {{5, 4}}, {{5}}}, {}});
  result.push_back({"aten::dot", {{{7}}, {{7}}}, {}});
  for (const char* name : {"aten::sum.dim_IntList", "aten::mean.dim", "aten::amax", "aten::amin"}) {
    for (const Dims& dims : {Dims{0}, Dims{-1}, Dims{0, 1}, Dims{}}) {
      for (const bool keep : {false, true}) result.push_back({name, {{{5, 4}}}, {ints(dims), flag(keep), none}});
    }
  }
  result.push_back({"aten::prod.dim_int", {{{5, 4}}}, {i(1), flag(false), none}});
  result.push_back({"aten::max.dim", {{{5, 4}}}, {i(0), flag(true)}});
  for (std::int64_t reduction : {0, 1, 2}) {
    result.push_back({"aten::nll_loss_forward", {{{5, 4}}, {{5}}, {{4}}}, {i(reduction)}});
    const Dims grad = reduction == 0 ? Dims{5, 4} : Dims{};
    result.push_back({"aten::mse_loss_backward", {grad, {{5, 4}}, {{5, 4}}}, {i(reduction)}});
  }
  result.push_back({"aten::native_layer_norm_backward",
                    {{{3, 5, 4}}, {{3, 5, 4}}, {{3, 5, 1}}, {{3, 5, 1}}, {{4}}, {{4}}},
                    {ints({1, 1, 1})},
                    false,
                    2,
                    ints({4})});
  for (std::int64_t reduction : {0, 1, 2}) result.push_back({"aten::mse_loss", {{{5, 4}}, {{5, 4}}}, {i(reduction)}});
  result.push_back({"aten::cumsum", {{{5, 4}}}, {i(1)}});
  result.push_back({"aten::embedding", {{{5, 4}}, {{3, 2}}}, {}});
  for (const Dims& index : {Dims{5, 3}, Dims{1, 3}, Dims{2, 4}}) {
    result.push_back({"aten::gather", {{{5, 4}}, index}, {}, false, 1, i(1)});
    result.push_back({"aten::scatter_add", {{{5, 4}}, index, index}, {}, false, 1, i(1)});
  }
  result.push_back({"aten::embedding_dense_backward", {{{3, 2, 4}}, {{3, 2}}}, {i(5), i(-1), flag(false)}});
  result.push_back({"aten::index_select", {{{5, 4}}, {{3}}}, {}, false, 1, i(1)});
  result.push_back({"aten::stack", {{{5, 4}}, {{5, 4}}}, {i(1)}, true});
  result.push_back({"aten::slice_backward", {{{5, 2}}}, {ints({5, 6}), i(1), i(1), i(3), i(1)}});
  result.push_back({"aten::select_backward", {{{5}}}, {ints({4, 5}), i(0), i(2)}});
  result.push_back({"aten::cat", {{{5, 4}}, {{2, 4}}}, {i(0)}, true});
  for (const bool transposed : {false, true}) {
    const std::vector<std::optional<Dims>> operands = {{{5, 4, 6}}, transposed ? Dims{4, 2, 3} : Dims{2, 4, 3}, {{2}}};
    const Dims one = {1};
    result.push_back(
        {"aten::convolution", operands, {ints(one), ints({0}), ints(one), flag(transposed), ints({0}), i(1)}});
  }
  result.push_back({"aten::convolution",
                    {{{3, 4, 5}}, {{2, 2, 3}}, {{2}}},
                    {ints({1}), ints({0}), ints({1}), flag(false), ints({0}), i(2)}});
  for (const Dims& pads : {Dims{1, 2}, Dims{0, 0, 1, 0}, Dims{1, -1}}) {
    result.push_back({"aten::constant_pad_nd", {{{5, 4}}}, {ints(pads), num(7)}});
  }
  for (const Dims& repeats : {Dims{1, 3}, Dims{2, 1, 1}, Dims{2, 2}}) {
    result.push_back({"aten::repeat", {{{5, 4}}}, {ints(repeats)}});
  }
  result.push_back({"aten::native_group_norm", {{{5, 2, 3}}, {{2}}, {{2}}}, {i(5), i(2), i(3), i(1), num(0)}});
  result.push_back({"aten::diagonal", {{{5, 4, 3}}}, {i(0), i(0), i(2)}});
  result.push_back({"aten::unfold", {{{5, 7}}}, {i(1), i(3), i(2)}});
  result.push_back({"aten::permute", {{{2, 3, 4}}}, {ints({2, 0, 1})}});
  result.push_back({"aten::_reshape_alias", {{{6, 4}}}, {ints({3, 8}), ints({8, 1})}});
  result.push_back({"aten::t", {{{5, 4}}}, {}});
  for (const char* name : {"aten::view", "aten::_unsafe_view"}) {
    for (const Dims& to : {Dims{24}, Dims{2, 12}, Dims{4, 6}, Dims{2, 3, 2, 2}}) {
      result.push_back({name, {{{6, 4}}}, {ints(to)}});
    }
  }
  result.push_back({"aten::squeeze", {{{5, 1, 2}}}, {}});
  result.push_back({"aten::expand", {{{5, 1}}}, {ints({3, 5, 4})}});
  for (std::int64_t dim : {0, 1}) {
    result.push_back({"aten::unbind.int", {{{3, 4}}}, {i(dim)}});
    result.push_back({"aten::split.Tensor", {{{6, 4}}}, {i(2), i(dim)}});
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
      for (std::int64_t round = 0; round < sweep::rounds(12); ++round) {
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
          if (!candidate.decision.local.algorithm.empty()) continue;  // not by the kernels here: see tests/runtime
          const auto wrong = mismatch(played.call, candidate.decision, played.operands, kernels(), random);
          ASSERT_FALSE(wrong) << shape.name << ": " << shown(played.call, candidate.decision) << ": " << *wrong;
          ++decisions;
        }
      }
    }
  }
  EXPECT_GT(decisions, sweep::rounds(12) * 5000);
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
           {"aten::max.dim", "...->~,~", "dims(1) keepdim(2) reduce(max)"},
           {"aten::nll_loss_forward", "...C,...,C->~,", "reduction(3:given)"},
           {"aten::native_layer_norm_backward", "...x,...x,...x,...x,x,x->...x,x,x", ""},
           {"aten::native_layer_norm_backward", "...@,...@,...@,...@,@,@->...@,@,@", "group(2) linear(1)"},
           {"aten::index_select", "...,i->...", "dims(1)"},
           {"aten::scatter_add", "...,...,...->...", "dims(1)"},
           {"aten::convolution", "ni@,oi@,+o->no@", "group(3)"},
           {"aten::convolution", "ni@,oi@,+o->no@", "group(3) only_if(6=0:io) only_if(8=1:io) skip_empty"},
           {"aten::convolution", "ni@,oi@,o->no@", "group(3) only_if(6=0:io) only_if(8=1:io)"},
           {"aten::constant_pad_nd", "...->...", ""},
           {"aten::constant_pad_nd", "...->...", "pads(1) linear(0)"},
           {"aten::native_group_norm", "nC*,C,C->nC*,nG,nG", ""},
           {"aten::repeat", "...->...", "exact linear(0) up(0) down(0)"},
       }) {
    EXPECT_TRUE(caught(wrong)) << wrong.name << " " << wrong.pattern << " " << wrong.words;
  }
}

}  // namespace
}  // namespace dtensor
