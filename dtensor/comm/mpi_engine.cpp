#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <thread>

#include "dtensor/comm/mpi_impl.h"
#include "dtensor/comm/rank_list_impl.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"

namespace dtensor::mpi_impl {
namespace {

using std::chrono::milliseconds;
using Way = Transfer::Way;

constexpr std::int64_t kChunk = std::int64_t{1} << 30;  // bytes of one message: MPI counts in int
constexpr std::int64_t kOverlap = 64;                   // collectives of a group that have begun; fewer than its tags
constexpr std::size_t kLongestText = 4096;              // of an error that peers are told
constexpr milliseconds kSettle{500};                    // for what a peer sent before it left or gave up
constexpr int kQuietPolls = 100;                        // without news, until nothing more is on its way
constexpr milliseconds kFarewell{5000};                 // for the others to leave too when something went wrong

std::string error_text(int code) {
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  return std::string(text, static_cast<std::size_t>(length));
}

void check(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  fail(ErrorKind::kCommunication, "mpi", {.what = std::string(what) + " failed", .got = error_text(code)});
}

// Polls hot for a moment, then lets others run, then sleeps: ranks may outnumber the cores.
class Backoff {
 public:
  explicit Backoff(bool crowded) : polls_(crowded ? kHot : 0) {}
  void reset() { polls_ = std::min(polls_, kHot); }
  void pause() {
    ++polls_;
    if (polls_ <= kHot) return;
    if (polls_ <= kYield) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

 private:
  static constexpr int kHot = 2000;
  static constexpr int kYield = kHot + 10000;
  int polls_;
};

std::string in_words(const Call& call) { return call.what.to_string(); }
std::string where(const Call& call) { return std::string(to_string(call.what.operation)); }

Complaint poisoned(const std::string& group, const std::string& fault) {
  return {.what = group + " is poisoned", .got = "an earlier failure: " + fault, .advice = "a new group"};
}

std::shared_ptr<Engine>& the_engine() {
  static std::shared_ptr<Engine> engine;
  return engine;
}

}  // namespace

// ---- the life of the engine

std::shared_ptr<Engine> Engine::get(milliseconds timeout) {
  static std::mutex making;
  const std::lock_guard lock(making);
  std::shared_ptr<Engine>& engine = the_engine();
  if (!engine) {
    std::shared_ptr<Engine> fresh(new Engine);
    fresh->start(timeout);
    engine = fresh;
    std::atexit(finish_at_exit);
  }
  return engine;
}

void Engine::start(milliseconds timeout) {
  int flag = 0;
  MPI_Finalized(&flag);
  if (flag != 0) {
    fail(ErrorKind::kInvalidArgument, "mpi",
         {.what = "MPI has been finalised", .expected = "the transport to be made before MPI_Finalize"});
  }
  MPI_Initialized(&flag);
  int provided = MPI_THREAD_SINGLE;
  if (flag != 0) {
    MPI_Query_thread(&provided);
  } else {
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
    ours_ = true;
  }
  main_only_ = provided < MPI_THREAD_SERIALIZED;
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Comm_idup(MPI_COMM_WORLD, &comm_, &request), "MPI_Comm_idup");
  const Clock::time_point deadline = Clock::now() + timeout;
  Backoff backoff(false);
  for (int ready = 0; ready == 0; backoff.pause()) {
    check(MPI_Test(&request, &ready, MPI_STATUS_IGNORE), "MPI_Comm_idup");
    if (ready == 0 && Clock::now() >= deadline) {
      fail(ErrorKind::kCommunication, "mpi",
           {.what = "not all ranks have come within " + std::to_string(timeout.count()) + " ms",
            .expected = "every rank of MPI_COMM_WORLD to make its transport"});
    }
  }
  MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
  int number = 0;
  MPI_Comm_rank(comm_, &number);
  rank_ = number;
  MPI_Comm_size(comm_, &number);
  size_ = number;
  void* bound = nullptr;
  MPI_Comm_get_attr(comm_, MPI_TAG_UB, &bound, &flag);
  most_ids_ = ((flag != 0 ? std::int64_t{*static_cast<int*>(bound)} : kTagSpan - 1) + 1) / kTagSpan;
  const char* local = std::getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
  crowded_ =
      (local != nullptr ? std::atoll(local) : size_) > static_cast<std::int64_t>(std::thread::hardware_concurrency());
  words_.resize(static_cast<std::size_t>(size_) + 8 + kLongestText / sizeof(std::int64_t));
  requests_.push_back(MPI_REQUEST_NULL);
  entries_.emplace_back();
  receive_words();
  int key = MPI_KEYVAL_INVALID;
  check(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, finish_before_mpi, &key, nullptr), "MPI_Comm_create_keyval");
  check(MPI_Comm_set_attr(MPI_COMM_SELF, key, nullptr), "MPI_Comm_set_attr");
}

