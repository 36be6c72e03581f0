#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "dtensor/core/cost.h"
#include "dtensor/core/error.h"
#include "dtensor/core/op_call.h"
#include "dtensor/core/plan.h"
#include "dtensor/core/rule.h"
#include "dtensor/core/window.h"

namespace dtensor {

// What to run on the local tensors, where it is not simply the operator itself.
struct LocalWork {
  // Another operator with the same arguments ("aten::sum" for "aten::mean"); empty: the same. "aten::view" takes
  // operand 0 and the shape that a rewrite gives as argument 1, whatever the arguments of the call were.
  std::string op;
  // The results are divided by this; 1: they are not.
  std::int64_t divide_by = 1;
  // A rank with no element of what is reduced does not run the operator: its results are filled with the identity of
  // this reduction.
  std::optional<ReduceOp> identity;
  // Where not empty: only ranks at index 0 on all these mesh dims run the operator; the others do what `others` says.
  MeshDims once;
  enum class Others : std::uint8_t {
    kKeep,
    kIdentity
  };  // operand 0 as it is; filled with the identity of a sum/product
  Others others = Others::kKeep;
  ReduceOp others_op = ReduceOp::kSum;
  // Where not empty: this runs instead of the operator, on parts that are cut by `algorithm_dims` along dims that the
  // operator itself needs whole.
  std::string algorithm;
  MeshDims algorithm_dims;
  std::vector<Window> windows;  // of a halo: over the last dims

  bool is_same() const { return op.empty() && divide_by == 1 && !identity && once.empty() && algorithm.empty(); }
};

// A static argument that the local call takes another value for. The numbers follow from a spec and a coordinate.
struct Rewrite {
  enum class Kind : std::uint8_t {
    kValue,        // `value`
    kLocalShape,   // the local shape of output `index`
    kLocalStride,  // its local strides
    kScaled,       // each of `value`'s integers times the local size of operand 0's dim `index` over its global size
  };
  std::size_t arg = 0;  // schema position
  Kind kind = Kind::kValue;
  std::size_t index = 0;
  StaticArg value = {};
  friend bool operator==(const Rewrite&, const Rewrite&) = default;
};

struct Decision {
  // What each operand must be redistributed to first; its own spec where nothing moves. No value for plain numbers.
  std::vector<std::optional<Spec>> inputs;
  // No value for undefined outputs. Of an `out` form: what is computed, to be brought to the out tensor's own spec.
  std::vector<std::optional<Spec>> outputs;
  LocalWork local = {};
  std::vector<Rewrite> rewrites = {};
  // The outputs share memory with operand 0. When the operator returns an alias and this is false, the operand had to
  // be moved: writing through the result must be refused.
  bool alias = false;
  // Score in picoseconds; why this and nothing else.
  std::int64_t time = 0;
  std::string reason = {};
};

struct DecideOptions {
  CostModel cost = {};
  // Take the n-th cheapest (modulo their number) instead of the choice: for tests.
  std::int64_t nth = 0;
  // Take the cheapest way with an algorithm, where there is one: for tests.
  bool algorithms_first = false;
  // Let `reason` name the alternatives and what they would have cost.
  bool explain = false;
};

// One way to run the call.
struct Candidate {
  Decision decision;
  std::string row;  // per mesh dim: `m`, `R`, `linear(0)`
};

// Which dims of the operands and results may be cut, and alike: the same number for the same letter of the rule's
// pattern, kNoLetter where a dim must be whole, or is cut by an algorithm only. Results that are not given have none.
inline constexpr std::int16_t kNoLetter = -1;
struct CallLetters {
  std::vector<InlineVec<std::int16_t, 6>> operands;
  std::vector<InlineVec<std::int16_t, 6>> results;
};
OrReason<CallLetters> letters_of(const OpRule& rule, const OpCall& call);

// Is the call of the form that the rule's pattern describes? Operands on different meshes are: deciding says so.
bool fits(const OpRule& rule, const OpCall& call);

// Where a redistribution to one of a decision's inputs must stop on its way, `to` last: one plan leads to each stop
// from the one before. More than one stop only where an operand that is not Replicate joins a Partial: S(0) to P(sum)
// goes by R, which is then kept by its owner. Empty where there is no way.
std::vector<Spec> stops_between(const Spec& from, const Spec& to);

// The cheapest way to run the call, or why there is none. A pure function of its arguments. Where the operands fit a
// row as they lie there is no search.
OrReason<Decision> decide(const OpRule& rule, const OpCall& call, const DecideOptions& options = {});
// All ways, the chosen one first, the others by their score.
OrReason<std::vector<Candidate>> candidates(const OpRule& rule, const OpCall& call, const DecideOptions& options = {});

}  // namespace dtensor
