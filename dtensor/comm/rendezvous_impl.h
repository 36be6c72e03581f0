#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace dtensor::rendezvous {

using Bytes = std::vector<std::uint8_t>;
using Clock = std::chrono::steady_clock;

// A message is a frame: u32 length of what follows, u8 kind, u64 id (of the request, also in its reply), a body of
// integers (8 bytes, little endian) and strings (u32 length, bytes).
constexpr std::uint64_t kMagic = 0x64'74'65'6e'73'6f'72'32;  // "dtensor2": protocol and version
constexpr std::size_t kFrameHead = 9;                        // kind and id
constexpr std::size_t kMaxFrame = 16u << 20;
constexpr std::size_t kMaxFirstFrame = 256;  // before a connection has said who it is
constexpr std::size_t kMaxKey = 64u << 10;
constexpr std::size_t kMaxKeys = 1u << 20;  // that the store holds
constexpr std::size_t kMaxBacklog = 64u << 20;
constexpr std::int64_t kMaxRanks = 1 << 20;
constexpr std::size_t kMaxText = 4096;      // of an error that is told around
constexpr std::size_t kNonce = 32;          // bytes, also of a proof
constexpr std::size_t kMoreStrangers = 64;  // connections that have not joined, beyond one per rank

// How a connection joins. Without a secret: kHello, kOk. With one:
//   client -> server  kHello      magic, rank, size, the client's nonce
//   server -> client  kChallenge  the server's nonce
//   client -> server  kProof      prove(secret, client, …)
//   server -> client  kOk         prove(secret, server, …), or kRefused
enum class Kind : std::uint8_t {
  // requests
  kHello = 1,
  kJoin,
  kSet,
  kGet,
  kAdd,
  kCompareSet,
  kErase,
  kCheck,
  kCount,
  kWait,
  kLeave,
  kFailure,
  kProof,
  // replies
  kOk = 64,
  kRefused,  // text: your fault
  kLate,     // a wait ran out of time; the strings say what is missing
  kChallenge,
  // not asked for
  kEvent = 128,
};

class Writer {
 public:
  Writer(Kind kind, std::uint64_t id);
  Writer& number(std::int64_t value);
  Writer& text(std::string_view value);
  Writer& bytes(std::span<const std::uint8_t> value);
  // The frame with its length in front.
  Bytes finish();

 private:
  Bytes frame_;
};

// Reads a frame's body. Whatever does not fit gives nothing and every later read too; ask `good()` once at the end.
class Reader {
 public:
  explicit Reader(std::span<const std::uint8_t> frame) : frame_(frame) {}
  Kind kind();
  std::uint64_t id();
  std::int64_t number();
  std::string text(std::size_t limit);
  Bytes bytes(std::size_t limit);
  bool good() const { return good_; }
  bool at_end() const { return at_ == frame_.size(); }

 private:
  std::span<const std::uint8_t> take(std::size_t count);

  std::span<const std::uint8_t> frame_;
  std::size_t at_ = 0;
  bool good_ = true;
};

class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() { reset(); }
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
};

struct Listening {
  Socket socket;
  int port = 0;
};

// Does every address of `host` belong to this machine's loopback? False too when the host is not known.
bool is_loopback(const std::string& host);
// An error unless a job without a secret meets at a loopback address. All ranks can check that alike.
void check_reachable(const std::string& host, const std::string& secret, bool allow_no_secret);
// Listens on the first address of `host` that is this machine's. Non-blocking.
Listening listen_on(const std::string& host, int port);
// Tries all addresses of `host`, again and again, until the deadline. Blocking.
Socket connect_to(const std::string& host, int port, Clock::time_point deadline);
void tune(int fd);
// The numeric address of this end.
std::string local_address(int fd);
std::string errno_text();
std::string endpoint(const std::string& host, int port);

// Whole milliseconds from now, at least 0, rounded up, for poll().
int milliseconds_until(Clock::time_point when);
// now + timeout, without overflow for a timeout of "forever".
Clock::time_point deadline_after(std::chrono::milliseconds timeout);

}  // namespace dtensor::rendezvous
