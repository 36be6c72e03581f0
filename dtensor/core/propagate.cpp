#include "dtensor/core/propagate.h"

#include <algorithm>
#include <bit>
#include <type_traits>

#include "dtensor/core/checked.h"
#include "dtensor/core/propagate_impl.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

// Of more combinations than this only those are looked at that move few operands.
constexpr std::size_t kMostTried = 48;
constexpr std::size_t kMostNamed = 8;  // alternatives in an explanation
// Multiply-adds that take as long as moving a byte: 100 Tflop/s beside 1 TB/s, with some slack for small tiles.
constexpr std::int64_t kMacsPerByte = 64;

using MeshMask = std::uint32_t;
using RowChoice = InlineVec<std::uint16_t, 4>;  // per mesh dim
using Options = InlineVec<std::uint16_t, 8>;    // rows of one mesh dim

// What an operand does on a mesh dim, in letters.
constexpr std::int16_t kReplicated = -1;
constexpr std::int16_t kCutElsewhere = -2;  // a dim that must be whole
constexpr std::int16_t kPartial = -3;

MeshMask mask_of(const DimLayout& dim) {
  MeshMask mask = 0;
  for (const Factor& factor : dim) {
    for (const Cut& cut : factor.cuts) mask |= cut.is_virtual() ? 0 : MeshMask{1} << cut.mesh_dim;
  }
  return mask;
}

class Chooser {
 public:
  Chooser(const Instance& instance, const DecideOptions& options)
      : in_(instance),
        call_(*instance.call),
        cost_(options.cost),
        ndim_(static_cast<std::size_t>(in_.mesh.ndim())),
        floor_(in_.mesh, cost_) {
    for (std::size_t i = 0; i < in_.num_operands; ++i) read_states(i);
  }

  // The operands fit rows as they lie.
  std::optional<Decision> as_it_lies() const {
    RowChoice rows;
    for (std::size_t m = 0; m < ndim_; ++m) {
      const auto row = fitting_row(m);
      if (!row) return std::nullopt;
      rows.push_back(*row);
    }
    if (!kinds_agree(rows)) return std::nullopt;
    auto way = make_way(rows);
    if (!way) return std::nullopt;
    for (std::size_t i = 0; i < in_.num_operands; ++i) {
      if (!call_.operands[i] || *way->decision.inputs[i] == *call_.operands[i]) continue;
      if (!(way->decision.inputs[i]->dims() == call_.operands[i]->dims())) return std::nullopt;
    }
    return std::move(way->decision);
  }

  // Ways by ascending bound. Pinned: mesh dims on which the operands fit a row keep it.
  struct Bounded {
    std::int64_t bound;
    std::size_t index;  // in the order of the rows
    RowChoice rows;
  };
  std::vector<Bounded> bounded(bool pinned) const {
    std::vector<Options> options;
    for (std::size_t m = 0; m < ndim_; ++m) options.push_back(options_on(m, pinned));
    if (pinned && product(options) > kMostTried) {
      for (std::size_t m = 0; m < ndim_; ++m) options[m] = near(m, options[m]);
    }
    std::vector<Bounded> result;
    RowChoice at(ndim_, 0);
    for (bool more = true; more && result.size() < kMostWays;) {
      RowChoice rows;
      for (std::size_t m = 0; m < ndim_; ++m) {
        if (options[m].empty()) return {};
        rows.push_back(options[m][at[m]]);
      }
      if (kinds_agree(rows)) result.push_back({bound_of(rows), result.size(), rows});
      more = false;
      for (std::size_t m = ndim_; m-- > 0 && !more;) {
        more = ++at[m] < options[m].size();
        if (!more) at[m] = 0;
      }
    }
    std::stable_sort(result.begin(), result.end(),
                     [](const Bounded& a, const Bounded& b) { return a.bound < b.bound; });
    return result;
  }

