// Every number that the semantics of placements fixes, as a case.
#include "dtensor/core/spec.h"

#include <gtest/gtest.h>

#include "tests/core/expect_error.h"
#include "tests/core/sweep.h"

namespace dtensor {
namespace {

using sweep::Indices;

Spec rows(std::int64_t n, const Dims& mesh, const Placements& placements) {
  return Spec::make({{n}, DType::kF32}, Mesh::make(mesh), placements);
}

Indices held(const Spec& spec, const Dims& coordinate) {
  return sweep::elements_of(box_of(spec, coordinate), spec.meta().shape());
}

TEST(Placement, PrintParseAndCompare) {
  EXPECT_EQ(to_string(Placements{Shard(0), StridedShard(1, 2), Replicate(), Partial(), Partial(ReduceOp::kMax)}),
            "S(0),S(1,2),R,P(sum),P(max)");
  EXPECT_EQ(parse_placements(" S( 0 ) , S(1,2),R , P,P(max) "),
            (Placements{Shard(0), StridedShard(1, 2), Replicate(), Partial(), Partial(ReduceOp::kMax)}));
  EXPECT_EQ(parse_placements(""), Placements{});
  EXPECT_EQ(parse_placements("S(-1)"), Placements{Shard(-1)});
  EXPECT_EQ(StridedShard(0, 1), Shard(0));
  EXPECT_FALSE(Placement(StridedShard(0, 2)) == Shard(0));
  EXPECT_TRUE(Placement(StridedShard(0, 2)).is_shard(0));
  for (const char* op : {"sum", "avg", "min", "max", "product", "and", "or", "xor"}) {
    EXPECT_EQ(to_string(*reduce_op_from(op)), op);
  }
}

TEST(Spec, ChunkRuleGivesShortAndEmptyTails) {
  const Spec five = rows(5, {3}, {Shard(0)});
  EXPECT_EQ(five.local({2}).shape, (Dims{1}));
  const Spec four = rows(4, {3}, {Shard(0)});
  EXPECT_EQ(four.local({2}).shape, (Dims{0}));
  EXPECT_EQ(four.local({2}).offset, (Dims{4}));
}

TEST(Spec, StridedVectorOfNine) {
  const Spec spec = rows(9, {4}, {StridedShard(0, 2)});
  EXPECT_EQ(held(spec, {0}), (Indices{0, 1, 5}));
  EXPECT_EQ(held(spec, {1}), (Indices{2, 3, 6}));
  EXPECT_EQ(held(spec, {2}), (Indices{4, 7}));
  EXPECT_EQ(held(spec, {3}), (Indices{8}));
  EXPECT_EQ(spec.to_string(), "f32[9~2@0] @ 4 : S(0)[1]");
  EXPECT_EQ(spec.placements(), Placements{StridedShard(0, 2)});
}

TEST(Spec, NestedColumnsOfFive) {
  const Spec spec = Spec::make({{2, 5}, DType::kF32}, Mesh::make({2, 2}), {Shard(1), Shard(1)});
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> offsets;
  sweep::for_each_coordinate(spec.mesh(), [&](const Dims& at) {
    sizes.push_back(spec.local(at).shape[1]);
    offsets.push_back(spec.local(at).offset[1]);
  });
  EXPECT_EQ(sizes, (std::vector<std::int64_t>{2, 1, 1, 1}));
  EXPECT_EQ(offsets, (std::vector<std::int64_t>{0, 2, 3, 4}));
}

TEST(Spec, ThirteenOnFourByTwoLeavesTheLastEmpty) {
  const Spec::Local last = rows(13, {4, 2}, {Shard(0), Shard(0)}).local({3, 1});
  EXPECT_EQ(last.shape, (Dims{0}));
  EXPECT_EQ(last.offset, (Dims{13}));
}

TEST(Spec, FourThousandRowsOnThirtyByEight) {
  const Spec spec = rows(4096, {30, 8}, {StridedShard(0, 8), Shard(0)});
  for (std::int64_t tp = 0; tp < 8; ++tp) {
    EXPECT_EQ(spec.local({0, tp}).shape[0], 18);
    EXPECT_EQ(spec.local({27, tp}).shape[0], 18);
    EXPECT_EQ(spec.local({28, tp}).shape[0], 8);
    EXPECT_EQ(spec.local({29, tp}).shape[0], 0);
    EXPECT_EQ(spec.local({29, tp}).offset[0], 4096);
  }
}

TEST(Spec, TwoUndecodableStridedShardsAreNotSupported) {
  EXPECT_ERROR(
      rows(39, {4, 2}, {StridedShard(0, 3), StridedShard(0, 4)}), kNotSupported,
      "[spec] strided shards on one tensor dim that are not an order of the mesh dims, and whose pieces are not of one "
      "size or do not fall between each other's; got f32[39] @ 4x2 : S(0,3),S(0,4); expected an order, one strided "
      "shard, or pieces of one size");
}

// Where all pieces are of one size: what a rank has, laid end to end, is cut again.
TEST(Spec, TwoStridedShardsCutEndToEnd) {
  const Spec spec = rows(64, {2, 2}, {StridedShard(0, 4), StridedShard(0, 8)});
  for (const Dims& at : {Dims{0, 0}, Dims{0, 1}, Dims{1, 0}, Dims{1, 1}}) {
    const Indices first = sweep::strided_chunk_of(sweep::iota(64), 4, 2, at[0]);
    EXPECT_EQ(held(spec, at), sweep::strided_chunk_of(first, 8, 2, at[1]));
  }
  EXPECT_EQ(spec.placements(), (Placements{StridedShard(0, 4), StridedShard(0, 8)}));
}

// Where the two disagree, the order is the definition: literal composition would put element 8 on (3,0).
TEST(Spec, OrderDefinesStridedShardsOnUnevenSizes) {
  const Spec spec = rows(9, {4, 2}, {StridedShard(0, 2), Shard(0)});
  EXPECT_EQ(spec.to_string(), "f32[9] @ 4x2 : S(0)[1],S(0)[0]");
  EXPECT_EQ(held(spec, {3, 1}), (Indices{8}));
  EXPECT_EQ(held(spec, {3, 0}), Indices{});
  EXPECT_EQ(spec.placements(), (Placements{StridedShard(0, 2), Shard(0)}));
  EXPECT_EQ(spec.shard_order(), (ShardOrder{{0, {1, 0}}}));
}

// Fixes for which sizes up to 63 the two forms differ, so that nobody "repairs" it by accident.
TEST(Spec, WhereOrderAndLiteralCompositionDiffer) {
  const auto differing = [](std::int64_t fsdp, std::int64_t tp) {
    std::vector<std::int64_t> result;
    for (std::int64_t n = 0; n < 64; ++n) {
      const Spec spec = rows(n, {fsdp, tp}, {StridedShard(0, tp), Shard(0)});
      bool same = true;
      sweep::for_each_coordinate(spec.mesh(), [&](const Dims& at) {
        const Indices strided = sweep::strided_chunk_of(sweep::iota(n), tp, fsdp, at[0]);
        same &= sweep::chunk_of(strided, tp, at[1]) == held(spec, at);
      });
      if (!same) result.push_back(n);
    }
    return result;
  };
  EXPECT_EQ(differing(2, 2), std::vector<std::int64_t>{});
  EXPECT_EQ(differing(2, 3), std::vector<std::int64_t>{});
  EXPECT_EQ(differing(4, 2), (std::vector<std::int64_t>{9, 17, 25, 33, 41, 49, 57}));
  const auto three = differing(3, 2);
  EXPECT_EQ(three.size(), 10u);
  EXPECT_EQ((std::vector<std::int64_t>(three.begin(), three.begin() + 3)), (std::vector<std::int64_t>{7, 13, 19}));
  const auto four = differing(4, 4);
  EXPECT_EQ(four.size(), 8u);
  EXPECT_EQ((std::vector<std::int64_t>(four.begin(), four.begin() + 3)), (std::vector<std::int64_t>{19, 22, 34}));
}

TEST(Spec, FsdpOverTensorParallelIsOneIntervalPerRank) {
  const Mesh mesh = Mesh::make({2, 2}, {"fsdp", "tp"});
  const Spec spec = Spec::make({{10, 4}, DType::kF32}, mesh, {StridedShard(0, 2), Shard(0)});
  EXPECT_EQ(spec, Spec::make({{10, 4}, DType::kF32}, mesh, {Shard(0), Shard(0)}, {{0, {1, 0}}}));
  const auto range = [&](const Dims& at) { return runs_of(box_of(spec, at).dims[0]); };
  EXPECT_EQ(range({0, 0}), (std::vector<Interval>{{0, 3}}));
  EXPECT_EQ(range({1, 0}), (std::vector<Interval>{{3, 5}}));
  EXPECT_EQ(range({0, 1}), (std::vector<Interval>{{5, 8}}));
  EXPECT_EQ(range({1, 1}), (std::vector<Interval>{{8, 10}}));
}

TEST(Spec, ShardStepsSeeTheSizeBeforeEachCut) {
  const Spec spec = Spec::make({{13, 5}, DType::kF32}, Mesh::make({4, 2, 3}), {Shard(0), Shard(0), Shard(1)});
  const auto steps = shard_steps(spec, {3, 1, 2});
  ASSERT_EQ(steps.size(), 3u);
  EXPECT_EQ(steps[0].before, (Dims{13, 5}));
  EXPECT_EQ(steps[1].before, (Dims{1, 5}));
  EXPECT_EQ(steps[2].before, (Dims{0, 5}));
  EXPECT_EQ(steps[2].after, (Dims{0, 1}));
  // A re-ordered dim is cut in its own order.
  const auto turned = shard_steps(rows(10, {2, 2}, {StridedShard(0, 2), Shard(0)}), {1, 1});
  EXPECT_EQ(turned[0].mesh_dim, 1);
  EXPECT_EQ(turned[1].before, (Dims{5}));
  EXPECT_EQ(turned[1].after, (Dims{2}));
}

TEST(Spec, DerivedProperties) {
  const Spec spec = Spec::parse("f32[8,6] @ 2x2x3(a,b,c) : S(0),P(sum),S(0)");
  EXPECT_EQ(spec.num_shards(), 6);
  EXPECT_EQ(spec.num_shards_per_dim(), (Dims{6, 1}));
  EXPECT_EQ(spec.tensor_dim_of(2), 0);
  EXPECT_EQ(spec.tensor_dim_of(1), std::nullopt);
  EXPECT_TRUE(spec.has_partial());
  EXPECT_FALSE(spec.is_replicated());
  EXPECT_TRUE(Spec::parse("f32[8,6] @ 2(a) : R").is_replicated());
  EXPECT_EQ(spec.local_bytes({0, 0, 0}), 2 * 6 * 4);
}

TEST(Spec, LocalStridesFollowTheGlobalOrder) {
  const Mesh mesh = Mesh::make({2}, {"a"});
  const auto stride = [&](const TensorMeta& meta, const Placements& placements) {
    return Spec::make(meta, mesh, placements).local_stride({1});
  };
  EXPECT_EQ(stride({{4, 6}, DType::kF32}, {Shard(1)}), (Dims{3, 1}));
  EXPECT_EQ(stride({{4, 6}, {1, 4}, DType::kF32}, {Shard(0)}), (Dims{1, 2}));
  EXPECT_EQ(stride({{4, 6}, {6, 0}, DType::kF32}, {Shard(0)}), (Dims{1, 0}));
  EXPECT_EQ(stride({{4, 3, 5}, {15, 1, 3}, DType::kF32}, {Shard(2)}), (Dims{6, 1, 3}));
}

TEST(Spec, GlobalShapeFromLocalOnes) {
  const Mesh mesh = Mesh::make({2, 2});
  for (std::int64_t n = 0; n <= 13; ++n) {
    for (const Placements& placements : sweep::all_placements(2, 2)) {
      const Spec spec = Spec::make({{n, 5}, DType::kF32}, mesh, placements);
      std::vector<Dims> locals;
      sweep::for_each_coordinate(mesh, [&](const Dims& at) { locals.push_back(spec.local_shape(at)); });
      ASSERT_EQ(global_shape_from_locals(mesh, placements, locals), (Dims{n, 5})) << spec.to_string();
    }
  }
  EXPECT_ERROR(global_shape_from_locals(Mesh::make({2}), {Shard(0)}, {{2}, {3}}), kInvalidArgument,
               "[global_shape] the local shapes are not those of one tensor; got [2] on rank 0; expected [3], its part "
               "of u8[5] @ 2 : S(0); try cutting by the chunk rule: ceil(n/k) each, the last ones short or empty");
  EXPECT_ERROR(global_shape_from_locals(Mesh::make({2}), {Replicate()}, {{2}, {3}}), kInvalidArgument,
               "[global_shape] the local shapes are not those of one tensor; got [3] on rank 1; expected [2], its part "
               "of u8[2] @ 2 : R; try cutting by the chunk rule: ceil(n/k) each, the last ones short or empty");
}

TEST(Spec, EqualSpecsAreOneObject) {
  const Mesh mesh = Mesh::make({2, 2}, {"dp", "tp"});
  const Spec a = Spec::make({{8, 6}, DType::kF32}, mesh, {Shard(0), Replicate()});
  EXPECT_EQ(a, Spec::make({{8, 6}, DType::kF32}, mesh, {Shard(-2), Replicate()}));
  EXPECT_EQ(a.hash(), Spec::parse("f32[8,6] @ 2x2(dp,tp) : S(0),R").hash());
  EXPECT_FALSE(a == Spec::make({{8, 6}, DType::kF64}, mesh, {Shard(0), Replicate()}));
  EXPECT_FALSE(a == Spec::make({{8, 6}, {1, 8}, DType::kF32}, mesh, {Shard(0), Replicate()}));
  EXPECT_FALSE(a == Spec::make({{8, 6}, DType::kF32}, mesh, {Shard(0), Partial()}));
}

// On a mesh dim of size 1 a cut changes no box; it is kept for the print.
TEST(Spec, SizeOneMeshDimsKeepTheirWord) {
  const Spec sharded = Spec::parse("f32[8] @ 1x2(one,two) : S(0),S(0)");
  const Spec replicated = Spec::parse("f32[8] @ 1x2(one,two) : R,S(0)");
  EXPECT_FALSE(sharded == replicated);
  EXPECT_TRUE(same_boxes(sharded, replicated));
  EXPECT_EQ(Spec::parse("f32[8] @ 1x2(one,two) : S(0)[1],S(0)[0]"), sharded);
}

TEST(Spec, WithPlacementChangesOneMeshDim) {
  const auto after = [](const char* spec, std::int64_t mesh_dim, const Placement& placement) {
    return with_placement_on(Spec::parse(spec), mesh_dim, placement).to_string();
  };
  EXPECT_EQ(after("f32[8,6] @ 2x2(dp,tp) : R,S(1)", 0, Shard(-2)), "f32[8,6] @ 2x2(dp,tp) : S(0),S(1)");
  EXPECT_EQ(after("f32[8,6] @ 2x2(dp,tp) : R,S(1)", 1, Replicate()), "f32[8,6] @ 2x2(dp,tp) : R,R");
  EXPECT_EQ(after("f32[8,6] @ 2x2(dp,tp) : P(sum),S(1)", 0, Shard(0)), "f32[8,6] @ 2x2(dp,tp) : S(0),S(1)");
  EXPECT_EQ(after("f32[8,6] @ 2x2(dp,tp) : S(0),S(1)", 1, Partial()), "f32[8,6] @ 2x2(dp,tp) : S(0),P(sum)");
  // The new cut comes last: fully sharding over tensor parallel leaves one run of rows per rank.
  EXPECT_EQ(after("f32[10,6] @ 2x2(dp,tp) : R,S(0)", 0, Shard(0)), "f32[10,6] @ 2x2(dp,tp) : S(0)[1],S(0)[0]");
  EXPECT_EQ(after("f32[(3*5),8] @ 2x2(dp,tp) : R,S(0.1)", 0, Shard(0)), "f32[(3*5),8] @ 2x2(dp,tp) : S(0.0),S(0.1)");
  EXPECT_ERROR(with_placement_on(Spec::parse("f32[8,6] @ 2(tp) : R"), 0, Shard(2)), kInvalidArgument,
               "[with_placement_on] a placement that the tensor cannot take here; got S(2) on mesh dim 0 of f32[8,6] @ "
               "2(tp) : R; expected R, P, or a plain S of one of its dims");
}

}  // namespace
}  // namespace dtensor
