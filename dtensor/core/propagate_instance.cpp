#include <algorithm>

#include "dtensor/core/propagate_impl.h"

namespace dtensor {
namespace {

constexpr int kNumReduceOps = 8;

// Which tensor argument of the schema each operand belongs to.
struct Entries {
  std::vector<std::size_t> of_operand;
  std::size_t num = 0;
};

Entries entries_of(const OpCall& call) {
  Entries entries;
  entries.of_operand.resize(call.operands.size());
  for (const ArgRef& arg : call.args) {
    if (!arg.is_tensor) continue;
    for (std::size_t i = 0; i < arg.count; ++i) entries.of_operand[arg.first + i] = entries.num;
    ++entries.num;
  }
  return entries;
}

class Builder {
 public:
  Builder(const OpRule& rule, const OpCall& call, const Mesh& mesh)
      : rule_(rule),
        call_(call),
        entries_(entries_of(call)),
        result_{&rule, &call, form_of(call.name), mesh, call.operands.size(), {}, {}, {}, {}, {}, {}, {}, false,
                0,     false} {}

  OrReason<Instance> build() {
    if (const auto reason = match_operands()) return Reason{*reason};
    if (rule_.indexed) {
      auto patterns = index_patterns(rule_, call_);
      if (!patterns) return Reason{*misfit(patterns.reason())};
      indexed_ = std::move(*patterns);
    }
    find_ellipsis();
    name_dims();
    make_letters();
    if (const auto reason = map_tensors()) return Reason{*reason};
    if (rule_.window) find_sliding();
    settle_sizes();
    drop_unused();
    note_means();
    add_rows();
    return std::move(result_);
  }

 private:
  std::optional<std::string> misfit(const std::string& what) const {
    return "the row `" + to_string(rule_) + "` does not fit the call: " + what;
  }

  const TensorPattern& pattern_of(std::size_t operand) const {
    return rule_.indexed ? indexed_.inputs[operand] : rule_.inputs[entries_.of_operand[operand]];
  }
  const TensorPattern& output_pattern(std::size_t k) const {
    return rule_.indexed ? indexed_.output : rule_.outputs[k];
  }
  std::int64_t ndim_of(std::size_t operand) const {
    return call_.operands[operand] ? call_.operands[operand]->meta().ndim() : 0;
  }

  std::optional<std::string> match_operands() {
    if (result_.form.out) {
      // The tensors that are written come last, as many as there are results.
      const std::size_t written = std::min(call_.outputs.size(), call_.operands.size());
      result_.num_operands = call_.operands.size() - written;
    }
    if (rule_.kind == RuleKind::kReplicated) return std::nullopt;
    for (std::size_t i = 0; i < result_.num_operands; ++i) {
      if (entries_.of_operand[i] >= rule_.inputs.size()) return misfit("it has more tensors");
    }
    if (call_.outputs.size() != rule_.outputs.size()) {
      return misfit("it has " + std::to_string(call_.outputs.size()) + " results");
    }
    return std::nullopt;
  }

  // How many dims @ stands for. The kernel of windows says it, too: a stride may be one number for all.
  std::int64_t group_size() const {
    if (rule_.window && rule_.window->kernel_of) return kernel_ndim(rule_, call_);
    return rule_.group_arg ? static_cast<std::int64_t>(call_.constant(*rule_.group_arg).as_ints().size()) : 0;
  }
  // How many dims the tokens besides the ellipsis stand for; no value without an ellipsis.
  std::optional<std::int64_t> fixed_dims(const TensorPattern& pattern) const {
    std::int64_t fixed = 0;
    bool open = false;
    for (const DimToken& token : pattern.dims) {
      if (token.kind == DimToken::Kind::kEllipsis)
        open = true;
      else if (token.kind != DimToken::Kind::kAny)
        fixed += token.kind == DimToken::Kind::kGroup ? group_size() : 1;
    }
    return open ? std::optional(fixed) : std::nullopt;
  }

