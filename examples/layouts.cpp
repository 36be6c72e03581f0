#include <dtensor/dtensor.h>

#include <iostream>

int main() {
  using namespace dtensor;
  const Mesh mesh = Mesh::make({2, 2}, {"fsdp", "tp"});

  // A weight that tensor parallelism cut first and FSDP cut again: one run of rows per rank, uneven sizes included.
  const Spec weight = Spec::make({{10, 4}, DType::kF32}, mesh, {StridedShard(0, 2), Shard(0)});
  std::cout << weight.to_string() << "\n";
  for (std::int64_t rank : mesh.ranks()) {
    const Spec::Local local = weight.local(*mesh.coordinate(rank));
    std::cout << "rank " << rank << ": rows " << local.offset[0] << " to " << local.offset[0] + local.shape[0] - 1
              << "\n";
  }

  // Flattening batch and sequence moves nothing, although the sequence is cut unevenly.
  const Spec tokens = Spec::parse("bf16[3,5,8] @ 2(tp) : S(1)");
  if (const auto flat = flatten(tokens, 0, 1)) std::cout << flat->to_string() << "\n";

  // What must move to turn rows into columns, and who has it.
  const Spec rows = Spec::parse("f32[6,6] @ 3(a) : S(0)");
  const Spec columns = Spec::parse("f32[6,6] @ 3(a) : S(1)");
  for_each_piece(rows, columns, {1}, [](const Piece& piece) {
    std::cout << "rank 1 needs " << piece.box.numel() << " elements of rank " << piece.holder[0] << "\n";
  });
}
