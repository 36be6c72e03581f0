#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <optional>
#include <vector>

#include "dtensor/core/dim_layout.h"

// The lists of cuts that a factor can have while the cheapest sequence is searched for. Each is made once and knows
// what the search asks for again and again, so that a state is a few small numbers.
namespace dtensor {

using Mask = std::uint32_t;  // of mesh dims

inline constexpr std::size_t kMostListed = 16;     // mesh dims
inline constexpr std::uint8_t kFirstVirtual = 16;  // entries below are mesh dims, from here on they are virtual cuts
inline constexpr std::size_t kMostSamples = 3;
inline constexpr std::size_t kMostLevels = 3;

// A list of cuts, outermost first, one byte each: 1 + the entry, so that 0 is the end.
class Entries {
 public:
  static constexpr std::size_t kMost = 8;

  std::size_t size() const { return static_cast<std::size_t>(71 - std::countl_zero(word_)) / 8; }
  std::uint8_t operator[](std::size_t i) const { return static_cast<std::uint8_t>((word_ >> 8 * i & 0xff) - 1); }
  bool is_virtual(std::size_t i) const { return (*this)[i] >= kFirstVirtual; }
  void set(std::size_t i, std::uint8_t entry) {
    word_ = (word_ & ~(std::uint64_t{0xff} << 8 * i)) | std::uint64_t{entry + 1u} << 8 * i;
  }
  // Pre: fewer than kMost.
  void push(std::uint8_t entry) { set(size(), entry); }
  void cut_off_virtuals() {
    for (std::size_t n = size(); n > 0 && is_virtual(n - 1); --n) word_ &= ~(std::uint64_t{0xff} << 8 * (n - 1));
  }
  bool has(std::uint8_t entry) const {
    for (std::size_t i = 0; i < size(); ++i) {
      if ((*this)[i] == entry) return true;
    }
    return false;
  }
  std::uint64_t word() const { return word_; }
  friend bool operator==(const Entries&, const Entries&) = default;

 private:
  std::uint64_t word_ = 0;
};

// What all factors share: the sizes of the mesh dims and of the virtual cuts, and a few coordinates to compare with the
// goal at.
struct ListContext {
  Dims sizes;
  InlineVec<std::int64_t, 8> virtuals;
  InlineVec<Dims, kMostSamples> samples;
  // Mesh dims with faster links than those of a level: the ranks along them are one block. None at the first level.
  InlineVec<Mask, kMostLevels> within = {0};
  bool even = false;    // only lists that cut evenly are made
  bool binary = false;  // and every count is a power of two: see CutLists::bits_of

  std::int64_t count(std::uint8_t entry) const {
    return entry < kFirstVirtual ? sizes[entry] : virtuals[entry - kFirstVirtual];
  }
  std::uint8_t virtual_entry(std::int64_t count);
};

// What the block of a sample holds of a factor, now and also at the goal. The first level's blocks are single ranks.
struct LevelSizes {
  std::int64_t held = 0;  // by the fullest block
  std::array<std::int64_t, kMostSamples> common = {};
};

struct CutList {
  Entries entries;
  std::array<LevelSizes, kMostLevels> levels = {};
  Mask cuts = 0;
  Mask settled = 0;     // cuts that stand where the goal has them, with none but the goal's sizes before them
  Mask behind = 0;      // cuts inside of all that the goal has here: in nobody's way
  Mask astray = 0;      // cuts that the goal does not have in this factor, nor one of their size
  bool aligned = true;  // every cut has the size of the goal's at its place, so that the goal's can come in any order
  bool misplaced = false;  // some cut is not where the goal has it: no local step mends that
  bool has_virtual = false;
  // Lists with one cut more (at the end, at the goal's place, behind the goal's) or less: see CutLists.
  std::array<std::int16_t, kMostListed> pushed;
  std::array<std::int16_t, kMostListed> homed;
  std::array<std::int16_t, kMostListed> parked;
  std::array<std::int16_t, kMostListed> removed;

  std::int64_t held() const { return levels[0].held; }
};

// The lists of one factor. Indices stay what they are; references do not outlive the next new list.
class CutLists {
 public:
  using Index = std::uint16_t;

  CutLists(std::int64_t size, ListContext* context, const Entries& goal);

  std::int64_t size() const { return size_; }
  const CutList& operator[](Index i) const { return lists_[i]; }
  Index index_of(const Entries& entries);
  // A list with one cut more, if there may be one: at the end;
  std::optional<Index> with(Index i, int m);
  // where the goal has it, virtual cuts holding the places of those that are to come before it;
  std::optional<Index> with_home(Index i, int m);
  // behind all that the goal has, whose places are held likewise.
  std::optional<Index> with_parked(Index i, int m);
  // With m instead of the virtual cut at a place, if there may be one.
  std::optional<Index> with_at(Index i, std::size_t place, int m);
  // Takes cuts out; where others lie inside, a virtual cut stays.
  Index without(Index i, Mask mask);
  // Elements that the block of a sample wants at the goal.
  std::int64_t wanted(std::size_t level, std::size_t sample) const { return wanted_[level][sample]; }

 private:
  static constexpr std::int16_t kUnknown = -1;
  static constexpr std::int16_t kNone = -2;

  // Which leading binary digits of an element's index a list says, outside of some mesh dims, and which of those are
  // ones at the samples, whose indices are all zeros or all ones.
  struct Bits {
    std::uint64_t said = 0;
    std::array<std::uint64_t, kMostSamples> ones = {};
  };
  Bits bits_of(const Entries& entries, Mask within) const;
  std::int64_t left_of(std::uint64_t said) const { return size_ >> std::popcount(said); }

  CutList describe(const Entries& entries) const;
  void describe_level(CutList& list, std::size_t level) const;
  Entries joined(const Entries& entries, Mask within) const;
  bool pad(Entries& entries, std::size_t size) const;
  std::int16_t made(const Entries& entries);
  bool cuts_evenly(const Entries& entries) const;
  std::int64_t most_held(std::int64_t size, const Entries& list, std::size_t i) const;
  // Elements that a place holds of a piece of this size, by its cuts from the i-th on.
  std::int64_t held_at(std::int64_t size, const Entries& list, std::size_t i, const Dims& at) const;
  std::int64_t overlap(Interval piece, const Entries& list, std::size_t i, const Dims& at, Interval wanted) const;
  Intervals intervals_at(const Entries& list, const Dims& at) const;
  bool takes_over(int m) const;

  std::int64_t size_;
  ListContext* context_;
  Entries goal_;
  bool binary_;
  std::array<Bits, kMostLevels> goal_bits_ = {};                         // where binary,
  std::array<InlineVec<Intervals, kMostSamples>, kMostLevels> goal_at_;  // else
  std::array<std::array<std::int64_t, kMostSamples>, kMostLevels> wanted_ = {};
  std::vector<std::uint64_t> words_;
  std::vector<CutList> lists_;
};

}  // namespace dtensor
