#pragma once

#include "dtensor/core/spec.h"

namespace dtensor {

// More views that move nothing (see view.h). Dims are given from 0 and must exist.

// A new dim of size 1 before `dim`.
OrReason<Spec> unsqueeze(const Spec& spec, std::int64_t dim);
// Without these dims, all of size 1. Not when one is cut: then one rank alone holds it.
OrReason<Spec> squeeze(const Spec& spec, const Dims& dims);
// Without `dim`, at one of its indices. Not when it is cut.
OrReason<Spec> select(const Spec& spec, std::int64_t dim);
// Without these dims, of any size. Not when one is cut.
OrReason<Spec> without(const Spec& spec, const Dims& dims);
// Dims of size 1 to the sizes of `shape`, new dims in front. Not where a dim to be expanded is cut.
OrReason<Spec> expand(const Spec& spec, const Dims& shape);
// The same elements with these dims.
OrReason<Spec> with_dims(const Spec& spec, Dims shape, Dims stride, const DimLayouts& dims);
// Every `step`-th index of [start, end) of a dim that is not cut.
OrReason<Spec> stride_over(const Spec& spec, std::int64_t dim, std::int64_t start, std::int64_t end, std::int64_t step);

}  // namespace dtensor
