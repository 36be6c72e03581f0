#include "dtensor/core/plan_holdings.h"

#include <algorithm>

namespace dtensor {
namespace {

bool is_whole(const DimLayout& dim) {
  return std::all_of(dim.begin(), dim.end(), [](const Factor& factor) { return is_whole(factor); });
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

// A tensor dim before and after, where all cuts are even and their places fit together: an index is a number in mixed
// radix, a cut fixes some of its digits, and what is held both times is what both agree on.
//   [4 : virtual][2 : a] of 8 indices fixes the last digit of (4)(2);  [8 : b] fixes all, so b / 2 is free, b % 2 is a
class EvenDim {
 public:
  // None where something is uneven. Of what is held afterwards, what all ranks along some mesh dims hold together.
  static std::optional<EvenDim> make(const DimLayout& before, const DimLayout& after, std::uint32_t together) {
    EvenDim result;
    result.size_ = size_of(before);
    Spans a;
    Spans b;
    if (result.size_ == 0 || !read(before, 0, a) || !read(after, together, b)) return std::nullopt;
    for (const Span& x : a) result.held_ *= x.end / x.begin;
    for (const Span& y : b) result.held_after_ *= y.end / y.begin;
    result.common_ = result.held_ * result.held_after_;
    for (const Span& x : a) {
      for (const Span& y : b) {
        if (!result.compare(x, y)) return std::nullopt;
      }
    }
    return result;
  }

  Held3 at(const Dims& place) const {
    Held3 held{size_ / held_, size_ / held_after_, size_ / common_};
    for (const Shared& shared : shared_) {
      const std::int64_t x = place[shared.before] / shared.inside_before % shared.digits;
      const std::int64_t y = place[shared.after] / shared.inside_after % shared.digits;
      if (x != y) held.common = 0;
    }
    return held;
  }

 private:
  // A cut by a mesh dim, between two products of the radices outside of its ends.
  struct Span {
    std::int64_t begin;
    std::int64_t end;
    std::int32_t mesh_dim;
  };
  using Spans = InlineVec<Span, 4>;
  // Digits that a cut before and one after both fix.
  struct Shared {
    std::int32_t before;
    std::int32_t after;
    std::int64_t inside_before;
    std::int64_t inside_after;
    std::int64_t digits;
  };

  static bool read(const DimLayout& dim, std::uint32_t together, Spans& spans) {
    std::int64_t outside = 1;
    for (const Factor& factor : dim) {
      std::int64_t at = outside;
      std::int64_t left = factor.size;
      for (const Cut& cut : factor.cuts) {
        if (left % cut.count != 0) return false;
        const bool counts = !cut.is_virtual() && cut.count > 1 && !(together >> cut.mesh_dim & 1);
        if (counts) spans.push_back({at, at * cut.count, cut.mesh_dim});
        at *= cut.count;
        left /= cut.count;
      }
      outside *= factor.size;
    }
    return true;
  }

  // False where their ends do not fit together.
  bool compare(const Span& x, const Span& y) {
    const auto fit = [](std::int64_t a, std::int64_t b) { return a < b ? b % a == 0 : a % b == 0; };
    if (!fit(x.begin, y.begin) || !fit(x.begin, y.end) || !fit(x.end, y.begin) || !fit(x.end, y.end)) return false;
    const std::int64_t begin = std::max(x.begin, y.begin);
    const std::int64_t end = std::min(x.end, y.end);
    if (begin >= end) return true;
    shared_.push_back({x.mesh_dim, y.mesh_dim, x.end / end, y.end / end, end / begin});
    common_ /= end / begin;
    return true;
  }

  std::int64_t size_ = 0;
  std::int64_t held_ = 1;  // one in so many
  std::int64_t held_after_ = 1;
  std::int64_t common_ = 1;
  InlineVec<Shared, 4> shared_;
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

void multiply(Held3& held, const Held3& by) {
  held.before *= by.before;
  held.after *= by.after;
  held.common *= by.common;
}

// Does a place hold under one layout all that it holds under the other? A collective only takes cuts out of a tensor
// dim, puts some in, or changes their order.
enum class Nested : std::uint8_t { kBeforeInAfter, kAfterInBefore, kUnknown };
Nested nested(StepKind kind, std::uint32_t before, std::uint32_t after) {
  const bool collective =
      kind == StepKind::kAllGather || kind == StepKind::kReduceScatter || kind == StepKind::kAllToAll;
  if (!collective) return Nested::kUnknown;
  if ((after & ~before) == 0) return Nested::kBeforeInAfter;
  return (before & ~after) == 0 ? Nested::kAfterInBefore : Nested::kUnknown;
}

Held3 sets_at(const DimLayout& a, const DimLayout& b, const Dims& at, Nested which) {
  Held3 result{held_size(a, at), held_size(b, at), 0};
  if (which == Nested::kUnknown) {
    result.common = common_size(a, at, b, at);
  } else {
    result.common = which == Nested::kBeforeInAfter ? result.before : result.after;
  }
  return result;
}

}  // namespace

bool one_interval(const DimLayout& dim) { return dim.size() == 1 && !has_virtual(dim[0]); }

Interval interval_of(const Factor& factor, const Dims& at) {
  Interval piece{0, factor.size};
  for (const Cut& cut : factor.cuts) piece = chunk(piece, cut.count, at[cut.mesh_dim]);
  return piece;
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

Holdings::Holdings(const Step& step, Census& census, std::uint32_t together)
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
    } else if (const auto even = EvenDim::make(a, b, together)) {
      census.each([&](std::size_t i, const Dims& at) { multiply(held_[i], even->at(at)); });
    } else {
      add_sets(a, together == 0 ? b : joined(b, together));
    }
  }
  for (Held3& held : held_) held = {held.before * whole, held.after * whole, held.common * whole};
}

void Holdings::add_intervals(const Factor& a, const Factor& b) {
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

void Holdings::add_sets(const DimLayout& a, const DimLayout& b) {
  const std::uint32_t mask = cut_mask(a) | cut_mask(b);
  const Nested which = a == b ? Nested::kBeforeInAfter : nested(kind_, cut_mask(a), cut_mask(b));
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

}  // namespace dtensor