  // The specs of a choice of rows; no value when it cannot be: in place on another spec, too many factors.
  std::optional<Way> make_way(const RowChoice& rows) const {
    Way way;
    const auto layouts = layouts_of(rows);
    if (!algorithm_takes(rows, layouts)) return std::nullopt;
    for (std::size_t i = 0; i < call_.operands.size(); ++i) {
      auto input = i < in_.num_operands ? input_spec(i, rows, layouts) : OrReason(call_.operands[i]);
      if (!input) return std::nullopt;
      way.decision.inputs.push_back(std::move(*input));
    }
    if (in_.form.in_place && call_.operands[0] && !(*way.decision.inputs[0] == *call_.operands[0])) return std::nullopt;
    for (std::size_t k = 0; k < call_.outputs.size(); ++k) {
      auto output = output_spec(k, rows, layouts);
      if (!output) return std::nullopt;
      if (in_.form.in_place && k == 0 && *output && call_.operands[0]) {
        const Spec& self = *call_.operands[0];
        if (!((*output)->dims() == self.dims() && (*output)->partials() == self.partials())) return std::nullopt;
        *output = self;
      }
      way.decision.outputs.push_back(std::move(*output));
    }
    set_local_work(way.decision, rows);
    return way;
  }

  // The same with what is known of its cost without a plan.
  std::optional<Way> make_costed_way(const RowChoice& rows) const {
    auto way = make_way(rows);
    if (!way) return way;
    way->row = text_of(rows);
    way->compute = saturating_add(compute_time(rows), exit_time(rows));
    way->compute = saturating_add(way->compute, merge_time(rows));
    way->new_partials = std::popcount(new_partials(rows));
    for (std::size_t k = 0; k < call_.outputs.size(); ++k) way->output_bytes += output_bytes(k, rows);
    if (!way->decision.local.windows.empty()) way->halo_bytes = fetched(rows).bytes;
    return way;
  }

 private:
  std::string text_of(const RowChoice& rows) const {
    return join(rows, ",", [&](std::uint16_t index) -> std::string {
      const Row& row = in_.rows[index];
      if (row.carry) return to_string(*row.carry);
      if (row.algorithmic) return in_.rule->algorithm->name + "(" + in_.names[row.letter] + ")";
      return row.letter == kWholeDim ? "R" : in_.names[row.letter];
    });
  }

  void read_states(std::size_t i) {
    InlineVec<std::int16_t, 4> states(ndim_, kReplicated);
    if (call_.operands[i]) {
      const Spec& spec = *call_.operands[i];
      for (std::size_t d = 0; d < spec.dims().size(); ++d) {
        const MeshMask mask = mask_of(spec.dims()[d]);
        const std::int16_t letter = in_.in[i][d];
        for (std::size_t m = 0; m < ndim_; ++m) {
          if (mask >> m & 1) states[m] = letter == kWholeDim ? kCutElsewhere : letter;
        }
      }
      for (std::size_t m = 0; m < ndim_; ++m) {
        if (spec.partials()[m]) states[m] = kPartial;
      }
    }
    states_.push_back(std::move(states));
  }

  bool has_letter(std::size_t i, std::int16_t letter) const {
    return letter != kWholeDim && std::find(in_.in[i].begin(), in_.in[i].end(), letter) != in_.in[i].end();
  }

  // Does the operand lie on a mesh dim as the row wants it?
  bool fits(const Row& row, std::size_t i, std::size_t m) const {
    const std::int16_t state = states_[i][m];
    if (has_letter(i, row.letter)) return state == row.letter;
    if (!row.in[i]) return state == kReplicated;
    if (state == kPartial) return call_.operands[i]->partials()[m] == row.in[i];
    return state == kReplicated && row.embeds[i];
  }

  // Can it be brought to what the row wants? Nothing but an operand that joins a sum turns Partial.
  bool reachable(const Row& row, std::size_t i, std::size_t m) const {
    return !row.in[i] || row.embeds[i] || fits(row, i, m);
  }

  // An algorithm that talks competes with moving the operands: it is for the search to choose.
  bool talks(const Row& row) const { return row.algorithmic && in_.rule->algorithm->kind != Algorithm::Kind::kLocated; }

  std::optional<std::uint16_t> fitting_row(std::size_t m) const {
    for (std::size_t r = 0; r < in_.rows.size(); ++r) {
      bool all = !talks(in_.rows[r]);
      for (std::size_t i = 0; all && i < in_.num_operands; ++i) all = !call_.operands[i] || fits(in_.rows[r], i, m);
      if (all) return static_cast<std::uint16_t>(r);
    }
    return std::nullopt;
  }

  // In place the first operand, and so the result, stays what it is.
  bool keeps_self(const Row& row, std::size_t m) const {
    return !in_.form.in_place || !call_.operands[0] || fits(row, 0, m);
  }

