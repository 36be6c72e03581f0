#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <numeric>
#include <string>
#include <tuple>

#include "dtensor/comm/mpi_schedule_impl.h"

namespace dtensor::mpi_impl {
namespace {

// Plays the schedules of all ranks without MPI: messages between two ranks arrive in the order in which they were sent.
// True when every rank comes to its end, every message is received and has the size that its receiver expects.
bool play(const std::vector<Schedule>& schedules) {
  const std::size_t size = schedules.size();
  std::map<std::pair<std::size_t, std::size_t>, std::deque<std::string>> wires;
  std::vector<std::size_t> round(size, 0), received(size, 0);
  std::vector<bool> sent(size, false);
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t me = 0; me < size; ++me) {
      if (round[me] == schedules[me].size()) continue;
      const auto& transfers = schedules[me][round[me]].transfers;
      std::vector<const Transfer*> receives;
      for (const Transfer& transfer : transfers) {
        if (transfer.way == Transfer::Way::kReceive) receives.push_back(&transfer);
        if (transfer.way == Transfer::Way::kReceive || sent[me]) continue;
        wires[{me, transfer.peer}].emplace_back(transfer.data, static_cast<std::size_t>(transfer.bytes));
      }
      sent[me] = true;
      while (received[me] < receives.size()) {
        const Transfer& transfer = *receives[received[me]];
        auto& wire = wires[{transfer.peer, me}];
        if (wire.empty()) break;
        if (static_cast<std::int64_t>(wire.front().size()) != transfer.bytes) return false;
        wire.front().copy(transfer.data, wire.front().size());
        wire.pop_front();
        ++received[me];
        moved = true;
      }
      if (received[me] < receives.size()) continue;
      if (schedules[me][round[me]].after) schedules[me][round[me]].after();
      ++round[me];
      received[me] = 0;
      sent[me] = false;
      moved = true;
    }
  }
  for (const auto& [ends, wire] : wires) {
    if (!wire.empty()) return false;
  }
  for (std::size_t me = 0; me < size; ++me) {
    if (round[me] != schedules[me].size()) return false;
  }
  return true;
}

// What rank `rank` holds at byte i.
char byte_of(std::int64_t rank, std::int64_t i) { return static_cast<char>((rank * 31 + i * 7) % 127 + 1); }

std::vector<std::vector<std::int64_t>> count_lists(std::int64_t size) {
  std::vector<std::vector<std::int64_t>> lists(4, std::vector<std::int64_t>(static_cast<std::size_t>(size), 0));
  for (std::int64_t r = 0; r < size; ++r) {
    lists[0][r] = 3;
    lists[1][r] = r % 3;
    lists[2][r] = 20'000 + r;
    lists[3][r] = r == size / 2 ? 4 : 0;
  }
  return lists;
}

class MpiSchedule : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(MpiSchedule, AllGather) {
  const std::int64_t size = GetParam();
  for (const auto& counts : count_lists(size)) {
    const Parts parts(counts, 1);
    std::string want;
    for (std::int64_t r = 0; r < size; ++r) {
      for (std::int64_t i = 0; i < counts[r]; ++i) want += byte_of(r, i);
    }
    std::vector<std::string> buffers(static_cast<std::size_t>(size), std::string(want.size(), '\0'));
    std::vector<Schedule> schedules(static_cast<std::size_t>(size));
    for (std::int64_t r = 0; r < size; ++r) {
      want.copy(buffers[r].data() + parts.offsets[r], counts[r], parts.offsets[r]);
      append_all_gather(schedules[r], {r, size}, buffers[r].data(), parts);
    }
    ASSERT_TRUE(play(schedules));
    for (const auto& buffer : buffers) EXPECT_EQ(buffer, want);
  }
}

TEST_P(MpiSchedule, SmallAllGatherTakesFewRounds) {
  const std::int64_t size = GetParam();
  std::string buffer(static_cast<std::size_t>(size), 'x');
  Schedule schedule;
  append_all_gather(schedule, {0, size}, buffer.data(), Parts(std::vector<std::int64_t>(buffer.size(), 1), 1));
  std::size_t rounds = 0;
  while ((std::int64_t{1} << rounds) < size) ++rounds;
  EXPECT_LE(schedule.size(), rounds);
}

