#pragma once

#include <string>
#include <vector>

#include "dtensor/debug/draw.h"

namespace dtensor {

// Who holds the elements of one cell.
struct PictureCell {
  std::vector<std::int64_t> ranks;  // ascending
  bool parts = false;               // each holds a part of the value (Partial)

  // `3`, `0,3` (either has it), `0+3` (the value is spread over them), `0,1,…7` when there are many.
  std::string text() const;
};

struct Picture {
  std::string title;  // `[2,:,:]`, or empty for tensors of up to two dims
  std::vector<std::string> row_labels;
  std::vector<std::string> column_labels;
  std::vector<std::vector<PictureCell>> cells;
};

struct RankRow {
  std::int64_t rank;
  std::string coordinate;
  std::string shape;
  std::string offset;
  std::string indices;  // `0-3,8-11 x 0-4`
  std::string bytes;
};

struct Drawing {
  std::vector<Picture> pictures;
  std::vector<RankRow> ranks;
  std::vector<std::string> notes;  // what was left out, what the signs mean
};

Drawing make_drawing(const Spec& spec, const DrawOptions& options);

}  // namespace dtensor
