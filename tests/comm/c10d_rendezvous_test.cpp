#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <random>
#include <thread>

#include "dtensor/comm/rendezvous.h"
#include "dtensor/comm/rendezvous_impl.h"
#include "tests/comm/errors.h"

namespace dtensor {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::error_of;
using Bytes = RendezvousClient::Bytes;

Rendezvous at(int port, std::int64_t rank, std::int64_t size, milliseconds timeout = seconds(10)) {
  return {.host = "127.0.0.1", .port = port, .rank = rank, .size = size, .timeout = timeout};
}

Bytes bytes(const std::string& text) { return {text.begin(), text.end()}; }

struct Recorder {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<RendezvousEvent> events;

  RendezvousClient::Listener listener() {
    return [this](const RendezvousEvent& event) {
      const std::lock_guard lock(mutex);
      events.push_back(event);
      changed.notify_all();
    };
  }
  RendezvousEvent first() {
    std::unique_lock lock(mutex);
    if (!changed.wait_for(lock, seconds(5), [this] { return !events.empty(); })) {
      ADD_FAILURE() << "no event";
      return {};
    }
    return events.front();
  }
};

// Clients of one world, by rank; they join at the same time.
std::vector<std::unique_ptr<RendezvousClient>> join(int port, std::int64_t size, Recorder* recorder = nullptr) {
  std::vector<std::future<std::unique_ptr<RendezvousClient>>> coming;
  for (std::int64_t rank = 0; rank < size; ++rank) {
    coming.push_back(std::async(std::launch::async, [=] {
      return std::make_unique<RendezvousClient>(at(port, rank, size), recorder ? recorder->listener() : nullptr);
    }));
  }
  std::vector<std::unique_ptr<RendezvousClient>> clients;
  for (auto& one : coming) clients.push_back(one.get());
  return clients;
}

TEST(Rendezvous, KeepsWhatWasSet) {
  RendezvousServer server("127.0.0.1", 0, 2);
  const auto clients = join(server.port(), 2);
  clients[0]->set("a", bytes("1"));
  EXPECT_EQ(clients[1]->get("a", seconds(1)), bytes("1"));
  clients[1]->set("a", {});
  EXPECT_EQ(clients[0]->get("a", seconds(1)), Bytes{});
  EXPECT_EQ(clients[0]->key_count(), 1);
  EXPECT_TRUE(clients[0]->check({"a"}));
  EXPECT_FALSE(clients[0]->check({"a", "b"}));
  EXPECT_TRUE(clients[0]->erase("a"));
  EXPECT_FALSE(clients[0]->erase("a"));
  const Bytes large(3 << 20, 7);
  clients[0]->set("large", large);
  EXPECT_EQ(clients[1]->get("large", seconds(1)), large);
}

TEST(Rendezvous, AddsAndCompares) {
  RendezvousServer server("127.0.0.1", 0, 1);
  const auto clients = join(server.port(), 1);
  EXPECT_EQ(clients[0]->add("n", 3), 3);
  EXPECT_EQ(clients[0]->add("n", -5), -2);
  EXPECT_EQ(clients[0]->get("n", seconds(1)), bytes("-2"));
  EXPECT_EQ(clients[0]->compare_set("c", bytes("x"), bytes("y")), bytes("x"));
  EXPECT_FALSE(clients[0]->check({"c"}));
  EXPECT_EQ(clients[0]->compare_set("c", {}, bytes("y")), bytes("y"));
  EXPECT_EQ(clients[0]->compare_set("c", bytes("x"), bytes("z")), bytes("y"));
  EXPECT_EQ(clients[0]->compare_set("c", bytes("y"), bytes("z")), bytes("z"));
}

TEST(Rendezvous, WaitsForKeysWithoutHoldingUpOthers) {
  RendezvousServer server("127.0.0.1", 0, 1);
  const auto clients = join(server.port(), 1);
  auto waiting = std::async(std::launch::async, [&] { return clients[0]->get("later", seconds(10)); });
  auto both = std::async(std::launch::async, [&] { return clients[0]->wait({"later", "other"}, seconds(10)); });
  clients[0]->set("other", {});
  clients[0]->set("later", bytes("here"));
  EXPECT_EQ(waiting.get(), bytes("here"));
  EXPECT_TRUE(both.get().empty());
}

TEST(Rendezvous, SaysWhatDidNotCome) {
  RendezvousServer server("127.0.0.1", 0, 1);
  const auto clients = join(server.port(), 1);
  clients[0]->set("a", {});
  EXPECT_EQ(clients[0]->wait({"a", "b", "c"}, milliseconds(50)), (std::vector<std::string>{"b", "c"}));
  EXPECT_EQ(error_of([&] { clients[0]->get("b", milliseconds(20)); }),
            "[rendezvous] nobody set the key 'b' within 20 ms");
}

TEST(Rendezvous, NamesTheRanksThatNeverCame) {
  RendezvousServer server("127.0.0.1", 0, 4);
  auto other = std::async(std::launch::async, [&] {
    return error_of([&] { RendezvousClient(at(server.port(), 2, 4, seconds(30)), nullptr); });
  });
  const auto start = std::chrono::steady_clock::now();
  const std::string mine = error_of([&] { RendezvousClient(at(server.port(), 0, 4, milliseconds(300)), nullptr); });
  EXPECT_CONTAINS(mine, "[rendezvous] ranks 1, 3 never came to 127.0.0.1:");
  EXPECT_CONTAINS(mine, "got 2 of 4 ranks within 300 ms");
  EXPECT_CONTAINS(other.get(), "ranks 1, 3 never came");  // it need not wait for its own timeout
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(2));
}

