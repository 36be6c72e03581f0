#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <unordered_map>

#include "dtensor/comm/rank_list_impl.h"
#include "dtensor/comm/rendezvous.h"
#include "dtensor/comm/rendezvous_impl.h"
#include "dtensor/comm/secret_impl.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

using namespace rendezvous;  // the wire's words

struct Connection {
  Socket socket;
  Bytes in;
  Bytes out;
  std::size_t sent = 0;                              // of out
  std::int64_t rank = -1;                            // -1: it has not joined
  std::optional<secrets::Handshake> challenge = {};  // it has said hello and must prove that it knows the secret
  bool left = false;
  bool closing = false;  // answer what is in `out`, then close
  bool dead = false;
  Clock::time_point since = Clock::now();
};

// A request that is answered when its keys are there (kGet, kWait) or all ranks are (kJoin).
struct Waiter {
  Connection* from = nullptr;
  Kind kind = Kind::kWait;
  std::uint64_t id = 0;
  std::vector<std::string> keys;
  Clock::time_point deadline;
};

}  // namespace

class RendezvousServer::Impl {
 public:
  Impl(const std::string& host, int port, std::int64_t size, const RendezvousServerOptions& options)
      : size_(size), options_(options) {
    auto [socket, bound] = listen_on(host, port);
    listener_ = std::move(socket);
    port_ = bound;
    wake_ = Socket(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wake_) fail(ErrorKind::kInternal, "rendezvous", {.what = "no eventfd", .got = errno_text()});
    thread_ = std::thread([this] { serve(); });
  }

