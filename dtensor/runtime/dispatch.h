#pragma once

#include <cstdint>

#include "dtensor/core/propagate.h"

namespace dtensor {

// What happens where an operator has no rule: it runs on replicated operands and says so once, or it is refused.
enum class NoRule : std::uint8_t { kReplicate, kRefuse };

struct DispatchStats {
  std::uint64_t hits = 0;
  std::uint64_t misses = 0;
  std::size_t entries = 0;
};
// Of this thread's cache of decisions.
DispatchStats dispatch_stats();

// While one lives, on this thread: plain tensors among an operator's arguments count as Replicate, the same on every
// rank.
class ImplicitReplication {
 public:
  ImplicitReplication();
  ~ImplicitReplication();
  ImplicitReplication(const ImplicitReplication&) = delete;
  ImplicitReplication& operator=(const ImplicitReplication&) = delete;
};

// While one lives, on this thread: what to do without a rule.
class NoRuleGuard {
 public:
  explicit NoRuleGuard(NoRule mode);
  ~NoRuleGuard();
  NoRuleGuard(const NoRuleGuard&) = delete;
  NoRuleGuard& operator=(const NoRuleGuard&) = delete;

 private:
  NoRule before_;
};

// While one lives, on this thread: decisions are made anew, with these options. For tests that want ways to run that do
// not win.
class DecideGuard {
 public:
  explicit DecideGuard(const DecideOptions& options);
  ~DecideGuard();
  DecideGuard(const DecideGuard&) = delete;
  DecideGuard& operator=(const DecideGuard&) = delete;

 private:
  DecideOptions before_;
};

}  // namespace dtensor
