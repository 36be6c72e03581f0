#include "dtensor/core/cost.h"

#include <gtest/gtest.h>

#include "tests/core/expect_error.h"

namespace dtensor {
namespace {

TEST(Cost, SaturatesAndNeverOverflows) {
  EXPECT_EQ(saturating_add(kForever, 1), kForever);
  EXPECT_EQ(scaled(kForever, 4, 8), kForever / 2);
  EXPECT_EQ(scaled(kForever, kForever, 1), kForever);
  const CostModel cost;
  const GroupCost group = cost.group(Mesh::make({4}), std::vector<std::int64_t>{0});
  EXPECT_EQ(cost.all_gather(group, kForever / 2), kForever);
}

TEST(Cost, CountsMessagesAndBytes) {
  const CostModel cost({.link = {1'000, 1'024}, .step_ps = 7});
  const Mesh mesh = Mesh::make({2, 4});
  const GroupCost group = cost.group(mesh, std::vector<std::int64_t>{0, 1});
  EXPECT_EQ(group.size, 8);
  EXPECT_EQ(group.rounds_ps, 3'000);
  EXPECT_EQ(group.peers_ps, 7'000);
  EXPECT_EQ(cost.all_gather(group, 100), 7 + 3'000 + 700);
  EXPECT_EQ(cost.all_reduce(group, 800), 7 + 6'000 + 1'400);
  EXPECT_EQ(cost.all_to_all(group, 800), 7 + 7'000 + 700);
  EXPECT_EQ(cost.permute(group, 800, 1), 7 + 1'000 + 800);
  EXPECT_EQ(cost.exchange(group, 3, 500), 7 + 3'000 + 500);
}

TEST(Cost, LinksByNameByBlockOrAsTheRest) {
  const Link fast{10, 1};
  const Link slow{1'000, 100};
  const Link rest{500, 50};
  const CostModel cost({.link = rest, .levels = {{8, fast}}, .named = {{"far", slow}}});
  const Mesh mesh = Mesh::make({2, 4, 8}, {"far", "node", "gpu"});
  EXPECT_EQ(cost.link_of(mesh, 0), slow);
  EXPECT_EQ(cost.link_of(mesh, 1), rest);
  EXPECT_EQ(cost.link_of(mesh, 2), fast);
  EXPECT_EQ(cost.between(), slow);
  // 7 peers on the same node, the other 24 of this half over the rest: the slowest differing mesh dim counts.
  EXPECT_EQ(cost.group(mesh, std::vector<std::int64_t>{1, 2}).peers_kib_ps, 7 * 1 + 24 * 50);
}

TEST(Cost, EqualConstantsAreOneModel) {
  EXPECT_EQ(CostModel(), CostModel(CostConstants{}));
  EXPECT_FALSE(CostModel() == CostModel({.step_ps = 1}));
}

TEST(Cost, RefusesNonsense) {
  EXPECT_ERROR(CostModel({.link = {-1, 0}}), kInvalidArgument,
               "[cost] a cost constant is negative; got -1; expected 0 picoseconds or more");
  EXPECT_ERROR(CostModel({.levels = {{8, {}}, {4, {}}}}), kInvalidArgument,
               "[cost] link levels do not grow; got 4; expected ascending numbers of ranks, 1 or more");
}

}  // namespace
}  // namespace dtensor
