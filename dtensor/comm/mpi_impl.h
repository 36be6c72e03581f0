#pragma once

#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dtensor/comm/communicator.h"
#include "dtensor/comm/fingerprint.h"
#include "dtensor/comm/mpi_schedule_impl.h"
#include "dtensor/core/inline_vec.h"

// Messages carry MPI tags of two parts, `id * kTagSpan + low`. Each rank numbers its own groups and tells the members
// the number, so that making a group is sending a few words and blocks nobody (MPI_Comm_create_group does, and
// deadlocks when ranks make groups in different orders). A group has two ids: one for collectives, where `low` is the
// operation's sequence number, and one for send and receive, where it is the caller's tag. Id 0 is for the words
// between engines.
namespace dtensor::mpi_impl {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kFingerprintBytes = Fingerprint::kWords * sizeof(std::uint64_t);
constexpr std::int64_t kFrameBytes = 512;
constexpr std::int64_t kTagSpan = 1 << 15;  // the least that MPI promises

class Engine;
class Group;

// Memory of a call's tensors.
struct Memory {
  const char* begin;
  const char* end;
};

// An operation under way, and its buffers. It begins when nothing before it in its group writes what it uses or uses
// what it writes, so that operations take effect in order, and those that have nothing to do with each other overlap.
struct Call {
  std::shared_ptr<Group> group;
  Fingerprint what;
  Schedule rounds;
  std::vector<at::Tensor> tensors;               // of the caller
  std::vector<std::unique_ptr<char[]>> scratch;  // ours
  std::vector<Memory> reads, writes;
  std::int64_t low = 0;    // of its messages' tags
  std::int64_t peer = -1;  // the other side of send and receive
  bool started = false;
  std::size_t next_round = 0;
  std::int64_t pending = 0;  // messages of the current round
  Clock::time_point issued;
  std::atomic<bool> ended = false;
  std::string error;  // why it failed, once it has ended

  bool point_to_point() const { return peer >= 0; }
  bool has_to_follow(const Call& earlier) const;
  char* new_scratch(std::int64_t bytes) {
    return scratch.emplace_back(new char[static_cast<std::size_t>(bytes)]).get();
  }
};
using CallPtr = std::shared_ptr<Call>;

// A message that waits until its receiver has made the group.
struct Deferred {
  CallPtr call;
  Transfer transfer;
};

// Data that travel with the fingerprint, and what is done with everybody's; frames lie kFrameBytes apart.
struct Eager {
  const char* data = nullptr;
  std::int64_t bytes = 0;
  std::function<void(const char* frames)> take = {};
};

class Group final : public Communicator, public std::enable_shared_from_this<Group> {
 public:
  Group(std::shared_ptr<Engine> engine, std::int64_t rank, std::vector<std::int64_t> ranks, const GroupOptions& options,
        std::int64_t id);

  WorkPtr all_reduce(const at::Tensor& buffer, ReduceOp op) override;
  WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input,
                     const std::vector<std::int64_t>& counts) override;
  WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input, const std::vector<std::int64_t>& counts,
                         ReduceOp op) override;
  WorkPtr all_to_all(const at::Tensor& output, const at::Tensor& input, const std::vector<std::int64_t>& recv_counts,
                     const std::vector<std::int64_t>& send_counts) override;
  WorkPtr broadcast(const at::Tensor& buffer, std::int64_t root) override;
  WorkPtr scatter(const at::Tensor& output, const at::Tensor& input, const std::vector<std::int64_t>& counts,
                  std::int64_t root) override;
  WorkPtr send(const at::Tensor& buffer, std::int64_t to, std::int64_t tag) override;
  WorkPtr receive(const at::Tensor& buffer, std::int64_t from, std::int64_t tag) override;
  WorkPtr barrier() override;

 private:
  friend class Engine;

  Place place() const { return {rank(), size()}; }
  std::int64_t& waiting(const Call& call) { return call.point_to_point() ? waiting_messages_ : waiting_collectives_; }
  bool fits_into_frame(std::int64_t bytes) const {
    return fingerprint_ && size() > 1 && bytes <= kFrameBytes - kFingerprintBytes;
  }
  CallPtr new_call(const Fingerprint& what, const at::Tensor& written, const at::Tensor& read, Eager eager = {});
  WorkPtr issue(const CallPtr& call);
  WorkPtr point_to_point(Operation operation, const at::Tensor& buffer, std::int64_t peer, std::int64_t tag);
  void append_reduce(Call& call, char* output, char* input, const std::vector<std::int64_t>& counts);
  void append_frames(Call& call, Eager eager);
  void exchange_reports(Call& call, const std::string& both, std::size_t other);

  // What follows belongs to the engine and is read and written under its lock.
  std::shared_ptr<Engine> engine_;
  std::chrono::milliseconds timeout_;
  bool fingerprint_;
  std::int64_t id_;
  std::vector<std::int64_t> peer_ids_;  // -1: has not made the group yet
  std::vector<Deferred> deferred_;
  std::uint64_t sequence_ = 0;  // of the last collective
  std::deque<CallPtr> in_flight_;
  std::int64_t begun_ = 0;                // collectives of them that have begun
  std::int64_t waiting_collectives_ = 0;  // and not
  std::int64_t waiting_messages_ = 0;     // sends and receives that have not begun
  std::string fault_;                     // why the group is unusable
  Clock::time_point fault_at_;
  bool poisoned_ = false;  // by this rank; else a fault is a peer's, and what it had sent before may still arrive
};

