// Who sends what to whom in a step.
//
// The balanced choice among replicas: let the wanted piece be held alike along the mesh dims H (Replicate before, cut
// after) and be wanted alike along Q (cut before, Replicate after). The receiver's digits on H rotate, its digits on Q
// spread: it takes the piece from holder (h + q) mod |H|. So the receivers of a piece take turns over its holders, and
// a sender finds its receivers as an arithmetic progression, without looking at anyone else's messages.
#include <algorithm>

#include "dtensor/core/coordinates.h"
#include "dtensor/core/plan_impl.h"

namespace dtensor {
namespace {

bool agree(const Dims& a, const Dims& b, std::uint32_t mask) {
  for (std::size_t m = 0; m < a.size(); ++m) {
    if ((mask >> m & 1) && a[m] != b[m]) return false;
  }
  return true;
}

// Across two meshes nothing is common: the coordinates of one say nothing about the other.
class Messages {
 public:
  explicit Messages(const Step& step)
      : step_(step),
        roles_(roles_of(step)),
        one_mesh_(step.before.mesh() == step.after.mesh()),
        source_(step.before.mesh().shape()),
        target_(step.after.mesh().shape()),
        source_cuts_(cut_mask(step.before)),
        target_cuts_(dims_of(cut_mask(step.after))) {}

  void receive(const Dims& me, const TransferFn& fn) const {
    const std::optional<Dims> mine = one_mesh_ ? me : step_.before.mesh().coordinate(step_.after.mesh().rank_at(me));
    for_each_piece(step_.before, step_.after, me, [&](const Piece& piece) {
      Dims peer = piece.holder;
      for (std::int64_t m : roles_.common) peer[m] = me[m];
      if (mine && agree(peer, *mine, source_cuts_)) {
        peer = *mine;
      } else {
        place_along(peer, source_, roles_.holders, holder_for(me));
      }
      for (std::int64_t part = 0; part < roles_.num_parts; ++part) {
        place_along(peer, source_, roles_.parts, part);
        fn({peer, piece.box, mine && peer == *mine});
      }
    });
  }

  void send(const Dims& me, const TransferFn& fn) const {
    const std::optional<Dims> mine = one_mesh_ ? me : step_.after.mesh().coordinate(step_.before.mesh().rank_at(me));
    const std::int64_t my_index = index_along(me, source_, roles_.holders);
    for_each_piece(step_.after, step_.before, me, [&](const Piece& piece) {
      Dims peer = piece.holder;
      for (std::int64_t m : roles_.common) peer[m] = me[m];
      for (std::int64_t m : roles_.takers) peer[m] = 0;
      for (std::int64_t m : roles_.everyone) peer[m] = 0;
      send_piece(me, mine, my_index, peer, piece.box, fn);
    });
  }

 private:
  // Which of the holders serves this receiver.
  std::int64_t holder_for(const Dims& receiver) const {
    const std::int64_t rotation =
        index_along(receiver, target_, one_mesh_ ? roles_.holders : target_cuts_) % roles_.num_holders;
    if (step_.kind == StepKind::kBroadcast) return rotation;
    return (rotation + index_along(receiver, target_, roles_.takers)) % roles_.num_holders;
  }

  // The coordinate in the source mesh of a receiver that has the piece of `me` itself.
  std::optional<Dims> owner(const Dims& me, const Dims& receiver) const {
    std::optional<Dims> at =
        one_mesh_ ? receiver : step_.before.mesh().coordinate(step_.after.mesh().rank_at(receiver));
    if (at && !agree(me, *at, source_cuts_)) at.reset();
    return at;
  }

  void send_piece(const Dims& me, const std::optional<Dims>& mine, std::int64_t my_index, Dims& peer, const Box& box,
                  const TransferFn& fn) const {
    const auto to_everyone = [&] {
      do fn({peer, box, mine && peer == *mine});
      while (next_coordinate(peer, target_, roles_.everyone));
    };
    // Among those who want it, the one that shares my place has it from me alone.
    if (mine) {
      const Dims before = peer;
      for (std::int64_t m : roles_.takers) peer[m] = (*mine)[m];
      const auto at = owner(me, peer);
      if (one_mesh_ ? at && agree(*at, me, mask_of(roles_.holders)) : peer == *mine) to_everyone();
      peer = before;
    }
    const std::int64_t rotation = holder_for(peer);  // with the takers' digits at 0
    const bool all = step_.kind == StepKind::kBroadcast;
    if (all && rotation != my_index) return;
    const std::int64_t stride = all ? 1 : roles_.num_holders;
    std::int64_t first = all ? 0 : (my_index - rotation + roles_.num_holders) % roles_.num_holders;
    for (; first < roles_.num_takers; first += stride) {
      place_along(peer, target_, roles_.takers, first);
      if (!owner(me, peer)) to_everyone();
    }
  }

  static std::uint32_t mask_of(const MeshDims& dims) {
    std::uint32_t mask = 0;
    for (std::int64_t m : dims) mask |= 1u << m;
    return mask;
  }

