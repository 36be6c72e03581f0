// Any bytes to a rendezvous that listens, from a stranger or from a rank that has said who it is: the server closes the
// connection or answers, and goes on serving the next rank.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "dtensor/comm/rendezvous.h"
#include "dtensor/comm/rendezvous_impl.h"

namespace {

using namespace dtensor;
using namespace dtensor::rendezvous;

void require(bool condition) {
  if (!condition) std::abort();
}

void send_all(const Socket& socket, std::span<const std::uint8_t> bytes) {
  // The server may have closed it already.
  while (!bytes.empty()) {
    const auto sent = send(socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent <= 0) return;
    bytes = bytes.subspan(static_cast<std::size_t>(sent));
  }
}

Bytes hello(std::int64_t rank) {
  return Writer(Kind::kHello, 1).number(static_cast<std::int64_t>(kMagic)).number(rank).number(2).finish();
}

// The frame's head, of what the server says first.
bool answers(const Socket& socket) {
  pollfd entry{socket.fd(), POLLIN, 0};
  int ready = 0;
  do ready = poll(&entry, 1, 5000);
  while (ready < 0 && errno == EINTR);  // libFuzzer's own alarm
  std::uint8_t byte = 0;
  return ready == 1 && recv(socket.fd(), &byte, 1, 0) == 1;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2 || size > 4096) return 0;
  const RendezvousServer server("127.0.0.1", 0, 2);
  const auto deadline = Clock::now() + std::chrono::seconds(5);
  {
    const Socket peer = connect_to("127.0.0.1", server.port(), deadline);
    if (data[0] & 1) send_all(peer, hello(1));
    std::span<const std::uint8_t> rest(data + 2, size - 2);
    if (data[0] & 2) {
      // Frames of the right length, so that their bodies are looked at.
      while (!rest.empty()) {
        const auto length = std::min<std::size_t>(rest.size(), 9 + data[1]);
        const std::uint8_t head[4] = {static_cast<std::uint8_t>(length), static_cast<std::uint8_t>(length >> 8), 0, 0};
        send_all(peer, head);
        send_all(peer, rest.first(length));
        rest = rest.subspan(length);
      }
    } else {
      send_all(peer, rest);
    }
    shutdown(peer.fd(), SHUT_WR);
    pollfd entry{peer.fd(), POLLIN, 0};
    poll(&entry, 1, 1000);
  }
  const Socket next = connect_to("127.0.0.1", server.port(), deadline);
  send_all(next, hello(0));
  require(answers(next));
  return 0;
}
