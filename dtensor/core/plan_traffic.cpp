// How many bytes a step moves, and how long it takes. What a rank holds before, after and both times is a product over
// the tensor dims, so each tensor dim is looked at along its own mesh dims only.
#include <algorithm>

#include "dtensor/core/plan_impl.h"

namespace dtensor {
namespace {

bool one_interval(const DimLayout& dim) { return dim.size() == 1 && !has_virtual(dim[0]); }

bool is_whole(const DimLayout& dim) {
  return std::all_of(dim.begin(), dim.end(), [](const Factor& factor) { return is_whole(factor); });
}

Interval interval_of(const Factor& factor, const Dims& at) {
  Interval piece{0, factor.size};
  for (const Cut& cut : factor.cuts) piece = chunk(piece, cut.count, at[cut.mesh_dim]);
  return piece;
}

std::int64_t common_size(const Interval& a, const Interval& b) {
  return std::max<std::int64_t>(0, std::min(a.end, b.end) - std::max(a.begin, b.begin));
}

std::int64_t common_size(const Intervals& a, const Intervals& b) {
  std::int64_t size = 0;
  for (std::size_t i = 0, j = 0; i < a.size() && j < b.size(); a[i].end < b[j].end ? ++i : ++j) {
    size += common_size(a[i], b[j]);
  }
  return size;
}

bool same_factoring(const DimLayout& a, const DimLayout& b) {
  return a.size() == b.size() &&
         std::equal(a.begin(), a.end(), b.begin(), [](const Factor& x, const Factor& y) { return x.size == y.size; });
}

// How many of the wanted indices a place holds of the last factors of a tensor dim. Rows of the first of them that are
// wanted whole count alike; the two at the ends are looked into.
std::int64_t held_within(std::span<const Factor> factors, const Dims& at, Interval wanted) {
  std::int64_t unit = 1;
  std::int64_t held_of_unit = 1;
  for (const Factor& factor : factors.subspan(1)) {
    unit *= factor.size;
    held_of_unit *= held_of(factor, at).size;
  }
  if (wanted.empty() || unit == 0) return 0;
  const Interval whole{ceil_div(wanted.begin, unit), wanted.end / unit};
  std::int64_t sum = 0;
  for (const Interval& rows : intervals_of(factors[0], at)) {
    sum += common_size(rows, whole) * held_of_unit;
    const auto look_into = [&](std::int64_t row) {
      if (row < rows.begin || row >= rows.end) return;
      const Interval inside{std::max<std::int64_t>(0, wanted.begin - row * unit),
                            std::min(unit, wanted.end - row * unit)};
      sum += held_within(factors.subspan(1), at, inside);
    };
    if (wanted.begin % unit != 0) look_into(wanted.begin / unit);
    if (wanted.end % unit != 0 && (wanted.end / unit != wanted.begin / unit || wanted.begin % unit == 0)) {
      look_into(wanted.end / unit);
    }
  }
  return sum;
}

// How many indices of a tensor dim are held both by a place under one layout and by a place under another.
std::int64_t common_size(const DimLayout& a, const Dims& at_a, const DimLayout& b, const Dims& at_b) {
  if (one_interval(a) && one_interval(b)) return common_size(interval_of(a[0], at_a), interval_of(b[0], at_b));
  if (one_interval(b)) return held_within(a, at_a, interval_of(b[0], at_b));
  if (one_interval(a)) return held_within(b, at_b, interval_of(a[0], at_a));
  std::int64_t size = 1;
  if (same_factoring(a, b)) {
    for (std::size_t f = 0; f < a.size(); ++f) size *= common_size(intervals_of(a[f], at_a), intervals_of(b[f], at_b));
    return size;
  }
  const auto runs = [](const DimLayout& dim, const Dims& at) {
    Intervals result;
    DimSet set;
    for (const Factor& factor : dim) set.push_back({factor.size, intervals_of(factor, at)});
    for_each_run(set, [&](Interval run, std::int64_t) { result.push_back(run); });
    return result;
  };
  return common_size(runs(a, at_a), runs(b, at_b));
}

std::int64_t held_size(const DimLayout& dim, const Dims& at) {
  std::int64_t size = 1;
  for (const Factor& factor : dim) size *= held_of(factor, at).size;
  return size;
}

std::int64_t held_size(const Spec& spec, const Dims& at) {
  std::int64_t size = 1;
  for (const DimLayout& dim : spec.dims()) size *= held_size(dim, at);
  return size;
}

std::int64_t common_size(const Spec& a, const Dims& at_a, const Spec& b, const Dims& at_b) {
  std::int64_t size = 1;
  for (std::size_t d = 0; d < a.dims().size() && size > 0; ++d) {
    size *= common_size(a.dims()[d], at_a, b.dims()[d], at_b);
  }
  return size;
}

// The pieces of a factor that hold something of an interval, after its first i cuts.
std::int64_t count_pieces(const Factor& factor, std::size_t i, Interval piece, Interval wanted) {
  if (common_size(piece, wanted) == 0) return 0;
  if (i == factor.cuts.size()) return 1;
  const std::int64_t count = factor.cuts[i].count;
  const std::int64_t c = ceil_div(piece.size(), count);
  const std::int64_t first = (std::max(wanted.begin, piece.begin) - piece.begin) / c;
  const std::int64_t last = (std::min(wanted.end, piece.end) - 1 - piece.begin) / c;
  std::int64_t sum = count_pieces(factor, i + 1, chunk(piece, count, first), wanted);
  if (last > first) sum += count_pieces(factor, i + 1, chunk(piece, count, last), wanted);
  // Those in between are whole and alike.
  if (last > first + 1) sum += (last - first - 1) * count_pieces(factor, i + 1, {0, c}, {0, c});
  return sum;
}

// How many holders have some of what a place holds: exact where both hold one interval of every tensor dim.
std::int64_t count_holders(const Spec& has, const Spec& wants, const Dims& at) {
  std::int64_t count = 1;
  for (std::size_t d = 0; d < has.dims().size(); ++d) {
    const DimLayout& a = has.dims()[d];
    const DimLayout& b = wants.dims()[d];
    if (one_interval(a) && one_interval(b)) {
      count *= count_pieces(a[0], 0, {0, a[0].size}, interval_of(b[0], at));
      continue;
    }
    for (const Factor& factor : a) {
      for (const Cut& cut : factor.cuts) count *= cut.is_virtual() ? 1 : cut.count;
    }
  }
  return count;
}

// All coordinates along some mesh dims, or a few along each when they are too many.
class Census {
 public:
  Census(const Dims& shape, std::uint32_t mask, std::int64_t most) : at_(shape.size()), strides_(shape.size()) {
    for (std::size_t m = 0; m < shape.size(); ++m) {
      if (mask >> m & 1) {
        dims_.push_back(static_cast<std::int64_t>(m));
        population_ = scaled(population_, shape[m], 1);
      } else {
        copies_ = scaled(copies_, shape[m], 1);
      }
    }
    exact_ = population_ <= most;
    for (std::int64_t m : dims_) {
      Dims list;
      const std::int64_t few[] = {0, 1, shape[m] / 2, shape[m] - 1};
      for (std::int64_t i = 0; i < (exact_ ? shape[m] : 4); ++i) {
        const std::int64_t index = exact_ ? i : few[i];
        if (list.empty() || index > list.back()) list.push_back(index);
      }
      indices_.push_back(std::move(list));
    }
    for (std::size_t j = dims_.size(); j-- > 0;) {
      strides_[dims_[j]] = sample_;
      sample_ *= static_cast<std::int64_t>(indices_[j].size());
    }
  }