  static std::size_t product(const std::vector<Options>& options) {
    std::size_t total = 1;
    for (const Options& list : options) total = std::min(kMostWays, total * list.size());
    return total;
  }

  // The rows that a mesh dim may take.
  Options options_on(std::size_t m, bool pinned) const {
    if (pinned) {
      if (const auto row = fitting_row(m)) return {*row};
    }
    Options result;
    for (std::size_t r = 0; r < in_.rows.size(); ++r) {
      const Row& row = in_.rows[r];
      bool possible = keeps_self(row, m);
      for (std::size_t i = 0; possible && i < in_.num_operands; ++i) {
        possible = !call_.operands[i] || reachable(row, i, m);
      }
      if (possible) result.push_back(static_cast<std::uint16_t>(r));
    }
    return result;
  }

  // Of these rows all replicated and those that let an operand stay as it is here; all of them when none does, since
  // then a Partial may be reduced to any of them.
  Options near(std::size_t m, const Options& options) const {
    Options result;
    bool stays = false;
    for (std::uint16_t r : options) {
      bool here = false;
      for (std::size_t i = 0; i < in_.num_operands; ++i) {
        here = here || (call_.operands[i] && states_[i][m] != kReplicated && fits(in_.rows[r], i, m));
      }
      stays = stays || here;
      if (here || r == 0) result.push_back(r);
    }
    return stays ? result : options;
  }

  // One reduction in each spec, or sum with avg.
  bool kinds_agree(const RowChoice& rows) const {
    const auto agree = [&](std::size_t n, auto kind_of) {
      for (std::size_t t = 0; t < n; ++t) {
        std::optional<ReduceOp> seen;
        for (std::uint16_t index : rows) {
          const auto op = kind_of(in_.rows[index], t);
          if (!op) continue;
          const auto sums = [](ReduceOp o) { return o == ReduceOp::kSum || o == ReduceOp::kAvg; };
          if (seen && *seen != *op && !(sums(*seen) && sums(*op))) return false;
          seen = op;
        }
      }
      return true;
    };
    return agree(call_.operands.size(), [](const Row& row, std::size_t i) { return row.in[i]; }) &&
           agree(call_.outputs.size(), [](const Row& row, std::size_t k) { return row.out[k]; });
  }

  // ---- specs

  MeshMask mask_of_letter(const RowChoice& rows, std::int16_t letter) const {
    MeshMask mask = 0;
    for (std::size_t m = 0; m < ndim_; ++m) {
      if (in_.rows[rows[m]].letter == letter) mask |= MeshMask{1} << m;
    }
    return mask;
  }

  // The layout of every letter: that of the largest operand that is cut by exactly these mesh dims there, so that its
  // order, factors and virtual cuts stay; else plain cuts in mesh order.
  std::vector<DimLayout> layouts_of(const RowChoice& rows) const {
    std::vector<DimLayout> result;
    for (std::size_t letter = 0; letter < in_.letters.size(); ++letter) {
      const MeshMask mask = mask_of_letter(rows, static_cast<std::int16_t>(letter));
      const DimLayout* known = mask ? known_layout(static_cast<std::int16_t>(letter), mask) : nullptr;
      if (known) {
        result.push_back(*known);
        continue;
      }
      Factor factor{in_.letters[letter], {}};
      for (std::size_t m = 0; m < ndim_; ++m) {
        if (mask >> m & 1) factor.cuts.push_back({static_cast<std::int32_t>(m), in_.mesh.shape()[m]});
      }
      result.push_back({std::move(factor)});
    }
    return result;
  }

  bool algorithm_takes(const RowChoice& rows, const std::vector<DimLayout>& layouts) const {
    if (!in_.rule->algorithm || (!in_.rule->algorithm->plain && !in_.rule->window)) return true;
    return std::none_of(rows.begin(), rows.end(), [&](std::uint16_t index) {
      const Row& row = in_.rows[index];
      if (!row.algorithmic) return false;
      return layouts[row.letter].size() != 1 || has_virtual(layouts[row.letter][0]);
    });
  }

  const DimLayout* known_layout(std::int16_t letter, MeshMask mask) const {
    const DimLayout* best = nullptr;
    std::int64_t most = -1;
    for (std::size_t i = 0; i < in_.num_operands; ++i) {
      for (std::size_t d = 0; d < in_.in[i].size(); ++d) {
        if (in_.in[i][d] != letter) continue;
        const DimLayout& dim = call_.operands[i]->dims()[d];
        const bool self = in_.form.in_place && i == 0;
        const std::int64_t bytes = self ? kInt64Max : call_.operands[i]->meta().nbytes();
        if (mask_of(dim) != mask || bytes <= most) continue;
        best = &dim;
        most = bytes;
      }
    }
    return best;
  }