  void find_ellipsis() {
    const auto grow = [&](const TensorPattern& pattern, std::int64_t ndim) {
      if (const auto fixed = fixed_dims(pattern)) ellipsis_ = std::max(ellipsis_, ndim - *fixed);
    };
    if (rule_.kind == RuleKind::kReplicated) return;
    for (std::size_t i = 0; i < result_.num_operands; ++i) grow(pattern_of(i), ndim_of(i));
    for (std::size_t k = 0; k < call_.outputs.size(); ++k) {
      if (call_.outputs[k]) grow(output_pattern(k), call_.outputs[k]->ndim());
    }
  }

  bool has_token(DimToken::Kind kind) const {
    const auto in = [&](const TensorPattern& pattern) {
      return std::any_of(pattern.dims.begin(), pattern.dims.end(),
                         [&](const DimToken& token) { return token.kind == kind; });
    };
    return std::any_of(rule_.inputs.begin(), rule_.inputs.end(), in) ||
           std::any_of(rule_.outputs.begin(), rule_.outputs.end(), in);
  }
  std::int64_t reduction() const { return rule_.reduction_arg ? call_.constant(*rule_.reduction_arg).as_int() : 0; }

  // Which dims of the ellipsis the arguments name.
  void name_dims() {
    named_.resize(static_cast<std::size_t>(ellipsis_), false);
    const bool stacked = has_token(DimToken::Kind::kStacked);
    if (rule_.dims_arg) {
      const Dims dims = call_.constant(*rule_.dims_arg).as_ints();
      const std::int64_t ndim = ellipsis_ + (stacked ? 1 : 0);
      for (std::int64_t dim : dims) {
        const std::int64_t normal = dim < 0 ? dim + ndim : dim;
        if (stacked)
          stacked_at_ = normal;
        else if (normal >= 0 && normal < ellipsis_)
          named_[normal] = true;
      }
      if (dims.empty()) std::fill(named_.begin(), named_.end(), true);
    } else if (rule_.pads_arg) {
      const Dims pads = call_.constant(*rule_.pads_arg).as_ints();
      for (std::int64_t i = 0; 2 * i + 1 < static_cast<std::int64_t>(pads.size()) && i < ellipsis_; ++i) {
        named_[ellipsis_ - 1 - i] = pads[2 * i] != 0 || pads[2 * i + 1] != 0;
      }
    } else if (rule_.reduction_arg ? reduction() != 0 : has_token(DimToken::Kind::kRest)) {
      std::fill(named_.begin(), named_.end(), true);
    }
    keepdim_ = rule_.keepdim_arg && call_.constant(*rule_.keepdim_arg).as_bool();
  }

  std::int16_t new_letter(std::string name, bool algorithmic = false) {
    result_.letters.push_back(-1);
    result_.names.push_back(std::move(name));
    result_.algorithmic.push_back(algorithmic);
    return static_cast<std::int16_t>(result_.letters.size() - 1);
  }

  void make_letters() {
    letter_of_char_.fill(kWholeDim);
    whole_of_char_.fill(kWholeDim);
    const bool reduced = rule_.reduce || rule_.reduction_arg;
    const bool whole = (rule_.whole_if_arg && call_.constant(*rule_.whole_if_arg).as_bool()) ||
                       (rule_.mean_form == MeanForm::kWhole && reduction() == 1) || !may_cut(0);
    for (std::int64_t d = 0; d < ellipsis_; ++d) {
      const bool may_cut = !whole && (!named_[d] || reduced);
      letter_of_dim_.push_back(may_cut ? new_letter(std::to_string(d)) : kWholeDim);
    }
    if (!rule_.algorithm) return;
    for (std::int64_t d = 0; d < ellipsis_; ++d) {
      const std::int16_t letter = letter_of_dim_[d];
      marked_of_dim_.push_back(letter == kWholeDim ? new_letter(std::to_string(d), true) : letter);
    }
    for (std::int64_t i = 0; i < group_size(); ++i) {
      marked_of_group_.push_back(may_cut('@') ? new_letter(std::to_string(ellipsis_ + i), true) : kWholeDim);
    }
  }

