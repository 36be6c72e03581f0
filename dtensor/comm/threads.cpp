#include "dtensor/comm/threads.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "dtensor/comm/thread_group.h"
#include "dtensor/core/error.h"

namespace dtensor {
namespace {

// What all ranks share: which groups there are, and who has left.
class ThreadWorld {
 public:
  explicit ThreadWorld(std::int64_t size) : left_(static_cast<std::size_t>(size)), made_(left_.size()) {
    // More ranks than cores: a rank that spins keeps from running the very rank that it waits for.
    crowded_ = size > static_cast<std::int64_t>(std::thread::hardware_concurrency());
  }

  std::int64_t size() const { return static_cast<std::int64_t>(left_.size()); }

  // The n-th call of a member with these ranks meets the n-th of the others.
  std::shared_ptr<ThreadGroup> join(std::int64_t rank, const std::vector<std::int64_t>& ranks,
                                    const std::string& label) {
    const std::lock_guard lock(mutex_);
    const std::int64_t nth = made_[static_cast<std::size_t>(rank)][ranks]++;
    const auto [entry, is_new] = joining_.try_emplace({ranks, nth});
    Joining& joining = entry->second;
    if (is_new) {
      joining.group = std::make_shared<ThreadGroup>(label, ranks, crowded_);
      for (const std::int64_t member : ranks) {
        const auto& left = left_[static_cast<std::size_t>(member)];
        if (left) joining.group->leave(member, *left);
      }
      std::erase_if(groups_, [](const auto& known) { return known.second.expired(); });
      groups_.emplace_back(ranks, joining.group);
    }
    const auto group = joining.group;
    if (++joining.members == ranks.size()) joining_.erase(entry);
    return group;
  }

  void leave(std::int64_t rank, const std::string& why) {
    const std::lock_guard lock(mutex_);
    auto& left = left_[static_cast<std::size_t>(rank)];
    if (left) return;
    left = why;
    for (const auto& [ranks, known] : groups_) {
      if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) continue;
      if (const auto group = known.lock()) group->leave(rank, why);
    }
  }

 private:
  using Ranks = std::vector<std::int64_t>;
  struct Joining {
    std::shared_ptr<ThreadGroup> group;
    std::size_t members = 0;
  };

  bool crowded_ = false;
  std::mutex mutex_;
  std::vector<std::optional<std::string>> left_;               // why, per rank
  std::vector<std::map<Ranks, std::int64_t>> made_;            // how many groups, per rank and rank list
  std::map<std::pair<Ranks, std::int64_t>, Joining> joining_;  // groups that not all members have made yet
  std::vector<std::pair<Ranks, std::weak_ptr<ThreadGroup>>> groups_;
};

// The same with a count of its own, for one member: one count for all would go from core to core with every operation.
std::shared_ptr<ThreadGroup> counted_here(std::shared_ptr<ThreadGroup> group) {
  const auto holder = std::make_shared<std::shared_ptr<ThreadGroup>>(std::move(group));
  return {holder, holder->get()};
}

class ThreadWork : public Work {
 public:
  ThreadWork(std::shared_ptr<ThreadGroup> group, Issued issued, std::chrono::milliseconds timeout)
      : group_(std::move(group)), issued_(std::move(issued)), timeout_(timeout) {}

  void wait() override { group_->wait(issued_, timeout_); }
  bool done() override { return group_->help(issued_) || group_->has_failed(issued_); }

 private:
  std::shared_ptr<ThreadGroup> group_;
  Issued issued_;
  std::chrono::milliseconds timeout_;
};

class ThreadCommunicator : public Communicator {
 public:
  ThreadCommunicator(ThreadWorld& world, const GroupOptions& options, std::int64_t rank,
                     const std::vector<std::int64_t>& ranks)
      : Communicator("threads", options.name, rank, ranks),
        group_(counted_here(world.join(ranks[static_cast<std::size_t>(rank)], ranks, describe()))),
        timeout_(options.timeout) {}

