#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dtensor/core/spec.h"

namespace dtensor {

// Pictures of who holds what. A picture is a grid over the last two dims of the tensor; what comes before them gives
// one grid per stretch of indices that are held alike. Small dims are drawn index by index, large ones by such
// stretches.

struct DrawOptions {
  bool color = false;           // ANSI colours
  std::int64_t max_cells = 24;  // per side; a longer one is drawn by stretches, then cut off with a word
  std::int64_t max_ranks = 32;  // rows of the table
};

// The spec, its grids, a table of every rank's part, and what the signs mean.
std::string draw_text(const Spec& spec, const DrawOptions& options = {});
// The same as an SVG file's text.
std::string draw_svg(const Spec& spec, const DrawOptions& options = {});

}  // namespace dtensor
