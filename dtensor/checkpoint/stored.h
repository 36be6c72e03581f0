#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dtensor/core/packing.h"
#include "dtensor/core/spec.h"

namespace dtensor {

// How a tensor lies in the files of a checkpoint: a layout like any other, with files in the place of ranks. Of those
// ranks that hold the same box, one wrote it.
//
//   f32[8,6] @ 2x3(dp,tp) : R,S(0), writer 1    ranks 3, 4 and 5 wrote the rows 0-2, 3-5 and 6-7
struct StoredTensor {
  Spec spec;                // row-major, nothing Partial
  std::int64_t writer = 0;  // which of the replicas, counted over the mesh's rows and its replicating dims
};

// How many ranks hold each element.
std::int64_t num_replicas(const Spec& spec);
// The same layout as files have it: row-major, and nothing Partial (which is refused).
Spec stored_spec(const Spec& spec, std::string_view where);

// The coordinate of the piece that this rank wrote; no value where it wrote none.
std::optional<Dims> written_by(const StoredTensor& tensor, std::int64_t rank);
// Who wrote the piece at a coordinate, on which replicated mesh dims may be anything.
std::int64_t writer_of(const StoredTensor& tensor, const Dims& coordinate);

// A piece as an entry of a file. A rank that held the whole tensor wrote it under its own name, so that every reader of
// safetensors finds it; other pieces are called name@0, name@1, … in the order of the mesh dims that cut the tensor.
std::string entry_name(const std::string& name, const StoredTensor& tensor, const Dims& coordinate);
Dims entry_shape(const StoredTensor& tensor, const Dims& coordinate);
// Names that would read as another tensor's piece.
bool looks_like_piece(std::string_view name);

// Per dim the factors, major to minor, each with its intervals and size: `0:4/8,0:6/6`, `0:3/3*0:2+4:5/5,0:8/8`.
std::string box_text(const Box& box);

// What a rank has to read of one entry, in elements: from the entry's own order to the rank's memory.
struct Read {
  std::int64_t rank = 0;  // who wrote it: which file
  Dims coordinate;        // of the piece
  Copies copies;
  std::int64_t numel() const noexcept;
};
// What the rank at `coordinate` of the wanted layout reads so that its local tensor, with these strides, is complete.
// Only what it needs is looked at. The specs are of one shape; their types may differ.
std::vector<Read> plan_reads(const StoredTensor& tensor, const Spec& wants, const Dims& coordinate, const Dims& stride);

// Who writes what.
struct SaveItem {
  std::string name;
  Spec spec;
};
struct SavePlan {
  std::vector<StoredTensor> tensors;  // as the items are
  std::vector<std::int64_t> bytes;    // by rank
};
// The same on every rank that calls it with the same items. Replicas share the work: tensors go round among those who
// hold them, the largest first, and where that leaves some rank with much more than its share, large ones are cut among
// their replicas. Errors: Partial tensors, names that stand twice or look like pieces, types that files do not have.
SavePlan plan_save(const std::vector<SaveItem>& items, std::int64_t ranks);

}  // namespace dtensor
