#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <vector>

#include "dtensor/core/dim_layout.h"

// The lists of cuts that a factor can have while the cheapest sequence is searched for. Each is made once and knows
// what the search asks for again and again, so that a state is a few small numbers.
namespace dtensor {

using Mask = std::uint32_t;  // of mesh dims

inline constexpr std::size_t kMostListed = 16;     // mesh dims
inline constexpr std::uint8_t kFirstVirtual = 16;  // entries below are mesh dims, from here on they are virtual cuts
inline constexpr std::size_t kMostSamples = 4;

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

  std::int64_t count(std::uint8_t entry) const {
    return entry < kFirstVirtual ? sizes[entry] : virtuals[entry - kFirstVirtual];
  }
  std::uint8_t virtual_entry(std::int64_t count);
};

struct CutList {
  Entries entries;
  std::int64_t held = 0;  // elements of the factor on the fullest rank
  Mask cuts = 0;
  Mask settled = 0;        // cuts that stand where the goal has them, with nothing else before them
  Mask astray = 0;         // cuts that the goal does not have in this factor, nor one of their size
  bool misplaced = false;  // some cut is not where the goal has it: no local step mends that
  bool has_virtual = false;
  bool finished = false;                               // the goal's list
  int next = -1;                                       // the mesh dim that the goal cuts by after exactly these
  std::array<std::int64_t, kMostSamples> common = {};  // elements that a sample holds both now and at the goal
  // Lists with one cut more at the end, or with one taken out; -1: not made yet.
  std::array<std::int16_t, kMostListed> pushed;
  std::array<std::int16_t, kMostListed> removed;
};

// The lists of one factor. Indices stay what they are; references do not outlive the next new list.
class CutLists {
 public:
  using Index = std::uint16_t;

  CutLists(std::int64_t size, ListContext* context, const Entries& goal);

  std::int64_t size() const { return size_; }
  const CutList& operator[](Index i) const { return lists_[i]; }
  Index index_of(const Entries& entries);
  // Pre: room(i).
  Index with(Index i, int m);
  // Takes cuts out; where others lie inside, a virtual cut stays.
  Index without(Index i, Mask mask);
  bool room(Index i, std::size_t more = 1) const { return lists_[i].entries.size() + more <= Entries::kMost; }
  const std::array<std::int64_t, kMostSamples>& wanted() const { return wanted_; }

 private:
  CutList describe(const Entries& entries) const;
  std::int64_t most_held(std::int64_t size, const Entries& list, std::size_t i) const;
  std::int64_t overlap(Interval piece, const Entries& list, std::size_t i, const Dims& at, Interval wanted) const;
  Intervals intervals_at(const Entries& list, const Dims& at) const;
  bool takes_over(int m) const;

  std::int64_t size_;
  ListContext* context_;
  Entries goal_;
  InlineVec<Intervals, kMostSamples> goal_at_;
  std::array<std::int64_t, kMostSamples> wanted_ = {};
  std::vector<std::uint64_t> words_;
  std::vector<CutList> lists_;
};

}  // namespace dtensor