  template <class KindOf>
  OrReason<Spec> spec_of(const TensorMeta& meta, const LetterMap& map, const std::vector<DimLayout>& layouts,
                         const RowChoice& rows, const Spec* current, KindOf kind_of) const {
    Partials partials(ndim_);
    for (std::size_t m = 0; m < ndim_; ++m) partials[m] = kind_of(in_.rows[rows[m]]);
    DimLayouts dims;
    for (std::size_t d = 0; d < map.size(); ++d) {
      dims.push_back(map[d] == kWholeDim ? DimLayout{Factor{meta.shape()[d], {}}} : layouts[map[d]]);
      // Cut alike on both sides of its windows, where it has other sizes: a halo's layouts are plain.
      if (in_.rule->window && map[d] != kWholeDim && in_.algorithmic[map[d]]) dims.back()[0].size = meta.shape()[d];
    }
    if (current && current->dims() == dims && current->partials() == partials) return *current;
    return Spec::from_dims(meta, in_.mesh, dims, partials);
  }

  OrReason<std::optional<Spec>> input_spec(std::size_t i, const RowChoice& rows,
                                           const std::vector<DimLayout>& layouts) const {
    if (!call_.operands[i]) return std::optional<Spec>();
    const Spec& current = *call_.operands[i];
    auto spec = spec_of(current.meta(), in_.in[i], layouts, rows, &current, [&](const Row& row) { return row.in[i]; });
    if (!spec) return Reason{spec.reason()};
    return std::optional(*spec);
  }

  OrReason<std::optional<Spec>> output_spec(std::size_t k, const RowChoice& rows,
                                            const std::vector<DimLayout>& layouts) const {
    if (!call_.outputs[k]) return std::optional<Spec>();
    auto spec =
        spec_of(*call_.outputs[k], in_.out[k], layouts, rows, nullptr, [&](const Row& row) { return row.out[k]; });
    if (!spec) return Reason{spec.reason()};
    return std::optional(*spec);
  }

  void set_local_work(Decision& decision, const RowChoice& rows) const {
    LocalWork& local = decision.local;
    bool cuts = false;
    bool reduces = false;
    for (std::size_t m = 0; m < ndim_; ++m) {
      const Row& row = in_.rows[rows[m]];
      if (row.letter != kWholeDim) {
        cuts = true;
        for (const auto& op : row.out) reduces = reduces || op;
      }
      if (row.algorithmic) {
        local.algorithm = in_.rule->algorithm->name;
        local.algorithm_dims.push_back(static_cast<std::int64_t>(m));
        if (local.windows.empty()) {
          for (const Sliding& dim : in_.sliding) local.windows.push_back(dim.window);
        }
      }
      if (row.once == Row::Once::kNo) continue;
      local.once.push_back(static_cast<std::int64_t>(m));
      local.others = row.once == Row::Once::kKeep ? LocalWork::Others::kKeep : LocalWork::Others::kIdentity;
      local.others_op = *row.in[0];
    }
    const OpRule& rule = *in_.rule;
    if (rule.scaled && cuts) {
      decision.rewrites.push_back(
          {rule.scaled->arg, Rewrite::Kind::kScaled, rule.scaled->dim, call_.constant(rule.scaled->arg)});
    }
    if (rule.size_arg) decision.rewrites.push_back({*rule.size_arg, Rewrite::Kind::kLocalShape, 0, {}});
    // Where the whole has elements, only a cut can leave a rank none: what it would add is nothing.
    const bool skips = rule.skip_empty && call_.operands[0] && call_.operands[0]->meta().numel() > 0;
    // A mean of nothing is not the identity: every rank divides its empty sum by 0.
    const bool mean_of_nothing = (!rule.mean_op.empty() || in_.sum_for_mean) && in_.mean_count == 0;
    if (reduces && !mean_of_nothing && (rule.reduce || rule.reduction_arg || skips)) {
      local.identity = rule.reduce.value_or(ReduceOp::kSum);
    }
    if (reduces && !rule.mean_op.empty()) {
      local.op = rule.mean_op;
      local.divide_by = in_.mean_count;
    }
    if (cuts && in_.sum_for_mean) {
      decision.rewrites.push_back({*rule.reduction_arg, Rewrite::Kind::kValue, 0, StaticArg::integer(2)});
      local.divide_by = in_.mean_count;
    }
  }

