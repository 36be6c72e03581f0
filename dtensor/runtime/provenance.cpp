#include "dtensor/runtime/provenance.h"

#include <torch/csrc/autograd/variable.h>

#include "dtensor/core/checksum.h"
#include "dtensor/runtime/redistribute.h"

namespace dtensor {

std::uint64_t number_word(const c10::IValue& value) {
  if (value.isDouble()) return number_word(value.toDouble());
  if (value.isInt()) return number_word(value.toInt());
  if (value.isBool()) return number_word(value.toBool());
  if (value.isComplexDouble()) return number_word(c10::Scalar(value.toComplexDouble()));
  if (value.isDoubleList()) {
    std::uint64_t word = 0;
    for (const double number : value.toDoubleVector()) word = mix(word, number_word(number));
    return word;
  }
  return 0;
}

std::uint64_t number_word(const at::Tensor& number) {
  const auto type = static_cast<std::uint64_t>(number.scalar_type());
  if (!number.device().is_cpu() || number.layout() != at::kStrided || number.is_neg() || number.is_conj() ||
      number._is_zerotensor() || !number.has_storage()) {
    return type;
  }
  std::uint64_t bits[2] = {};
  std::memcpy(bits, number.data_ptr(), std::min<std::size_t>(sizeof bits, number.element_size()));
  return mix(mix(type, bits[0]), bits[1]);
}

void note_written_elsewhere(const at::Tensor& tensor, Payload& payload) {
  const Provenance& provenance = payload.provenance;
  if (tensor.is_view()) {
    const at::Tensor base(tensor._base());
    if (has_payload(base)) payload_of(base).provenance.mix_in(provenance);
  }
  // Optimizers write through data(), which shares the parameter's traits.
  const bool parameter = payload.traits || (tensor.requires_grad() && tensor.is_leaf());
  if (!parameter || !payload.spec.is_replicated() || !payload.mesh->context()) return;
  RankProvenance& mine = payload.mesh->context()->provenance();
  const std::uint64_t mesh = payload.spec.mesh().stable_hash();
  if (mine.note_replica_written(mesh, provenance.made) || !payload.mesh->contains_me()) return;
  mine.add_mesh(mesh, payload.mesh->my_ranks());
  mine.note_replica_written(mesh, provenance.made);
}

std::uint64_t values_of_plain(const at::Tensor& plain) {
  if (check_level() == CheckLevel::kOff || plain.layout() != at::kStrided || plain.is_quantized()) return 0;
  if (!plain.device().is_cpu() && check_level() != CheckLevel::kValues) return 0;
  if (plain._is_zerotensor() || plain.is_meta()) return 0;
  const bool as_is = plain.device().is_cpu() && plain.is_contiguous() && !plain.is_conj() && !plain.is_neg();
  const at::Tensor dense = as_is ? plain : plain.detach().resolve_conj().resolve_neg().contiguous().cpu();
  const auto bytes = static_cast<std::size_t>(dense.nbytes());
  if (bytes == 0) return 1;
  return check_level() == CheckLevel::kValues ? checksum(dense.data_ptr(), bytes)
                                              : sampled_checksum(dense.data_ptr(), bytes);
}

const std::string& distribute_name() {
  static const auto* name = new std::string("distribute_tensor");
  return *name;
}

Provenance of_numbered_leaf(const std::string& call, const Spec& spec, const DeviceMesh& mesh) {
  Provenance provenance;
  const std::uint64_t kind = mix(stable_hash(call), spec.stable_hash());
  provenance.made = mesh.context() ? mix(kind, mesh.context()->provenance().number_of_leaf(kind)) : kind;
  note_made(mesh, provenance.made, call, 0, 0);
  return provenance;
}

Provenance of_leaf(const std::string& call, const Spec& spec, const DeviceMesh& mesh, const at::Tensor& local) {
  if (check_level() == CheckLevel::kOff || !mesh.contains_me()) return of_numbered_leaf(call, spec, mesh);
  if (spec.is_replicated()) {
    Provenance provenance;
    provenance.made = mix(mix(stable_hash(call), spec.stable_hash()), values_of_plain(local));
    note_made(mesh, provenance.made, call, 0, 0);
    return provenance;
  }
  Provenance provenance = of_numbered_leaf(call, spec, mesh);
  if (mesh.ndim() == 1) return provenance;
  const Placements& placements = spec.placements();
  std::uint64_t values = 0;
  for (std::size_t m = 0; m < placements.size() && m < Provenance::kValues; ++m) {
    if (!placements[m].is_replicate() || mesh.size(static_cast<std::int64_t>(m)) == 1) continue;
    if (values == 0) values = values_of_plain(local);
    provenance.values[m] = values;
  }
  return provenance;
}

void check_replicas_of(const at::Tensor& tensor, const std::string& op) {
  Payload& payload = payload_of(tensor);
  if (payload.spec.has_partial() || !payload.mesh->contains_me() || !payload.mesh->context()) return;
  check_agreement(*payload.mesh, payload.spec, payload.local(), op);
}

}  // namespace dtensor
