#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "dtensor/comm/rank_generator_impl.h"
#include "dtensor/comm/threads.h"
#include "dtensor/comm/world.h"
#include "dtensor/core/error.h"

namespace dtensor {
namespace {

// The first of several errors.
class FirstError {
 public:
  void note(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
  }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr error_;
};

void run_one(const TransportPtr& transport, const std::function<void(World&)>& body, const WorldOptions& options,
             FirstError& first) {
  try {
    World world(transport, options);
    try {
      body(world);
      world.leave();
    } catch (const std::exception& error) {
      first.note(std::current_exception());
      world.leave(error.what());
    } catch (...) {
      first.note(std::current_exception());
      world.leave("something that is no std::exception");
    }
  } catch (...) {
    first.note(std::current_exception());
  }
}

}  // namespace

void run_ranks(std::int64_t n, const std::function<void(World&)>& body, const WorldOptions& options) {
  if (!options.backend.empty() && options.backend != "threads") {
    fail_invalid("run_ranks", {.what = "the ranks are threads",
                               .got = "backend " + options.backend,
                               .expected = "threads",
                               .advice = "World::from_env, in processes"});
  }
  const auto transports = make_thread_transports(n);
  const int threads_before = at::get_num_threads();
  const int threads_each = std::max(1, static_cast<int>(threads_before / n));
  const at::ThreadLocalState state;
  FirstError first;
  std::vector<std::thread> threads;
  try {
    for (const auto& transport : transports) {
      threads.emplace_back([&] {
        const at::ThreadLocalStateGuard guard(state);
        at::set_num_threads(threads_each);
        const RankGenerator generator;
        run_one(transport, body, options, first);
      });
    }
  } catch (const std::system_error& error) {
    first.note(std::current_exception());
    for (const auto& transport : transports) transport->leave(std::string("no thread for it: ") + error.what());
  }
  for (std::thread& thread : threads) thread.join();
  // In libtorch a thread's count becomes the default of threads to come: put it back.
  at::set_num_threads(threads_before);
  first.rethrow();
}

}  // namespace dtensor
