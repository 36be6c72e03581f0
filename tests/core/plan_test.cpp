// Plans: correct when played, never dearer than what a search through everything finds, and as they print.
#include "dtensor/core/plan.h"

#include <gtest/gtest.h>

#include <cmath>
#include <thread>

#include "tests/core/expect_error.h"
#include "tests/core/plan_play.h"
#include "tests/core/plan_reference.h"
#include "tests/core/sweep.h"

namespace dtensor {
namespace {

using sweep::Case;
using sweep::Random;

// Any spec: plain, re-ordered, strided or a factored view, sometimes Partial.
Spec random_spec(Random& random, const Mesh& mesh, const Dims& shape, ReduceOp op) {
  if (random.chance(4) && !shape.empty()) {
    // One strided shard, literally.
    Placements placements(static_cast<std::size_t>(mesh.ndim()), Replicate());
    const std::int64_t m = random.below(mesh.ndim());
    placements[m] = StridedShard(random.below(static_cast<std::int64_t>(shape.size())), 1 + random.below(4));
    return Spec::make({shape, DType::kI32}, mesh, placements);
  }
  Case c = sweep::random_case(random, mesh, shape);
  for (Placement& placement : c.placements) {
    if (placement.is_partial()) placement = Partial(op);
  }
  const Spec spec = c.spec(DType::kI32);
  if (!random.chance(4)) return spec;
  // Gather one mesh dim, wherever it stands: a virtual cut stays behind.
  DimLayouts dims = spec.dims();
  const std::int64_t gone = random.below(mesh.ndim());
  for (DimLayout& dim : dims) {
    for (Factor& factor : dim) {
      for (Cut& cut : factor.cuts) {
        if (cut.mesh_dim == gone && factor.size > 0) {
          cut = {Cut::kVirtual, std::min<std::int64_t>(cut.count, factor.size)};
        }
      }
    }
  }
  const auto gathered = Spec::from_dims(spec.meta(), mesh, dims, spec.partials());
  return gathered ? *gathered : spec;
}

PlanOptions random_options(Random& random) {
  CostConstants constants;
  constants.link.message_ps = random.below(3) * 1'000'000;
  constants.link.kib_ps = std::int64_t{4'096} << random.below(20);
  constants.step_ps = random.below(2) * 5'000'000;
  if (random.chance(3)) constants.levels = {{2, {1'000, 4'096}}, {4, {100'000, 8'192}}};
  return {.cost = CostModel(constants)};
}

TEST(Plan, EveryRankEndsWithItsBoxes) {
  Random random(7);
  const auto meshes = sweep::mesh_shapes(8, 3);
  const std::vector<ReduceOp> ops = {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kProduct};
  std::int64_t played = 0;
  std::map<StepKind, std::int64_t> kinds;
  for (int i = 0; i < 12'000; ++i) {
    const Mesh mesh = Mesh::make(random.pick(meshes));
    const Dims shape = sweep::random_shape(random, 3, 7);
    const ReduceOp op = random.pick(ops);
    const Spec from = random_spec(random, mesh, shape, op);
    const Spec to = random_spec(random, mesh, shape, op);
    if (why_not(from, to)) continue;
    const Plan plan = make_plan(from, to, random_options(random));
    play::check(plan);
    if (HasFailure()) return;
    for (const Step& step : plan.steps()) ++kinds[step.kind];
    ++played;
  }
  EXPECT_GT(played, 6'000);
  for (StepKind kind : {StepKind::kSlice, StepKind::kEmbed, StepKind::kAllGather, StepKind::kReduceScatter,
                        StepKind::kAllReduce, StepKind::kAllToAll, StepKind::kPermute, StepKind::kExchange}) {
    EXPECT_GT(kinds[kind], 5) << to_string(kind);
  }
}

TEST(Plan, SumAndAverageMeet) {
  Random random(11);
  for (int i = 0; i < 300; ++i) {
    const Mesh mesh = Mesh::make(random.pick(sweep::mesh_shapes(8, 3)));
    const Dims shape = sweep::random_shape(random, 2, 6);
    Case c = sweep::random_case(random, mesh, shape);
    for (Placement& placement : c.placements) {
      if (placement.is_partial() && random.chance(2)) placement = Partial(ReduceOp::kAvg);
    }
    const Spec from = c.spec();
    const Spec to = sweep::random_case(random, mesh, shape, false).spec();
    const Plan plan = make_plan(from, to, random_options(random));
    play::check(plan);
    std::int64_t divisor = 1;
    std::int64_t expected = 1;
    for (const Step& step : plan.steps()) {
      divisor *= step.divisor;
      EXPECT_EQ(step.op.value_or(ReduceOp::kSum), ReduceOp::kSum);
    }
    for (std::int64_t m = 0; m < mesh.ndim(); ++m) {
      if (from.partials()[m] == ReduceOp::kAvg) expected *= mesh.shape()[m];
    }
    EXPECT_TRUE(divisor == expected || from.meta().numel() == 0) << plan.to_string();
    if (HasFailure()) return;
  }
}

// Is some Partial of the target new? The exhaustive search knows no such move.
bool embeds(const Spec& from, const Spec& to) {
  for (std::int64_t m = 0; m < to.mesh().ndim(); ++m) {
    if (to.partials()[m] && !from.partials()[m]) return true;
  }
  return false;
}

TEST(Plan, NeverDearerThanAnExhaustiveSearch) {
  Random random(3);
  const std::vector<Dims> meshes = {{2}, {4}, {2, 2}, {2, 3}, {4, 2}, {2, 2, 2}};
  std::int64_t cheaper = 0;
  std::int64_t compared = 0;
  for (int i = 0; i < 1'500; ++i) {
    const Mesh mesh = Mesh::make(random.pick(meshes));
    const std::int64_t scale = std::int64_t{1} << (3 * random.below(5));
    const Dims shape = {12 * scale, 8 * (random.chance(3) ? 1 : scale)};
    const Spec from = sweep::random_case(random, mesh, shape).spec();
    const Spec to = sweep::random_case(random, mesh, shape, random.chance(4)).spec();
    if (why_not(from, to) || from == to || embeds(from, to)) continue;
    const PlanOptions options{.cost = random_options(random).cost, .staging = std::int64_t{1} << 50};
    const Plan plan = make_plan(from, to, options);
    const std::int64_t best = reference::cheapest(from, to, options.cost, saturating_add(plan.time(), 1));
    EXPECT_LE(plan.time(), best) << plan.to_string();
    cheaper += best > plan.time();
    ++compared;
  }
  EXPECT_GT(compared, 1'000);
  EXPECT_GT(cheaper, 300) << "flattened groups and the direct exchange should win sometimes";
}

// The balanced choice among replicas, whatever is chosen in the end: who sends how much in one exchange.
TEST(Plan, SendsAreCountedAsTheyAreSent) {
  Random random(23);
  const auto meshes = sweep::mesh_shapes(12, 3);
  std::int64_t shared = 0;
  for (int i = 0; i < 6'000; ++i) {
    const Mesh mesh = Mesh::make(random.pick(meshes));
    const Dims shape = sweep::random_shape(random, 3, 9);
    const Spec from = random_spec(random, mesh, shape, ReduceOp::kSum);
    const Spec to = random_spec(random, mesh, shape, ReduceOp::kSum);
    if (why_not(from, to) || embeds(from, to) || from == to) continue;
    Step step{StepKind::kExchange, {}, from, to};
    for (std::int64_t m = 0; m < mesh.ndim(); ++m) step.mesh_dims.push_back(m);
    const Traffic traffic = traffic_of(step);
    const std::int64_t size = element_size(from.meta().dtype());
    std::int64_t most = 0;
    std::int64_t total = 0;
    sweep::for_each_coordinate(mesh, [&](const Dims& at) {
      std::int64_t bytes = 0;
      for_each_send(step, at, [&](const Transfer& transfer) {
        const auto elements = static_cast<std::int64_t>(sweep::elements_of(transfer.box, shape).size());
        if (!transfer.self) bytes += elements * size;
      });
      most = std::max(most, bytes);
      total += bytes;
    });
    ASSERT_EQ(traffic.sent, (Volume{most, total})) << from.to_string() << " -> " << to.to_string();
    shared += traffic.sent.max != traffic.received.max;
  }
  EXPECT_GT(shared, 500);
}

// Cuts may run out of elements on the way, even where source and target are cut evenly.
TEST(Plan, PassesThroughListsThatCutTooOften) {
  const CostModel nodes({.levels = {{8, {500'000, 4'096}}}});
  const std::string tensor = "f32[64,64,64] @ 2x4x2x8 : ";
  for (const auto& [from, to] :
       std::vector<std::pair<std::string, std::string>>{{"S(1),R,S(1),S(2)", "S(0),S(2),S(2),S(2)"},
                                                        {"R,R,S(0),S(1)", "S(1),S(1),S(2),S(1)"},
                                                        {"S(2),S(2),R,R", "S(1),S(2),S(1),S(2)"},
                                                        {"S(1),R,S(2),S(0)", "S(2),S(0),S(0),S(0)"}}) {
    const Plan plan = make_plan(Spec::parse(tensor + from), Spec::parse(tensor + to), {.cost = nodes});
    EXPECT_GT(plan.time(), 0) << plan.to_string();
  }
}

TEST(Plan, MeetsTheBoundOn2x4x8) {
  const Mesh mesh = Mesh::make({2, 4, 8});
  const TensorMeta meta({65'536, 65'536}, DType::kF32);
  std::vector<Spec> specs;
  for (const Placements& placements : sweep::all_placements(3, 2)) {
    const Spec spec = Spec::make(meta, mesh, placements);
    if (!spec.has_partial()) specs.push_back(spec);
  }
  ASSERT_EQ(specs.size(), 27u);
  double ours = 0;
  double greedy = 0;
  double worst = 0;
  double worst_greedy = 0;
  int pairs = 0;
  int direct = 0;
  std::int64_t over = 0;
  for (const Spec& from : specs) {
    for (const Spec& to : specs) {
      const Plan plan = make_plan(from, to);
      if (plan.received_bound().max == 0) continue;
      const auto bound = static_cast<double>(plan.received_bound().max);
      const double ratio = static_cast<double>(plan.received().max) / bound;
      std::int64_t volume = 0;
      const auto path = reference::greedy(from, to);
      for (std::size_t i = 1; i < path.size(); ++i) {
        volume += traffic_of({StepKind::kExchange, {0, 1, 2}, path[i - 1], path[i]}).received.max;
      }
      ours += std::log(ratio);
      greedy += std::log(static_cast<double>(volume) / bound);
      worst = std::max(worst, ratio);
      worst_greedy = std::max(worst_greedy, static_cast<double>(volume) / bound);
      EXPECT_LE(plan.peak_bytes() - plan.memory_bound(), 32 << 20) << plan.to_string();
      over = std::max(over, plan.peak_bytes() - plan.memory_bound());
      direct += plan.way() == Route::Way::kDirect;
      ++pairs;
    }
  }
  std::printf(
      "%d pairs, received volume over the bound, geometric mean (worst): ours %.3f (%.2f), greedy %.2f (%.1f); "
      "%d by direct exchange; at most %lld bytes over source + target\n",
      pairs, std::exp(ours / pairs), worst, std::exp(greedy / pairs), worst_greedy, direct,
      static_cast<long long>(over));
  EXPECT_EQ(pairs, 630);
  EXPECT_LE(std::exp(ours / pairs), 1.05);
  EXPECT_GE(std::exp(greedy / pairs), 6.0);
}

TEST(Plan, PartialsComeNearTheirBound) {
  const Mesh mesh = Mesh::make({2, 4, 8});
  const TensorMeta meta({16'384, 16'384}, DType::kF32);
  double ratios = 0;
  double worst = 0;
  int pairs = 0;
  for (const Placements& source : sweep::all_placements(3, 2)) {
    const Spec from = Spec::make(meta, mesh, source);
    if (!from.has_partial()) continue;
    for (const Placements& target : sweep::all_placements(3, 2)) {
      const Spec to = Spec::make(meta, mesh, target);
      if (why_not(from, to)) continue;
      const Plan plan = make_plan(from, to);
      if (plan.received_bound().max == 0) continue;
      const double ratio = static_cast<double>(plan.received().max) / static_cast<double>(plan.received_bound().max);
      EXPECT_GE(ratio, 1.0) << plan.to_string();
      worst = std::max(worst, ratio);
      ratios += std::log(ratio);
      ++pairs;
    }
  }
  std::printf("%d pairs with Partials, received volume over the bound, geometric mean (worst): %.3f (%.2f)\n", pairs,
              std::exp(ratios / pairs), worst);
  EXPECT_GT(pairs, 1'500);
  EXPECT_LE(std::exp(ratios / pairs), 1.1);
}

TEST(Plan, SmallReductionsAreOneAllReduce) {
  const Spec from = Spec::parse("f64[1] @ 2x4x8(a,b,c) : P(sum),P(sum),P(sum)");
  const Plan plan = make_plan(from, Spec::parse("f64[1] @ 2x4x8(a,b,c) : R,R,R"));
  ASSERT_EQ(plan.steps().size(), 1u) << plan.to_string();
  EXPECT_EQ(plan.steps()[0].kind, StepKind::kAllReduce);
  EXPECT_EQ(plan.steps()[0].mesh_dims, (MeshDims{0, 1, 2}));
}

TEST(Plan, ManyRanksGoInStages) {
  for (const char* mesh : {"128x128(a,b)", "16x32x32(a,b,c)"}) {
    const bool two = std::string_view(mesh).size() < 13;
    const std::string tensor = std::string("bf16[262144,65536] @ ") + mesh;
    const Spec from = Spec::parse(tensor + (two ? " : S(0),S(0)" : " : S(0),S(0),S(0)"));
    const Spec to = Spec::parse(tensor + (two ? " : S(1),S(1)" : " : S(1),S(1),S(1)"));
    const Plan plan = make_plan(from, to);
    EXPECT_GT(plan.steps().size(), 1u) << plan.to_string();
    for (const Step& step : plan.steps()) EXPECT_LT(step.messages, 1024) << plan.to_string();
    EXPECT_TRUE(plan.exact()) << "evenly cut, all ranks do as the first one does";
  }
}

TEST(Plan, FreeWhereNothingMoves) {
  const auto steps = [](const char* from, const char* to) {
    return make_plan(Spec::parse(from), Spec::parse(to)).steps().size();
  };
  EXPECT_EQ(steps("f32[8] @ 2x1(a,b) : S(0),R", "f32[8] @ 2x1(a,b) : S(0),S(0)"), 0u);
  EXPECT_EQ(steps("f32[8] @ 2x1(a,b) : S(0),P(sum)", "f32[8] @ 2x1(a,b) : S(0),R"), 0u);
  EXPECT_EQ(steps("f32[8,4] @ 2(a) : S(0)", "f32[8,4] @ 2(a) : S(0)"), 0u);
  EXPECT_EQ(steps("f32[1,4] @ 2x2(a,b) : S(0),R", "f32[1,4] @ 2x2(a,b) : S(0),R"), 0u);
  const Plan slice =
      make_plan(Spec::parse("f32[8,4] @ 2x2(a,b) : R,R"), Spec::parse("f32[8,4] @ 2x2(a,b) : S(1),S(0)"));
  ASSERT_EQ(slice.steps().size(), 1u);
  EXPECT_EQ(slice.steps()[0].kind, StepKind::kSlice);
  EXPECT_EQ(slice.received(), Volume{});
}

TEST(Plan, LocalToPartialIsByOwner) {
  const Plan plan =
      make_plan(Spec::parse("f32[4,4] @ 2x2(a,b) : S(0),R"), Spec::parse("f32[4,4] @ 2x2(a,b) : S(0),P(sum)"));
  ASSERT_EQ(plan.steps().size(), 1u) << plan.to_string();
  EXPECT_EQ(plan.steps()[0].kind, StepKind::kEmbed);
  play::check(plan);
}

// Every mesh of up to 8 ranks of a world of 10, next to any other: overlapping, nested, apart, in any order.
TEST(Plan, AcrossMeshes) {
  Random random(5);
  const auto meshes = sweep::mesh_shapes(6, 2);
  std::map<StepKind, std::int64_t> kinds;
  for (int i = 0; i < 3'000; ++i) {
    const auto any_mesh = [&] {
      const Dims& shape = random.pick(meshes);
      std::vector<std::int64_t> ranks = sweep::iota(10);
      for (std::size_t j = ranks.size(); j-- > 1;)
        std::swap(ranks[j], ranks[random.below(static_cast<std::int64_t>(j) + 1)]);
      std::int64_t size = 1;
      for (std::int64_t s : shape) size *= s;
      ranks.resize(static_cast<std::size_t>(size));
      return Mesh::from_ranks(shape, ranks);
    };
    const Dims shape = sweep::random_shape(random, 2, 7);
    const Spec from = random_spec(random, any_mesh(), shape, ReduceOp::kSum);
    const Spec to = random_spec(random, any_mesh(), shape, ReduceOp::kSum);
    if (why_not(from, to)) continue;
    const Plan plan = make_plan(from, to, random_options(random));
    play::check(plan);
    for (const Step& step : plan.steps()) ++kinds[step.kind];
    if (HasFailure()) {
      ADD_FAILURE() << plan.to_string();
      return;
    }
  }
  for (StepKind kind :
       {StepKind::kReduceScatter, StepKind::kExchange, StepKind::kBroadcast, StepKind::kAllGather, StepKind::kEmbed}) {
    EXPECT_GT(kinds[kind], 20) << to_string(kind);
  }
}

std::vector<StepKind> kinds_of(const Plan& plan) {
  std::vector<StepKind> kinds;
  for (const Step& step : plan.steps()) kinds.push_back(step.kind);
  return kinds;
}

// Stages of a pipeline: fast links inside each, a slow one between them.
// Bytes cost so much that small tensors, quickly played, go as large ones do.
const PlanOptions kSlowBetween = {.cost =
                                      CostModel({.link = {2'000'000, 400'000'000}, .levels = {{4, {1'000, 4'096}}}})};

TEST(Plan, WhatManyWantCrossesOnce) {
  const Plan plan =
      make_plan(Spec::parse("f32[64,64] @ 4(x) : S(0)"), Spec::parse("f32[64,64] @ 4(y) of [4..7] : R"), kSlowBetween);
  play::check(plan);
  EXPECT_EQ(kinds_of(plan), (std::vector{StepKind::kExchange, StepKind::kAllGather})) << plan.to_string();
  EXPECT_EQ(plan.steps()[0].received, (Volume{4 << 10, 16 << 10}));
}

TEST(Plan, PartialsAreScatteredBeforeTheyCross) {
  const Plan plan = make_plan(Spec::parse("f32[64,64] @ 4(x) : P(sum)"), Spec::parse("f32[64,64] @ 4(y) of [4..7] : R"),
                              kSlowBetween);
  play::check(plan);
  EXPECT_EQ(kinds_of(plan), (std::vector{StepKind::kReduceScatter, StepKind::kExchange, StepKind::kAllGather}))
      << plan.to_string();
  EXPECT_EQ(plan.steps()[1].received, (Volume{4 << 10, 16 << 10}));
  EXPECT_EQ(plan.received_bound(), (Volume{16 << 10, (4 + 4 - 2) * (16 << 10)}));
}

TEST(Plan, APartialOnAnotherMeshIsFilledInByItsFirst) {
  const Plan plan = make_plan(Spec::parse("f32[8,8] @ 2(x) : R"), Spec::parse("f32[8,8] @ 3(y) of [1..3] : P(sum)"));
  play::check(plan);
  EXPECT_EQ(plan.steps().back().kind, StepKind::kEmbed) << plan.to_string();
}

// The same ranks arranged otherwise: nothing crosses, and the rest is collectives.
TEST(Plan, AnotherArrangementOfTheSameRanksIsNoCrossing) {
  const Plan plan =
      make_plan(Spec::parse("f32[32,32] @ 8(x) : S(1)"), Spec::parse("f32[32,32] @ 2x4(a,b) : R,S(1)"), kSlowBetween);
  play::check(plan);
  EXPECT_LE(plan.received().max, plan.received_bound().max) << plan.to_string();
  const Plan whole =
      make_plan(Spec::parse("f32[32,32] @ 8(x) : S(1)"), Spec::parse("f32[32,32] @ 2x4(a,b) : R,R"), kSlowBetween);
  play::check(whole);
  EXPECT_EQ(kinds_of(whole), (std::vector{StepKind::kSlice, StepKind::kAllGather, StepKind::kAllGather}))
      << whole.to_string();
}

TEST(Plan, TiesGoToCollectives) {
  const Plan plan =
      make_plan(Spec::parse("f32[8,8] @ 2x2(a,b) : P(sum),R"), Spec::parse("f32[8,8] @ 2x2(a,b) : S(0),R"));
  EXPECT_EQ(kinds_of(plan), (std::vector{StepKind::kReduceScatter})) << plan.to_string();
}

TEST(Plan, RowsGoInPairs) {
  // Two stages of 2x4 and 2x2 ranks; row i of the one's tp goes to row i of the other's.
  const Mesh first = Mesh::make({2, 4}, {"dp", "tp"});
  const Mesh second = Mesh::from_ranks({2, 2}, {8, 9, 10, 11}, {"dp", "tp"});
  const TensorMeta meta({12, 5}, DType::kF32);
  const std::vector<std::pair<Mesh, Mesh>> pairs = {{first["tp"], second["tp"]},
                                                    {second["tp"], first["tp"]},
                                                    {first["tp"], first["tp"].unflatten("tp", {2, 2}, {"a", "b"})}};
  for (const auto& [source, target] : pairs) {
    for (const Placement& from : {Placement(Shard(0)), Placement(Replicate()), Placement(Partial())}) {
      for (const Placement& to : {Placement(Shard(1)), Placement(Replicate()), Placement(Partial())}) {
        const Plan plan = make_plan(Spec::make(meta, source, Placements(1, from)),
                                    Spec::make(meta, target, Placements(static_cast<std::size_t>(target.ndim()), to)));
        for (std::int64_t row = 0; row < 2; ++row) play::check(plan, row);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(Plan, OneToManyIsABroadcast) {
  const Plan plan =
      make_plan(Spec::parse("f32[1024,1024] @ 1(x) : R"), Spec::parse("f32[1024,1024] @ 8(y) of [1..8] : R"));
  ASSERT_EQ(plan.steps().size(), 1u);
  EXPECT_EQ(plan.steps()[0].kind, StepKind::kBroadcast) << plan.to_string();
  EXPECT_EQ(plan.sent().max, 4 << 20);
}

TEST(Plan, MemoryIsKeptOrTheLeastIsSaid) {
  const Spec from = Spec::parse("f32[4096,4096] @ 8(a) : S(0)");
  const Spec to = Spec::parse("f32[4096,4096] @ 8(a) : S(1)");
  const std::int64_t both = 2 * (4096 * 4096 * 4 / 8);
  const Plan tight = make_plan(from, to, {.memory = both + (1 << 20)});
  EXPECT_LE(tight.peak_bytes(), both + (1 << 20));
  EXPECT_GT(tight.steps()[0].chunks, 1);
  EXPECT_LE(make_plan(from, to, {.staging = 1 << 20}).peak_bytes(), both + (1 << 20));
  EXPECT_ERROR(make_plan(from, to, {.memory = both}), kInvalidArgument,
               "[plan] the memory limit is below what is possible; got 16.8 MB from f32[4096,4096] @ 8(a) : S(0) to "
               "f32[4096,4096] @ 8(a) : S(1); expected 16842752 bytes or more");
}

TEST(Plan, RefusesInOneVoice) {
  const Spec shard = Spec::parse("f32[8,4] @ 2(a) : S(0)");
  EXPECT_ERROR(make_plan(shard, Spec::parse("f32[8,4] @ 2(a) : P(sum)")), kInvalidArgument,
               "[plan] a Shard cannot turn into a Partial on mesh dim 0; got from f32[8,4] @ 2(a) : S(0) to f32[8,4] @ "
               "2(a) : P(sum); expected one tensor; Partial only where the source is Replicate or equally Partial");
  const auto reason = [&](const char* from, const char* to) {
    return why_not(Spec::parse(from), Spec::parse(to)).value_or("");
  };
  EXPECT_EQ(reason("f32[8] @ 2(a) : R", "f32[9] @ 2(a) : R"), "the tensors have different shapes");
  EXPECT_EQ(reason("f32[8] @ 2(a) : R", "f64[8] @ 2(a) : R"), "the tensors have different types");
  EXPECT_EQ(reason("f32[8] @ 2(a) : P(sum)", "f32[8] @ 2(a) : P(max)"),
            "a Partial cannot turn into one of another reduction on mesh dim 0");
  EXPECT_EQ(reason("f32[8] @ 2(b):[1] of 4 : R", "f32[8] @ 3(a) : R"),
            "between two meshes, rows go in pairs, and these have different numbers of them");
  EXPECT_EQ(reason("f32[8] @ 2(b):[1] of 4 : R", "f32[8] @ 2(a):[2] of 4 : R"),
            "between two meshes, rows go in pairs, and these do not overlap alike in all of them");
}

TEST(Plan, IsCachedFromAnyThread) {
  const Spec from = Spec::parse("f32[977,31] @ 2x2(a,b) : S(0),R");
  const Spec to = Spec::parse("f32[977,31] @ 2x2(a,b) : R,S(1)");
  const InternStats before = plan_cache_stats();
  const Plan first = make_plan(from, to);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 100; ++i) EXPECT_TRUE(make_plan(from, to) == first);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const InternStats after = plan_cache_stats();
  EXPECT_EQ(after.misses - before.misses, 1u);
  EXPECT_EQ(after.hits - before.hits, 400u);
  CostConstants other;
  other.link.message_ps += 1;
  EXPECT_FALSE(make_plan(from, to, {.cost = CostModel(other)}) == first);
  EXPECT_TRUE(make_plan(from, to, {.cost = CostModel(CostConstants{})}) == first);
}

// Threads that all start cold plan side by side, and still end with one object for each question.
TEST(Plan, ThreadsPlanSideBySide) {
  const Mesh mesh = Mesh::make({2, 2, 2});
  std::vector<Spec> specs;
  for (const Placements& placements : sweep::all_placements(3, 2)) {
    const Spec spec = Spec::make({{971, 37}, DType::kF32}, mesh, placements);
    if (!spec.has_partial()) specs.push_back(spec);
  }
  std::vector<std::vector<Plan>> made(4);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < made.size(); ++t) {
    threads.emplace_back([&, t] {
      for (const Spec& from : specs) {
        for (const Spec& to : specs) made[t].push_back(make_plan(from, to));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::size_t t = 1; t < made.size(); ++t) EXPECT_TRUE(made[t] == made[0]);
}

TEST(Plan, WhatIsExplainedIsWhatIsDone) {
  Random random(17);
  for (int i = 0; i < 500; ++i) {
    const Mesh mesh = Mesh::make(random.pick(sweep::mesh_shapes(16, 4)));
    const Dims shape = {std::int64_t{1} << random.below(12), 48, 20};
    const Spec from = sweep::random_case(random, mesh, shape).spec();
    const Spec to = sweep::random_case(random, mesh, shape).spec();
    if (why_not(from, to)) continue;
    PlanOptions options = random_options(random);
    const Plan done = make_plan(from, to, options);
    options.explain = true;
    const Plan explained = make_plan(from, to, options);
    ASSERT_EQ(done.time(), explained.time()) << explained.to_string();
    ASSERT_EQ(kinds_of(done), kinds_of(explained)) << done.to_string() << explained.to_string();
  }
}

TEST(Plan, ReadsWell) {
  const auto text = [](const char* from, const char* to) {
    return make_plan(Spec::parse(from), Spec::parse(to), {.explain = true}).to_string();
  };
  EXPECT_EQ(text("f32[4096,4096] @ 2x4(dp,tp) : S(0),R", "f32[4096,4096] @ 2x4(dp,tp) : R,S(1)"),
            "from f32[4096,4096] @ 2x4(dp,tp) : S(0),R\n"
            "to   f32[4096,4096] @ 2x4(dp,tp) : R,S(1)\n"
            "1.   exchange       over dp,tp      receives 8.4 MB (67.1 MB in all), sends 8.4 MB (67.1 MB in all), 3 "
            "messages, 178.8 us\n"
            "     -> f32[4096,4096] @ 2x4(dp,tp) : R,S(1)\n"
            "receives 8.4 MB (67.1 MB in all), at least 8.4 MB (67.1 MB in all)\n"
            "memory   67.1 MB, source and target alone 50.3 MB\n"
            "time     178.8 us\n"
            "not by   slice, all-gather: slower: 183.7 us\n");
  EXPECT_EQ(text("f32[4096,4096] @ 2x4(dp,tp) : P(sum),S(0)", "f32[4096,4096] @ 2x4(dp,tp) : R,R"),
            "from f32[4096,4096] @ 2x4(dp,tp) : P(sum),S(0)\n"
            "to   f32[4096,4096] @ 2x4(dp,tp) : R,R\n"
            "1.   all-reduce     over dp         sum; receives 16.8 MB (134.2 MB in all), sends 16.8 MB (134.2 MB in "
            "all), 2 messages, 344.5 us\n"
            "     -> f32[4096,4096] @ 2x4(dp,tp) : R,S(0)\n"
            "2.   all-gather     over tp         receives 50.3 MB (402.7 MB in all), sends 50.3 MB (402.7 MB in all), "
            "3 messages, 2 chunks, 1 ms\n"
            "     -> f32[4096,4096] @ 2x4(dp,tp) : R,R\n"
            "receives 67.1 MB (536.9 MB in all), at least 67.1 MB (536.9 MB in all)\n"
            "memory   134.2 MB, source and target alone 83.9 MB\n"
            "time     1.4 ms\n"
            "not by   direct exchange: slower: 2.4 ms\n");
}

}  // namespace
}  // namespace dtensor
