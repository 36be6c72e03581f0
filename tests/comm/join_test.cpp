// Who may join a world: connections with and without the job's secret, and connections that say nothing.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <future>
#include <optional>
#include <thread>

#include "dtensor/comm/rendezvous.h"
#include "dtensor/comm/rendezvous_impl.h"
#include "dtensor/comm/secret_impl.h"
#include "tests/comm/errors.h"

namespace dtensor {
namespace {

using rendezvous::Kind;
using rendezvous::Reader;
using rendezvous::Socket;
using rendezvous::Writer;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::error_of;
using Bytes = RendezvousClient::Bytes;
using Clock = std::chrono::steady_clock;

const std::string kSecret = "0f1e2d3c4b5a69788796a5b4c3d2e1f00f1e2d3c4b5a69788796a5b4c3d2e1f0";
const std::string kOther = "1f1e2d3c4b5a69788796a5b4c3d2e1f00f1e2d3c4b5a69788796a5b4c3d2e1f0";

Rendezvous at(int port, std::int64_t rank, std::int64_t size, const std::string& secret,
              milliseconds timeout = seconds(10)) {
  return {.host = "127.0.0.1", .port = port, .rank = rank, .size = size, .timeout = timeout, .secret = secret};
}

std::string join_error(int port, std::int64_t rank, std::int64_t size, const std::string& secret,
                       milliseconds timeout = seconds(10)) {
  return error_of([&] { RendezvousClient(at(port, rank, size, secret, timeout), nullptr); });
}

// Both ranks of a world of two.
void expect_both_join(int port, const std::string& secret) {
  auto other = std::async(std::launch::async,
                          [&] { return std::make_unique<RendezvousClient>(at(port, 1, 2, secret), nullptr); });
  RendezvousClient first(at(port, 0, 2, secret), nullptr);
  const auto second = other.get();
  first.set("key", {1, 2, 3});
  EXPECT_EQ(second->get("key", seconds(5)), (Bytes{1, 2, 3}));
}

Socket connect_here(int port) { return rendezvous::connect_to("127.0.0.1", port, Clock::now() + seconds(5)); }

void send_frame(const Socket& socket, const Bytes& frame) {
  EXPECT_EQ(::send(socket.fd(), frame.data(), frame.size(), MSG_NOSIGNAL), static_cast<ssize_t>(frame.size()));
}

bool read_exactly(const Socket& socket, std::uint8_t* to, std::size_t count, milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  while (count > 0) {
    pollfd entry{socket.fd(), POLLIN, 0};
    if (poll(&entry, 1, rendezvous::milliseconds_until(deadline)) <= 0) return false;
    const auto got = recv(socket.fd(), to, count, 0);
    if (got <= 0) return false;
    to += got;
    count -= static_cast<std::size_t>(got);
  }
  return true;
}

// The next frame without its length; nothing when the connection was closed.
std::optional<Bytes> read_frame(const Socket& socket, milliseconds timeout = seconds(5)) {
  std::uint8_t head[4];
  if (!read_exactly(socket, head, 4, timeout)) return std::nullopt;
  Bytes frame(head[0] | head[1] << 8 | head[2] << 16);
  if (!read_exactly(socket, frame.data(), frame.size(), timeout)) return std::nullopt;
  return frame;
}

Kind kind_of(const std::optional<Bytes>& frame) { return frame ? Reader(*frame).kind() : Kind{0}; }

Bytes only_string(const Bytes& frame) {
  Reader reader(frame);
  reader.kind();
  reader.id();
  return reader.bytes(4096);
}

Bytes hello(const secrets::Handshake& handshake) {
  return Writer(Kind::kHello, 1)
      .number(static_cast<std::int64_t>(rendezvous::kMagic))
      .number(handshake.rank)
      .number(handshake.size)
      .bytes(handshake.client_nonce)
      .finish();
}

Bytes proof(const secrets::Handshake& handshake, const std::string& secret) {
  return Writer(Kind::kProof, 2).bytes(prove(secret, secrets::Role::kClient, handshake)).finish();
}

// Says hello by hand and takes the server's challenge.
Socket challenged(int port, secrets::Handshake& handshake) {
  Socket socket = connect_here(port);
  send_frame(socket, hello(handshake));
  const auto frame = read_frame(socket);
  EXPECT_EQ(kind_of(frame), Kind::kChallenge);
  const Bytes nonce = frame ? only_string(*frame) : Bytes(32);
  EXPECT_EQ(nonce.size(), 32u);
  std::copy_n(nonce.begin(), 32, handshake.server_nonce.begin());
  return socket;
}

// Was the connection closed by the other side within the time?
bool closed(const Socket& socket, milliseconds timeout) {
  pollfd entry{socket.fd(), POLLIN, 0};
  char byte = 0;
  return poll(&entry, 1, static_cast<int>(timeout.count())) == 1 && recv(socket.fd(), &byte, 1, 0) <= 0;
}

TEST(Join, TakesRanksThatKnowTheSecret) {
  RendezvousServer server("127.0.0.1", 0, 2, {.secret = kSecret});
  expect_both_join(server.port(), kSecret);
}

TEST(Join, RefusesAnotherSecret) {
  RendezvousServer server("127.0.0.1", 0, 2, {.secret = kSecret});
  auto waiting =
      std::async(std::launch::async, [&] { return join_error(server.port(), 0, 2, kSecret, milliseconds(500)); });
  const auto start = Clock::now();
  EXPECT_EQ(join_error(server.port(), 1, 2, kOther),
            "[rendezvous] rank 1 does not know the secret of this job: DTENSOR_SECRET is not the one of rank 0");
  EXPECT_LT(Clock::now() - start, seconds(2)) << "no need to wait";
  const std::string error = waiting.get();
  EXPECT_CONTAINS(error, "rank 1 never came");
  EXPECT_CONTAINS(error, "1 of 2 ranks within 500 ms, and 1 connection without a proof of the job's secret");
  for (const std::string& secret : {kSecret, kOther}) EXPECT_EQ(error.find(secret), std::string::npos);
}

TEST(Join, RefusesARankWithoutASecret) {
  RendezvousServer server("127.0.0.1", 0, 2, {.secret = kSecret});
  EXPECT_EQ(join_error(server.port(), 1, 2, ""),
            "[rendezvous] rank 0 at 127.0.0.1:" + std::to_string(server.port()) +
                " asks for the secret of its job, and this rank has none; expected the same DTENSOR_SECRET on all "
                "ranks; try dtensor run, which gives all ranks of a job one secret");
  expect_both_join(server.port(), kSecret);  // nobody took rank 1's place
}

TEST(Join, RefusesARankZeroWithoutASecret) {
  RendezvousServer server("127.0.0.1", 0, 2);
  EXPECT_CONTAINS(join_error(server.port(), 1, 2, kSecret), "has no secret, and this rank has one");
}

TEST(Join, NothingIsToldBeforeTheProof) {
  RendezvousServer server("127.0.0.1", 0, 2, {.secret = kSecret});
  secrets::Handshake handshake{7, 3, secrets::random_digest(), {}};  // a rank that there is not: not even that is told
  for (const Bytes& frame : {Writer(Kind::kSet, 2).text("key").text("value").finish(),
                             Writer(Kind::kGet, 2).number(0).number(1).text("key").finish(),
                             Writer(Kind::kJoin, 2).number(0).number(0).finish(), hello(handshake),
                             Writer(Kind::kProof, 2).finish(), Writer(Kind::kProof, 2).text("x").number(1).finish()}) {
    const Socket socket = challenged(server.port(), handshake);
    send_frame(socket, frame);
    EXPECT_TRUE(closed(socket, seconds(2)));
  }
  const Socket socket = challenged(server.port(), handshake);
  send_frame(socket, proof(handshake, kSecret));
  const auto answer = read_frame(socket);
  EXPECT_EQ(kind_of(answer), Kind::kRefused);
  // A proof before the hello.
  const Socket early = connect_here(server.port());
  send_frame(early, proof(handshake, kSecret));
  EXPECT_TRUE(closed(early, seconds(2)));
  expect_both_join(server.port(), kSecret);
}

TEST(Join, ProofsAreGoodForOneConnection) {
  RendezvousServer server("127.0.0.1", 0, 2, {.secret = kSecret});
  secrets::Handshake first{1, 2, secrets::random_digest(), {}}, second = first;
  const Socket one = challenged(server.port(), first), two = challenged(server.port(), second);
  EXPECT_NE(first.server_nonce, second.server_nonce);
  send_frame(two, proof(first, kSecret));
  EXPECT_EQ(kind_of(read_frame(two)), Kind::kRefused);
  // Another rank than the one that said hello.
  secrets::Handshake zero = first;
  zero.rank = 0;
  const Socket three = challenged(server.port(), second);
  zero.server_nonce = second.server_nonce;
  send_frame(three, proof(zero, kSecret));
  EXPECT_EQ(kind_of(read_frame(three)), Kind::kRefused);
  send_frame(one, proof(first, kSecret));
  EXPECT_EQ(kind_of(read_frame(one)), Kind::kOk);
}

// Something else listens where rank 0 should: it has no proof, an invented one, or the client's own.
TEST(Join, RefusesAServerThatDoesNotKnowTheSecret) {
  for (const int answer : {0, 1, 2, 3}) {
    auto [listener, port] = rendezvous::listen_on("127.0.0.1", 0);
    auto impostor = std::async(std::launch::async, [&, listening = listener.fd()] {
      pollfd entry{listening, POLLIN, 0};
      poll(&entry, 1, 5000);
      const Socket peer(accept(listening, nullptr, nullptr));
      EXPECT_EQ(kind_of(read_frame(peer)), Kind::kHello);
      send_frame(peer, Writer(Kind::kChallenge, 1).bytes(secrets::random_digest()).finish());
      const auto given = read_frame(peer);
      if (!given) return;
      Writer reply(Kind::kOk, 2);
      if (answer == 1) reply.bytes(secrets::random_digest());
      if (answer == 2) reply.bytes(only_string(*given));
      if (answer == 3) reply.text("");
      send_frame(peer, reply.finish());
      closed(peer, seconds(2));
    });
    EXPECT_CONTAINS(join_error(port, 1, 2, kSecret), "does not know the secret: it is not rank 0 of this job");
    impostor.get();
  }
}

TEST(Join, SaysThatSomethingElseListens) {
  auto [listener, port] = rendezvous::listen_on("127.0.0.1", 0);
  auto other = std::async(std::launch::async, [&, listening = listener.fd()] {
    pollfd entry{listening, POLLIN, 0};
    poll(&entry, 1, 5000);
    const Socket peer(accept(listening, nullptr, nullptr));
    const std::string page = "HTTP/1.1 400 Bad Request\r\n\r\n";
    send_frame(peer, Bytes(page.begin(), page.end()));
    closed(peer, seconds(2));
  });
  EXPECT_CONTAINS(join_error(port, 1, 2, kSecret), "is not rank 0 of a job");
  other.get();
}

// Between the ranks and rank 0 stands a relay that keeps all bytes of both directions.
TEST(Join, NeverSendsTheSecret) {
  RendezvousServer server("127.0.0.1", 0, 1, {.secret = kSecret});
  auto [listener, port] = rendezvous::listen_on("127.0.0.1", 0);
  std::string seen;
  auto relay = std::async(std::launch::async, [&, listening = listener.fd()] {
    pollfd entry{listening, POLLIN, 0};
    poll(&entry, 1, 5000);
    const Socket near(accept(listening, nullptr, nullptr)), far = connect_here(server.port());
    while (true) {
      pollfd ends[2] = {{near.fd(), POLLIN, 0}, {far.fd(), POLLIN, 0}};
      if (poll(ends, 2, 5000) <= 0) return;
      for (int i = 0; i < 2; ++i) {
        if (ends[i].revents == 0) continue;
        char buffer[4096];
        const auto got = recv(ends[i].fd, buffer, sizeof buffer, 0);
        if (got <= 0) return;
        seen.append(buffer, static_cast<std::size_t>(got));
        ::send(ends[1 - i].fd, buffer, static_cast<std::size_t>(got), MSG_NOSIGNAL);
      }
    }
  });
  {
    RendezvousClient client(at(port, 0, 1, kSecret), nullptr);
    client.set("key", {});
  }
  relay.get();
  EXPECT_GT(seen.size(), 150u);
  EXPECT_EQ(seen.find(kSecret), std::string::npos);
  EXPECT_EQ(seen.find(kSecret.substr(0, 16)), std::string::npos);
  std::string raw;
  for (std::size_t i = 0; i < kSecret.size(); i += 2)
    raw += static_cast<char>(std::stoi(kSecret.substr(i, 2), nullptr, 16));
  EXPECT_EQ(seen.find(raw.substr(0, 8)), std::string::npos);
}

TEST(Join, RefusesAnotherVersion) {
  RendezvousServer server("127.0.0.1", 0, 2);
  const Socket socket = connect_here(server.port());
  send_frame(
      socket,
      Writer(Kind::kHello, 1).number(static_cast<std::int64_t>(rendezvous::kMagic - 1)).number(1).number(2).finish());
  const auto answer = read_frame(socket);
  ASSERT_EQ(kind_of(answer), Kind::kRefused);
  const Bytes text = only_string(*answer);
  EXPECT_EQ(std::string(text.begin(), text.end()), "rank 1 runs another version of dtensor than rank 0");
}

// ---- connections that say nothing

TEST(Join, IdleConnectionsKeepNobodyOut) {
  for (const std::string& secret : {std::string(), kSecret}) {
    RendezvousServer server("127.0.0.1", 0, 2, {.secret = secret});
    std::vector<Socket> idle;
    for (int i = 0; i < 66; ++i) idle.push_back(connect_here(server.port()));
    expect_both_join(server.port(), secret);
    for (int i = 0; i < 300; ++i) idle.push_back(connect_here(server.port()));
    EXPECT_CONTAINS(join_error(server.port(), 1, 2, secret), "rank 1 has already come");
  }
}

// They come faster than they are dropped, while the ranks join.
TEST(Join, AStreamOfConnectionsKeepsNobodyOut) {
  RendezvousServer server("127.0.0.1", 0, 2, {.secret = kSecret});
  std::atomic<bool> stop = false;
  auto strangers = std::async(std::launch::async, [&] {
    std::vector<Socket> idle(200);
    for (std::size_t i = 0; !stop; ++i) {
      idle[i % idle.size()] = connect_here(server.port());
      if (i % 3 == 0) send_frame(idle[i % idle.size()], {1, 2});
    }
  });
  for (int i = 0; i < 5; ++i) {
    EXPECT_CONTAINS(join_error(server.port(), 1, 3, kSecret), "says that the world has 3 ranks");
  }
  expect_both_join(server.port(), kSecret);
  stop = true;
  strangers.get();
}

TEST(Join, DropsConnectionsThatSayNothing) {
  RendezvousServer server("127.0.0.1", 0, 2, {.secret = kSecret, .hello_time = milliseconds(300)});
  const Socket silent = connect_here(server.port()), slow = connect_here(server.port());
  secrets::Handshake handshake{1, 2, secrets::random_digest(), {}};
  const Socket half = challenged(server.port(), handshake);
  const auto start = Clock::now();
  for (int i = 0; i < 5; ++i) {  // a byte now and then is nothing
    ::send(slow.fd(), "\x10", 1, MSG_NOSIGNAL);
    std::this_thread::sleep_for(milliseconds(50));
  }
  for (const Socket* socket : {&silent, &slow, &half}) EXPECT_TRUE(closed(*socket, seconds(3)));
  EXPECT_LT(Clock::now() - start, seconds(2));
  expect_both_join(server.port(), kSecret);
}

TEST(Join, MembersMaySayNothingForLong) {
  RendezvousServer server("127.0.0.1", 0, 1, {.secret = kSecret, .hello_time = milliseconds(100)});
  RendezvousClient client(at(server.port(), 0, 1, kSecret), nullptr);
  std::this_thread::sleep_for(milliseconds(300));
  client.set("key", {});
}

TEST(Join, TriesAgainWhenItsConnectionIsClosed) {
  auto [listener, port] = rendezvous::listen_on("127.0.0.1", 0);
  auto waiting = std::async(std::launch::async, [port = port] {
    return std::make_unique<RendezvousClient>(at(port, 0, 1, kSecret), nullptr);
  });
  for (int i = 0; i < 3; ++i) {
    pollfd entry{listener.fd(), POLLIN, 0};
    ASSERT_EQ(poll(&entry, 1, 5000), 1);
    Socket(accept(listener.fd(), nullptr, nullptr)).reset();
  }
  listener.reset();
  RendezvousServer server("127.0.0.1", port, 1, {.secret = kSecret});
  waiting.get()->set("key", {});
}

// ---- errors and addresses

TEST(Join, MissingRanksAreNamedInFewWords) {
  const std::int64_t size = 1 << 20;
  RendezvousServer server("127.0.0.1", 0, size);
  auto other =
      std::async(std::launch::async, [&] { return join_error(server.port(), 4, size, "", milliseconds(1500)); });
  const std::string error = join_error(server.port(), 2, size, "", milliseconds(300));
  EXPECT_LT(error.size(), 400u);
  EXPECT_CONTAINS(error, "ranks 0, 1, 3, 5-1048575 never came");
  EXPECT_CONTAINS(error, "got 2 of 1048576 ranks");
  other.get();
}

TEST(Join, WithoutASecretListensOnLoopbackOnly) {
  for (const char* host : {"0.0.0.0", "::", "192.0.2.1"}) {
    EXPECT_EQ(error_of([&] { RendezvousServer(host, 0, 2); }),
              "[rendezvous] a job without a secret may only listen on a loopback address; got MASTER_ADDR '" +
                  std::string(host) +
                  "' and no DTENSOR_SECRET; expected 127.0.0.1, or the same DTENSOR_SECRET on all ranks; try dtensor "
                  "run, which makes a secret; or export DTENSOR_SECRET=$(openssl rand -hex 32) before the ranks start; "
                  "or DTENSOR_ALLOW_NO_SECRET=1 where nobody else can reach the address");
  }
  RendezvousServer("localhost", 0, 2);
  RendezvousServer("127.0.0.5", 0, 2);
  RendezvousServer("0.0.0.0", 0, 2, {.secret = kSecret});
  RendezvousServer("0.0.0.0", 0, 2, {.allow_no_secret = true});
  EXPECT_TRUE(rendezvous::is_loopback("127.255.0.1"));
  EXPECT_TRUE(rendezvous::is_loopback("::1"));
  EXPECT_TRUE(rendezvous::is_loopback("::ffff:127.0.0.1"));
  EXPECT_FALSE(rendezvous::is_loopback("128.0.0.1"));
  EXPECT_FALSE(rendezvous::is_loopback("10.0.0.1"));
  EXPECT_FALSE(rendezvous::is_loopback("no such host"));
}

TEST(Join, ChecksSecrets) {
  EXPECT_CONTAINS(error_of([] { RendezvousServer("127.0.0.1", 0, 2, {.secret = "short"}); }), "got 5 characters");
  EXPECT_CONTAINS(join_error(1, 0, 2, "short"), "the secret has the wrong length");
}

}  // namespace
}  // namespace dtensor
