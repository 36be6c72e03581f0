#include "dtensor/core/view.h"

#include <algorithm>

#include "dtensor/core/checked.h"
#include "dtensor/core/text.h"
#include "dtensor/core/view_more.h"

namespace dtensor {
namespace {

std::int64_t normal_dim(const Spec& spec, std::int64_t dim, std::string_view where) {
  const std::int64_t ndim = spec.meta().ndim();
  const std::int64_t normal = dim < 0 ? dim + ndim : dim;
  if (normal < 0 || normal >= ndim) {
    fail_invalid(where,
                 {.what = "no such tensor dim",
                  .got = "dim " + std::to_string(dim) + " of " + spec.to_string(),
                  .expected = ndim == 0 ? "a tensor with dims"
                                        : "a dim from " + std::to_string(-ndim) + " to " + std::to_string(ndim - 1)});
  }
  return normal;
}

// The factor list of a dim cut at the boundaries of `sizes`.
OrReason<DimLayouts> cut_at(const DimLayout& dim, const Dims& sizes) {
  DimLayouts result;
  DimLayout rest = dim;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    DimLayout taken;
    std::int64_t need = sizes[i];
    const bool last = i + 1 == sizes.size();
    while (!rest.empty() && (last || need > 1 || (need == 1 && taken.empty() && rest[0].size == 1))) {
      const Factor head = rest[0];
      rest.erase(0);
      if (last || (head.size <= need && need % head.size == 0)) {
        taken.push_back(head);
        if (!last) need /= head.size;
        continue;
      }
      if (head.size % need != 0) {
        return Reason{"the boundary of a new dim falls inside a factor of " + std::to_string(head.size)};
      }
      auto parts = split(head, need, head.size / need);
      if (!parts) return Reason{parts.reason()};
      taken.push_back(parts->first);
      rest.insert(0, parts->second);
      need = 1;
      break;
    }
    if (taken.empty()) taken.push_back(Factor{sizes[i], {}});
    result.push_back(std::move(taken));
  }
  return result;
}

}  // namespace

OrReason<Spec> flatten(const Spec& spec, std::int64_t first, std::int64_t last) {
  const std::int64_t begin = normal_dim(spec, first, "flatten");
  const std::int64_t end = normal_dim(spec, last, "flatten") + 1;
  if (begin >= end) {
    fail_invalid("flatten",
                 {.what = "the dims are out of order", .got = std::to_string(first) + " to " + std::to_string(last)});
  }
  const Dims& old_shape = spec.meta().shape();
  const Dims& old_stride = spec.meta().stride();
  Dims shape;
  Dims stride;
  DimLayouts dims;
  for (std::int64_t d = 0; d < spec.meta().ndim(); ++d) {
    const bool inside = d > begin && d < end;
    if (!inside) {
      shape.push_back(old_shape[d]);
      stride.push_back(old_stride[d]);
      dims.push_back(spec.dims()[d]);
      continue;
    }
    // Memory must step through the dims as through one, or the result is no view.
    if (spec.meta().numel() > 0 && shape.back() > 1 && old_shape[d] > 1 &&
        stride.back() != old_shape[d] * old_stride[d]) {
      return Reason{"dims " + std::to_string(d - 1) + " and " + std::to_string(d) + " of " + spec.meta().to_string() +
                    " do not follow each other in memory"};
    }
    if (old_shape[d] > 1 || shape.back() == 1) stride.back() = old_stride[d];
    shape.back() *= old_shape[d];
    dims.back().append(spec.dims()[d].begin(), spec.dims()[d].end());
  }
  return with_dims(spec, std::move(shape), std::move(stride), dims);
}

OrReason<Spec> unflatten(const Spec& spec, std::int64_t dim, const Dims& sizes) {
  const std::int64_t d = normal_dim(spec, dim, "unflatten");
  const std::int64_t size = spec.meta().shape()[d];
  const bool negative = std::any_of(sizes.begin(), sizes.end(), [](std::int64_t s) { return s < 0; });
  const auto product = checked_product(sizes);
  if (sizes.empty() || negative || !product || *product != size) {
    fail_invalid("unflatten",
                 {.what = "the sizes do not multiply to the dim",
                  .got = "[" + join_numbers(sizes) + "] for dim " + std::to_string(d) + " of " + spec.to_string(),
                  .expected = "a product of " + std::to_string(size)});
  }
  OrReason<DimLayouts> parts = DimLayouts{};
  if (size == 0) {  // nothing is held: the cuts may stand on the first of the new dims
    for (std::int64_t s : sizes) (*parts).push_back({Factor{s, {}}});
    for (const Factor& factor : spec.dims()[d]) {
      (*parts)[0][0].cuts.append(factor.cuts.begin(), factor.cuts.end());
    }
  } else {
    parts = cut_at(spec.dims()[d], sizes);
    if (!parts) return Reason{parts.reason()};
  }
  Dims shape;
  Dims stride;
  DimLayouts dims;
  for (std::int64_t i = 0; i < spec.meta().ndim(); ++i) {
    if (i != d) {
      shape.push_back(spec.meta().shape()[i]);
      stride.push_back(spec.meta().stride()[i]);
      dims.push_back(spec.dims()[i]);
      continue;
    }
    Dims steps(sizes.size());
    std::int64_t step = spec.meta().stride()[d];
    for (std::size_t k = sizes.size(); k-- > 0;) {
      steps[k] = step;
      step *= std::max<std::int64_t>(sizes[k], 1);
    }
    shape.append(sizes.begin(), sizes.end());
    stride.append(steps.begin(), steps.end());
    dims.append((*parts).begin(), (*parts).end());
  }
  return with_dims(spec, std::move(shape), std::move(stride), dims);
}

