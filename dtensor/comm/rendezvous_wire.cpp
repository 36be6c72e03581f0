#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>

#include "dtensor/comm/rendezvous_impl.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"

namespace dtensor::rendezvous {
namespace {

template <class Unsigned>
void append(Bytes& to, Unsigned value) {
  for (std::size_t i = 0; i < sizeof(Unsigned); ++i) to.push_back(static_cast<std::uint8_t>(value >> (8 * i)));
}

std::uint64_t decode(std::span<const std::uint8_t> bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) value |= std::uint64_t{bytes[i]} << (8 * i);
  return value;
}

struct FreeAddresses {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};

// IPv4 first: names such as localhost have both, and all ranks should pick the same.
std::vector<std::pair<sockaddr_storage, socklen_t>> resolve(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const int code = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (code != 0) {
    fail(ErrorKind::kCommunication, "rendezvous",
         {.what = "the host is not known", .got = dtensor::in_quotes(host) + " (" + gai_strerror(code) + ")"});
  }
  const std::unique_ptr<addrinfo, FreeAddresses> owner(list);
  std::vector<std::pair<sockaddr_storage, socklen_t>> result;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const addrinfo* at = list; at != nullptr; at = at->ai_next) {
      if (at->ai_family != family) continue;
      sockaddr_storage storage{};
      std::memcpy(&storage, at->ai_addr, at->ai_addrlen);
      result.emplace_back(storage, at->ai_addrlen);
    }
  }
  return result;
}

int port_of(const sockaddr_storage& address) {
  const auto raw = address.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                                                 : reinterpret_cast<const sockaddr_in&>(address).sin_port;
  return ntohs(raw);
}

