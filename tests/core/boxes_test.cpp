#include "dtensor/core/boxes.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "dtensor/core/view.h"
#include "tests/core/sweep.h"

namespace dtensor {
namespace {

using sweep::Indices;

Indices elements(const Spec& spec, const Dims& coordinate) {
  return sweep::elements_of(box_of(spec, coordinate), spec.meta().shape());
}

// A spec of the given shape as views make them: cut in another shape, then brought here.
Spec random_spec(sweep::Random& random, const Mesh& mesh, const Dims& shape) {
  if (random.chance(2) && shape.size() == 1) {
    std::int64_t rows = 1 + random.below(std::max<std::int64_t>(shape[0], 1));
    while (shape[0] % rows != 0) --rows;
    const auto flat = flatten(sweep::random_case(random, mesh, {rows, shape[0] / rows}).spec(), 0, 1);
    if (flat) return *flat;
  }
  return sweep::random_case(random, mesh, shape).spec();
}

void check_pieces(const Spec& has, const Spec& wants) {
  SCOPED_TRACE(has.to_string() + " -> " + wants.to_string());
  sweep::for_each_coordinate(wants.mesh(), [&](const Dims& coordinate) {
    Indices found;
    std::set<std::vector<std::int64_t>> holders;
    for_each_piece(has, wants, coordinate, [&](const Piece& piece) {
      const Indices part = sweep::elements_of(piece.box, has.meta().shape());
      ASSERT_FALSE(part.empty());
      ASSERT_EQ(static_cast<std::int64_t>(part.size()), piece.box.numel());
      found.insert(found.end(), part.begin(), part.end());
      // Whoever it names has all of it, on every index where any will do.
      sweep::for_each_coordinate(has.mesh(), [&](const Dims& holder) {
        bool named = true;
        for (std::size_t m = 0; m < holder.size(); ++m) named &= piece.holder[m] < 0 || piece.holder[m] == holder[m];
        const Indices held = elements(has, holder);
        const bool all = std::includes(held.begin(), held.end(), part.begin(), part.end());
        ASSERT_EQ(all, named) << "holder (" << holder[0] << "…)";
      });
      ASSERT_TRUE(holders.emplace(piece.holder.begin(), piece.holder.end()).second);
    });
    std::sort(found.begin(), found.end());
    ASSERT_EQ(found, elements(wants, coordinate));
  });
}

TEST(Boxes, PiecesOfOneMesh) {
  sweep::Random random(21);
  const std::vector<Dims> meshes = sweep::mesh_shapes(8, 3);
  for (int i = 0; i < sweep::rounds(4'000); ++i) {
    const Mesh mesh = Mesh::make(random.pick(meshes));
    const Dims shape = sweep::random_shape(random, 2, 13);
    check_pieces(random_spec(random, mesh, shape), random_spec(random, mesh, shape));
    if (HasFatalFailure()) return;
  }
}

TEST(Boxes, PiecesBetweenMeshes) {
  sweep::Random random(22);
  const std::vector<Dims> meshes = sweep::mesh_shapes(6, 2);
  for (int i = 0; i < sweep::rounds(4'000); ++i) {
    const Dims shape = sweep::random_shape(random, 2, 13);
    check_pieces(random_spec(random, Mesh::make(random.pick(meshes)), shape),
                 random_spec(random, Mesh::make(random.pick(meshes)), shape));
    if (HasFatalFailure()) return;
  }
}

// What a rank receives from another and what that one finds it has to send are the same elements.
TEST(Boxes, SendersAndReceiversAgree) {
  sweep::Random random(23);
  const std::vector<Dims> meshes = sweep::mesh_shapes(6, 2);
  for (int i = 0; i < sweep::rounds(500); ++i) {
    const Mesh mesh = Mesh::make(random.pick(meshes));
    const Dims shape = sweep::random_shape(random, 2, 9);
    const Spec from = sweep::random_case(random, mesh, shape, false).spec();
    const Spec to = sweep::random_case(random, mesh, shape, false).spec();
    std::map<std::pair<std::int64_t, std::int64_t>, std::multiset<std::int64_t>> sent;
    std::map<std::pair<std::int64_t, std::int64_t>, std::multiset<std::int64_t>> received;
    const auto each_peer = [&](const Dims& pattern, auto fn) {
      sweep::for_each_coordinate(mesh, [&](const Dims& peer) {
        bool named = true;
        for (std::size_t m = 0; m < peer.size(); ++m) named &= pattern[m] < 0 || pattern[m] == peer[m];
        if (named) fn(mesh.rank_at(peer));
      });
    };
    sweep::for_each_coordinate(mesh, [&](const Dims& me) {
      for_each_piece(from, to, me, [&](const Piece& piece) {
        each_peer(piece.holder, [&](std::int64_t peer) {
          for (std::int64_t e : sweep::elements_of(piece.box, shape)) received[{peer, mesh.rank_at(me)}].insert(e);
        });
      });
      for_each_piece(to, from, me, [&](const Piece& piece) {
        each_peer(piece.holder, [&](std::int64_t peer) {
          for (std::int64_t e : sweep::elements_of(piece.box, shape)) sent[{mesh.rank_at(me), peer}].insert(e);
        });
      });
    });
    ASSERT_EQ(sent, received) << from.to_string() << " -> " << to.to_string();
  }
}

// 4,096 runs a rank, said as one box: nothing grows with them.
TEST(Boxes, ManyRunsAreOneBox) {
  const auto flat = flatten(Spec::parse("f32[4096,1024,8] @ 4(tp) : S(1)"), 0, 1);
  ASSERT_TRUE(flat);
  const Box box = box_of(*flat, {2});
  EXPECT_EQ(box.dims[0].size(), 2u);
  EXPECT_EQ(box.numel(), 4096 * 256 * 8);
  EXPECT_EQ(runs_of(box.dims[0]).size(), 4096u);
  std::int64_t pieces = 0;
  for_each_piece(*flat, *flat, {2}, [&](const Piece& piece) {
    ++pieces;
    EXPECT_EQ(piece.holder, (Dims{2}));
    EXPECT_EQ(piece.box.dims[0].size(), 2u);
    EXPECT_EQ(piece.box.dims[0][0].intervals.size(), 1u);
  });
  EXPECT_EQ(pieces, 1);
}

// Only one's own pieces are looked at: a million ranks cost nothing.
TEST(Boxes, CostIsOnesOwnPieces) {
  const Mesh mesh = Mesh::make({1024, 1024}, {"a", "b"});
  const TensorMeta meta({1 << 20, 1 << 20}, DType::kF32);
  const Spec rows = Spec::make(meta, mesh, {Shard(0), Shard(0)});
  const Spec blocks = Spec::make(meta, mesh, {Shard(0), Shard(1)});
  std::int64_t pieces = 0;
  for_each_piece(rows, blocks, {3, 5}, [&](const Piece& piece) {
    EXPECT_EQ(piece.holder, (Dims{3, pieces}));
    EXPECT_EQ(piece.box.numel(), 1024);
    ++pieces;
  });
  EXPECT_EQ(pieces, 1024);
}

TEST(Boxes, ReplicasAndPartials) {
  const Spec spec = Spec::parse("f32[7,5] @ 2x2x3(a,b,c) : R,S(0),P(sum)");
  EXPECT_EQ(replica_dims(spec), (std::vector<std::int64_t>{0}));
  EXPECT_EQ(replicas_of(spec, {1, 1, 2}), (std::vector<std::int64_t>{5, 11}));
  const Spec whole = Spec::parse("f32[7,5] @ 1(one) : R");
  std::vector<Dims> holders;
  for_each_piece(spec, whole, {0}, [&](const Piece& piece) { holders.push_back(piece.holder); });
  EXPECT_EQ(holders, (std::vector<Dims>{{Piece::kAny, 0, Piece::kEvery}, {Piece::kAny, 1, Piece::kEvery}}));
}

TEST(Boxes, SameBoxesIsExact) {
  sweep::Random random(24);
  const std::vector<Dims> meshes = sweep::mesh_shapes(8, 3);
  std::int64_t same = 0;
  std::int64_t same_but_different_specs = 0;
  for (int i = 0; i < sweep::rounds(20'000); ++i) {
    const Mesh mesh = Mesh::make(random.pick(meshes));
    const Dims shape = sweep::random_shape(random, 2, 6);
    const Spec a = random_spec(random, mesh, shape);
    const Spec b = random_spec(random, mesh, shape);
    bool expected = true;
    for (std::int64_t m = 0; m < mesh.ndim(); ++m) {
      expected &= mesh.shape()[m] == 1 || a.partials()[m] == b.partials()[m];
    }
    sweep::for_each_coordinate(mesh, [&](const Dims& at) {
      for (std::size_t d = 0; d < shape.size(); ++d) {
        expected &= runs_of(box_of(a, at).dims[d]) == runs_of(box_of(b, at).dims[d]);
      }
    });
    ASSERT_EQ(same_boxes(a, b), expected) << a.to_string() << " and " << b.to_string();
    same += expected;
    same_but_different_specs += expected && !(a == b);
  }
  EXPECT_GT(same, sweep::rounds(500));
  EXPECT_GT(same_but_different_specs, sweep::rounds(100));
}

}  // namespace
}  // namespace dtensor
