#include "dtensor/comm/c10d.h"

#include <algorithm>
#include <exception>

#include "dtensor/comm/c10d_backend_impl.h"
#include "dtensor/comm/launch_report_impl.h"
#include "dtensor/comm/rank_list_impl.h"
#include "dtensor/comm/rendezvous_impl.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

using messages::Clock;
using messages::Liveness;

// A lost rank's own connections break at once, and the calls that wait for it fail by themselves. This is for the rank
// whose machine is gone, and gives others the time to take in what it had sent before it ended.
constexpr auto kGrace = std::chrono::milliseconds(500);

// Ends the groups of lost ranks, a while after the news.
class Watch {
 public:
  explicit Watch(std::shared_ptr<Liveness> liveness) : liveness_(std::move(liveness)) {
    thread_ = std::thread([this] { run(); });
  }
  ~Watch() { stop(); }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
      changed_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
  }

  void add(const std::shared_ptr<messages::Abortable>& group) {
    const std::lock_guard lock(mutex_);
    std::erase_if(groups_, [](const auto& known) { return known.expired(); });
    groups_.push_back(group);
  }

  void tell(const RendezvousEvent& event) {
    // The launcher does not hear from ranks of other hosts. Before this rank learns of it: what follows is a
    // consequence.
    if (event.kind != RendezvousEvent::Kind::kFailed) {
      launch_impl::report_world(launch_impl::now_in_nanoseconds(), event.rank);
    }
    liveness_->tell(event);
    const bool ends = event.kind == RendezvousEvent::Kind::kLost ||
                      (event.kind == RendezvousEvent::Kind::kLeft && !event.text.empty());
    if (!ends) return;
    const std::lock_guard lock(mutex_);
    gone_.emplace_back(Clock::now() + kGrace, event.rank);
    changed_.notify_all();
  }

  std::vector<std::shared_ptr<messages::Abortable>> groups() {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<messages::Abortable>> result;
    for (const auto& known : groups_) {
      if (auto group = known.lock()) result.push_back(std::move(group));
    }
    return result;
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (!stop_) {
      if (gone_.empty()) {
        changed_.wait(lock);
        continue;
      }
      const auto [when, rank] = gone_.front();
      if (changed_.wait_until(lock, when, [this] { return stop_; })) return;
      gone_.pop_front();
      lock.unlock();
      for (const auto& group : groups()) {
        const auto& ranks = group->members();
        if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) continue;
        if (const auto cause = liveness_->cause("", {rank}, -1, {}, std::chrono::milliseconds(0))) group->abort(*cause);
      }
      lock.lock();
    }
  }

  const std::shared_ptr<Liveness> liveness_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::weak_ptr<messages::Abortable>> groups_;
  std::deque<std::pair<Clock::time_point, std::int64_t>> gone_;
  bool stop_ = false;
  std::thread thread_;
};

class C10dTransport final : public Transport {
 public:
  C10dTransport(const Rendezvous& rendezvous, const std::string& backend)
      : rendezvous_(rendezvous),
        liveness_(std::make_shared<Liveness>()),
        watch_(std::make_shared<Watch>(liveness_)),
        uncaught_(std::uncaught_exceptions()) {
    std::string address = rendezvous.host;
    if (rendezvous.size > 1) {
      meet();
      address = client_->local_address();
    }
    backend_ = backend == "nccl" ? make_nccl_backend(address) : make_gloo_backend(address);
  }

  ~C10dTransport() override {
    const bool unwinding = std::uncaught_exceptions() > uncaught_;
    try {
      leave(unwinding ? "it was stopped by an exception" : "");
      if (server_ && clean_) server_->wait_until_alone(rendezvous_.timeout);
    } catch (const std::exception&) {
      // Leaving must not fail: whoever is still there sees the connection close.
    }
    watch_->stop();
  }

  std::int64_t rank() const override { return rendezvous_.rank; }
  std::int64_t size() const override { return rendezvous_.size; }
  std::string backend() const override { return backend_->name(); }

  CommunicatorPtr make_group(const std::vector<std::int64_t>& ranks, const GroupOptions& options) override {
    check_group_ranks(ranks, rank(), size());
    C10dGroupPlan plan;
    {
      const std::lock_guard lock(mutex_);
      if (left_) fail_invalid("make_group", {.what = "rank " + std::to_string(rank()) + " has left the world"});
      // Members that ask for other options must not meet: they would misread each other.
      plan.key = "group/" + join_numbers(ranks) + (options.fingerprint ? "/checked/" : "/unchecked/");
      plan.key += std::to_string(made_[plan.key]++);
    }
    plan.rank = std::find(ranks.begin(), ranks.end(), rank()) - ranks.begin();
    plan.ranks = ranks;
    plan.options = options;
    plan.client = client_;
    plan.liveness = liveness_;
    plan.check = [liveness = liveness_, key = plan.key, ranks, self = rank()] {
      if (const auto cause = liveness->cause(key, ranks, self, {}, std::chrono::milliseconds(0))) {
        fail(ErrorKind::kCommunication, "make_group", {.what = *cause});
      }
    };
    plan.gather = [client = client_, check = plan.check, key = plan.key, ranks, self = rank(),
                   timeout = options.timeout](Clock::time_point deadline) {
      gather(*client, key, ranks, self, check, deadline, timeout);
    };
    plan.report = [client = client_, key = plan.key](const std::string& text) {
      try {
        if (client) client->report_failure(key, text);
      } catch (const std::exception&) {
        // Rank 0 is gone, or this rank has left: then the others know already.
      }
    };
    auto [group, handle] = backend_->make_group(plan);
    watch_->add(handle);
    return group;
  }

