#include <algorithm>
#include <functional>

#include "dtensor/core/checked.h"
#include "dtensor/core/coordinates.h"
#include "dtensor/core/spec.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

void check_coordinate(const Spec& spec, const Dims& coordinate) {
  if (static_cast<std::int64_t>(coordinate.size()) == spec.mesh().ndim()) return;
  fail_invalid("spec.local", {.what = "not a coordinate of the mesh",
                              .got = "(" + join_numbers(coordinate) + ") for " + spec.mesh().to_string(),
                              .expected = "one index for each mesh dim"});
}

}  // namespace

Spec::Local Spec::local(const Dims& coordinate) const {
  check_coordinate(*this, coordinate);
  const DimLayouts& layouts = dims();
  Local result;
  for (std::size_t d = 0; d < layouts.size(); ++d) {
    Held all{1, 0};
    for (const Factor& factor : layouts[d]) {
      const Held held = factor.cuts.empty() ? Held{factor.size, 0} : held_of(factor, coordinate);
      all = {all.size * held.size, all.first * factor.size + held.first};
    }
    result.shape.push_back(all.size);
    result.offset.push_back(all.size > 0 ? all.first : meta().shape()[d]);
  }
  return result;
}

Dims Spec::local_stride(const Dims& coordinate) const {
  const Dims shape = local_shape(coordinate);
  const Dims& global = meta().stride();
  InlineVec<std::size_t, 8> order;  // innermost first
  for (std::size_t d = shape.size(); d-- > 0;) order.push_back(d);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return global[a] < global[b]; });
  // Of a tensor without elements libtorch counts a size of 0 as 1 where it is row-major, and as 0 in other orders: else
  // it would not call it channels_last.
  const std::int64_t least = std::is_sorted(order.begin(), order.end(), std::greater<>()) ? 1 : 0;
  Dims result(shape.size());
  std::int64_t stride = 1;
  for (std::size_t d : order) {
    if (global[d] == 0) continue;
    result[d] = stride;
    stride *= std::max<std::int64_t>(shape[d], least);
  }
  return result;
}

std::int64_t Spec::local_bytes(const Dims& coordinate) const {
  std::int64_t numel = 1;
  for (std::int64_t size : local_shape(coordinate)) numel *= size;
  return numel * element_size(meta().dtype());
}

std::vector<ShardStep> shard_steps(const Spec& spec, const Dims& coordinate) {
  check_coordinate(spec, coordinate);
  // How many cuts of every factor are applied.
  std::vector<std::vector<std::size_t>> applied;
  for (const DimLayout& dim : spec.dims()) applied.emplace_back(dim.size(), 0);
  const auto size_now = [&](std::size_t d) {
    std::int64_t size = 1;
    for (std::size_t f = 0; f < spec.dims()[d].size(); ++f) {
      const Factor& factor = spec.dims()[d][f];
      size *= held_of({factor.size, Cuts(factor.cuts.begin(), factor.cuts.begin() + applied[d][f])}, coordinate).size;
    }
    return size;
  };
  std::vector<ShardStep> steps;
  Dims shape = spec.meta().shape();
  for (;;) {
    std::int64_t best = spec.mesh().ndim();
    std::size_t best_dim = 0;
    std::size_t best_factor = 0;
    for (std::size_t d = 0; d < spec.dims().size(); ++d) {
      for (std::size_t f = 0; f < spec.dims()[d].size(); ++f) {
        const Cuts& cuts = spec.dims()[d][f].cuts;
        std::size_t& next = applied[d][f];
        while (next < cuts.size() && cuts[next].is_virtual()) ++next;
        if (next < cuts.size() && cuts[next].mesh_dim < best) {
          best = cuts[next].mesh_dim;
          best_dim = d;
          best_factor = f;
        }
      }
    }
    if (best == spec.mesh().ndim()) return steps;
    ++applied[best_dim][best_factor];
    ShardStep step{best, static_cast<std::int64_t>(best_dim), shape, {}};
    shape[best_dim] = size_now(best_dim);
    step.after = shape;
    steps.push_back(std::move(step));
  }
}

Dims global_shape_from_locals(const Mesh& mesh, const Placements& placements, const std::vector<Dims>& locals) {
  constexpr std::string_view kWhere = "global_shape";
  if (static_cast<std::int64_t>(locals.size()) != mesh.size()) {
    fail_invalid(kWhere, {.what = "not one local shape for each rank",
                          .got = std::to_string(locals.size()) + " shapes for " + mesh.to_string(),
                          .expected = std::to_string(mesh.size())});
  }
  for (const Dims& shape : locals) {
    if (shape.size() != locals[0].size()) {
      fail_invalid(kWhere, {.what = "local shapes differ in their number of dims",
                            .got = "[" + join_numbers(locals[0]) + "] and [" + join_numbers(shape) + "]"});
    }
  }
  // Walking along the mesh dims that cut a tensor dim, from the first rank, the local sizes add up to the whole.
  Dims shape = locals[0];
  const Layout order = Layout::row_major(mesh.shape());
  for (std::size_t d = 0; d < shape.size(); ++d) {
    InlineVec<std::int64_t, 8> mesh_dims;
    for (std::size_t m = 0; m < placements.size() && static_cast<std::int64_t>(m) < mesh.ndim(); ++m) {
      if (!placements[m].is_shard()) continue;
      const std::int64_t dim = placements[m].dim();
      if (dim == static_cast<std::int64_t>(d) ||
          dim + static_cast<std::int64_t>(shape.size()) == static_cast<std::int64_t>(d)) {
        mesh_dims.push_back(static_cast<std::int64_t>(m));
      }
    }
    Dims coordinate(static_cast<std::size_t>(mesh.ndim()));
    std::int64_t total = 0;
    do {
      if (__builtin_add_overflow(total, locals[order.offset(coordinate)][d], &total)) {
        fail_invalid(kWhere, {.what = "the sizes overflow", .got = "tensor dim " + std::to_string(d)});
      }
    } while (next_coordinate(coordinate, mesh.shape(), mesh_dims));
    shape[d] = total;
  }
  const Spec spec = Spec::make({shape, DType::kU8}, mesh, placements);
  for (std::int64_t i = 0; i < mesh.size(); ++i) {
    const Dims expected = spec.local_shape(order.coordinate(i));
    if (expected == locals[i]) continue;
    fail_invalid(kWhere, {.what = "the local shapes are not those of one tensor",
                          .got = "[" + join_numbers(locals[i]) + "] on rank " +
                                 std::to_string(mesh.rank_at(order.coordinate(i))),
                          .expected = "[" + join_numbers(expected) + "], its part of " + spec.to_string(),
                          .advice = "cutting by the chunk rule: ceil(n/k) each, the last ones short or empty"});
  }
  return shape;
}

}  // namespace dtensor