  std::int16_t whole_letter_of(char c) {
    std::int16_t& letter = whole_of_char_[static_cast<std::size_t>(c - 'A')];
    if (letter == kWholeDim) letter = new_letter(std::string(1, c), true);
    return letter;
  }

  // May an algorithm cut the dims that conditions or `*` keep whole? One that puts slices together may.
  bool merges(const TensorPattern& pattern) const {
    return pattern.marked && rule_.algorithm->kind == Algorithm::Kind::kMerged;
  }

  std::int16_t any_letter_of(std::int64_t i) {
    while (static_cast<std::int64_t>(marked_of_any_.size()) <= i) {
      marked_of_any_.push_back(new_letter("*" + std::to_string(marked_of_any_.size()), true));
    }
    return marked_of_any_[i];
  }

  // A letter; 0 for the dims of the ellipsis, of which only conditions without letters speak.
  bool may_cut(char c) const {
    return std::all_of(rule_.only_if.begin(), rule_.only_if.end(), [&](const OnlyIf& condition) {
      const StaticArg& arg = call_.constant(condition.arg);
      const bool number = arg.kind() == StaticArg::Kind::kInt || arg.kind() == StaticArg::Kind::kBool;
      const bool meant = condition.letters.empty() || condition.letters.find(c) != std::string::npos;
      return !meant || (number && arg.as_int() == condition.value);
    });
  }

  std::int16_t letter_of(char c) {
    if (!may_cut(c)) return kWholeDim;
    std::int16_t& letter = letter_of_char_[static_cast<std::size_t>(c - 'a')];
    if (letter == kWholeDim) letter = new_letter(std::string(1, c));
    return letter;
  }

  // How many dims the tokens besides * stand for, in a pattern that has no ellipsis.
  std::int64_t others_of(const TensorPattern& pattern) const {
    std::int64_t others = 0;
    for (const DimToken& token : pattern.dims) {
      if (token.kind != DimToken::Kind::kAny) others += token.kind == DimToken::Kind::kGroup ? group_size() : 1;
    }
    return others;
  }

  // The letters of a tensor of so many dims, or nothing when they do not fit.
  std::optional<LetterMap> map(const TensorPattern& pattern, std::int64_t ndim) {
    LetterMap map;
    // An operand that is added may lack leading dims.
    const auto given = static_cast<std::int64_t>(pattern.dims.size());
    const std::int64_t skipped = pattern.added ? std::max<std::int64_t>(0, given - ndim) : 0;
    for (const DimToken& token : std::span(pattern.dims).subspan(static_cast<std::size_t>(skipped))) {
      switch (token.kind) {
        case DimToken::Kind::kLetter:
          map.push_back(merges(pattern) && !may_cut(token.letter)
                            ? whole_letter_of(static_cast<char>(token.letter - 'a' + 'A'))
                            : letter_of(token.letter));
          break;
        case DimToken::Kind::kWhole:
          map.push_back(pattern.marked ? whole_letter_of(token.letter) : kWholeDim);
          break;
        case DimToken::Kind::kAlone:
          map.push_back(kWholeDim);
          break;
        case DimToken::Kind::kGroup:
          for (std::int64_t i = 0; i < group_size(); ++i) {
            map.push_back(pattern.marked ? marked_of_group_[i] : kWholeDim);
          }
          break;
        case DimToken::Kind::kEllipsis:
          for (std::int64_t d = ellipsis_ - (ndim - *fixed_dims(pattern)); d < ellipsis_; ++d) {
            map.push_back(pattern.marked ? marked_of_dim_[d] : letter_of_dim_[d]);
          }
          break;
        case DimToken::Kind::kRest:
          for (std::int64_t d = 0; d < ellipsis_; ++d) {
            if (!named_[d])
              map.push_back(letter_of_dim_[d]);
            else if (keepdim_)
              map.push_back(kWholeDim);
          }
          break;
        case DimToken::Kind::kStacked:
          map.append(letter_of_dim_.begin(), letter_of_dim_.end());
          map.insert(static_cast<std::size_t>(std::clamp<std::int64_t>(stacked_at_, 0, ellipsis_)), kWholeDim);
          break;
        case DimToken::Kind::kAny:
          for (std::int64_t d = others_of(pattern); d < ndim; ++d) {
            map.push_back(merges(pattern) ? any_letter_of(d - others_of(pattern)) : kWholeDim);
          }
          break;
      }
    }
    if (static_cast<std::int64_t>(map.size()) != ndim) return std::nullopt;
    return map;
  }