TEST(Rendezvous, NobodyListens) {
  int port = 0;
  { port = RendezvousServer("127.0.0.1", 0, 2).port(); }
  const std::string error = error_of([&] { RendezvousClient(at(port, 1, 2, milliseconds(200)), nullptr); });
  EXPECT_CONTAINS(error, "[rendezvous] rank 0 never came: nothing answers at 127.0.0.1:" + std::to_string(port));
  EXPECT_CONTAINS(error, "Connection refused");
}

TEST(Rendezvous, RefusesThoseWhoDoNotBelong) {
  RendezvousServer server("127.0.0.1", 0, 2);
  auto first = std::async(std::launch::async, [&] { return join(server.port(), 2); });
  const auto clients = first.get();
  EXPECT_CONTAINS(error_of([&] { RendezvousClient(at(server.port(), 1, 2), nullptr); }),
                  "rank 1 has already come: two processes were given the same rank");
  EXPECT_CONTAINS(error_of([&] { RendezvousClient(at(server.port(), 1, 3), nullptr); }),
                  "rank 1 says that the world has 3 ranks; rank 0 says 2");
  EXPECT_CONTAINS(error_of([&] { RendezvousClient(at(server.port(), 5, 3), nullptr); }), "rank 5 of 3");
  EXPECT_CONTAINS(error_of([&] { RendezvousClient(at(70000, 0, 1), nullptr); }), "this is no port; got 70000");
}

TEST(Rendezvous, CannotListenTwice) {
  RendezvousServer server("127.0.0.1", 0, 1);
  EXPECT_CONTAINS(error_of([&] { RendezvousServer("127.0.0.1", server.port(), 1); }), "Address already in use");
  EXPECT_CONTAINS(error_of([&] { RendezvousServer("192.0.2.1", 0, 1, {.secret = std::string(16, 's')}); }),
                  "rank 0 cannot listen; got 192.0.2.1:0");
}

TEST(Rendezvous, TellsWhoWasLostAndWhoLeft) {
  RendezvousServer server("127.0.0.1", 0, 3);
  Recorder recorder;
  auto clients = join(server.port(), 3, &recorder);
  clients[2].reset();
  EXPECT_EQ(recorder.first().kind, RendezvousEvent::Kind::kLost);
  EXPECT_EQ(recorder.first().rank, 2);
  EXPECT_FALSE(server.wait_until_alone(milliseconds(20)));
  clients[1]->leave("tired");
  EXPECT_TRUE(server.wait_until_alone(seconds(5)));
  clients[0]->report_failure("g", "first");
  clients[0]->report_failure("g", "second");
  clients[0]->check({});  // all events before the answer have been told
  const std::lock_guard lock(recorder.mutex);
  int left = 0, failed = 0;
  for (const RendezvousEvent& event : recorder.events) {
    left += event.kind == RendezvousEvent::Kind::kLeft && event.rank == 1 && event.text == "tired";
    failed += event.kind == RendezvousEvent::Kind::kFailed && event.text == "first";
    EXPECT_NE(event.text, "second");
  }
  EXPECT_GE(left, 1);
  EXPECT_GE(failed, 1);
}