  void leave(const std::string& why) override {
    {
      const std::lock_guard lock(mutex_);
      if (left_) return;
      left_ = true;
      clean_ = why.empty();
    }
    const auto groups = watch_->groups();
    if (clean_) {
      // What nobody waited for still goes out.
      for (const auto& group : groups) group->drain();
    }
    try {
      if (client_) client_->leave(why);
    } catch (const std::exception&) {
      // Rank 0 is gone; so is the world.
    }
    for (const auto& group : groups) {
      group->abort("this rank, " + std::to_string(rank()) + ", has left" + (clean_ ? "" : ": " + why));
    }
  }

 private:
  void meet() {
    Rendezvous where = rendezvous_;
    if (rank() == 0) {
      server_ = std::make_unique<RendezvousServer>(
          where.host, where.agent_store ? 0 : where.port, size(),
          RendezvousServerOptions{.secret = where.secret, .allow_no_secret = where.allow_no_secret});
      where.port = server_->port();
    }
    if (rendezvous_.agent_store) where.port = agree_on_port(rendezvous_, where.port);
    client_ = std::make_shared<RendezvousClient>(
        where, [watch = watch_](const RendezvousEvent& event) { watch->tell(event); });
  }

  static void gather(RendezvousClient& client, const std::string& key, const std::vector<std::int64_t>& ranks,
                     std::int64_t self, const std::function<void()>& check, Clock::time_point deadline,
                     std::chrono::milliseconds timeout) {
    using std::chrono::milliseconds;
    constexpr milliseconds kLook(100);
    const auto here = [&](std::int64_t rank) { return key + "/here/" + std::to_string(rank); };
    client.set(here(self), {});
    std::vector<std::string> missing;
    for (const std::int64_t rank : ranks) missing.push_back(here(rank));
    while (true) {
      const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
      missing = client.wait(missing, std::clamp(left, milliseconds(0), kLook));
      if (missing.empty()) return;
      check();
      if (left > milliseconds(0)) continue;
      std::vector<std::int64_t> late;
      for (const std::string& name : missing) late.push_back(std::stoll(name.substr(here(0).size() - 1)));
      fail(ErrorKind::kCommunication, "make_group",
           {.what = rank_list(std::move(late)) + " never came to make the group " + member_list(ranks),
            .got = "a wait of " + std::to_string(timeout.count()) + " ms",
            .expected = "the same groups, with the same options, on all members"});
    }
  }

  const Rendezvous rendezvous_;
  const std::shared_ptr<Liveness> liveness_;
  const std::shared_ptr<Watch> watch_;
  const int uncaught_;
  std::unique_ptr<RendezvousServer> server_;
  std::shared_ptr<RendezvousClient> client_;
  std::unique_ptr<C10dBackend> backend_;

  std::mutex mutex_;
  std::map<std::string, std::int64_t> made_;
  bool left_ = false;
  bool clean_ = true;
};

}  // namespace

TransportPtr make_c10d_transport(const Rendezvous& rendezvous, const std::string& backend) {
  constexpr const char* kWhere = "make_c10d_transport";
  if (backend != "gloo" && backend != "nccl") {
    fail_invalid(
        kWhere, {.what = "this is no backend of c10d", .got = dtensor::in_quotes(backend), .expected = "gloo or nccl"});
  }
  if (rendezvous.size < 1 || rendezvous.rank < 0 || rendezvous.rank >= rendezvous.size) {
    fail_invalid(kWhere, {.what = "the rank is not in the world",
                          .got = "rank " + std::to_string(rendezvous.rank) + " of " + std::to_string(rendezvous.size)});
  }
  const bool any_port = rendezvous.size == 1 && rendezvous.port == 0;
  if (!any_port && (rendezvous.port < 1 || rendezvous.port > 65535)) {
    fail_invalid(kWhere, {.what = "this is no port", .got = std::to_string(rendezvous.port), .expected = "1 to 65535"});
  }
  if (rendezvous.timeout <= std::chrono::milliseconds(0)) {
    fail_invalid(kWhere,
                 {.what = "the timeout must be positive", .got = std::to_string(rendezvous.timeout.count()) + " ms"});
  }
  // Here, and not only where rank 0 listens: the error is the same on all ranks.
  if (rendezvous.size > 1) {
    rendezvous::check_reachable(rendezvous.host, rendezvous.secret, rendezvous.allow_no_secret);
  }
  return std::make_shared<C10dTransport>(rendezvous, backend);
}

}  // namespace dtensor
