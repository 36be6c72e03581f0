#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>

namespace dtensor {

// Where threads wait for something to happen. A waiter reads the count, looks whether what it wants is there, and if
// not waits for the count to change; whoever changes anything of interest notifies afterwards. No wake-up is lost, and
// notifying costs no system call while nobody is parked.
class Parking {
 public:
  using Clock = std::chrono::steady_clock;

  std::uint32_t count() const noexcept { return count_.load(std::memory_order_acquire); }
  void notify_all() noexcept;
  // True as soon as `has_come()`; false after a while. Tries that were in vain make the next ones shorter, though never
  // shorter than what parking and waking up would take: else whoever was late once would be parked for ever after.
  // Now and then the core is offered to others: the one that is waited for may have been put on the same.
  // `crowded`: there are more waiters than cores, and every try gives its core to somebody else; when that was another
  // program, which keeps it for long, waiters park at once for some time to come.
  template <class HasCome>
  bool spin_until(bool crowded, const HasCome& has_come) noexcept;
  bool spin(std::uint32_t seen, bool crowded) noexcept {
    return spin_until(crowded, [&] { return count() != seen; });
  }
  // Returns when the count is no longer `seen`, or at the deadline, or for no reason.
  void park(std::uint32_t seen, Clock::time_point deadline) noexcept;

 private:
  static void relax() noexcept;
  // False when it took so long that another program must have had the core.
  static bool yield_briefly() noexcept;

  friend class BriefLock;
  static constexpr int kMostTries = 2000;
  static constexpr int kFewTries = 200;
  static constexpr int kTriesPerYield = 16;
  static constexpr int kMostYields = 32;
  static constexpr int kLeastTries = 2;
  static constexpr int kOffended = 5000;  // waits without a try

  std::atomic<std::uint32_t> count_{0};
  std::atomic<std::uint32_t> parked_{0};
  std::atomic<int> patience_{kMostTries};
};

// Locks a mutex that is only ever held for a moment: going to sleep for it would cost more than the moment.
class BriefLock {
 public:
  explicit BriefLock(std::mutex& mutex);
  ~BriefLock() { mutex_.unlock(); }
  BriefLock(const BriefLock&) = delete;
  BriefLock& operator=(const BriefLock&) = delete;

 private:
  std::mutex& mutex_;
};

inline void Parking::relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class HasCome>
bool Parking::spin_until(bool crowded, const HasCome& has_come) noexcept {
  if (has_come()) return true;
  const int most = crowded ? kMostYields : kMostTries;
  const int least = crowded ? kLeastTries : kFewTries;
  const int patience = patience_.load(std::memory_order_relaxed);
  if (patience < kLeastTries) {
    patience_.store(patience + 1, std::memory_order_relaxed);
    return false;
  }
  const int tries = std::min(most, patience);
  for (int i = 0; i < tries; ++i) {
    if (!crowded && (i + 1) % kTriesPerYield != 0) {
      relax();
    } else if (!yield_briefly() && crowded) {
      patience_.store(kLeastTries - kOffended, std::memory_order_relaxed);
      return has_come();
    }
    if (has_come()) {
      if (tries < most) patience_.store(std::min(most, 2 * tries), std::memory_order_relaxed);
      return true;
    }
  }
  patience_.store(std::max(least, tries / 2), std::memory_order_relaxed);
  return false;
}

}  // namespace dtensor
