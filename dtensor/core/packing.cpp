#include "dtensor/core/packing.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace dtensor {
namespace {

// Indices of one dim that follow each other in both memories, repeated at even distances.
struct Stretch {
  std::int64_t from = 0;
  std::int64_t to = 0;
  std::int64_t length = 0;
  std::int64_t count = 1;
  std::int64_t from_step = 0;
  std::int64_t to_step = 0;
};

struct Run {
  Interval indices;
  std::int64_t position;
};
using Runs = InlineVec<Run, 2>;

Runs runs_with_positions(const DimSet& set) {
  Runs runs;
  for_each_run(set, [&](Interval indices, std::int64_t position) { runs.push_back({indices, position}); });
  return runs;
}

void add_stretch(std::vector<Stretch>& stretches, std::int64_t from, std::int64_t to, std::int64_t length) {
  if (!stretches.empty()) {
    Stretch& last = stretches.back();
    if (last.count == 1 && last.from + last.length == from && last.to + last.length == to) {
      last.length += length;
      return;
    }
    const std::int64_t from_step = from - (last.from + (last.count - 1) * last.from_step);
    const std::int64_t to_step = to - (last.to + (last.count - 1) * last.to_step);
    if (last.length == length && (last.count == 1 || (last.from_step == from_step && last.to_step == to_step))) {
      last.from_step = from_step;
      last.to_step = to_step;
      ++last.count;
      return;
    }
  }
  stretches.push_back({from, to, length});
}

// The indices of `set`, by their positions in the two sets that hold it.
std::vector<Stretch> stretches_of(const DimSet& set, const DimSet& from, const DimSet& to) {
  std::vector<Stretch> result;
  const Runs sources = runs_with_positions(from);
  const Runs targets = runs_with_positions(to);
  std::size_t s = 0;
  std::size_t t = 0;
  for_each_run(set, [&](Interval wanted, std::int64_t) {
    while (!wanted.empty()) {
      while (sources[s].indices.end <= wanted.begin) ++s;
      while (targets[t].indices.end <= wanted.begin) ++t;
      const std::int64_t end = std::min({wanted.end, sources[s].indices.end, targets[t].indices.end});
      add_stretch(result, sources[s].position + wanted.begin - sources[s].indices.begin,
                  targets[t].position + wanted.begin - targets[t].indices.begin, end - wanted.begin);
      wanted.begin = end;
    }
  });
  return result;
}

// The largest steps of the target first, and neighbours that are one dim as one.
void settle(Copy& copy) {
  auto& dims = copy.dims;
  std::stable_sort(dims.begin(), dims.end(), [](const Copy::Dim& a, const Copy::Dim& b) { return a.to > b.to; });
  for (std::size_t d = 1; d < dims.size();) {
    const Copy::Dim& inner = dims[d];
    if (dims[d - 1].from == inner.size * inner.from && dims[d - 1].to == inner.size * inner.to) {
      dims[d - 1] = {dims[d - 1].size * inner.size, inner.from, inner.to};
      dims.erase(d);
    } else {
      ++d;
    }
  }
}

void add_dim(Copy& copy, std::int64_t size, std::int64_t from, std::int64_t to) {
  if (size > 1) copy.dims.push_back({size, from, to});
}

template <class Element>
void copy_strided(const Copy& copy, const Element* from, Element* to) {
  const Copy::Dim inner = copy.dims.back();
  Copy outer = copy;
  outer.dims.pop_back();
  // Runs of the outer dims are single elements unless their last strides are 1, which the inner one's then are not.
  for_each_run(outer, [&](std::int64_t f, std::int64_t t, std::int64_t n) {
    for (std::int64_t k = 0; k < n; ++k) {
      for (std::int64_t i = 0; i < inner.size; ++i) to[t + k + i * inner.to] = from[f + k + i * inner.from];
    }
  });
}

struct Wide {
  std::uint64_t words[2];
};

void play_strided(const Copy& copy, const void* from, void* to, std::int64_t element_size) {
  const auto as = [&](auto element) {
    using Element = decltype(element);
    copy_strided(copy, static_cast<const Element*>(from), static_cast<Element*>(to));
  };
  switch (element_size) {
    case 1:
      return as(std::uint8_t{});
    case 2:
      return as(std::uint16_t{});
    case 4:
      return as(std::uint32_t{});
    case 8:
      return as(std::uint64_t{});
    default:
      return as(Wide{});
  }
}

}  // namespace

std::int64_t Copy::numel() const noexcept {
  std::int64_t n = 1;
  for (const Dim& dim : dims) n *= dim.size;
  return n;
}

