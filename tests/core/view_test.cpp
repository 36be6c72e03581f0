#include "dtensor/core/view.h"

#include <gtest/gtest.h>

#include "tests/core/sweep.h"

namespace dtensor {
namespace {

using sweep::Indices;

Spec parse(std::string_view text) { return Spec::parse(text); }

std::string shown(const OrReason<Spec>& view) { return view ? view->to_string() : "no: " + view.reason(); }

TEST(View, FlattenIsFreeAlsoWhenUneven) {
  EXPECT_EQ(shown(flatten(parse("f32[3,5,8] @ 2(tp) : S(1)"), 0, 1)), "f32[(3*5),8] @ 2(tp) : S(0.1)");
  EXPECT_EQ(shown(flatten(parse("f32[5,3,8] @ 2(tp) : S(0)"), 0, 1)), "f32[(5*3),8] @ 2(tp) : S(0.0)");
  EXPECT_EQ(shown(flatten(parse("f32[4,3,8] @ 2(tp) : S(0)"), 0, 1)), "f32[12,8] @ 2(tp) : S(0)");
  EXPECT_EQ(shown(flatten(parse("f32[4,6] @ 2x3(a,b) : S(0),S(1)"), 0, 1)), "f32[(4*6)] @ 2x3(a,b) : S(0.0),S(0.1)");
  // a leaves one row each: the same as cutting the flat dim by a, then b.
  EXPECT_EQ(shown(flatten(parse("f32[2,6] @ 2x3(a,b) : S(0),S(1)"), 0, 1)), "f32[12] @ 2x3(a,b) : S(0),S(0)");
}

TEST(View, WorkedExampleOfFlattenAndBack) {
  const Spec x = parse("f32[3,5,8] @ 2(tp) : S(1)");
  const auto flat = flatten(x, 0, 1);
  ASSERT_TRUE(flat);
  const auto rows = [&](std::int64_t rank) {
    Indices list;
    for (const Interval& run : runs_of(box_of(*flat, {rank}).dims[0])) {
      for (std::int64_t i = run.begin; i < run.end; ++i) list.push_back(i);
    }
    return list;
  };
  EXPECT_EQ(rows(0), (Indices{0, 1, 2, 5, 6, 7, 10, 11, 12}));
  EXPECT_EQ(rows(1), (Indices{3, 4, 8, 9, 13, 14}));
  EXPECT_EQ(flat->placements(), (Placements{StridedShard(0, 3)}));
  EXPECT_EQ(shown(unflatten(*flat, 0, {3, 5})), x.to_string());
}

TEST(View, UnflattenFollowsTheCuts) {
  EXPECT_EQ(shown(unflatten(parse("f32[12] @ 2(a) : S(0)"), 0, {4, 3})), "f32[4,3] @ 2(a) : S(0)");
  EXPECT_EQ(shown(unflatten(parse("f32[12] @ 2x3(a,b) : S(0),S(0)"), 0, {2, 6})), "f32[2,6] @ 2x3(a,b) : S(0),S(1)");
  EXPECT_EQ(shown(unflatten(parse("f32[12] @ 2(a) : S(0)"), 0, {1, 12})), "f32[1,12] @ 2(a) : S(1)");
  EXPECT_EQ(shown(unflatten(parse("f32[12] @ 2(a) : S(0)"), 0, {12, 1})), "f32[12,1] @ 2(a) : S(0)");
  EXPECT_EQ(shown(unflatten(parse("f32[0] @ 2(a) : S(0)"), 0, {0, 5})), "f32[0,5] @ 2(a) : S(0)");
  EXPECT_EQ(shown(unflatten(parse("f32[12] @ 2(a) : S(0)"), 0, {3, 4})),
            "no: 12 elements are not cut between rows of 4");
  EXPECT_EQ(shown(unflatten(parse("f32[4] @ 3(a) : S(0)"), 0, {2, 2})), "f32[2,2] @ 3(a) : S(0)");
}

// Upstream's issue #179502: the rank that holds columns 0-3 of 12x8 would have to hold other elements as 16x6.
TEST(View, RefusesAViewThatMustMoveData) {
  EXPECT_FALSE(reshape(parse("f32[12,8] @ 2(tp) : S(1)"), {16, 6}));
  EXPECT_TRUE(reshape(parse("f32[12,8] @ 2(tp) : S(0)"), {16, 6}));
}

TEST(View, FusedWeightChunksAreFree) {
  const Spec fused = parse("f32[(3*8),4] @ 2(tp) : S(0.1)");
  EXPECT_EQ(shown(narrow(fused, 0, 0, 8)), "f32[8,4] @ 2(tp) : S(0)");
  EXPECT_EQ(shown(narrow(fused, 0, 8, 16)), "f32[(2*8),4] @ 2(tp) : S(0.1)");
  EXPECT_EQ(shown(narrow(fused, 1, 1, 2)), "f32[(3*8),2]{4,1} @ 2(tp) : S(0.1)");
  EXPECT_EQ(shown(narrow(fused, 0, 4, 8)),
            "no: dim 0 of f32[(3*8),4] @ 2(tp) : S(0.1) is cut across the range 4 to 12");
}

TEST(View, StridesMustAllowIt) {
  const Spec transposed = permute(parse("f32[4,6] @ 2(a) : S(0)"), {1, 0});
  EXPECT_EQ(transposed.to_string(), "f32[6,4]{1,6} @ 2(a) : S(1)");
  EXPECT_EQ(shown(flatten(transposed, 0, 1)), "no: dims 0 and 1 of f32[6,4]{1,6} do not follow each other in memory");
  EXPECT_EQ(shown(flatten(permute(transposed, {1, 0}), 0, 1)), "f32[24] @ 2(a) : S(0)");
}

TEST(View, ReshapeToAndFromZeroDims) {
  EXPECT_EQ(shown(reshape(parse("f32[] @ 2(a) : R"), {1, 1})), "f32[1,1] @ 2(a) : R");
  EXPECT_EQ(shown(reshape(parse("f32[1,1] @ 2(a) : P(sum)"), {})), "f32[] @ 2(a) : P(sum)");
  EXPECT_FALSE(reshape(parse("f32[1] @ 2(a) : S(0)"), {}));
  EXPECT_EQ(shown(reshape(parse("f32[2,0,3] @ 2(a) : S(2)"), {0, 7})), "f32[0,7] @ 2(a) : S(0)");
}

Indices elements(const Spec& spec, const Dims& coordinate) {
  return sweep::elements_of(box_of(spec, coordinate), spec.meta().shape());
}

// Same global elements in the same local order, on every rank; and the text form holds for the odd specs views make.
void check_same(const Spec& before, const Spec& after) {
  SCOPED_TRACE(before.to_string() + " -> " + after.to_string());
  ASSERT_EQ(Spec::parse(after.to_string()), after);
  sweep::for_each_coordinate(before.mesh(), [&](const Dims& coordinate) {
    ASSERT_EQ(elements(after, coordinate), elements(before, coordinate));
    std::int64_t numel = 1;
    for (std::int64_t size : after.local_shape(coordinate)) numel *= size;
    ASSERT_EQ(numel, box_of(before, coordinate).numel());
  });
}

Dims random_factoring(sweep::Random& random, std::int64_t numel) {
  Dims shape;
  for (std::int64_t rest = numel; rest > 1;) {
    std::int64_t size = 1 + random.below(rest);
    while (rest % size != 0) ++size;
    if (size > 1 || random.chance(4)) shape.push_back(size);
    rest /= size;
  }
  if (shape.empty()) shape.push_back(numel);
  return shape;
}

// Chains of views: what one makes (factored, virtual) is the input of the next.
TEST(View, ChainsOfReshapesHoldTheSameElements) {
  sweep::Random random(11);
  const std::vector<Dims> meshes = sweep::mesh_shapes(8, 3);
  std::int64_t expressible = 0;
  std::int64_t refused = 0;
  std::int64_t factored = 0;
  for (int i = 0; i < sweep::rounds(40'000); ++i) {
    const Mesh mesh = Mesh::make(random.pick(meshes));
    Spec spec = sweep::random_case(random, mesh, sweep::random_shape(random, 3, 12)).spec();
    for (int step = 0; step < 3; ++step) {
      const Dims shape = spec.meta().numel() > 0 ? random_factoring(random, spec.meta().numel()) : Dims{0, 4};
      const auto next = reshape(spec, shape);
      if (!next) {
        ++refused;
        break;
      }
      ++expressible;
      check_same(spec, *next);
      if (HasFatalFailure()) return;
      spec = *next;
      for (const DimLayout& dim : spec.dims()) factored += dim.size() > 1 || has_virtual(dim[0]);
    }
  }
  EXPECT_GT(expressible, sweep::rounds(20'000));
  EXPECT_GT(refused, sweep::rounds(1'000));
  EXPECT_GT(factored, sweep::rounds(1'000));
}

TEST(View, FlattenIsAlwaysExpressible) {
  sweep::Random random(12);
  const std::vector<Dims> meshes = sweep::mesh_shapes(12, 3);
  for (int i = 0; i < sweep::rounds(20'000); ++i) {
    const Spec spec =
        sweep::random_case(random, Mesh::make(random.pick(meshes)), sweep::random_shape(random, 3, 13)).spec();
    const auto flat = flatten(spec, 0, -1);
    ASSERT_TRUE(flat) << spec.to_string() << ": " << flat.reason();
    check_same(spec, *flat);
    if (HasFatalFailure()) return;
    // And back.
    const auto back = unflatten(*flat, 0, spec.meta().shape());
    ASSERT_TRUE(back) << spec.to_string() << " via " << flat->to_string() << ": " << back.reason();
    check_same(spec, *back);
    if (HasFatalFailure()) return;
  }
}

TEST(View, PermuteHoldsTheSameElements) {
  sweep::Random random(13);
  const std::vector<Dims> meshes = sweep::mesh_shapes(8, 3);
  for (int i = 0; i < sweep::rounds(10'000); ++i) {
    const Spec spec =
        sweep::random_case(random, Mesh::make(random.pick(meshes)), sweep::random_shape(random, 3, 7)).spec();
    Dims order;
    for (std::int64_t d = 0; d < spec.meta().ndim(); ++d) order.insert(random.below(d + 1), d);
    const Spec after = permute(spec, order);
    ASSERT_EQ(Spec::parse(after.to_string()), after);
    sweep::for_each_coordinate(spec.mesh(), [&](const Dims& coordinate) {
      for (std::size_t d = 0; d < order.size(); ++d) {
        ASSERT_EQ(runs_of(box_of(after, coordinate).dims[d]), runs_of(box_of(spec, coordinate).dims[order[d]]));
        ASSERT_EQ(after.local(coordinate).offset[d], spec.local(coordinate).offset[order[d]]);
      }
      // A freshly made local tensor keeps the order of the dims in memory.
      const Dims stride = after.local_stride(coordinate);
      const Dims before = spec.local_stride(coordinate);
      const Dims shape = after.local_shape(coordinate);
      for (std::size_t d = 0; d < order.size() && box_of(after, coordinate).numel() > 0; ++d) {
        if (shape[d] > 1) {
          ASSERT_EQ(stride[d], before[order[d]]) << after.to_string();
        }
      }
    });
    if (HasFatalFailure()) return;
  }
}

TEST(View, NarrowHoldsTheRange) {
  sweep::Random random(14);
  const std::vector<Dims> meshes = sweep::mesh_shapes(8, 2);
  std::int64_t expressible = 0;
  for (int i = 0; i < sweep::rounds(30'000); ++i) {
    Spec spec = sweep::random_case(random, Mesh::make(random.pick(meshes)), sweep::random_shape(random, 3, 8)).spec();
    if (const auto flat = flatten(spec, 0, -1); flat && random.chance(2)) spec = *flat;
    const std::int64_t dim = random.below(spec.meta().ndim());
    const std::int64_t size = spec.meta().shape()[dim];
    const std::int64_t start = random.below(size + 1);
    const std::int64_t length = random.below(size - start + 1);
    const auto part = narrow(spec, dim, start, length);
    if (!part) continue;
    ++expressible;
    ASSERT_EQ(Spec::parse(part->to_string()), *part);
    sweep::for_each_coordinate(spec.mesh(), [&](const Dims& coordinate) {
      for (std::int64_t d = 0; d < spec.meta().ndim(); ++d) {
        Indices expected;
        for (const Interval& run : runs_of(box_of(spec, coordinate).dims[d])) {
          for (std::int64_t k = run.begin; k < run.end; ++k) {
            if (d != dim)
              expected.push_back(k);
            else if (k >= start && k < start + length)
              expected.push_back(k - start);
          }
        }
        Indices held;
        for (const Interval& run : runs_of(box_of(*part, coordinate).dims[d])) {
          for (std::int64_t k = run.begin; k < run.end; ++k) held.push_back(k);
        }
        ASSERT_EQ(held, expected) << spec.to_string() << " -> " << part->to_string();
      }
    });
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(expressible, sweep::rounds(5'000));
}

}  // namespace
}  // namespace dtensor