  // An operand of one element may have any number of dims: there is nothing to be cut.
  std::optional<LetterMap> map_operand(std::size_t i) {
    auto letters = map(pattern_of(i), ndim_of(i));
    if (!letters && call_.operands[i]->meta().numel() == 1) {
      letters.emplace(static_cast<std::size_t>(ndim_of(i)), kWholeDim);
    }
    return letters;
  }

  std::optional<std::string> map_tensors() {
    const bool whole = rule_.kind == RuleKind::kReplicated;
    for (std::size_t i = 0; i < call_.operands.size(); ++i) {
      const bool read = i < result_.num_operands && call_.operands[i];
      if (whole || !read) {
        result_.in.emplace_back(static_cast<std::size_t>(ndim_of(i)), kWholeDim);
        continue;
      }
      auto letters = map_operand(i);
      if (!letters) return misfit("operand " + std::to_string(i) + " is " + call_.operands[i]->to_string());
      result_.in.push_back(std::move(*letters));
    }
    for (std::size_t k = 0; k < call_.outputs.size(); ++k) {
      if (whole || !call_.outputs[k]) {
        result_.out.emplace_back(static_cast<std::size_t>(call_.outputs[k] ? call_.outputs[k]->ndim() : 0), kWholeDim);
        continue;
      }
      auto letters = map(output_pattern(k), call_.outputs[k]->ndim());
      if (!letters) return misfit("result " + std::to_string(k) + " is " + call_.outputs[k]->to_string());
      result_.out.push_back(std::move(*letters));
    }
    return std::nullopt;
  }

  template <class Fn>
  void for_each_dim(Fn fn) {
    for (std::size_t k = 0; k < result_.out.size(); ++k) {
      for (std::size_t d = 0; d < result_.out[k].size(); ++d) fn(result_.out[k][d], call_.outputs[k]->shape()[d], true);
    }
    for (std::size_t i = 0; i < result_.num_operands; ++i) {
      for (std::size_t d = 0; d < result_.in[i].size(); ++d) {
        fn(result_.in[i][d], call_.operands[i]->meta().shape()[d], false);
      }
    }
  }

  // Windows slide from a tensor to what the first result has of its dims; in a gradient, the first operand.
  void find_sliding() {
    const std::size_t over = window_operand(rule_, call_);
    if (over >= result_.num_operands || !call_.operands[over]) return;
    const LetterMap& made = over == 0 ? result_.out[0] : result_.in[0];
    const TensorMeta* shape = over == 0 ? (call_.outputs[0] ? &*call_.outputs[0] : nullptr)
                                        : (call_.operands[0] ? &call_.operands[0]->meta() : nullptr);
    const LetterMap& letters = result_.in[over];
    for (std::size_t d = 0; d < letters.size(); ++d) {
      if (letters[d] == kWholeDim || !result_.algorithmic[letters[d]]) continue;
      const auto there = static_cast<std::size_t>(std::find(made.begin(), made.end(), letters[d]) - made.begin());
      const std::int64_t outputs = shape && there < made.size() ? shape->shape()[there] : 0;
      result_.names[letters[d]] = std::to_string(d);
      result_.sliding.push_back({letters[d], {}, call_.operands[over]->meta().shape()[d], outputs});
    }
    const std::vector<Window> windows = windows_of(rule_, call_, result_.sliding.size());
    for (std::size_t i = 0; i < windows.size(); ++i) result_.sliding[i].window = windows[i];
  }

