#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <set>
#include <string_view>

#include "bench/comm/measure.h"

namespace dtensor::bench {
namespace {

constexpr double kWidth = 460, kHeight = 360, kLeft = 64, kTop = 40, kGap = 40;
constexpr std::array<std::string_view, 6> kColors = {"#1b7837", "#2166ac", "#b2182b", "#92c5de", "#f4a582", "#666666"};

std::string format(const char* pattern, auto... values) {
  char text[256];
  std::snprintf(text, sizeof text, pattern, values...);
  return text;
}

std::string bytes_text(std::int64_t bytes) {
  if (bytes >= 1 << 20) return std::to_string(bytes >> 20) + " MB";
  if (bytes >= 1 << 10) return std::to_string(bytes >> 10) + " KB";
  return std::to_string(bytes) + " B";
}

struct Scale {
  double low, high;  // logarithms
  double at(double value, double length) const { return (std::log10(value) - low) / (high - low) * length; }
};

std::string text_at(double x, double y, const std::string& anchor, const std::string& text, std::string_view color) {
  return format("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" fill=\"%s\">", x, y, anchor.c_str(),
                std::string(color).c_str()) +
         text + "</text>\n";
}

std::string axes(double left, const Scale& x, const Scale& y, std::int64_t ranks) {
  std::string svg =
      format("<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"none\" stroke=\"#888\"/>\n", left, kTop,
             kWidth, kHeight);
  svg += text_at(left + kWidth / 2, kTop - 14, "middle", "all-reduce of float, " + std::to_string(ranks) + " ranks",
                 "#000");
  for (const std::int64_t bytes : message_sizes()) {
    const double at = left + x.at(static_cast<double>(bytes), kWidth);
    svg += format("<line x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#eee\"/>\n", at, at, kTop,
                  kTop + kHeight);
    svg += text_at(at, kTop + kHeight + 16, "middle", bytes_text(bytes), "#444");
  }
  for (int power = static_cast<int>(std::ceil(y.low)); power <= static_cast<int>(std::floor(y.high)); ++power) {
    const double at = kTop + kHeight - y.at(std::pow(10.0, power), kHeight);
    svg += format("<line x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#eee\"/>\n", left, left + kWidth, at,
                  at);
    const double micros = std::pow(10.0, power + 6);
    svg += text_at(left - 6, at + 4, "end",
                   micros >= 1000 ? format("%.0f ms", micros / 1000) : format("%.0f us", micros), "#444");
  }
  return svg;
}

}  // namespace

std::string draw_svg(const std::vector<Series>& series) {
  std::set<std::int64_t> panels;
  std::vector<std::string> backends;
  double least = 1, most = 1e-6;
  for (const Series& line : series) {
    panels.insert(line.ranks);
    if (std::find(backends.begin(), backends.end(), line.backend) == backends.end()) backends.push_back(line.backend);
    for (const Sample& sample : line.samples) {
      least = std::min(least, sample.seconds);
      most = std::max(most, sample.seconds);
    }
  }
  const Scale x{std::log10(8.0), std::log10(static_cast<double>(message_sizes().back())) + 0.1};
  const Scale y{std::log10(least) - 0.2, std::log10(most) + 0.2};
  const double width = kLeft + static_cast<double>(panels.size()) * (kWidth + kGap + kLeft);
  std::string svg = format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" font-family=\"sans-serif\" "
      "font-size=\"10\"><rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n",
      width, kTop + kHeight + 40);
  double left = kLeft;
  for (const std::int64_t ranks : panels) {
    svg += axes(left, x, y, ranks);
    for (const Series& line : series) {
      if (line.ranks != ranks) continue;
      const auto index =
          static_cast<std::size_t>(std::find(backends.begin(), backends.end(), line.backend) - backends.begin());
      const std::string color(kColors[index % kColors.size()]);
      std::string points;
      for (const Sample& sample : line.samples) {
        points += format("%.1f,%.1f ", left + x.at(static_cast<double>(sample.bytes), kWidth),
                         kTop + kHeight - y.at(sample.seconds, kHeight));
      }
      svg += "<polyline fill=\"none\" stroke-width=\"2\" stroke=\"" + color + "\" points=\"" + points + "\"/>\n";
      svg += text_at(left + 10, kTop + 16 + 14 * static_cast<double>(index), "start", line.backend, color);
    }
    left += kWidth + kGap + kLeft;
  }
  return svg + "</svg>\n";
}

}  // namespace dtensor::bench