  ~Impl() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wake_.fd(), &one, sizeof one);
    thread_.join();
  }

  int port() const { return port_; }

  bool wait_until_alone(std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    return alone_.wait_until(lock, deadline_after(timeout), [this] { return others_ == 0; });
  }

 private:
  void serve() {
    while (true) {
      {
        const std::lock_guard lock(mutex_);
        if (stop_) break;
      }
      poll_once(next_deadline());
      expire();
      std::erase_if(connections_, [this](Connection& connection) { return sweep(connection); });
      count_others();
    }
    // What was already said (why rank 0 leaves, say) still goes out.
    const auto deadline = Clock::now() + std::chrono::milliseconds(500);
    listener_.reset();
    while (Clock::now() < deadline && std::any_of(connections_.begin(), connections_.end(), [](const Connection& c) {
             return !c.dead && c.sent < c.out.size();
           })) {
      poll_once(Clock::now() + std::chrono::milliseconds(20));
    }
  }

  void poll_once(Clock::time_point until) {
    const bool accepting = Clock::now() >= accept_again_;
    std::vector<pollfd> entries = {{wake_.fd(), POLLIN, 0}, {accepting ? listener_.fd() : -1, POLLIN, 0}};
    std::vector<Connection*> order;
    for (Connection& connection : connections_) {
      if (connection.dead) continue;
      const bool writing = connection.sent < connection.out.size();
      entries.push_back({connection.socket.fd(), static_cast<short>(POLLIN | (writing ? POLLOUT : 0)), 0});
      order.push_back(&connection);
    }
    if (poll(entries.data(), entries.size(), milliseconds_until(until)) <= 0) return;
    for (std::size_t i = 0; i < order.size(); ++i) {
      const short ready = entries[i + 2].revents;
      if (ready & POLLOUT) flush(*order[i]);
      if (ready & (POLLIN | POLLHUP | POLLERR)) receive(*order[i]);
    }
    if (entries[1].revents & POLLIN) accept_new();
  }

  Clock::time_point next_deadline() const {
    const auto now = Clock::now();
    auto next = now + std::chrono::hours(1);
    if (accept_again_ > now) next = accept_again_;
    for (const Waiter& waiter : waiters_) next = std::min(next, waiter.deadline);
    for (const Connection& connection : connections_) {
      if (connection.rank < 0) next = std::min(next, connection.since + options_.hello_time);
      if (connection.dead) next = now;
    }
    return next;
  }

  void accept_new() {
    while (true) {
      Socket socket(accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket) {
        // No descriptor is left. The connection stays in the queue of the system and is looked at again.
        if ((errno == EMFILE || errno == ENFILE) && !close_stranger()) {
          accept_again_ = Clock::now() + std::chrono::milliseconds(100);
        }
        return;
      }
      tune(socket.fd());
      connections_.emplace_back().socket = std::move(socket);
      // They must not use up the descriptors.
      const std::size_t most = static_cast<std::size_t>(size_) + kMoreStrangers;
      if (connections_.size() > most && count_strangers() > most) close_stranger();
    }
  }

  std::size_t count_strangers() const {
    return static_cast<std::size_t>(std::count_if(connections_.begin(), connections_.end(),
                                                  [](const Connection& c) { return c.rank < 0 && !c.dead; }));
  }

  // Closes the oldest connection that said nothing yet, else the oldest that has not joined; false when there is none.
  bool close_stranger() {
    Connection* oldest = nullptr;
    for (Connection& connection : connections_) {
      if (connection.rank >= 0 || connection.dead) continue;
      if (!connection.challenge) receive(connection);  // it may have spoken while others were accepted
      if (connection.rank >= 0 || connection.dead) continue;
      if (!oldest) oldest = &connection;
      if (!connection.challenge && !connection.closing) {
        oldest = &connection;
        break;
      }
    }
    if (!oldest) return false;
    oldest->dead = true;
    oldest->socket.reset();
    return true;
  }

  void receive(Connection& connection) {
    std::uint8_t buffer[1 << 16];
    while (!connection.dead) {
      const auto got = recv(connection.socket.fd(), buffer, sizeof buffer, 0);
      if (got > 0) {
        connection.in.insert(connection.in.end(), buffer, buffer + got);
        take_frames(connection);
      } else if (got < 0 && errno == EINTR) {
        continue;
      } else {
        if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) connection.dead = true;
        return;
      }
    }
  }

  void take_frames(Connection& connection) {
    std::size_t at = 0;
    auto& in = connection.in;
    while (!connection.dead && !connection.closing && in.size() - at >= 4) {
      const std::size_t length = in[at] | in[at + 1] << 8 | in[at + 2] << 16 | std::size_t{in[at + 3]} << 24;
      const std::size_t limit = connection.rank < 0 ? kMaxFirstFrame : kMaxFrame;
      if (length < kFrameHead || length > limit) {
        connection.dead = true;
        return;
      }
      if (in.size() - at - 4 < length) break;
      handle(connection, std::span(in).subspan(at + 4, length));
      at += 4 + length;
    }
    in.erase(in.begin(), in.begin() + static_cast<std::ptrdiff_t>(at));
  }

  void handle(Connection& connection, std::span<const std::uint8_t> frame) {
    Reader reader(frame);
    const Kind kind = reader.kind();
    const std::uint64_t id = reader.id();
    bool fine = false;
    if (connection.rank >= 0) {
      fine = request(connection, kind, id, reader);
    } else if (connection.challenge) {
      fine = kind == Kind::kProof && proof(connection, id, reader);
    } else {
      fine = kind == Kind::kHello && hello(connection, id, reader);
    }
    if (!fine) connection.dead = true;  // it does not speak our language
  }

  bool hello(Connection& connection, std::uint64_t id, Reader& reader) {
    const auto magic = static_cast<std::uint64_t>(reader.number());
    const std::int64_t rank = reader.number();
    const std::int64_t size = reader.number();
    if (!reader.good() || magic >> 8 != kMagic >> 8) return false;
    if (magic != kMagic) {  // only the version differs
      return refuse(connection, id, "rank " + std::to_string(rank) + " runs another version of dtensor than rank 0");
    }
    secrets::Handshake handshake{rank, size, {}, {}};
    const Bytes nonce = reader.bytes(kNonce);
    if (!reader.good() || !reader.at_end() || nonce.size() != kNonce) return false;
    if (options_.secret.empty()) return join(connection, id, rank, size, Writer(Kind::kOk, id));
    std::copy(nonce.begin(), nonce.end(), handshake.client_nonce.begin());
    handshake.server_nonce = secrets::random_digest();
    connection.challenge = handshake;
    return reply(connection, Writer(Kind::kChallenge, id).bytes(handshake.server_nonce));
  }

  bool proof(Connection& connection, std::uint64_t id, Reader& reader) {
    const Bytes given = reader.bytes(kNonce);
    if (!reader.good() || !reader.at_end()) return false;
    const secrets::Handshake handshake = *connection.challenge;
    if (!secrets::equal_in_constant_time(given, secrets::prove(options_.secret, secrets::Role::kClient, handshake))) {
      return refuse(connection, id,
                    "rank " + std::to_string(handshake.rank) +
                        " does not know the secret of this job: DTENSOR_SECRET is not the one of rank 0");
    }
    connection.challenge.reset();
    return join(connection, id, handshake.rank, handshake.size,
                Writer(Kind::kOk, id).bytes(secrets::prove(options_.secret, secrets::Role::kServer, handshake)));
  }

  bool refuse(Connection& connection, std::uint64_t id, const std::string& why) {
    connection.closing = true;
    return reply(connection, Writer(Kind::kRefused, id).text(why));
  }

  // The connection may be a rank's, if such a rank is missing.
  bool join(Connection& connection, std::uint64_t id, std::int64_t rank, std::int64_t size, Writer welcome) {
    std::string refusal;
    if (size != size_) {
      refusal = "rank " + std::to_string(rank) + " says that the world has " + std::to_string(size) +
                " ranks; rank 0 says " + std::to_string(size_);
    } else if (rank < 0 || rank >= size_) {
      refusal = "rank " + std::to_string(rank) + " is not in a world of " + std::to_string(size_);
    } else if (came_.count(rank) != 0) {
      refusal = "rank " + std::to_string(rank) + " has already come: two processes were given the same rank";
    }
    if (!refusal.empty()) return refuse(connection, id, refusal);
    connection.rank = rank;
    came_.insert(rank);
    send(connection, std::move(welcome));
    for (const RendezvousEvent& event : events_) send_event(connection, event);
    if (static_cast<std::int64_t>(came_.size()) == size_) wake_waiters();
    return true;
  }

  bool request(Connection& connection, Kind kind, std::uint64_t id, Reader& reader) {
    switch (kind) {
      case Kind::kSet: {
        const std::string key = reader.text(kMaxKey);
        Bytes value = reader.bytes(kMaxFrame);
        if (!reader.good() || !reader.at_end()) return false;
        return !store(connection, id, key, std::move(value)) || reply(connection, Writer(Kind::kOk, id));
      }
      case Kind::kAdd:
        return add(connection, id, reader);
      case Kind::kCompareSet:
        return compare_set(connection, id, reader);
      case Kind::kErase: {
        const std::string key = reader.text(kMaxKey);
        return reader.good() && reader.at_end() &&
               reply(connection, Writer(Kind::kOk, id).number(static_cast<std::int64_t>(values_.erase(key))));
      }
      case Kind::kCount:
        return reader.at_end() &&
               reply(connection, Writer(Kind::kOk, id).number(static_cast<std::int64_t>(values_.size())));
      case Kind::kCheck:
      case Kind::kGet:
      case Kind::kWait:
      case Kind::kJoin:
        return await(connection, kind, id, reader);
      case Kind::kLeave: {
        std::string why = reader.text(kMaxText);
        if (!reader.good() || !reader.at_end() || connection.left) return false;
        connection.left = true;
        announce({RendezvousEvent::Kind::kLeft, connection.rank, "", std::move(why)});
        return reply(connection, Writer(Kind::kOk, id));
      }
      case Kind::kFailure: {
        std::string group = reader.text(kMaxKey);
        std::string text = reader.text(kMaxText);
        if (!reader.good() || !reader.at_end()) return false;
        if (failed_.size() < kMaxKeys && failed_.insert(group).second) {
          announce({RendezvousEvent::Kind::kFailed, connection.rank, std::move(group), std::move(text)});
        }
        return reply(connection, Writer(Kind::kOk, id));
      }
      default:
        return false;
    }
  }

  bool add(Connection& connection, std::uint64_t id, Reader& reader) {
    const std::string key = reader.text(kMaxKey);
    const std::int64_t delta = reader.number();
    if (!reader.good() || !reader.at_end()) return false;
    std::int64_t value = 0;
    if (const auto found = values_.find(key); found != values_.end()) {
      // Kept as text, as libtorch's stores do.
      value = std::strtoll(std::string(found->second.begin(), found->second.end()).c_str(), nullptr, 10);
    }
    value = static_cast<std::int64_t>(static_cast<std::uint64_t>(value) + static_cast<std::uint64_t>(delta));
    const std::string text = std::to_string(value);
    return !store(connection, id, key, Bytes(text.begin(), text.end())) ||
           reply(connection, Writer(Kind::kOk, id).number(value));
  }

  bool compare_set(Connection& connection, std::uint64_t id, Reader& reader) {
    const std::string key = reader.text(kMaxKey);
    const Bytes expected = reader.bytes(kMaxFrame);
    Bytes desired = reader.bytes(kMaxFrame);
    if (!reader.good() || !reader.at_end()) return false;
    const auto found = values_.find(key);
    Bytes now = found == values_.end() ? expected : found->second;
    const bool matches = found == values_.end() ? expected.empty() : found->second == expected;
    if (matches) {
      now = desired;
      if (!store(connection, id, key, std::move(desired))) return true;
    }
    return reply(connection, Writer(Kind::kOk, id).bytes(now));
  }

  // kCheck answers at once; the others wait.
  bool await(Connection& connection, Kind kind, std::uint64_t id, Reader& reader) {
    const std::int64_t milliseconds = reader.number();
    const std::int64_t count = reader.number();
    if (!reader.good() || count < 0 || static_cast<std::size_t>(count) > kMaxKeys) return false;
    if ((kind == Kind::kGet && count != 1) || (kind == Kind::kJoin && count != 0)) return false;
    Waiter waiter{&connection, kind, id, {}, deadline_after(std::chrono::milliseconds(milliseconds))};
    for (std::int64_t i = 0; i < count && reader.good(); ++i) waiter.keys.push_back(reader.text(kMaxKey));
    if (!reader.good() || !reader.at_end()) return false;
    if (kind == Kind::kCheck) {
      return reply(connection, Writer(Kind::kOk, id).number(missing(waiter).empty() ? 1 : 0));
    }
    if (!answered(waiter)) waiters_.push_back(std::move(waiter));
    return true;
  }

  std::vector<std::string> missing(const Waiter& waiter) const {
    std::vector<std::string> result;
    for (const std::string& key : waiter.keys) {
      if (values_.count(key) == 0) result.push_back(key);
    }
    return result;
  }

  // The ranks that did not come, in few words, and what else may help to understand why.
  Writer late_to_join(std::uint64_t id) const {
    std::vector<std::int64_t> ranks;
    for (std::int64_t rank = 0; rank < size_; ++rank) {
      if (came_.count(rank) == 0) ranks.push_back(rank);
    }
    const auto count = static_cast<std::int64_t>(ranks.size());
    return Writer(Kind::kLate, id).number(count).text(rank_list(std::move(ranks))).number(unproven_);
  }

  bool answered(const Waiter& waiter) {
    // Most often the first key that is looked at is the one still missing.
    if (waiter.kind == Kind::kJoin ? static_cast<std::int64_t>(came_.size()) < size_ : !missing(waiter).empty()) {
      return false;
    }
    Writer answer(Kind::kOk, waiter.id);
    if (waiter.kind == Kind::kGet) answer.bytes(values_.at(waiter.keys.front()));
    send(*waiter.from, std::move(answer));
    return true;
  }

  void wake_waiters() {
    std::erase_if(waiters_, [this](const Waiter& waiter) { return answered(waiter); });
  }

  void expire() {
    const auto now = Clock::now();
    // A rank that gave up joining is missed by all: the world cannot start any more, and rank 0 may be about to go.
    const bool over = std::any_of(waiters_.begin(), waiters_.end(), [&](const Waiter& waiter) {
      return waiter.kind == Kind::kJoin && waiter.deadline <= now;
    });
    std::erase_if(waiters_, [&](const Waiter& waiter) {
      if (waiter.deadline > now && !(over && waiter.kind == Kind::kJoin)) return false;
      if (waiter.kind == Kind::kJoin) {
        send(*waiter.from, late_to_join(waiter.id));
        return true;
      }
      const auto late = missing(waiter);
      Writer answer(Kind::kLate, waiter.id);
      answer.number(static_cast<std::int64_t>(late.size()));
      for (const std::string& key : late) answer.text(key);
      send(*waiter.from, std::move(answer));
      return true;
    });
    for (Connection& connection : connections_) {
      if (connection.rank < 0 && connection.since + options_.hello_time <= now) connection.dead = true;
    }
  }

  // False when there is no room; the asker has been told then.
  bool store(Connection& connection, std::uint64_t id, const std::string& key, Bytes value) {
    if (values_.size() >= kMaxKeys && values_.count(key) == 0) {
      send(connection, Writer(Kind::kRefused, id).text("the rendezvous holds too many keys"));
      return false;
    }
    values_[key] = std::move(value);
    wake_waiters();
    return true;
  }

  void announce(RendezvousEvent event) {
    for (Connection& connection : connections_) {
      if (connection.rank >= 0 && !connection.dead) send_event(connection, event);
    }
    events_.push_back(std::move(event));
  }

  void send_event(Connection& connection, const RendezvousEvent& event) {
    send(connection, Writer(Kind::kEvent, 0)
                         .number(static_cast<int>(event.kind))
                         .number(event.rank)
                         .text(event.group)
                         .text(event.text));
  }

  bool reply(Connection& connection, Writer answer) {
    send(connection, std::move(answer));
    return true;
  }

  void send(Connection& connection, Writer answer) {
    if (connection.dead) return;
    const Bytes frame = answer.finish();
    connection.out.insert(connection.out.end(), frame.begin(), frame.end());
    flush(connection);
    if (connection.out.size() - connection.sent > kMaxBacklog) connection.dead = true;  // it does not read
  }

  void flush(Connection& connection) {
    auto& out = connection.out;
    while (connection.sent < out.size()) {
      const auto count =
          ::send(connection.socket.fd(), out.data() + connection.sent, out.size() - connection.sent, MSG_NOSIGNAL);
      if (count > 0) {
        connection.sent += static_cast<std::size_t>(count);
      } else if (errno != EINTR) {
        if (errno != EAGAIN && errno != EWOULDBLOCK) connection.dead = true;
        return;
      }
    }
    out.clear();
    connection.sent = 0;
  }

  // Is the connection over? Forgets what it waited for, and tells the others of a rank that died.
  bool sweep(Connection& connection) {
    if (connection.closing && connection.sent == connection.out.size()) connection.dead = true;
    if (!connection.dead) return false;
    if (connection.challenge) ++unproven_;
    std::erase_if(waiters_, [&](const Waiter& waiter) { return waiter.from == &connection; });
    if (connection.rank >= 0 && !connection.left) {
      announce({RendezvousEvent::Kind::kLost, connection.rank, "", ""});
    }
    return true;
  }

  void count_others() {
    std::int64_t count = 0;
    for (const Connection& connection : connections_) count += connection.rank > 0 && !connection.left ? 1 : 0;
    const std::lock_guard lock(mutex_);
    others_ = count;
    if (count == 0) alone_.notify_all();
  }

  const std::int64_t size_;
  const RendezvousServerOptions options_;
  int port_ = 0;
  Socket listener_;
  Socket wake_;

  // Of the serving thread alone.
  std::list<Connection> connections_;
  std::unordered_map<std::string, Bytes> values_;
  std::list<Waiter> waiters_;
  std::set<std::int64_t> came_;
  std::set<std::string> failed_;
  std::vector<RendezvousEvent> events_;
  std::int64_t unproven_ = 0;  // connections that said hello and did not prove that they know the secret
  Clock::time_point accept_again_ = Clock::now();

  std::mutex mutex_;
  std::condition_variable alone_;
  std::int64_t others_ = 0;
  bool stop_ = false;
  std::thread thread_;
};

RendezvousServer::RendezvousServer(const std::string& host, int port, std::int64_t size,
                                   const RendezvousServerOptions& options) {
  if (size < 1 || size > rendezvous::kMaxRanks) {
    fail_invalid("rendezvous", {.what = "a world has ranks",
                                .got = std::to_string(size),
                                .expected = "1 to " + std::to_string(rendezvous::kMaxRanks)});
  }
  secrets::check_secret("rendezvous", "the secret", options.secret);
  check_reachable(host, options.secret, options.allow_no_secret);
  impl_ = std::make_unique<Impl>(host, port, size, options);
}
RendezvousServer::~RendezvousServer() = default;
int RendezvousServer::port() const noexcept { return impl_->port(); }
bool RendezvousServer::wait_until_alone(std::chrono::milliseconds timeout) { return impl_->wait_until_alone(timeout); }

}  // namespace dtensor
