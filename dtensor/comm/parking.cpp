#include "dtensor/comm/parking.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>
#include <thread>

namespace dtensor {
namespace {

std::uint32_t* word_of(std::atomic<std::uint32_t>& value) {
  static_assert(sizeof(value) == sizeof(std::uint32_t) && std::atomic<std::uint32_t>::is_always_lock_free);
  return reinterpret_cast<std::uint32_t*>(&value);
}

}  // namespace

void Parking::notify_all() noexcept {
  count_.fetch_add(1, std::memory_order_seq_cst);
  if (parked_.load(std::memory_order_seq_cst) > 0) {
    syscall(SYS_futex, word_of(count_), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }
}

bool Parking::yield_briefly() noexcept {
  const auto start = Clock::now();
  std::this_thread::yield();
  return Clock::now() - start < std::chrono::microseconds(100);
}

void Parking::park(std::uint32_t seen, Clock::time_point deadline) noexcept {
  const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now()).count();
  if (left <= 0) return;
  timespec timeout{.tv_sec = left / 1'000'000'000, .tv_nsec = left % 1'000'000'000};
  parked_.fetch_add(1, std::memory_order_seq_cst);
  // The kernel compares the word again, after it has queued us: a notification in between is not lost.
  syscall(SYS_futex, word_of(count_), FUTEX_WAIT_PRIVATE, seen, &timeout, nullptr, 0);
  parked_.fetch_sub(1, std::memory_order_seq_cst);
}

BriefLock::BriefLock(std::mutex& mutex) : mutex_(mutex) {
  constexpr int kTries = 100;
  for (int i = 0; i < kTries; ++i) {
    if (mutex_.try_lock()) return;
    Parking::relax();
  }
  mutex_.lock();
}

}  // namespace dtensor
