#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "dtensor/comm/communicator.h"
#include "dtensor/comm/fingerprint.h"
#include "dtensor/comm/rendezvous.h"

// The c10d backend on the CPU: groups over point-to-point messages. Gloo's own collectives differ between libtorch
// versions, lack types and reductions, and take ten times as long for small buffers; its messages do not.
namespace dtensor::messages {

using Clock = std::chrono::steady_clock;

// A message under way. It must end, or be destroyed, before its memory goes.
class Message {
 public:
  virtual ~Message() = default;
  // Throws when it failed or did not end before the deadline; in the second case all of the messenger is broken.
  virtual void wait(Clock::time_point deadline) = 0;
};
using MessagePtr = std::unique_ptr<Message>;

struct Slice {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

// Moves bytes between the members of one group. Messages between two ranks with the same slot arrive in order; both
// sides must give the same size (Gloo aborts the process otherwise). May be used from several threads.
class Messenger {
 public:
  virtual ~Messenger() = default;
  virtual MessagePtr send(std::int64_t to, int slot, Slice from) = 0;
  virtual MessagePtr receive(std::int64_t from, int slot, Slice to) = 0;
  // All that is under way fails, here and at the peers.
  virtual void close() noexcept = 0;
};
using MessengerPtr = std::unique_ptr<Messenger>;

// What is known of the ranks of the world, as the rendezvous tells it.
class Liveness {
 public:
  void tell(const RendezvousEvent& event);
  // Why a group cannot go on: the first news of a member that was lost or left, or of another member's giving up.
  // Members that had finished count when they are among `peers`, the ranks that failed us, or when nothing else is
  // known. Waits a little for the news to arrive: a broken connection is noticed before its reason.
  std::optional<std::string> cause(const std::string& group, const std::vector<std::int64_t>& ranks, std::int64_t self,
                                   const std::vector<std::int64_t>& peers, std::chrono::milliseconds patience);

 private:
  std::mutex mutex_;
  std::condition_variable news_;
  std::vector<RendezvousEvent> events_;
};

// Threads that are started as they are needed and kept for the next job.
class Crew {
 public:
  ~Crew();
  void run(std::function<void()> job);

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> jobs_;
  std::vector<std::thread> threads_;
  std::size_t idle_ = 0;
  bool stop_ = false;
};

class Call;

// The calls of a group that are yet to run, in order, one at a time. The group's own thread runs them, or whoever waits
// for one and finds nobody at work: that saves two changes of thread. Shared with the calls, which may outlive the
// group.
struct CallQueue {
  struct Job {
    std::shared_ptr<Call> call;
    std::function<void()> run;  // ends the call, in every case
  };
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Job> jobs;
  bool open = false;  // the group is connected
  bool busy = false;  // somebody runs a call
  bool stop = false;
  std::size_t under_way = 0;

  bool can_run() const { return open && !busy && !jobs.empty(); }
  // Pre: can_run(). Lets go of the lock meanwhile.
  void run_one(std::unique_lock<std::mutex>& lock);
};

// A call on a group.
class Call : public Work {
 public:
  // The buffers are kept until the call has ended.
  Call(Fingerprint fingerprint, std::vector<at::Tensor> buffers, std::shared_ptr<CallQueue> queue)
      : fingerprint_(std::move(fingerprint)), buffers_(std::move(buffers)), queue_(std::move(queue)) {}
  // Messages are not in the queue: who waits for one must not be held up by a call that is.
  bool in_queue() const {
    return fingerprint_.operation != Operation::kSend && fingerprint_.operation != Operation::kReceive;
  }
  const Fingerprint& fingerprint() const { return fingerprint_; }

  void wait() override;
  bool done() override;
  void finish(std::exception_ptr error);

