#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <cstring>
#include <numeric>

#include "dtensor/checkpoint/party_impl.h"
#include "dtensor/comm/world.h"
#include "dtensor/core/error.h"
#include "dtensor/core/hash.h"
#include "dtensor/core/text.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/payload.h"

namespace dtensor {
namespace {

std::vector<std::int64_t> all_ranks(std::int64_t n) {
  std::vector<std::int64_t> ranks(static_cast<std::size_t>(n));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

Party party_of(const NamedTensors& tensors, const std::optional<DeviceMesh>& mesh, std::string_view where) {
  const DeviceMesh* found = mesh ? &*mesh : nullptr;
  for (const auto& [name, tensor] : tensors) {
    if (!has_payload(tensor)) continue;
    const DeviceMesh& other = *payload_of(tensor).mesh;
    if (!found) found = &other;
    if (found->context() != other.context()) {
      fail_invalid(where, {.what = "tensors of several worlds", .got = in_quotes(name) + " is of another"});
    }
  }
  Party party;
  if (!found) return party;
  party.rank = found->rank();
  party.size = found->world_size();
  party.context = found->context();
  if (found->device() == DeviceKind::kCuda) party.device = c10::DeviceType::CUDA;
  finish_earlier_plan(*found);
  if (party.size > 1) party.group = group_of(*found, all_ranks(party.size), "world");
  return party;
}

std::vector<std::string> gather_texts(const Party& party, const std::string& text) {
  if (!party.group) return {text};
  const auto n = static_cast<std::size_t>(party.size);
  const at::TensorOptions bytes = at::TensorOptions().dtype(at::kByte).device(party.device);
  const at::Tensor size = at::tensor({static_cast<std::int64_t>(text.size())}, at::kLong).to(party.device);
  const at::Tensor sizes = at::empty({party.size}, size.options());
  party.group->all_gather(sizes, size, std::vector<std::int64_t>(n, 1))->wait();
  const at::Tensor known = sizes.cpu();
  const std::vector<std::int64_t> counts(known.data_ptr<std::int64_t>(), known.data_ptr<std::int64_t>() + n);
  at::Tensor mine = at::empty({static_cast<std::int64_t>(text.size())}, at::kByte);
  if (!text.empty()) std::memcpy(mine.data_ptr(), text.data(), text.size());
  mine = mine.to(party.device);
  const at::Tensor all = at::empty({std::accumulate(counts.begin(), counts.end(), std::int64_t{0})}, bytes);
  party.group->all_gather(all, mine, counts)->wait();
  const at::Tensor together = all.cpu();
  std::vector<std::string> texts;
  const auto* at = static_cast<const char*>(together.data_ptr());
  for (const std::int64_t count : counts) {
    texts.emplace_back(at, static_cast<std::size_t>(count));
    at += count;
  }
  return texts;
}

std::vector<std::string> gather_or_throw(const Party& party, const std::string& text, const std::string& error) {
  std::vector<std::string> texts = gather_texts(party, error.empty() ? "+" + text : "-" + error);
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank].starts_with("-")) {
      const bool all = std::all_of(texts.begin(), texts.end(), [&](const auto& t) { return t == texts[rank]; });
      throw Error(ErrorKind::kInvalidArgument,
                  texts[rank].substr(1) + (all ? "" : "; it happened on rank " + std::to_string(rank)));
    }
  }
  for (std::string& one : texts) one.erase(0, 1);
  return texts;
}

std::vector<NamedPart> parts_of(const NamedTensors& tensors, const Party& party, std::string_view where) {
  std::vector<NamedPart> parts;
  const Mesh world = Mesh::make({party.size}, {"world"});
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.defined() || (!has_payload(tensor) && tensor.layout() != at::kStrided)) {
      fail_invalid(where, {.what = "not a tensor with values of its own",
                           .got = in_quotes(name) + (tensor.defined() ? "" : ", undefined"),
                           .expected = "a distributed tensor or a dense one"});
    }
    if (has_payload(tensor)) {
      Payload& payload = payload_for(tensor, GatherUnit::Use::kMemory);
      const auto& at = payload.mesh->coordinate();
      parts.push_back({name, payload.spec, at ? *at : Dims(), at ? payload.local() : at::Tensor()});
    } else {
      const TensorMeta meta(Dims(tensor.sizes().begin(), tensor.sizes().end()), dtype_of(tensor.scalar_type()));
      parts.push_back({name, Spec::make(meta, world, {Replicate()}), {party.rank}, tensor.detach()});
    }
    if (parts.back().local.defined() && parts.back().local.is_meta()) {
      fail_invalid(where, {.what = "a tensor without values, on the meta device",
                           .got = in_quotes(name),
                           .advice = "distribute_module, which gives parameters their parts"});
    }
  }
  return parts;
}

std::string digest_of(const std::vector<NamedPart>& parts, const std::string& more) {
  Hasher hash;
  for (const NamedPart& part : parts) {
    hash.add_all(part.name);
    hash.add_all(part.spec.to_string());
  }
  hash.add_all(more);
  return std::to_string(hash.value()) + " of " + std::to_string(parts.size()) + " tensors";
}

}  // namespace dtensor
