#include "dtensor/core/mesh.h"

#include <gtest/gtest.h>

#include <malloc.h>

#include <chrono>
#include <set>

#include "tests/core/sweep.h"

namespace dtensor {
namespace {

using Ranks = std::vector<std::int64_t>;

TEST(Mesh, ShapeNamesAndCoordinates) {
  const Mesh mesh = Mesh::make({2, 3}, {"dp", "tp"});
  EXPECT_EQ(mesh.ndim(), 2);
  EXPECT_EQ(mesh.size(), 6);
  EXPECT_EQ(mesh.size("tp"), 3);
  EXPECT_EQ(mesh.size(-1), 3);
  EXPECT_EQ(mesh.shape(), (Dims{2, 3}));
  EXPECT_EQ(mesh.names(), (std::vector<std::string>{"dp", "tp"}));
  EXPECT_EQ(mesh.coordinate(4), (Dims{1, 1}));
  EXPECT_EQ(mesh.coordinate(6), std::nullopt);
  EXPECT_EQ(mesh.coordinate(-1), std::nullopt);
  EXPECT_EQ(mesh.rank_at({1, 2}), 5);
  EXPECT_EQ(mesh.rows(), 1);
  EXPECT_EQ(mesh.group(0, 4), (Ranks{1, 4}));
  EXPECT_EQ(mesh.groups(1), (std::vector<Ranks>{{0, 1, 2}, {3, 4, 5}}));
  EXPECT_EQ(mesh.groups(0), (std::vector<Ranks>{{0, 3}, {1, 4}, {2, 5}}));
}

TEST(Mesh, AnyRankOrder) {
  const Mesh mesh = Mesh::from_ranks({2, 2}, {7, 3, 5, 1}, {"a", "b"});
  EXPECT_EQ(mesh.coordinate(5), (Dims{1, 0}));
  EXPECT_EQ(mesh.coordinate(0), std::nullopt);
  EXPECT_EQ(mesh.max_rank(), 7);
  EXPECT_EQ(mesh.ranks(), (Ranks{7, 3, 5, 1}));
  EXPECT_EQ(mesh["b"].ranks(1), (Ranks{5, 1}));
  EXPECT_EQ(mesh.to_string(), "2x2(a,b) of [7,3,5,1]");
  EXPECT_EQ(Mesh::from_ranks({2}, {4, 5}).to_string(), "2 of [4..5]");
  EXPECT_EQ(Mesh::from_ranks({2}, {0, 1}), Mesh::make({2}));
}

TEST(Mesh, SlicesStandForAllTheirRows) {
  const Mesh mesh = Mesh::make({2, 2, 3}, {"pp", "dp", "tp"});
  const Mesh tp = mesh["tp"];
  EXPECT_EQ(tp.rows(), 4);
  EXPECT_EQ(tp.ranks(1), (Ranks{3, 4, 5}));
  EXPECT_EQ(tp.coordinate(7), (Dims{1}));
  EXPECT_EQ(tp.row_of(7), 2);
  const Mesh pair = mesh.slice({"pp", "tp"});
  EXPECT_EQ(pair.shape(), (Dims{2, 3}));
  EXPECT_EQ(pair.ranks(0), (Ranks{0, 1, 2, 6, 7, 8}));
  EXPECT_EQ(pair.ranks(1), (Ranks{3, 4, 5, 9, 10, 11}));
  // A slice of a slice is the slice.
  EXPECT_EQ(pair["tp"], tp);
  EXPECT_EQ(mesh.slice({"pp", "dp", "tp"}), mesh);
  EXPECT_EQ(tp["tp"], tp);
}

TEST(Mesh, FlattenAndUnflatten) {
  const Mesh mesh = Mesh::make({2, 2, 3}, {"pp", "dp", "tp"});
  const Mesh inner = mesh.flatten({"dp", "tp"}, "all");
  EXPECT_EQ(inner.to_string(), "6(all):[1] of 12");
  EXPECT_EQ(inner.ranks(1), (Ranks{6, 7, 8, 9, 10, 11}));
  EXPECT_EQ(inner.unflatten("all", {2, 3}, {"dp", "tp"}), mesh.slice({"dp", "tp"}));
  // Not evenly spaced: two steps in one dim.
  const Mesh outer = mesh.flatten({"pp", "tp"});
  EXPECT_EQ(outer.to_string(), "(2*3)(pp_tp):[(6*1)] of 12");
  EXPECT_EQ(outer.ranks(1), (Ranks{3, 4, 5, 9, 10, 11}));
  EXPECT_EQ(outer.coordinate(10), (Dims{4}));
  EXPECT_EQ(outer.unflatten("pp_tp", {2, 3}, {"pp", "tp"}), mesh.slice({"pp", "tp"}));
  EXPECT_EQ(mesh.flatten_all("world").to_string(), "12(world)");
  EXPECT_EQ(mesh["tp"].flatten_all("tp"), mesh["tp"]);
  EXPECT_EQ(Mesh::make({2, 2}).flatten_all(), Mesh::make({4}));
  EXPECT_EQ(Mesh::make({12}, {"w"}).unflatten("w", {2, 2, 3}, {"pp", "dp", "tp"}), mesh);
}

TEST(Mesh, Concatenate) {
  const Mesh mesh = Mesh::make({2, 2, 3}, {"pp", "dp", "tp"});
  EXPECT_EQ(Mesh::concatenate({mesh["dp"], mesh["tp"]}), mesh.slice({"dp", "tp"}));
  // Side by side in any order: a mesh seen from another corner.
  const Mesh turned = Mesh::concatenate({mesh["tp"], mesh["dp"]});
  EXPECT_EQ(turned.ranks(0), (Ranks{0, 3, 1, 4, 2, 5}));
  EXPECT_EQ(turned.to_string(), "3x2(tp,dp):[1,3] of 12");
}

TEST(Mesh, SelectPinsOneRow) {
  const Mesh mesh = Mesh::make({2, 2, 3}, {"pp", "dp", "tp"});
  const Mesh stage = mesh.select("pp", 1);
  EXPECT_EQ(stage.ranks(), (Ranks{6, 7, 8, 9, 10, 11}));
  EXPECT_EQ(stage.rows(), 1);
  EXPECT_EQ(stage.coordinate(3), std::nullopt);
  EXPECT_EQ(stage.coordinate(10), (Dims{1, 1}));
  EXPECT_EQ(stage.to_string(), "2x3(dp,tp):[3,1] at [2:6=1] of 12");
  EXPECT_EQ(stage["tp"].rows(), 2);
  EXPECT_EQ(stage["tp"].ranks(1), (Ranks{9, 10, 11}));
  EXPECT_EQ(stage["tp"].coordinate(1), std::nullopt);
  const auto rows = mesh.submeshes("tp");
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(rows[2].ranks(), (Ranks{6, 7, 8}));
  EXPECT_EQ(rows[2], mesh.select("pp", 1).select("dp", 0));
  EXPECT_FALSE(rows[2].contains(9));
}

TEST(Mesh, EqualMeshesAreOneObject) {
  const Mesh a = Mesh::make({2, 3}, {"dp", "tp"});
  EXPECT_EQ(a, Mesh::parse("dp=2,tp=3"));
  EXPECT_EQ(a.hash(), Mesh::parse("2x3(dp,tp)").hash());
  EXPECT_FALSE(a == Mesh::make({2, 3}, {"dp", "cp"}));
  EXPECT_FALSE(a == Mesh::make({2, 3}));
  EXPECT_FALSE(a == Mesh::from_ranks({2, 3}, {5, 4, 3, 2, 1, 0}, {"dp", "tp"}));
}

// Whatever is cut out of a mesh: rows are disjoint and cover it, coordinates and ranks are inverse, text reads back.
TEST(Mesh, RandomPartsHoldTheInvariants) {
  sweep::Random random(5);
  const std::vector<Dims> shapes = sweep::mesh_shapes(24, 4);
  for (int i = 0; i < sweep::rounds(5'000); ++i) {
    const Dims shape = random.pick(shapes);
    std::vector<std::string> names;
    for (std::size_t d = 0; d < shape.size(); ++d) names.push_back(std::string(1, static_cast<char>('a' + d)));
    Mesh mesh = Mesh::make(shape, names);
    if (random.chance(2)) {
      Ranks ranks = mesh.ranks();
      for (std::size_t k = ranks.size(); k > 1; --k) std::swap(ranks[k - 1], ranks[random.below(k)]);
      for (std::int64_t& rank : ranks) rank *= 2;
      mesh = Mesh::from_ranks(shape, ranks, names);
    }
    for (int step = 0; step < 3; ++step) {
      const std::int64_t what = random.below(3);
      std::vector<std::string> some;
      for (const std::string& name : mesh.names()) {
        if (random.chance(2)) some.push_back(name);
      }
      if (some.empty()) some = {mesh.names()[0]};
      if (what == 0) mesh = mesh.slice(some);
      if (what == 1) mesh = mesh.flatten(some, "f" + std::to_string(step));
      if (what == 2 && mesh.ndim() > 1) mesh = mesh.select(some[0], random.below(mesh.size(some[0])));
    }
    ASSERT_EQ(Mesh::parse(mesh.to_string()), mesh) << mesh.to_string();
    std::set<std::int64_t> seen;
    for (std::int64_t row = 0; row < mesh.rows(); ++row) {
      const Ranks ranks = mesh.ranks(row);
      ASSERT_EQ(static_cast<std::int64_t>(ranks.size()), mesh.size());
      std::int64_t index = 0;
      sweep::for_each_coordinate(mesh, [&](const Dims& coordinate) {
        const std::int64_t rank = ranks[index++];
        ASSERT_TRUE(seen.insert(rank).second);
        ASSERT_EQ(mesh.rank_at(coordinate, row), rank);
        ASSERT_EQ(mesh.coordinate(rank), coordinate);
        ASSERT_EQ(mesh.row_of(rank), row);
        for (std::int64_t d = 0; d < mesh.ndim(); ++d) ASSERT_EQ(mesh.group(d, rank)[coordinate[d]], rank);
      });
    }
    for (std::int64_t rank = 0; rank <= mesh.max_rank(); ++rank) ASSERT_EQ(mesh.contains(rank), seen.count(rank) == 1);
    if (HasFatalFailure()) return;
  }
}

TEST(Mesh, HundredThousandRanksAreCheap) {
  const std::size_t before = mallinfo2().uordblks;
  const auto start = std::chrono::steady_clock::now();
  const Mesh mesh = Mesh::make({10, 10, 10, 100}, {"pp", "dp", "cp", "tp"});
  const Mesh part = mesh.slice({"pp", "tp"}).flatten_all("all");
  EXPECT_EQ(part.coordinate(98'765), (Dims{965}));
  EXPECT_EQ(mesh.coordinate(98'765), (Dims{9, 8, 7, 65}));
  EXPECT_EQ(part.rank_at({965}, 87), 98'765);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(10));
  EXPECT_LT(mallinfo2().uordblks - before, 100'000u) << "rank lists were written out";
}

TEST(DeviceMesh, KnowsWhoIAm) {
  const DeviceMesh mesh(Mesh::make({2, 2}, {"dp", "tp"}), DeviceKind::kCpu, 2, 8);
  EXPECT_EQ(mesh.coordinate(), (Dims{1, 0}));
  EXPECT_EQ(mesh.local_rank("dp"), 1);
  EXPECT_EQ(mesh["tp"].local_rank(), 0);
  EXPECT_EQ(mesh["tp"].my_ranks(), (Ranks{2, 3}));
  EXPECT_EQ(mesh.my_group(0), (Ranks{0, 2}));
  const DeviceMesh outside(Mesh::make({2, 2}, {"dp", "tp"}), DeviceKind::kCpu, 5, 8);
  EXPECT_FALSE(outside.contains_me());
  EXPECT_EQ(outside.my_ranks(), Ranks{});
  // The same on all ranks, whoever asks.
  EXPECT_EQ(mesh, outside);
  EXPECT_FALSE(mesh == DeviceMesh(mesh, DeviceKind::kCuda, 2, 8));
}

TEST(DeviceMesh, SubMeshesKnowWhatTheyWereTakenFrom) {
  const DeviceMesh mesh(Mesh::make({2, 2, 2}, {"pp", "dp", "tp"}), DeviceKind::kCpu, 2, 8);
  EXPECT_EQ(mesh.root(), mesh);
  EXPECT_EQ(mesh["tp"].root(), mesh);
  EXPECT_EQ(mesh.slice({"dp", "tp"})["tp"].root(), mesh);
  EXPECT_EQ(mesh.flatten({"dp", "tp"}, "all").root(), mesh);
}

}  // namespace
}  // namespace dtensor
