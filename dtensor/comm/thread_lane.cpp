#include "dtensor/comm/thread_lane.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "dtensor/comm/reduce.h"
#include "dtensor/core/inline_vec.h"

namespace dtensor {
namespace {

// Everybody reads everybody's slot.
constexpr std::size_t kMostMembers = 16;

std::size_t bytes_of(const at::Tensor& tensor) { return tensor.defined() ? tensor.nbytes() : 0; }

// What a member gives, if anything: of an all-reduce and a broadcast what lies in its buffer.
const at::Tensor* given(const Post& post, std::size_t member) {
  const Fingerprint& what = post.fingerprint;
  const bool rooted = what.operation == Operation::kBroadcast || what.operation == Operation::kScatter;
  if (rooted && static_cast<std::size_t>(what.root) != member) return nullptr;
  const bool in_place = what.operation == Operation::kAllReduce || what.operation == Operation::kBroadcast;
  const at::Tensor& tensor = in_place ? post.output : post.input;
  return bytes_of(tensor) == 0 ? nullptr : &tensor;
}

// The counts of an all-to-all, which only who sends knows, lie before its data.
std::size_t counts_bytes(const Post& post) { return post.send_counts.size() * sizeof(std::int64_t); }

std::int64_t sum_before(const std::int64_t* counts, std::size_t index) {
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < index; ++i) sum += counts[i];
  return sum;
}

void copy(void* to, const std::byte* from, std::int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

}  // namespace

ThreadLane::ThreadLane(std::size_t members) : members_(members) {
  // Slots are not filled with anything: memory that nobody uses costs nothing.
  if (members <= kMostMembers) slots_.reset(new Slot[2 * members]);
}

bool ThreadLane::carries(const Post& post) const {
  if (!slots_) return false;
  const Fingerprint& what = post.fingerprint;
  if (what.operation == Operation::kBarrier) return true;
  if (what.operation == Operation::kAllToAll) return counts_bytes(post) + bytes_of(post.input) <= kSlotBytes;
  // Who reduces reads all of it from everybody.
  const std::size_t readers = what.op ? (members_.size() + 1) / 2 : 1;
  return static_cast<std::size_t>(what.numel) <= kSlotBytes / readers / c10::elementSize(what.dtype);
}

void ThreadLane::publish(std::size_t member, Post post) {
  const std::uint64_t sequence = post.fingerprint.sequence;
  Slot& mine = slot(member, sequence);
  const auto words = post.fingerprint.words();
  for (std::size_t i = 0; i < words.size(); ++i) mine.words[i].store(words[i], std::memory_order_relaxed);
  const std::size_t counts = counts_bytes(post);
  if (counts > 0) std::memcpy(mine.bytes, post.send_counts.data(), counts);
  if (const at::Tensor* tensor = given(post, member)) {
    std::memcpy(mine.bytes + counts, tensor->data_ptr(), tensor->nbytes());
  }
  Member& me = members_[member];
  me.post = std::move(post);
  me.state.store(of(sequence, kOpen), std::memory_order_relaxed);
  mine.sequence.store(sequence, std::memory_order_seq_cst);
}

bool ThreadLane::all_published(std::uint64_t sequence) const {
  for (std::size_t member = 0; member < members_.size(); ++member) {
    if (slot(member, sequence).sequence.load(std::memory_order_acquire) != sequence) return false;
  }
  return true;
}

bool ThreadLane::all_agree(std::uint64_t sequence) const {
  constexpr std::size_t kBalance = Fingerprint::kWords - 1;  // adds up to nothing, the others are equal
  const auto word = [&](std::size_t member, std::size_t i) {
    return slot(member, sequence).words[i].load(std::memory_order_relaxed);
  };
  std::uint64_t balance = word(0, kBalance), differences = 0;
  for (std::size_t member = 1; member < members_.size(); ++member) {
    for (std::size_t i = 0; i < kBalance; ++i) differences |= word(member, i) ^ word(0, i);
    balance += word(member, kBalance);
  }
  return differences == 0 && balance == 0;
}

std::uint64_t ThreadLane::newest(std::size_t member) const {
  if (!slots_) return 0;
  const auto sequence = [&](std::uint64_t which) {
    return slot(member, which).sequence.load(std::memory_order_acquire);
  };
  return std::max(sequence(0), sequence(1));
}

Fingerprint ThreadLane::published(std::size_t member, std::uint64_t sequence) const {
  std::array<std::uint64_t, Fingerprint::kWords> words;
  for (std::size_t i = 0; i < words.size(); ++i) {
    words[i] = slot(member, sequence).words[i].load(std::memory_order_relaxed);
  }
  return Fingerprint::from_words(words);
}

bool ThreadLane::try_end(std::size_t member, std::uint64_t sequence) {
  Member& me = members_[member];
  std::uint64_t open = of(sequence, kOpen);
  if (!me.state.compare_exchange_strong(open, of(sequence, kTaken), std::memory_order_acq_rel)) return false;
  const Post post = std::move(me.post);
  take_results(member, post);
  me.ended.store(sequence, std::memory_order_release);
  return true;
}

void ThreadLane::take_results(std::size_t member, const Post& post) const {
  const Fingerprint& what = post.fingerprint;
  if (what.operation == Operation::kBarrier) return;
  const auto element = static_cast<std::int64_t>(c10::elementSize(what.dtype));
  const std::int64_t* counts = post.recv_counts.data();
  char* out = bytes_of(post.output) == 0 ? nullptr : static_cast<char*>(post.output.data_ptr());
  const auto from = [&](std::size_t peer) { return bytes(peer, what.sequence); };
  const auto reduce = [&](std::int64_t offset, std::int64_t count) {
    InlineVec<const void*, kMostMembers> parts;
    for (std::size_t peer = 0; peer < members_.size(); ++peer) parts.push_back(from(peer) + offset * element);
    reduce_parts(*what.op, what.dtype, out, parts, count);
  };
  switch (what.operation) {
    case Operation::kAllReduce:
      return reduce(0, what.numel);
    case Operation::kReduceScatter:
      return reduce(sum_before(counts, member), counts[member]);
    case Operation::kBroadcast:
      if (const auto root = static_cast<std::size_t>(what.root); root != member) {
        copy(out, from(root), what.numel * element);
      }
      return;
    case Operation::kScatter:
      return copy(out, from(static_cast<std::size_t>(what.root)) + sum_before(counts, member) * element,
                  counts[member] * element);
    case Operation::kAllGather:
    case Operation::kAllToAll:
      for (std::size_t peer = 0; peer < members_.size(); ++peer) {
        const std::byte* source = from(peer);
        if (what.operation == Operation::kAllToAll) {
          const auto* sent = reinterpret_cast<const std::int64_t*>(source);
          source += counts_bytes(post) + static_cast<std::size_t>(sum_before(sent, member) * element);
        }
        copy(out, source, counts[peer] * element);
        out += counts[peer] * element;
      }
      return;
    case Operation::kSend:
    case Operation::kReceive:
    case Operation::kBarrier:
      return;
  }
}

bool ThreadLane::move_away(std::size_t member, std::uint64_t sequence) {
  std::uint64_t open = of(sequence, kOpen);
  return members_[member].state.compare_exchange_strong(open, of(sequence, kMoved), std::memory_order_acq_rel);
}

void ThreadLane::move_back(std::size_t member, std::uint64_t sequence) {
  members_[member].state.store(of(sequence, kOpen), std::memory_order_release);
}

}  // namespace dtensor
