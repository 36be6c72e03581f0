#include <algorithm>
#include <numeric>

#include "dtensor/core/boxes.h"
#include "dtensor/core/coordinates.h"
#include "dtensor/core/text.h"
#include "dtensor/debug/picture_impl.h"

namespace dtensor {
namespace {

constexpr std::int64_t kMaxDrawnRanks = 256;
constexpr std::int64_t kMaxPictures = 6;

// The runs of every rank on every dim.
struct Holdings {
  std::vector<std::int64_t> ranks;
  std::vector<Dims> coordinates;
  std::vector<std::vector<std::vector<Interval>>> runs;  // [rank][dim]
};

Holdings collect(const Spec& spec, std::int64_t limit) {
  Holdings result;
  const Mesh& mesh = spec.mesh();
  std::vector<std::int64_t> dims(static_cast<std::size_t>(mesh.ndim()));
  std::iota(dims.begin(), dims.end(), 0);
  Dims at(dims.size());
  do {
    if (static_cast<std::int64_t>(result.ranks.size()) == limit) break;
    result.ranks.push_back(mesh.rank_at(at));
    result.coordinates.push_back(at);
    result.runs.emplace_back();
    for (const DimSet& set : box_of(spec, at).dims) result.runs.back().push_back(runs_of(set));
  } while (next_coordinate(at, mesh.shape(), dims));
  return result;
}

// A dim as stretches of indices: single ones when they are few, else those that are held alike.
std::vector<Interval> stretches(const Holdings& holdings, std::size_t dim, std::int64_t size, std::int64_t max_cells) {
  std::vector<Interval> result;
  if (size <= max_cells) {
    for (std::int64_t i = 0; i < size; ++i) result.push_back({i, i + 1});
    return result;
  }
  std::vector<std::int64_t> edges = {0, size};
  for (const auto& runs : holdings.runs) {
    for (const Interval& run : runs[dim]) {
      edges.push_back(run.begin);
      edges.push_back(run.end);
    }
  }
  std::sort(edges.begin(), edges.end());
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  for (std::size_t i = 1; i < edges.size(); ++i) result.push_back({edges[i - 1], edges[i]});
  return result;
}

std::string range_text(const Interval& range) {
  if (range.size() == 1) return std::to_string(range.begin);
  return std::to_string(range.begin) + "-" + std::to_string(range.end - 1);
}

bool holds(const std::vector<Interval>& runs, std::int64_t index) {
  return std::any_of(runs.begin(), runs.end(),
                     [&](const Interval& run) { return index >= run.begin && index < run.end; });
}

std::string runs_text(const std::vector<Interval>& runs) {
  constexpr std::size_t kShown = 4;
  if (runs.empty()) return "-";
  std::string text =
      join(std::vector<Interval>(runs.begin(), runs.begin() + std::min(runs.size(), kShown)), ",", range_text);
  if (runs.size() > kShown) text += ",… (" + std::to_string(runs.size()) + " runs)";
  return text;
}

std::string bytes_text(std::int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  std::size_t unit = 0;
  double value = static_cast<double>(bytes);
  while (value >= 1024 && unit < 5) {
    value /= 1024;
    ++unit;
  }
  std::string text = std::to_string(value);
  text.resize(unit == 0 ? text.find('.') : text.find('.') + 2);
  return text + " " + kUnits[unit];
}

RankRow rank_row(const Spec& spec, const Holdings& holdings, std::size_t i) {
  const Dims& at = holdings.coordinates[i];
  const Spec::Local local = spec.local(at);
  return {holdings.ranks[i],
          "(" + join_numbers(at) + ")",
          "[" + join_numbers(local.shape) + "]",
          "[" + join_numbers(local.offset) + "]",
          join(holdings.runs[i], " x ", runs_text),
          bytes_text(spec.local_bytes(at))};
}

// Cuts a list of stretches off at a readable length.
void shorten(std::vector<Interval>& list, std::int64_t most, const std::string& what, std::vector<std::string>& notes) {
  if (static_cast<std::int64_t>(list.size()) <= most) return;
  notes.push_back("… and " + std::to_string(static_cast<std::int64_t>(list.size()) - most) + " more " + what);
  list.resize(static_cast<std::size_t>(most));
}

Picture one_picture(const Spec& spec, const Holdings& holdings, const std::vector<std::vector<Interval>>& bands,
                    const std::vector<Interval>& leading) {
  const std::size_t ndim = bands.size();
  const std::size_t first = ndim >= 2 ? ndim - 2 : 0;  // of the drawn dims
  Picture picture;
  if (!leading.empty()) picture.title = "[" + join(leading, ",", range_text) + ",:,:]";
  const std::vector<Interval> one = {{0, 1}};
  const std::vector<Interval>& rows = ndim >= 2 ? bands[ndim - 2] : one;
  const std::vector<Interval>& columns = ndim >= 1 ? bands[ndim - 1] : one;
  for (const Interval& row : rows) picture.row_labels.push_back(ndim >= 2 ? range_text(row) : "");
  for (const Interval& column : columns) picture.column_labels.push_back(ndim >= 1 ? range_text(column) : "");
  for (const Interval& row : rows) {
    std::vector<PictureCell> line;
    for (const Interval& column : columns) {
      PictureCell cell{{}, spec.has_partial()};
      for (std::size_t r = 0; r < holdings.ranks.size(); ++r) {
        const auto& runs = holdings.runs[r];
        bool inside = true;
        for (std::size_t d = 0; d < leading.size(); ++d) inside = inside && holds(runs[d], leading[d].begin);
        if (ndim >= 2) inside = inside && holds(runs[first], row.begin);
        if (ndim >= 1) inside = inside && holds(runs[ndim - 1], column.begin);
        if (inside) cell.ranks.push_back(holdings.ranks[r]);
      }
      std::sort(cell.ranks.begin(), cell.ranks.end());
      line.push_back(std::move(cell));
    }
    picture.cells.push_back(std::move(line));
  }
  return picture;
}

void add_pictures(const Spec& spec, const DrawOptions& options, const Holdings& holdings, Drawing& drawing) {
  const Dims& shape = spec.meta().shape();
  std::vector<std::vector<Interval>> bands;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    const bool drawn = d + 2 >= shape.size();
    bands.push_back(stretches(holdings, d, shape[d], drawn ? options.max_cells : 0));
    if (drawn) {
      shorten(bands[d], options.max_cells, "stretches of dim " + std::to_string(d), drawing.notes);
    }
  }
  const std::size_t leading = shape.size() > 2 ? shape.size() - 2 : 0;
  Dims counts;
  std::vector<std::int64_t> all;
  for (std::size_t d = 0; d < leading; ++d) {
    counts.push_back(static_cast<std::int64_t>(bands[d].size()));
    all.push_back(static_cast<std::int64_t>(d));
  }
  Dims at(leading);
  do {
    if (static_cast<std::int64_t>(drawing.pictures.size()) == kMaxPictures) {
      drawing.notes.push_back("… and more pictures along the leading dims");
      break;
    }
    std::vector<Interval> index;
    for (std::size_t d = 0; d < leading; ++d) index.push_back(bands[d][at[d]]);
    drawing.pictures.push_back(one_picture(spec, holdings, bands, index));
  } while (next_coordinate(at, counts, all));
}

}  // namespace

