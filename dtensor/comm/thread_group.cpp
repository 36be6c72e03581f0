#include "dtensor/comm/thread_group.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "dtensor/core/text.h"

namespace dtensor {
namespace {

constexpr std::uint64_t kAlways = ~std::uint64_t{0};

}  // namespace

ThreadGroup::ThreadGroup(std::string label, std::vector<std::int64_t> ranks, bool crowded)
    : label_(std::move(label)),
      ranks_(std::move(ranks)),
      crowded_(crowded),
      lane_(ranks_.size()),
      last_(ranks_.size()),
      last_after_(ranks_.size()),
      left_(ranks_.size()),
      histories_(ranks_.size()) {}

Issued ThreadGroup::post(std::int64_t member, Post post) {
  const auto index = static_cast<std::size_t>(member);
  const BriefLock issuing(lane_.issuing(index));
  const std::uint64_t sequence = lane_.next_sequence(index);
  post.fingerprint.sequence = sequence;
  Issued issued{.operation = nullptr, .member = index, .mine = post.fingerprint};
  const bool quick =
      lane_.carries(post) && is_quick(sequence) && (has_ended(index, sequence - 1) || end_in_lane(index, sequence - 1));
  if (!quick) return post_slowly(std::move(issued), std::move(post));
  lane_.publish(index, std::move(post));
  if (!is_quick(sequence)) issued.operation = meet(issued);
  return issued;
}

Issued ThreadGroup::post_slowly(Issued issued, Post post) {
  Released released;
  bool ready = false;
  {
    const BriefLock lock(mutex_);
    check_alive(issued.mine.operation);
    remember(issued.member, issued.mine);
    issued.operation = take_from_lane(issued.mine.sequence);
    post.behind = !has_ended(issued.member, issued.mine.sequence - 1);
    add_post(*issued.operation, issued.member, std::move(post));
    check_nobody_left(*issued.operation, issued.mine);
    ready = issued.operation->ready;
    if (ready) settle(released);
  }
  if (ready) parking_.notify_all();
  return issued;
}

ThreadOperationPtr ThreadGroup::meet(const Issued& issued) {
  const std::uint64_t sequence = issued.mine.sequence;
  Released released;
  ThreadOperationPtr operation;
  bool ready = false;
  {
    const BriefLock lock(mutex_);
    if (has_ended(issued.member, sequence)) return nullptr;
    operation = find_collective(sequence);
    if (lane_.is_here(issued.member, sequence)) {
      if (!operation && lane_.all_published(sequence) && lane_.all_agree(sequence)) return nullptr;
      check_alive(issued.mine.operation);
      operation = take_from_lane(sequence);
      if (!operation) return nullptr;
      check_nobody_left(*operation, issued.mine);
      ready = operation->ready;
      if (ready) settle(released);
    }
  }
  if (ready) parking_.notify_all();
  return operation;
}

ThreadOperationPtr ThreadGroup::take_from_lane(std::uint64_t sequence) {
  slow_from(sequence);
  InlineVec<std::size_t, 8> moved;
  for (std::size_t member = 0; member < ranks_.size(); ++member) {
    if (!lane_.is_published(member, sequence)) continue;
    if (lane_.move_away(member, sequence)) {
      moved.push_back(member);
    } else if (!lane_.was_moved(member, sequence)) {
      for (const std::size_t back : moved) lane_.move_back(back, sequence);
      return nullptr;
    }
  }
  ThreadOperationPtr operation = collective_at(sequence);
  for (const std::size_t member : moved) add_post(*operation, member, lane_.take_post(member));
  return operation;
}

// Who issued a collective has issued all before it: everybody has published what is behind.
void ThreadGroup::end_what_is_behind(const ThreadOperation& operation) {
  for (std::size_t member = 0; member < operation.posts.size(); ++member) {
    const std::uint64_t before = operation.posts[member].fingerprint.sequence - 1;
    if (!operation.posts[member].behind || !lane_.is_here(member, before)) continue;
    if (!lane_.all_agree(before)) take_from_lane(before);  // which says so
    if (lane_.try_end(member, before)) continue;
    while (!lane_.has_ended(member, before)) std::this_thread::yield();  // its own thread is at it
  }
}

void ThreadGroup::slow_from(std::uint64_t sequence) {
  slow_.store(std::max(sequence, slow_.load(std::memory_order_relaxed)), std::memory_order_seq_cst);
}

bool ThreadGroup::has_ended(std::size_t member, std::uint64_t sequence) const {
  return lane_.has_ended(member, sequence) || settled_.load(std::memory_order_acquire) >= sequence;
}

bool ThreadGroup::end_in_lane(std::size_t member, std::uint64_t sequence) {
  if (has_ended(member, sequence)) return true;
  if (!lane_.is_open(member, sequence) || !lane_.all_published(sequence) || !lane_.all_agree(sequence)) return false;
  return lane_.try_end(member, sequence) || has_ended(member, sequence);
}

ThreadOperationPtr ThreadGroup::wait_in_lane(const Issued& issued) {
  const std::uint64_t sequence = issued.mine.sequence;
  for (;;) {
    parking_.spin_until(crowded_, [&] { return lane_.all_published(sequence) || !is_quick(sequence); });
    if (end_in_lane(issued.member, sequence)) return nullptr;
    if (ThreadOperationPtr operation = meet(issued)) return operation;
  }
}

ThreadOperationPtr ThreadGroup::find_collective(std::uint64_t sequence) const {
  return sequence >= first_ && sequence - first_ < open_.size() ? open_[sequence - first_] : nullptr;
}

ThreadOperationPtr ThreadGroup::collective_at(std::uint64_t sequence) {
  if (open_.empty()) first_ = sequence;
  const auto fresh = [&] {
    auto operation = std::make_shared<ThreadOperation>();
    operation->posts.resize(ranks_.size());
    operation->missing = ranks_.size();
    return operation;
  };
  for (; sequence < first_; --first_) open_.push_front(fresh());
  while (first_ + open_.size() <= sequence) open_.push_back(fresh());
  return open_[sequence - first_];
}

Issued ThreadGroup::post_pair(std::int64_t from, std::int64_t to, Post post) {
  const std::size_t side = post.fingerprint.operation == Operation::kSend ? 0 : 1;
  Released released;
  const auto member = static_cast<std::size_t>(side == 0 ? from : to);
  Issued issued{.operation = nullptr, .member = member, .mine = post.fingerprint};
  bool ready = false;
  {
    const BriefLock lock(mutex_);
    check_alive(post.fingerprint.operation);
    remember(member, post.fingerprint);
    const auto [channel, is_new] = unmatched_.try_emplace(Channel{from, to, post.fingerprint.root});
    auto& waiting = channel->second;
    if (is_new || waiting.front()->posts[side].here) {
      issued.operation = std::make_shared<ThreadOperation>();
      issued.operation->posts.resize(2);
      issued.operation->missing = 2;
      issued.operation->pair = true;
      issued.operation->members = {from, to};
      waiting.push_back(issued.operation);
    } else {
      issued.operation = waiting.front();
    }
    add_post(*issued.operation, side, std::move(post));
    check_nobody_left(*issued.operation, issued.mine);
    ready = issued.operation->ready;
    if (ready) {
      waiting.pop_front();
      if (waiting.empty()) unmatched_.erase(channel);
      settle_one(*issued.operation, released);
    }
  }
  if (ready) issued.operation->parking.notify_all();
  return issued;
}

void ThreadGroup::add_post(ThreadOperation& operation, std::size_t participant, Post post) {
  check_agreement(operation, participant, post);
  post.here = true;
  operation.posts[participant] = std::move(post);
  if (--operation.missing > 0) return;
  check_balance(operation);
  end_what_is_behind(operation);
  operation.moves =
      operation.pair ? Moves::of_pair(operation.posts[0], operation.posts[1]) : Moves::of(operation.posts);
  operation.ready.store(true, std::memory_order_release);
}

void ThreadGroup::settle(Released& released) {
  while (!open_.empty() && open_.front()->ready && settle_one(*open_.front(), released)) {
    open_.pop_front();
    ++first_;
  }
}

// Small ones are run at once, by whoever holds the mutex: to share them would take longer.
bool ThreadGroup::settle_one(ThreadOperation& operation, Released& released) {
  const std::int64_t tasks = operation.moves.tasks();
  if (operation.finished.load(std::memory_order_acquire) < tasks) {
    if (!operation.moves.small()) return false;
    for (std::int64_t task = 0; task < tasks; ++task) operation.moves.run(task);
  }
  released.push_back(std::move(operation.posts));
  if (!operation.pair) settled_.store(first_, std::memory_order_release);
  operation.done.store(true, std::memory_order_release);
  return true;
}

void ThreadGroup::run_tasks(ThreadOperation& operation) {
  const std::int64_t tasks = operation.moves.tasks();
  for (;;) {
    const std::int64_t task = operation.next.fetch_add(1, std::memory_order_relaxed);
    if (task >= tasks) return;
    operation.moves.run(task);
    if (operation.finished.fetch_add(1, std::memory_order_acq_rel) + 1 < tasks) continue;
    Released released;
    {
      const BriefLock lock(mutex_);
      if (operation.pair) {
        settle_one(operation, released);
      } else {
        settle(released);
      }
    }
    parking_of(operation).notify_all();
  }
}

ThreadOperationPtr ThreadGroup::oldest_ready() {
  const BriefLock lock(mutex_);
  if (open_.empty() || !open_.front()->ready) return nullptr;
  return open_.front();
}

bool ThreadGroup::help(const Issued& issued) {
  if (issued.operation) return help(*issued.operation);
  if (end_in_lane(issued.member, issued.mine.sequence)) return true;
  if (lane_.is_here(issued.member, issued.mine.sequence)) return false;
  ThreadOperationPtr operation;
  {
    const BriefLock lock(mutex_);
    operation = find_collective(issued.mine.sequence);
  }
  return !operation || help(*operation);
}

bool ThreadGroup::help(ThreadOperation& operation) {
  const auto done = [&] { return operation.done.load(std::memory_order_acquire); };
  if (done()) return true;
  if (!operation.ready.load(std::memory_order_acquire)) return done();
  if (operation.pair) {
    if (!operation.moves.small()) run_tasks(operation);  // else somebody is at it, see settle_one
    return done();
  }
  // Those before it come first; when others are still at the oldest one's tasks, there is nothing to do but wait.
  for (;;) {
    const ThreadOperationPtr oldest = oldest_ready();
    if (!oldest) return done();
    run_tasks(*oldest);
    if (done()) return true;
    if (!oldest->done.load(std::memory_order_acquire)) return false;
  }
}

void ThreadGroup::wait(const Issued& issued, std::chrono::milliseconds timeout) {
  const ThreadOperationPtr shared = issued.operation ? issued.operation : wait_in_lane(issued);
  if (!shared) return;
  ThreadOperation& operation = *shared;
  if (operation.done.load(std::memory_order_acquire)) return;
  const auto deadline = Parking::Clock::now() + timeout;
  Parking& parking = parking_of(operation);
  for (;;) {
    const std::uint32_t seen = parking.count();
    if (help(operation)) return;
    if (parking.spin(seen, crowded_)) continue;
    {
      const BriefLock lock(mutex_);
      if (operation.done.load(std::memory_order_acquire)) return;
      if (!operation.ready) {
        check_alive(issued.mine.operation);
        check_nobody_left(operation, issued.mine);
      }
      if (Parking::Clock::now() >= deadline) fail_timeout(operation, issued.mine, timeout);
    }
    parking.park(seen, deadline);
  }
}

bool ThreadGroup::has_failed(const Issued& issued) const {
  if (poisoned_.load(std::memory_order_acquire)) return true;
  const std::uint64_t sequence = issued.mine.sequence;
  return !issued.operation && lane_.is_here(issued.member, sequence) && lane_.all_published(sequence) &&
         !lane_.all_agree(sequence);
}

void ThreadGroup::watch_history(std::int64_t member, std::shared_ptr<const History> history) {
  const BriefLock lock(mutex_);
  histories_[static_cast<std::size_t>(member)] = std::move(history);
}

void ThreadGroup::leave(std::int64_t rank, const std::string& why) {
  const BriefLock lock(mutex_);
  const auto member = std::find(ranks_.begin(), ranks_.end(), rank) - ranks_.begin();
  auto& left = left_[static_cast<std::size_t>(member)];
  if (!left) left = why;
  slow_from(kAlways);
  notify_everybody();
}

void ThreadGroup::notify_everybody() {
  parking_.notify_all();
  for (auto& [channel, operations] : unmatched_) {
    for (const auto& operation : operations) operation->parking.notify_all();
  }
}

void ThreadGroup::check_alive(Operation mine) const {
  if (poison_.empty()) return;
  fail(ErrorKind::kCommunication, to_string(mine),
       {.what = label_ + " is poisoned", .got = "an earlier failure: " + poison_, .advice = "a new group"});
}

void ThreadGroup::poison(Operation mine, const Complaint& complaint) {
  poison_ = format_complaint(to_string(mine), complaint);
  poisoned_.store(true, std::memory_order_release);
  slow_from(kAlways);
  notify_everybody();
  throw Error(ErrorKind::kCommunication, poison_);
}

// A send and its receive differ in their operation only.
void ThreadGroup::check_agreement(const ThreadOperation& operation, std::size_t participant, const Post& post) {
  const auto& posts = operation.posts;
  const auto first = std::find_if(posts.begin(), posts.end(), [](const Post& known) { return known.here; });
  if (first == posts.end()) return;
  const auto other = static_cast<std::size_t>(first - posts.begin());
  Fingerprint theirs = operation.posts[other].fingerprint;
  if (operation.pair) theirs.operation = post.fingerprint.operation;
  if (!theirs.agrees_with(post.fingerprint)) {
    const auto [first_side, other_side] = Fingerprint::two_sides(operation.posts[other].fingerprint, post.fingerprint);
    poison(post.fingerprint.operation,
           {.what = "the ranks of " + label_ + " diverged",
            .got = rank_name(operation.member(other)) + ": " + first_side + ", " +
                   rank_name(operation.member(participant)) + ": " + other_side +
                   explain_divergence(report_of(operation, other), report_of(operation, participant, &post)),
            .expected = operation.pair ? "the same elements on both sides" : "the same call on every rank"});
  }
  if (post.fingerprint.operation != Operation::kAllToAll) return;
  const auto compare = [&](std::size_t from, std::size_t to, std::int64_t sent, std::int64_t expected) {
    if (sent == expected) return;
    poison(post.fingerprint.operation,
           {.what = "the ranks of " + label_ + " diverged",
            .got = rank_name(operation.member(from)) + " sends " + std::to_string(sent) + " elements, " +
                   rank_name(operation.member(to)) + " expects " + std::to_string(expected) + " from it",
            .expected = "the same count on both sides"});
  };
  for (std::size_t peer = 0; peer < operation.posts.size(); ++peer) {
    if (!operation.posts[peer].here) continue;
    const Post& their_post = operation.posts[peer];
    compare(participant, peer, post.send_counts[peer], their_post.recv_counts[participant]);
    compare(peer, participant, their_post.send_counts[participant], post.recv_counts[peer]);
  }
}

ReportOf ThreadGroup::report_of(const ThreadOperation& operation, std::size_t participant, const Post* post) const {
  const std::int64_t member = operation.member(participant);
  const Fingerprint& what = post ? post->fingerprint : operation.posts[participant].fingerprint;
  const History* history = histories_[static_cast<std::size_t>(member)].get();
  return {.rank = ranks_[static_cast<std::size_t>(member)],
          .cause = what.cause ? *what.cause : std::string(),
          .made = what.made,
          .steps = history ? history->steps() : std::vector<History::Step>()};
}

// All have posted: what must add up to nothing.
void ThreadGroup::check_balance(const ThreadOperation& operation) {
  std::uint64_t balance = 0;
  for (const Post& post : operation.posts) balance += post.fingerprint.balance;
  if (operation.pair || balance == 0) return;
  std::vector<Fingerprint> all;
  for (const Post& post : operation.posts) all.push_back(post.fingerprint);
  const auto sides = find_divergence(all, ranks_);
  if (!sides) return;
  poison(all[0].operation, {.what = "the ranks of " + label_ + " diverged",
                            .got = *sides + explain_divergence(report_of(operation, 0), report_of(operation, 1)),
                            .expected = "the same call on every rank"});
}

void ThreadGroup::check_nobody_left(const ThreadOperation& operation, const Fingerprint& mine) {
  for (std::size_t i = 0; i < operation.posts.size(); ++i) {
    const std::int64_t member = operation.member(i);
    const auto& left = left_[static_cast<std::size_t>(member)];
    if (operation.posts[i].here || !left) continue;
    poison(mine.operation, {.what = rank_name(member) + " left " + label_,
                            .got = left->empty() ? "no more calls from it: it has finished" : "its error: " + *left,
                            .expected = mine.to_string() + " on every rank"});
  }
}

void ThreadGroup::remember(std::size_t member, const Fingerprint& call) {
  last_[member] = call;
  last_after_[member] = std::max({call.sequence, lane_.newest(member), last_after_[member]});
}

Fingerprint ThreadGroup::last_call(std::size_t member) const {
  const std::uint64_t newest = lane_.newest(member);
  return newest > last_after_[member] ? lane_.published(member, newest) : last_[member];
}

std::string ThreadGroup::what_is_missing(const ThreadOperation& operation) const {
  std::vector<std::string> missing;
  for (std::size_t i = 0; i < operation.posts.size(); ++i) {
    if (operation.posts[i].here) continue;
    const std::int64_t member = operation.member(i);
    const Fingerprint last = last_call(static_cast<std::size_t>(member));
    const bool none = last.operation == Operation::kBarrier && last.sequence == 0;
    missing.push_back(rank_name(member) + (none ? " (no call so far)" : " (last call: " + last.to_string() + ")"));
  }
  return join(missing, ", ", [](const std::string& text) { return text; });
}

void ThreadGroup::fail_timeout(const ThreadOperation& operation, const Fingerprint& mine,
                               std::chrono::milliseconds timeout) {
  const std::string after = "timed out after " + std::to_string(timeout.count()) + " ms in " + label_;
  if (operation.ready) {
    poison(mine.operation, {.what = after, .got = mine.to_string() + " issued by all, but not ended by those at it"});
  }
  poison(mine.operation, {.what = after,
                          .got = mine.to_string() + " without " + what_is_missing(operation),
                          .expected = operation.pair ? "the other side's call" : "the same call on every rank"});
}

}  // namespace dtensor
