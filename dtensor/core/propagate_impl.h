#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "dtensor/core/propagate.h"

namespace dtensor {

// Which letter each dim of a tensor has; kWholeDim: it may not be cut (or is a size-1 dim that broadcasts).
inline constexpr std::int16_t kWholeDim = -1;
using LetterMap = InlineVec<std::int16_t, 6>;
using Kinds = InlineVec<std::optional<ReduceOp>, 4>;

// What one mesh dim may do: cut a letter wherever it appears, carry a Partial through, or nothing.
struct Row {
  enum class Once : std::uint8_t { kNo, kKeep, kIdentity };
  std::int16_t letter = kWholeDim;  // the letter that is cut
  Kinds in;                         // per operand: Partial in this; no value: cut by the letter, else replicated
  Kinds out;
  InlineVec<bool, 4> embeds;  // operands that need not be Partial where `in` says so: the owner keeps the value
  Once once = Once::kNo;
  bool algorithmic = false;  // the letter is cut by the rule's algorithm
  const Carry* carry = nullptr;
};

// A letter that windows slide over: its dim has another size on either side of them.
struct Sliding {
  std::int16_t letter;
  Window window;
  std::int64_t inputs;
  std::int64_t outputs;
};

// A rule applied to the shapes and arguments of one call.
struct Instance {
  const OpRule* rule;
  const OpCall* call;
  CallForm form;
  Mesh mesh;
  std::size_t num_operands = 0;        // those that are read: without the tensors given as `out`
  InlineVec<std::int64_t, 8> letters;  // sizes
  InlineVec<std::string, 8> names;     // of the letters, for people
  InlineVec<bool, 8> algorithmic;      // per letter: only the rule's algorithm may cut it
  std::vector<Sliding> sliding;        // the algorithmic letters of a halo, by dim
  std::vector<LetterMap> in;           // per operand
  std::vector<LetterMap> out;          // per output
  std::vector<Row> rows;               // the first: all replicated
  bool contraction = false;            // the work is the product of all letters, not the bytes
  std::int64_t mean_count = 0;         // what a mean divides by; 0: no mean
  bool sum_for_mean = false;           // the reduction argument says mean and has to say sum
};

// The patterns of one call of an operator that takes a list of optional index tensors: x[5,4,3] at (none, i[7]) is
// `aBc,n->anc`. One for each operand; those of index_put, which writes to x at these places, keep the indices whole.
struct IndexPatterns {
  std::vector<TensorPattern> inputs;
  TensorPattern output;
};
OrReason<IndexPatterns> index_patterns(const OpRule& rule, const OpCall& call);

OrReason<Instance> make_instance(const OpRule& rule, const OpCall& call);

// The operand over which the windows of a halo slide.
std::size_t window_operand(const OpRule& rule, const OpCall& call);
// Of a tensor that is the kernel: its dims after the two of its channels; 0 where it is absent.
std::int64_t kernel_ndim(const OpRule& rule, const OpCall& call);
// The windows, one for each of so many last dims.
std::vector<Window> windows_of(const OpRule& rule, const OpCall& call, std::size_t ndim);

// The mesh of all operands; why not when they disagree or there is none.
OrReason<Mesh> mesh_of(const OpCall& call);

// No more ways than this are ever listed; a mesh of many dims has more.
inline constexpr std::size_t kMostWays = 4096;

// One way to run a call, before it is known what it costs.
struct Way {
  Decision decision;
  std::string row;
  std::int64_t bound = 0;    // no more than the score
  std::int64_t compute = 0;  // local work and what new Partials will cost
  std::int64_t new_partials = 0;
  std::int64_t output_bytes = 0;
  std::int64_t halo_bytes = 0;  // that come to the rank that fetches most
};

// What ways are compared by, in this order (docs/rules.md).
struct Score {
  std::int64_t time = 0;
  std::int64_t moved = 0;
  bool self_moved = false;
  std::int64_t new_partials = 0;
  std::int64_t output_bytes = 0;
  std::size_t index = 0;
  friend auto operator<=>(const Score&, const Score&) = default;
};

// Time and moves of the plans that a decision needs; no value where one of them does not exist.
std::optional<Score> score_of(const OpCall& call, const Way& way, std::size_t index, const CallForm& form,
                              const CostModel& cost);

// Below what no plan on a mesh can go, seen from the rank at coordinate 0, which never holds less than the average.
class MoveFloor {
 public:
  MoveFloor(const Mesh& mesh, const CostModel& cost);
  // From one local shape to another of that rank, which keeps at most the smaller of both on every dim. When a Partial
  // is reduced, every element it wants needs a value from elsewhere. `merged`: the mesh dims along which it hears of
  // all the others, in as many rounds as it takes to double what it knows each time.
  std::int64_t time(const Dims& from, const Dims& to, std::int64_t element_size, bool reduces,
                    std::uint32_t merged) const;

 private:
  std::int64_t step_ps_;
  Link fastest_{kForever, kForever};
  InlineVec<std::int64_t, 4> rounds_ps_;  // per mesh dim
};
// The local shape of that rank.
Dims first_local_shape(const Spec& spec);

OrReason<std::vector<Candidate>> view_candidates(const OpRule& rule, const OpCall& call, const DecideOptions& options);
OrReason<Decision> decide_view(const OpRule& rule, const OpCall& call, const DecideOptions& options);

}  // namespace dtensor
