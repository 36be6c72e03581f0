#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "dtensor/comm/moves.h"
#include "dtensor/comm/parking.h"
#include "dtensor/comm/thread_lane.h"
#include "dtensor/core/error.h"
#include "dtensor/core/inline_vec.h"

namespace dtensor {

// One operation of a group of threads, from the first member's issue to its end.
struct ThreadOperation {
  // Guarded by the group's mutex; `moves` is constant once the operation is ready.
  std::vector<Post> posts;  // one per participant; emptied at the end
  std::size_t missing = 0;
  Moves moves;

  std::atomic<bool> ready{false};         // everybody has posted
  std::atomic<bool> done{false};          // memory is as it should be
  std::atomic<std::int64_t> next{0};      // the task to be claimed
  std::atomic<std::int64_t> finished{0};  // tasks

  // A send and its receive: the participants are these two group ranks; those who wait have their own place.
  bool pair = false;
  std::array<std::int64_t, 2> members = {};
  Parking parking;

  std::int64_t member(std::size_t participant) const {
    return pair ? members[participant] : static_cast<std::int64_t>(participant);
  }
};
using ThreadOperationPtr = std::shared_ptr<ThreadOperation>;

// What one member issued, and the operation that it is part of: none when it went into the group's lane.
struct Issued {
  ThreadOperationPtr operation;
  std::size_t member = 0;
  Fingerprint mine;
};

// What the members of a group of threads share. All functions may be called by any thread.
//
// Collectives are numbered. Small ones go through the lane as long as nothing speaks against it; all others, and those
// that somebody gave up spinning for, are operations, under the mutex. Members need not choose alike: who makes an
// operation first raises `slow_` to its number, then takes along what it finds published in the lane; who publishes
// looks at `slow_` afterwards. One of the two sees the other, so nobody is left alone in the lane.
class ThreadGroup {
 public:
  // `label` names the group in errors; `crowded`: there are more ranks than cores.
  ThreadGroup(std::string label, std::vector<std::int64_t> ranks, bool crowded);

  // Issue. A collective's fingerprint gets its sequence number here.
  Issued post(std::int64_t member, Post post);
  Issued post_pair(std::int64_t from, std::int64_t to, Post post);

  // Does what can be done of the operation without blocking; is it done?
  bool help(const Issued& issued);
  void wait(const Issued& issued, std::chrono::milliseconds timeout);
  // Would wait() throw at once?
  bool has_failed(const Issued& issued) const;

  // What a member did last, for errors.
  void watch_history(std::int64_t member, std::shared_ptr<const History> history);

  // The member with this world rank will issue nothing more.
  void leave(std::int64_t rank, const std::string& why);

 private:
  using Channel = std::tuple<std::int64_t, std::int64_t, std::int64_t>;  // from, to, tag

  using Released = InlineVec<std::vector<Post>, 2>;  // buffers to be let go of after the mutex

  // The lane. Has everything up to this collective ended on this member?
  bool has_ended(std::size_t member, std::uint64_t sequence) const;
  bool is_quick(std::uint64_t sequence) const { return slow_.load(std::memory_order_seq_cst) < sequence; }
  // Ends a published collective on this member if all have published it too, in agreement; has it ended?
  bool end_in_lane(std::size_t member, std::uint64_t sequence);
  // Spins until it has ended, or returns the operation that it has become.
  ThreadOperationPtr wait_in_lane(const Issued& issued);
  // The operation that a published collective has become or becomes now; none when it can end in the lane.
  ThreadOperationPtr meet(const Issued& issued);
  Issued post_slowly(Issued issued, Post post);

  bool help(ThreadOperation& operation);
  // Runs every task that nobody has claimed.
  void run_tasks(ThreadOperation& operation);
  ThreadOperationPtr oldest_ready();
  Parking& parking_of(ThreadOperation& operation) { return operation.pair ? operation.parking : parking_; }

  // Below: the mutex is held.
  ThreadOperationPtr collective_at(std::uint64_t sequence);
  ThreadOperationPtr find_collective(std::uint64_t sequence) const;
  // Makes it an operation, with all that was published of it; none when all have, and somebody is about to end it.
  ThreadOperationPtr take_from_lane(std::uint64_t sequence);
  void end_what_is_behind(const ThreadOperation& operation);
  void slow_from(std::uint64_t sequence);
  void remember(std::size_t member, const Fingerprint& call);
  Fingerprint last_call(std::size_t member) const;
  void add_post(ThreadOperation& operation, std::size_t participant, Post post);
  // Runs what is small, and ends what is done, as far as it is its turn.
  void settle(Released& released);
  bool settle_one(ThreadOperation& operation, Released& released);
  void notify_everybody();
  std::string rank_name(std::int64_t member) const { return "rank " + std::to_string(ranks_[std::size_t(member)]); }
  std::string what_is_missing(const ThreadOperation& operation) const;
  ReportOf report_of(const ThreadOperation& operation, std::size_t participant, const Post* post = nullptr) const;
  void check_alive(Operation mine) const;
  // These poison the group and throw.
  void check_agreement(const ThreadOperation& operation, std::size_t participant, const Post& post);
  void check_balance(const ThreadOperation& operation);
  void check_nobody_left(const ThreadOperation& operation, const Fingerprint& mine);
  [[noreturn]] void fail_timeout(const ThreadOperation& operation, const Fingerprint& mine,
                                 std::chrono::milliseconds timeout);
  [[noreturn]] void poison(Operation mine, const Complaint& complaint);

  const std::string label_;
  const std::vector<std::int64_t> ranks_;
  const bool crowded_;
  ThreadLane lane_;
  Parking parking_;
  // Written under the mutex.
  alignas(64) std::atomic<std::uint64_t> slow_{
      0};                                  // up to here, collectives may be operations; from a fault on, all are
  std::atomic<std::uint64_t> settled_{0};  // the last one that was and has ended

  alignas(64) std::mutex mutex_;
  std::deque<ThreadOperationPtr> open_;    // collectives that have not ended, in order, without those in the lane
  std::uint64_t first_ = 1;                // sequence number of open_.front()
  std::vector<Fingerprint> last_;          // what each member issued last outside the lane,
  std::vector<std::uint64_t> last_after_;  // and after which collective, itself included
  std::map<Channel, std::deque<ThreadOperationPtr>> unmatched_;
  std::vector<std::optional<std::string>> left_;
  std::string poison_;
  std::atomic<bool> poisoned_{false};
  std::vector<std::shared_ptr<const History>> histories_;
};

}  // namespace dtensor