void Engine::finish_at_exit() {
  int flag = 0;
  MPI_Finalized(&flag);
  if (flag != 0) return;
  const std::shared_ptr<Engine> engine = the_engine();
  if (engine->finish() && engine->ours_) MPI_Finalize();
}

// MPI_Finalize of the program deletes the attributes of MPI_COMM_SELF first.
int Engine::finish_before_mpi(MPI_Comm, int, void*, void*) {
  the_engine()->finish();
  return MPI_SUCCESS;
}

// Can MPI be finalised? Without faults MPI_Finalize waits for the others, as in any MPI program. After a fault they may
// never come: then this rank waits a little for their farewells, and else exits without it, upon which mpirun ends the
// job.
bool Engine::finish() noexcept try {
  leave("", faulty_ ? milliseconds(0) : kFarewell);
  const std::lock_guard lock(mutex_);
  if (finished_) return true;
  const auto settle = [&](auto settled) {
    const Clock::time_point deadline = Clock::now() + kFarewell;
    Backoff backoff(true);
    while (!settled() && Clock::now() < deadline) {
      progress();
      backoff.pause();
    }
    return settled();
  };
  if (faulty_) {
    if (!settle([&] { return static_cast<std::int64_t>(left_.size()) == size_ - 1; })) return false;
    for (std::size_t i = 1; i < requests_.size(); ++i) {
      if (entries_[i].way == Way::kReceive) MPI_Cancel(&requests_[i]);
    }
  }
  if (!settle([&] { return requests_.size() == 1; })) return false;
  finished_ = true;
  MPI_Cancel(requests_.data());
  MPI_Wait(requests_.data(), MPI_STATUS_IGNORE);
  MPI_Comm_free(&comm_);
  return true;
} catch (const std::exception&) {  // MPI itself fails: there is nobody left to tell
  return false;
}

void Engine::leave(const std::string& why, milliseconds timeout) {
  std::unique_lock lock(mutex_);
  if (left_self_ || finished_) return;
  const Clock::time_point deadline = Clock::now() + timeout;
  Backoff backoff(crowded_);
  while (why.empty() && active_ > 0 && Clock::now() < deadline) {
    if (progress()) backoff.reset();
    lock.unlock();
    backoff.pause();
    lock.lock();
  }
  left_self_ = true;
  const std::string text = why.empty() && active_ > 0 ? "it left with operations under way" : why;
  if (!text.empty()) faulty_ = true;
  for (std::int64_t peer = 0; peer < size_; ++peer) {
    if (peer != rank_) send_text(peer, kLeft, 0, text);
  }
}

void Engine::check_usable(const Group* group, std::string_view operation) const {
  int main_thread = 1;
  if (main_only_) MPI_Is_thread_main(&main_thread);
  if (main_thread == 0) {
    fail_invalid(operation, {.what = "the program initialised MPI for its main thread alone, and this is another",
                             .expected = "MPI_Init_thread with MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE"});
  }
  if (finished_ || left_self_) {
    fail(ErrorKind::kCommunication, operation,
         {.what = "rank " + std::to_string(rank_) + " has left" + (group != nullptr ? " " + group->describe() : "")});
  }
  if (group != nullptr && !group->fault_.empty()) {
    fail(ErrorKind::kCommunication, operation, poisoned(group->describe(), group->fault_));
  }
}

// ---- groups, and the words between engines

