#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "dtensor/checkpoint/party_impl.h"
#include "dtensor/checkpoint/save_impl.h"
#include "dtensor/core/error.h"
#include "dtensor/core/random_state.h"
#include "dtensor/core/text.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/payload.h"

namespace dtensor {
namespace {

// A few names, for a message.
std::string some_of(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 5;
  const std::vector<std::string> shown(names.begin(), names.begin() + std::min(names.size(), kShown));
  return join(shown, ", ", [](const std::string& name) { return in_quotes(name); }) +
         (names.size() > kShown ? " and " + std::to_string(names.size() - kShown) + " more" : "");
}

bool may_convert(DType from, DType to, Convert convert) {
  if (from == to || convert == Convert::kAll) return true;
  if (convert == Convert::kNone) return false;
  return (is_floating(from) && is_floating(to)) || (is_complex(from) && is_complex(to));
}

void check_names(const LoadReport& report, const std::string& path) {
  if (report.missing.empty() && report.unexpected.empty()) return;
  std::string got;
  if (!report.missing.empty()) got += "not there: " + some_of(report.missing);
  if (!report.unexpected.empty()) got += (got.empty() ? "" : "; ") + ("not asked for: " + some_of(report.unexpected));
  fail_invalid("load_checkpoint", {.what = "the names are not those of the checkpoint " + in_quotes(path),
                                   .got = std::move(got),
                                   .advice = "strict = false to load what is in both"});
}

void check_tensor(const NamedPart& part, const StoredTensor& stored, Convert convert) {
  const TensorMeta& there = stored.spec.meta();
  const TensorMeta& here = part.spec.meta();
  if (!(there.shape() == here.shape())) {
    fail_invalid("load_checkpoint", {.what = "the checkpoint has " + in_quotes(part.name) + " in another shape",
                                     .got = there.to_string(),
                                     .expected = TensorMeta(here.shape(), here.dtype()).to_string()});
  }
  if (!may_convert(there.dtype(), here.dtype(), convert)) {
    fail_invalid("load_checkpoint", {.what = "the checkpoint has " + in_quotes(part.name) + " of another type",
                                     .got = there.to_string(),
                                     .expected = std::string(to_string(here.dtype())),
                                     .advice = "convert = Convert::kAll"});
  }
}

// Can its memory be written to element by element?
bool is_direct(const at::Tensor& local, DType stored) {
  return local.is_cpu() && dtype_of(local.scalar_type()) == stored && local.is_non_overlapping_and_dense() &&
         !local.is_conj() && !local.is_neg();
}

void load_part(Checkpoint& checkpoint, const NamedPart& part, LoadReport& report) {
  if (!part.local.defined()) return;
  const DType dtype = checkpoint.tensors().at(part.name).spec.meta().dtype();
  report.bytes_needed += part.local.numel() * element_size(dtype);
  const Spec wants = stored_spec(part.spec, "load_checkpoint");
  const at::NoGradGuard no_grad;
  at::Tensor local = part.local;
  const bool direct = is_direct(local, dtype);
  if (!direct) local = at::empty(part.local.sizes(), at::TensorOptions().dtype(scalar_type_of(dtype)));
  const Dims stride(local.strides().begin(), local.strides().end());
  report.bytes_read += checkpoint.read(part.name, wants, part.coordinate, stride, local.data_ptr());
  if (!direct) part.local.copy_(local);
  part.local.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

Checkpoint open_together(const std::string& dir, const Party& party) {
  // Rank 0 says which is the newest: another may be completed meanwhile.
  std::optional<Checkpoint> checkpoint;
  const std::vector<std::string> paths = together(party, [&]() -> std::string {
    if (party.rank != 0) return {};
    checkpoint.emplace(Checkpoint::open(dir));
    return checkpoint->path();
  });
  together(party, [&]() -> std::string {
    if (!checkpoint) checkpoint.emplace(Checkpoint::open(paths[0]));
    return {};
  });
  return std::move(*checkpoint);
}

LoadReport load_tensors(Checkpoint& checkpoint, const Party& party, const NamedTensors& tensors,
                        const LoadOptions& options, const std::function<bool(const std::string&)>& ignored) {
  LoadReport report;
  report.path = checkpoint.path();
  report.step = checkpoint.info().step;
  report.metadata = checkpoint.info().metadata;
  report.random = checkpoint.info().random;
  std::vector<NamedPart> parts;
  const std::vector<std::string> said = together(party, [&] {
    parts = parts_of(tensors, party, "load_checkpoint");
    for (const NamedPart& part : parts) {
      const auto found = checkpoint.tensors().find(part.name);
      (void)stored_spec(part.spec, "load_checkpoint");
      if (found == checkpoint.tensors().end()) {
        report.missing.push_back(part.name);
        continue;
      }
      check_tensor(part, found->second, options.convert);
      report.loaded.push_back(part.name);
      if (found->second.spec.meta().dtype() != part.spec.meta().dtype()) report.converted.push_back(part.name);
    }
    for (const auto& [name, stored] : checkpoint.tensors()) {
      if (!tensors.contains(name) && !(ignored && ignored(name))) report.unexpected.push_back(name);
    }
    if (options.strict) check_names(report, report.path);
    return digest_of(parts, checkpoint.index().id);
  });
  for (std::size_t rank = 1; rank < said.size(); ++rank) {
    if (said[rank] == said[0]) continue;
    fail_invalid("load_checkpoint", {.what = "the ranks disagree about what is loaded",
                                     .got = said[rank] + " on rank " + std::to_string(rank),
                                     .expected = said[0] + ", as on rank 0",
                                     .advice = "the same names and layouts on every rank"});
  }
  together(party, [&]() -> std::string {
    // Here, because the program's handler of warnings may throw.
    if (party.rank == 0 && !checkpoint.has_blocks()) {
      TORCH_WARN("dtensor: load_checkpoint: ", checkpoint.unverified_text());
    }
    for (const NamedPart& part : parts) {
      if (checkpoint.tensors().contains(part.name)) load_part(checkpoint, part, report);
    }
    for (const auto& [name, tensor] : tensors) {
      if (has_payload(tensor)) tensor.unsafeGetTensorImpl()->bump_version();
    }
    return {};
  });
  report.files_opened = checkpoint.files_opened();
  if (options.random.value_or(false) && party.context && !report.random.empty()) {
    party.context->part<RandomSource>().set_state(RandomState::parse(report.random));
  }
  return report;
}

LoadReport load_checkpoint(const std::string& dir, const NamedTensors& tensors, const LoadOptions& options) {
  const Party party = party_of(tensors, options.mesh, "load_checkpoint");
  Checkpoint checkpoint = open_together(dir, party);
  return load_tensors(checkpoint, party, tensors, options);
}

}  // namespace dtensor
