// Plans: correct when played, never dearer than what a search through everything finds, and as they print.
#include "dtensor/core/plan.h"

#include <gtest/gtest.h>

#include "tests/core/expect_error.h"
#include "tests/core/plan_play.h"
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
  constants.link.kib_ps = std::int64_t{1} << random.below(32);
  constants.step_ps = random.below(2) * 5'000'000;
  if (random.chance(3)) constants.levels = {{2, {1'000, 100}}, {4, {100'000, 1'000}}};
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

}  // namespace
}  // namespace dtensor
