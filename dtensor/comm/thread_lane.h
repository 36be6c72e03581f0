#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "dtensor/comm/moves.h"

namespace dtensor {

// The quick way for small collectives of a group of threads: a member copies what it gives into a slot of its own and
// publishes it with one store; when all have, each takes what it wants from the slots. No mutex, no memory to ask for,
// and one cache line or two that go from core to core.
//
// A member publishes only when everything it issued before has ended. So when it has ended collective s, all members
// have published s or have met in ThreadGroup's operation, and have therefore ended s-1: two slots each are enough,
// used in turn, and no member has more than one collective here. A member that does not wait is no obstacle: what it
// gives is there, and its own result is worked out by whoever needs it to have ended (ThreadGroup::end_what_is_behind),
// or at its next call.
//
// Each member's collective is either open, taken (its result is being worked out by the one thread that took it) or
// moved to an operation of the group, which serves all that is not small or not quick.
class ThreadLane {
 public:
  static constexpr std::size_t kSlotBytes = 16 << 10;

  explicit ThreadLane(std::size_t members);

  // Held while a member issues: its calls come one after the other.
  std::mutex& issuing(std::size_t member) { return members_[member].issuing; }
  std::uint64_t next_sequence(std::size_t member) { return members_[member].next++; }

  // Is it small? (Where members may think differently, of uneven all-to-alls, they meet in an operation.)
  bool carries(const Post& post) const;
  void publish(std::size_t member, Post post);

  bool is_published(std::size_t member, std::uint64_t sequence) const {
    return slots_ && slot(member, sequence).sequence.load(std::memory_order_seq_cst) == sequence;
  }
  bool all_published(std::uint64_t sequence) const;
  // Pre: all have published it.
  bool all_agree(std::uint64_t sequence) const;
  // The last collective that this member published and what it was; 0: none.
  std::uint64_t newest(std::size_t member) const;
  Fingerprint published(std::size_t member, std::uint64_t sequence) const;

  bool is_open(std::size_t member, std::uint64_t sequence) const { return state(member) == of(sequence, kOpen); }
  bool is_here(std::size_t member, std::uint64_t sequence) const {
    return is_open(member, sequence) || state(member) == of(sequence, kTaken);
  }
  bool was_moved(std::size_t member, std::uint64_t sequence) const { return state(member) == of(sequence, kMoved); }
  bool has_ended(std::size_t member, std::uint64_t sequence) const {
    return members_[member].ended.load(std::memory_order_acquire) >= sequence;
  }

  // Ends it for this member, unless another thread has taken it or it was moved away. Pre: all have published it, and
  // agree.
  bool try_end(std::size_t member, std::uint64_t sequence);

  // To an operation of the group, and back. False: somebody has taken it, or it was moved before.
  bool move_away(std::size_t member, std::uint64_t sequence);
  void move_back(std::size_t member, std::uint64_t sequence);
  // Pre: it was moved away.
  Post take_post(std::size_t member) { return std::move(members_[member].post); }

 private:
  enum State : std::uint64_t { kOpen, kTaken, kMoved };

  // Written by its member, read by all. The fingerprint shares the first cache line with the sequence number.
  struct alignas(128) Slot {
    std::atomic<std::uint64_t> sequence{0};
    std::array<std::atomic<std::uint64_t>, Fingerprint::kWords> words = {};
    std::byte bytes[kSlotBytes];
  };
  // Hardly ever seen by others.
  struct alignas(128) Member {
    std::mutex issuing;
    std::uint64_t next = 1;                           // guarded by issuing
    std::atomic<std::uint64_t> state{of(0, kMoved)};  // of its last collective here
    std::atomic<std::uint64_t> ended{0};              // the last collective that ended here
    Post post;                                        // until it has ended or was taken away
  };

  static constexpr std::uint64_t of(std::uint64_t sequence, State state) { return sequence << 2 | state; }
  std::uint64_t state(std::size_t member) const { return members_[member].state.load(std::memory_order_acquire); }
  Slot& slot(std::size_t member, std::uint64_t sequence) const { return slots_[2 * member + sequence % 2]; }
  const std::byte* bytes(std::size_t member, std::uint64_t sequence) const { return slot(member, sequence).bytes; }

  void take_results(std::size_t member, const Post& post) const;

  std::vector<Member> members_;
  std::unique_ptr<Slot[]> slots_;  // none in a group too large for it
};

}  // namespace dtensor
