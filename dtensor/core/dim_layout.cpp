#include "dtensor/core/dim_layout.h"

#include <algorithm>

namespace dtensor {
namespace {

using Sizes = InlineVec<std::int64_t, 8>;

void add_distinct(Sizes& sizes, std::int64_t size) {
  if (std::find(sizes.begin(), sizes.end(), size) == sizes.end()) sizes.push_back(size);
}

// The distinct sizes of the pieces that a cut makes of pieces of these sizes.
Sizes cut_sizes(const Sizes& sizes, std::int64_t count) {
  Sizes result;
  for (std::int64_t size : sizes) {
    const std::int64_t c = ceil_div(size, count);
    add_distinct(result, c);
    if (c == 0) continue;
    if (size % c != 0) add_distinct(result, size % c);
    if (ceil_div(size, c) < count) add_distinct(result, 0);
  }
  return result;
}

// Do the boundaries that this cut adds fall on multiples of `unit`? Pre: the sizes are multiples of it.
bool cuts_between(const Sizes& sizes, std::int64_t count, std::int64_t unit) {
  return std::all_of(sizes.begin(), sizes.end(), [&](std::int64_t size) { return ceil_div(size, count) % unit == 0; });
}

Held held_from(std::int64_t begin, std::int64_t size, std::span<const Cut> cuts, const Dims& coordinate) {
  while (!cuts.empty() && !cuts.front().is_virtual()) {
    const Interval piece = chunk({0, size}, cuts.front().count, coordinate[cuts.front().mesh_dim]);
    begin += piece.begin;
    size = piece.size();
    cuts = cuts.subspan(1);
  }
  if (cuts.empty() || size == 0) return {size, begin};
  // A virtual cut: full pieces, all alike, and a shorter last one.
  const std::int64_t c = ceil_div(size, cuts.front().count);
  const std::int64_t full = size / c;
  const Held inside = held_from(begin, c, cuts.subspan(1), coordinate);
  const Held last = size % c == 0 ? Held{} : held_from(begin + full * c, size % c, cuts.subspan(1), coordinate);
  return {full * inside.size + last.size, inside.size > 0 ? inside.first : last.first};
}

void add_intervals(Interval piece, std::span<const Cut> cuts, const Dims& coordinate, Intervals& out) {
  for (; !cuts.empty() && !cuts.front().is_virtual(); cuts = cuts.subspan(1)) {
    piece = chunk(piece, cuts.front().count, coordinate[cuts.front().mesh_dim]);
  }
  if (piece.empty()) return;
  if (cuts.empty()) {
    if (!out.empty() && out.back().end == piece.begin) {
      out.back().end = piece.end;
    } else {
      out.push_back(piece);
    }
    return;
  }
  const std::int64_t c = ceil_div(piece.size(), cuts.front().count);
  for (std::int64_t begin = piece.begin; begin < piece.end; begin += c) {
    add_intervals({begin, std::min(begin + c, piece.end)}, cuts.subspan(1), coordinate, out);
  }
}

// Virtual cuts that change nothing: into one piece, or with nothing cut after them. Into more pieces than there are
// elements is into one piece each.
Factor drop_idle_virtuals(const Factor& factor) {
  Factor result{factor.size, {}};
  bool cut_after = false;
  for (std::size_t i = factor.cuts.size(); i-- > 0;) {
    Cut cut = factor.cuts[i];
    if (cut.is_virtual()) cut.count = std::clamp<std::int64_t>(factor.size, 1, cut.count);
    if (!cut.is_virtual()) {
      cut_after = cut_after || cut.count > 1;
    } else if (cut.count == 1 || !cut_after) {
      continue;
    }
    result.cuts.push_back(cut);
  }
  std::reverse(result.cuts.begin(), result.cuts.end());
  return result;
}

// [n : C, virtual(v), E] is [P*v : C][rest : E] when C and the virtual cut leave pieces of one size.
std::optional<std::pair<Factor, Factor>> split_at_virtual(const Factor& factor) {
  Sizes sizes = {factor.size};
  std::int64_t pieces = 1;
  for (std::size_t i = 0; i < factor.cuts.size(); ++i) {
    sizes = cut_sizes(sizes, factor.cuts[i].count);
    if (sizes.size() != 1 || sizes[0] == 0) return std::nullopt;
    pieces = factor.size / sizes[0];
    if (!factor.cuts[i].is_virtual()) continue;
    return std::pair{Factor{pieces, Cuts(factor.cuts.begin(), factor.cuts.begin() + i)},
                     Factor{sizes[0], Cuts(factor.cuts.begin() + i + 1, factor.cuts.end())}};
  }
  return std::nullopt;
}

// The factor that splits into these two, if there is one: merging is the inverse of splitting.
std::optional<Factor> merge(const Factor& major, const Factor& minor) {
  Factor merged{major.size * minor.size, major.cuts};
  merged.cuts.append(minor.cuts.begin(), minor.cuts.end());
  const auto parts = split(merged, major.size, minor.size);
  if (parts && parts->first == major && parts->second == minor) return merged;
  return std::nullopt;
}

}  // namespace

std::int64_t size_of(const DimLayout& dim) {
  std::int64_t size = 1;
  for (const Factor& factor : dim) size *= factor.size;
  return size;
}

bool has_virtual(const Factor& factor) {
  return std::any_of(factor.cuts.begin(), factor.cuts.end(), [](const Cut& cut) { return cut.is_virtual(); });
}

bool is_whole(const Factor& factor) {
  return std::all_of(factor.cuts.begin(), factor.cuts.end(), [](const Cut& cut) { return cut.count == 1; });
}

Intervals intervals_of(const Factor& factor, const Dims& coordinate) {
  Intervals result;
  add_intervals({0, factor.size}, factor.cuts, coordinate, result);
  return result;
}

Held held_of(const Factor& factor, const Dims& coordinate) {
  return held_from(0, factor.size, factor.cuts, coordinate);
}

OrReason<std::pair<Factor, Factor>> split(const Factor& factor, std::int64_t major, std::int64_t minor) {
  if (factor.cuts.empty() || major == 1) return std::pair{Factor{major, {}}, Factor{minor, factor.cuts}};
  if (factor.size == 0) return std::pair{Factor{major, factor.cuts}, Factor{minor, {}}};
  Sizes sizes = {factor.size};
  std::size_t taken = 0;
  // As long as the cuts fall between rows of `minor` elements they cut the major factor.
  while (taken < factor.cuts.size() && cuts_between(sizes, factor.cuts[taken].count, minor)) {
    sizes = cut_sizes(sizes, factor.cuts[taken].count);
    ++taken;
  }
  const bool one_row =
      std::all_of(sizes.begin(), sizes.end(), [&](std::int64_t size) { return size == minor || size == 0; });
  if (taken < factor.cuts.size() && !one_row) {
    return Reason{std::to_string(factor.size) + " elements are not cut between rows of " + std::to_string(minor)};
  }
  const Cut* middle = factor.cuts.begin() + taken;
  return std::pair{Factor{major, Cuts(factor.cuts.begin(), middle)}, Factor{minor, Cuts(middle, factor.cuts.end())}};
}

DimLayout coalesce(const DimLayout& dim) {
  const bool empty = size_of(dim) == 0;
  DimLayout parts;
  Cuts idle;  // by mesh dims of size 1
  for (const Factor& given : dim) {
    Factor factor{given.size, {}};
    for (const Cut& cut : given.cuts) {
      if (cut.is_virtual() && empty) continue;
      (!cut.is_virtual() && cut.count == 1 ? idle : factor.cuts).push_back(cut);
    }
    factor = drop_idle_virtuals(factor);
    while (auto both = split_at_virtual(factor)) {
      parts.push_back(both->first);
      factor = drop_idle_virtuals(both->second);
    }
    parts.push_back(std::move(factor));
  }
  DimLayout result;
  for (const Factor& part : parts) {
    if (part.size == 1 && part.cuts.empty()) continue;
    result.push_back(part);
    if (empty && result.size() == 2) {  // nothing to hold: one factor says it
      result[0].cuts.append(part.cuts.begin(), part.cuts.end());
      result.pop_back();
    }
    while (result.size() > 1) {
      const auto merged = merge(result[result.size() - 2], result.back());
      if (!merged) break;
      result.pop_back();
      result.back() = *merged;
    }
  }
  if (result.empty()) result.push_back(Factor{1, {}});
  if (empty) result[0].size = 0;
  for (const Cut& cut : idle) {
    Cuts& cuts = result[0].cuts;
    const auto later = std::find_if(cuts.begin(), cuts.end(), [&](const Cut& c) { return c.mesh_dim > cut.mesh_dim; });
    cuts.insert(static_cast<std::size_t>(later - cuts.begin()), cut);
  }
  return result;
}

std::optional<Cuts> decode_order(std::span<const PublicCut> cuts) {
  Cuts order;
  for (std::size_t i = cuts.size(); i-- > 0;) {
    std::int64_t before = 1;
    std::size_t at = 0;
    while (before != cuts[i].split_factor && at < order.size()) before *= order[at++].count;
    if (before != cuts[i].split_factor) return std::nullopt;
    order.insert(at, Cut{cuts[i].mesh_dim, cuts[i].count});
  }
  return order;
}

PublicCuts encode_order(const Cuts& order) {
  PublicCuts result;
  for (std::size_t i = 0; i < order.size(); ++i) {
    std::int64_t split_factor = 1;
    for (std::size_t j = 0; j < i; ++j) {
      if (order[j].mesh_dim > order[i].mesh_dim) split_factor *= order[j].count;
    }
    result.push_back({order[i].mesh_dim, order[i].count, split_factor});
  }
  std::sort(result.begin(), result.end(), [](const auto& a, const auto& b) { return a.mesh_dim < b.mesh_dim; });
  return result;
}

namespace {

// The split factors of cuts as cut_end_to_end reads them: what a rank has before each of them, by the mesh dims before
// it, in the factors to the left.
PublicCuts write_end_to_end(const DimLayout& dim) {
  PublicCuts result;
  for (std::size_t f = 0; f < dim.size(); ++f) {
    for (const Cut& cut : dim[f].cuts) {
      if (cut.is_virtual()) return {};
      std::int64_t split_factor = 1;
      for (std::size_t left = 0; left < f; ++left) {
        split_factor *= dim[left].size;
        for (const Cut& other : dim[left].cuts) {
          if (other.mesh_dim < cut.mesh_dim) split_factor /= other.count;
        }
      }
      result.push_back({cut.mesh_dim, cut.count, std::max<std::int64_t>(split_factor, 1)});
    }
  }
  std::sort(result.begin(), result.end(), [](const auto& a, const auto& b) { return a.mesh_dim < b.mesh_dim; });
  return result;
}

// Upstream's definition, one mesh dim after the other: what a rank has, laid end to end, is cut into `split_factor`
// pieces, and each of these by the mesh dim. Where all pieces are of one size this is a cut of one factor, or else of
// no one. Pre: mesh order.
OrReason<DimLayout> cut_end_to_end(std::int64_t n, std::span<const PublicCut> cuts) {
  const auto held = [](const Factor& factor) {
    std::int64_t size = factor.size;
    for (const Cut& cut : factor.cuts) size /= cut.count;
    return size;
  };
  const Reason uneven{
      "strided shards on one tensor dim that are not an order of the mesh dims, and whose pieces are not "
      "of one size or do not fall between each other's"};
  DimLayout dim = {Factor{n, {}}};
  std::int64_t mine = n;
  for (const PublicCut& cut : cuts) {
    const auto pieces = checked_mul(cut.split_factor, cut.count);
    if (!pieces || mine == 0 || mine % *pieces != 0) return uneven;
    std::size_t at = 0;
    for (std::int64_t left = cut.split_factor; left > 1; ++at) {
      const std::int64_t size = held(dim[at]);
      if (left % size == 0) {
        left /= size;
        continue;
      }
      if (size % left != 0) return uneven;
      const std::int64_t minor = size / left;
      dim.insert(at + 1, Factor{minor, {}});
      dim[at].size /= minor;
      left = 1;
    }
    while (at < dim.size() && held(dim[at]) == 1 && cut.count > 1) ++at;
    if (at == dim.size() || held(dim[at]) % cut.count != 0) return uneven;
    dim[at].cuts.push_back({cut.mesh_dim, cut.count});
    mine /= cut.count;
  }
  dim = coalesce(dim);
  // What cannot be written in the same words is not taken.
  const PublicCuts again = write_end_to_end(dim);
  if (dim.size() > kMaxFactors || !std::equal(again.begin(), again.end(), cuts.begin(), cuts.end())) return uneven;
  return dim;
}

}  // namespace

OrReason<DimLayout> read_public(std::int64_t n, std::span<const PublicCut> given) {
  PublicCuts cuts(given);
  for (PublicCut& cut : cuts) {
    if (cut.count == 1) cut.split_factor = 1;  // there it changes nothing
  }
  if (auto order = decode_order(cuts)) return DimLayout{Factor{n, std::move(*order)}};
  const PublicCut* strided = nullptr;
  Cuts left;
  Cuts right;
  std::int64_t left_count = 1;
  std::int64_t right_count = 1;
  for (const PublicCut& cut : cuts) {
    if (cut.split_factor > 1) {
      if (strided) return cut_end_to_end(n, cuts);
      strided = &cut;
    } else {
      (strided ? right : left).push_back({cut.mesh_dim, cut.count});
      (strided ? right_count : left_count) *= cut.count;
    }
  }
  const Cut cut{strided->mesh_dim, strided->count};
  Factor literal{n, left};
  literal.cuts.push_back({Cut::kVirtual, std::clamp<std::int64_t>(n, 1, strided->split_factor)});  // more are empty
  literal.cuts.push_back(cut);
  if (right.empty()) return coalesce({literal});
  // The mesh dims after it cut what the strided shard left, laid end to end: whole pieces only.
  const auto pieces = checked_mul(left_count, strided->split_factor);
  if (!pieces || n == 0 || n % *pieces != 0 || strided->split_factor % right_count != 0) {
    return cut_end_to_end(n, cuts);
  }
  Factor major{*pieces, left};
  major.cuts.append(right.begin(), right.end());
  return coalesce({major, Factor{n / *pieces, {cut}}});
}

namespace {

std::optional<PublicCuts> write_one_strided(const DimLayout& dim) {
  PublicCuts result;
  // One strided cut, the last; its split factor is the virtual cut before it, or what is left of the major factor.
  const Factor& minor = dim.back();
  if (dim.size() > 2 || minor.cuts.empty() || minor.cuts.back().is_virtual()) return std::nullopt;
  const Cut last = minor.cuts.back();
  std::int64_t split_factor = dim.size() == 2 ? dim[0].size : 1;
  for (const Factor& factor : dim) {
    for (const Cut& cut : factor.cuts) {
      if (cut.is_virtual()) {
        const auto product = checked_mul(split_factor, cut.count);
        if (!product) return std::nullopt;
        split_factor = *product;
      } else if (cut.mesh_dim != last.mesh_dim) {
        result.push_back({cut.mesh_dim, cut.count, 1});
        if (dim.size() == 2 && cut.mesh_dim < last.mesh_dim) split_factor /= cut.count;
      }
    }
  }
  result.push_back({last.mesh_dim, last.count, std::max<std::int64_t>(split_factor, 1)});
  std::sort(result.begin(), result.end(), [](const auto& a, const auto& b) { return a.mesh_dim < b.mesh_dim; });
  const auto again = read_public(size_of(dim), result);
  if (!again || !(*again == dim)) return std::nullopt;
  return result;
}

}  // namespace

std::optional<PublicCuts> write_public(const DimLayout& dim) {
  if (dim.size() == 1 && !has_virtual(dim[0])) return encode_order(dim[0].cuts);  // every order has a strided form
  if (auto one = write_one_strided(dim)) return one;
  PublicCuts cuts = write_end_to_end(dim);
  const auto strided = [](const PublicCut& cut) { return cut.split_factor > 1; };
  // One strided shard, the last, is what stands above.
  if (cuts.empty() || std::none_of(cuts.begin(), cuts.end() - 1, strided)) return std::nullopt;
  const auto again = read_public(size_of(dim), cuts);
  return again && *again == dim ? std::optional(std::move(cuts)) : std::nullopt;
}

}  // namespace dtensor