  bool slides(std::int16_t letter) const { return rule_.window && result_.algorithmic[letter]; }

  // A letter has the size of the results' dim, else the largest. Where a tensor has size 1 instead it broadcasts: the
  // letter is absent there (unless the row is `exact`); likewise where it is empty (statistics that a batch norm has
  // none of). Any other size: the letter cannot be cut, unless windows slide over it.
  void settle_sizes() {
    InlineVec<bool, 8> in_output(result_.letters.size(), false);
    for_each_dim([&](std::int16_t letter, std::int64_t size, bool output) {
      if (letter == kWholeDim || (!output && in_output[letter])) return;
      in_output[letter] = in_output[letter] || output;
      result_.letters[letter] = std::max(result_.letters[letter], size);
    });
    InlineVec<bool, 8> whole(result_.letters.size(), false);
    InlineVec<bool, 8> read(result_.letters.size(), false);
    for_each_dim([&](std::int16_t letter, std::int64_t size, bool output) {
      if (letter == kWholeDim) return;
      if (size == result_.letters[letter] || slides(letter))
        read[letter] = read[letter] || !output;
      else if (size > 1 || rule_.exact)
        whole[letter] = true;
    });
    for_each_dim([&](std::int16_t& letter, std::int64_t size, bool) {
      if (letter != kWholeDim && !slides(letter) &&
          (whole[letter] || !read[letter] || size != result_.letters[letter])) {
        letter = kWholeDim;
      }
    });
  }

  // Letters that nothing has any more are not offered as rows.
  void drop_unused() {
    used_.resize(result_.letters.size(), false);
    for (std::size_t i = 0; i < result_.num_operands; ++i) {
      for (std::int16_t letter : result_.in[i]) {
        if (letter != kWholeDim) used_[letter] = true;
      }
    }
    for (std::size_t letter = 0; letter < used_.size() && !result_.out.empty(); ++letter) {
      const bool is_char = result_.names[letter][0] >= 'a';
      const bool in_first = has_letter(result_.out[0], static_cast<std::int16_t>(letter));
      result_.contraction = result_.contraction || (used_[letter] && is_char && !in_first);
    }
  }

  static bool has_letter(const LetterMap& map, std::int16_t letter) {
    return std::find(map.begin(), map.end(), letter) != map.end();
  }

  void note_means() {
    const bool scaled = rule_.reduction_arg && rule_.mean_form == MeanForm::kScaled && reduction() == 1;
    if (rule_.mean_op.empty() && !scaled) return;
    result_.sum_for_mean = scaled;
    Dims sizes(named_.size(), 1);
    for (std::size_t i = 0; i < result_.num_operands; ++i) {
      // What is averaged over is the ellipsis, which comes first.
      const std::int64_t ndim = ndim_of(i) - fixed_dims(pattern_of(i)).value_or(ndim_of(i));
      for (std::int64_t d = 0; d < ndim; ++d) {
        std::int64_t& size = sizes[ellipsis_ - ndim + d];
        const std::int64_t own = call_.operands[i]->meta().shape()[d];
        if (own != 1) size = own;
      }
    }
    result_.mean_count = 1;
    for (std::size_t d = 0; d < sizes.size(); ++d) result_.mean_count *= named_[d] ? sizes[d] : 1;
  }

  // ---- rows

  Row empty_row() const {
    Row row;
    row.in.resize(call_.operands.size());
    row.embeds.resize(call_.operands.size(), false);
    row.out.resize(call_.outputs.size());
    return row;
  }

