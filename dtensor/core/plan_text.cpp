#include <algorithm>
#include <array>

#include "dtensor/core/plan.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

struct Unit {
  std::int64_t size;
  std::string_view name;
};

// One digit after the point unless it is 0, rounded half up; the largest unit that leaves 1 or more.
std::string in_units(std::int64_t value, std::span<const Unit> units) {
  const auto unit = std::find_if(units.begin(), units.end() - 1, [&](const Unit& u) { return value >= u.size; });
  const std::int64_t whole = value / unit->size;
  const std::int64_t rest = value % unit->size;
  const std::int64_t tenths = whole * 10 + (unit->size >= 10 ? (rest + unit->size / 20) / (unit->size / 10) : 0);
  std::string text = std::to_string(tenths / 10);
  if (tenths % 10 != 0) text += "." + std::to_string(tenths % 10);
  return text + " " + std::string(unit->name);
}

std::string volume_text(const Volume& volume) {
  return bytes_text(volume.max) + " (" + bytes_text(volume.total) + " in all)";
}

std::string padded(std::string text, std::size_t width) {
  if (text.size() < width) text.append(width - text.size(), ' ');
  return text;
}

std::string group_text(const Step& step) {
  if (is_local(step.kind)) return "on each rank";
  if (step.mesh_dims.empty()) return "across meshes";
  const Mesh& mesh = step.before.mesh();
  return "over " + join(step.mesh_dims, ",",
                        [&](std::int64_t m) { return mesh.names().empty() ? std::to_string(m) : mesh.names()[m]; });
}

std::string step_text(const Step& step) {
  std::string text = padded(std::string(to_string(step.kind)), 15) + padded(group_text(step), 16);
  if (step.op) {
    text += std::string(to_string(*step.op)) + (step.divisor > 1 ? " / " + std::to_string(step.divisor) : "") + "; ";
  }
  if (!is_local(step.kind)) {
    text += "receives " + volume_text(step.received) + ", sends " + volume_text(step.sent) + ", " +
            std::to_string(step.messages) + (step.messages == 1 ? " message, " : " messages, ");
    if (step.chunks > 1) text += std::to_string(step.chunks) + " chunks, ";
  }
  return text + time_text(step.time) + "\n" + padded("", 5) + "-> " + step.after.to_string();
}

std::string way_text(const Route& route) {
  switch (route.way) {
    case Route::Way::kDirect:
      return "direct exchange";
    case Route::Way::kBroadcast:
      return "broadcast";
    default:
      break;
  }
  if (route.steps.empty()) return "collectives";
  return join(route.steps, ", ", [](const Step& step) { return std::string(to_string(step.kind)); });
}

}  // namespace

std::string_view to_string(StepKind kind) {
  constexpr std::array<std::string_view, 9> kNames = {
      "slice", "embed", "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute", "exchange", "broadcast"};
  return kNames[static_cast<std::size_t>(kind)];
}

std::string bytes_text(std::int64_t bytes) {
  static constexpr Unit kUnits[] = {
      {1'000'000'000'000, "TB"}, {1'000'000'000, "GB"}, {1'000'000, "MB"}, {1'000, "kB"}, {1, "B"}};
  return in_units(bytes, kUnits);
}

std::string time_text(std::int64_t picoseconds) {
  static constexpr Unit kUnits[] = {
      {1'000'000'000'000, "s"}, {1'000'000'000, "ms"}, {1'000'000, "us"}, {1'000, "ns"}, {1, "ps"}};
  return in_units(picoseconds, kUnits);
}

std::string Plan::to_string() const {
  std::string text = "from " + from().to_string() + "\nto   " + to().to_string() + "\n";
  for (std::size_t i = 0; i < steps().size(); ++i) {
    text += padded(std::to_string(i + 1) + ".", 5) + step_text(steps()[i]) + "\n";
  }
  if (steps().empty()) text += "nothing to do: every rank holds its part already\n";
  const std::string about = exact() ? "" : "about ";
  text += "receives " + about + volume_text(received()) + ", at least " + volume_text(received_bound()) + "\n";
  text += "memory   " + bytes_text(peak_bytes()) + ", source and target alone " + bytes_text(memory_bound()) + "\n";
  text += "time     " + time_text(time()) + "\n";
  for (const Route& route : rejected()) text += "not by   " + way_text(route) + ": " + route.refused + "\n";
  return text;
}

}  // namespace dtensor