  // ---- cost

  std::int64_t pieces(const RowChoice& rows, std::int16_t letter) const {
    std::int64_t count = 1;
    for (std::size_t m = 0; m < ndim_; ++m) {
      if (in_.rows[rows[m]].letter == letter) count *= in_.mesh.shape()[m];
    }
    return count;
  }

  // The bytes of the largest local part.
  std::int64_t local_bytes(const TensorMeta& meta, const LetterMap& map, const RowChoice& rows) const {
    std::int64_t bytes = element_size(meta.dtype());
    for (std::size_t d = 0; d < map.size(); ++d) {
      const std::int64_t count = map[d] == kWholeDim ? 1 : pieces(rows, map[d]);
      bytes *= ceil_div(meta.shape()[d], count);
    }
    return bytes;
  }

  std::int64_t output_bytes(std::size_t k, const RowChoice& rows) const {
    return call_.outputs[k] ? local_bytes(*call_.outputs[k], in_.out[k], rows) : 0;
  }

  std::int64_t compute_time(const RowChoice& rows) const {
    std::int64_t bytes = 0;
    for (std::size_t i = 0; i < in_.num_operands; ++i) {
      if (call_.operands[i]) bytes = saturating_add(bytes, local_bytes(call_.operands[i]->meta(), in_.in[i], rows));
    }
    for (std::size_t k = 0; k < call_.outputs.size(); ++k) bytes = saturating_add(bytes, output_bytes(k, rows));
    if (in_.contraction) {
      std::int64_t macs = 1;
      for (std::size_t letter = 0; letter < in_.letters.size(); ++letter) {
        if (in_.letters[letter] < 0) continue;
        macs = scaled(macs, ceil_div(in_.letters[letter], pieces(rows, static_cast<std::int16_t>(letter))), 1);
      }
      bytes = saturating_add(bytes, macs / kMacsPerByte);
    }
    return scaled(bytes, cost_.constants().local_kib_ps, 1024);
  }

  // Was an operand Partial here already, and does the row carry that through?
  bool carried(const Row& row, std::size_t m) const {
    for (std::size_t i = 0; i < in_.num_operands; ++i) {
      if (row.in[i] && states_[i][m] == kPartial) return true;
    }
    return false;
  }

  // Mesh dims on which a result is Partial that no operand brought along.
  MeshMask new_partials(const RowChoice& rows) const {
    MeshMask mask = 0;
    for (std::size_t m = 0; m < ndim_; ++m) {
      const Row& row = in_.rows[rows[m]];
      const bool partial = std::any_of(row.out.begin(), row.out.end(), [](const auto& op) { return op.has_value(); });
      if (partial && !carried(row, m)) mask |= MeshMask{1} << m;
    }
    return mask;
  }

  // What it will take to be rid of the Partials that were not there before: a reduce-scatter of each result.
  std::int64_t exit_time(const RowChoice& rows) const {
    const MeshMask fresh = new_partials(rows);
    std::int64_t time = 0;
    for (std::size_t k = 0; fresh && k < call_.outputs.size(); ++k) {
      MeshDims dims;
      for (std::size_t m = 0; m < ndim_; ++m) {
        if ((fresh >> m & 1) && in_.rows[rows[m]].out[k]) dims.push_back(static_cast<std::int64_t>(m));
      }
      if (dims.empty()) continue;
      const GroupCost group = cost_.group(in_.mesh, dims);
      if (group.size == 1) continue;
      time = saturating_add(time, cost_.reduce_scatter(group, ceil_div(output_bytes(k, rows), group.size)));
    }
    return time;
  }