  bool can_reduce_outputs(const Row& row) const {
    for (std::size_t k = 0; k < row.out.size(); ++k) {
      if (row.out[k] && !can_reduce(call_.outputs[k]->dtype(), *row.out[k])) return false;
    }
    return true;
  }

  // Operands that join a sum turn Partial together with it.
  bool join_added(Row& row, ReduceOp op) const {
    for (std::size_t i = 0; i < result_.num_operands; ++i) {
      if (!pattern_of(i).added || row.in[i]) continue;
      if (!call_.operands[i]) return false;  // a number, which every rank would add
      if (!can_reduce(call_.operands[i]->meta().dtype(), op)) return false;
      row.in[i] = op;
      row.embeds[i] = true;
    }
    return true;
  }

  void add_rows() {
    result_.rows.push_back(empty_row());
    for (std::size_t letter = 0; letter < used_.size(); ++letter) {
      if (used_[letter]) add_letter_row(static_cast<std::int16_t>(letter));
    }
    std::array<bool, kNumReduceOps> present{};
    for (std::size_t i = 0; i < result_.num_operands; ++i) {
      if (!call_.operands[i] || !call_.operands[i]->has_partial()) continue;
      for (const auto& op : call_.operands[i]->partials()) {
        if (op) present[static_cast<std::size_t>(*op)] = true;
      }
    }
    for (const Carry& carry : rule_.carries) {
      for (std::size_t op = 0; op < present.size(); ++op) {
        if (present[op]) add_carry_row(carry, static_cast<ReduceOp>(op));
      }
    }
  }

  // What an algorithm merges comes out reduced; what a located kernel finds is a sum.
  void add_algorithm_row(std::int16_t letter) {
    if (result_.letters[letter] == 0 || (rule_.algorithm->kind == Algorithm::Kind::kMerged && reduces_nothing()))
      return;
    Row row = empty_row();
    row.letter = letter;
    row.algorithmic = true;
    for (std::size_t k = 0; k < row.out.size(); ++k) {
      const bool lacks = call_.outputs[k] && !has_letter(result_.out[k], letter);
      if (!lacks || rule_.algorithm->kind == Algorithm::Kind::kMerged) continue;
      row.out[k] = ReduceOp::kSum;
      if (!join_added(row, ReduceOp::kSum)) return;
    }
    if (can_reduce_outputs(row)) result_.rows.push_back(std::move(row));
  }

  void add_letter_row(std::int16_t letter) {
    if (result_.algorithmic[letter]) return add_algorithm_row(letter);
    Row row = empty_row();
    row.letter = letter;
    const ReduceOp op = rule_.reduce.value_or(ReduceOp::kSum);
    bool partial = false;
    for (std::size_t k = 0; k < row.out.size(); ++k) {
      if (!call_.outputs[k] || call_.outputs[k]->numel() == 0 || has_letter(result_.out[k], letter)) continue;
      row.out[k] = op;
      partial = true;
    }
    if (partial && (reduces_nothing() || !join_added(row, op))) return;
    if (can_reduce_outputs(row)) result_.rows.push_back(std::move(row));
  }

  // Are there no elements to be reduced, and yet a result? The operator itself says what comes of that, or that it has
  // no identity: it runs on the full tensor.
  bool reduces_nothing() const {
    return call_.operands[0] && call_.operands[0]->meta().numel() == 0 &&
           std::any_of(call_.outputs.begin(), call_.outputs.end(),
                       [](const auto& meta) { return meta && meta->numel() > 0; });
  }

  // Does a Partial of this kind survive the change of type from its operands to the results? Integers wrap and
  // truncate, so they must keep their type.
  bool types_pass(const Carry& carry, ReduceOp op) const {
    const bool sums = op == ReduceOp::kSum || op == ReduceOp::kAvg;
    const bool orders = op == ReduceOp::kMin || op == ReduceOp::kMax;
    const auto passes = [&](DType from, DType to) {
      const bool reals = is_floating(from) && is_floating(to);
      const bool fields = !is_integral(from) && !is_integral(to);
      return from == to || (sums && fields) || (orders && reals);
    };
    for (std::size_t i = 0; i < result_.num_operands; ++i) {
      if (!call_.operands[i] || !is_carrier(carry, i)) continue;
      for (const auto& meta : call_.outputs) {
        if (meta && !passes(call_.operands[i]->meta().dtype(), meta->dtype())) return false;
      }
    }
    return true;
  }