std::shared_ptr<Group> Engine::make_group(const std::vector<std::int64_t>& ranks, const GroupOptions& options) {
  check_group_ranks(ranks, rank_, size_);
  const std::lock_guard lock(mutex_);
  check_usable(nullptr, "make_group");
  if (next_id_ + 1 >= most_ids_) {
    fail(ErrorKind::kNotSupported, "make_group",
         {.what = "too many groups were made", .got = std::to_string(next_id_ / 2 - 1), .advice = "keeping groups"});
  }
  const auto mine = std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin();
  auto group = std::make_shared<Group>(shared_from_this(), mine, ranks, options, next_id_);
  next_id_ += 2;
  by_id_[group->id_] = group;
  const Key key{ranks, made_[ranks]++};
  open_[key] = group;
  std::vector<std::int64_t> words = {kAnnounce, group->id_, options.fingerprint ? 1 : 0, key.second,
                                     static_cast<std::int64_t>(ranks.size())};
  words.insert(words.end(), ranks.begin(), ranks.end());
  for (const std::int64_t peer : ranks) {
    if (peer != rank_) send_words(peer, words);
  }
  if (const auto early = early_.find(key); early != early_.end()) {
    for (const auto& [peer, announcement] : early->second) take_announcement(group, peer, announcement);
    early_.erase(early);
  }
  return group;
}

void Engine::take_announcement(const std::shared_ptr<Group>& group, std::int64_t world_rank,
                               Announcement announcement) {
  const auto& ranks = group->ranks();
  const std::int64_t peer = std::find(ranks.begin(), ranks.end(), world_rank) - ranks.begin();
  if (peer == group->size()) return;
  group->peer_ids_[peer] = announcement.id;
  if (announcement.fingerprint != group->fingerprint_) {
    poison(*group, "fingerprints are on in one of ranks " + std::to_string(rank_) + " and " +
                       std::to_string(world_rank) + " and off in the other");
  }
  std::vector<Deferred> waiting;
  waiting.swap(group->deferred_);
  for (Deferred& item : waiting) {
    if (item.transfer.peer != peer) {
      group->deferred_.push_back(std::move(item));
      continue;
    }
    --item.call->pending;
    if (!item.call->ended) post(item.call, item.transfer);
  }
}

void Engine::receive_words() {
  check(MPI_Irecv(words_.data(), static_cast<int>(words_.size()), MPI_INT64_T, MPI_ANY_SOURCE, tag(0, 0), comm_,
                  requests_.data()),
        "MPI_Irecv");
}

void Engine::send_words(std::int64_t world_rank, std::vector<std::int64_t> words) {
  auto kept = std::make_shared<std::vector<std::int64_t>>(std::move(words));
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Isend(kept->data(), static_cast<int>(kept->size()), MPI_INT64_T, static_cast<int>(world_rank), tag(0, 0),
                  comm_, &request),
        "MPI_Isend");
  requests_.push_back(request);
  entries_.push_back({.peer = world_rank, .words = std::move(kept)});
}

void Engine::send_text(std::int64_t world_rank, Word word, std::int64_t id, const std::string& text) {
  const std::size_t length = std::min(text.size(), kLongestText);
  std::vector<std::int64_t> words(3 + (length + sizeof(std::int64_t) - 1) / sizeof(std::int64_t));
  words[0] = word;
  words[1] = id;
  words[2] = static_cast<std::int64_t>(length);
  std::memcpy(words.data() + 3, text.data(), length);
  send_words(world_rank, std::move(words));
}

void Engine::take_words(std::int64_t from, const std::vector<std::int64_t>& words) {
  if (words.empty()) return;
  if (words[0] == kAnnounce) {
    Key key{std::vector(words.begin() + 5, words.end()), words[3]};
    const Announcement announcement{words[1], words[2] != 0};
    const auto found = open_.find(key);
    if (found == open_.end()) {
      early_[key][from] = announcement;
      return;
    }
    const std::shared_ptr<Group> group = found->second.lock();
    if (group) take_announcement(group, from, announcement);
    const auto unknown = [](std::int64_t id) { return id < 0; };
    if (group && std::none_of(group->peer_ids_.begin(), group->peer_ids_.end(), unknown)) open_.erase(found);
    return;
  }
  const std::string text(reinterpret_cast<const char*>(words.data() + 3), static_cast<std::size_t>(words[2]));
  if (words[0] == kLeft) {
    left_[from] = {text, Clock::now()};
    return;
  }
  const auto found = by_id_.find(words[1]);
  const std::shared_ptr<Group> group = found != by_id_.end() ? found->second.lock() : nullptr;
  if (!group || !group->fault_.empty()) return;
  group->fault_ = "rank " + std::to_string(from) + " reported: " + text;
  group->fault_at_ = Clock::now();
  faulty_ = true;
}

