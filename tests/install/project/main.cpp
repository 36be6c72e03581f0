#include <dtensor/dtensor.h>

#include <iostream>

int main() {
  using namespace dtensor;
  const Mesh mesh = Mesh::make({2, 3}, {"dp", "tp"});
  const Spec spec = Spec::make({{7, 5}, DType::kF32}, mesh, {Shard(0), Shard(1)});
  const Dims shape = spec.local_shape(*mesh.coordinate(5));
  std::cout << spec.to_string() << ": rank 5 holds [" << shape[0] << "," << shape[1] << "]\n";
}