  // Rising and falling hold for floating numbers alone: integers wrap.
  bool floating_through(const Carry& carry) const {
    for (std::size_t i = 0; i < result_.num_operands; ++i) {
      const bool carries = call_.operands[i] && is_carrier(carry, i);
      if (carries && !is_floating(call_.operands[i]->meta().dtype())) return false;
    }
    return std::all_of(call_.outputs.begin(), call_.outputs.end(),
                       [](const auto& meta) { return !meta || is_floating(meta->dtype()); });
  }

  bool is_carrier(const Carry& carry, std::size_t operand) const {
    return std::find(carry.operands.begin(), carry.operands.end(), entries_.of_operand[operand]) !=
           carry.operands.end();
  }

  bool any_integral(const Carry& carry) const {
    for (std::size_t i = 0; i < result_.num_operands; ++i) {
      if (call_.operands[i] && is_carrier(carry, i) && is_integral(call_.operands[i]->meta().dtype())) return true;
    }
    return false;
  }

  // Is every factor known to be finite in the type of the results, and every divisor's reciprocal, too? Where a part of
  // a sum is 0, an infinite factor makes NaN of it. The elements of a distributed tensor are not known; integers are
  // finite, and may be 0.
  bool factors_are_finite(const Carry& carry) const {
    const bool divides = carry.kind == Carry::Kind::kOver;
    const auto has = [](DType type, std::uint8_t magnitude) {
      const auto real = is_integral(type) ? DType::kF64 : type;
      const std::int64_t size = is_floating(real) ? element_size(real) : element_size(real) / 2;
      const bool half = real == DType::kF16 || real == DType::kC32;
      return size > 1 && magnitude <= (half ? 0 : size <= 4 ? 1 : 2);
    };
    const auto takes = [&](const StaticArg& number) {
      const auto magnitude = number.magnitude();
      return std::all_of(call_.outputs.begin(), call_.outputs.end(), [&](const auto& meta) {
        return !meta || (has(meta->dtype(), magnitude.large) && (!divides || has(meta->dtype(), magnitude.small)));
      });
    };
    for (const std::size_t factor : carry.factors) {
      if (factor >= call_.args.size()) continue;
      const ArgRef& arg = call_.args[factor];
      if (!arg.is_tensor) {
        if (!takes(arg.constant)) return false;
        continue;
      }
      for (std::size_t i = arg.first; i < arg.first + arg.count; ++i) {
        const bool known = !call_.operands[i] && i < call_.numbers.size() && !call_.numbers[i].is_none();
        const bool integral = call_.operands[i] && is_integral(call_.operands[i]->meta().dtype());
        if (known ? !takes(call_.numbers[i]) : !integral || divides) return false;
      }
    }
    return true;
  }