  bool exact() const { return exact_; }
  std::size_t size() const { return static_cast<std::size_t>(sample_); }
  const MeshDims& dims() const { return dims_; }
  // The indices looked at along the j-th of the dims.
  const Dims& indices(std::size_t j) const { return indices_[j]; }
  // Between places that differ by one in the list of indices of a mesh dim; 0 for mesh dims that are not looked at.
  std::int64_t stride(std::int64_t m) const { return strides_[m]; }
  // What a sum over the sample stands for.
  std::int64_t whole(std::int64_t sum) const { return scaled(scaled(sum, population_, sample_), copies_, 1); }

  template <class Fn>
  void each(Fn fn) {
    Dims digits(dims_.size());
    for (std::size_t i = 0; i < size(); ++i) {
      for (std::size_t j = 0; j < dims_.size(); ++j) at_[dims_[j]] = indices_[j][digits[j]];
      fn(i, static_cast<const Dims&>(at_));
      for (std::size_t j = dims_.size(); j-- > 0;) {
        if (++digits[j] < static_cast<std::int64_t>(indices_[j].size())) break;
        digits[j] = 0;
      }
    }
  }

 private:
  Dims at_;
  Dims strides_;
  MeshDims dims_;
  InlineVec<Dims, 4> indices_;
  std::int64_t population_ = 1;
  std::int64_t sample_ = 1;
  std::int64_t copies_ = 1;
  bool exact_ = true;
};

// Elements that a place holds before, after, and both times.
struct Held3 {
  std::int64_t before = 1;
  std::int64_t after = 1;
  std::int64_t common = 1;
};

// The intervals of a factor without virtual cuts, for all indices of the census along its mesh dims; and how to find
// the one of a place.
struct PieceTable {
  std::vector<Interval> pieces;
  InlineVec<std::int64_t, 4> strides;  // per dim of the census

