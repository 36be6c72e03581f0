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

// What a plain tensor among an operator's distributed arguments means: a replica, the same on every rank (its values
// are compared over the ranks with the next collective that needs the result), or an error. The first is the default of
// a process; set_plain_operands changes it, and a guard does for its thread while it lives. Numbers and 0-d tensors are
// always taken.
enum class PlainOperands : std::uint8_t { kReplicate, kRefuse };
PlainOperands set_plain_operands(PlainOperands mode);  // returns what it was

class PlainOperandsGuard {
 public:
  explicit PlainOperandsGuard(PlainOperands mode);
  ~PlainOperandsGuard();
  PlainOperandsGuard(const PlainOperandsGuard&) = delete;
  PlainOperandsGuard& operator=(const PlainOperandsGuard&) = delete;

 private:
  int before_;
};

// Plain tensors count as replicas while it lives, also in a program that refuses them.
class ImplicitReplication {
 public:
  ImplicitReplication() : guard_(PlainOperands::kReplicate) {}

 private:
  PlainOperandsGuard guard_;
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