OrReason<Spec> narrow(const Spec& spec, std::int64_t dim, std::int64_t start, std::int64_t length) {
  const std::int64_t d = normal_dim(spec, dim, "narrow");
  const std::int64_t size = spec.meta().shape()[d];
  if (start < 0 || length < 0 || start > size || length > size - start) {
    fail_invalid("narrow", {.what = "the range is not inside the dim",
                            .got = "start " + std::to_string(start) + ", length " + std::to_string(length) +
                                   " on dim " + std::to_string(d) + " of " + spec.to_string(),
                            .expected = "a range of 0 to " + std::to_string(size)});
  }
  if (length == size) return spec;
  DimLayouts dims = spec.dims();
  DimLayout& layout = dims[d];
  // Rows of uncut major elements; the rest of the dim is below them.
  const std::int64_t row = size / layout[0].size;
  if (is_whole(layout[0]) && start % row == 0 && length % row == 0) {
    layout[0].size = length / row;
  } else {
    return Reason{"dim " + std::to_string(d) + " of " + spec.to_string() + " is cut across the range " +
                  std::to_string(start) + " to " + std::to_string(start + length)};
  }
  Dims shape = spec.meta().shape();
  shape[d] = length;
  return with_dims(spec, std::move(shape), spec.meta().stride(), dims);
}

Spec permute(const Spec& spec, const Dims& order) {
  const Dims& old = spec.meta().shape();
  Dims shape;
  Dims stride;
  DimLayouts dims;
  InlineVec<bool, 8> seen(old.size(), false);
  bool valid = order.size() == old.size();
  for (std::size_t i = 0; valid && i < order.size(); ++i) {
    const std::int64_t d = order[i] < 0 ? order[i] + spec.meta().ndim() : order[i];
    valid = d >= 0 && d < spec.meta().ndim() && !std::exchange(seen[d], true);
    if (!valid) break;
    shape.push_back(old[d]);
    stride.push_back(spec.meta().stride()[d]);
    dims.push_back(spec.dims()[d]);
  }
  if (!valid) {
    fail_invalid("permute", {.what = "not an order of the tensor's dims",
                             .got = "(" + join_numbers(order) + ") for " + spec.to_string(),
                             .expected = "every dim once"});
  }
  return expect_spec(with_dims(spec, std::move(shape), std::move(stride), dims), "permute");
}

OrReason<Spec> reshape(const Spec& spec, const Dims& shape) {
  const auto numel = checked_product(shape);
  const bool negative = std::any_of(shape.begin(), shape.end(), [](std::int64_t s) { return s < 0; });
  if (negative || !numel || *numel != spec.meta().numel()) {
    fail_invalid("reshape", {.what = "the shape does not have the tensor's elements",
                             .got = "[" + join_numbers(shape) + "] for " + spec.to_string(),
                             .expected = std::to_string(spec.meta().numel()) + " elements"});
  }
  if (shape == spec.meta().shape()) return spec;
  if (spec.meta().ndim() == 0) {  // one element on every rank
    return with_dims(spec, shape, Dims(shape.size(), 1), DimLayouts(shape.size(), DimLayout{Factor{1, {}}}));
  }
  if (shape.empty()) {
    for (const DimLayout& dim : spec.dims()) {
      for (const Factor& factor : dim) {
        if (!is_whole(factor)) return Reason{"a 0-d tensor cannot be sharded: " + spec.to_string()};
      }
    }
    return with_dims(spec, {}, {}, {});
  }
  if (*numel == 0) {  // no element, no boundary: one dim of none, then the new ones
    auto flat = flatten(spec, 0, -1);
    if (!flat) return flat;
    return unflatten(*flat, 0, shape);
  }
  // Groups of old dims and of new ones with the same product, as short as they go; then each group on its own.
  Spec result = spec;
  std::size_t from = 0;
  std::size_t to = 0;
  while (from < result.meta().shape().size() || to < shape.size()) {
    const Dims old = result.meta().shape();
    std::size_t from_end = from;
    std::size_t to_end = to;
    std::int64_t have = from_end < old.size() ? old[from_end++] : 1;
    std::int64_t want = to_end < shape.size() ? shape[to_end++] : 1;
    while (have != want) {
      if (have < want)
        have *= old[from_end++];
      else
        want *= shape[to_end++];
    }
    // Trailing dims of size 1 join the last group.
    if (to_end == shape.size()) from_end = old.size();
    if (from_end == old.size()) to_end = shape.size();
    const auto flat = flatten(result, static_cast<std::int64_t>(from), static_cast<std::int64_t>(from_end) - 1);
    if (!flat) return Reason{flat.reason()};
    const Dims sizes(shape.begin() + to, shape.begin() + to_end);
    auto next = unflatten(*flat, static_cast<std::int64_t>(from), sizes);
    if (!next) return next;
    result = *next;
    from += sizes.size();
    to = to_end;
  }
  return result;
}

}  // namespace dtensor
