#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "dtensor/core/boxes.h"
#include "dtensor/core/coordinates.h"
#include "dtensor/core/spec.h"

// What the core tests sweep over, and the slow, literal model they compare with: lists of indices cut as a person would
// cut them, with no factor in sight.
namespace dtensor::sweep {

using Indices = std::vector<std::int64_t>;

// How many of a sample's rounds to run: all, but a tenth under a sanitizer, which is ten times as slow and looks for
// other faults.
constexpr std::int64_t rounds(std::int64_t n) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return n / 10;
#else
  return n;
#endif
}

// Piece `index` of a list cut into `count` by the chunk rule.
inline Indices chunk_of(const Indices& list, std::int64_t count, std::int64_t index) {
  const auto n = static_cast<std::int64_t>(list.size());
  const std::int64_t c = (n + count - 1) / count;
  const std::int64_t begin = std::min(n, c * index);
  return Indices(list.begin() + begin, list.begin() + std::min(n, begin + c));
}

// Cut into split_factor pieces, each of those into `count`: part `index` of each.
inline Indices strided_chunk_of(const Indices& list, std::int64_t split_factor, std::int64_t count,
                                std::int64_t index) {
  Indices result;
  for (std::int64_t j = 0; j < split_factor; ++j) {
    const Indices part = chunk_of(chunk_of(list, split_factor, j), count, index);
    result.insert(result.end(), part.begin(), part.end());
  }
  return result;
}

inline Indices iota(std::int64_t n) {
  Indices result(static_cast<std::size_t>(n));
  std::iota(result.begin(), result.end(), 0);
  return result;
}

// A way to lay out a tensor, said in the public words: what each mesh dim does, and in which order they cut.
struct Case {
  Dims shape;
  Mesh mesh = Mesh::make({1});
  Placements placements;
  ShardOrder order;

  Spec spec(DType dtype = DType::kF32) const { return Spec::make({shape, dtype}, mesh, placements, order); }
  // The indices of a tensor dim that a coordinate holds, by the literal model.
  Indices held(std::size_t dim, const Dims& coordinate) const {
    Indices list = iota(shape[dim]);
    for (const ShardOrderEntry& entry : order) {
      if (entry.tensor_dim != static_cast<std::int64_t>(dim)) continue;
      for (std::int64_t m : entry.mesh_dims) list = chunk_of(list, mesh.shape()[m], coordinate[m]);
    }
    return list;
  }
};

// Every mesh shape of up to `max_dims` dims and `max_ranks` ranks.
inline std::vector<Dims> mesh_shapes(std::int64_t max_ranks, std::size_t max_dims) {
  std::vector<Dims> result;
  std::vector<Dims> last = {Dims{}};
  for (std::size_t ndim = 1; ndim <= max_dims; ++ndim) {
    std::vector<Dims> next;
    for (const Dims& shape : last) {
      std::int64_t size = 1;
      for (std::int64_t s : shape) size *= s;
      for (std::int64_t s = 1; s * size <= max_ranks; ++s) {
        Dims longer = shape;
        longer.push_back(s);
        next.push_back(longer);
      }
    }
    result.insert(result.end(), next.begin(), next.end());
    last = std::move(next);
  }
  return result;
}

// Every assignment of R, P(sum) and S(0 … ndim-1) to the mesh dims.
inline std::vector<Placements> all_placements(std::size_t mesh_ndim, std::int64_t tensor_ndim) {
  std::vector<Placements> result = {{}};
  for (std::size_t m = 0; m < mesh_ndim; ++m) {
    std::vector<Placements> next;
    for (const Placements& some : result) {
      const auto add = [&](const Placement& placement) {
        next.push_back(some);
        next.back().push_back(placement);
      };
      add(Replicate());
      add(Partial());
      for (std::int64_t d = 0; d < tensor_ndim; ++d) add(Shard(d));
    }
    result = std::move(next);
  }
  return result;
}

// Every order in which the shards of these placements can cut.
inline std::vector<ShardOrder> all_orders(const Placements& placements, std::int64_t tensor_ndim) {
  std::vector<ShardOrder> result = {{}};
  for (std::int64_t d = 0; d < tensor_ndim; ++d) {
    std::vector<std::int64_t> mesh_dims;
    for (std::size_t m = 0; m < placements.size(); ++m) {
      if (placements[m].is_shard(d)) mesh_dims.push_back(static_cast<std::int64_t>(m));
    }
    if (mesh_dims.empty()) continue;
    std::vector<ShardOrder> next;
    do {
      for (const ShardOrder& some : result) {
        next.push_back(some);
        next.back().push_back({d, mesh_dims});
      }
    } while (std::next_permutation(mesh_dims.begin(), mesh_dims.end()));
    result = std::move(next);
  }
  return result;
}

template <class Fn>
void for_each_coordinate(const Mesh& mesh, Fn fn) {
  std::vector<std::int64_t> dims(static_cast<std::size_t>(mesh.ndim()));
  std::iota(dims.begin(), dims.end(), 0);
  Dims coordinate(dims.size());
  do fn(static_cast<const Dims&>(coordinate));
  while (next_coordinate(coordinate, mesh.shape(), dims));
}

// The elements of a box as row-major indices of the whole tensor, in the box's own order.
inline Indices elements_of(const Box& box, const Dims& shape) {
  Indices result;
  for_each_run(box, shape, [&](std::int64_t global, std::int64_t, std::int64_t length) {
    for (std::int64_t i = 0; i < length; ++i) result.push_back(global + i);
  });
  return result;
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::int64_t below(std::int64_t n) { return static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(n)); }
  bool chance(std::int64_t one_in) { return below(one_in) == 0; }
  template <class List>
  const auto& pick(const List& list) {
    return list[static_cast<std::size_t>(below(static_cast<std::int64_t>(list.size())))];
  }

 private:
  std::mt19937_64 engine_;
};

// A random case on a mesh: placements and an order for a shape.
inline Case random_case(Random& random, const Mesh& mesh, const Dims& shape, bool with_partial = true) {
  Case result{shape, mesh, {}, {}};
  const auto ndim = static_cast<std::int64_t>(shape.size());
  for (std::int64_t m = 0; m < mesh.ndim(); ++m) {
    const std::int64_t choice = random.below(ndim + 2);
    if (choice < ndim)
      result.placements.push_back(Shard(choice));
    else if (choice == ndim && with_partial)
      result.placements.push_back(Partial());
    else
      result.placements.push_back(Replicate());
  }
  result.order = random.pick(all_orders(result.placements, ndim));
  return result;
}

inline Dims random_shape(Random& random, std::int64_t max_ndim, std::int64_t max_size) {
  Dims shape;
  for (std::int64_t i = 1 + random.below(max_ndim); i > 0; --i) shape.push_back(random.below(max_size + 1));
  return shape;
}

}  // namespace dtensor::sweep
