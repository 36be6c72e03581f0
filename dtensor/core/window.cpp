#include "dtensor/core/window.h"

#include <algorithm>
#include <vector>

namespace dtensor {
Interval common(Interval a, Interval b) {
  const std::int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

Interval Window::read_by(Interval outputs) const {
  if (outputs.empty()) return {};
  return {outputs.begin * stride - padding, (outputs.end - 1) * stride - padding + (kernel - 1) * dilation + 1};
}

Interval read_inside(const Window& window, Interval outputs, std::int64_t size) {
  return common(window.read_by(outputs), {0, size});
}

HaloNeed halo_of(const SlidingDim& dim, const Mesh& mesh) {
  // The pieces in the order of the cuts, so that what they hold ascends.
  std::vector<Interval> inputs = {{0, dim.inputs}}, outputs = {{0, dim.outputs}};
  const auto cut = [](std::vector<Interval>& pieces, std::int64_t count) {
    std::vector<Interval> next;
    for (const Interval& piece : pieces) {
      for (std::int64_t i = 0; i < count; ++i) next.push_back(chunk(piece, count, i));
    }
    pieces = std::move(next);
  };
  for (const Cut& one : dim.cuts) {
    const std::int64_t count = one.is_virtual() ? one.count : mesh.shape()[one.mesh_dim];
    cut(inputs, count);
    cut(outputs, count);
  }
  HaloNeed most;
  for (std::size_t r = 0; r < inputs.size(); ++r) {
    const Interval needed = read_inside(dim.window, outputs[r], dim.inputs);
    const std::int64_t held = common(needed, inputs[r]).size();
    if (needed.size() - held > most.needed - most.held || r == 0) {
      most.needed = needed.size();
      most.held = held;
    }
    if (needed.empty()) continue;
    const auto first = std::upper_bound(inputs.begin(), inputs.end(), needed.begin,
                                        [](std::int64_t at, const Interval& piece) { return at < piece.end; });
    std::int64_t peers = 0;
    for (auto piece = first; piece != inputs.end() && piece->begin < needed.end; ++piece) {
      if (!piece->empty() && piece - inputs.begin() != static_cast<std::ptrdiff_t>(r)) ++peers;
    }
    most.peers = std::max(most.peers, peers);
  }
  return most;
}

}  // namespace dtensor