TEST_P(MpiSchedule, Broadcast) {
  const std::int64_t size = GetParam();
  for (const std::int64_t bytes : {0, 1, 1000, 300'001}) {
    for (std::int64_t root = 0; root < size; ++root) {
      std::vector<std::string> buffers(static_cast<std::size_t>(size),
                                       std::string(static_cast<std::size_t>(bytes), '\0'));
      for (std::int64_t i = 0; i < bytes; ++i) buffers[root][i] = byte_of(root, i);
      const std::string want = buffers[root];
      std::vector<Schedule> schedules(static_cast<std::size_t>(size));
      std::int64_t root_sends = 0;
      for (std::int64_t r = 0; r < size; ++r) {
        append_broadcast(schedules[r], {r, size}, buffers[r].data(), bytes, root);
      }
      for (const Round& round : schedules[root]) {
        for (const Transfer& transfer : round.transfers) root_sends += transfer.bytes;
      }
      ASSERT_TRUE(play(schedules)) << bytes << " bytes from " << root;
      for (const auto& buffer : buffers) ASSERT_EQ(buffer, want) << bytes << " bytes from " << root;
      if (bytes > 200'000) {
        EXPECT_LE(root_sends, 2 * bytes) << "a large one is not sent to everybody";
      }
    }
  }
}

TEST_P(MpiSchedule, AllToAllAndScatter) {
  const std::int64_t size = GetParam();
  const auto count = [](std::int64_t from, std::int64_t to) { return (from + 2 * to) % 4; };
  std::vector<std::string> inputs(static_cast<std::size_t>(size)), outputs = inputs, wants = inputs, scattered = inputs;
  std::vector<Schedule> exchange(static_cast<std::size_t>(size)), scatter = exchange;
  for (std::int64_t r = 0; r < size; ++r) {
    for (std::int64_t peer = 0; peer < size; ++peer) {
      for (std::int64_t i = 0; i < count(r, peer); ++i) inputs[r] += byte_of(r * size + peer, i);
      for (std::int64_t i = 0; i < count(peer, r); ++i) {
        wants[r] += peer == r ? '\0' : byte_of(peer * size + r, i);
      }
    }
    outputs[r].assign(wants[r].size(), '\0');
  }
  const std::int64_t root = size - 1;
  for (std::int64_t r = 0; r < size; ++r) {
    std::vector<std::int64_t> send, receive, from_root;
    for (std::int64_t peer = 0; peer < size; ++peer) {
      send.push_back(count(r, peer));
      receive.push_back(count(peer, r));
      from_root.push_back(count(root, peer));
    }
    append_all_to_all(exchange[r], {r, size}, outputs[r].data(), Parts(receive, 1), inputs[r].data(), Parts(send, 1));
    scattered[r].assign(static_cast<std::size_t>(from_root[r]), '\0');
    append_scatter(scatter[r], {r, size}, scattered[r].data(), inputs[r].data(), Parts(from_root, 1), root);
  }
  ASSERT_TRUE(play(exchange));
  ASSERT_TRUE(play(scatter));
  EXPECT_EQ(outputs, wants);
  for (std::int64_t r = 0; r < root; ++r) {
    for (std::int64_t i = 0; i < count(root, r); ++i) EXPECT_EQ(scattered[r][i], byte_of(root * size + r, i));
  }
}

// Nobody is through before everybody has come: without one rank, no other ends.
TEST_P(MpiSchedule, BarrierNeedsEverybody) {
  const std::int64_t size = GetParam();
  std::vector<Schedule> schedules(static_cast<std::size_t>(size));
  for (std::int64_t r = 0; r < size; ++r) append_barrier(schedules[r], {r, size});
  EXPECT_TRUE(play(schedules));
  for (std::int64_t late = 0; late < size && size > 1; ++late) {
    std::int64_t through = 0;
    std::vector<Schedule> others = schedules;
    others[late].assign(1, Round{{{Transfer::Way::kReceive, late, nullptr, 0}}});  // waits for itself
    for (std::int64_t r = 0; r < size; ++r) {
      if (r != late) others[r].back().after = [&through] { ++through; };
    }
    EXPECT_FALSE(play(others));
    EXPECT_EQ(through, 0) << "without rank " << late;
  }
}

TEST_P(MpiSchedule, EvenCountsAddUp) {
  const auto counts = even_counts(1000, GetParam());
  EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}), 1000);
  EXPECT_LE(counts.front() - counts.back(), 1);
}

INSTANTIATE_TEST_SUITE_P(Ranks, MpiSchedule, ::testing::Values(1, 2, 3, 4, 5, 7, 8, 13, 32),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace dtensor::mpi_impl
