#include "dtensor/core/intern.h"

#include <gtest/gtest.h>

#include <thread>

#include "dtensor/core/spec.h"

namespace dtensor {
namespace {

TEST(Intern, ManyThreadsGetOneObject) {
  constexpr int kThreads = 8;
  constexpr std::int64_t kSpecs = 500;
  std::vector<std::vector<Spec>> made(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&made, t] {
      for (std::int64_t round = 0; round < 4; ++round) {
        for (std::int64_t i = 0; i < kSpecs; ++i) {
          const Mesh mesh = Mesh::make({2, 1 + i % 5});
          const Spec spec = Spec::make({{1000 + i, 7}, DType::kF32}, mesh, {Shard(0), Shard(i % 2)});
          if (round == 3) made[t].push_back(spec);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int t = 1; t < kThreads; ++t) EXPECT_EQ(made[t], made[0]);
}

// Specs that nobody holds are forgotten, also while other threads make new ones; those that somebody holds stay.
TEST(Intern, MemoryIsBounded) {
  const Mesh mesh = Mesh::make({2});
  const Spec kept = Spec::make({{4242}, DType::kF64}, mesh, {Shard(0)});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&mesh, t] {
      for (std::int64_t i = 0; i < 100'000; ++i) {
        Spec::make({{1 + i, 1 + t}, DType::kF32}, mesh, {Shard(0)});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const InternStats stats = spec_intern_stats();
  EXPECT_GE(stats.misses, 400'000u);
  EXPECT_LE(stats.entries, (1u << 16) + 64);
  const std::uint64_t hits = stats.hits;
  EXPECT_EQ(Spec::make({{4242}, DType::kF64}, mesh, {Shard(0)}), kept);
  EXPECT_EQ(spec_intern_stats().hits, hits + 1);
}

struct Number {
  explicit Number(int k) : value(k) {}
  const int& key() const { return value; }
  int value;
};

// When everything is held the table grows with what is held, and shrinks when it is let go.
TEST(Intern, KeepsWhatIsHeld) {
  InternTable<int, Number> table(64);
  std::vector<Interned<Number>> held;
  for (int i = 0; i < 1000; ++i) held.push_back(table.intern(i, static_cast<std::size_t>(i) * 7919));
  EXPECT_EQ(table.stats().entries, 1000u);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(table.intern(i, static_cast<std::size_t>(i) * 7919), held[i]);
  held.clear();
  for (int i = 1000; i < 5000; ++i) table.intern(i, static_cast<std::size_t>(i) * 7919);
  EXPECT_LT(table.stats().entries, 300u);
}

}  // namespace
}  // namespace dtensor