// ---- calls

void Engine::issue(const CallPtr& call) {
  Group& group = *call->group;
  const std::lock_guard lock(mutex_);
  progress();  // a peer may have given the group up
  check_usable(&group, to_string(call->what.operation));
  if (!call->point_to_point()) {
    call->what.sequence = ++group.sequence_;
    call->low = static_cast<std::int64_t>(group.sequence_ % kTagSpan);
  }
  call->issued = Clock::now();
  ++active_;
  group.in_flight_.push_back(call);
  ++group.waiting(*call);
  begin_ready(group);
}

void Engine::wait(const CallPtr& call) {
  if (!call->ended) {
    std::unique_lock lock(mutex_);
    check_usable(nullptr, to_string(call->what.operation));
    const Clock::time_point deadline = Clock::now() + call->group->timeout_;
    Backoff backoff(crowded_);
    while (true) {
      const bool moved = progress();
      if (call->ended) break;
      check_faults(call, deadline);
      if (moved) backoff.reset();
      lock.unlock();
      backoff.pause();
      lock.lock();
    }
  }
  if (!call->error.empty()) throw Error(ErrorKind::kCommunication, call->error);
}

bool Engine::done(const CallPtr& call) {
  if (call->ended) return true;
  const std::lock_guard lock(mutex_);
  check_usable(nullptr, to_string(call->what.operation));
  progress();
  try {
    if (!call->ended) check_faults(call, call->issued + call->group->timeout_);
  } catch (const Error&) {  // wait() says it
  }
  return call->ended;
}

bool Call::has_to_follow(const Call& earlier) const {
  const auto overlap = [](const std::vector<Memory>& some, const std::vector<Memory>& others) {
    for (const Memory& a : some) {
      for (const Memory& b : others) {
        if (a.begin < b.end && b.begin < a.end) return true;
      }
    }
    return false;
  };
  if (overlap(writes, earlier.writes) || overlap(writes, earlier.reads) || overlap(reads, earlier.writes)) return true;
  const bool same_channel =
      point_to_point() && what.operation == earlier.what.operation && peer == earlier.peer && low == earlier.low;
  return same_channel && (rounds.size() > 1 || !earlier.started);
}

bool Engine::progress() {
  const auto size = static_cast<int>(requests_.size());
  indices_.resize(requests_.size());
  statuses_.resize(requests_.size());
  int count = 0;
  const int code = MPI_Testsome(size, requests_.data(), &count, indices_.data(), statuses_.data());
  if (code != MPI_ERR_IN_STATUS) check(code, "MPI_Testsome");
  if (count == MPI_UNDEFINED || count == 0) return false;
  std::vector<std::pair<Entry, MPI_Status>> ended;
  std::optional<MPI_Status> words;
  for (int i = 0; i < count; ++i) {
    if (code != MPI_ERR_IN_STATUS) statuses_[i].MPI_ERROR = MPI_SUCCESS;
    if (indices_[i] == 0) {
      words = statuses_[i];
    } else {
      ended.emplace_back(std::move(entries_[indices_[i]]), statuses_[i]);
    }
  }
  std::sort(indices_.begin(), indices_.begin() + count, std::greater<>());
  for (int i = 0; i < count; ++i) {
    const int index = indices_[i];
    if (index == 0) continue;
    requests_[index] = requests_.back();
    requests_.pop_back();
    if (index + 1 < static_cast<int>(entries_.size())) entries_[index] = std::move(entries_.back());
    entries_.pop_back();
  }
  if (words) read_words(*words);
  for (const auto& [entry, status] : ended) complete(entry, status, status.MPI_ERROR);
  return true;
}

// Takes all the words that are there, before any data is looked at: a peer whose data has come has announced the group
// first, and must be told when that data is wrong.
void Engine::read_words(MPI_Status status) {
  for (int more = 1; more != 0;) {
    int count = 0;
    MPI_Get_count(&status, MPI_INT64_T, &count);
    const bool whole = status.MPI_ERROR == MPI_SUCCESS && count >= 3;
    const std::vector<std::int64_t> words(words_.begin(), words_.begin() + (whole ? count : 0));
    receive_words();
    take_words(status.MPI_SOURCE, words);
    check(MPI_Test(requests_.data(), &more, &status), "MPI_Test");
    status.MPI_ERROR = MPI_SUCCESS;
  }
}

