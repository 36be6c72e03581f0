#include "dtensor/runtime/local_map.h"

#include "dtensor/core/error.h"

namespace dtensor {
namespace {

void check_count(const char* what, std::size_t got, std::size_t expected) {
  if (got == 0 || got == expected) return;
  fail_invalid("local_map", {.what = std::string(what) + " must be given for every operand or for none",
                             .got = std::to_string(got),
                             .expected = std::to_string(expected)});
}

void check_meshes(const std::vector<DTensor>& operands) {
  if (operands.empty()) fail_invalid("local_map", {.what = "there is no operand, and so no mesh"});
  for (const DTensor& operand : operands) {
    if (!operand.defined()) fail_invalid("local_map", {.what = "an operand is undefined"});
    if (operand.mesh() == operands[0].mesh()) continue;
    fail_invalid("local_map", {.what = "the operands are on different meshes",
                               .got = operands[0].mesh().to_string() + " and " + operand.mesh().to_string(),
                               .advice = "redistribute(mesh, placements)"});
  }
}

}  // namespace

DTensor local_map(const LocalFunction& function, const std::vector<DTensor>& operands, const Placements& out,
                  const LocalMapOptions& options) {
  check_meshes(operands);
  check_count("placements", options.in.size(), operands.size());
  check_count("placements of gradients", options.in_gradients.size(), operands.size());
  const DeviceMesh& mesh = operands[0].mesh();
  if (!mesh.contains_me()) {
    fail_unsupported("local_map", {.what = "this rank is not in the operands' mesh, and has no part of the result",
                                   .got = "rank " + std::to_string(mesh.rank()) + " and " + mesh.to_string(),
                                   .advice = "DeviceMesh::contains_me"});
  }
  std::vector<at::Tensor> locals;
  for (std::size_t i = 0; i < operands.size(); ++i) {
    const DTensor operand = options.in.empty() ? operands[i] : operands[i].redistribute(options.in[i]);
    ToLocalOptions to_local;
    if (!options.in_gradients.empty()) to_local.grad_placements = options.in_gradients[i];
    locals.push_back(operand.to_local(to_local));
  }
  return from_local(function(locals), mesh, out, {.shape = options.shape});
}

}  // namespace dtensor