  PieceTable(const Factor& factor, const Census& census) : pieces{{0, factor.size}}, strides(census.dims().size()) {
    const Dims first = {0};
    for (const Cut& cut : factor.cuts) {
      if (cut.count == 1) continue;
      const auto& dims = census.dims();
      const auto j = static_cast<std::size_t>(std::find(dims.begin(), dims.end(), cut.mesh_dim) - dims.begin());
      const Dims& indices = j < dims.size() ? census.indices(j) : first;
      for (std::int64_t& stride : strides) stride *= static_cast<std::int64_t>(indices.size());
      if (j < dims.size()) strides[j] = 1;
      std::vector<Interval> finer;
      finer.reserve(pieces.size() * indices.size());
      for (const Interval& piece : pieces) {
        const std::int64_t c = ceil_div(piece.size(), cut.count);
        for (const std::int64_t index : indices) {
          const std::int64_t begin = std::min(piece.end, piece.begin + c * index);
          finer.push_back({begin, std::min(piece.end, begin + c)});
        }
      }
      pieces = std::move(finer);
    }
  }

  // From now on a place's index along these mesh dims does not matter: the pieces of all of them, counted from the one
  // that is found.
  std::vector<std::int64_t> take_out(std::uint32_t mask, const Census& census) {
    std::vector<std::int64_t> all = {0};
    for (std::size_t j = 0; j < strides.size(); ++j) {
      if (!(mask >> census.dims()[j] & 1) || strides[j] == 0) continue;
      const std::size_t n = all.size();
      for (std::size_t index = 1; index < census.indices(j).size(); ++index) {
        for (std::size_t k = 0; k < n; ++k) all.push_back(all[k] + static_cast<std::int64_t>(index) * strides[j]);
      }
      strides[j] = 0;
    }
    return all;
  }
};

// A layout whose cuts by some mesh dims are undone: what all ranks along them hold together.
DimLayout joined(DimLayout dim, std::uint32_t mask) {
  for (Factor& factor : dim) {
    for (Cut& cut : factor.cuts) {
      if (cut.is_virtual() || !(mask >> cut.mesh_dim & 1)) continue;
      cut = {Cut::kVirtual, std::clamp<std::int64_t>(factor.size, 1, cut.count)};
    }
  }
  return dim;
}

// What the places of a census hold in a step; of what is held afterwards, what all ranks along some mesh dims hold
// together.
class Holdings {
 public:
  Holdings(const Step& step, Census& census, std::uint32_t together = 0)
      : kind_(together == 0 ? step.kind : StepKind::kExchange),
        census_(census),
        together_(together),
        held_(census.size()) {
    std::int64_t whole = 1;
    for (std::size_t d = 0; d < step.before.dims().size(); ++d) {
      const DimLayout& a = step.before.dims()[d];
      const DimLayout& b = step.after.dims()[d];
      if (is_whole(a) && is_whole(b)) {
        whole *= size_of(a);
      } else if (one_interval(a) && one_interval(b)) {
        add_intervals(a[0], b[0]);
      } else {
        add_sets(a, together == 0 ? b : joined(b, together));
      }
    }
    for (Held3& held : held_) held = {held.before * whole, held.after * whole, held.common * whole};
  }