  // What an algorithm sends: two all-reduces of a slice, which is what an operand has without the dims that are merged.
  std::int64_t merge_time(const RowChoice& rows) const {
    MeshDims dims;
    for (std::size_t m = 0; m < ndim_; ++m) {
      if (talks(in_.rows[rows[m]])) dims.push_back(static_cast<std::int64_t>(m));
    }
    if (dims.empty()) return 0;
    if (in_.rule->window) return halo_time(rows, dims);
    const auto is_merged = [&](std::int16_t letter) { return letter != kWholeDim && in_.algorithmic[letter]; };
    std::int64_t slice = 0;
    for (std::size_t i = 0; i < in_.num_operands; ++i) {
      if (!call_.operands[i] || std::none_of(in_.in[i].begin(), in_.in[i].end(), is_merged)) continue;
      std::int64_t bytes = element_size(call_.operands[i]->meta().dtype());
      for (std::size_t d = 0; d < in_.in[i].size(); ++d) {
        const std::int16_t letter = in_.in[i][d];
        const std::int64_t count = letter == kWholeDim ? 1 : pieces(rows, letter);
        if (!is_merged(letter)) bytes *= ceil_div(call_.operands[i]->meta().shape()[d], count);
      }
      slice = std::max(slice, bytes);
    }
    for (std::size_t k = 0; k < call_.outputs.size(); ++k) {
      if (std::none_of(in_.out[k].begin(), in_.out[k].end(), is_merged)) slice = std::max(slice, output_bytes(k, rows));
    }
    const std::int64_t once = cost_.all_reduce(cost_.group(in_.mesh, dims), slice);
    return saturating_add(once, once);
  }

  // What the windows over a part read beyond it.
  struct Fetched {
    std::int64_t bytes = 0;
    std::int64_t messages = 0;
  };
  Fetched fetched(const RowChoice& rows) const {
    const std::size_t over = window_operand(*in_.rule, call_);
    const TensorMeta& meta = call_.operands[over]->meta();
    std::int64_t needed = local_bytes(meta, in_.in[over], rows), held = needed, peers = 1;
    for (const Sliding& sliding : in_.sliding) {
      SlidingDim dim{sliding.window, sliding.inputs, sliding.outputs, {}};
      for (std::size_t m = 0; m < ndim_; ++m) {
        if (in_.rows[rows[m]].letter == sliding.letter) {
          dim.cuts.push_back({static_cast<std::int32_t>(m), in_.mesh.shape()[m]});
        }
      }
      if (dim.cuts.empty()) continue;
      const HaloNeed halo = halo_of(dim, in_.mesh);
      const std::int64_t part = std::max<std::int64_t>(1, ceil_div(sliding.inputs, pieces(rows, sliding.letter)));
      needed = scaled(needed, halo.needed, part);
      held = scaled(held, halo.held, part);
      peers *= halo.peers + 1;
    }
    return {needed - held, peers - 1};
  }

  // One exchange of it; in a gradient a second one, back.
  std::int64_t halo_time(const RowChoice& rows, const MeshDims& mesh_dims) const {
    const Fetched halo = fetched(rows);
    if (halo.messages == 0) return 0;
    const std::int64_t once = cost_.exchange(cost_.group(in_.mesh, mesh_dims), halo.messages, halo.bytes);
    return window_operand(*in_.rule, call_) == 0 ? once : saturating_add(once, once);
  }

  std::int64_t bound_of(const RowChoice& rows) const {
    std::int64_t bound = saturating_add(saturating_add(compute_time(rows), exit_time(rows)), merge_time(rows));
    for (std::size_t i = 0; i < in_.num_operands; ++i) {
      if (!call_.operands[i]) continue;
      bool moves = false;
      bool reduces = false;
      std::uint32_t merged = 0;  // mesh dims along which pieces or parts come together
      for (std::size_t m = 0; m < ndim_; ++m) {
        const std::int16_t state = states_[i][m];
        const Row& row = in_.rows[rows[m]];
        if (in_.mesh.shape()[m] == 1 || state == kReplicated || fits(row, i, m)) continue;
        moves = true;
        reduces = reduces || state == kPartial;
        if (state == kPartial || !has_letter(i, row.letter)) merged |= std::uint32_t{1} << m;
      }
      if (!moves) continue;
      const TensorMeta& meta = call_.operands[i]->meta();
      Dims target;
      for (std::size_t d = 0; d < in_.in[i].size(); ++d) {
        const std::int16_t letter = in_.in[i][d];
        target.push_back(letter == kWholeDim ? meta.shape()[d] : ceil_div(meta.shape()[d], pieces(rows, letter)));
      }
      const Dims source = first_local_shape(*call_.operands[i]);
      bound = saturating_add(bound, floor_.time(source, target, element_size(meta.dtype()), reduces, merged));
    }
    return bound;
  }