  const Step& step_;
  const StepRoles roles_;
  const bool one_mesh_;
  const Dims& source_;
  const Dims& target_;
  const std::uint32_t source_cuts_;
  const MeshDims target_cuts_;
};

}  // namespace

std::int64_t index_along(const Dims& at, const Dims& shape, const MeshDims& dims) {
  std::int64_t index = 0;
  for (std::int64_t m : dims) index = index * shape[m] + at[m];
  return index;
}

void place_along(Dims& at, const Dims& shape, const MeshDims& dims, std::int64_t index) {
  for (std::size_t i = dims.size(); i-- > 0;) {
    at[dims[i]] = index % shape[dims[i]];
    index /= shape[dims[i]];
  }
}

std::int64_t size_along(const Dims& shape, const MeshDims& dims) {
  std::int64_t size = 1;
  for (std::int64_t m : dims) size *= shape[m];
  return size;
}

MeshDims dims_of(std::uint32_t mask) {
  MeshDims result;
  for (std::int64_t m = 0; mask >> m; ++m) {
    if (mask >> m & 1) result.push_back(m);
  }
  return result;
}

std::uint32_t cut_mask(const DimLayout& dim) {
  std::uint32_t mask = 0;
  for (const Factor& factor : dim) {
    for (const Cut& cut : factor.cuts) {
      if (!cut.is_virtual() && cut.count > 1) mask |= 1u << cut.mesh_dim;
    }
  }
  return mask;
}

std::uint32_t cut_mask(const Spec& spec) {
  std::uint32_t mask = 0;
  for (const DimLayout& dim : spec.dims()) mask |= cut_mask(dim);
  return mask;
}

StepRoles roles_of(const Step& step) {
  StepRoles roles;
  const std::uint32_t source = cut_mask(step.before);
  const std::uint32_t target = cut_mask(step.after);
  const Dims& shape = step.before.mesh().shape();
  if (!(step.before.mesh() == step.after.mesh())) {
    const Dims& other = step.after.mesh().shape();
    for (std::int64_t m = 0; m < step.before.mesh().ndim(); ++m) {
      if (shape[m] > 1 && !(source >> m & 1)) roles.holders.push_back(m);
    }
    for (std::int64_t m = 0; m < step.after.mesh().ndim(); ++m) {
      if (other[m] > 1 && !(target >> m & 1)) roles.takers.push_back(m);
    }
    roles.num_holders = size_along(shape, roles.holders);
    roles.num_takers = size_along(other, roles.takers);
    return roles;
  }
  for (std::int64_t m = 0; m < step.before.mesh().ndim(); ++m) {
    const bool cut = source >> m & 1;
    const bool cut_after = target >> m & 1;
    if (shape[m] == 1 || (cut && cut_after)) continue;
    if (step.before.partials()[m] && !step.after.partials()[m]) {
      roles.parts.push_back(m);
      if (!cut_after) roles.everyone.push_back(m);
    } else if (cut) {
      roles.takers.push_back(m);
    } else {
      (cut_after ? roles.holders : roles.common).push_back(m);
    }
  }
  roles.num_holders = size_along(shape, roles.holders);
  roles.num_takers = size_along(shape, roles.takers);
  roles.num_parts = size_along(shape, roles.parts);
  return roles;
}

void for_each_receive(const Step& step, const Dims& coordinate, const TransferFn& fn) {
  Messages(step).receive(coordinate, fn);
}

void for_each_send(const Step& step, const Dims& coordinate, const TransferFn& fn) {
  Messages(step).send(coordinate, fn);
}

MeshDims changed_dims(const Spec& from, const Spec& to) {
  std::uint32_t mask = 0;
  for (std::size_t d = 0; d < from.dims().size(); ++d) {
    if (!(from.dims()[d] == to.dims()[d])) mask |= cut_mask(from.dims()[d]) | cut_mask(to.dims()[d]);
  }
  for (std::int64_t m = 0; m < from.mesh().ndim(); ++m) {
    if (from.mesh().shape()[m] > 1 && from.partials()[m] && !to.partials()[m]) mask |= 1u << m;
  }
  return dims_of(mask);
}

void set_reduction(Step& step) {
  for (std::int64_t m = 0; m < step.before.mesh().ndim(); ++m) {
    const auto op = step.before.partials()[m];
    // Across meshes only mesh dims of size 1 are still Partial, and the target has dims of its own.
    if (!op || step.before.mesh().shape()[m] == 1 || step.after.partials()[m]) continue;
    const bool average = *op == ReduceOp::kAvg;
    step.op = average ? ReduceOp::kSum : *op;
    if (average) step.divisor *= step.before.mesh().shape()[m];
  }
}

Step direct_step(const Spec& from, const Spec& to) {
  Step step{StepKind::kExchange, {}, from, to};
  if (from.mesh() == to.mesh()) step.mesh_dims = changed_dims(from, to);
  set_reduction(step);
  return step;
}

}  // namespace dtensor