  const Held3& operator[](std::size_t i) const { return held_[i]; }

 private:
  static void multiply(Held3& held, const Held3& by) {
    held.before *= by.before;
    held.after *= by.after;
    held.common *= by.common;
  }

  void add_intervals(const Factor& a, const Factor& b) {
    const PieceTable before(a, census_);
    PieceTable after(b, census_);
    const std::vector<std::int64_t> all = after.take_out(together_, census_);
    const std::size_t ndim = census_.dims().size();
    InlineVec<std::int64_t, 4> digits(ndim);
    std::int64_t i = 0;
    std::int64_t j = 0;
    for (Held3& held : held_) {
      const Interval& x = before.pieces[i];
      Held3 here{x.size(), 0, 0};
      for (const std::int64_t other : all) {
        const Interval& y = after.pieces[j + other];
        here.after += y.size();
        here.common += common_size(x, y);
      }
      multiply(held, here);
      for (std::size_t k = ndim; k-- > 0;) {
        i += before.strides[k];
        j += after.strides[k];
        if (++digits[k] < static_cast<std::int64_t>(census_.indices(k).size())) break;
        i -= before.strides[k] * digits[k];
        j -= after.strides[k] * digits[k];
        digits[k] = 0;
      }
    }
  }

  // Does a place hold under one layout all that it holds under the other? A collective only takes cuts out of a tensor
  // dim, puts some in, or changes their order.
  enum class Nested : std::uint8_t { kBeforeInAfter, kAfterInBefore, kUnknown };
  Nested nested(std::uint32_t before, std::uint32_t after) const {
    const bool collective =
        kind_ == StepKind::kAllGather || kind_ == StepKind::kReduceScatter || kind_ == StepKind::kAllToAll;
    if (!collective) return Nested::kUnknown;
    if ((after & ~before) == 0) return Nested::kBeforeInAfter;
    return (before & ~after) == 0 ? Nested::kAfterInBefore : Nested::kUnknown;
  }

  // One by one, each combination of the indices that matter once.
  void add_sets(const DimLayout& a, const DimLayout& b) {
    const std::uint32_t mask = cut_mask(a) | cut_mask(b);
    const Nested which = a == b ? Nested::kBeforeInAfter : nested(cut_mask(a), cut_mask(b));
    std::vector<Held3> known(held_.size());
    census_.each([&](std::size_t i, const Dims& at) {
      auto place = static_cast<std::int64_t>(i);  // the one with the first index wherever it does not matter
      for (std::size_t k = 0; k < census_.dims().size(); ++k) {
        const std::int64_t m = census_.dims()[k];
        if (mask >> m & 1) continue;
        const auto& indices = census_.indices(k);
        place -= census_.stride(m) * (std::find(indices.begin(), indices.end(), at[m]) - indices.begin());
      }
      if (place == static_cast<std::int64_t>(i)) known[i] = sets_at(a, b, at, which);
      multiply(held_[i], known[place]);
    });
  }

  static Held3 sets_at(const DimLayout& a, const DimLayout& b, const Dims& at, Nested which) {
    Held3 result{held_size(a, at), held_size(b, at), 0};
    if (which == Nested::kUnknown) {
      result.common = common_size(a, at, b, at);
    } else {
      result.common = which == Nested::kBeforeInAfter ? result.before : result.after;
    }
    return result;
  }

