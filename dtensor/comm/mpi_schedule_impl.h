#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace dtensor::mpi_impl {

// One message between this rank and another of its group.
struct Transfer {
  enum class Way : std::uint8_t { kSend, kReceive };
  Way way;
  std::int64_t peer;
  char* data;
  std::int64_t bytes;
};

// Messages that are under way together. When all have ended, `after` runs and the next round begins.
struct Round {
  std::vector<Transfer> transfers = {};
  std::function<void()> after = {};
};
using Schedule = std::vector<Round>;

// A rank's place in its group.
struct Place {
  std::int64_t rank;
  std::int64_t size;
};

// Where each rank's part of a buffer begins and how long it is, in bytes.
struct Parts {
  std::vector<std::int64_t> offsets;
  std::vector<std::int64_t> bytes;
  std::int64_t total = 0;

  Parts(const std::vector<std::int64_t>& counts, std::int64_t item);
};

// `count` items cut into one part per rank, as evenly as can be.
std::vector<std::int64_t> even_counts(std::int64_t count, std::int64_t ranks);

// Each function appends what one rank does. Both sides of a message follow from the same arguments; empty messages are
// not sent, save in a barrier.

// Part r of `base` comes from rank r. Small ones in log2(ranks) rounds, others in one.
void append_all_gather(Schedule& schedule, Place place, char* base, const Parts& parts);
// Part r of `input` goes to rank r, part r of `output` comes from rank r; a rank's own part is left alone.
void append_all_to_all(Schedule& schedule, Place place, char* output, const Parts& out, char* input, const Parts& in);
// Small ones along a tree; others by a scatter and an all-gather, which sends everything once.
void append_broadcast(Schedule& schedule, Place place, char* base, std::int64_t bytes, std::int64_t root);
// Part r of the root's `input` goes to rank r's `output`; the root's own part is left alone.
void append_scatter(Schedule& schedule, Place place, char* output, char* input, const Parts& parts, std::int64_t root);
void append_barrier(Schedule& schedule, Place place);

}  // namespace dtensor::mpi_impl