TEST(Rendezvous, NoticesThatRankZeroIsGone) {
  auto server = std::make_unique<RendezvousServer>("127.0.0.1", 0, 1);
  Recorder recorder;
  const auto clients = join(server->port(), 1, &recorder);
  auto waiting =
      std::async(std::launch::async, [&] { return error_of([&] { clients[0]->get("never", seconds(30)); }); });
  std::this_thread::sleep_for(milliseconds(50));
  server.reset();
  EXPECT_CONTAINS(waiting.get(), "rank 0, which holds the rendezvous at 127.0.0.1:");
  EXPECT_EQ(recorder.first().kind, RendezvousEvent::Kind::kLost);
  EXPECT_EQ(recorder.first().rank, 0);
  EXPECT_CONTAINS(error_of([&] { clients[0]->set("a", {}); }), "is gone");
}

// A connection that says what it likes; true when the server closed it.
bool closes_on(int port, const Bytes& said) {
  rendezvous::Socket socket(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
  if (connect(socket.fd(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) return false;
  const timeval limit{3, 0};
  setsockopt(socket.fd(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  ::send(socket.fd(), said.data(), said.size(), MSG_NOSIGNAL);
  shutdown(socket.fd(), SHUT_WR);
  char buffer[256];
  while (true) {
    const auto got = recv(socket.fd(), buffer, sizeof buffer, 0);
    if (got <= 0) return got == 0 || errno == ECONNRESET;
  }
}

TEST(Rendezvous, SurvivesNonsense) {
  using rendezvous::Kind;
  using rendezvous::Writer;
  RendezvousServer server("127.0.0.1", 0, 2);
  auto clients = join(server.port(), 2);
  EXPECT_TRUE(closes_on(server.port(), bytes("GET / HTTP/1.1\r\n\r\n")));
  EXPECT_TRUE(closes_on(server.port(), {0xff, 0xff, 0xff, 0xff}));
  EXPECT_TRUE(closes_on(server.port(), {0, 0, 0, 0}));
  EXPECT_TRUE(closes_on(server.port(), Writer(Kind::kSet, 1).text("a").text("b").finish()));  // no hello before
  EXPECT_TRUE(closes_on(server.port(), Writer(Kind::kHello, 1).number(1).number(1).number(2).finish()));
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    Bytes noise(random() % 64);
    for (auto& byte : noise) byte = static_cast<std::uint8_t>(random());
    if (noise.size() > 4 && round % 2 == 0) {
      noise[0] = static_cast<std::uint8_t>(noise.size() - 4);
      noise[1] = noise[2] = noise[3] = 0;
    }
    EXPECT_TRUE(closes_on(server.port(), noise));
  }
  clients[0]->set("a", bytes("still here"));
  EXPECT_EQ(clients[1]->get("a", seconds(1)), bytes("still here"));
}

// A member that breaks the rules after its hello is closed, and counts as lost; the others go on.
TEST(Rendezvous, ClosesMembersThatSpeakNonsense) {
  using rendezvous::Kind;
  using rendezvous::Writer;
  const Bytes hello = Writer(Kind::kHello, 1)
                          .number(static_cast<std::int64_t>(rendezvous::kMagic))
                          .number(1)
                          .number(2)
                          .bytes(Bytes(rendezvous::kNonce))
                          .finish();
  std::vector<Bytes> bad = {
      Writer(Kind::kSet, 2).text("only a key").finish(),
      Writer(Kind::kGet, 2).number(0).number(2).text("a").text("b").finish(),
      Writer(Kind::kWait, 2).number(0).number(1 << 30).finish(),
      Writer(Kind::kWait, 2).number(0).number(-1).finish(),
      Writer(static_cast<Kind>(200), 2).finish(),
      Writer(Kind::kOk, 2).finish(),
      Writer(Kind::kSet, 2).text(std::string(rendezvous::kMaxKey + 1, 'k')).text("").finish(),
      Writer(Kind::kCount, 2).number(1).finish(),
  };
  for (const Bytes& frame : bad) {
    RendezvousServer server("127.0.0.1", 0, 2);
    Recorder recorder;
    auto member = std::async(std::launch::async, [&] {
      return std::make_unique<RendezvousClient>(at(server.port(), 0, 2), recorder.listener());
    });
    Bytes said = hello;
    said.insert(said.end(), frame.begin(), frame.end());
    EXPECT_TRUE(closes_on(server.port(), said));
    const auto client = member.get();
    EXPECT_EQ(recorder.first().kind, RendezvousEvent::Kind::kLost);
    client->set("a", {});
  }
}

}  // namespace
}  // namespace dtensor
