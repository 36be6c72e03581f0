#include "dtensor/core/boxes.h"

#include <algorithm>
#include <map>

#include "dtensor/core/coordinates.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

// Part of a dim on which two layouts can be compared: one factor each where they agree on the factoring, else a stretch
// of several on either side, compared index by index.
struct Block {
  std::int64_t size = 1;
  DimLayout has;
  DimLayout wants;
};

Factor pop_front(DimLayout& factors) {
  if (factors.empty()) return Factor{1, {}};
  Factor head = factors[0];
  factors.erase(0);
  return head;
}

// Shortens `factor` to `size` and puts the rest back, if it can be split there.
bool split_front(Factor& factor, std::int64_t size, DimLayout& rest) {
  if (size == 0 || factor.size % size != 0) return false;
  const auto parts = split(factor, size, factor.size / size);
  if (!parts) return false;
  rest.insert(0, parts->second);
  factor = parts->first;
  return true;
}

std::vector<Block> align(DimLayout has, DimLayout wants) {
  std::vector<Block> blocks;
  while (!has.empty() || !wants.empty()) {
    Factor a = pop_front(has);
    Factor b = pop_front(wants);
    if (a.size == b.size || (a.size > b.size ? split_front(a, b.size, has) : split_front(b, a.size, wants))) {
      blocks.push_back({a.size, {a}, {b}});
      continue;
    }
    Block block{a.size, {a}, {b}};
    for (std::int64_t other = b.size; block.size != other;) {
      if (block.size < other) {
        block.has.push_back(pop_front(has));
        block.size *= block.has.back().size;
      } else {
        block.wants.push_back(pop_front(wants));
        other *= block.wants.back().size;
      }
    }
    blocks.push_back(std::move(block));
  }
  return blocks;
}

DimSet dim_set(const DimLayout& dim, const Dims& coordinate) {
  DimSet set;
  for (const Factor& factor : dim) set.push_back({factor.size, intervals_of(factor, coordinate)});
  return set;
}

// Who holds which part of a query, in the order of the holders' indices.
using Owners = std::map<std::vector<std::int64_t>, Intervals>;

class OwnerSearch {
 public:
  OwnerSearch(const DimLayout& factors, std::size_t mesh_ndim) : factors_(factors), holder_(mesh_ndim, Piece::kAny) {
    for (std::size_t f = factors.size(); f-- > 0;) {
      minor_.insert(0, f + 1 < factors.size() ? minor_[0] * factors[f + 1].size : 1);
    }
  }

  void find(Interval query) { descend(0, 0, {0, factors_[0].size}, query, 0); }
  Owners take() { return std::move(owners_); }

 private:
  // Inside `piece` of factor f, after its first k cuts; the query is in units of the block, relative to `base`.
  void descend(std::size_t f, std::size_t k, Interval piece, Interval query, std::int64_t base) {
    const Factor& factor = factors_[f];
    const std::int64_t unit = minor_[f];
    const Interval rows{query.begin / unit, ceil_div(query.end, unit)};
    const Interval hit{std::max(rows.begin, piece.begin), std::min(rows.end, piece.end)};
    if (hit.empty()) return;
    if (k < factor.cuts.size()) {
      const Cut& cut = factor.cuts[k];
      const std::int64_t c = ceil_div(piece.size(), cut.count);
      for (std::int64_t i = (hit.begin - piece.begin) / c; piece.begin + i * c < hit.end; ++i) {
        if (!cut.is_virtual()) holder_[cut.mesh_dim] = i;
        descend(f, k + 1, chunk(piece, cut.count, i), query, base);
      }
      if (!cut.is_virtual()) holder_[cut.mesh_dim] = Piece::kAny;
      return;
    }
    if (f + 1 == factors_.size()) {
      add({base + hit.begin, base + hit.end});
      return;
    }
    for (std::int64_t row = hit.begin; row < hit.end; ++row) {
      const Interval inside{std::max(query.begin - row * unit, std::int64_t{0}),
                            std::min(query.end - row * unit, unit)};
      descend(f + 1, 0, {0, factors_[f + 1].size}, inside, base + row * unit);
    }
  }

  void add(Interval found) {
    Intervals& list = owners_[holder_];
    if (!list.empty() && list.back().end == found.begin) {
      list.back().end = found.end;
    } else {
      list.push_back(found);
    }
  }

  const DimLayout& factors_;
  InlineVec<std::int64_t, 4> minor_;  // elements of the block under one element of each factor
  std::vector<std::int64_t> holder_;
  Owners owners_;
};

