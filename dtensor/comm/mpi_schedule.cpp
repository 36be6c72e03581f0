#include <algorithm>

#include "dtensor/comm/mpi_schedule_impl.h"

namespace dtensor::mpi_impl {
namespace {

using Way = Transfer::Way;

// Up to so many ranks, one round of messages to everybody beats several rounds of fewer.
constexpr std::int64_t kFewRanks = 4;
constexpr std::int64_t kSmallGather = 32 * 1024;
constexpr std::int64_t kSmallBroadcast = 128 * 1024;

void add(Round& round, Way way, std::int64_t peer, char* data, std::int64_t bytes) {
  if (bytes > 0) round.transfers.push_back({way, peer, data, bytes});
}

// The parts [first, first + count) modulo the number of ranks: at most two runs of the buffer.
void add_parts(Round& round, Way way, std::int64_t peer, char* base, const Parts& parts, std::int64_t first,
               std::int64_t count) {
  const auto size = static_cast<std::int64_t>(parts.bytes.size());
  const auto add_run = [&](std::int64_t begin, std::int64_t end) {
    if (begin >= end) return;
    const std::int64_t from = parts.offsets[begin];
    add(round, way, peer, base + from, parts.offsets[end - 1] + parts.bytes[end - 1] - from);
  };
  first %= size;
  add_run(first, std::min(first + count, size));
  add_run(0, first + count - size);
}

void append_round(Schedule& schedule, Round round) {
  if (!round.transfers.empty()) schedule.push_back(std::move(round));
}

}  // namespace

Parts::Parts(const std::vector<std::int64_t>& counts, std::int64_t item) {
  offsets.reserve(counts.size());
  bytes.reserve(counts.size());
  for (const std::int64_t count : counts) {
    offsets.push_back(total);
    bytes.push_back(count * item);
    total += count * item;
  }
}

std::vector<std::int64_t> even_counts(std::int64_t count, std::int64_t ranks) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(ranks), count / ranks);
  for (std::int64_t i = 0; i < count % ranks; ++i) ++counts[static_cast<std::size_t>(i)];
  return counts;
}

void append_all_gather(Schedule& schedule, Place place, char* base, const Parts& parts) {
  const auto [me, size] = place;
  if (size > kFewRanks && parts.total <= kSmallGather) {
    for (std::int64_t distance = 1; distance < size; distance *= 2) {
      const std::int64_t count = std::min(distance, size - distance);
      Round round;
      add_parts(round, Way::kReceive, (me + distance) % size, base, parts, me + distance, count);
      add_parts(round, Way::kSend, (me - distance + size) % size, base, parts, me, count);
      append_round(schedule, std::move(round));
    }
    return;
  }
  Round round;
  for (std::int64_t step = 1; step < size; ++step) {
    const std::int64_t from = (me - step + size) % size;
    add(round, Way::kReceive, from, base + parts.offsets[from], parts.bytes[from]);
  }
  for (std::int64_t step = 1; step < size; ++step) {
    add(round, Way::kSend, (me + step) % size, base + parts.offsets[me], parts.bytes[me]);
  }
  append_round(schedule, std::move(round));
}

void append_all_to_all(Schedule& schedule, Place place, char* output, const Parts& out, char* input, const Parts& in) {
  const auto [me, size] = place;
  Round round;
  for (std::int64_t step = 1; step < size; ++step) {
    const std::int64_t from = (me - step + size) % size;
    add(round, Way::kReceive, from, output + out.offsets[from], out.bytes[from]);
  }
  for (std::int64_t step = 1; step < size; ++step) {
    const std::int64_t to = (me + step) % size;
    add(round, Way::kSend, to, input + in.offsets[to], in.bytes[to]);
  }
  append_round(schedule, std::move(round));
}

void append_broadcast(Schedule& schedule, Place place, char* base, std::int64_t bytes, std::int64_t root) {
  const auto [me, size] = place;
  if (size > 2 && bytes > kSmallBroadcast) {
    const Parts parts(even_counts(bytes, size), 1);
    append_scatter(schedule, place, base + parts.offsets[me], base, parts, root);
    Round round;
    for (std::int64_t step = 1; step < size && me != root; ++step) {
      const std::int64_t from = (me - step + size) % size;
      add(round, Way::kReceive, from, base + parts.offsets[from], parts.bytes[from]);
    }
    for (std::int64_t step = 1; step < size; ++step) {
      const std::int64_t to = (me + step) % size;
      if (to != root) add(round, Way::kSend, to, base + parts.offsets[me], parts.bytes[me]);
    }
    append_round(schedule, std::move(round));
    return;
  }
  // A binomial tree over the places behind the root: 0 -> 4, 2, 1; 4 -> 6, 5; 2 -> 3; 6 -> 7.
  const std::int64_t place_behind = (me - root + size) % size;
  std::int64_t reach = 1;  // how far behind me my last child may be
  while (reach < size && (place_behind & reach) == 0) reach *= 2;
  if (place_behind != 0) {
    Round round;
    add(round, Way::kReceive, (me - reach + size) % size, base, bytes);
    append_round(schedule, std::move(round));
  }
  Round round;
  for (std::int64_t step = reach / 2; step > 0; step /= 2) {
    if (place_behind + step < size) add(round, Way::kSend, (me + step) % size, base, bytes);
  }
  append_round(schedule, std::move(round));
}

void append_scatter(Schedule& schedule, Place place, char* output, char* input, const Parts& parts, std::int64_t root) {
  const auto [me, size] = place;
  Round round;
  if (me != root) {
    add(round, Way::kReceive, root, output, parts.bytes[me]);
  } else {
    for (std::int64_t step = 1; step < size; ++step) {
      const std::int64_t to = (me + step) % size;
      add(round, Way::kSend, to, input + parts.offsets[to], parts.bytes[to]);
    }
  }
  append_round(schedule, std::move(round));
}

void append_barrier(Schedule& schedule, Place place) {
  const auto [me, size] = place;
  for (std::int64_t distance = 1; distance < size; distance *= 2) {
    schedule.push_back({{{Way::kReceive, (me - distance + size) % size, nullptr, 0},
                         {Way::kSend, (me + distance) % size, nullptr, 0}}});
  }
}

}  // namespace dtensor::mpi_impl