  const StepKind kind_;
  Census& census_;
  const std::uint32_t together_;
  std::vector<Held3> held_;
};

// So many places are looked at; fewer where each is a set of many intervals to compare.
std::int64_t most_counted(const Spec& before, const Spec& after) {
  for (std::size_t d = 0; d < before.dims().size(); ++d) {
    if (!one_interval(before.dims()[d]) || !one_interval(after.dims()[d])) return kMostCountedSets;
  }
  return kMostCounted;
}

bool is_even(const Spec& spec) {
  for (const DimLayout& dim : spec.dims()) {
    for (const Factor& factor : dim) {
      std::int64_t pieces = 1;
      for (const Cut& cut : factor.cuts) pieces = scaled(pieces, cut.count, 1);
      if (factor.size % pieces != 0) return false;
    }
  }
  return true;
}

// The mesh dims along which ranks may have other numbers. Where all cuts are even those that stay do not matter, and
// none does where a tensor dim is only gathered or only cut further: all ranks do as the first one does.
std::uint32_t counted_mask(const Step& step) {
  const std::uint32_t all = cut_mask(step.before) | cut_mask(step.after);
  if (!is_even(step.before) || !is_even(step.after)) return all;
  const bool collective = step.kind == StepKind::kAllGather || step.kind == StepKind::kReduceScatter ||
                          step.kind == StepKind::kAllToAll || step.kind == StepKind::kAllReduce;
  std::uint32_t mask = 0;
  for (std::size_t d = 0; d < step.before.dims().size(); ++d) {
    if (step.before.dims()[d] == step.after.dims()[d]) continue;
    const std::uint32_t before = cut_mask(step.before.dims()[d]);
    const std::uint32_t after = cut_mask(step.after.dims()[d]);
    const bool nested = (before & ~after) == 0 || (after & ~before) == 0;
    if (!collective || !nested) mask |= before | after;
  }
  return mask;
}

Census census_of(const Step& step) {
  return Census(step.before.mesh().shape(), counted_mask(step), most_counted(step.before, step.after));
}

void raise_to(std::int64_t& value, std::int64_t other) { value = std::max(value, other); }

// What a place sends on one mesh. Everyone who wants a piece has it from its one holder; where several hold it they
// take turns, and who has it already takes nothing but the other parts, from those at its own index.
class Sends {
 public:
  Sends(const Step& step, const StepRoles& roles, Census& census, const Holdings& holdings)
      : roles_(roles), shape_(step.before.mesh().shape()), census_(census), holdings_(holdings) {
    everyone_ = size_along(shape_, roles.everyone);
    turns_ = roles.num_takers / roles.num_holders;
    uneven_ = roles.num_takers % roles.num_holders;
    counted_ = census.exact();
    if (roles.num_holders == 1 || !counted_) return;
    std::uint32_t scattered = 0;
    for (std::int64_t m : roles.parts) scattered |= 1u << m;
    const std::uint32_t others = scattered | (cut_mask(step.before) & cut_mask(step.after));
    const std::uint32_t cut = cut_mask(step.after);
    if ((cut & scattered) != 0) of_owners_.emplace(step, census, scattered);
    if (uneven_ != 0 && (cut & others) != 0) of_all_.emplace(step, census, others);
  }

