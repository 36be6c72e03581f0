#include "dtensor/comm/threads.h"

#include <ATen/ops/full.h>
#include <ATen/ops/max.h>
#include <ATen/ops/min.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <random>
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

// A rank's three buffers, once as tensors and once as what they should hold.
struct Buffers {
  std::vector<std::int64_t> x, y, large;
};

// Collectives of every kind on the same few buffers: each must see what the ones before it left, also when many are in
// flight, when small ones and large ones follow each other, and when some ranks wait and others do not.
class Mixture {
 public:
  Mixture(std::int64_t ranks, unsigned seed) : ranks_(ranks), schedule_(seed) {
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      Buffers mine{std::vector<std::int64_t>(std::size_t(4 * ranks)), std::vector<std::int64_t>(std::size_t(4 * ranks)),
                   std::vector<std::int64_t>(30'000)};
      for (std::size_t i = 0; i < mine.x.size(); ++i) mine.x[i] = 100 * rank + std::int64_t(i);
      for (std::size_t i = 0; i < mine.large.size(); ++i) mine.large[i] = rank + std::int64_t(i);
      model_.push_back(std::move(mine));
    }
    start_ = model_;
    for (int i = 0; i < 300; ++i) steps_.push_back({int(schedule_() % 8), std::int64_t(schedule_() % unsigned(ranks))});
    for (const Step& step : steps_) play(step);
  }

  void run(Transport& transport) const {
    std::vector<std::int64_t> members;
    for (std::int64_t r = 0; r < ranks_; ++r) members.push_back(r);
    const auto group = transport.make_group(members, {.name = "tp"});
    const auto rank = std::size_t(transport.rank());
    std::minstd_rand whims(unsigned(rank) + 7);
    const auto tensor = [](const std::vector<std::int64_t>& values) {
      const auto made = at::zeros({std::int64_t(values.size())}, at::kLong);
      std::copy(values.begin(), values.end(), made.data_ptr<std::int64_t>());
      return made;
    };
    const auto x = tensor(start_[rank].x), y = tensor(start_[rank].y), large = tensor(start_[rank].large);
    const std::vector<std::int64_t> even(std::size_t(ranks_), 4);
    const auto mine = x.narrow(0, 0, 4);
    const auto issue = [&](const Step& step) -> WorkPtr {
      switch (step.kind) {
        case 0:
          return group->all_reduce(x, ReduceOp::kSum);
        case 1:
          return group->all_reduce(large, ReduceOp::kSum);
        case 2:
          return group->all_to_all(y, x, even, even);
        case 3:
          return group->all_to_all(x, y, even, even);
        case 4:
          return group->broadcast(y, step.root);
        case 5:
          return group->all_gather(y, mine, even);
        case 6:
          return group->reduce_scatter(mine, y, even, ReduceOp::kSum);
        default:
          return group->scatter(mine, step.root == transport.rank() ? y : at::Tensor(), even, step.root);
      }
    };
    std::vector<WorkPtr> works;
    for (const Step& step : steps_) {
      works.push_back(issue(step));
      const auto whim = whims() % 8;
      if (whim < 4) works.back()->wait();
      if (whim == 4) works.back()->done();
      if (whim == 5) std::this_thread::yield();
      if (whim == 6 && works.size() > 20) works[whims() % works.size()]->wait();
    }
    group->barrier()->wait();  // what came before has ended then, waited for or not
    const auto expect = [](const at::Tensor& got, const std::vector<std::int64_t>& expected) {
      const auto* data = got.data_ptr<std::int64_t>();
      EXPECT_EQ(std::vector<std::int64_t>(data, data + got.numel()), expected);
    };
    expect(x, model_[rank].x);
    expect(y, model_[rank].y);
    expect(large, model_[rank].large);
  }

 private:
  struct Step {
    int kind;
    std::int64_t root;
  };
  using Member = std::vector<std::int64_t> Buffers::*;

  static std::int64_t add(std::int64_t a, std::int64_t b) { return std::int64_t(std::uint64_t(a) + std::uint64_t(b)); }

  std::vector<std::int64_t> sum(Member which) const {
    std::vector<std::int64_t> total = model_[0].*which;
    for (std::size_t r = 1; r < model_.size(); ++r) {
      std::transform(total.begin(), total.end(), (model_[r].*which).begin(), total.begin(), add);
    }
    return total;
  }

  void exchange(Member to, Member from) {
    const auto before = model_;
    for (std::size_t r = 0; r < model_.size(); ++r) {
      for (std::size_t p = 0; p < model_.size(); ++p) {
        std::copy_n((before[p].*from).begin() + std::ptrdiff_t(4 * r), 4,
                    (model_[r].*to).begin() + std::ptrdiff_t(4 * p));
      }
    }
  }

  void play(const Step& step) {
    const auto total = sum(step.kind == 0 ? &Buffers::x : step.kind == 1 ? &Buffers::large : &Buffers::y);
    const auto of_root = model_[std::size_t(step.root)].y;
    if (step.kind == 2) exchange(&Buffers::y, &Buffers::x);
    if (step.kind == 3) exchange(&Buffers::x, &Buffers::y);
    std::vector<std::int64_t> gathered;
    for (const Buffers& each : model_) gathered.insert(gathered.end(), each.x.begin(), each.x.begin() + 4);
    for (std::size_t r = 0; r < model_.size(); ++r) {
      const auto part = std::ptrdiff_t(4 * r);
      if (step.kind == 0) model_[r].x = total;
      if (step.kind == 1) model_[r].large = total;
      if (step.kind == 4) model_[r].y = of_root;
      if (step.kind == 5) model_[r].y = gathered;
      if (step.kind == 6) std::copy_n(total.begin() + part, 4, model_[r].x.begin());
      if (step.kind == 7) std::copy_n(of_root.begin() + part, 4, model_[r].x.begin());
    }
  }

  std::int64_t ranks_;
  std::minstd_rand schedule_;
  std::vector<Step> steps_;
  std::vector<Buffers> start_, model_;
};

TEST(Threads, SmallAndLargeTakeEffectInOrder) {
  for (const std::int64_t ranks : {1, 2, 3, 5, 17}) {  // 17 are too many for the lane
    for (const unsigned seed : {1u, 2u, 3u, 4u}) {
      const Mixture mixture(ranks, seed);
      const auto errors = errors_of_ranks(ranks, [&](Transport& transport) { mixture.run(transport); });
      for (const auto& error : errors) EXPECT_EQ(error, "");
    }
  }
}

// What a rank gives is there although it does not wait; what it gets is there at the end of its next wait.
TEST_F(ThreadsFault, RankThatDoesNotWaitHoldsUpNobody) {
  const auto errors = errors_of_ranks(3, [](Transport& transport) {
    const auto group = transport.make_group({0, 1, 2}, {.name = "tp"});
    std::vector<at::Tensor> buffers;
    for (int i = 0; i < 100; ++i) {
      buffers.push_back(ones(i % 10 == 9 ? 100'000 : 3));
      const auto work = group->all_reduce(buffers.back(), ReduceOp::kSum);
      if (transport.rank() != 1) work->wait();
    }
    if (transport.rank() == 0) return;
    const auto pair = ones(1);
    if (transport.rank() == 1) group->send(pair, 2)->wait();
    if (transport.rank() == 2) group->receive(pair, 1)->wait();
    if (transport.rank() == 1) return;
    for (const auto& buffer : buffers) EXPECT_EQ(buffer.min().item<float>(), 3.f);
  });
  EXPECT_EQ(errors, (std::vector<std::string>{"", "", ""}));
}

// Small ones too, whether or not both sides are small.
TEST_F(ThreadsFault, DivergenceOfSmallAndLargeShowsBothSides) {
  const auto reduce = [](std::int64_t n) {
    return [=](Communicator& group) { return group.all_reduce(at::zeros({n}, at::kFloat), ReduceOp::kSum); };
  };
  for (const auto& [mine, theirs] : {std::pair{3, 1'000'000}, {1'000'000, 3}, {3, 4}}) {
    const auto text = divergence(reduce(mine), reduce(theirs));
    EXPECT_CONTAINS(text, "rank 0: #1 all_reduce(sum, Float, " + std::to_string(mine) + " elements)");
    EXPECT_CONTAINS(text, "rank 1: #1 all_reduce(sum, Float, " + std::to_string(theirs) + " elements)");
  }
}

TEST(Threads, RefusesImpossibleWorlds) {
  EXPECT_EQ(testing::error_of([] { make_thread_transports(0); }),
            "[threads] a process cannot run this many ranks as threads; got 0; expected 1 to 4096");
}

}  // namespace
}  // namespace dtensor