std::string PictureCell::text() const {
  if (ranks.empty()) return "?";
  const char* separator = parts ? "+" : ",";
  if (ranks.size() <= 3) return join_numbers(ranks, separator);
  return std::to_string(ranks[0]) + separator + std::to_string(ranks[1]) + separator + "…" +
         std::to_string(ranks.back());
}

Drawing make_drawing(const Spec& spec, const DrawOptions& options) {
  Drawing drawing;
  const bool drawable = spec.mesh().size() <= kMaxDrawnRanks;
  const Holdings holdings = collect(spec, drawable ? spec.mesh().size() : options.max_ranks);
  if (!drawable) {
    drawing.notes.push_back("a mesh of " + std::to_string(spec.mesh().size()) + " ranks is not drawn, only listed");
  } else if (spec.meta().numel() == 0) {
    drawing.notes.push_back("the tensor has no elements");
  } else {
    add_pictures(spec, options, holdings, drawing);
  }
  if (spec.has_partial()) {
    drawing.notes.push_back("a+b: each of the ranks holds a part; the value is their reduction");
  } else if (!replica_dims(spec).empty()) {
    drawing.notes.push_back("a,b: each of the ranks holds the element");
  }
  for (std::size_t i = 0; i < holdings.ranks.size(); ++i) {
    if (static_cast<std::int64_t>(i) == options.max_ranks) break;
    drawing.ranks.push_back(rank_row(spec, holdings, i));
  }
  const std::int64_t rest = spec.mesh().size() - static_cast<std::int64_t>(drawing.ranks.size());
  if (rest > 0) drawing.notes.push_back("… and " + std::to_string(rest) + " more ranks");
  if (spec.mesh().rows() > 1) {
    drawing.notes.push_back("the first of " + std::to_string(spec.mesh().rows()) +
                            " rows of the mesh; the others alike");
  }
  return drawing;
}

}  // namespace dtensor