  // What a Partial of this kind comes out as; no value when the carry does not take it.
  std::optional<ReduceOp> carried(const Carry& carry, ReduceOp op) const {
    const bool sums = op == ReduceOp::kSum || op == ReduceOp::kAvg;
    const bool orders = op == ReduceOp::kMin || op == ReduceOp::kMax;
    const auto turned = [&](int direction) -> std::optional<ReduceOp> {
      if (!orders || direction == 0 || !floating_through(carry)) return std::nullopt;
      if (direction > 0) return op;
      return op == ReduceOp::kMin ? ReduceOp::kMax : ReduceOp::kMin;
    };
    const auto when = [&](bool takes) { return takes ? std::optional(op) : std::nullopt; };
    switch (carry.kind) {
      case Carry::Kind::kLinear:
        return when(sums);
      case Carry::Kind::kTimes:
      case Carry::Kind::kOver:
        return when(sums && factors_are_finite(carry));
      case Carry::Kind::kWeighted:
        return when(sums && !any_integral(carry));
      case Carry::Kind::kSame:
      case Carry::Kind::kFill:
        return op;
      case Carry::Kind::kOp:
        return when(op == carry.op);
      case Carry::Kind::kUp:
        return turned(1);
      case Carry::Kind::kDown:
        return turned(-1);
      case Carry::Kind::kSign:
        return turned(call_.constant(carry.arg).sign());
      case Carry::Kind::kOnce:
        return when(op == ReduceOp::kSum && types_stay());
    }
    return std::nullopt;
  }

  // The others keep their operand 0 as their result.
  bool types_stay() const {
    return call_.operands[0] && call_.operands[0]->meta().dtype() == call_.outputs[0]->dtype();
  }

  void add_carry_row(const Carry& carry, ReduceOp op) {
    const auto to = carried(carry, op);
    if (!to || !types_pass(carry, op)) return;
    Row row = empty_row();
    row.carry = &carry;
    for (std::size_t i = 0; i < result_.num_operands; ++i) {
      if (!is_carrier(carry, i)) {
        if (carry.kind == Carry::Kind::kOnce && call_.operands[i]) return;  // only a number may be added once
        continue;
      }
      if (!call_.operands[i] || !can_reduce(call_.operands[i]->meta().dtype(), op)) return;
      row.in[i] = op;
      // In place the first operand stays what it is, so the others join it.
      if (result_.form.in_place && i > 0) row.embeds[i] = true;
    }
    for (std::size_t k = 0; k < row.out.size(); ++k) {
      if (call_.outputs[k]) row.out[k] = *to;
    }
    if (carry.kind == Carry::Kind::kOnce) row.once = Row::Once::kKeep;
    const bool counted = op == ReduceOp::kSum || op == ReduceOp::kProduct || op == ReduceOp::kXor;
    if (carry.kind == Carry::Kind::kFill && counted) row.once = Row::Once::kIdentity;
    if (join_added(row, op) && can_reduce_outputs(row)) result_.rows.push_back(std::move(row));
  }

  const OpRule& rule_;
  const OpCall& call_;
  const Entries entries_;
  Instance result_;
  IndexPatterns indexed_;  // of a rule that says so
  std::int64_t ellipsis_ = 0;
  InlineVec<bool, 8> named_;
  bool keepdim_ = false;
  std::int64_t stacked_at_ = 0;
  std::array<std::int16_t, 26> letter_of_char_{};
  std::array<std::int16_t, 26> whole_of_char_{};  // A to Z of marked tensors
  LetterMap letter_of_dim_;
  LetterMap marked_of_dim_;    // of marked tensors
  LetterMap marked_of_group_;  // likewise
  LetterMap marked_of_any_;    // likewise
  InlineVec<bool, 8> used_;
};

}  // namespace

OrReason<Mesh> mesh_of(const OpCall& call) {
  const Spec* first = nullptr;
  for (const auto& operand : call.operands) {
    if (!operand) continue;
    if (first && !(first->mesh() == operand->mesh())) {
      return Reason{"the operands are on different meshes: " + first->to_string() + " and " + operand->to_string()};
    }
    if (!first) first = &*operand;
  }
  if (!first) return Reason{"no operand is distributed"};
  return first->mesh();
}

OrReason<Instance> make_instance(const OpRule& rule, const OpCall& call) {
  const auto mesh = mesh_of(call);
  if (!mesh) return Reason{mesh.reason()};
  auto instance = Builder(rule, call, *mesh).build();
  for (auto other = rule.others.begin(); !instance && other != rule.others.end(); ++other) {
    instance = Builder(*other, call, *mesh).build();
  }
  return instance;
}

}  // namespace dtensor
