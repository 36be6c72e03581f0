#include "dtensor/core/provenance.h"

#include <gtest/gtest.h>

#include "dtensor/core/spec.h"

namespace dtensor {
namespace {

const std::string kMul = "aten::mul", kAdd = "aten::add", kMm = "aten::mm";

TEST(History, NamesWhereTwoRanksPart) {
  History mine, theirs;
  for (History* history : {&mine, &theirs}) {
    history->add(1, &kMm, 0, 0);
    history->add(2, &kMul, 1, 0);
  }
  mine.add(20, &kMm, 2, 0);  // for itself: neither tensor comes from it
  mine.add(30, &kMul, 2, 0);
  theirs.add(31, &kAdd, 2, 0);
  // What follows from the difference is not where it began.
  mine.add(40, &kMm, 30, 1);
  theirs.add(41, &kMm, 31, 1);
  const FirstDifference parted = first_difference(mine.steps(), 40, theirs.steps(), 41);
  EXPECT_EQ(parted.mine, "aten::mul");
  EXPECT_EQ(parted.theirs, "aten::add");
}

TEST(History, AnExtraResultThatNobodyNeedsComesLate) {
  History mine, theirs;
  mine.add(1, &kMm, 0, 0);
  theirs.add(1, &kMm, 0, 0);
  const FirstDifference parted = first_difference(mine.steps(), 40, theirs.steps(), 41);
  EXPECT_EQ(parted.mine, "");
  EXPECT_EQ(parted.theirs, "");
}

TEST(History, KeepsTheLastEntriesAndSurvivesTheWire) {
  History history;
  for (std::uint64_t i = 1; i <= History::kEntries + 100; ++i) history.add(i, i % 2 ? &kMul : &kAdd, i - 1, 0);
  const auto steps = history.steps();
  ASSERT_EQ(steps.size(), History::kEntries);
  EXPECT_EQ(steps.front().result, 101);
  EXPECT_EQ(steps.back().result, History::kEntries + 100);
  const std::string bytes = history.to_bytes(4096);
  EXPECT_LE(bytes.size(), 4096);
  const auto read = History::from_bytes(bytes);
  ASSERT_GT(read.size(), 100);
  EXPECT_EQ(read.back().result, steps.back().result);
  EXPECT_EQ(read.back().name, steps.back().name);
  EXPECT_EQ(read.front().name, steps[steps.size() - read.size()].name);
}

TEST(History, ReadsAnyBytes) {
  EXPECT_TRUE(History::from_bytes("").empty());
  EXPECT_TRUE(History::from_bytes("abc").empty());
  EXPECT_TRUE(History::from_bytes(std::string(100, '\xFF')).empty());
  History history;
  history.add(1, &kMul, 2, 3);
  const std::string bytes = history.to_bytes(1000);
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_LE(History::from_bytes(bytes.substr(0, length)).size(), 1) << length;
  }
}

TEST(Provenance, SumsInAnyOrder) {
  Provenance a{5, {1, 0, 2}}, b{7, {3, 0, 4}};
  Provenance ab = a, ba = b;
  ab.add(b);
  ba.add(a);
  EXPECT_EQ(ab.made, ba.made);
  EXPECT_EQ(ab.values, ba.values);
  Provenance mixed{9, {}}, other{9, {}};
  mixed.mix_in(a);
  mixed.mix_in(b);
  other.mix_in(b);
  other.mix_in(a);
  EXPECT_NE(mixed.made, other.made);
}

TEST(RankProvenance, NumbersLeavesOfOneKind) {
  RankProvenance rank;
  EXPECT_EQ(rank.number_of_leaf(3), 1);
  EXPECT_EQ(rank.number_of_leaf(4), 1);
  EXPECT_EQ(rank.number_of_leaf(3), 2);
  std::uint64_t elsewhere = 1;
  std::thread([&] { elsewhere = rank.number_of_leaf(3); }).join();
  EXPECT_EQ(elsewhere, 0);
  EXPECT_EQ(rank.number_of_leaf(3), 3);
}

TEST(RankProvenance, SumsWritesByMesh) {
  RankProvenance rank;
  EXPECT_FALSE(rank.note_replica_written(7, 1));
  rank.add_mesh(7, {0, 1});
  rank.add_mesh(8, {0, 1, 2});
  EXPECT_TRUE(rank.note_replica_written(7, 1));
  const std::uint64_t once = rank.replicas_written(7);
  EXPECT_TRUE(rank.note_replica_written(7, 2));
  EXPECT_NE(rank.replicas_written(7), once);
  EXPECT_EQ(rank.replicas_written(8), 0);
  EXPECT_EQ(rank.replicas_written().size(), 2);
}

// Golden values: they hold in every process and build, since ranks compare them.
TEST(StableHash, DoesNotDependOnTheProcess) {
  const Mesh mesh = Mesh::make({2, 2}, {"dp", "tp"});
  const Spec spec = Spec::make({{8, 6}, DType::kF32}, mesh, {Shard(0), Replicate()});
  EXPECT_EQ(stable_hash("aten::mm"), stable_hash(std::string("aten::") + "mm"));
  EXPECT_EQ(spec.stable_hash(), Spec::parse(spec.to_string()).stable_hash());
  EXPECT_NE(spec.stable_hash(), Spec::make({{8, 6}, DType::kF32}, mesh, {Replicate(), Shard(0)}).stable_hash());
  EXPECT_NE(spec.stable_hash(), Spec::make({{8, 6}, DType::kF64}, mesh, {Shard(0), Replicate()}).stable_hash());
  EXPECT_NE(spec.stable_hash(), Spec::make({{8, 6}, DType::kF32}, mesh, {Shard(1), Replicate()}).stable_hash());
  EXPECT_NE(spec.stable_hash(), Spec::make({{8, 6}, DType::kF32}, mesh, {Shard(0), Partial()}).stable_hash());
  EXPECT_NE(mesh.stable_hash(), mesh["tp"].stable_hash());
}

}  // namespace
}  // namespace dtensor
