#include "dtensor/comm/threads.h"

#include <ATen/ops/full.h>
#include <ATen/ops/max.h>
#include <ATen/ops/min.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <thread>

#include "tests/comm/contract.h"
#include "tests/comm/errors.h"

namespace dtensor {
namespace {

using testing::contract_checks;
using testing::run_contract;

// Runs `body` as every rank of a world of threads; the texts of what they threw, by rank.
std::vector<std::string> errors_of_ranks(std::int64_t size, const std::function<void(Transport&)>& body) {
  const auto transports = make_thread_transports(size);
  std::vector<std::string> errors(transports.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < transports.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(*transports[rank]);
        transports[rank]->leave({});
      } catch (const std::exception& error) {
        errors[rank] = error.what();
        transports[rank]->leave(error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

class ThreadsContract : public ::testing::TestWithParam<std::tuple<std::string, std::int64_t>> {};

TEST_P(ThreadsContract, Holds) {
  const auto& [name, size] = GetParam();
  for (const auto& error : errors_of_ranks(size, [&](Transport& transport) { run_contract(transport, {name}); })) {
    EXPECT_EQ(error, "");
  }
}

std::vector<std::string> check_names() {
  std::vector<std::string> names;
  for (const auto& check : contract_checks()) names.push_back(check.name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(Ranks, ThreadsContract,
                         ::testing::Combine(::testing::ValuesIn(check_names()), ::testing::Values(1, 2, 3, 4, 7)),
                         [](const auto& made) {
                           return std::get<0>(made.param) + "_" + std::to_string(std::get<1>(made.param));
                         });

using Clock = std::chrono::steady_clock;
constexpr auto kTimeout = std::chrono::milliseconds(200);

CommunicatorPtr group_of(Transport& transport, const std::string& name = "tp") {
  std::vector<std::int64_t> ranks;
  for (std::int64_t r = 0; r < transport.size(); ++r) ranks.push_back(r);
  return transport.make_group(ranks, {.name = name, .timeout = kTimeout});
}

at::Tensor ones(std::int64_t n) { return at::full({n}, 1.0, at::kFloat); }

// Every fault must be over within its timeout and a second.
class ThreadsFault : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_LT(Clock::now() - start_, kTimeout + std::chrono::seconds(1)); }
  Clock::time_point start_ = Clock::now();
};

TEST_F(ThreadsFault, RankThatThrowsReleasesTheOthers) {
  const auto errors = errors_of_ranks(3, [](Transport& transport) {
    const auto group = transport.make_group({0, 1, 2}, {.name = "tp"});  // ten minutes
    group->barrier()->wait();
    if (transport.rank() == 1) throw std::runtime_error("out of cheese");
    group->all_reduce(ones(4), ReduceOp::kSum)->wait();
  });
  EXPECT_EQ(errors[1], "out of cheese");
  const std::string text =
      "[all_reduce] rank 1 left threads group \"tp\" {0,1,2}; got its error: out of cheese; expected #2 "
      "all_reduce(sum, "
      "Float, 4 elements) on every rank";
  // Whoever notices first says so; the other one is told of it, unless it notices by itself.
  for (const int rank : {0, 2}) EXPECT_CONTAINS(errors[std::size_t(rank)], text);
}

TEST_F(ThreadsFault, RankThatLeavesReleasesTheOthers) {
  const auto errors = errors_of_ranks(2, [](Transport& transport) {
    const auto group = transport.make_group({0, 1}, {.name = "tp"});
    if (transport.rank() == 1) return;
    group->all_gather(ones(2), ones(1), {1, 1})->wait();
  });
  EXPECT_CONTAINS(errors[0],
                  "[all_gather] rank 1 left threads group \"tp\" {0,1}; got no more calls from it: it has finished; "
                  "expected #1 all_gather(Float, 2 elements");
  EXPECT_EQ(errors[1], "");
}

TEST_F(ThreadsFault, WhatARankIssuedBeforeItLeftStillEnds) {
  const auto errors = errors_of_ranks(2, [](Transport& transport) {
    const auto group = transport.make_group({0, 1}, {.name = "tp"});
    const auto large = ones(1'000'000), small = ones(3);
    if (transport.rank() == 1) {
      group->all_reduce(large, ReduceOp::kSum);
      group->send(small, 0);
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    group->all_reduce(large, ReduceOp::kSum)->wait();
    EXPECT_EQ(large.min().item<float>(), 2.f);
    const auto received = at::zeros({3}, at::kFloat);
    group->receive(received, 1)->wait();
    EXPECT_EQ(received.min().item<float>(), 1.f);
  });
  EXPECT_EQ(errors, (std::vector<std::string>{"", ""}));
}

TEST_F(ThreadsFault, RankThatNeverComesIsNamedAndTheGroupIsPoisoned) {
  std::string again;
  std::promise<void> gave_up;
  const auto errors = errors_of_ranks(3, [&](Transport& transport) {
    const auto group = group_of(transport);
    if (transport.rank() == 2) {
      group->barrier();
      return gave_up.get_future().wait();
    }
    group->barrier()->wait();
    const auto work = group->all_reduce(ones(4), ReduceOp::kSum);
    if (transport.rank() == 1) return work->wait();
    try {
      work->wait();
    } catch (const Error&) {
      again = testing::error_of([&] { group->broadcast(ones(4), 0); });
      gave_up.set_value();
      throw;
    }
  });
  const std::string text =
      "[all_reduce] timed out after 200 ms in threads group \"tp\" {0,1,2}; got #2 all_reduce(sum, Float, 4 elements) "
      "without rank 2 (last call: #1 barrier()); expected the same call on every rank";
  EXPECT_CONTAINS(errors[0], text);
  EXPECT_CONTAINS(errors[1], text);
  EXPECT_EQ(errors[2], "");
  EXPECT_EQ(again, "[broadcast] threads group \"tp\" {0,1,2} is poisoned; got an earlier failure: " + text +
                       "; try a new group");
}

TEST_F(ThreadsFault, MissingReceiveIsNamed) {
  const auto errors = errors_of_ranks(2, [](Transport& transport) {
    const auto group = group_of(transport);
    if (transport.rank() == 0) return group->send(ones(3), 1, 9)->wait();
    std::this_thread::sleep_for(kTimeout * 2);
  });
  EXPECT_EQ(errors[0],
            "[send] timed out after 200 ms in threads group \"tp\" {0,1}; got send(Float, 3 elements, tag 9) without "
            "rank 1 (no call so far); expected the other side's call");
}

// Two ranks make different calls: both sides are shown, and nobody waits for the timeout.
std::string divergence(const std::function<WorkPtr(Communicator&)>& first,
                       const std::function<WorkPtr(Communicator&)>& second) {
  const auto errors = errors_of_ranks(2, [&](Transport& transport) {
    const auto group = transport.make_group({0, 1}, {.name = "tp"});
    (transport.rank() == 0 ? first : second)(*group)->wait();
  });
  // Whoever comes second finds out; the other one is told, or finds the group poisoned.
  for (const auto& error : errors) EXPECT_CONTAINS(error, "the ranks of threads group \"tp\" {0,1} diverged; got ");
  return errors[0];
}

TEST_F(ThreadsFault, DivergenceShowsBothSides) {
  const auto reduce = [](std::int64_t n, ReduceOp op, at::ScalarType dtype) {
    return [=](Communicator& group) { return group.all_reduce(at::zeros({n}, dtype), op); };
  };
  const auto base = reduce(4, ReduceOp::kSum, at::kFloat);
  const std::string mine = "rank 0: #1 all_reduce(sum, Float, 4 elements)";
  const auto check = [&](const std::function<WorkPtr(Communicator&)>& other, const std::string& theirs) {
    const auto text = divergence(base, other);
    EXPECT_CONTAINS(text, mine);
    EXPECT_CONTAINS(text, "rank 1: #1 " + theirs);
  };
  check([](Communicator& group) { return group.barrier(); }, "barrier()");
  check(reduce(5, ReduceOp::kSum, at::kFloat), "all_reduce(sum, Float, 5 elements)");
  check(reduce(4, ReduceOp::kMax, at::kFloat), "all_reduce(max, Float, 4 elements)");
  check(reduce(4, ReduceOp::kSum, at::kDouble), "all_reduce(sum, Double, 4 elements)");
  check([](Communicator& group) { return group.broadcast(ones(4), 1); }, "broadcast(Float, 4 elements, root 1)");
}

TEST_F(ThreadsFault, DivergenceInOrderIsFound) {
  const auto errors = errors_of_ranks(2, [](Transport& transport) {
    const auto group = transport.make_group({0, 1}, {.name = "tp"});
    for (int step = 0; step < 2; ++step) {
      const auto buffer = ones(step == transport.rank() ? 3 : 6);
      group->all_reduce(buffer, ReduceOp::kSum)->wait();
    }
  });
  for (const auto& error : errors) EXPECT_CONTAINS(error, "diverged");
}

TEST_F(ThreadsFault, DivergenceOfCountsIsFound) {
  EXPECT_CONTAINS(divergence(
                      [](Communicator& g) {
                        return g.all_to_all(ones(2), ones(3), {1, 1}, {1, 2});
                      },
                      [](Communicator& g) {
                        return g.all_to_all(ones(4), ones(2), {3, 1}, {1, 1});
                      }),
                  "rank 0 sends 2 elements, rank 1 expects 3 from it; expected the same count on both sides");
  EXPECT_CONTAINS(divergence([](Communicator& g) { return g.send(ones(2), 1); },
                             [](Communicator& g) { return g.receive(ones(3), 0); }),
                  "expected the same elements on both sides");
  EXPECT_CONTAINS(divergence(
                      [](Communicator& g) {
                        return g.all_gather(ones(4), ones(1), {1, 3});
                      },
                      [](Communicator& g) {
                        return g.all_gather(ones(4), ones(2), {2, 2});
                      }),
                  "rank 1: #1 all_gather(Float, 4 elements, counts #");
}

// One group's failure is not another's.
TEST_F(ThreadsFault, OtherGroupsLiveOn) {
  const auto errors = errors_of_ranks(2, [](Transport& transport) {
    const auto poisoned = group_of(transport, "a"), fine = transport.make_group({0, 1}, {.name = "b"});
    if (transport.rank() == 0) testing::error_of([&] { poisoned->barrier()->wait(); });
    const auto buffer = ones(1);
    fine->all_reduce(buffer, ReduceOp::kSum)->wait();
    EXPECT_EQ(buffer.item<float>(), 2.f);
  });
  EXPECT_EQ(errors, (std::vector<std::string>{"", ""}));
}

// Ranks wait for two groups' operations in opposite orders: whoever waits does the work of both.
TEST(Threads, OrderOfWaitsCannotDeadlock) {
  const auto errors = errors_of_ranks(2, [](Transport& transport) {
    const auto a = transport.make_group({0, 1}, {.name = "a"}), b = transport.make_group({0, 1}, {.name = "b"});
    for (int round = 0; round < 20; ++round) {
      const auto x = ones(200'000), y = ones(200'000);
      const auto wx = a->all_reduce(x, ReduceOp::kSum), wy = b->all_reduce(y, ReduceOp::kSum);
      (transport.rank() == 0 ? wx : wy)->wait();
      if (transport.rank() == 0) a->barrier();
      (transport.rank() == 0 ? wy : wx)->wait();
      if (transport.rank() == 1) a->barrier();
      EXPECT_EQ(x.min().item<float>() + y.max().item<float>(), 4.f);
    }
  });
  EXPECT_EQ(errors, (std::vector<std::string>{"", ""}));
}

TEST(Threads, RefusesImpossibleWorlds) {
  EXPECT_EQ(testing::error_of([] { make_thread_transports(0); }),
            "[threads] a process cannot run this many ranks as threads; got 0; expected 1 to 4096");
}

}  // namespace
}  // namespace dtensor