void Engine::complete(const Entry& entry, const MPI_Status& status, int error) {
  if (!entry.call) return;  // words that were sent
  const CallPtr& call = entry.call;
  --call->pending;
  if (call->ended) return;
  const std::int64_t peer = call->group->ranks()[entry.peer];
  const auto broken = [&](const std::string& got) {
    fail_call(call,
              format_complaint(where(*call), {.what = "the ranks of " + call->group->describe() + " diverged",
                                              .got = got + " rank " + std::to_string(peer) + " in " + in_words(*call),
                                              .expected = "the same call on every rank"}));
  };
  if (error != MPI_SUCCESS) {
    int kind = error;
    MPI_Error_class(error, &kind);
    broken(kind == MPI_ERR_TRUNCATE ? "more than " + std::to_string(entry.bytes) + " bytes from"
                                    : error_text(error) + " with");
    return;
  }
  if (entry.way == Way::kReceive) {
    int count = 0;
    MPI_Get_count(&status, MPI_BYTE, &count);
    if (count != entry.bytes) {
      broken(std::to_string(count) + " bytes instead of " + std::to_string(entry.bytes) + " from");
      return;
    }
  }
  if (call->pending == 0) advance(call);
}

// Begins what nothing holds up any more. Collectives begin in order; a send or receive waits for none but those calls
// that it has to follow.
void Engine::begin_ready(Group& group) {
  std::vector<CallPtr> ready;
  const std::deque<CallPtr>& calls = group.in_flight_;
  std::int64_t room = kOverlap - group.begun_;
  std::int64_t messages = group.waiting_messages_;
  bool in_order = group.waiting_collectives_ > 0;
  for (auto at = calls.begin(); at != calls.end() && (messages > 0 || (in_order && room > 0)); ++at) {
    const CallPtr& call = *at;
    if (call->started) continue;
    const bool message = call->point_to_point();
    if (message) --messages;
    if (!message && (!in_order || room <= 0)) continue;
    const auto holds_up = [&](const CallPtr& earlier) { return call->has_to_follow(*earlier); };
    if (std::none_of(calls.begin(), at, holds_up)) {
      ready.push_back(call);
      if (!message) --room;
    } else if (!message) {
      in_order = false;
    }
  }
  for (const CallPtr& call : ready) {
    if (call->started || call->ended) continue;
    call->started = true;
    --group.waiting(*call);
    if (!call->point_to_point()) ++group.begun_;
    advance(call);
  }
}

void Engine::advance(const CallPtr& call) {
  while (!call->ended && call->pending == 0) {
    try {
      // It may put other rounds in place of those to come.
      if (call->next_round > 0) {
        if (const auto after = std::move(call->rounds[call->next_round - 1].after)) after();
      }
      if (call->next_round == call->rounds.size()) {
        end(call);
        return;
      }
      for (const Transfer& transfer : call->rounds[call->next_round++].transfers) post(call, transfer);
    } catch (const std::exception& error) {
      fail_call(call, error.what());
    }
  }
}

void Engine::post(const CallPtr& call, const Transfer& transfer) {
  Group& group = *call->group;
  const bool send = transfer.way == Way::kSend;
  const std::int64_t base = send ? group.peer_ids_[transfer.peer] : group.id_;
  if (base < 0) {
    group.deferred_.push_back({call, transfer});
    ++call->pending;
    return;
  }
  const int number = tag(base + (call->point_to_point() ? 1 : 0), call->low);
  const auto peer = static_cast<int>(group.ranks()[transfer.peer]);
  std::int64_t at = 0;
  do {
    const std::int64_t bytes = std::min(kChunk, transfer.bytes - at);
    MPI_Request request = MPI_REQUEST_NULL;
    char* data = transfer.data + at;
    const auto count = static_cast<int>(bytes);
    check(send ? MPI_Isend(data, count, MPI_BYTE, peer, number, comm_, &request)
               : MPI_Irecv(data, count, MPI_BYTE, peer, number, comm_, &request),
          send ? "MPI_Isend" : "MPI_Irecv");
    requests_.push_back(request);
    entries_.push_back({.call = call, .way = transfer.way, .peer = transfer.peer, .bytes = bytes});
    ++call->pending;
    at += bytes;
  } while (at < transfer.bytes);
}

