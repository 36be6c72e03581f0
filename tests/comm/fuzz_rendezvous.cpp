// Any bytes to a rendezvous that listens, with a secret or without, from a stranger, from one that was asked for its
// proof, or from a rank that has joined: the server closes the connection or answers, and goes on serving the next
// rank. The first byte of an input says which: 1 hello, 2 frames, 4 the server has a secret, 8 the hello is proven.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>

#include "dtensor/comm/rendezvous.h"
#include "dtensor/comm/rendezvous_impl.h"
#include "dtensor/comm/secret_impl.h"

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

const std::string kSecret(32, 's');

Bytes hello(std::int64_t rank) {
  return Writer(Kind::kHello, 1)
      .number(static_cast<std::int64_t>(kMagic))
      .number(rank)
      .number(2)
      .bytes(secrets::Digest{})
      .finish();
}

// The next frame of the server, without its length.
Bytes receive_frame(const Socket& socket) {
  Bytes frame(4);
  for (std::size_t got = 0; got < frame.size();) {
    pollfd entry{socket.fd(), POLLIN, 0};
    int ready = 0;
    do ready = poll(&entry, 1, 5000);
    while (ready < 0 && errno == EINTR);  // libFuzzer's own alarm
    const auto count = ready == 1 ? recv(socket.fd(), frame.data() + got, frame.size() - got, 0) : 0;
    require(count > 0);
    got += static_cast<std::size_t>(count);
    if (got == 4 && frame.size() == 4) frame.resize(4 + (frame[0] | frame[1] << 8 | frame[2] << 16));
  }
  return Bytes(frame.begin() + 4, frame.end());
}

// The proof that the server asks for, after hello(rank).
Bytes proof(const Socket& socket, std::int64_t rank) {
  const Bytes challenge = receive_frame(socket);
  Reader reader(challenge);
  require(reader.kind() == Kind::kChallenge);
  reader.id();
  const Bytes nonce = reader.bytes(kNonce);
  require(nonce.size() == kNonce);
  secrets::Handshake handshake{rank, 2, {}, {}};
  std::copy(nonce.begin(), nonce.end(), handshake.server_nonce.begin());
  return Writer(Kind::kProof, 2).bytes(prove(kSecret, secrets::Role::kClient, handshake)).finish();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2 || size > 4096) return 0;
  const bool secret = data[0] & 4;
  const RendezvousServer server("127.0.0.1", 0, 2, {.secret = secret ? kSecret : ""});
  const auto deadline = Clock::now() + std::chrono::seconds(5);
  {
    const Socket peer = connect_to("127.0.0.1", server.port(), deadline);
    if (data[0] & 1) send_all(peer, hello(1));
    if (secret && (data[0] & 9) == 9) send_all(peer, proof(peer, 1));
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
  if (secret) send_all(next, proof(next, 0));
  const Bytes answer = receive_frame(next);
  // Another connection may have said that it is rank 0, and have the secret or need none.
  const Kind kind = Reader(answer).kind();
  require(kind == Kind::kOk || kind == Kind::kRefused);
  return 0;
}
