#include "dtensor/runtime/sub_mesh.h"

#include <algorithm>

#include "dtensor/runtime/provenance.h"

namespace dtensor {

std::optional<MeshDims> dims_within(const Mesh& sub, const Mesh& mesh) {
  if (sub.names().empty() || mesh.names().empty() || sub.ndim() >= mesh.ndim()) return std::nullopt;
  MeshDims dims;
  for (const std::string& name : sub.names()) {
    const auto found = std::find(mesh.names().begin(), mesh.names().end(), name);
    if (found == mesh.names().end()) return std::nullopt;
    dims.push_back(found - mesh.names().begin());
  }
  if (!(mesh.slice(sub.names()) == sub)) return std::nullopt;
  return dims;
}

Spec lift(const Spec& spec, const Mesh& mesh, const MeshDims& dims) {
  DimLayouts layouts = spec.dims();
  for (DimLayout& layout : layouts) {
    for (Factor& factor : layout) {
      for (Cut& cut : factor.cuts) {
        if (!cut.is_virtual()) cut.mesh_dim = static_cast<std::int32_t>(dims[static_cast<std::size_t>(cut.mesh_dim)]);
      }
    }
  }
  Partials partials(static_cast<std::size_t>(mesh.ndim()));
  for (std::size_t m = 0; m < dims.size(); ++m) partials[static_cast<std::size_t>(dims[m])] = spec.partials()[m];
  return expect_spec(Spec::from_dims(spec.meta(), mesh, layouts, partials), "lift");
}

at::Tensor lift(const at::Tensor& tensor, const std::shared_ptr<const DeviceMesh>& mesh, const MeshDims& dims) {
  Payload& payload = payload_of(tensor);
  const at::Tensor& local = payload.local();
  Provenance provenance;
  provenance.made = payload.provenance.made;
  for (std::size_t m = 0; m < dims.size() && m < Provenance::kValues; ++m) {
    if (const auto at = static_cast<std::size_t>(dims[m]); at < Provenance::kValues) {
      provenance.values[at] = payload.provenance.values[m];
    }
  }
  const std::uint64_t values = local.defined() ? values_of_plain(local) : 0;
  for (std::int64_t m = 0; m < mesh->ndim() && m < static_cast<std::int64_t>(Provenance::kValues); ++m) {
    if (std::find(dims.begin(), dims.end(), m) == dims.end() && mesh->size(m) > 1) {
      provenance.values[static_cast<std::size_t>(m)] = values;
    }
  }
  return wrap(local, lift(payload.spec, *mesh, dims), mesh, {.shared = true, .provenance = provenance});
}

}  // namespace dtensor
