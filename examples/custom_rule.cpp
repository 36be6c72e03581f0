#include <dtensor/dtensor.h>
#include <torch/torch.h>

#include <cstdio>

// An operator of the program's own, as libtorch wants it: a schema, and a kernel for plain tensors.
at::Tensor gated_mm(const at::Tensor& x, const at::Tensor& w, const at::Tensor& gate) {
  return at::mm(x, w) * at::sigmoid(gate);
}
TORCH_LIBRARY(my, library) { library.def("gated_mm(Tensor x, Tensor w, Tensor gate) -> Tensor"); }
TORCH_LIBRARY_IMPL(my, CPU, library) { library.impl("gated_mm", gated_mm); }
TORCH_LIBRARY_IMPL(my, Meta, library) { library.impl("gated_mm", gated_mm); }  // tells the shape of the result

int main() {
  using namespace dtensor;
  // One row makes it distributed: which dims may be cut together, and in which operands it is linear.
  register_rule("my::gated_mm", "mk,kn,n->mn", "linear(0) linear(1)");
  run_ranks(4, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2, 2}, {"dp", "tp"});
    const torch::NoGradGuard no_grad;
    const DTensor x = ones({6, 4}, mesh, {Shard(0), Replicate()});
    const DTensor w = ones({4, 8}, mesh, {Replicate(), Shard(1)});
    const DTensor gate = zeros({8}, mesh, {Replicate(), Shard(0)});
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("my::gated_mm", "")
                               .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&)>();
    const CommPolicyGuard nothing_is_sent(CommPolicy::kForbid);
    const DTensor y = op.call(x, w, gate);
    if (world.rank() == 0)
      std::printf("%s, each element %g\n", y.spec().to_string().c_str(), y.to_local()[0][0].item<double>());
  });
}