  std::int64_t at(std::size_t i, const Dims& coordinate) const {
    const Held3& held = holdings_[i];
    if (roles_.num_holders == 1) return held.before * roles_.num_takers * everyone_ - held.common;
    if (!counted_) return held.before * ceil_div(roles_.num_takers, roles_.num_holders) * everyone_;
    // Receivers with digit h on the holders' dims and q on the takers' have it from holder h + q: see for_each_receive.
    const std::int64_t mine = index_along(coordinate, shape_, roles_.holders);
    const std::int64_t q = index_along(coordinate, shape_, roles_.takers);
    const Holdings& owners = of_owners_ ? *of_owners_ : holdings_;
    const Holdings& all = of_all_ ? *of_all_ : owners;
    std::int64_t sum = held.before * turns_;
    for (std::int64_t turn = 0; turn < uneven_; ++turn) sum += common_with(all, i, coordinate, mine - turn);
    // Those that are at my place of the source have it, and would otherwise have come to me.
    sum -= common_with(owners, i, coordinate, mine - q);
    sum += common_with(owners, i, coordinate, mine);
    return sum * everyone_ - held.common;
  }

 private:
  // What I hold of what the place wants that differs from mine by its index among the holders.
  std::int64_t common_with(const Holdings& table, std::size_t i, const Dims& coordinate, std::int64_t holder) const {
    const std::int64_t n = roles_.num_holders;
    Dims other = coordinate;
    place_along(other, shape_, roles_.holders, (holder % n + n) % n);
    auto place = static_cast<std::int64_t>(i);
    for (std::int64_t m : roles_.holders) place += census_.stride(m) * (other[m] - coordinate[m]);
    return table[static_cast<std::size_t>(place)].common;
  }

