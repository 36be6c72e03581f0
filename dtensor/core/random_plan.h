#pragma once

// How random values are made in bulk: a few hundred blocks at a time, by the widest instructions that this processor
// has. All variants give the same bits.

#include <cstdint>

#include "dtensor/core/random.h"
#include "dtensor/core/random_store.h"

namespace dtensor {

enum class RandomWork : std::uint8_t {
  kUniform32,
  kUniform64,
  kNormal32,
  kNormal64,
  kLogNormal32,  // of 32-bit draws, in double
  kLogNormal64,
  kExponential32,
  kExponential64,
  kCauchy32,
  kCauchy64,
  kGeometric64,
  kBernoulli32,
  kUnit32,
  kIntegers64,
};

struct RandomTask {
  static constexpr int kMaxBlocks = 256;
  static constexpr int kRound = 8;  // blocks are made in such bunches

  std::uint32_t key[2];
  std::uint32_t call;
  RandomWork work;
  const std::uint64_t* blocks;  // their counters, `count` rounded up to kRound of them
  int count;
  double a;
  double b;
  double c;
  std::uint64_t low;
  std::uint64_t range;
  // 4 (or 2, of 64 bits) values per block, in the order of elements: float for kUniform32 and kNormal32, std::uint8_t
  // for kBernoulli32, std::int64_t for kIntegers64, else double. Room for the rounded count.
  void* out;
};

// How the values of a tensor are made: those of a complex one are twice as many real ones.
struct RandomPlan {
  RandomTask task = {};
  int lanes = 4;  // values per block
  RandomValue value = RandomValue::kDouble;
  DType stored = DType::kF32;
  std::int64_t per_element = 1;
};
// Errors: what can_draw says no to. Not for permutations.
RandomPlan random_plan(const RandomKey& key, const Draw& draw, DType dtype);

using RandomKernel = void (*)(const RandomTask& task);
void random_kernel_portable(const RandomTask& task);
#if defined(__x86_64__)
void random_kernel_avx2(const RandomTask& task);
void random_kernel_avx512(const RandomTask& task);
#endif
// The one for this processor.
RandomKernel random_kernel();

}  // namespace dtensor
