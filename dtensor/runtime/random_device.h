#pragma once

#include <ATen/core/Tensor.h>

#include "dtensor/core/random.h"

namespace dtensor {

// draw_local into a dense tensor on a GPU; the same bits.
void draw_on_device(const RandomKey& key, const Draw& draw, const Spec& spec, const Dims& coordinate,
                    const at::Tensor& out);

}  // namespace dtensor
