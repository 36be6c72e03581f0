// Planning a checkpoint of 1,024 tensors on 1,024 ranks: who writes what, and who reads what from where.
#include <chrono>
#include <cstdio>
#include <string>

#include "dtensor/checkpoint/index.h"
#include "dtensor/core/boxes.h"

namespace {

using namespace dtensor;

double seconds(const std::function<void()>& work) {
  double best = 1e9;
  for (int round = 0; round < 3; ++round) {
    const auto start = std::chrono::steady_clock::now();
    work();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

// Weights of many sizes, no two alike, as large models have them.
std::vector<SaveItem> model(const std::string& mesh, const std::string& placements, std::int64_t tensors) {
  std::vector<SaveItem> items;
  for (std::int64_t i = 0; i < tensors; ++i) {
    const std::string shape = std::to_string(4096 + 8 * i) + "," + std::to_string(i % 3 == 0 ? 1024 : 4096);
    items.push_back(
        {"layers." + std::to_string(i) + ".weight", Spec::parse("bf16[" + shape + "] @ " + mesh + " : " + placements)});
  }
  return items;
}

void measure(const std::string& mesh, const std::string& placements, const std::string& to_mesh,
             const std::string& to_placements) {
  constexpr std::int64_t kRanks = 1024;
  const std::vector<SaveItem> items = model(mesh, placements, 1024);
  const std::vector<SaveItem> wanted = model(to_mesh, to_placements, 1024);
  SavePlan plan;
  const double save = seconds([&] { plan = plan_save(items, kRanks); });
  // What each rank does alone, on all of them: its pieces with their boxes.
  std::int64_t pieces = 0;
  const double write = seconds([&] {
    pieces = 0;
    for (const StoredTensor& tensor : plan.tensors) {
      for (std::int64_t rank = 0; rank < kRanks; ++rank) {
        const auto at = written_by(tensor, rank);
        if (at) pieces += box_of(tensor.spec, *at).numel() > 0;
      }
    }
  });
  std::int64_t reads = 0;
  const Mesh target = wanted[0].spec.mesh();
  const auto read_as = [&](std::int64_t rank) {
    const Dims at = *target.coordinate(rank);
    for (std::size_t i = 0; i < items.size(); ++i) {
      const Spec& wants = wanted[i].spec;
      reads += static_cast<std::int64_t>(
          plan_reads(plan.tensors[i], wants, at, row_major_stride(wants.local_shape(at))).size());
    }
  };
  const double one = seconds([&] { read_as(target.size() / 2); });
  CheckpointIndex index;
  index.files.resize(kRanks);
  for (std::size_t i = 0; i < items.size(); ++i) index.tensors.emplace(items[i].name, plan.tensors[i]);
  std::string text;
  const double print = seconds([&] { text = print_index(index); });
  const double parse = seconds([&] { (void)parse_index(text, "index"); });
  const auto [least, most] = std::minmax_element(plan.bytes.begin(), plan.bytes.end());
  std::printf("%-10s %-12s -> %-10s %-12s  %8.3f  %8.3f (%7lld)  %8.4f  %6.3f %6.3f  %5.3f\n", mesh.c_str(),
              placements.c_str(), to_mesh.c_str(), to_placements.c_str(), save, write, static_cast<long long>(pieces),
              one, print, parse, static_cast<double>(*most) / static_cast<double>(std::max<std::int64_t>(*least, 1)));
}

}  // namespace

int main() {
  std::printf("1,024 tensors on 1,024 ranks, seconds (best of 3); budget: 1 s for planning\n");
  std::printf("%-39s  %8s  %18s  %8s  %13s  %s\n", "saved as -> loaded as", "plan", "all ranks' pieces", "one rank",
              "index out, in", "most/least bytes");
  measure("1024(x)", "S(0)", "512(x)", "S(0)");
  measure("8x128(a,b)", "S(0),S(1)", "4x64(a,b)", "S(1),S(0)");
  measure("8x128(a,b)", "R,S(0)", "1024(x)", "S(0)");
  measure("1024(x)", "R", "8x128(a,b)", "S(0),S(1)");
}
