#include <algorithm>

#include "dtensor/debug/draw.h"
#include "dtensor/debug/picture_impl.h"

namespace dtensor {
namespace {

constexpr int kCellHeight = 26;
constexpr int kCharWidth = 8;
constexpr int kMargin = 20;

std::string escaped(const std::string& text) {
  std::string result;
  for (char c : text) {
    if (c == '<')
      result += "&lt;";
    else if (c == '>')
      result += "&gt;";
    else if (c == '&')
      result += "&amp;";
    else if (c == '"')
      result += "&quot;";
    else
      result += c;
  }
  return result;
}

// Hues a golden angle apart: neighbours differ, and no two ranks of a small mesh look alike.
std::string fill_of(std::int64_t rank) {
  return "hsl(" + std::to_string(rank * 1375 / 10 % 360) + ",65%," + std::to_string(rank % 2 ? 78 : 70) + "%)";
}

class Canvas {
 public:
  void text(int x, int y, const std::string& content, const char* style = "") {
    body_ += "<text x=\"" + std::to_string(x) + "\" y=\"" + std::to_string(y) + "\" " + style + ">" + escaped(content) +
             "</text>\n";
    width_ = std::max(width_, x + static_cast<int>(content.size()) * kCharWidth);
    height_ = std::max(height_, y);
  }
  void cell(int x, int y, int width, const std::string& fill, const std::string& content) {
    body_ += "<rect x=\"" + std::to_string(x) + "\" y=\"" + std::to_string(y) + "\" width=\"" + std::to_string(width) +
             "\" height=\"" + std::to_string(kCellHeight) + "\" fill=\"" + fill + "\"/>\n";
    width_ = std::max(width_, x + width);
    height_ = std::max(height_, y + kCellHeight);
    text(x + width / 2, y + kCellHeight * 2 / 3, content, "text-anchor=\"middle\"");
  }
  std::string finish() const {
    const std::string w = std::to_string(width_ + kMargin);
    const std::string h = std::to_string(height_ + kMargin);
    return "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" + w + "\" height=\"" + h + "\" viewBox=\"0 0 " + w +
           " " + h +
           "\">\n<style>text{font:13px monospace;fill:#222} rect{stroke:#fff;stroke-width:1}</style>\n"
           "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n" +
           body_ + "</svg>\n";
  }

 private:
  std::string body_;
  int width_ = 0;
  int height_ = 0;
};

int add_picture(const Picture& picture, int y, Canvas& canvas) {
  if (!picture.title.empty()) {
    canvas.text(kMargin, y, picture.title);
    y += kCellHeight;
  }
  std::size_t longest = 3;
  std::size_t label = 0;
  for (const auto& line : picture.cells) {
    for (const PictureCell& cell : line) longest = std::max(longest, cell.text().size());
  }
  for (const std::string& text : picture.column_labels) longest = std::max(longest, text.size());
  for (const std::string& text : picture.row_labels) label = std::max(label, text.size());
  const int width = static_cast<int>(longest) * kCharWidth + 12;
  const int left = kMargin + static_cast<int>(label) * kCharWidth + 8;
  for (std::size_t i = 0; i < picture.column_labels.size(); ++i) {
    canvas.text(left + static_cast<int>(i) * width + width / 2, y, picture.column_labels[i],
                "text-anchor=\"middle\" fill-opacity=\"0.6\"");
  }
  y += 8;
  for (std::size_t row = 0; row < picture.cells.size(); ++row) {
    canvas.text(kMargin, y + kCellHeight * 2 / 3, picture.row_labels[row], "fill-opacity=\"0.6\"");
    for (std::size_t i = 0; i < picture.cells[row].size(); ++i) {
      const PictureCell& cell = picture.cells[row][i];
      canvas.cell(left + static_cast<int>(i) * width, y, width, cell.ranks.empty() ? "#eee" : fill_of(cell.ranks[0]),
                  cell.text());
    }
    y += kCellHeight;
  }
  return y + kCellHeight;
}

}  // namespace

std::string draw_svg(const Spec& spec, const DrawOptions& options) {
  const Drawing drawing = make_drawing(spec, options);
  Canvas canvas;
  int y = kMargin + 10;
  canvas.text(kMargin, y, spec.to_string(), "font-weight=\"bold\"");
  y += kCellHeight + 10;
  for (const Picture& picture : drawing.pictures) y = add_picture(picture, y, canvas);
  for (const RankRow& row : drawing.ranks) {
    canvas.cell(kMargin, y, 5 * kCharWidth, fill_of(row.rank), std::to_string(row.rank));
    canvas.text(kMargin + 6 * kCharWidth, y + kCellHeight * 2 / 3,
                row.coordinate + "  shape " + row.shape + "  offset " + row.offset + "  " + row.bytes + "  holds " +
                    row.indices);
    y += kCellHeight;
  }
  for (const std::string& note : drawing.notes) {
    y += kCellHeight;
    canvas.text(kMargin, y, note, "fill-opacity=\"0.6\"");
  }
  return canvas.finish();
}

}  // namespace dtensor