  WorkPtr all_reduce(const at::Tensor& buffer, ReduceOp op) override {
    return issue({.fingerprint = check_all_reduce(*this, buffer, op), .output = buffer});
  }
  WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input,
                     const std::vector<std::int64_t>& counts) override {
    return issue({check_all_gather(*this, output, input, counts), output, input, counts, {}});
  }
  WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input, const std::vector<std::int64_t>& counts,
                         ReduceOp op) override {
    return issue({check_reduce_scatter(*this, output, input, counts, op), output, input, counts, {}});
  }
  WorkPtr all_to_all(const at::Tensor& output, const at::Tensor& input, const std::vector<std::int64_t>& recv_counts,
                     const std::vector<std::int64_t>& send_counts) override {
    return issue(
        {check_all_to_all(*this, output, input, recv_counts, send_counts), output, input, recv_counts, send_counts});
  }
  WorkPtr broadcast(const at::Tensor& buffer, std::int64_t root) override {
    return issue({.fingerprint = check_broadcast(*this, buffer, root), .output = buffer});
  }
  WorkPtr scatter(const at::Tensor& output, const at::Tensor& input, const std::vector<std::int64_t>& counts,
                  std::int64_t root) override {
    return issue({check_scatter(*this, output, input, counts, root), output, input, counts, {}});
  }
  WorkPtr send(const at::Tensor& buffer, std::int64_t to, std::int64_t tag) override {
    Post post{.fingerprint = check_point_to_point(*this, Operation::kSend, buffer, to, tag), .input = buffer};
    check_device(post);
    return work(group_->post_pair(rank(), to, std::move(post)));
  }
  WorkPtr receive(const at::Tensor& buffer, std::int64_t from, std::int64_t tag) override {
    Post post{.fingerprint = check_point_to_point(*this, Operation::kReceive, buffer, from, tag), .output = buffer};
    check_device(post);
    return work(group_->post_pair(from, rank(), std::move(post)));
  }
  WorkPtr barrier() override { return issue({}); }
  bool shares_memory() const noexcept override { return true; }
  void watch_history(std::shared_ptr<const History> history) override {
    group_->watch_history(rank(), history);
    Communicator::watch_history(std::move(history));
  }

 private:
  WorkPtr issue(Post post) {
    check_device(post);
    return work(group_->post(rank(), std::move(post)));
  }

  WorkPtr work(Issued issued) { return std::make_shared<ThreadWork>(group_, std::move(issued), timeout_); }

  void check_device(const Post& post) const {
    for (const at::Tensor* buffer : {&post.output, &post.input}) {
      if (!buffer->defined() || buffer->device().is_cpu()) continue;
      fail_invalid(to_string(post.fingerprint.operation), {.what = describe() + " moves CPU tensors",
                                                           .got = buffer->device().str(),
                                                           .expected = "cpu",
                                                           .advice = "one process per GPU, with the nccl backend"});
    }
  }

  std::shared_ptr<ThreadGroup> group_;
  std::chrono::milliseconds timeout_;
};

class ThreadTransport : public Transport {
 public:
  ThreadTransport(std::shared_ptr<ThreadWorld> world, std::int64_t rank) : world_(std::move(world)), rank_(rank) {}
  ~ThreadTransport() override { world_->leave(rank_, {}); }

  std::int64_t rank() const override { return rank_; }
  std::int64_t size() const override { return world_->size(); }
  std::string backend() const override { return "threads"; }
  void leave(const std::string& why) override { world_->leave(rank_, why); }

  CommunicatorPtr make_group(const std::vector<std::int64_t>& ranks, const GroupOptions& options) override {
    check_group_ranks(ranks, rank_, size());
    const auto mine = std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin();
    return std::make_shared<ThreadCommunicator>(*world_, options, mine, ranks);
  }

 private:
  std::shared_ptr<ThreadWorld> world_;
  std::int64_t rank_;
};

}  // namespace

std::vector<TransportPtr> make_thread_transports(std::int64_t size) {
  constexpr std::int64_t kMostRanks = 4096;
  if (size < 1 || size > kMostRanks) {
    fail_invalid("threads", {.what = "a process cannot run this many ranks as threads",
                             .got = std::to_string(size),
                             .expected = "1 to " + std::to_string(kMostRanks)});
  }
  const auto world = std::make_shared<ThreadWorld>(size);
  std::vector<TransportPtr> transports;
  for (std::int64_t rank = 0; rank < size; ++rank) transports.push_back(std::make_shared<ThreadTransport>(world, rank));
  return transports;
}

}  // namespace dtensor
