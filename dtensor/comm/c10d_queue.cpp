#include <signal.h>

#include <algorithm>
#include <csignal>
#include <exception>

#include "dtensor/comm/c10d_impl.h"
#include "dtensor/comm/rank_list_impl.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"

namespace dtensor::messages {
namespace {

std::string name_ranks(const std::vector<std::int64_t>& peers, const std::vector<std::int64_t>& ranks) {
  std::vector<std::int64_t> named;
  for (const std::int64_t peer : peers) named.push_back(ranks[static_cast<std::size_t>(peer)]);
  return rank_list(std::move(named));
}

bool contains(const std::vector<std::int64_t>& ranks, std::int64_t rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

std::string to_text(const RendezvousEvent& event) {
  const std::string rank = "rank " + std::to_string(event.rank);
  switch (event.kind) {
    case RendezvousEvent::Kind::kLost:
      return rank + " was lost: it ended without a word";
    case RendezvousEvent::Kind::kFailed:
      return rank + " gave up: " + event.text;
    case RendezvousEvent::Kind::kLeft:
      break;
  }
  return event.text.empty() ? rank + " left: it had finished" : rank + " left after an error: " + event.text;
}

}  // namespace

void Liveness::tell(const RendezvousEvent& event) {
  const std::lock_guard lock(mutex_);
  events_.push_back(event);
  news_.notify_all();
}

std::optional<std::string> Liveness::cause(const std::string& group, const std::vector<std::int64_t>& ranks,
                                           std::int64_t self, const std::vector<std::int64_t>& peers,
                                           std::chrono::milliseconds patience) {
  const auto concerns = [&](const RendezvousEvent& event) {
    return event.rank != self &&
           (event.kind == RendezvousEvent::Kind::kFailed ? event.group == group : contains(ranks, event.rank));
  };
  const auto finished = [](const RendezvousEvent& event) {
    return event.kind == RendezvousEvent::Kind::kLeft && event.text.empty();
  };
  std::unique_lock lock(mutex_);
  std::optional<std::string> result;
  news_.wait_for(lock, patience, [&] {
    for (const RendezvousEvent& event : events_) {
      if (!concerns(event)) continue;
      if (!finished(event) || contains(peers, event.rank)) {
        result = to_text(event);
        break;
      }
      if (!result) result = to_text(event);
    }
    return result.has_value();
  });
  return result;
}

Crew::~Crew() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    wake_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
}

void Crew::run(std::function<void()> job) {
  const std::lock_guard lock(mutex_);
  jobs_.push_back(std::move(job));
  if (idle_ >= jobs_.size()) {
    wake_.notify_one();
  } else {
    threads_.emplace_back([this] { work(); });
  }
}

void Crew::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    ++idle_;
    wake_.wait(lock, [this] { return stop_ || !jobs_.empty(); });
    --idle_;
    if (jobs_.empty()) return;
    const auto job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job();
    lock.lock();
  }
}

void CallQueue::run_one(std::unique_lock<std::mutex>& lock) {
  busy = true;
  const Job job = std::move(jobs.front());
  jobs.pop_front();
  lock.unlock();
  job.run();
  lock.lock();
  busy = false;
  changed.notify_all();
}

void Call::wait() {
  std::unique_lock lock(queue_->mutex);
  while (!done_) {
    if (in_queue() && queue_->can_run()) {
      queue_->run_one(lock);
    } else {
      queue_->changed.wait(lock);
    }
  }
  if (error_) std::rethrow_exception(error_);
}

bool Call::done() {
  const std::lock_guard lock(queue_->mutex);
  return done_;
}

void Call::finish(std::exception_ptr error) {
  std::vector<at::Tensor> dropped;  // outside of the lock: the last owner may be here
  const std::lock_guard lock(queue_->mutex);
  dropped.swap(buffers_);
  error_ = std::move(error);
  done_ = true;
  --queue_->under_way;
  queue_->changed.notify_all();
}

namespace {

// Gloo writes to the sockets of peers that may be gone. The signal for that would end the program before it is told who
// was lost; where the program has not chosen otherwise, it is ignored from now on.
void survive_broken_pipes() {
  struct sigaction now = {};
  sigaction(SIGPIPE, nullptr, &now);
  if (now.sa_handler == SIG_DFL) std::signal(SIGPIPE, SIG_IGN);
}

}  // namespace

MessageGroup::MessageGroup(MessageGroupConfig config)
    : Communicator(config.backend, config.options.name, config.rank, config.ranks), config_(std::move(config)) {
  survive_broken_pipes();
  if (size() > 1) thread_ = std::thread([this] { serve(); });
}

