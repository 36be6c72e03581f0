#include "dtensor/debug/draw.h"

#include <algorithm>
#include <array>

#include "dtensor/debug/picture_impl.h"

namespace dtensor {
namespace {

// Columns on a terminal: bytes that start a character.
std::size_t width_of(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

std::string padded(const std::string& text, std::size_t width, bool right = false) {
  const std::size_t used = width_of(text);
  const std::string fill(width > used ? width - used : 0, ' ');
  return right ? fill + text : text + fill;
}

// Backgrounds of the 256-colour palette that black text reads well on, neighbours far apart.
std::string colored(const std::string& text, std::int64_t rank) {
  constexpr std::array<int, 16> kPalette = {114, 111, 216, 222, 183, 80,  205, 150,
                                            117, 209, 229, 141, 79,  175, 186, 147};
  const int color = kPalette[static_cast<std::size_t>(rank) % kPalette.size()];
  return "\x1b[48;5;" + std::to_string(color) + ";38;5;16m" + text + "\x1b[0m";
}

void add_picture(const Picture& picture, bool color, std::string& out) {
  if (!picture.title.empty()) out += "  " + picture.title + "\n";
  std::size_t cell_width = 1;
  std::size_t label_width = 0;
  for (const std::string& label : picture.column_labels) cell_width = std::max(cell_width, width_of(label));
  for (const auto& line : picture.cells) {
    for (const PictureCell& cell : line) cell_width = std::max(cell_width, width_of(cell.text()));
  }
  for (const std::string& label : picture.row_labels) label_width = std::max(label_width, width_of(label));
  out += "  " + std::string(label_width, ' ');
  for (const std::string& label : picture.column_labels) out += " " + padded(label, cell_width + 1, true);
  out += "\n";
  for (std::size_t row = 0; row < picture.cells.size(); ++row) {
    out += "  " + padded(picture.row_labels[row], label_width, true);
    for (const PictureCell& cell : picture.cells[row]) {
      const std::string text = " " + padded(cell.text(), cell_width, true);
      out += " " + (color && !cell.ranks.empty() ? colored(text, cell.ranks[0]) : text);
    }
    out += "\n";
  }
  out += "\n";
}

void add_table(const std::vector<RankRow>& ranks, bool color, std::string& out) {
  std::vector<std::vector<std::string>> lines = {{"rank", "coordinate", "local shape", "offset", "bytes", "holds"}};
  for (const RankRow& row : ranks) {
    lines.push_back({std::to_string(row.rank), row.coordinate, row.shape, row.offset, row.bytes, row.indices});
  }
  std::vector<std::size_t> widths(lines[0].size());
  for (const auto& line : lines) {
    for (std::size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], width_of(line[i]));
  }
  for (std::size_t n = 0; n < lines.size(); ++n) {
    for (std::size_t i = 0; i < lines[n].size(); ++i) {
      const bool last = i + 1 == lines[n].size();
      const bool right = i == 0 || i == 4;
      std::string text = last ? lines[n][i] : padded(lines[n][i], widths[i], right);
      if (color && i == 0 && n > 0) text = colored(text, ranks[n - 1].rank);
      out += "  " + text;
    }
    out += "\n";
  }
}

}  // namespace

std::string draw_text(const Spec& spec, const DrawOptions& options) {
  const Drawing drawing = make_drawing(spec, options);
  std::string out = spec.to_string() + "\n\n";
  for (const Picture& picture : drawing.pictures) add_picture(picture, options.color, out);
  add_table(drawing.ranks, options.color, out);
  for (const std::string& note : drawing.notes) out += "  " + note + "\n";
  return out;
}

}  // namespace dtensor