 private:
  const Fingerprint fingerprint_;
  std::vector<at::Tensor> buffers_;
  const std::shared_ptr<CallQueue> queue_;
  bool done_ = false;  // of the queue's mutex
  std::exception_ptr error_;
};

// A member that did not do its part.
struct Trouble {
  std::vector<std::int64_t> peers;  // in the group
  bool late = false;                // else its connection broke
};

struct MessageGroupConfig {
  std::string backend;  // as it stands in messages
  std::string key;      // names the group among all of the world, alike on its members
  std::int64_t rank = 0;
  std::vector<std::int64_t> ranks;
  GroupOptions options;
  // Called on the group's own thread; must give up at the deadline.
  std::function<MessengerPtr(Clock::time_point deadline)> connect;
  std::shared_ptr<Liveness> liveness;                   // may be null
  std::function<void(const std::string& text)> report;  // tells the other members why this one gave up; may be null
};

// A group as its transport sees it.
class Abortable {
 public:
  virtual ~Abortable() = default;
  virtual const std::vector<std::int64_t>& members() const = 0;
  // Until nothing is under way.
  virtual void drain() = 0;
  // The group ends now, for the reason given; what is under way fails with it, here and at the peers.
  virtual void abort(const std::string& why) = 0;
};

class MessageGroup final : public Communicator, public Abortable {
 public:
  explicit MessageGroup(MessageGroupConfig config);
  // Waits for what is under way.
  ~MessageGroup() override;

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

  // For groups whose data go another way: once the members agree on what they are about to do (unless that was turned
  // off), `launch` runs on the group's own thread.
  WorkPtr agree_then(const Fingerprint& fingerprint, const std::vector<at::Tensor>& buffers,
                     std::function<void()> launch);

  const std::vector<std::int64_t>& members() const override { return ranks(); }
  void drain() override;
  void abort(const std::string& why) override;

 private:
  using CallPtr = std::shared_ptr<Call>;
  using Run = std::function<void(const Fingerprint& fingerprint, Clock::time_point deadline)>;
  using Messages = std::vector<std::pair<std::int64_t, MessagePtr>>;  // with whom

  // c10d_queue.cpp: who runs what, and what happens when it fails.
  WorkPtr enqueue(const Fingerprint& fingerprint, std::vector<at::Tensor> buffers, Run run);
  WorkPtr enqueue_message(const Fingerprint& fingerprint, const at::Tensor& buffer, std::int64_t peer);
  void serve();
  void connect();
  void execute(const CallPtr& call, const std::function<void()>& run);
  std::string explain(const Trouble& trouble);
  std::optional<std::string> known_cause(const std::vector<std::int64_t>& peers, std::chrono::milliseconds patience);
  void poison(const std::string& why);
  [[noreturn]] void fail_poisoned(Operation operation);
  Clock::time_point deadline() const;

  // c10d_exchange.cpp: everybody sends something to everybody, `out[r]` to rank r and `in[r]` from it.
  std::string exchange_reports(const Fingerprint& fingerprint, std::size_t other, Clock::time_point deadline);
  void exchange(const Fingerprint& fingerprint, std::span<const Slice> out, std::span<const Slice> in,
                Clock::time_point deadline);
  void exchange_frames(const Fingerprint& fingerprint, std::span<const Slice> out, std::span<const Slice> in,
                       Clock::time_point deadline);
  void move(std::span<const Slice> out, std::span<const Slice> in, std::size_t above, Clock::time_point deadline);
  void await(Messages& messages, Clock::time_point deadline);
  void reduce_small(const Fingerprint& fingerprint, Slice buffer, Clock::time_point deadline);
  void reduce_large(const Fingerprint& fingerprint, Slice buffer, Clock::time_point deadline);
  void broadcast_large(const Fingerprint& fingerprint, Slice buffer, Clock::time_point deadline);
  // Posts what must be in order and returns the rest, which waits.
  std::function<void()> start_message(const Fingerprint& fingerprint, Slice buffer, std::int64_t peer,
                                      Clock::time_point deadline);

  const MessageGroupConfig config_;

  const std::shared_ptr<CallQueue> queue_ = std::make_shared<CallQueue>();
  // Of the queue's mutex.
  std::uint64_t sequence_ = 0;
  std::optional<std::string> poison_;
  std::shared_ptr<Messenger> messenger_;  // null until connected

  std::mutex order_;                                  // of send and receive calls; locked before the queue's
  std::vector<std::function<void()>> not_connected_;  // such calls that came early
  bool connected_ = false;
  std::map<std::int64_t, std::uint64_t> sent_;

  std::vector<std::uint64_t> frames_;  // of whoever runs a call
  Crew crew_;
  std::thread thread_;
};

}  // namespace dtensor::messages
