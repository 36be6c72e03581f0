#include "dtensor/comm/fingerprint.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include "tests/comm/errors.h"

namespace dtensor {
namespace {

using testing::error_of;

// A group that is only checked against, never used.
class Listed : public Communicator {
 public:
  Listed(std::int64_t rank, std::vector<std::int64_t> ranks) : Communicator("test", "tp", rank, std::move(ranks)) {}
  WorkPtr all_reduce(const at::Tensor&, ReduceOp) override { return nullptr; }
  WorkPtr all_gather(const at::Tensor&, const at::Tensor&, const std::vector<std::int64_t>&) override {
    return nullptr;
  }
  WorkPtr reduce_scatter(const at::Tensor&, const at::Tensor&, const std::vector<std::int64_t>&, ReduceOp) override {
    return nullptr;
  }
  WorkPtr all_to_all(const at::Tensor&, const at::Tensor&, const std::vector<std::int64_t>&,
                     const std::vector<std::int64_t>&) override {
    return nullptr;
  }
  WorkPtr broadcast(const at::Tensor&, std::int64_t) override { return nullptr; }
  WorkPtr scatter(const at::Tensor&, const at::Tensor&, const std::vector<std::int64_t>&, std::int64_t) override {
    return nullptr;
  }
  WorkPtr send(const at::Tensor&, std::int64_t, std::int64_t) override { return nullptr; }
  WorkPtr receive(const at::Tensor&, std::int64_t, std::int64_t) override { return nullptr; }
  WorkPtr barrier() override { return nullptr; }
};

at::Tensor floats(std::int64_t n) { return at::empty({n}, at::kFloat); }

TEST(Fingerprint, DescribesTheGroup) { EXPECT_EQ(Listed(0, {0, 2}).describe(), "test group \"tp\" {0,2}"); }

TEST(Fingerprint, WordsComeBack) {
  const Listed group(1, {4, 2});
  auto print = check_scatter(group, floats(3), {}, {5, 3}, 0);
  print.sequence = 17;
  const auto words = print.words();
  const auto back = Fingerprint::from_words(words);
  EXPECT_TRUE(back.agrees_with(print));
  EXPECT_EQ(back.words(), words);
  EXPECT_EQ(back.hash(), print.hash());
  EXPECT_EQ(back.to_string(), print.to_string());
}

TEST(Fingerprint, AnyWordsCanBePrinted) {
  const std::array<std::uint64_t, Fingerprint::kWords> noise = {~0ull, ~0ull, ~0ull, ~0ull, ~0ull, ~0ull};
  EXPECT_CONTAINS(Fingerprint::from_words(noise).to_string(), "unknown operation");
}

TEST(Fingerprint, Prints) {
  const Listed group(0, {0, 1});
  auto print = check_all_reduce(group, floats(100), ReduceOp::kSum);
  print.sequence = 5;
  EXPECT_EQ(print.to_string(), "#5 all_reduce(sum, Float, 100 elements)");
  EXPECT_EQ(check_broadcast(group, floats(1), 1).to_string(), "broadcast(Float, 1 element, root 1)");
  EXPECT_EQ(check_point_to_point(group, Operation::kSend, floats(2), 1, 9).to_string(),
            "send(Float, 2 elements, tag 9)");
  EXPECT_EQ(Fingerprint{}.to_string(), "barrier()");
}

TEST(Fingerprint, EveryDifferenceIsADivergence) {
  const Listed group(0, {0, 3});
  const auto base = check_all_gather(group, floats(8), floats(4), {4, 4});
  const auto differs = [&](Fingerprint other) {
    const std::array both = {base, other};
    EXPECT_NE(base.hash(), other.hash());
    return find_divergence(both, group.ranks()).value_or("none");
  };
  const std::array same = {base, base};
  EXPECT_EQ(find_divergence(same, group.ranks()), std::nullopt);
  auto other = base;
  other.sequence = 1;
  EXPECT_CONTAINS(differs(other), "rank 0: all_gather(Float, 8 elements, counts #");
  EXPECT_CONTAINS(differs(other), ", rank 3: #1 all_gather(Float, 8 elements, counts #");
  EXPECT_NE(differs(check_all_gather(Listed(1, {0, 3}), floats(8), floats(5), {3, 5})), "none");
  EXPECT_NE(differs(check_all_gather(group, floats(9), floats(4), {4, 5})), "none");
  EXPECT_NE(differs(check_all_gather(group, at::empty({8}, at::kInt), at::empty({4}, at::kInt), {4, 4})), "none");
  EXPECT_NE(differs(check_all_reduce(group, floats(8), ReduceOp::kSum)), "none");
}

// Ranks that are not equally far in their random numbers, or have other seeds.
TEST(Fingerprint, RandomNumbersAreCompared) {
  Listed group(0, {0, 3}), other(1, {0, 3});
  RandomSource mine, theirs;
  group.watch_random(mine.progress());
  other.watch_random(theirs.progress());
  const auto diverge = [&] {
    const std::array both = {check_all_reduce(group, floats(8), ReduceOp::kSum),
                             check_all_reduce(other, floats(8), ReduceOp::kSum)};
    return find_divergence(both, group.ranks()).value_or("none");
  };
  mine.seed(4);
  theirs.seed(4);
  mine.next();
  theirs.next();
  EXPECT_EQ(diverge(), "none");
  theirs.next();
  EXPECT_EQ(diverge(),
            "rank 0: all_reduce(sum, Float, 8 elements) after 1 random calls, rank 3: all_reduce(sum, Float, "
            "8 elements) after 2");
  mine.next();
  EXPECT_EQ(diverge(), "none");
  mine.next_from(1);
  theirs.next_from(2);
  EXPECT_EQ(diverge(),
            "rank 0: all_reduce(sum, Float, 8 elements) with one seed or generator, rank 3: all_reduce(sum, "
            "Float, 8 elements) with another");
}

TEST(Fingerprint, AllToAllBalancesExactlyWhenEveryPairAgrees) {
  const std::vector<std::int64_t> ranks = {0, 1, 2};
  // sends[s][d]
  std::vector<std::vector<std::int64_t>> sends = {{1, 2, 3}, {0, 5, 1}, {4, 0, 2}};
  const auto prints = [&](const std::vector<std::vector<std::int64_t>>& receives) {
    std::vector<Fingerprint> all;
    for (std::size_t r = 0; r < 3; ++r) {
      std::int64_t in = 0, out = 0;
      for (std::size_t p = 0; p < 3; ++p) {
        in += sends[r][p];
        out += receives[r][p];
      }
      all.push_back(check_all_to_all(Listed(static_cast<std::int64_t>(r), ranks), floats(out), floats(in), receives[r],
                                     sends[r]));
    }
    return all;
  };
  std::vector<std::vector<std::int64_t>> receives = {{1, 0, 4}, {2, 5, 0}, {3, 1, 2}};
  EXPECT_EQ(find_divergence(prints(receives), ranks), std::nullopt);
  std::swap(receives[2][0], receives[2][1]);
  EXPECT_CONTAINS(find_divergence(prints(receives), ranks).value_or("none"), "another count than its peer sends");
}

TEST(Fingerprint, RefusesWrongArguments) {
  const Listed group(1, {0, 2});
  EXPECT_EQ(error_of([&] { check_all_reduce(group, {}, ReduceOp::kSum); }),
            "[all_reduce] the buffer is undefined in test group \"tp\" {0,2}; expected a tensor");
  EXPECT_EQ(error_of([&] {
              check_all_reduce(group, at::empty({2, 3}).t(), ReduceOp::kSum);
            }),
            "[all_reduce] the buffer is not contiguous in test group \"tp\" {0,2}; got strides [1,3] for shape [3,2]; "
            "expected a contiguous tensor");
  EXPECT_EQ(error_of([&] { check_all_reduce(group, at::empty({2}, at::kLong), ReduceOp::kAvg); }),
            "[all_reduce] values of this type have no such reduction in test group \"tp\" {0,2}; got avg of Long");
  EXPECT_EQ(error_of([&] {
              check_all_gather(group, floats(3), floats(2), {1, 1, 1});
            }),
            "[all_gather] there must be one count per rank in test group \"tp\" {0,2}; got 3 counts; expected 2");
  EXPECT_EQ(error_of([&] {
              check_all_gather(group, floats(3), floats(2), {2, 2});
            }),
            "[all_gather] the counts do not add up to the output in test group \"tp\" {0,2}; got [2,2] for 3 elements; "
            "expected a sum of 3");
  EXPECT_CONTAINS(error_of([&] { check_all_gather(group, floats(3), floats(1), {1, 2}); }), "my count of elements");
  EXPECT_CONTAINS(error_of([&] { check_all_gather(group, floats(3), floats(4), {-1, 4}); }), "counts must be sizes");
  EXPECT_CONTAINS(error_of([&] {
                    check_all_gather(group, floats(3), at::empty({2}, at::kInt), {1, 2});
                  }),
                  "got Int and Float");
  EXPECT_CONTAINS(error_of([&] { check_broadcast(group, floats(3), 2); }), "got 2; expected 0 to 1");
  EXPECT_CONTAINS(error_of([&] { check_point_to_point(group, Operation::kSend, floats(3), 1, 0); }), "to itself");
  EXPECT_CONTAINS(error_of([&] { check_scatter(group, floats(3), {}, {4, 2}, 0); }), "my count of elements");
}

TEST(Fingerprint, RefusesWrongGroups) {
  EXPECT_EQ(error_of([] {
              check_group_ranks({0, 1, 0}, 0, 3);
            }),
            "[make_group] a group has each rank once; got {0,1,0}");
  EXPECT_EQ(error_of([] {
              check_group_ranks({0, 3}, 0, 3);
            }),
            "[make_group] a group is made of ranks of the world; got {0,3}; expected ranks 0 to 2");
  EXPECT_EQ(error_of([] {
              check_group_ranks({0, 1}, 2, 3);
            }),
            "[make_group] a group is made by its members alone; got rank 2 for {0,1}");
  check_group_ranks({2, 0}, 2, 3);
}

}  // namespace
}  // namespace dtensor
