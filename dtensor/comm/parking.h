#pragma once

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
  // True as soon as the count is no longer `seen`; false after at most `most` tries. Spinning pays when the others run
  // at the same time and harms when they wait for this core: tries that were in vain make the next ones shorter.
  bool spin(std::uint32_t seen, int most) noexcept;
  // Returns when the count is no longer `seen`, or at the deadline, or for no reason.
  void park(std::uint32_t seen, Clock::time_point deadline) noexcept;

 private:
  std::atomic<std::uint32_t> count_{0};
  std::atomic<std::uint32_t> parked_{0};
  std::atomic<int> patience_{1 << 20};  // tries
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

}  // namespace dtensor
