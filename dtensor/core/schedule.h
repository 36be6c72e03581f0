#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "dtensor/core/packing.h"
#include "dtensor/core/plan.h"

namespace dtensor {

// What one rank does to play one step of a plan: which memory goes where, in elements. Nothing here moves anything;
// runtime/execute plays it over a communicator.

// One collective call. Buffers are packed: the messages to (from) the group's members one after the other.
struct ScheduledCall {
  std::vector<std::int64_t> send_counts;  // per member; of an all-gather what the members send to everybody
  std::vector<std::int64_t> recv_counts;
  std::int64_t send_size = 0;
  std::int64_t recv_size = 0;
  Copies pack;                     // the local tensor to the send buffer
  Copies unpack;                   // the receive buffer to the new local tensor
  bool sends_in_place = false;     // the local tensor is the send buffer
  bool receives_in_place = false;  // the new local tensor is the receive buffer
  // Of an exchange that reduces: the parts of `count` elements at these places of the receive buffer meet in the first.
  struct Meeting {
    std::vector<std::int64_t> parts;
    std::int64_t count = 0;
  };
  std::vector<Meeting> meetings;
};

// Where memory is shared: what to read from the local tensors of these members, reduced in their order if several.
struct ScheduledRead {
  std::vector<std::int64_t> members;
  Copies copies;
};

// Across meshes: one piece from members[0] of its own small group to all the others.
struct ScheduledBroadcast {
  std::vector<std::int64_t> ranks;
  bool sends = false;
  std::int64_t count = 0;
  Copies copies;  // to the buffer of the one who sends, from the buffer of the others
};

struct ScheduledStep {
  StepKind kind = StepKind::kSlice;
  std::size_t index = 0;  // in the plan
  // The group's world ranks in its order; empty for local steps, and when this rank takes no part.
  std::vector<std::int64_t> ranks;
  std::size_t me = 0;  // my place among them
  std::optional<ReduceOp> op = {};
  std::int64_t scale = 1;  // the average over the group times this is the wanted reduction, when op is kAvg
  bool keeps = true;       // of an embedding: do I keep the value, or hold the identity?
  bool target = true;      // do I hold anything afterwards?
  Dims shape;              // of what I hold afterwards
  Dims stride;
  Copies copies;  // of local steps, and of what goes from me to myself in broadcasts
  std::vector<ScheduledCall> calls;
  std::vector<ScheduledRead> reads;  // instead of calls
  std::vector<ScheduledBroadcast> broadcasts;
  // Elements that come to me from others, by what is scheduled.
  std::int64_t received() const;
};

// The steps of a plan as this world rank plays them; slices that another step follows are read in place and do not
// appear. shared: may the members of a group of these ranks read each other's memory?
using SharesMemory = std::function<bool(const std::vector<std::int64_t>& ranks)>;
std::vector<ScheduledStep> schedule(const Plan& plan, std::int64_t rank, const SharesMemory& shared);

}  // namespace dtensor
