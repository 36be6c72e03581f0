#include "dtensor/checkpoint/stored.h"

#include <algorithm>
#include <numeric>

#include "dtensor/core/checked.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

// Which of the replicas in one row: the digits of the replicating mesh dims.
std::int64_t replicas_in_row(const Spec& spec) {
  std::int64_t n = 1;
  for (const std::int64_t m : replica_dims(spec)) n *= spec.mesh().shape()[m];
  return n;
}

Dims with_replica(const Spec& spec, Dims coordinate, std::int64_t replica) {
  const std::vector<std::int64_t> along = replica_dims(spec);
  for (std::size_t i = along.size(); i-- > 0;) {
    const std::int64_t size = spec.mesh().shape()[along[i]];
    coordinate[along[i]] = replica % size;
    replica /= size;
  }
  return coordinate;
}

// Does the rank here hold every element? Of an empty tensor, the first one does.
bool holds_all(const Spec& spec, const Dims& coordinate) {
  if (spec.meta().numel() > 0) return checked_product(spec.local_shape(coordinate)) == spec.meta().numel();
  for (std::size_t m = 0; m < coordinate.size(); ++m) {
    if (coordinate[m] != 0 && !spec.placements()[m].is_replicate()) return false;
  }
  return true;
}

bool holds_any(const Spec& spec, const Dims& coordinate) {
  return holds_all(spec, coordinate) || checked_product(spec.local_shape(coordinate)) != 0;
}

Dims row_major_order(std::size_t ndim) {
  Dims order(ndim);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

}  // namespace

std::int64_t num_replicas(const Spec& spec) { return spec.mesh().rows() * replicas_in_row(spec); }

Spec stored_spec(const Spec& spec, std::string_view where) {
  if (spec.has_partial()) {
    fail_invalid(where, {.what = "a Partial tensor is not saved or loaded: what ranks hold of it are not its values",
                         .got = spec.to_string(),
                         .expected = "Shard and Replicate",
                         .advice = "redistribute it first"});
  }
  return expect_spec(Spec::from_dims(TensorMeta(spec.meta().shape(), spec.meta().dtype()), spec.mesh(), spec.dims(),
                                     Partials(spec.partials().size())),
                     where);
}

std::optional<Dims> written_by(const StoredTensor& tensor, std::int64_t rank) {
  const Mesh& mesh = tensor.spec.mesh();
  const std::optional<Dims> at = mesh.coordinate(rank);
  if (!at) return std::nullopt;
  const std::int64_t in_row = replicas_in_row(tensor.spec);
  if (*mesh.row_of(rank) != tensor.writer / in_row) return std::nullopt;
  if (!(with_replica(tensor.spec, *at, tensor.writer % in_row) == *at)) return std::nullopt;
  if (!holds_any(tensor.spec, *at)) return std::nullopt;
  return at;
}

std::int64_t writer_of(const StoredTensor& tensor, const Dims& coordinate) {
  const std::int64_t in_row = replicas_in_row(tensor.spec);
  return tensor.spec.mesh().rank_at(with_replica(tensor.spec, coordinate, tensor.writer % in_row),
                                    tensor.writer / in_row);
}

std::string entry_name(const std::string& name, const StoredTensor& tensor, const Dims& coordinate) {
  if (holds_all(tensor.spec, coordinate)) return name;
  std::int64_t number = 0;
  for (std::size_t m = 0; m < coordinate.size(); ++m) {
    if (!tensor.spec.placements()[m].is_replicate()) number = number * tensor.spec.mesh().shape()[m] + coordinate[m];
  }
  return name + "@" + std::to_string(number);
}

Dims entry_shape(const StoredTensor& tensor, const Dims& coordinate) {
  return holds_all(tensor.spec, coordinate) ? tensor.spec.meta().shape() : tensor.spec.local_shape(coordinate);
}

bool looks_like_piece(std::string_view name) {
  const std::size_t digits = name.find_last_not_of("0123456789");
  return digits != std::string_view::npos && name[digits] == '@' && digits + 1 < name.size();
}

std::string box_text(const Box& box) {
  return join(box.dims, ",", [](const DimSet& dim) {
    return join(dim, "*", [](const FactorSet& factor) {
      return join(factor.intervals, "+",
                  [](const Interval& i) { return std::to_string(i.begin) + ":" + std::to_string(i.end); }) +
             "/" + std::to_string(factor.size);
    });
  });
}

std::int64_t Read::numel() const noexcept {
  std::int64_t n = 0;
  for (const Copy& copy : copies) n += copy.numel();
  return n;
}

std::vector<Read> plan_reads(const StoredTensor& tensor, const Spec& wants, const Dims& coordinate,
                             const Dims& stride) {
  std::vector<Read> reads;
  const Place to{box_of(wants, coordinate), stride, 0};
  if (to.held.numel() == 0) return reads;
  const Dims order = row_major_order(to.held.dims.size());
  for_each_piece(tensor.spec, wants, coordinate, [&](const Piece& piece) {
    if (piece.box.numel() == 0) return;
    Read read;
    read.coordinate = piece.holder;
    for (std::int64_t& index : read.coordinate) index = index == Piece::kAny ? 0 : index;
    read.rank = writer_of(tensor, read.coordinate);
    read.coordinate = *tensor.spec.mesh().coordinate(read.rank);
    add_copies(piece.box, packed(box_of(tensor.spec, read.coordinate), order), to, read.copies);
    reads.push_back(std::move(read));
  });
  return reads;
}

}  // namespace dtensor
