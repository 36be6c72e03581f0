// One rank of the MPI tests: mpirun -n 4 mpi_ranks CASE. Prints `rank R: …`, one line per thing worth checking.
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <mpi.h>
#include <signal.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <thread>

#include "dtensor/comm/mpi.h"
#include "dtensor/core/error.h"
#include "tests/comm/contract.h"

namespace dtensor::testing {
namespace {

using std::chrono::milliseconds;

std::vector<std::int64_t> all_ranks(const Transport& transport) {
  std::vector<std::int64_t> ranks(static_cast<std::size_t>(transport.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

CommunicatorPtr whole(Transport& transport, milliseconds timeout, bool fingerprint = false) {
  return transport.make_group(all_ranks(transport), {.name = "all", .timeout = timeout, .fingerprint = fingerprint});
}

void say(const Transport& transport, const std::string& text) {
  std::printf("rank %d: %s\n", static_cast<int>(transport.rank()), text.c_str());
  std::fflush(stdout);
}

// Says the error that `call` throws.
void say_error(const Transport& transport, const std::function<void()>& call) {
  try {
    call();
    say(transport, "no error");
  } catch (const Error& error) {
    say(transport, error.what());
  }
}

at::Tensor ones(std::int64_t count) { return at::full({count}, 1.0, at::kFloat); }

void require(bool holds, const std::string& text) {
  if (!holds) throw ContractFailure(text);
}

// The contract leaves fingerprints on; here they are off, as they are by default over MPI.
class Plain final : public Transport {
 public:
  explicit Plain(Transport& inner) : inner_(inner) {}
  std::int64_t rank() const override { return inner_.rank(); }
  std::int64_t size() const override { return inner_.size(); }
  std::string backend() const override { return inner_.backend(); }
  CommunicatorPtr make_group(const std::vector<std::int64_t>& ranks, const GroupOptions& options) override {
    GroupOptions plain = options;
    plain.fingerprint = false;
    return inner_.make_group(ranks, plain);
  }
  void leave(const std::string& why) override { inner_.leave(why); }

 private:
  Transport& inner_;
};

void contract(Transport& transport) { run_contract(transport); }

void contract_plain(Transport& transport) {
  Plain plain(transport);
  run_contract(plain);
}

// Buffers of more bytes than an int counts.
void large(Transport& transport) {
  const auto group = whole(transport, std::chrono::minutes(2));
  const std::int64_t count = (std::int64_t{1} << 31) + 12'345;
  const auto buffer = at::zeros({count}, at::kByte);
  auto* bytes = static_cast<std::uint8_t*>(buffer.data_ptr());
  if (group->rank() == 0) {
    for (std::int64_t i = 0; i < count; i += 997) bytes[i] = static_cast<std::uint8_t>(i / 997 % 251 + 1);
    bytes[count - 1] = 77;
  }
  group->broadcast(buffer, 0)->wait();
  bool right = bytes[count - 1] == 77;
  for (std::int64_t i = 0; i < count - 1; i += 997) right = right && bytes[i] == i / 997 % 251 + 1;
  require(right, "a broadcast of more than 2^31 bytes");
}

// The last rank does not take part; when it comes at last, it is told.
void missing(Transport& transport) {
  const auto group = whole(transport, milliseconds(700));
  group->barrier()->wait();
  if (group->rank() == group->size() - 1) {
    std::this_thread::sleep_for(milliseconds(1500));
    // What the others had sent is there; what follows is not.
    say_error(transport, [&] {
      group->all_reduce(ones(4), ReduceOp::kSum)->wait();
      group->barrier()->wait();
    });
    return;
  }
  const auto start = std::chrono::steady_clock::now();
  say_error(transport, [&] { group->all_reduce(ones(4), ReduceOp::kSum)->wait(); });
  const auto took = std::chrono::steady_clock::now() - start;
  require(took > milliseconds(600) && took < milliseconds(10'000), "the timeout took too long or too little");
  say_error(transport, [&] { group->barrier(); });
}

// Rank 0 gives a broadcast up, and all that it has of it, while MPI still has the address.
void keeps_buffers(Transport& transport) {
  const auto group = whole(transport, milliseconds(300));
  group->barrier()->wait();
  if (transport.rank() == 1) {
    std::this_thread::sleep_for(milliseconds(1000));
    return;
  }
  static bool freed = false;
  static float memory[100];
  {
    const auto buffer = at::from_blob(
        memory, {100}, [](void*) { freed = true; }, at::kFloat);
    say_error(transport, [&] { group->broadcast(buffer, 1)->wait(); });
  }
  require(!freed, "the buffer was let go");
}

// One rank never makes the group.
void absent(Transport& transport) {
  if (transport.rank() == 1) {
    std::this_thread::sleep_for(milliseconds(1500));
    return;
  }
  const auto group = whole(transport, milliseconds(500));
  say_error(transport, [&] { group->all_reduce(ones(100'000), ReduceOp::kSum)->wait(); });
}

// Rank 1 fails; the others learn why at once and not after their timeout.
void fails(Transport& transport) {
  const auto group = whole(transport, std::chrono::minutes(5));
  group->barrier()->wait();
  if (transport.rank() == 1) {
    transport.leave("the disk is full");
    return;
  }
  say_error(transport, [&] { group->all_reduce(ones(1000), ReduceOp::kSum)->wait(); });
}

void finishes_early(Transport& transport) {
  const auto group = whole(transport, std::chrono::minutes(5));
  group->barrier()->wait();
  if (transport.rank() == 1) {
    transport.leave("");
    say_error(transport, [&] { group->barrier(); });
    return;
  }
  say_error(transport, [&] { group->all_reduce(ones(1000), ReduceOp::kSum)->wait(); });
}

// A rank that leaves when its part is done takes nothing from those who come later.
void leaves_when_done(Transport& transport) {
  const auto group = whole(transport, std::chrono::minutes(1));
  const auto buffer = at::full({5}, transport.rank() == 0 ? 3.0 : 0.0, at::kFloat);
  if (transport.rank() != 0) std::this_thread::sleep_for(milliseconds(600));
  group->broadcast(buffer, 0)->wait();
  require(buffer[4].item<float>() == 3.0F, "what a rank sent before it left");
}

// Rank 1 never comes back, and rank 0 does not care: its own exit must not wait for MPI_Finalize.
void hangs(Transport& transport) {
  const auto group = whole(transport, milliseconds(500));
  group->barrier()->wait();
  if (transport.rank() == 1) std::this_thread::sleep_for(std::chrono::minutes(10));
  say_error(transport, [&] { group->barrier()->wait(); });
}

// A rank that has left long ago, and whose messages are still unread, is not missed.
void looks_late(Transport& transport) {
  const auto group = whole(transport, std::chrono::minutes(1));
  const auto small = at::full({1}, transport.rank() == 0 ? 1.0 : 0.0, at::kFloat);
  if (transport.rank() == 0) {
    group->broadcast(small, 0)->wait();
    return;
  }
  if (transport.rank() == 1) std::this_thread::sleep_for(milliseconds(1500));
  const auto alone = transport.make_group({transport.rank()}, {.name = "alone"});
  for (int i = 0; i < 100; ++i) alone->barrier()->wait();  // the news of rank 0 comes in
  if (transport.rank() == 2) std::this_thread::sleep_for(milliseconds(2500));
  group->broadcast(small, 0)->wait();
  require(small.item<float>() == 1.0F, "what a rank sent before it left");
}

void exits(Transport& transport) {
  const auto group = whole(transport, std::chrono::minutes(5));
  group->barrier()->wait();
  if (transport.rank() == 1) std::exit(0);
  say_error(transport, [&] { group->barrier()->wait(); });
}

void killed(Transport& transport) {
  const auto group = whole(transport, std::chrono::minutes(5));
  group->barrier()->wait();
  const auto work = group->all_reduce(at::full({2'000'000}, 1.0, at::kFloat), ReduceOp::kSum);
  if (transport.rank() == 1) raise(SIGKILL);
  work->wait();
  group->barrier()->wait();
}

void diverges(Transport& transport) {
  const auto group = whole(transport, std::chrono::minutes(1), true);
  group->barrier()->wait();
  const bool odd = transport.rank() == transport.size() - 1;
  say_error(transport, [&] { (odd ? group->barrier() : group->all_reduce(ones(4), ReduceOp::kSum))->wait(); });
  say_error(transport, [&] { group->barrier(); });
}

// Sizes that differ are seen without fingerprints as well.
void diverges_plainly(Transport& transport) {
  const auto group = whole(transport, std::chrono::minutes(1));
  const bool odd = transport.rank() == transport.size() - 1;
  say_error(transport, [&] {
    group->all_reduce(ones(odd ? 4 : 5), ReduceOp::kSum)->wait();
    group->barrier()->wait();
    std::this_thread::sleep_for(milliseconds(300));
    group->barrier()->wait();
  });
}

// The odd rank sees that the sizes differ before it has read that all the others made the group.
void diverges_behind(Transport& transport) {
  const auto group = whole(transport, std::chrono::minutes(1));
  const bool odd = transport.rank() == transport.size() - 1;
  if (odd) std::this_thread::sleep_for(milliseconds(500));
  say_error(transport, [&] { group->all_reduce(ones(odd ? 4 : 5), ReduceOp::kSum)->wait(); });
}

void other_message(Transport& transport) {
  const auto group = whole(transport, std::chrono::minutes(1), true);
  const auto buffer = at::zeros({6}, transport.rank() == 0 ? at::kFloat : at::kInt);
  if (transport.rank() == 0) group->send(buffer, 1, 5)->wait();
  if (transport.rank() == 1) say_error(transport, [&] { group->receive(buffer, 0, 5)->wait(); });
  if (transport.rank() == 0) say_error(transport, [&] { group->send(ones(1), 1, 1 << 20); });
}

// Operations that nobody waits for, of groups that nobody holds, still end.
void dropped(Transport& transport) {
  const auto kept = whole(transport, std::chrono::minutes(1));
  std::vector<at::Tensor> buffers;
  for (int i = 0; i < 5; ++i) {
    buffers.push_back(at::full({50'000}, 1.0, at::kFloat));
    whole(transport, std::chrono::minutes(1))->all_reduce(buffers.back(), ReduceOp::kSum);
  }
  const auto work = kept->barrier();
  transport.leave("");
  for (const auto& buffer : buffers) {
    require(buffer[49'999].item<float>() == static_cast<float>(transport.size()), "an operation that was dropped");
  }
  work->wait();
}

// More operations than a group has tags.
void many(Transport& transport) {
  const auto group = whole(transport, std::chrono::minutes(2));
  std::vector<at::Tensor> buffers;
  std::vector<WorkPtr> works;
  for (int i = 0; i < 40'000; ++i) {
    buffers.push_back(at::full({1}, static_cast<double>(i), at::kInt));
    if (transport.rank() != 0) buffers.back().fill_(-1);
    works.push_back(group->broadcast(buffers.back(), 0));
  }
  for (const auto& work : works) work->wait();
  for (int i = 0; i < 40'000; ++i) {
    require(*static_cast<int*>(buffers[static_cast<std::size_t>(i)].data_ptr()) == i, "broadcast " + std::to_string(i));
  }
}

const std::map<std::string, void (*)(Transport&)> kCases = {
    {"absent", absent},
    {"contract", contract},
    {"contract_plain", contract_plain},
    {"diverges", diverges},
    {"diverges_behind", diverges_behind},
    {"diverges_plainly", diverges_plainly},
    {"dropped", dropped},
    {"exits", exits},
    {"fails", fails},
    {"finishes_early", finishes_early},
    {"hangs", hangs},
    {"keeps_buffers", keeps_buffers},
    {"killed", killed},
    {"large", large},
    {"leaves_when_done", leaves_when_done},
    {"looks_late", looks_late},
    {"many", many},
    {"missing", missing},
    {"other_message", other_message},
};

// The program has MPI for its main thread alone, and finalises it itself.
int in_a_program_with_mpi() {
  MPI_Init(nullptr, nullptr);
  {
    const auto transport = make_mpi_transport(std::chrono::seconds(20));
    const auto group = whole(*transport, std::chrono::seconds(20));
    const auto buffer = ones(3);
    group->all_reduce(buffer, ReduceOp::kSum)->wait();
    int provided = MPI_THREAD_SINGLE;
    MPI_Query_thread(&provided);
    if (provided < MPI_THREAD_SERIALIZED) {
      std::thread([&] { say_error(*transport, [&] { group->barrier(); }); }).join();
    }
    say(*transport, "sum " + std::to_string(buffer[2].item<float>()));
  }
  MPI_Finalize();
  std::printf("finalised\n");
  return 0;
}

int run(const std::string& name) {
  if (name == "in_a_program_with_mpi") return in_a_program_with_mpi();
  const TransportPtr transport = make_mpi_transport(std::chrono::seconds(20));
  try {
    kCases.at(name)(*transport);
    transport->leave("");
    say(*transport, "done");
    return 0;
  } catch (const std::exception& error) {
    say(*transport, std::string("FAILED ") + error.what());
    transport->leave(error.what());
    return 1;
  }
}

}  // namespace
}  // namespace dtensor::testing

int main(int argc, char** argv) { return argc == 2 ? dtensor::testing::run(argv[1]) : 2; }
