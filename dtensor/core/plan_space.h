#pragma once

#include <bit>

#include "dtensor/core/plan_impl.h"
#include "dtensor/core/plan_lists.h"

// What the search for the cheapest sequence of collectives moves in: states, what is still owed from each, and the way
// from specs to states and back.
namespace dtensor {

inline constexpr std::size_t kMostSlots = 6;

struct State {
  std::array<CutLists::Index, kMostSlots> lists = {};
  Mask partial = 0;
  std::array<std::uint64_t, 2> words() const { return std::bit_cast<std::array<std::uint64_t, 2>>(*this); }
  friend bool operator==(const State& a, const State& b) {
    return a.words()[0] == b.words()[0] && a.words()[1] == b.words()[1];
  }
  std::size_t hash() const {
    const auto words = this->words();
    const std::uint64_t value = (words[0] ^ words[1] * 0x9E3779B97F4A7C15ull) * 0xD6E8FEB86659FD93ull;
    return static_cast<std::size_t>(value ^ value >> 32);
  }
};
static_assert(sizeof(State) == 16);

struct Node {
  State state;
  std::int64_t cost;
  std::int64_t slice;  // how much of it is a slice: the next one, if there is one, makes it one slice of both
  std::int64_t bytes;  // on the fullest rank
  std::int64_t bound;  // what a way through here costs at least
  std::uint32_t parent;
  Mask mask;
  StepKind kind;
  bool closed = false;
};

// A factor and what the two specs cut it by. One that neither cuts only makes everything larger.
struct Slot {
  std::size_t dim;
  std::int64_t size;
  Entries start;
  Entries goal;
};

class SearchSpace {
 protected:
  SearchSpace(const Spec& from, const Spec& to, const CostModel& cost)
      : from_(from), to_(to), cost_(cost), mesh_ndim_(from.mesh().ndim()) {}

  // False when the two specs do not fit the states.
  bool prepare();
  void prepare_bound();
  // And the messages of the mesh dims that are Partial or cut the wrong factor, each by a gather, a reduction or an
  // all-to-all at least; a permute where a cut is only out of place. What is `enough` or more need not be exact.
  std::int64_t at_least(const State& state, std::int64_t enough) const;
  std::int64_t bytes_of(const State& state) const;
  const GroupCost& group(Mask mask) {
    return mask < groups_.size() && groups_[mask] ? *groups_[mask] : new_group(mask);
  }
  std::int64_t size_of_group(Mask mask) const { return mask < sizes_.size() ? sizes_[mask] : multiplied(mask); }
  // The steps along a path, its start first; none when a state on it cannot be said as a spec.
  std::optional<std::vector<Step>> steps_of(std::vector<Node> path) const;

  const Spec& from_;
  const Spec& to_;
  const CostModel& cost_;
  const std::int64_t mesh_ndim_;

  InlineVec<Slot, 4> slots_;
  InlineVec<std::size_t, 4> used_;  // slots that the states have lists for
  ListContext context_;
  std::vector<CutLists> lists_;
  std::array<std::size_t, kMostListed> goal_slot_ = {};
  InlineVec<Link, 4> links_;
  Dims rounds_;
  std::int64_t unit_ = 1;  // bytes of everything outside the used slots
  // What a KiB costs more over the links of a level than over those of the one before.
  std::array<std::int64_t, kMostLevels> dearer_ = {};
  std::int64_t least_message_ = kForever;
  bool mixed_links_ = false;
  bool even_ = false;
  Mask active_ = 0;
  Mask goal_mask_ = 0;
  Mask embedded_ = 0;
  Mask initially_free_ = 0;
  State start_;
  State goal_;
  std::vector<std::optional<GroupCost>> groups_;
  InlineVec<std::int64_t, 16> sizes_;  // of the first groups

  // For the bound.
  std::array<Mask, kMostSlots> goal_cuts_ = {};
  std::int64_t all_bytes_ = 0;
  Mask gathered_ = 0;  // what is reduced over these must be handed round as well: no permute can take it over
  std::int64_t source_bytes_ = 0;
  std::int64_t target_bytes_ = 0;
  std::int64_t ranks_ = 1;
  std::int64_t planes_ = 1;  // what stays Partial happens once for each of its parts
  std::int64_t least_size_ = kForever;
  struct Level {
    std::int64_t block = 1;    // ranks
    std::int64_t planes = 1;   // of them, that hold other parts for good
    std::int64_t wanters = 1;  // blocks of a plane that want the same element
    std::int64_t target = 0;   // bytes of the fullest block at the goal
    std::array<std::int64_t, kMostSamples> wanted = {};
  };
  std::array<Level, kMostLevels> levels_ = {};

 private:
  const GroupCost& new_group(Mask mask);
  std::int64_t multiplied(Mask mask) const;
  void add_mesh_dim(std::int64_t m);
  // The factors of a tensor dim as slots: as they are when both specs have the same ones, else as one.
  bool add_slots(std::size_t d);
  bool add_slot(std::size_t d, const Factor& a, const Factor& b);
  // Only factors that are cut before or after are worth looking at, and the largest other one, to park cuts in.
  bool choose_slots();
  // Do all cuts divide what they cut, wherever they go? Then what a rank holds depends on who cuts, not on where, and
  // the search makes no other lists.
  bool all_even() const;
  // Coordinates that tell the mesh dims apart by their first and last index: any two of the first four differ in one of
  // them. With first and last exchanged they would say the same where cuts are even; where not, the first of all ranks
  // is one more.
  void choose_samples();
  // Blocks of ranks with faster links inside than between them.
  void choose_levels();
  // The bytes that each rank of a block must still receive from other blocks on average, whatever the way. Of an
  // element in k parts that w blocks want: k-1 receives until the parts have met, w-1 more, and one where no block that
  // wants it has a part; shared by all ranks at best. A cut that goes to another factor of evenly cut ones leaves one
  // element in its size where it is wanted.
  struct Standing {
    std::array<const CutList*, kMostSlots> lists;
    Mask partial = 0;  // that is to end
    Mask away = 0;     // cuts that the goal has in other factors
    Mask home = 0;     // cuts in the factor where the goal has them
  };
  std::int64_t bytes_owed(const Standing& now, std::size_t level) const;
  std::optional<Spec> spec_of(const State& state) const;
  // One step more: where the mesh dims that are to be embedded have nothing to do any more, and a rank holds least.
  void embed_where_smallest(std::vector<Node>& path) const;
};

}  // namespace dtensor
