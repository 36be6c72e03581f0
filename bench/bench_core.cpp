// What core costs per call. Budgets: interned look-up of a spec under 150 ns, local shape and offset under 250 ns on a
// 3-D mesh.
#include <benchmark/benchmark.h>

#include "dtensor/core/boxes.h"
#include "dtensor/core/spec.h"
#include "dtensor/core/view.h"

namespace dtensor {
namespace {

const Mesh kMesh = Mesh::make({2, 4, 8}, {"dp", "cp", "tp"});
const TensorMeta kMeta({4097, 1023}, DType::kBF16);

void intern_by_placements(benchmark::State& state) {
  const Placements placements = {Shard(0), Replicate(), Shard(1)};
  const Spec kept = Spec::make(kMeta, kMesh, placements);
  for (auto _ : state) benchmark::DoNotOptimize(Spec::make(kMeta, kMesh, placements));
}
BENCHMARK(intern_by_placements);

void intern_by_placements_nested(benchmark::State& state) {
  const Placements placements = {StridedShard(0, 8), Replicate(), Shard(0)};
  const Spec kept = Spec::make(kMeta, kMesh, placements);
  for (auto _ : state) benchmark::DoNotOptimize(Spec::make(kMeta, kMesh, placements));
}
BENCHMARK(intern_by_placements_nested);

void intern_by_dims(benchmark::State& state) {
  const Spec kept = Spec::make(kMeta, kMesh, {Shard(0), Replicate(), Shard(1)});
  for (auto _ : state) {
    benchmark::DoNotOptimize(Spec::from_dims(kept.meta(), kept.mesh(), kept.dims(), kept.partials()));
  }
}
BENCHMARK(intern_by_dims);

void local_shape_and_offset(benchmark::State& state, const char* text) {
  const Spec spec = Spec::parse(text);
  const Dims coordinate = {1, 2, 3};
  for (auto _ : state) benchmark::DoNotOptimize(spec.local(coordinate));
}
BENCHMARK_CAPTURE(local_shape_and_offset, plain, "f32[4097,1023] @ 2x4x8 : S(0),R,S(1)");
BENCHMARK_CAPTURE(local_shape_and_offset, nested, "f32[4097,1023] @ 2x4x8 : S(0),S(0),S(0)");
BENCHMARK_CAPTURE(local_shape_and_offset, reordered, "f32[4097,1023] @ 2x4x8 : S(0)[2],S(0)[0],S(0)[1]");
BENCHMARK_CAPTURE(local_shape_and_offset, factored, "f32[(33*31),1023] @ 2x4x8 : S(0.0),S(0.1),S(1)");

void coordinate_of_rank(benchmark::State& state) {
  for (auto _ : state) benchmark::DoNotOptimize(kMesh.coordinate(37));
}
BENCHMARK(coordinate_of_rank);

void flatten_view(benchmark::State& state) {
  const Spec spec = Spec::parse("f32[33,31,1023] @ 2x4x8 : S(0),S(1),S(2)");
  for (auto _ : state) benchmark::DoNotOptimize(flatten(spec, 0, 1));
}
BENCHMARK(flatten_view);

void pieces_of_a_transposition(benchmark::State& state) {
  const Spec rows = Spec::parse("f32[4096,4096] @ 64(a) : S(0)");
  const Spec columns = Spec::parse("f32[4096,4096] @ 64(a) : S(1)");
  std::int64_t pieces = 0;
  for (auto _ : state) {
    for_each_piece(rows, columns, {5}, [&](const Piece&) { ++pieces; });
  }
  state.counters["pieces"] = static_cast<double>(pieces) / static_cast<double>(state.iterations());
}
BENCHMARK(pieces_of_a_transposition);

}  // namespace
}  // namespace dtensor
