// Every allocation of the program goes through here, so that the largest is known.
#include "tests/checkpoint/allocations.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {
std::atomic<std::size_t> largest{0};
}

void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  std::size_t before = largest.load(std::memory_order_relaxed);
  while (bytes > before && !largest.compare_exchange_weak(before, bytes)) {
  }
  return std::malloc(bytes);
}
void* operator new(std::size_t bytes) {
  if (void* memory = operator new(bytes, std::nothrow)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }

namespace dtensor::testing {

std::size_t largest_allocation() { return largest.load(); }
void reset_largest_allocation() { largest = 0; }

}  // namespace dtensor::testing