// Everything that this process does over MPI, one call at a time. Whoever waits for one operation moves all of them on:
// ranks may wait for theirs in different orders.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // The process's engine, made on first use; collective over MPI_COMM_WORLD then.
  static std::shared_ptr<Engine> get(std::chrono::milliseconds timeout);

  std::int64_t rank() const { return rank_; }
  std::int64_t size() const { return size_; }

  std::shared_ptr<Group> make_group(const std::vector<std::int64_t>& ranks, const GroupOptions& options);
  void leave(const std::string& why, std::chrono::milliseconds timeout);

  void issue(const CallPtr& call);
  void wait(const CallPtr& call);
  bool done(const CallPtr& call);

 private:
  using Key = std::pair<std::vector<std::int64_t>, std::int64_t>;  // the ranks, and the how-manieth group of them
  enum Word : std::int64_t { kAnnounce = 1, kLeft = 2, kPoison = 3 };

  // One request of MPI's: a message of a call, or words between engines.
  struct Entry {
    CallPtr call = {};
    Transfer::Way way = Transfer::Way::kSend;
    std::int64_t peer = -1;
    std::int64_t bytes = 0;
    std::shared_ptr<std::vector<std::int64_t>> words = {};
  };
  struct Announcement {
    std::int64_t id;
    bool fingerprint;
  };
  struct Departure {
    std::string why;
    Clock::time_point at;
  };

  Engine() = default;
  void start(std::chrono::milliseconds timeout);
  static void finish_at_exit();
  static int finish_before_mpi(MPI_Comm comm, int key, void* attribute, void* state);
  bool finish() noexcept;

  void check_usable(const Group* group, std::string_view operation) const;
  bool progress();
  void complete(const Entry& entry, const MPI_Status& status, int error);
  void begin_ready(Group& group);
  void advance(const CallPtr& call);
  void post(const CallPtr& call, const Transfer& transfer);
  void end(const CallPtr& call);
  void fail_call(const CallPtr& call, const std::string& text);
  void poison(Group& group, const std::string& text);
  void refuse_rest(Group& group);
  void check_faults(const CallPtr& call, Clock::time_point deadline);
  std::vector<std::int64_t> missing(const Call& call) const;

  void receive_words();
  void read_words(MPI_Status status);
  void send_words(std::int64_t world_rank, std::vector<std::int64_t> words);
  void send_text(std::int64_t world_rank, Word word, std::int64_t id, const std::string& text);
  void take_words(std::int64_t from, const std::vector<std::int64_t>& words);
  void take_announcement(const std::shared_ptr<Group>& group, std::int64_t world_rank, Announcement announcement);
  int tag(std::int64_t id, std::int64_t low) const { return static_cast<int>(id * kTagSpan + low); }

  std::mutex mutex_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  bool ours_ = false;       // we initialised MPI
  bool main_only_ = false;  // the program initialised MPI for its main thread alone
  bool finished_ = false;
  bool left_self_ = false;
  bool faulty_ = false;  // some group was poisoned
  bool crowded_ = false;
  std::int64_t rank_ = 0;
  std::int64_t size_ = 1;
  std::int64_t most_ids_ = 0;
  std::int64_t next_id_ = 2;
  std::int64_t active_ = 0;  // calls that have not ended

  std::vector<MPI_Request> requests_;
  std::vector<Entry> entries_;  // one per request
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
  std::vector<std::int64_t> words_;  // where the next words arrive

  std::map<std::vector<std::int64_t>, std::int64_t> made_;
  std::map<Key, std::weak_ptr<Group>> open_;                   // groups that some member has not made yet
  std::map<Key, std::map<std::int64_t, Announcement>> early_;  // of groups that this rank has not made yet
  std::map<std::int64_t, std::weak_ptr<Group>> by_id_;
  std::map<std::int64_t, Departure> left_;
};

}  // namespace dtensor::mpi_impl
