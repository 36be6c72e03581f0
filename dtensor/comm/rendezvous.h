#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace dtensor {

// Where the ranks of a world meet. Rank 0 listens there, on this address alone.
struct Rendezvous {
  std::string host = "127.0.0.1";
  int port = 0;  // 0: any free port, for a world of one or with agent_store
  std::int64_t rank = 0;
  std::int64_t size = 1;
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  // host:port belongs to a store of the launcher's (TORCHELASTIC_USE_AGENT_STORE): rank 0 listens on a free port and
  // leaves word of it there. `attempt` tells restarts apart (TORCHELASTIC_RESTART_COUNT).
  bool agent_store = false;
  std::string attempt = "0";
  // Both sides prove that they know it; it is never sent. Empty: anyone may join who can reach rank 0, which therefore
  // listens on a loopback address only, unless `allow_no_secret`.
  std::string secret = {};
  bool allow_no_secret = false;
};

// What became of a rank or a group; everybody is told once, also those who come later.
struct RendezvousEvent {
  enum class Kind : std::uint8_t {
    kLost,    // the rank's connection broke without a word: it died
    kLeft,    // it said so; `text` is empty when it had finished, else its error
    kFailed,  // the rank was the first to report a failure of `group`: `text`
  };
  Kind kind = Kind::kLost;
  std::int64_t rank = 0;
  std::string group;
  std::string text;
};

struct RendezvousServerOptions {
  std::string secret = {};  // as in Rendezvous, and the same on all ranks
  bool allow_no_secret = false;
  // A connection that has not joined the world by then is closed.
  std::chrono::milliseconds hello_time = std::chrono::seconds(5);
};

// Rank 0's side: a small key-value store over TCP, served by one thread. Nothing that a peer sends is trusted: every
// length is checked against a limit, and a connection that breaks the rules is closed. Connections that have not joined
// take no place from a rank: when there are too many of them, the oldest is closed.
class RendezvousServer {
 public:
  // Listens on the address of `host` and on no other.
  RendezvousServer(const std::string& host, int port, std::int64_t size, const RendezvousServerOptions& options = {});
  ~RendezvousServer();
  RendezvousServer(const RendezvousServer&) = delete;
  RendezvousServer& operator=(const RendezvousServer&) = delete;

  int port() const noexcept;
  // Until every rank but 0 that came has left or is lost; false when that took too long.
  bool wait_until_alone(std::chrono::milliseconds timeout);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// One rank's connection. May be used from several threads: waiting in one does not hold up the others.
class RendezvousClient {
 public:
  using Bytes = std::vector<std::uint8_t>;
  using Listener = std::function<void(const RendezvousEvent&)>;

  // Connects, trying again until the timeout, proves that it knows the secret where there is one and lets rank 0 prove
  // the same, and waits until all ranks have come; else the error names those missing.
  // `listener` is called on the client's own thread.
  RendezvousClient(const Rendezvous& rendezvous, Listener listener);
  ~RendezvousClient();
  RendezvousClient(const RendezvousClient&) = delete;
  RendezvousClient& operator=(const RendezvousClient&) = delete;

  std::int64_t rank() const noexcept;
  // The address of this host on the way to rank 0: what its own sockets should be bound to.
  const std::string& local_address() const noexcept;

  void set(const std::string& key, const Bytes& value);
  // Waits for the key; an error when it does not come in time.
  Bytes get(const std::string& key, std::chrono::milliseconds timeout);
  std::int64_t add(const std::string& key, std::int64_t delta);
  // The value becomes `desired` if it was `expected`, or if there was none and `expected` is empty. Returns what it is
  // afterwards, or `expected` where there is none.
  Bytes compare_set(const std::string& key, const Bytes& expected, const Bytes& desired);
  bool erase(const std::string& key);
  bool check(const std::vector<std::string>& keys);
  std::int64_t key_count();
  // Returns the keys that did not come in time: none is success.
  std::vector<std::string> wait(const std::vector<std::string>& keys, std::chrono::milliseconds timeout);

  // Tells everybody; the connection closing later is no loss then.
  void leave(const std::string& why);
  void report_failure(const std::string& group, const std::string& text);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dtensor
