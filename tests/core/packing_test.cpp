// Copies of boxes between memories, against lists of elements.
#include "dtensor/core/packing.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>

#include "dtensor/core/view.h"
#include "tests/core/sweep.h"

namespace dtensor {
namespace {

using sweep::Random;

// What a rank holds, each element by its row-major index in the whole, as local_place lays it out.
std::vector<std::int32_t> filled(const Spec& spec, const Dims& at) {
  const Place place = local_place(spec, at);
  const Dims& shape = spec.meta().shape();
  std::vector<std::int32_t> memory(static_cast<std::size_t>(place.held.numel()), -1);
  // Walk the box in row-major order and put each element where the strides say.
  const sweep::Indices elements = sweep::elements_of(place.held, shape);
  Dims counts;
  for (const DimSet& dim : place.held.dims) counts.push_back(count_of(dim));
  Dims position(counts.size());
  for (const std::int64_t element : elements) {
    std::int64_t offset = 0;
    for (std::size_t d = 0; d < counts.size(); ++d) offset += position[d] * place.stride[d];
    memory[static_cast<std::size_t>(offset)] = static_cast<std::int32_t>(element);
    for (std::size_t d = counts.size(); d-- > 0;) {
      if (++position[d] < counts[d]) break;
      position[d] = 0;
    }
  }
  return memory;
}

Spec random_spec(Random& random, const Mesh& mesh, const TensorMeta& meta) {
  sweep::Case c = sweep::random_case(random, mesh, meta.shape(), false);
  if (random.chance(3)) {
    for (Placement& placement : c.placements) placement = Replicate();
    c.placements[static_cast<std::size_t>(random.below(mesh.ndim()))] =
        StridedShard(random.below(meta.ndim()), 1 + random.below(4));
    return Spec::make(meta, mesh, c.placements);
  }
  return Spec::make(meta, mesh, c.placements, c.order);
}

TensorMeta random_meta(Random& random) {
  const Dims shape = sweep::random_shape(random, 3, 9);
  std::vector<std::int64_t> order = sweep::iota(static_cast<std::int64_t>(shape.size()));
  if (random.chance(2)) std::reverse(order.begin(), order.end());
  Dims stride(shape.size());
  std::int64_t next = 1;
  for (std::size_t i = order.size(); i-- > 0;) {
    stride[order[i]] = next;
    next *= std::max<std::int64_t>(1, shape[order[i]]);
  }
  return TensorMeta(shape, stride, DType::kI32);
}

// Every piece of a target is taken from its holder through a packed message, in a few parts, or straight.
TEST(Packing, BoxesArriveWherePlacesSay) {
  Random random(11);
  const std::vector<Dims> meshes = sweep::mesh_shapes(6, 3);
  for (std::int64_t round = 0; round < sweep::rounds(4000); ++round) {
    const Mesh mesh = Mesh::make(random.pick(meshes));
    const TensorMeta meta = random_meta(random);
    const Spec from = random_spec(random, mesh, meta);
    const Spec to = random_spec(random, mesh, meta);
    SCOPED_TRACE(from.to_string() + " -> " + to.to_string());
    const std::int64_t parts = 1 + random.below(3);
    sweep::for_each_coordinate(mesh, [&](const Dims& at) {
      const std::vector<std::int32_t> expected = filled(to, at);
      std::vector<std::int32_t> straight(expected.size(), -1);
      std::vector<std::int32_t> through(expected.size(), -1);
      for_each_piece(from, to, at, [&](const Piece& piece) {
        Dims holder = piece.holder;
        for (std::int64_t& index : holder) index = std::max<std::int64_t>(index, 0);
        const std::vector<std::int32_t> source = filled(from, holder);
        Copies copies;
        add_copies(piece.box, local_place(from, holder), local_place(to, at), copies);
        play(copies, source.data(), straight.data(), 4);
        for (std::int64_t part = 0; part < parts; ++part) {
          const Box box = part_of(piece.box, parts, part);
          std::vector<std::int32_t> message(static_cast<std::size_t>(box.numel()) + 3, -2);
          const Place between = packed(box, packing_order(meta), 3);
          Copies pack;
          add_copies(box, local_place(from, holder), between, pack);
          play(pack, source.data(), message.data(), 4);
          Copies unpack;
          add_copies(box, between, local_place(to, at), unpack);
          play(unpack, message.data(), through.data(), 4);
        }
      });
      ASSERT_EQ(straight, expected);
      ASSERT_EQ(through, expected);
    });
  }
}

TEST(Packing, ElementsOfEverySizeAreMoved) {
  // A transposition of 3x5, from row-major to column-major memory.
  const Copy copy{0, 0, {{5, 1, 3}, {3, 5, 1}}};
  const auto check = [&](auto element) {
    using Element = decltype(element);
    std::vector<Element> from(15), to(15);
    for (int i = 0; i < 15; ++i) std::memset(&from[i], i + 1, sizeof(Element));
    play({copy}, from.data(), to.data(), sizeof(Element));
    for (int r = 0; r < 3; ++r) {
      for (int c = 0; c < 5; ++c) ASSERT_EQ(std::memcmp(&to[c * 3 + r], &from[r * 5 + c], sizeof(Element)), 0);
    }
  };
  check(std::uint8_t{});
  check(std::uint16_t{});
  check(std::uint32_t{});
  check(std::uint64_t{});
  check(std::array<std::uint64_t, 2>{});
}

// A flattened dim of which every rank holds part of every row is one strided copy, not one per row.
TEST(Packing, RegularRunsAreOneCopy) {
  const Spec rows = *flatten(Spec::parse("f32[4096,6] @ 2(tp) : S(1)"), 0, 1);
  const Spec whole = Spec::parse("f32[24576] @ 2(tp) : R");
  Copies copies;
  add_copies(box_of(rows, {1}), local_place(whole, {1}), local_place(rows, {1}), copies);
  ASSERT_EQ(copies.size(), 1);
  EXPECT_EQ(copies[0], (Copy{3, 0, {{4096, 6, 3}, {3, 1, 1}}}));
}

TEST(Packing, KnowsWhenNothingMoves) {
  const Spec spec = Spec::parse("f32[8,6] @ 2x2(a,b) : S(0),R");
  const Place place = local_place(spec, {1, 0});
  Copies copies;
  add_copies(place.held, place, packed(place.held, {0, 1}), copies);
  EXPECT_TRUE(is_identity(copies, 24));
  EXPECT_FALSE(is_identity(copies, 25));
  Copies turned;
  add_copies(place.held, place, packed(place.held, {1, 0}), turned);
  EXPECT_FALSE(is_identity(turned, 24));
  EXPECT_TRUE(is_identity({}, 0));
}

TEST(Packing, PartsOfABoxAreItsLongestDimCut) {
  const Box box = box_of(Spec::parse("f32[3,7] @ 1(x) : R"), {0});
  EXPECT_EQ(part_of(box, 3, 0).numel(), 9);
  EXPECT_EQ(part_of(box, 3, 2).numel(), 3);
  EXPECT_EQ(first_element(part_of(box, 3, 1), {3, 7}), 3);
  const Box scalar = box_of(Spec::parse("f32[] @ 1(x) : R"), {0});
  EXPECT_EQ(part_of(scalar, 2, 0).numel(), 1);
  EXPECT_EQ(part_of(scalar, 2, 1).numel(), 0);
}

}  // namespace
}  // namespace dtensor