Dims packing_order(const TensorMeta& meta) {
  Dims order(static_cast<std::size_t>(meta.ndim()));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int64_t a, std::int64_t b) { return meta.stride()[a] > meta.stride()[b]; });
  return order;
}

Place packed(const Box& box, const Dims& order, std::int64_t offset) {
  Place place{box, Dims(box.dims.size()), offset};
  std::int64_t stride = 1;
  for (std::size_t i = order.size(); i-- > 0;) {
    const auto d = static_cast<std::size_t>(order[i]);
    place.stride[d] = stride;
    stride *= count_of(box.dims[d]);
  }
  return place;
}

Place local_place(const Spec& spec, const Dims& coordinate) {
  return packed(box_of(spec, coordinate), packing_order(spec.meta()));
}

void add_copies(const Box& box, const Place& from, const Place& to, Copies& copies) {
  if (box.numel() == 0) return;
  InlineVec<std::vector<Stretch>, 4> stretches;
  for (std::size_t d = 0; d < box.dims.size(); ++d) {
    stretches.push_back(stretches_of(box.dims[d], from.held.dims[d], to.held.dims[d]));
  }
  Dims shape;
  for (const auto& list : stretches) shape.push_back(static_cast<std::int64_t>(list.size()));
  Dims index(shape.size());
  for (bool more = true; more;) {
    Copy copy{from.offset, to.offset, {}};
    for (std::size_t d = 0; d < shape.size(); ++d) {
      const Stretch& stretch = stretches[d][static_cast<std::size_t>(index[d])];
      copy.from += stretch.from * from.stride[d];
      copy.to += stretch.to * to.stride[d];
      add_dim(copy, stretch.count, stretch.from_step * from.stride[d], stretch.to_step * to.stride[d]);
      add_dim(copy, stretch.length, from.stride[d], to.stride[d]);
    }
    settle(copy);
    copies.push_back(std::move(copy));
    more = false;
    for (std::size_t d = shape.size(); d-- > 0 && !more;) {
      more = ++index[d] < shape[d];
      if (!more) index[d] = 0;
    }
  }
}

bool is_identity(const Copies& copies, std::int64_t n) {
  std::int64_t next = 0;
  for (const Copy& copy : copies) {
    if (copy.from != next || copy.to != next) return false;
    if (copy.dims.size() > 1) return false;
    if (copy.dims.size() == 1 && (copy.dims[0].from != 1 || copy.dims[0].to != 1)) return false;
    next += copy.numel();
  }
  return next == n;
}

Box part_of(const Box& box, std::int64_t count, std::int64_t index) {
  if (count == 1) return box;
  std::size_t longest = 0;
  for (std::size_t d = 1; d < box.dims.size(); ++d) {
    if (count_of(box.dims[d]) > count_of(box.dims[longest])) longest = d;
  }
  Box part = box;
  if (part.dims.empty()) {  // one element, which is in the first part
    if (index > 0) part.dims.push_back({FactorSet{1, {}}});
    return part;
  }
  DimSet& set = part.dims[longest];
  const Interval kept = chunk({0, count_of(set)}, count, index);
  FactorSet flat;
  for (const FactorSet& factor : set) flat.size *= factor.size;
  for_each_run(set, [&](Interval indices, std::int64_t position) {
    const std::int64_t begin = std::max(kept.begin, position);
    const std::int64_t end = std::min(kept.end, position + indices.size());
    if (begin < end) flat.intervals.push_back({indices.begin + begin - position, indices.begin + end - position});
  });
  set = {flat};
  return part;
}

std::int64_t first_element(const Box& box, const Dims& shape) {
  std::int64_t index = 0;
  for (std::size_t d = 0; d < box.dims.size(); ++d) {
    std::int64_t at = 0;
    for (const FactorSet& factor : box.dims[d]) at = at * factor.size + factor.intervals[0].begin;
    index = index * shape[d] + at;
  }
  return index;
}

void play(const Copies& copies, const void* from, void* to, std::int64_t element_size) {
  for (const Copy& copy : copies) {
    if (!copy.dims.empty() && (copy.dims.back().from != 1 || copy.dims.back().to != 1)) {
      play_strided(copy, from, to, element_size);
      continue;
    }
    for_each_run(copy, [&](std::int64_t f, std::int64_t t, std::int64_t n) {
      std::memcpy(static_cast<char*>(to) + t * element_size, static_cast<const char*>(from) + f * element_size,
                  static_cast<std::size_t>(n * element_size));
    });
  }
}

}  // namespace dtensor
