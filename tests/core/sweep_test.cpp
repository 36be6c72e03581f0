// The exhaustive property of the core: whatever the mesh, the shape, the placements and the order of the cuts, every
// rank holds exactly what cutting index lists by hand gives it.
#include <gtest/gtest.h>

#include "tests/core/sweep.h"

namespace dtensor {
namespace {

using sweep::Case;
using sweep::Indices;

Indices dim_indices(const DimSet& set) {
  Indices result;
  for (const Interval& run : runs_of(set)) {
    for (std::int64_t i = run.begin; i < run.end; ++i) result.push_back(i);
  }
  return result;
}

// Shape, offset and boxes of every rank against the literal model; every element as often as it is replicated.
void check_boxes(const Case& c, const Spec& spec) {
  SCOPED_TRACE(spec.to_string());
  std::int64_t copies = 1;
  for (std::int64_t m = 0; m < c.mesh.ndim(); ++m) copies *= c.placements[m].is_shard() ? 1 : c.mesh.shape()[m];
  std::vector<std::int64_t> seen(static_cast<std::size_t>(spec.meta().numel()));
  sweep::for_each_coordinate(c.mesh, [&](const Dims& coordinate) {
    const Spec::Local local = spec.local(coordinate);
    const Box box = box_of(spec, coordinate);
    for (std::size_t d = 0; d < c.shape.size(); ++d) {
      const Indices expected = c.held(d, coordinate);
      ASSERT_EQ(dim_indices(box.dims[d]), expected);
      ASSERT_EQ(local.shape[d], static_cast<std::int64_t>(expected.size()));
      ASSERT_EQ(local.offset[d], expected.empty() ? c.shape[d] : expected[0]);
    }
    std::int64_t position = 0;
    for_each_run(box, c.shape, [&](std::int64_t global, std::int64_t at, std::int64_t length) {
      ASSERT_EQ(at, position);
      position += length;
      for (std::int64_t i = 0; i < length; ++i) ++seen[global + i];
    });
    ASSERT_EQ(position, box.numel());
  });
  for (std::int64_t count : seen) ASSERT_EQ(count, copies);
}

// Text and public words lead back to the same spec.
void check_forms(const Case& c, const Spec& spec) {
  SCOPED_TRACE(spec.to_string());
  ASSERT_EQ(Spec::parse(spec.to_string()), spec);
  const auto again = Spec::from_dims(spec.meta(), spec.mesh(), spec.dims(), spec.partials());
  ASSERT_TRUE(again) << again.reason();
  ASSERT_EQ(*again, spec);
  // An order always has a strided form, and reading that gives the same object.
  for (const Placement& placement : spec.placements()) ASSERT_LT(placement.factor(), 0);
  ASSERT_EQ(Spec::make(spec.meta(), c.mesh, spec.placements()), spec) << to_string(spec.placements());
  ASSERT_EQ(parse_placements(to_string(spec.placements())), spec.placements());
}

void check_steps(const Case& c, const Spec& spec) {
  SCOPED_TRACE(spec.to_string());
  sweep::for_each_coordinate(c.mesh, [&](const Dims& coordinate) {
    Dims shape = c.shape;
    for (const ShardStep& step : shard_steps(spec, coordinate)) {
      ASSERT_EQ(step.before, shape);
      const std::int64_t n = shape[step.tensor_dim];
      shape[step.tensor_dim] = chunk({0, n}, c.mesh.shape()[step.mesh_dim], coordinate[step.mesh_dim]).size();
      ASSERT_EQ(step.after, shape);
    }
    ASSERT_EQ(shape, spec.local_shape(coordinate));
  });
}

void check_all(const Case& c) {
  const Spec spec = c.spec();
  check_boxes(c, spec);
  check_forms(c, spec);
  check_steps(c, spec);
}

TEST(Sweep, OneDimTensorsExhaustive) {
  std::int64_t cases = 0;
  for (const Dims& mesh_shape : sweep::mesh_shapes(12, 3)) {
    const Mesh mesh = Mesh::make(mesh_shape);
    for (const Placements& placements : sweep::all_placements(mesh_shape.size(), 1)) {
      for (const ShardOrder& order : sweep::all_orders(placements, 1)) {
        for (std::int64_t n = 0; n <= 13; ++n) {
          check_all({{n}, mesh, placements, order});
          ++cases;
          if (::testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
  RecordProperty("cases", std::to_string(cases));
  EXPECT_GT(cases, 40'000);
}

// 2-D and 3-D tensors multiply to tens of millions of cases; a seeded sample of them.
void check_sample(std::int64_t ndim, std::int64_t cases, std::uint64_t seed) {
  sweep::Random random(seed);
  const std::vector<Dims> meshes = sweep::mesh_shapes(12, 3);
  for (std::int64_t i = 0; i < sweep::rounds(cases); ++i) {
    Dims shape;
    for (std::int64_t d = 0; d < ndim; ++d) shape.push_back(random.below(14));
    check_all(sweep::random_case(random, Mesh::make(random.pick(meshes)), shape));
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(Sweep, TwoDimTensorsSampled) { check_sample(2, 100'000, 2); }
TEST(Sweep, ThreeDimTensorsSampled) { check_sample(3, 60'000, 3); }

// Every strided shard that upstream could write: those that are an order hold what the order says; the others what
// literal composition says, or they are refused.
TEST(Sweep, StridedShardsExhaustive) {
  std::int64_t decoded = 0;
  std::int64_t literal = 0;
  std::int64_t refused = 0;
  for (const Dims& mesh_shape : sweep::mesh_shapes(12, 2)) {
    const Mesh mesh = Mesh::make(mesh_shape);
    const std::int64_t ndim = mesh.ndim();
    const std::int64_t split_factors = 5;
    for (std::int64_t code = 0; code < (ndim == 1 ? split_factors : split_factors * split_factors); ++code) {
      Placements placements = {StridedShard(0, 1 + code % split_factors)};
      if (ndim == 2) placements.push_back(StridedShard(0, 1 + code / split_factors));
      for (std::int64_t n = 0; n <= 26; ++n) {
        std::optional<Spec> spec;
        try {
          spec = Spec::make({{n}, DType::kF32}, mesh, placements);
        } catch (const Error& error) {
          ASSERT_TRUE(error.kind() == ErrorKind::kNotSupported) << error.what();
          ++refused;
          continue;
        }
        SCOPED_TRACE(spec->to_string() + " from " + to_string(placements));
        PublicCuts cuts;
        for (std::int64_t m = 0; m < ndim; ++m) {
          const std::int64_t sf = mesh_shape[m] == 1 ? 1 : placements[m].split_factor();
          cuts.push_back({static_cast<std::int32_t>(m), mesh_shape[m], sf});
        }
        const auto order = decode_order(cuts);
        (order ? decoded : literal)++;
        std::vector<std::int64_t> seen(static_cast<std::size_t>(n));
        sweep::for_each_coordinate(mesh, [&](const Dims& coordinate) {
          Indices expected = sweep::iota(n);
          if (order) {
            for (const Cut& cut : *order) expected = sweep::chunk_of(expected, cut.count, coordinate[cut.mesh_dim]);
          } else {
            for (const PublicCut& cut : cuts) {
              expected = sweep::strided_chunk_of(expected, cut.split_factor, cut.count, coordinate[cut.mesh_dim]);
            }
            std::sort(expected.begin(), expected.end());
          }
          const Box box = box_of(*spec, coordinate);
          ASSERT_EQ(dim_indices(box.dims[0]), expected);
          const Spec::Local local = spec->local(coordinate);
          ASSERT_EQ(local.shape[0], static_cast<std::int64_t>(expected.size()));
          ASSERT_EQ(local.offset[0], expected.empty() ? n : expected[0]);
          for (std::int64_t i : expected) ++seen[i];
        });
        for (std::int64_t count : seen) ASSERT_EQ(count, 1);
        ASSERT_EQ(Spec::parse(spec->to_string()), *spec);
        ASSERT_EQ(Spec::make(spec->meta(), mesh, spec->placements()), *spec) << to_string(spec->placements());
      }
    }
  }
  EXPECT_GT(decoded, 1000);
  EXPECT_GT(literal, 1000);
  EXPECT_GT(refused, 100);
}

}  // namespace
}  // namespace dtensor
