#include "dtensor/core/view_more.h"

#include <algorithm>

#include "dtensor/core/checked.h"

namespace dtensor {
namespace {

bool is_cut(const DimLayout& dim) {
  return !std::all_of(dim.begin(), dim.end(), [](const Factor& factor) { return is_whole(factor); });
}

Reason cut_reason(const Spec& spec, std::int64_t dim) {
  return {"dim " + std::to_string(dim) + " of " + spec.to_string() + " is cut"};
}

}  // namespace

OrReason<Spec> with_dims(const Spec& spec, Dims shape, Dims stride, const DimLayouts& dims) {
  return Spec::from_dims(TensorMeta(std::move(shape), std::move(stride), spec.meta().dtype()), spec.mesh(), dims,
                         spec.partials());
}

OrReason<Spec> without(const Spec& spec, const Dims& gone) {
  Dims shape;
  Dims stride;
  DimLayouts dims;
  for (std::int64_t d = 0; d < spec.meta().ndim(); ++d) {
    if (std::find(gone.begin(), gone.end(), d) != gone.end()) {
      if (is_cut(spec.dims()[d])) return cut_reason(spec, d);
      continue;
    }
    shape.push_back(spec.meta().shape()[d]);
    stride.push_back(spec.meta().stride()[d]);
    dims.push_back(spec.dims()[d]);
  }
  return with_dims(spec, std::move(shape), std::move(stride), dims);
}

OrReason<Spec> unsqueeze(const Spec& spec, std::int64_t dim) {
  const auto at = static_cast<std::size_t>(dim);
  Dims shape = spec.meta().shape();
  Dims stride = spec.meta().stride();
  DimLayouts dims = spec.dims();
  shape.insert(at, 1);
  stride.insert(at, at < stride.size() ? stride[at] * spec.meta().shape()[at] : 1);
  dims.insert(at, DimLayout{Factor{1, {}}});
  return with_dims(spec, std::move(shape), std::move(stride), dims);
}

OrReason<Spec> squeeze(const Spec& spec, const Dims& dims) { return without(spec, dims); }

OrReason<Spec> select(const Spec& spec, std::int64_t dim) { return without(spec, {dim}); }

OrReason<Spec> expand(const Spec& spec, const Dims& shape) {
  const std::size_t fresh = shape.size() - spec.meta().shape().size();
  Dims stride(shape.size(), 0);
  DimLayouts dims;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (d < fresh) {
      dims.push_back({Factor{shape[d], {}}});
      continue;
    }
    const std::size_t old = d - fresh;
    if (spec.meta().shape()[old] == shape[d]) {
      stride[d] = spec.meta().stride()[old];
      dims.push_back(spec.dims()[old]);
    } else if (is_cut(spec.dims()[old])) {
      return cut_reason(spec, static_cast<std::int64_t>(old));
    } else {
      dims.push_back({Factor{shape[d], {}}});
    }
  }
  return with_dims(spec, shape, std::move(stride), dims);
}

OrReason<Spec> stride_over(const Spec& spec, std::int64_t dim, std::int64_t start, std::int64_t end,
                           std::int64_t step) {
  if (is_cut(spec.dims()[dim])) return cut_reason(spec, dim);
  Dims shape = spec.meta().shape();
  Dims stride = spec.meta().stride();
  shape[dim] = ceil_div(std::max<std::int64_t>(0, end - start), step);
  stride[dim] *= step;
  DimLayouts dims = spec.dims();
  dims[dim] = {Factor{shape[dim], {}}};
  return with_dims(spec, std::move(shape), std::move(stride), dims);
}

}  // namespace dtensor
