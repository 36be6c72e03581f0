#include "examples/gpt/report.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <fstream>
#include <sstream>

#include "dtensor/core/error.h"

namespace {

std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));
std::string format(const char* pattern, ...) {
  char text[256];
  va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(text, sizeof text, pattern, arguments);
  va_end(arguments);
  return text;
}

std::ofstream open_file(const std::string& path) {
  std::ofstream out(path);
  if (!out) dtensor::fail_invalid("dtensor train", {.what = "the file cannot be written", .got = "\"" + path + "\""});
  return out;
}

}  // namespace

std::string with_commas(std::int64_t number) {
  std::string digits = std::to_string(number);
  for (std::size_t at = digits.size(); at > 3; at -= 3) digits.insert(at - 3, ",");
  return digits;
}

std::string in_bytes(std::int64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (bytes < 10'000) return std::to_string(bytes) + " B";
  return bytes < 10'000'000 ? format("%.1f KB", value / 1e3) : format("%.1f MB", value / 1e6);
}

ProgressBar::ProgressBar(std::string title, std::int64_t steps)
    : title_(std::move(title)), steps_(steps), terminal_(isatty(STDERR_FILENO) == 1) {}

void ProgressBar::show(std::int64_t step, double loss, const TrainResult& so_far) {
  const std::int64_t done = step + 1;
  if (!terminal_ && done != steps_ && done % std::max<std::int64_t>(1, steps_ / 5) != 0) return;
  std::int64_t bytes = 0;
  for (const auto& [name, kind] : so_far.communication) bytes += kind.bytes;
  const std::string rest =
      format("step %*ld/%ld  loss %.4f  %s tokens/s  %s received per step",
             static_cast<int>(std::to_string(steps_).size()), static_cast<long>(done), static_cast<long>(steps_), loss,
             with_commas(std::llround(so_far.tokens_per_second())).c_str(), in_bytes(bytes).c_str());
  if (!terminal_) {
    std::fprintf(stderr, "%s  %s\n", title_.c_str(), rest.c_str());
    return;
  }
  constexpr std::int64_t kWidth = 24;
  const auto full = static_cast<std::size_t>(kWidth * done / steps_);
  std::fprintf(stderr, "\r%s [%s%s] %s%s", title_.c_str(), std::string(full, '#').c_str(),
               std::string(kWidth - full, '.').c_str(), rest.c_str(), done == steps_ ? "\n" : " ");
  std::fflush(stderr);
}

void write_csv(const std::string& path, const std::vector<Curve>& curves, std::int64_t first_step) {
  std::ofstream out = open_file(path);
  out << "step";
  for (const Curve& curve : curves) out << ',' << curve.name;
  out << '\n';
  for (std::size_t step = 0; step < curves[0].losses.size(); ++step) {
    out << first_step + static_cast<std::int64_t>(step);
    for (const Curve& curve : curves) out << ',' << format("%.17g", curve.losses[step]);
    out << '\n';
  }
}

void write_svg(const std::string& path, const std::vector<Curve>& curves) {
  constexpr double kWidth = 640, kHeight = 360, kLeft = 56, kTop = 24, kRight = 16, kBottom = 40;
  double low = curves[0].losses[0], high = low;
  for (const Curve& curve : curves) {
    for (const double loss : curve.losses) {
      low = std::min(low, loss);
      high = std::max(high, loss);
    }
  }
  if (high - low < 1e-9) high = low + 1;
  const auto steps = static_cast<double>(std::max<std::size_t>(2, curves[0].losses.size()) - 1);
  const auto x = [&](double step) { return kLeft + step / steps * (kWidth - kLeft - kRight); };
  const auto y = [&](double loss) { return kTop + (high - loss) / (high - low) * (kHeight - kTop - kBottom); };
  std::ofstream out = open_file(path);
  out << format("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %g %g\" font-family=\"sans-serif\" ", kWidth,
                kHeight)
      << "font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n";
  for (int i = 0; i <= 4; ++i) {
    const double loss = low + (high - low) * i / 4;
    out << format("<line x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/>\n", kLeft, kWidth - kRight,
                  y(loss), y(loss))
        << format("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">%.3g</text>\n", kLeft - 6, y(loss) + 4, loss);
  }
  out << format("<text x=\"%.1f\" y=\"%.1f\">step 0</text>\n", kLeft, kHeight - 14)
      << format("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">step %.0f</text>\n", kWidth - kRight, kHeight - 14,
                steps);
  constexpr const char* kColors[] = {"#1565c0", "#e65100"};
  for (std::size_t i = 0; i < curves.size(); ++i) {
    // The second is dashed: where both are the same, both are seen.
    out << "<polyline fill=\"none\" stroke-width=\"2\" stroke=\"" << kColors[i % 2] << "\""
        << (i ? " stroke-dasharray=\"6 6\"" : "") << " points=\"";
    for (std::size_t step = 0; step < curves[i].losses.size(); ++step) {
      out << format("%.1f,%.1f ", x(static_cast<double>(step)), y(curves[i].losses[step]));
    }
    out << "\"/>\n"
        << format("<text x=\"%.1f\" y=\"%.1f\" fill=\"%s\">%s</text>\n", kLeft + 12 + 260 * static_cast<double>(i),
                  kTop - 8, kColors[i % 2], curves[i].name.c_str());
  }
  out << "</svg>\n";
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] - b[i]) / std::abs(b[i]));
  return largest;
}

std::string table_of(const std::string& name, const TrainResult& result, const TrainResult* plain) {
  std::ostringstream out;
  const auto row = [&](const char* what, const std::string& mine, const std::string& other) {
    out << format("%-22s %24s", what, mine.c_str()) << (plain ? format(" %24s", other.c_str()) : "") << '\n';
  };
  row("", name, "plain libtorch");
  const auto loss = [](double value) { return format("%.10f", value); };
  row("loss, first step", loss(result.losses.front()), plain ? loss(plain->losses.front()) : "");
  row("loss, last step", loss(result.losses.back()), plain ? loss(plain->losses.back()) : "");
  const auto speed = [](const TrainResult& of) { return with_commas(std::llround(of.tokens_per_second())); };
  row("tokens/s", speed(result), plain ? speed(*plain) : "");
  if (plain) {
    out << format("largest difference of the losses over %zu steps: %.1e (relative); speed %.2f of plain\n",
                  result.losses.size(), largest_difference(result.losses, plain->losses),
                  result.tokens_per_second() / plain->tokens_per_second());
  }
  out << "communication of one step, on rank 0:" << (result.communication.empty() ? " none" : "") << '\n';
  for (const auto& [kind, sum] : result.communication) {
    out << format("  %4ld x %-24s %12s received\n", static_cast<long>(sum.count), kind.c_str(),
                  in_bytes(sum.bytes).c_str());
  }
  return out.str();
}