  const StepRoles& roles_;
  const Dims& shape_;
  const Census& census_;
  const Holdings& holdings_;
  std::optional<Holdings> of_owners_;  // wanted by the ranks at my place of the source, of any part
  std::optional<Holdings> of_all_;     // wanted by anyone
  std::int64_t everyone_ = 1;
  std::int64_t turns_ = 1;
  std::int64_t uneven_ = 0;
  bool counted_ = false;
};

// Within one mesh: a rank receives what it lacks, from every part.
Traffic count_on_one_mesh(const Step& step, const StepRoles& roles) {
  Traffic result;
  Census census = census_of(step);
  const Holdings holdings(step, census);
  const Sends sends(step, roles, census, holdings);
  std::int64_t received = 0;
  std::size_t busiest = 0;
  Dims where(static_cast<std::size_t>(step.before.mesh().ndim()));
  census.each([&](std::size_t i, const Dims& at) {
    const Held3& held = holdings[i];
    const std::int64_t want = held.after * roles.num_parts - held.common;
    if (want > result.received.max) {
      result.received.max = want;
      busiest = i;
      where = at;
    }
    received = saturating_add(received, want);
    raise_to(result.sent.max, sends.at(i, at));
  });
  result.received.total = result.sent.total = census.whole(received);
  result.exact = census.exact();
  if (result.received.total == 0) {
    result.sent.max = 0;
    return result;
  }
  const bool keeps = holdings[busiest].common > 0;
  const std::int64_t copies =
      ceil_div(roles.num_takers, roles.num_holders) * size_along(step.before.mesh().shape(), roles.everyone);
  result.messages = scaled(count_holders(step.before, step.after, where), roles.num_parts, 1) - (keeps ? 1 : 0);
  raise_to(result.messages, scaled(count_holders(step.after, step.before, where), copies, 1) - (keeps ? 1 : 0));
  return result;
}

Traffic count_across(const Step& step, const StepRoles& roles) {
  Traffic result;
  const Mesh& source = step.before.mesh();
  const Mesh& target = step.after.mesh();
  Census census(target.shape(), (1u << target.ndim()) - 1, most_counted(step.before, step.after));
  std::int64_t received = 0;
  census.each([&](std::size_t, const Dims& at) {
    const auto mine = source.coordinate(target.rank_at(at));
    const std::int64_t want = held_size(step.after, at) - (mine ? common_size(step.before, *mine, step.after, at) : 0);
    raise_to(result.received.max, want);
    received = saturating_add(received, want);
    raise_to(result.messages, count_holders(step.before, step.after, at));
  });
  result.received.total = census.whole(received);
  const Dims first(static_cast<std::size_t>(source.ndim()));
  const std::int64_t copies = step.kind == StepKind::kBroadcast ? 1 : ceil_div(roles.num_takers, roles.num_holders);
  result.sent = {held_size(step.before, first) * copies, result.received.total};
  raise_to(result.messages, scaled(count_holders(step.after, step.before, first), copies, 1));
  result.exact = census.exact();
  return result;
}

// Each rank reduces one part of the elements and hands it round.
Traffic count_all_reduce(const Step& step, std::int64_t group) {
  Traffic result;
  Census census = census_of(step);
  const Holdings holdings(step, census);
  std::int64_t received = 0;
  for (std::size_t i = 0; i < census.size(); ++i) {
    const std::int64_t n = holdings[i].before;
    raise_to(result.received.max, n + (group - 2) * ceil_div(n, group));
    received = saturating_add(received, 2 * (group - 1) * n);
  }
  result.received.total = census.whole(received) / group;
  result.sent = result.received;
  result.messages = 2 * (group - 1);
  result.exact = census.exact();
  return result;
}

}  // namespace

std::int64_t most_bytes(const Spec& spec) {
  std::int64_t elements = 1;
  const Dims first(static_cast<std::size_t>(spec.mesh().ndim()));
  for (const DimLayout& dim : spec.dims()) elements *= held_size(dim, first);
  return elements * element_size(spec.meta().dtype());
}

Traffic traffic_of(const Step& step) {
  if (is_local(step.kind) || step.before.meta().numel() == 0) return {};
  const bool one_mesh = step.before.mesh() == step.after.mesh();
  const std::int64_t group = one_mesh ? size_along(step.before.mesh().shape(), step.mesh_dims)
                                      : step.before.mesh().size() + step.after.mesh().size();
  Traffic result;
  if (step.kind == StepKind::kAllReduce) {
    result = count_all_reduce(step, group);
  } else {
    const StepRoles roles = roles_of(step);
    result = one_mesh ? count_on_one_mesh(step, roles) : count_across(step, roles);
    result.messages = std::min(result.messages, group - 1);
  }
  const std::int64_t bytes = element_size(step.before.meta().dtype());
  for (std::int64_t* count : {&result.received.max, &result.received.total, &result.sent.max, &result.sent.total}) {
    *count = scaled(*count, bytes, 1);
  }
  return result;
}

void set_traffic(Step& step) {
  const Traffic traffic = traffic_of(step);
  step.received = traffic.received;
  step.sent = traffic.sent;
  step.messages = traffic.messages;
  step.exact = traffic.exact;
}

std::int64_t time_of(const Step& step, const CostModel& cost) {
  const Mesh& mesh = step.before.mesh();
  if (is_local(step.kind)) return cost.local(most_bytes(step.after));
  if (!(mesh == step.after.mesh())) {
    const Link link = cost.between();
    const std::int64_t both = mesh.size() + step.after.mesh().size();
    const GroupCost group = CostModel::group(std::span(&link, 1), std::span(&both, 1));
    return cost.exchange(group, step.messages, std::max(step.received.max, step.sent.max));
  }
  const GroupCost group = cost.group(mesh, step.mesh_dims);
  switch (step.kind) {
    case StepKind::kAllGather:
      return cost.all_gather(group, most_bytes(step.before));
    case StepKind::kReduceScatter:
      return cost.reduce_scatter(group, most_bytes(step.after));
    case StepKind::kAllReduce:
      return cost.all_reduce(group, most_bytes(step.before));
    case StepKind::kAllToAll:
      return cost.all_to_all(group, most_bytes(step.after));
    case StepKind::kPermute:
      return cost.permute(group, most_bytes(step.after), 1);
    default:
      break;
  }
  // Replicas share the sends: the fullest rank's share of them is its share of what there is to send.
  const StepRoles roles = roles_of(step);
  std::int64_t sends = step.sent.max;
  if (roles.num_holders > 1) {
    sends = std::min(sends, ceil_div(step.sent.total, std::max<std::int64_t>(mesh.size(), 1)));
  }
  return cost.exchange(group, step.messages, std::max(step.received.max, sends));
}

}  // namespace dtensor
