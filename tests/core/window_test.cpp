#include "dtensor/core/window.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "tests/core/sweep.h"

namespace dtensor {
namespace {

// The inputs that outputs read, one by one.
std::set<std::int64_t> reads_of(const Window& window, Interval outputs) {
  std::set<std::int64_t> result;
  for (std::int64_t o = outputs.begin; o < outputs.end; ++o) {
    for (std::int64_t k = 0; k < window.kernel; ++k) {
      result.insert(o * window.stride - window.padding + k * window.dilation);
    }
  }
  return result;
}

std::vector<Window> windows() {
  std::vector<Window> result;
  for (const std::int64_t kernel : {1, 2, 3, 5}) {
    for (const std::int64_t stride : {1, 2, 4}) {
      for (const std::int64_t padding : {0, 1, 4}) {
        for (const std::int64_t dilation : {1, 3}) result.push_back({kernel, stride, padding, dilation});
      }
    }
  }
  return result;
}

TEST(Window, ReadsFromTheFirstToTheLast) {
  for (const Window& window : windows()) {
    for (const Interval outputs : {Interval{0, 1}, Interval{0, 4}, Interval{3, 5}}) {
      const std::set<std::int64_t> reads = reads_of(window, outputs);
      EXPECT_EQ(window.read_by(outputs), (Interval{*reads.begin(), *reads.rbegin() + 1}));
    }
    EXPECT_TRUE(window.read_by({2, 2}).empty());
  }
  EXPECT_EQ((Window{.kernel = 3, .padding = 1}.read_by({0, 4})), (Interval{-1, 5}));
  EXPECT_EQ(read_inside({.kernel = 3, .padding = 1}, {0, 4}, 4), (Interval{0, 4}));
  EXPECT_TRUE(read_inside({.kernel = 1, .padding = 3}, {0, 2}, 4).empty());
}

// Against every rank's own list of who has what it needs.
TEST(Window, HalosAreWhatTheNeediestRankLacks) {
  for (const Dims& shape : {Dims{1}, Dims{2}, Dims{3}, Dims{4}, Dims{2, 2}, Dims{2, 3}}) {
    const Mesh mesh = Mesh::make(shape);
    for (const Window& window : windows()) {
      for (const std::int64_t inputs : {1, 3, 7, 16}) {
        const std::int64_t span = inputs + 2 * window.padding - (window.kernel - 1) * window.dilation - 1;
        if (span < 0) continue;
        SlidingDim dim{window, inputs, span / window.stride + 1, {}};
        for (std::size_t m = 0; m < shape.size(); ++m) dim.cuts.push_back({static_cast<std::int32_t>(m), shape[m]});
        const Factor held{inputs, dim.cuts}, made{dim.outputs, dim.cuts};
        const auto interval = [](const Factor& factor, const Dims& at) {
          const Intervals all = intervals_of(factor, at);
          return all.empty() ? Interval{} : all[0];
        };
        std::int64_t lacking = 0, peers = 0;
        sweep::for_each_coordinate(mesh, [&](const Dims& at) {
          const Interval needs = read_inside(window, interval(made, at), inputs);
          std::int64_t here = 0, asked = 0;
          sweep::for_each_coordinate(mesh, [&](const Dims& other) {
            const std::int64_t some = common(needs, interval(held, other)).size();
            if (other == at)
              here = some;
            else
              asked += some > 0 ? 1 : 0;
          });
          lacking = std::max(lacking, needs.size() - here);
          peers = std::max(peers, asked);
        });
        const HaloNeed need = halo_of(dim, mesh);
        EXPECT_EQ(need.needed - need.held, lacking) << inputs << " on " << mesh.to_string();
        EXPECT_EQ(need.peers, peers) << inputs << " on " << mesh.to_string();
      }
    }
  }
}

}  // namespace
}  // namespace dtensor
