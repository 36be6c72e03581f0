#pragma once

#include <cstdint>

#include "dtensor/core/cost.h"
#include "dtensor/core/dim_layout.h"
#include "dtensor/core/mesh.h"

namespace dtensor {

// What is in both.
Interval common(Interval a, Interval b);

// What slides over a tensor dim: output i reads inputs i*stride - padding + j*dilation for every j < kernel.
struct Window {
  std::int64_t kernel = 1;
  std::int64_t stride = 1;
  std::int64_t padding = 0;
  std::int64_t dilation = 1;

  // What a run of outputs reads: from the first to the last input, which are before 0 or past the dim's end where that
  // is padding. Of no outputs: nothing.
  //   {.kernel = 3, .padding = 1}.read_by({0, 4}) is [-1, 5)
  Interval read_by(Interval outputs) const;
  friend bool operator==(const Window&, const Window&) = default;
};

// The same without what is outside of a dim of `size` inputs.
Interval read_inside(const Window& window, Interval outputs, std::int64_t size);

// A dim of `inputs` elements, and what a window makes of it, cut alike by the chunk rule.
struct SlidingDim {
  Window window;
  std::int64_t inputs = 0;
  std::int64_t outputs = 0;
  Cuts cuts = {};
};

// What the rank that must fetch most of the inputs needs for its outputs.
struct HaloNeed {
  std::int64_t needed = 0;
  std::int64_t held = 0;   // of what it needs
  std::int64_t peers = 0;  // who have the rest; of the rank that asks most of them
};
HaloNeed halo_of(const SlidingDim& dim, const Mesh& mesh);

}  // namespace dtensor