Owners find_owners(const Block& block, const Dims& coordinate, std::size_t mesh_ndim) {
  OwnerSearch search(block.has, mesh_ndim);
  if (block.wants.size() == 1) {
    for (const Interval& query : intervals_of(block.wants[0], coordinate)) search.find(query);
  } else {
    for_each_run(dim_set(block.wants, coordinate), [&](Interval query, std::int64_t) { search.find(query); });
  }
  return search.take();
}

// One block of one dim, with what each holder has of it.
struct Search {
  std::size_t dim;
  std::int64_t size;
  Owners owners;
};

void each_combination(std::span<const Search> searches, Piece& piece, const PieceFn& fn) {
  if (searches.empty()) {
    fn(piece);
    return;
  }
  const Search& search = searches.front();
  const Dims before = piece.holder;
  for (const auto& [holder, intervals] : search.owners) {
    for (std::size_t m = 0; m < holder.size(); ++m) {
      if (holder[m] != Piece::kAny) piece.holder[m] = holder[m];
    }
    piece.box.dims[search.dim].push_back({search.size, intervals});
    each_combination(searches.subspan(1), piece, fn);
    piece.box.dims[search.dim].pop_back();
    piece.holder = before;
  }
}

void collect_mesh_dims(const DimLayout& dim, InlineVec<std::int64_t, 8>& mesh_dims) {
  for (const Factor& factor : dim) {
    for (const Cut& cut : factor.cuts) {
      if (cut.count > 1 && !cut.is_virtual() &&
          std::find(mesh_dims.begin(), mesh_dims.end(), cut.mesh_dim) == mesh_dims.end()) {
        mesh_dims.push_back(cut.mesh_dim);
      }
    }
  }
}

// Over all coordinates of the mesh dims that cut either; stops at the first difference, which for layouts that do
// differ is nearly always the first coordinate or the second.
bool same_dim(const DimLayout& a, const DimLayout& b, const Mesh& mesh) {
  if (a == b || size_of(a) == 0) return true;
  InlineVec<std::int64_t, 8> mesh_dims;
  collect_mesh_dims(a, mesh_dims);
  collect_mesh_dims(b, mesh_dims);
  Dims coordinate(static_cast<std::size_t>(mesh.ndim()));
  do {
    std::int64_t size_a = 1;
    std::int64_t size_b = 1;
    for (const Factor& factor : a) size_a *= held_of(factor, coordinate).size;
    for (const Factor& factor : b) size_b *= held_of(factor, coordinate).size;
    if (size_a != size_b || runs_of(dim_set(a, coordinate)) != runs_of(dim_set(b, coordinate))) return false;
  } while (next_coordinate(coordinate, mesh.shape(), mesh_dims));
  return true;
}

}  // namespace

std::int64_t FactorSet::count() const noexcept {
  std::int64_t total = 0;
  for (const Interval& interval : intervals) total += interval.size();
  return total;
}

std::int64_t count_of(const DimSet& set) {
  std::int64_t total = 1;
  for (const FactorSet& factor : set) total *= factor.count();
  return total;
}

std::int64_t Box::numel() const noexcept {
  std::int64_t total = 1;
  for (const DimSet& dim : dims) total *= count_of(dim);
  return total;
}

namespace {

// Collects runs and passes on maximal ones.
struct RunMerger {
  const RunFn& fn;
  Interval run{0, 0};
  std::int64_t position = 0;  // of the run's begin

  void add(Interval next) {
    if (next.begin == run.end && !run.empty()) {
      run.end = next.end;
      return;
    }
    flush();
    run = next;
  }
  void flush() {
    if (run.empty()) return;
    fn(run, position);
    position += run.size();
    run = {0, 0};
  }
};

void each_run(std::span<const FactorSet> factors, std::int64_t minor, std::int64_t base, RunMerger& out) {
  const FactorSet& head = factors.front();
  const bool last = factors.size() == 1;
  const std::int64_t below = last ? 1 : minor / factors[1].size;
  for (const Interval& interval : head.intervals) {
    if (last) {
      out.add({base + interval.begin, base + interval.end});
      continue;
    }
    for (std::int64_t i = interval.begin; i < interval.end; ++i) {
      each_run(factors.subspan(1), below, base + i * minor, out);
    }
  }
}

}  // namespace

void for_each_run(const DimSet& set, const RunFn& fn) {
  if (count_of(set) == 0) return;
  // Whole minor factors make longer runs of the one above them.
  std::size_t used = set.size();
  std::int64_t unit = 1;
  while (used > 1 && set[used - 1].intervals.size() == 1 && set[used - 1].count() == set[used - 1].size) {
    unit *= set[--used].size;
  }
  std::int64_t minor = 1;
  for (std::size_t f = 1; f < used; ++f) minor *= set[f].size;
  const RunFn scaled = [&](Interval run, std::int64_t position) {
    fn({run.begin * unit, run.end * unit}, position * unit);
  };
  RunMerger merger{scaled};
  each_run(std::span(set.data(), used), minor, 0, merger);
  merger.flush();
}

