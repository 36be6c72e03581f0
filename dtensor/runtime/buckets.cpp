#include "dtensor/runtime/buckets.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/record.h"
#include "dtensor/runtime/redistribute.h"

namespace dtensor {

// A gradient that is to be reduced: where its part goes in the common buffer. All sizes are the largest of any rank,
// which the rank at the mesh's origin has, so that all ranks agree without asking.
struct GradientBucket::Member {
  at::Tensor leaf;
  at::Tensor gradient;
  std::int64_t room = 0;  // elements, for each rank that it is scattered over
};

namespace {

// A gradient that is worth a collective of its own: it is reduced where it lies, and not copied into a bucket.
constexpr std::int64_t kLarge = 1 << 20;

Dims at_origin(const Spec& spec) { return Dims(static_cast<std::size_t>(spec.mesh().ndim()), 0); }

std::int64_t numel_of(const Dims& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

// How a rank's gradients lie in one row of a matrix with a row for each part of the mesh that does not take part in the
// reduction.
Spec row_spec(const Spec& like, std::int64_t length, c10::ScalarType type, std::optional<std::int64_t> scatter_dim,
              bool reduced) {
  const Mesh& mesh = like.mesh();
  std::int64_t rows = 1;
  Placements placements;
  for (std::int64_t d = 0; d < mesh.ndim(); ++d) {
    if (!like.partials()[static_cast<std::size_t>(d)]) {
      rows *= mesh.size(d);
      placements.push_back(Shard(0));
    } else if (!reduced) {
      placements.push_back(Partial(*like.partials()[static_cast<std::size_t>(d)]));
    } else {
      placements.push_back(d == scatter_dim ? Placement(Shard(1)) : Placement(Replicate()));
    }
  }
  return Spec::make(TensorMeta(Dims{rows, length}, dtype_of(type)), mesh, placements);
}

// A part where its room in a row begins, in the order of memory that its spec says.
struct InRow {
  InRow(const Spec& spec, const Dims& coordinate)
      : shape(spec.local_shape(coordinate)), stride(spec.local_stride(coordinate)) {}
  at::Tensor of(const at::Tensor& row, std::int64_t at) const {
    return row.as_strided({shape.data(), shape.size()}, {stride.data(), stride.size()}, row.storage_offset() + at);
  }
  bool is(const at::Tensor& part) const { return part.strides() == at::IntArrayRef(stride.data(), stride.size()); }

  Dims shape, stride;
};

}  // namespace

GradientBucket::GradientBucket(const std::vector<at::Tensor>& leaves, std::shared_ptr<Group> group,
                               const BucketOptions& options)
    : group_(std::move(group)), options_(options) {
  for (const at::Tensor& leaf : leaves) leaves_.emplace_back(leaf.getIntrusivePtr());
}

bool GradientBucket::takes(const at::Tensor& gradient, const Spec& home) const {
  const Payload& payload = payload_of(gradient);
  if (gradient.requires_grad() || !payload.spec.has_partial()) return false;
  std::int64_t ranks = 1;
  for (std::int64_t d = 0; d < payload.spec.mesh().ndim(); ++d) {
    const auto& partial = payload.spec.partials()[static_cast<std::size_t>(d)];
    if (partial && partial != ReduceOp::kSum) return false;
    if (partial) ranks *= payload.spec.mesh().size(d);
  }
  if (ranks == 1) return false;  // nothing is sent
  Spec reduced = home_of(payload.spec);
  if (options_.scatter_dim) {
    if (!payload.spec.partials()[static_cast<std::size_t>(*options_.scatter_dim)]) return false;
    reduced = with_placement_on(reduced, *options_.scatter_dim, Shard(0));
  }
  const c10::ScalarType type = scalar_type_of(home.meta().dtype());
  return (gradient.scalar_type() == type ? reduced : with_dtype(reduced, type)) == home;
}

at::Tensor GradientBucket::arrived(const at::Tensor& gradient, const Spec& home) {
  // What libtorch is told has the type that it knows the leaf by.
  const Spec shown =
      home.meta().dtype() == payload_of(gradient).spec.meta().dtype() ? home : with_dtype(home, gradient.scalar_type());
  at::Tensor cast;
  if (accumulating() && options_.reduce_dtype && *options_.reduce_dtype != gradient.scalar_type()) {
    // Many are to be added to it: in the type that they are reduced in.
    Payload& payload = payload_of(gradient);
    const at::Tensor& local = payload.local();
    cast = wrap(local.defined() ? local.to(*options_.reduce_dtype) : local,
                with_dtype(payload.spec, *options_.reduce_dtype), payload.mesh, {.provenance = payload.provenance});
  }
  at::Tensor result = left_unreduced(cast.defined() ? cast : gradient, shown, shared_from_this());
  auto& engine = torch::autograd::Engine::get_default_engine();
  if (options_.after_backward) engine.queue_callback(options_.after_backward);
  if (accumulating()) return result;
  for (const auto& weak : *group_) {
    const auto bucket = weak.lock();
    if (bucket && bucket->arrived_ >= bucket->leaves_.size()) bucket->reduce();
  }
  ++arrived_;
  engine.queue_callback([group = group_] {
    for (const auto& weak : *group) {
      const auto bucket = weak.lock();
      if (bucket && bucket->arrived_ > 0) bucket->reduce();
    }
  });
  return result;
}

void GradientBucket::reduce() {
  arrived_ = 0;
  // By what is to be done with them; the order is the leaves', the same on all ranks.
  std::vector<std::pair<Spec, std::vector<Member>>> kinds;
  for (const WeakTensor& weak : leaves_) {
    auto impl = weak.lock();
    if (!impl) continue;
    const at::Tensor leaf(std::move(impl));
    const at::Tensor gradient = leaf.grad();
    if (!has_payload(gradient)) continue;
    const auto& unreduced = payload_of(gradient).unreduced();
    if (!unreduced || unreduced->bucket.get() != this) continue;
    const auto alike = [&](const auto& kind) {
      return kind.first.partials() == unreduced->spec.partials() && kind.first.mesh() == unreduced->spec.mesh() &&
             kind.first.meta().dtype() == unreduced->spec.meta().dtype();
    };
    auto kind = std::find_if(kinds.begin(), kinds.end(), alike);
    if (kind == kinds.end()) kind = kinds.insert(kinds.end(), {unreduced->spec, {}});
    const Spec& home = payload_of(gradient).spec;
    kind->second.push_back({leaf, gradient, numel_of(home.local_shape(at_origin(home)))});
  }
  for (const auto& [spec, members] : kinds) reduce_alike(members);
}

void GradientBucket::reduce_alike(const std::vector<Member>& members) {
  static const std::string* op = new std::string("gradient");
  static const std::string* reason = new std::string("the gradients of a bucket are reduced together");
  const CommCause cause(*op, *reason, /*asked=*/true);
  const Payload::Unreduced& first = *payload_of(members[0].gradient).unreduced();
  const auto mesh = payload_of(members[0].gradient).mesh;
  const c10::ScalarType sent = options_.reduce_dtype.value_or(scalar_type_of(first.spec.meta().dtype()));
  const std::int64_t parts = options_.scatter_dim ? first.spec.mesh().size(*options_.scatter_dim) : 1;
  std::int64_t room = 0;
  for (const Member& member : members) room += member.room;
  const Spec from = row_spec(first.spec, room * parts, sent, options_.scatter_dim, false);
  const Spec to = row_spec(first.spec, room * parts, sent, options_.scatter_dim, true);

  Source source;  // of what is not copied here
  at::Tensor row;
  for (const Member& member : members) payload_of(member.gradient).unreduced()->source.check();
  if (mesh->contains_me()) {
    Dims coordinate = *mesh->coordinate();
    if (members.size() == 1 && !options_.scatter_dim && first.local.numel() == room &&
        InRow(payload_of(members[0].gradient).spec, coordinate).is(first.local) && first.local.scalar_type() == sent) {
      // Where it lies, if nobody else has it.
      source = std::exchange(payload_of(members[0].gradient).unreduced()->source, Source());
      if (source.is_alone()) source = {};
      row = std::exchange(payload_of(members[0].gradient).unreduced()->local, at::Tensor());
      row = row.as_strided({1, room}, {room, 1}, row.storage_offset());
    } else {
      row = at::empty({1, room * parts}, first.local.options().dtype(sent));
      std::int64_t at = 0;
      std::vector<std::int64_t> taken(members.size(), 0);
      for (std::int64_t part = 0; part < parts; ++part) {
        if (options_.scatter_dim) coordinate[static_cast<std::size_t>(*options_.scatter_dim)] = part;
        for (std::size_t i = 0; i < members.size(); ++i) {
          const Member& member = members[i];
          const InRow place(payload_of(member.gradient).spec, coordinate);
          at::Tensor piece = payload_of(member.gradient).unreduced()->local;
          if (options_.scatter_dim) {
            piece = piece.narrow(0, taken[i], place.shape[0]);
            taken[i] += place.shape[0];
          }
          place.of(row, at).copy_(piece);
          // Nobody reads what is left of its room, and yet it is summed.
          if (piece.numel() < member.room) row.narrow(1, at + piece.numel(), member.room - piece.numel()).zero_();
          at += member.room;
        }
      }
    }
  }
  Provenance together;
  for (const Member& member : members) together.mix_in(payload_of(member.gradient).provenance);
  const std::shared_ptr<Execution> reduced = start(*mesh, make_plan(from, to), std::move(row), together);
  std::int64_t at = 0;
  for (const Member& member : members) {
    payload_of(member.gradient).unreduced().reset();
    // From here on it has the type of the leaf, not that of the sum.
    const auto& traits = payload_of(member.leaf).traits;
    const Spec home = traits && traits->home ? *traits->home : payload_of(member.gradient).spec;
    const c10::ScalarType type = scalar_type_of(home.meta().dtype());
    at::Tensor gradient = member.gradient;
    if (gradient.scalar_type() != type) {
      gradient = wrap(at::Tensor(), home, mesh, {.provenance = payload_of(member.gradient).provenance});
      member.leaf.mutable_grad() = gradient;
    }
    std::optional<InRow> place;
    if (mesh->contains_me()) place.emplace(home, *mesh->coordinate());
    payload_of(gradient).set_pending([reduced, place, at, type, source]() -> at::Tensor {
      source.check();
      if (!place) return {};
      return place->of(reduced->result(), at).to(type);
    });
    at += member.room;
  }
}

void make_buckets(const std::vector<at::Tensor>& leaves, std::int64_t bytes) {
  const auto group = std::make_shared<GradientBucket::Group>();
  const auto make = [&](const std::vector<at::Tensor>& together) {
    if (together.empty()) return;
    const auto bucket = std::make_shared<GradientBucket>(together, group);
    group->push_back(bucket);
    for (const at::Tensor& leaf : together) {
      auto& traits = payload_of(leaf).traits;
      if (!traits) traits = std::make_shared<ParameterTraits>();
      traits->bucket = bucket;
    }
  };
  std::vector<at::Tensor> next;
  std::set<const c10::TensorImpl*> seen;  // a module that is registered twice names its parameters twice
  std::int64_t size = 0;
  for (auto leaf = leaves.rbegin(); leaf != leaves.rend(); ++leaf) {
    const Payload& payload = payload_of(*leaf);
    if (payload.traits && payload.traits->bucket) continue;
    if (!seen.insert(leaf->unsafeGetTensorImpl()).second) continue;
    const std::int64_t mine = payload.spec.local_bytes(at_origin(payload.spec));
    if (mine >= std::min(kLarge, bytes)) {
      make({*leaf});
      continue;
    }
    if (size + mine > bytes) {
      make(next);
      next.clear();
      size = 0;
    }
    next.push_back(*leaf);
    size += mine;
  }
  make(next);
}

}  // namespace dtensor
