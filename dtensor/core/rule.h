#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dtensor/core/error.h"
#include "dtensor/core/op_call.h"

namespace dtensor {

// One row of a table, as it is written: the operator, its dims as factors, and words (docs/rules.md).
//   {"aten::mm", "mk,kn->mn", "linear(0) linear(1)"}
struct RuleText {
  std::string_view name;
  std::string_view pattern;
  std::string_view words = {};
};

// The dims of one tensor in a pattern.
struct DimToken {
  enum class Kind : std::uint8_t {
    kLetter,    // a: may be cut
    kWhole,     // A: may not be cut
    kAlone,     // _: may not be cut, not by an algorithm either
    kEllipsis,  // ...: any number of dims, aligned at the end, size 1 broadcasts
    kGroup,     // @: as many whole dims as the argument of group() has entries, or the tensor of kernel_of
    kRest,      // ~: the ellipsis without the dims of dims(), or with size 1 there (keepdim)
    kStacked,   // ^: the ellipsis with a new whole dim at dims()
    kAny,       // *: any number of whole dims
  };
  Kind kind = Kind::kLetter;
  char letter = 0;
  friend bool operator==(const DimToken&, const DimToken&) = default;
};
struct TensorPattern {
  std::vector<DimToken> dims;
  bool added = false;   // +: joins a sum, so it turns Partial together with it
  bool marked = false;  // #: its dims that must be whole may be cut after all, by the row's algorithm
};

// What cuts the dims of `#` tensors that must be whole otherwise.
struct Algorithm {
  enum class Kind : std::uint8_t {
    kMerged,   // it talks by itself: results that lack the dim come out reduced
    kLocated,  // its kernel knows where in the whole its part lies: results that lack the dim are sums
    kHalo,     // it fetches what windows over its part read; results that lack the dim are sums
  };
  std::string name;
  Kind kind = Kind::kMerged;
  bool plain = false;  // only where every rank holds one run of the dim; so every halo
};

// Where a call says which windows slide over the last dims of a tensor: tensor arguments counted from 0, others by
// their position in the schema. A list of one number holds for every dim; without a stride it is the kernel.
struct WindowArgs {
  std::optional<std::size_t> over;       // the tensor
  std::optional<std::size_t> kernel_of;  // a tensor whose last dims are the kernel's
  std::optional<std::size_t> kernel;
  std::optional<std::size_t> stride;
  std::optional<std::size_t> padding;
  std::optional<std::size_t> dilation;
};

// How a Partial passes through an operator when these operands carry it and the others are replicated.
struct Carry {
  enum class Kind : std::uint8_t {
    kLinear,    // sum and avg
    kTimes,     // likewise, where the factors are known to be finite: 0 * inf is no part of a sum
    kOver,      // likewise, where the divisors are known to be finite and not zero
    kWeighted,  // likewise, for numbers that are not integers: the weights are fractions, and integers are rounded
    kSame,      // every reduction
    kOp,        // one reduction
    kUp,        // rising: max stays max, min stays min
    kDown,      // falling: max becomes min, min becomes max
    kSign,      // kUp or kDown, by the sign of an argument
    kOnce,      // sum: the rank at index 0 runs the operator, the others keep their operand 0
    kFill,      // sum and product: index 0 runs it, the others write the identity; other reductions as kSame
  };
  Kind kind = Kind::kLinear;
  std::vector<std::size_t> operands;      // tensor arguments of the schema, counted from 0
  ReduceOp op = ReduceOp::kSum;           // of kOp
  std::size_t arg = 0;                    // of kSign
  std::vector<std::size_t> factors = {};  // of kTimes and kOver: arguments by schema position, tensors or numbers
};

// What of a static argument may change a decision, and so belongs into the key under which it is kept.
enum class KeyUse : std::uint8_t {
  kPlain,     // a number by its type (it may decide the type of results), anything else by value
  kValue,     // the value
  kType,      // the type of a number, nothing else
  kSign,      // type and sign of a number
  kScale,     // type, sign and magnitude of a number (StaticArg::magnitude)
  kPresence,  // whether it is given
  kNothing,
};

// Rules that are no factors: what they do instead.
enum class ViewKind : std::uint8_t {
  kIdentity,
  kTranspose2,
  kTranspose,
  kPermute,
  kReshape,
  kReshapeStrides,
  kExpand,
  kSqueeze,
  kSqueezeDims,
  kUnsqueeze,
  kSelect,
  kSlice,
  kNarrow,
  kSplit,
  kSplitSizes,
  kUnbind,
  kDiagonal,
  kUnfold,
};
enum class RuleKind : std::uint8_t {
  kFactors,
  kView,        // by a ViewKind
  kReplicated,  // every operand whole on every rank, and so the results
  kLike,        // nothing moves; results take the operand's cuts, Replicate where it is Partial
  kFresh,       // nothing moves; results of operand 0's shape as in kLike, others replicated
};

// Letters that may be cut only where an argument has this value; without letters: everything.
struct OnlyIf {
  std::size_t arg = 0;
  std::int64_t value = 0;
  std::string letters;  // and `@`, of marked tensors
};

// An argument that counts along a dim of operand 0: the local call gets its share.
struct ScaledArg {
  std::size_t arg = 0;
  std::size_t dim = 0;
};

// What the word reduction() says of a loss's reduction argument (0 none, 1 mean, 2 sum).
enum class MeanForm : std::uint8_t {
  kScaled,  // mean is the sum divided by the global number of elements
  kWhole,   // mean needs the whole tensor
  kGiven,   // mean needs nothing: the divisor is an operand
};

// A row, read. Immutable; lives as long as the program.
struct OpRule {
  std::string name;
  RuleKind kind = RuleKind::kFactors;
  std::vector<TensorPattern> inputs;
  std::vector<TensorPattern> outputs;
  std::vector<OpRule> others;  // with other patterns, for calls that the ones before do not fit
  std::vector<Carry> carries;
  // Static arguments by schema position.
  std::optional<std::size_t> dims_arg;
  std::optional<std::size_t> keepdim_arg;
  std::optional<std::size_t> group_arg;
  std::optional<std::size_t> reduction_arg;
  std::optional<std::size_t> size_arg;
  std::optional<std::size_t> whole_if_arg;  // when true, no dim of the ellipsis may be cut
  std::optional<std::size_t> pads_arg;      // pairs for the last dims; those that are padded are whole
  std::vector<OnlyIf> only_if;
  std::optional<ScaledArg> scaled;
  MeanForm mean_form = MeanForm::kScaled;
  std::optional<ReduceOp> reduce;  // of the dims that an output lacks; sum for letters when not said
  std::string mean_op;             // the sum that a mean is made of
  ViewKind view = ViewKind::kIdentity;
  bool skip_empty = false;  // a rank that has nothing of operand 0 does not run it where it adds to a sum
  bool indexed = false;     // a list of optional index tensors says which dims of operand 0 are looked up
  bool exact = false;       // size 1 does not broadcast
  std::optional<Algorithm> algorithm;
  std::optional<WindowArgs> window;  // of a halo
  bool may_move = false;  // of a view: where it has no free form the operand is redistributed, and the result a copy
  std::map<std::size_t, KeyUse> key;
};

// Reads a row. Errors: anything docs/rules.md does not know.
OpRule parse_rule(const RuleText& text);
// `aten::mm: mk,kn->mn linear(0) linear(1)`: parse_rule's input, in canonical order.
std::string to_string(const OpRule& rule);
std::string to_string(const Carry& carry);

// What a name says about which operands are written.
struct CallForm {
  bool in_place = false;  // the first operand
  bool out = false;       // the last ones
};
CallForm form_of(std::string_view name);

// "aten::add.Tensor" of "aten::add_.Tensor".
std::string plain_name(std::string_view in_place);

struct FoundRule {
  const OpRule* rule;
  bool in_place;  // the first operand is written
  bool out;       // the last operands are written
};
// A row of the program's own, for an operator of its own ("my::gated_mm") or in place of one of ours. Said before the
// operator's first call on a distributed tensor, alike on all ranks; threads may say it again. See docs/rules.md for
// the notation. Errors: what parse_rule says; another row for a name that has been given one.
//   register_rule("my::scaled_mm", "mk,kn->mn", "linear(0) linear(1)");
void register_rule(const std::string& name, const std::string& pattern, const std::string& words = {});

// The row of an operator. In-place and `out` forms are found through the plain one: "aten::add_.Tensor" and
// "aten::add.out" by "aten::add.Tensor".
std::optional<FoundRule> find_rule(std::string_view name);
// Every row, sorted by name.
std::span<const OpRule> all_rules();

KeyUse key_use(const OpRule& rule, std::size_t arg);

}  // namespace dtensor