MessageGroup::~MessageGroup() {
  drain();
  {
    const std::lock_guard lock(queue_->mutex);
    queue_->stop = true;
    queue_->changed.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

// Every call ends by itself: with its peers, with an error, or at its deadline.
void MessageGroup::drain() {
  std::unique_lock lock(queue_->mutex);
  queue_->changed.wait(lock, [this] { return queue_->under_way == 0 && !queue_->busy; });
}

void MessageGroup::abort(const std::string& why) { poison(why); }

Clock::time_point MessageGroup::deadline() const {
  constexpr auto kForever = std::chrono::hours(24 * 365);
  return Clock::now() + std::min<std::chrono::milliseconds>(config_.options.timeout, kForever);
}

WorkPtr MessageGroup::enqueue(const Fingerprint& fingerprint, std::vector<at::Tensor> buffers, Run run) {
  std::unique_lock lock(queue_->mutex);
  if (poison_) fail_poisoned(fingerprint.operation);
  Fingerprint numbered = fingerprint;
  numbered.sequence = sequence_++;
  auto call = std::make_shared<Call>(numbered, std::move(buffers), queue_);
  ++queue_->under_way;
  const auto whole = [this, call, run = std::move(run)] {
    execute(call, [&] { run(call->fingerprint(), deadline()); });
  };
  if (size() == 1) {
    lock.unlock();
    whole();
  } else {
    queue_->jobs.push_back({call, whole});
    queue_->changed.notify_all();
  }
  return call;
}

WorkPtr MessageGroup::enqueue_message(const Fingerprint& fingerprint, const at::Tensor& buffer, std::int64_t peer) {
  const auto call = std::make_shared<Call>(fingerprint, std::vector<at::Tensor>{buffer}, queue_);
  const Slice slice{static_cast<std::byte*>(buffer.data_ptr()), static_cast<std::size_t>(buffer.nbytes())};
  const std::lock_guard order(order_);
  {
    const std::lock_guard lock(queue_->mutex);
    if (poison_) fail_poisoned(fingerprint.operation);
    ++queue_->under_way;
  }
  auto start = [this, call, slice, peer] {
    std::function<void()> rest;
    std::exception_ptr early;
    try {
      rest = start_message(call->fingerprint(), slice, peer, deadline());
    } catch (...) {
      early = std::current_exception();
    }
    crew_.run([this, call, rest, early] {
      execute(call, [&] {
        if (early) std::rethrow_exception(early);
        rest();
      });
    });
  };
  if (connected_) {
    start();
  } else {
    not_connected_.emplace_back(std::move(start));
  }
  return call;
}

void MessageGroup::serve() {
  connect();
  std::unique_lock lock(queue_->mutex);
  queue_->open = true;
  queue_->changed.notify_all();
  while (true) {
    queue_->changed.wait(lock, [this] { return queue_->can_run() || (queue_->stop && queue_->jobs.empty()); });
    if (!queue_->can_run()) return;
    queue_->run_one(lock);
  }
}

void MessageGroup::connect() {
  try {
    std::shared_ptr<Messenger> made = config_.connect(deadline());
    const std::lock_guard lock(queue_->mutex);
    messenger_ = std::move(made);
    if (poison_) messenger_->close();
  } catch (const std::exception& error) {
    poison(error.what());
  }
  const std::lock_guard order(order_);
  connected_ = true;
  for (const auto& start : not_connected_) start();
  not_connected_.clear();
}

// Runs a call to its end, good or bad.
void MessageGroup::execute(const CallPtr& call, const std::function<void()>& run) {
  std::exception_ptr error;
  const Fingerprint& fingerprint = call->fingerprint();
  const auto failed = [&](const std::string& why) {
    poison(why);
    error = std::make_exception_ptr(Error(
        ErrorKind::kCommunication,
        format_complaint(to_string(fingerprint.operation),
                         {.what = why, .got = "a failure in " + describe() + " during " + fingerprint.to_string()})));
  };
  try {
    {
      const std::lock_guard lock(queue_->mutex);
      if (poison_) fail_poisoned(fingerprint.operation);
    }
    run();
  } catch (const Trouble& trouble) {
    failed(explain(trouble));
  } catch (const Error& told) {  // divergence, or a group that is already poisoned
    error = std::current_exception();
    poison(told.what());
  } catch (const std::exception& unknown) {
    // Gloo refuses to start a message on a connection that it has seen break.
    failed(known_cause(ranks(), std::chrono::milliseconds(800)).value_or(unknown.what()));
  }
  call->finish(error);  // the group may be gone after this
}

// Why the group is broken, if anybody has said it or says it soon; `peers` are the world ranks that it may be about.
std::optional<std::string> MessageGroup::known_cause(const std::vector<std::int64_t>& peers,
                                                     std::chrono::milliseconds patience) {
  {
    const std::lock_guard lock(queue_->mutex);
    if (poison_) return *poison_;
  }
  if (!config_.liveness) return std::nullopt;
  const std::int64_t self = ranks()[static_cast<std::size_t>(rank())];
  return config_.liveness->cause(config_.key, ranks(), self, peers, patience);
}

std::string MessageGroup::explain(const Trouble& trouble) {
  std::vector<std::int64_t> peers;
  for (const std::int64_t peer : trouble.peers) peers.push_back(ranks()[static_cast<std::size_t>(peer)]);
  if (auto cause = known_cause(peers, std::chrono::milliseconds(trouble.late ? 0 : 800))) return *cause;
  const std::string who = name_ranks(trouble.peers, ranks());
  if (!trouble.late) return "the connection to " + who + " broke";
  return "no word from " + who + " within " + std::to_string(config_.options.timeout.count()) + " ms";
}

void MessageGroup::poison(const std::string& why) {
  std::shared_ptr<Messenger> messenger;
  {
    const std::lock_guard lock(queue_->mutex);
    if (poison_) return;
    poison_ = why;
    messenger = messenger_;
  }
  // First the reason, so that those who see the connections close can find it.
  if (config_.report) config_.report(why);
  if (messenger) messenger->close();
}

void MessageGroup::fail_poisoned(Operation operation) {
  dtensor::fail(ErrorKind::kCommunication, to_string(operation),
                {.what = describe() + " is poisoned by an earlier failure",
                 .got = *poison_,
                 .advice = "making a new group of the ranks that are left"});
}

}  // namespace dtensor::messages