  const Instance& in_;
  const OpCall& call_;
  const CostModel& cost_;
  const std::size_t ndim_;
  const MoveFloor floor_;
  std::vector<InlineVec<std::int16_t, 4>> states_;  // per operand and mesh dim: a letter or one of the above
};

struct Scored {
  Score score;
  Way way;
};

std::string reason_of(const OpCall& call, const Scored& scored) {
  std::string text = "row " + scored.way.row;
  for (std::size_t i = 0; i < call.operands.size(); ++i) {
    const auto& to = scored.way.decision.inputs[i];
    if (call.operands[i] && !(*call.operands[i] == *to)) {
      text += "; operand " + std::to_string(i) + " from " + call.operands[i]->to_string() + " to " + to->to_string();
    }
  }
  if (scored.way.halo_bytes > 0) text += "; a halo of " + bytes_text(scored.way.halo_bytes);
  return text + "; " + time_text(scored.score.time);
}

Decision finished(const OpCall& call, Scored scored) {
  scored.way.decision.time = scored.score.time;
  scored.way.decision.reason = reason_of(call, scored);
  return std::move(scored.way.decision);
}

std::optional<Scored> score_way(const Instance& instance, const Chooser& chooser, const RowChoice& rows,
                                std::size_t index, const DecideOptions& options) {
  auto way = chooser.make_costed_way(rows);
  if (!way) return std::nullopt;
  const auto score = score_of(*instance.call, *way, index, instance.form, options.cost);
  if (!score) return std::nullopt;
  return Scored{*score, std::move(*way)};
}

// Exact plans in the order of the bounds, until no bound is below the best.
std::optional<Scored> cheapest(const Instance& instance, const Chooser& chooser, bool pinned,
                               const DecideOptions& options) {
  std::optional<Scored> best;
  for (const auto& [bound, index, rows] : chooser.bounded(pinned)) {
    if (best && bound > best->score.time) break;
    auto scored = score_way(instance, chooser, rows, index, options);
    if (scored && (!best || scored->score < best->score)) best = std::move(scored);
  }
  return best;
}

std::optional<Scored> choose(const Instance& instance, const Chooser& chooser, const DecideOptions& options) {
  auto best = cheapest(instance, chooser, true, options);
  return best ? std::move(best) : cheapest(instance, chooser, false, options);
}

Reason refusal(const Instance& instance) {
  const OpCall& call = *instance.call;
  if (instance.form.in_place && call.operands[0]) {
    return {"no way to run it in place keeps " + call.operands[0]->to_string() + "; the operands are " +
            join(call.operands, ", ", [](const auto& spec) { return spec ? spec->to_string() : "a number"; })};
  }
  return {"no candidate can be reached from the operands"};
}

// Nothing moves; the results are cut like the operand, or not at all. A new tensor of the operand's shape is cut like
// it too: autograd makes the gradients that it keeps in this way.
OrReason<Decision> decide_factory(const OpRule& rule, const OpCall& call) {
  const auto mesh = mesh_of(call);
  if (!mesh) return Reason{mesh.reason()};
  Decision decision;
  decision.inputs = call.operands;
  decision.reason = "nothing moves";
  const std::size_t ndim = static_cast<std::size_t>(mesh->ndim());
  for (std::size_t k = 0; k < call.outputs.size(); ++k) {
    const TensorMeta& meta = *call.outputs[k];
    DimLayouts dims;
    for (std::int64_t size : meta.shape()) dims.push_back({Factor{size, {}}});
    const auto& model = call.operands[0];
    if (model && (rule.kind == RuleKind::kLike || meta.shape() == model->meta().shape())) dims = model->dims();
    auto spec = Spec::from_dims(meta, *mesh, dims, Partials(ndim));
    if (!spec) return Reason{spec.reason()};
    decision.outputs.emplace_back(*spec);
  }
  if (rule.size_arg) {
    decision.rewrites.push_back({*rule.size_arg, Rewrite::Kind::kLocalShape, 0, {}});
    // Strides, where the operator takes them, come after the size.
    const std::size_t next = *rule.size_arg + 1;
    if (next < call.args.size() && call.args[next].constant.kind() == StaticArg::Kind::kInts) {
      decision.rewrites.push_back({next, Rewrite::Kind::kLocalStride, 0, {}});
    }
  }
  return decision;
}

