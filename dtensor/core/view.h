#pragma once

#include "dtensor/core/spec.h"

namespace dtensor {

// Views that move nothing: the result holds, on every rank, exactly the elements that rank had, in the same local
// order, so the local tensor can be viewed alike and shares its memory. Where there is no such spec, the reason why
// not. Dims count from 0; negative ones from the end. Sizes that do not fit the tensor are an error.

// Dims first … last (both included) as one. Always expressible, unevenly cut dims too, as far as the strides allow it.
//   f32[3,5,8] @ 2(tp) : S(1)  ->  f32[(3*5),8] @ 2(tp) : S(0.1)
OrReason<Spec> flatten(const Spec& spec, std::int64_t first, std::int64_t last);

// One dim as several. Expressible where the cuts fall between the new rows, or inside single ones.
OrReason<Spec> unflatten(const Spec& spec, std::int64_t dim, const Dims& sizes);

// Indices start … start+length-1 of a dim. Expressible on a dim that is not cut, or cut only below rows that the
// boundaries fall between: a fused QKV weight [3][h : tp] gives its three parts for free.
OrReason<Spec> narrow(const Spec& spec, std::int64_t dim, std::int64_t start, std::int64_t length);

// Dim i of the result is dim order[i].
Spec permute(const Spec& spec, const Dims& order);

// Any other shape with as many elements: dims are flattened and unflattened as far as they have to be.
OrReason<Spec> reshape(const Spec& spec, const Dims& shape);

}  // namespace dtensor