void Engine::end(const CallPtr& call) {
  Group& group = *call->group;
  const auto found = std::find(group.in_flight_.begin(), group.in_flight_.end(), call);
  if (found != group.in_flight_.end()) group.in_flight_.erase(found);
  if (!call->started) --group.waiting(*call);
  if (call->started && !call->point_to_point()) --group.begun_;
  --active_;
  if (call->error.empty()) {  // else MPI may still use the buffers
    call->tensors.clear();
    call->scratch.clear();
    call->rounds.clear();
  }
  call->ended = true;
  if (group.waiting_collectives_ + group.waiting_messages_ > 0 && group.fault_.empty()) begin_ready(group);
}

// ---- faults

void Engine::fail_call(const CallPtr& call, const std::string& text) {
  call->error = text;
  poison(*call->group, text);
  if (!call->ended) end(call);
}

void Engine::poison(Group& group, const std::string& text) {
  faulty_ = true;
  group.poisoned_ = true;
  if (!group.fault_.empty()) return refuse_rest(group);
  group.fault_ = text;
  group.fault_at_ = Clock::now();
  for (std::int64_t peer = 0; peer < group.size(); ++peer) {
    if (peer != group.rank() && group.peer_ids_[peer] >= 0) {
      send_text(group.ranks()[peer], kPoison, group.peer_ids_[peer], text);
    }
  }
  refuse_rest(group);
}

// Whatever else is under way in a poisoned group ends, and keeps its buffers while MPI knows them.
void Engine::refuse_rest(Group& group) {
  group.deferred_.clear();
  while (!group.in_flight_.empty()) {
    const CallPtr call = group.in_flight_.front();
    if (call->error.empty()) call->error = format_complaint(where(*call), poisoned(group.describe(), group.fault_));
    end(call);
  }
}

// The world ranks that a call waits for; of one that has not begun, those that the calls before it wait for.
std::vector<std::int64_t> Engine::missing(const Call& call) const {
  std::vector<std::int64_t> ranks;
  const Group& group = *call.group;
  const auto counts = [&](const Call* other) { return other == &call || (!call.started && &*other->group == &group); };
  for (const Entry& entry : entries_) {
    if (entry.call && counts(entry.call.get())) ranks.push_back(group.ranks()[entry.peer]);
  }
  for (const Deferred& item : group.deferred_) {
    if (counts(item.call.get())) ranks.push_back(group.ranks()[item.transfer.peer]);
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

// Fails the call when it can no longer end, or should have by now.
void Engine::check_faults(const CallPtr& call, Clock::time_point deadline) {
  const Group& group = *call->group;
  const Clock::time_point now = Clock::now();
  // Has a peer been gone for a while, with nothing of it on its way any more?
  const auto gone = [&](Clock::time_point since) {
    if (now - since < kSettle) return false;
    for (int quiet = 0; quiet < kQuietPolls && !call->ended; ++quiet) {
      if (progress()) quiet = 0;
    }
    return !call->ended;
  };
  const auto give_up = [&](const Complaint& complaint) {
    fail_call(call, format_complaint(where(*call), complaint));
    throw Error(ErrorKind::kCommunication, call->error);
  };
  if (!group.fault_.empty() && (group.poisoned_ || gone(group.fault_at_))) {
    give_up(poisoned(group.describe(), group.fault_));
  }
  if (!left_.empty()) {
    for (const std::int64_t rank : missing(*call)) {
      const auto found = left_.find(rank);
      if (found == left_.end() || !gone(found->second.at)) continue;
      const std::vector<std::int64_t> still = missing(*call);
      if (std::find(still.begin(), still.end(), rank) == still.end()) continue;
      if (!group.fault_.empty()) give_up(poisoned(group.describe(), group.fault_));  // which is why it left
      const std::string& why = found->second.why;
      give_up({.what = "rank " + std::to_string(rank) + " left " + group.describe(),
               .got = why.empty() ? "no more calls from it: it has finished" : "its error: " + why,
               .expected = in_words(*call) + " on every rank"});
    }
  }
  if (!call->ended && now >= deadline) {
    give_up({.what = "timed out after " + std::to_string(group.timeout_.count()) + " ms in " + group.describe(),
             .got = in_words(*call) + " without " + rank_list(missing(*call)),
             .expected = call->point_to_point() ? "the other side's call" : "the same call on every rank"});
  }
}

}  // namespace dtensor::mpi_impl
