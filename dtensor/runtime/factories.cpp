#include "dtensor/runtime/factories.h"

#include <ATen/ops/empty.h>

#include "dtensor/core/error.h"
#include "dtensor/runtime/identity.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/payload.h"
#include "dtensor/runtime/provenance.h"

namespace dtensor {
namespace {

c10::Device device_for(const DeviceMesh& mesh, const at::TensorOptions& options) {
  const auto type = mesh.device() == DeviceKind::kCuda ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
  if (options.has_device() && options.device().type() != type) {
    fail_invalid("factory", {.what = "the device is not the mesh's",
                             .got = options.device().str(),
                             .expected = std::string(device_name(mesh.device()))});
  }
  return options.has_device() ? options.device() : c10::Device(type);
}

// Does this rank's part carry the value, or the identity of the reduction it is a part of?
std::optional<ReduceOp> identity_here(const Spec& spec, const Dims& at) {
  for (std::int64_t m = 0; m < spec.mesh().ndim(); ++m) {
    const auto op = spec.partials()[m];
    if (op && *op != ReduceOp::kAvg && at[m] != 0) return op;
  }
  return std::nullopt;
}

}  // namespace

DTensor empty(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements,
              const at::TensorOptions& options) {
  const auto type =
      options.has_dtype() ? c10::typeMetaToScalarType(options.dtype()) : at::get_default_dtype_as_scalartype();
  const Spec spec = Spec::make({Dims(sizes.begin(), sizes.end()), dtype_of(type)}, mesh, placements);
  at::Tensor local;
  if (mesh.contains_me()) {
    const Dims shape = spec.local_shape(*mesh.coordinate());
    local = at::empty({shape.data(), shape.size()}, at::TensorOptions().dtype(type).device(device_for(mesh, options)));
  }
  // No number: two empty tensors, or two of zeros, are one value.
  at::Tensor result = wrap(std::move(local), spec, std::make_shared<const DeviceMesh>(mesh),
                           {.provenance = {mix(stable_hash("empty"), spec.stable_hash()), {}}});
  if (options.requires_grad()) result.requires_grad_(true);
  return result;
}

DTensor full(at::IntArrayRef sizes, const at::Scalar& value, const DeviceMesh& mesh, const Placements& placements,
             const at::TensorOptions& options) {
  DTensor result = empty(sizes, mesh, placements, options);
  // All ranks meet a value that the type does not have, not those alone that fill it in.
  static_cast<void>(at::empty({1}, at::TensorOptions().dtype(result.dtype())).fill_(value));
  payload_of(result).provenance.made = mix(mix(stable_hash("full"), result.spec().stable_hash()), number_word(value));
  const at::Tensor& local = payload_of(result).local();
  if (!local.defined()) return result;
  if (const auto op = identity_here(result.spec(), *mesh.coordinate())) {
    fill_identity(local, *op);
  } else {
    local.fill_(value);
  }
  return result;
}

DTensor zeros(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements,
              const at::TensorOptions& options) {
  return full(sizes, 0, mesh, placements, options);
}

DTensor ones(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements,
             const at::TensorOptions& options) {
  return full(sizes, 1, mesh, placements, options);
}

}  // namespace dtensor
