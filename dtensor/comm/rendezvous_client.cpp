#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "dtensor/comm/rendezvous.h"
#include "dtensor/comm/rendezvous_impl.h"
#include "dtensor/comm/secret_impl.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

using namespace rendezvous;  // the wire's words

// How much longer than a wait itself its answer may take.
constexpr auto kSlack = std::chrono::seconds(5);

void check(const Rendezvous& rendezvous) {
  if (rendezvous.size < 1 || rendezvous.size > kMaxRanks || rendezvous.rank < 0 || rendezvous.rank >= rendezvous.size) {
    fail_invalid("rendezvous",
                 {.what = "the rank is not in the world",
                  .got = "rank " + std::to_string(rendezvous.rank) + " of " + std::to_string(rendezvous.size)});
  }
  if (rendezvous.port < 1 || rendezvous.port > 65535) {
    fail_invalid("rendezvous",
                 {.what = "this is no port", .got = std::to_string(rendezvous.port), .expected = "1 to 65535"});
  }
}

std::string cut(const std::string& text) { return text.substr(0, kMaxText); }

bool send_exactly(int fd, const Bytes& frame) {
  std::size_t sent = 0;
  while (sent < frame.size()) {
    const auto count = ::send(fd, frame.data() + sent, frame.size() - sent, MSG_NOSIGNAL);
    if (count > 0) {
      sent += static_cast<std::size_t>(count);
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

// One try to join: connects, says hello, proves and asks for proof.
class Joining {
 public:
  Joining(const Rendezvous& rendezvous, Clock::time_point deadline)
      : rendezvous_(rendezvous),
        endpoint_(endpoint(rendezvous.host, rendezvous.port)),
        deadline_(deadline),
        socket_(connect_to(rendezvous.host, rendezvous.port, deadline)) {}

  // The connection as a member of the world; nothing when the other side closed it without a reason, as a server does
  // that has too many strangers, and as one does that is about to end.
  std::optional<Socket> run() {
    secrets::Handshake handshake{rendezvous_.rank, rendezvous_.size, secrets::random_digest(), {}};
    if (!send_exactly(socket_.fd(), Writer(Kind::kHello, 1)
                                        .number(static_cast<std::int64_t>(kMagic))
                                        .number(handshake.rank)
                                        .number(handshake.size)
                                        .bytes(handshake.client_nonce)
                                        .finish()) ||
        !receive()) {
      return std::nullopt;
    }
    const std::string& secret = rendezvous_.secret;
    if (kind_ == Kind::kOk) {
      if (secret.empty()) return std::move(socket_);
      fail_secret("rank 0 at " + endpoint_ + " has no secret, and this rank has one");
    }
    if (kind_ != Kind::kChallenge || body_.size() != kNonce) fail_unknown();
    if (secret.empty())
      fail_secret("rank 0 at " + endpoint_ + " asks for the secret of its job, and this rank has none");
    std::copy(body_.begin(), body_.end(), handshake.server_nonce.begin());
    if (!send_exactly(socket_.fd(),
                      Writer(Kind::kProof, 2).bytes(prove(secret, secrets::Role::kClient, handshake)).finish()) ||
        !receive()) {
      return std::nullopt;
    }
    if (kind_ != Kind::kOk) fail_unknown();
    if (!secrets::equal_in_constant_time(body_, prove(secret, secrets::Role::kServer, handshake))) {
      fail_secret("what answers at " + endpoint_ + " does not know the secret: it is not rank 0 of this job");
    }
    return std::move(socket_);
  }

 private:
  // Takes an answer apart: its kind, and its only string where it has one. False when the connection was closed.
  bool receive() {
    std::uint8_t head[4];
    if (!receive_exactly(head, sizeof head)) return false;
    const std::size_t length = head[0] | head[1] << 8 | head[2] << 16 | std::size_t{head[3]} << 24;
    if (length < kFrameHead || length > kFrameHead + 4 + kMaxText) fail_unknown();
    Bytes frame(length);
    if (!receive_exactly(frame.data(), length)) return false;
    Reader reader(frame);
    kind_ = reader.kind();
    reader.id();
    body_ = reader.at_end() ? Bytes{} : reader.bytes(kMaxText);
    if (!reader.good() || !reader.at_end()) fail_unknown();
    if (kind_ == Kind::kRefused) fail_invalid("rendezvous", {.what = std::string(body_.begin(), body_.end())});
    return true;
  }

  bool receive_exactly(std::uint8_t* to, std::size_t count) {
    while (count > 0) {
      pollfd entry{socket_.fd(), POLLIN, 0};
      const int ready = poll(&entry, 1, milliseconds_until(deadline_));
      if (ready < 0 && errno == EINTR) continue;
      if (ready <= 0) {
        fail(ErrorKind::kCommunication, "rendezvous",
             {.what = "rank 0 does not answer at " + endpoint_, .expected = "an answer within the timeout"});
      }
      const auto got = recv(socket_.fd(), to, count, 0);
      if (got > 0) {
        to += got;
        count -= static_cast<std::size_t>(got);
      } else if (got == 0 || errno != EINTR) {
        return false;
      }
    }
    return true;
  }

  [[noreturn]] void fail_secret(const std::string& what) const {
    fail_invalid("rendezvous", {.what = what,
                                .expected = "the same DTENSOR_SECRET on all ranks",
                                .advice = "dtensor run, which gives all ranks of a job one secret"});
  }
  [[noreturn]] void fail_unknown() const {
    fail(ErrorKind::kCommunication, "rendezvous",
         {.what = "what answers at " + endpoint_ + " is not rank 0 of a job",
          .expected = "a program with the same version of dtensor",
          .advice = "another MASTER_PORT"});
  }

  const Rendezvous& rendezvous_;
  const std::string endpoint_;
  const Clock::time_point deadline_;
  Socket socket_;
  Kind kind_ = Kind::kOk;
  Bytes body_;
};

// A connection that was closed without a reason is worth a few more tries: about ten seconds of them.
Socket join_world(const Rendezvous& rendezvous, Clock::time_point deadline) {
  constexpr int kTries = 50;
  auto pause = std::chrono::milliseconds(10);
  for (int tries = 1;; ++tries) {
    if (auto socket = Joining(rendezvous, deadline).run()) return std::move(*socket);
    if (tries == kTries || Clock::now() + pause >= deadline) {
      fail(ErrorKind::kCommunication, "rendezvous",
           {.what = "rank 0 closes every connection to " + endpoint(rendezvous.host, rendezvous.port),
            .got = std::to_string(tries) + " tries",
            .expected = "rank 0 of this job to listen there",
            .advice = "another MASTER_PORT, or the same version of dtensor on all ranks"});
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::milliseconds(200));
  }
}

}  // namespace

class RendezvousClient::Impl {
 public:
  Impl(const Rendezvous& rendezvous, Listener listener)
      : rank_(rendezvous.rank),
        timeout_(rendezvous.timeout),
        endpoint_(endpoint(rendezvous.host, rendezvous.port)),
        listener_(std::move(listener)) {
    const auto deadline = deadline_after(rendezvous.timeout);
    socket_ = join_world(rendezvous, deadline);
    local_ = rendezvous::local_address(socket_.fd());
    thread_ = std::thread([this] { listen(); });
    try {
      meet(rendezvous.size, deadline);
    } catch (...) {
      close();
      throw;
    }
  }

  ~Impl() { close(); }

  std::int64_t rank() const { return rank_; }
  const std::string& local_address() const { return local_; }

  // Sends a request and waits for its answer, which is kOk or kLate; a refusal is an error.
  template <class Fill>
  Bytes ask(Kind kind, std::chrono::milliseconds timeout, Fill fill) {
    const std::uint64_t id = next_id_++;
    Writer writer(kind, id);
    fill(writer);
    const Bytes frame = writer.finish();
    {
      const std::lock_guard lock(mutex_);
      if (broken_) fail_broken();
      pending_.insert(id);
    }
    send_all(frame);
    std::unique_lock lock(mutex_);
    const auto deadline = deadline_after(timeout) + kSlack;
    changed_.wait_until(lock, deadline, [&] { return broken_ || arrived_.count(id) != 0; });
    pending_.erase(id);
    const auto found = arrived_.find(id);
    if (found == arrived_.end()) {
      if (broken_) fail_broken();
      fail(ErrorKind::kCommunication, "rendezvous",
           {.what = "rank 0 does not answer at " + endpoint_, .expected = "an answer within the timeout"});
    }
    Bytes answer = std::move(found->second);
    arrived_.erase(found);
    lock.unlock();
    Reader reader(answer);
    if (reader.kind() == Kind::kRefused) {
      reader.id();
      fail_invalid("rendezvous", {.what = reader.text(kMaxFrame)});
    }
    return answer;
  }

  std::chrono::milliseconds timeout() const { return timeout_; }

 private:
  void meet(std::int64_t size, Clock::time_point deadline) {
    const auto left = std::chrono::milliseconds(milliseconds_until(deadline));
    const Bytes answer = ask(Kind::kJoin, left, [&](Writer& writer) { writer.number(left.count()).number(0); });
    Reader reader(answer);
    if (reader.kind() == Kind::kOk) return;
    reader.id();
    const std::int64_t count = reader.number();
    const std::string missing = reader.text(kMaxText);
    const std::int64_t unproven = reader.number();
    std::string got = std::to_string(size - count) + " of " + std::to_string(size) + " ranks within " +
                      std::to_string(timeout_.count()) + " ms";
    if (unproven > 0) {
      got += ", and " + std::to_string(unproven) + (unproven == 1 ? " connection" : " connections") +
             " without a proof of the job's secret";
    }
    fail(ErrorKind::kCommunication, "rendezvous",
         {.what = missing + " never came to " + endpoint_,
          .got = std::move(got),
          .advice = "checking that every rank was started with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE"});
  }

  [[noreturn]] void fail_broken() const {
    fail(ErrorKind::kCommunication, "rendezvous",
         {.what = "rank 0, which holds the rendezvous at " + endpoint_ + ", is gone"});
  }

  void send_all(const Bytes& frame) {
    const std::lock_guard lock(sending_);
    // Half a frame makes the rest unreadable; the listening thread sees it.
    if (!send_exactly(socket_.fd(), frame)) shutdown(socket_.fd(), SHUT_RDWR);
  }

  bool receive_exactly(std::uint8_t* to, std::size_t count) {
    while (count > 0) {
      const auto got = recv(socket_.fd(), to, count, 0);
      if (got > 0) {
        to += got;
        count -= static_cast<std::size_t>(got);
      } else if (got == 0 || errno != EINTR) {
        return false;
      }
    }
    return true;
  }

  void listen() {
    std::uint8_t head[4];
    while (receive_exactly(head, sizeof head)) {
      const std::size_t length = head[0] | head[1] << 8 | head[2] << 16 | std::size_t{head[3]} << 24;
      if (length < kFrameHead || length > kMaxFrame) break;
      Bytes frame(length);
      if (!receive_exactly(frame.data(), length) || !deliver(std::move(frame))) break;
    }
    bool expected = false;
    {
      const std::lock_guard lock(mutex_);
      broken_ = true;
      expected = closing_ || zero_left_;
      changed_.notify_all();
    }
    if (!expected && listener_) listener_({RendezvousEvent::Kind::kLost, 0, "", ""});
  }

  bool deliver(Bytes frame) {
    Reader reader(frame);
    const Kind kind = reader.kind();
    const std::uint64_t id = reader.id();
    if (kind == Kind::kEvent) {
      const std::int64_t event = reader.number();
      RendezvousEvent told;
      told.rank = reader.number();
      told.group = reader.text(kMaxKey);
      told.text = reader.text(kMaxText);
      if (!reader.good() || event < 0 || event > static_cast<int>(RendezvousEvent::Kind::kFailed)) return false;
      told.kind = static_cast<RendezvousEvent::Kind>(event);
      if (told.rank == 0 && told.kind == RendezvousEvent::Kind::kLeft) {
        const std::lock_guard lock(mutex_);
        zero_left_ = true;
      }
      if (listener_) listener_(told);
      return true;
    }
    const std::lock_guard lock(mutex_);
    if (pending_.count(id) != 0) {  // else the asker gave up
      arrived_[id] = std::move(frame);
      changed_.notify_all();
    }
    return true;
  }

  void close() {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    shutdown(socket_.fd(), SHUT_RDWR);
    if (thread_.joinable()) thread_.join();
  }

  const std::int64_t rank_;
  const std::chrono::milliseconds timeout_;
  const std::string endpoint_;
  const Listener listener_;
  std::string local_;
  Socket socket_;
  std::atomic<std::uint64_t> next_id_{1};
  std::mutex sending_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<std::uint64_t> pending_;
  std::map<std::uint64_t, Bytes> arrived_;
  bool broken_ = false;
  bool closing_ = false;
  bool zero_left_ = false;
  std::thread thread_;
};

RendezvousClient::RendezvousClient(const Rendezvous& rendezvous, Listener listener) {
  dtensor::check(rendezvous);
  secrets::check_secret("rendezvous", "the secret", rendezvous.secret);
  impl_ = std::make_unique<Impl>(rendezvous, std::move(listener));
}
RendezvousClient::~RendezvousClient() = default;

std::int64_t RendezvousClient::rank() const noexcept { return impl_->rank(); }
const std::string& RendezvousClient::local_address() const noexcept { return impl_->local_address(); }

void RendezvousClient::set(const std::string& key, const Bytes& value) {
  impl_->ask(Kind::kSet, impl_->timeout(), [&](Writer& writer) { writer.text(key).bytes(value); });
}

RendezvousClient::Bytes RendezvousClient::get(const std::string& key, std::chrono::milliseconds timeout) {
  const Bytes answer =
      impl_->ask(Kind::kGet, timeout, [&](Writer& writer) { writer.number(timeout.count()).number(1).text(key); });
  Reader reader(answer);
  const Kind kind = reader.kind();
  reader.id();
  if (kind != Kind::kOk) {
    fail(ErrorKind::kCommunication, "rendezvous",
         {.what =
              "nobody set the key " + dtensor::in_quotes(key) + " within " + std::to_string(timeout.count()) + " ms"});
  }
  return reader.bytes(kMaxFrame);
}

std::int64_t RendezvousClient::add(const std::string& key, std::int64_t delta) {
  const Bytes answer =
      impl_->ask(Kind::kAdd, impl_->timeout(), [&](Writer& writer) { writer.text(key).number(delta); });
  Reader reader(answer);
  reader.kind();
  reader.id();
  return reader.number();
}

RendezvousClient::Bytes RendezvousClient::compare_set(const std::string& key, const Bytes& expected,
                                                      const Bytes& desired) {
  const Bytes answer = impl_->ask(Kind::kCompareSet, impl_->timeout(),
                                  [&](Writer& writer) { writer.text(key).bytes(expected).bytes(desired); });
  Reader reader(answer);
  reader.kind();
  reader.id();
  return reader.bytes(kMaxFrame);
}

bool RendezvousClient::erase(const std::string& key) {
  const Bytes answer = impl_->ask(Kind::kErase, impl_->timeout(), [&](Writer& writer) { writer.text(key); });
  Reader reader(answer);
  reader.kind();
  reader.id();
  return reader.number() != 0;
}

namespace {
void write_keys(Writer& writer, const std::vector<std::string>& keys, std::chrono::milliseconds timeout) {
  writer.number(timeout.count()).number(static_cast<std::int64_t>(keys.size()));
  for (const std::string& key : keys) writer.text(key);
}
}  // namespace

bool RendezvousClient::check(const std::vector<std::string>& keys) {
  const Bytes answer = impl_->ask(Kind::kCheck, impl_->timeout(),
                                  [&](Writer& writer) { write_keys(writer, keys, std::chrono::milliseconds(0)); });
  Reader reader(answer);
  reader.kind();
  reader.id();
  return reader.number() != 0;
}

std::int64_t RendezvousClient::key_count() {
  const Bytes answer = impl_->ask(Kind::kCount, impl_->timeout(), [](Writer&) {});
  Reader reader(answer);
  reader.kind();
  reader.id();
  return reader.number();
}

std::vector<std::string> RendezvousClient::wait(const std::vector<std::string>& keys,
                                                std::chrono::milliseconds timeout) {
  const Bytes answer = impl_->ask(Kind::kWait, timeout, [&](Writer& writer) { write_keys(writer, keys, timeout); });
  Reader reader(answer);
  const Kind kind = reader.kind();
  reader.id();
  std::vector<std::string> missing;
  if (kind != Kind::kOk) {
    for (std::int64_t count = reader.number(); count > 0 && reader.good(); --count)
      missing.push_back(reader.text(kMaxKey));
  }
  return missing;
}

void RendezvousClient::leave(const std::string& why) {
  impl_->ask(Kind::kLeave, std::chrono::seconds(1), [&](Writer& writer) { writer.text(cut(why)); });
}

void RendezvousClient::report_failure(const std::string& group, const std::string& text) {
  impl_->ask(Kind::kFailure, std::chrono::seconds(1), [&](Writer& writer) { writer.text(group).text(cut(text)); });
}

}  // namespace dtensor