// The chosen one, with the others named.
OrReason<Decision> explained(const OpRule& rule, const OpCall& call, const DecideOptions& options) {
  auto all = candidates(rule, call, options);
  if (!all) return Reason{all.reason()};
  Decision decision = std::move(all->front().decision);
  for (std::size_t i = 1; i < std::min(all->size(), kMostNamed + 1); ++i) {
    decision.reason += "; instead of row " + (*all)[i].row + ", " + time_text((*all)[i].decision.time);
  }
  return decision;
}

}  // namespace

OrReason<CallLetters> letters_of(const OpRule& rule, const OpCall& call) {
  static_assert(kNoLetter == kWholeDim && std::is_same_v<LetterMap, InlineVec<std::int16_t, 6>>);
  const auto instance = make_instance(rule, call);
  if (!instance) return Reason{instance.reason()};
  CallLetters letters{instance->in, instance->out};
  // What only an algorithm cuts the operator itself needs whole.
  for (auto* maps : {&letters.operands, &letters.results}) {
    for (LetterMap& map : *maps) {
      for (std::int16_t& letter : map) {
        if (letter != kWholeDim && instance->algorithmic[letter]) letter = kWholeDim;
      }
    }
  }
  return letters;
}

bool fits(const OpRule& rule, const OpCall& call) {
  if (rule.kind != RuleKind::kFactors || !mesh_of(call)) return true;
  return static_cast<bool>(make_instance(rule, call));
}

OrReason<Decision> decide(const OpRule& rule, const OpCall& call, const DecideOptions& options) {
  if (options.explain && options.nth == 0) return explained(rule, call, options);
  if (options.algorithms_first && rule.algorithm) {
    auto all = candidates(rule, call, {.cost = options.cost});
    if (!all) return Reason{all.reason()};
    const auto found = std::find_if(all->begin(), all->end(),
                                    [](const Candidate& one) { return !one.decision.local.algorithm.empty(); });
    return std::move((found == all->end() ? all->front() : *found).decision);
  }
  if (options.nth > 0) {
    auto all = candidates(rule, call, options);
    if (!all) return Reason{all.reason()};
    return std::move((*all)[static_cast<std::size_t>(options.nth) % all->size()].decision);
  }
  if (rule.kind == RuleKind::kView) return decide_view(rule, call, options);
  if (rule.kind == RuleKind::kLike || rule.kind == RuleKind::kFresh) return decide_factory(rule, call);
  const auto instance = make_instance(rule, call);
  if (!instance) return Reason{instance.reason()};
  const Chooser chooser(*instance, options);
  if (auto decision = chooser.as_it_lies()) {
    decision->reason = "as it lies";
    return std::move(*decision);
  }
  auto best = choose(*instance, chooser, options);
  if (!best) return refusal(*instance);
  return finished(call, std::move(*best));
}

OrReason<std::vector<Candidate>> candidates(const OpRule& rule, const OpCall& call, const DecideOptions& options) {
  if (rule.kind == RuleKind::kView) return view_candidates(rule, call, options);
  if (rule.kind == RuleKind::kLike || rule.kind == RuleKind::kFresh) {
    auto decision = decide_factory(rule, call);
    if (!decision) return Reason{decision.reason()};
    return std::vector<Candidate>{{std::move(*decision), "factory"}};
  }
  const auto instance = make_instance(rule, call);
  if (!instance) return Reason{instance.reason()};
  const Chooser chooser(*instance, options);
  std::vector<Scored> all;
  for (const auto& [bound, index, rows] : chooser.bounded(false)) {
    if (auto scored = score_way(*instance, chooser, rows, index, options)) all.push_back(std::move(*scored));
  }
  std::sort(all.begin(), all.end(), [](const Scored& a, const Scored& b) { return a.score < b.score; });
  auto chosen = decide(rule, call, {.cost = options.cost, .nth = 0, .explain = false});
  if (!chosen) return Reason{chosen.reason()};
  const auto front = std::find_if(all.begin(), all.end(), [&](const Scored& scored) {
    return scored.way.decision.inputs == chosen->inputs && scored.way.decision.outputs == chosen->outputs;
  });
  std::vector<Candidate> result;
  if (front != all.end())
    std::rotate(all.begin(), front, front + 1);
  else
    result.push_back({std::move(*chosen), "chosen"});
  for (Scored& scored : all) {
    std::string row = scored.way.row;
    result.push_back({finished(call, std::move(scored)), std::move(row)});
  }
  return result;
}

}  // namespace dtensor