// One try, within `wait` milliseconds; errno says why not.
Socket try_connect(const sockaddr_storage& address, socklen_t length, int wait) {
  Socket socket(::socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return socket;
  if (connect(socket.fd(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    if (errno != EINPROGRESS) return {};
    pollfd entry{socket.fd(), POLLOUT, 0};
    if (poll(&entry, 1, wait) <= 0) {
      errno = ETIMEDOUT;
      return {};
    }
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) {
      errno = error;
      return {};
    }
  }
  fcntl(socket.fd(), F_SETFL, fcntl(socket.fd(), F_GETFL) & ~O_NONBLOCK);
  tune(socket.fd());
  return socket;
}

}  // namespace

Writer::Writer(Kind kind, std::uint64_t id) {
  append<std::uint32_t>(frame_, 0);
  append(frame_, static_cast<std::uint8_t>(kind));
  append(frame_, id);
}

Writer& Writer::number(std::int64_t value) {
  append(frame_, static_cast<std::uint64_t>(value));
  return *this;
}

Writer& Writer::text(std::string_view value) {
  return bytes({reinterpret_cast<const std::uint8_t*>(value.data()), value.size()});
}

Writer& Writer::bytes(std::span<const std::uint8_t> value) {
  append(frame_,
         static_cast<std::uint32_t>(std::min<std::size_t>(value.size(), std::numeric_limits<std::uint32_t>::max())));
  frame_.insert(frame_.end(), value.begin(), value.end());
  return *this;
}

Bytes Writer::finish() {
  const std::size_t length = frame_.size() - 4;
  if (length > kMaxFrame) {
    fail_invalid("rendezvous", {.what = "the message is too large",
                                .got = std::to_string(length) + " bytes",
                                .expected = "at most " + std::to_string(kMaxFrame)});
  }
  for (std::size_t i = 0; i < 4; ++i) frame_[i] = static_cast<std::uint8_t>(length >> (8 * i));
  return std::move(frame_);
}

std::span<const std::uint8_t> Reader::take(std::size_t count) {
  if (!good_ || count > frame_.size() - at_) {
    good_ = false;
    return {};
  }
  const auto taken = frame_.subspan(at_, count);
  at_ += count;
  return taken;
}

Kind Reader::kind() { return static_cast<Kind>(decode(take(1))); }
std::uint64_t Reader::id() { return decode(take(8)); }
std::int64_t Reader::number() { return static_cast<std::int64_t>(decode(take(8))); }

std::string Reader::text(std::size_t limit) {
  const Bytes value = bytes(limit);
  return {value.begin(), value.end()};
}

Bytes Reader::bytes(std::size_t limit) {
  const std::size_t length = decode(take(4));
  if (length > limit) good_ = false;
  const auto taken = take(length);
  return {taken.begin(), taken.end()};
}

void Socket::reset() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

void tune(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  // A peer whose machine vanished is noticed within half a minute.
  const int idle = 15, interval = 5, probes = 3;
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

bool is_loopback(const std::string& host) {
  try {
    const auto addresses = resolve(host, 0);
    return !addresses.empty() && std::all_of(addresses.begin(), addresses.end(), [](const auto& entry) {
      const sockaddr_storage& address = entry.first;
      if (address.ss_family == AF_INET) {
        return ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
      }
      const in6_addr& wide = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
      return IN6_IS_ADDR_LOOPBACK(&wide) || (IN6_IS_ADDR_V4MAPPED(&wide) && wide.s6_addr[12] == IN_LOOPBACKNET);
    });
  } catch (const Error&) {
    return false;
  }
}

void check_reachable(const std::string& host, const std::string& secret, bool allow_no_secret) {
  if (!secret.empty() || allow_no_secret || is_loopback(host)) return;
  fail_invalid("rendezvous",
               {.what = "a job without a secret may only listen on a loopback address",
                .got = "MASTER_ADDR " + dtensor::in_quotes(host) + " and no DTENSOR_SECRET",
                .expected = "127.0.0.1, or the same DTENSOR_SECRET on all ranks",
                .advice = "dtensor run, which makes a secret; or export DTENSOR_SECRET=$(openssl rand -hex 32) before "
                          "the ranks start; or DTENSOR_ALLOW_NO_SECRET=1 where nobody else can reach the address"});
}

Listening listen_on(const std::string& host, int port) {
  std::string reason = "it has no address";
  for (const auto& [address, length] : resolve(host, port)) {
    Socket socket(::socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int on = 1;
    sockaddr_storage bound{};
    socklen_t size = sizeof bound;
    if (socket && setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
        bind(socket.fd(), reinterpret_cast<const sockaddr*>(&address), length) == 0 &&
        listen(socket.fd(), SOMAXCONN) == 0 &&
        getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&bound), &size) == 0) {
      return {std::move(socket), port_of(bound)};
    }
    reason = errno_text();
  }
  fail(ErrorKind::kCommunication, "rendezvous",
       {.what = "rank 0 cannot listen",
        .got = endpoint(host, port) + " (" + reason + ")",
        .expected = "an address of rank 0's host and a free port",
        .advice = "another MASTER_ADDR or MASTER_PORT"});
}

Socket connect_to(const std::string& host, int port, Clock::time_point deadline) {
  auto pause = std::chrono::milliseconds(10);
  while (true) {
    std::string reason = "it has no address";
    for (const auto& [address, length] : resolve(host, port)) {
      if (Socket socket = try_connect(address, length, std::max(1, milliseconds_until(deadline)))) return socket;
      reason = errno_text();
    }
    if (Clock::now() + pause >= deadline) {
      fail(ErrorKind::kCommunication, "rendezvous",
           {.what = "rank 0 never came: nothing answers at " + endpoint(host, port),
            .got = reason,
            .expected = "rank 0 listening there",
            .advice = "checking that rank 0 was started and that MASTER_ADDR and MASTER_PORT are its own"});
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::milliseconds(200));
  }
}

std::string local_address(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  char text[NI_MAXHOST];
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0 ||
      getnameinfo(reinterpret_cast<const sockaddr*>(&address), size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) !=
          0) {
    fail(ErrorKind::kInternal, "rendezvous", {.what = "a connected socket has no address", .got = errno_text()});
  }
  return text;
}

std::string errno_text() { return std::strerror(errno); }

std::string endpoint(const std::string& host, int port) {
  return (host.find(':') == std::string::npos ? host : "[" + host + "]") + ":" + std::to_string(port);
}

int milliseconds_until(Clock::time_point when) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(when - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, std::numeric_limits<int>::max()));
}

Clock::time_point deadline_after(std::chrono::milliseconds timeout) {
  constexpr auto kForever = std::chrono::hours(24 * 365);
  return Clock::now() + std::clamp<std::chrono::milliseconds>(timeout, std::chrono::milliseconds(0), kForever);
}

}  // namespace dtensor::rendezvous