std::vector<Interval> runs_of(const DimSet& set) {
  std::vector<Interval> result;
  for_each_run(set, [&](Interval run, std::int64_t) { result.push_back(run); });
  return result;
}

Box box_of(const Spec& spec, const Dims& coordinate) {
  if (static_cast<std::int64_t>(coordinate.size()) != spec.mesh().ndim()) {
    fail_invalid("box_of", {.what = "not a coordinate of the mesh",
                            .got = "(" + join_numbers(coordinate) + ") for " + spec.mesh().to_string()});
  }
  Box box;
  for (const DimLayout& dim : spec.dims()) box.dims.push_back(dim_set(dim, coordinate));
  return box;
}

namespace {

void each_element_run(const Box& box, const Dims& shape, std::size_t dim, std::size_t used, std::int64_t unit,
                      std::int64_t global, std::int64_t& local, const ElementRunFn& fn) {
  for_each_run(box.dims[dim], [&](Interval run, std::int64_t) {
    if (dim + 1 == used) {
      fn((global * shape[dim] + run.begin) * unit, local, run.size() * unit);
      local += run.size() * unit;
      return;
    }
    for (std::int64_t i = run.begin; i < run.end; ++i) {
      each_element_run(box, shape, dim + 1, used, unit, global * shape[dim] + i, local, fn);
    }
  });
}

}  // namespace

void for_each_run(const Box& box, const Dims& shape, const ElementRunFn& fn) {
  if (box.numel() == 0) return;
  if (shape.empty()) {
    fn(0, 0, 1);
    return;
  }
  // Whole trailing dims only make the runs longer.
  std::size_t used = shape.size();
  std::int64_t unit = 1;
  while (used > 1 && count_of(box.dims[used - 1]) == shape[used - 1]) unit *= shape[--used];
  std::int64_t local = 0;
  each_element_run(box, shape, 0, used, unit, 0, local, fn);
}

bool same_boxes(const Spec& a, const Spec& b) {
  if (a == b) return true;
  if (!(a.mesh() == b.mesh()) || !(a.meta().shape() == b.meta().shape())) return false;
  for (std::int64_t m = 0; m < a.mesh().ndim(); ++m) {
    if (a.mesh().shape()[m] > 1 && a.partials()[m] != b.partials()[m]) return false;
  }
  for (std::size_t d = 0; d < a.dims().size(); ++d) {
    if (!same_dim(a.dims()[d], b.dims()[d], a.mesh())) return false;
  }
  return true;
}

std::vector<std::int64_t> replica_dims(const Spec& spec) {
  std::vector<std::int64_t> result;
  for (std::int64_t m = 0; m < spec.mesh().ndim(); ++m) {
    if (spec.placements()[m].is_replicate()) result.push_back(m);
  }
  return result;
}

std::vector<std::int64_t> replicas_of(const Spec& spec, const Dims& coordinate, std::int64_t row) {
  const std::vector<std::int64_t> along = replica_dims(spec);
  Dims where = coordinate;
  for (std::int64_t m : along) where[m] = 0;
  std::vector<std::int64_t> result;
  do result.push_back(spec.mesh().rank_at(where, row));
  while (next_coordinate(where, spec.mesh().shape(), along));
  return result;
}

void for_each_piece(const Spec& has, const Spec& wants, const Dims& coordinate, const PieceFn& fn) {
  if (!(has.meta().shape() == wants.meta().shape())) {
    fail_invalid("boxes", {.what = "the tensors have different shapes",
                           .got = has.to_string() + " and " + wants.to_string(),
                           .expected = "one shape"});
  }
  const auto mesh_ndim = static_cast<std::size_t>(has.mesh().ndim());
  std::vector<Search> searches;
  Piece piece;
  piece.holder.resize(mesh_ndim, Piece::kAny);
  for (std::size_t m = 0; m < mesh_ndim; ++m) {
    if (has.mesh().shape()[m] == 1)
      piece.holder[m] = 0;
    else if (has.partials()[m])
      piece.holder[m] = Piece::kEvery;
  }
  piece.box.dims.resize(has.dims().size());
  for (std::size_t d = 0; d < has.dims().size(); ++d) {
    if (has.meta().shape()[d] == 0) return;
    for (const Block& block : align(has.dims()[d], wants.dims()[d])) {
      searches.push_back({d, block.size, find_owners(block, coordinate, mesh_ndim)});
    }
  }
  each_combination(searches, piece, fn);
}

}  // namespace dtensor
