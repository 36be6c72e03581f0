#include <algorithm>
#include <numeric>
#include <set>
#include <unordered_map>

#include "dtensor/checkpoint/safetensors.h"
#include "dtensor/checkpoint/stored.h"
#include "dtensor/checkpoint/strict_json_impl.h"
#include "dtensor/core/coordinates.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

// A rank that has this much more to write than its share is not worth cutting tensors for.
constexpr std::int64_t kSlackBytes = 16 << 20;
// Pieces smaller than this are not made.
constexpr std::int64_t kLeastPiece = 1 << 20;

// Who would write how much, by the choice of the writer.
struct Share {
  std::int64_t rank;
  std::int64_t bytes;
};
using Shares = std::vector<std::vector<Share>>;

Shares shares_of(const Spec& spec) {
  const Mesh& mesh = spec.mesh();
  Shares shares(static_cast<std::size_t>(num_replicas(spec)));
  const std::int64_t in_row = num_replicas(spec) / mesh.rows();
  const std::vector<std::int64_t> along = replica_dims(spec);
  Dims all(static_cast<std::size_t>(mesh.ndim()));
  std::iota(all.begin(), all.end(), 0);
  for (std::int64_t row = 0; row < mesh.rows(); ++row) {
    const std::vector<std::int64_t> ranks = mesh.ranks(row);
    Dims at(all.size());
    std::size_t place = 0;
    do {
      std::int64_t replica = 0;
      for (const std::int64_t m : along) replica = replica * mesh.shape()[m] + at[m];
      const std::int64_t bytes = spec.local_bytes(at);
      if (bytes > 0) shares[static_cast<std::size_t>(row * in_row + replica)].push_back({ranks[place], bytes});
      ++place;
    } while (next_coordinate(at, mesh.shape(), all));
  }
  return shares;
}

// The layout in which those who held the same each have a part of it; no value where nothing can be cut, or the
// parts would be small.
std::optional<Spec> cut_among_replicas(const Spec& spec) {
  DimLayouts dims = spec.dims();
  Dims shape = spec.local_shape(Dims(static_cast<std::size_t>(spec.mesh().ndim())));
  std::int64_t bytes = spec.local_bytes(Dims(static_cast<std::size_t>(spec.mesh().ndim())));
  bool any = false;
  for (const std::int64_t m : replica_dims(spec)) {
    const std::int64_t count = spec.mesh().shape()[m];
    if (count == 1 || bytes / count < kLeastPiece) continue;
    bytes /= count;
    // The first dim that is long enough: the parts are runs of the row-major whole then.
    std::size_t d = 0;
    while (d < shape.size() && (shape[d] < count || dims[d].size() != 1 || has_virtual(dims[d][0]))) ++d;
    if (d == shape.size()) continue;
    dims[d][0].cuts.push_back({static_cast<std::int32_t>(m), count});
    shape[d] = ceil_div(shape[d], count);
    any = true;
  }
  if (!any) return std::nullopt;
  const auto cut = Spec::from_dims(spec.meta(), spec.mesh(), dims, spec.partials());
  return cut ? std::optional(*cut) : std::nullopt;
}

class Planner {
 public:
  explicit Planner(std::int64_t ranks) : ranks_(static_cast<std::size_t>(ranks)) {}

  // Gives every tensor a writer, so that the rank with the most has as little as a simple rule can reach.
  SavePlan assign(std::vector<StoredTensor> tensors) {
    SavePlan plan{std::move(tensors), std::vector<std::int64_t>(ranks_)};
    std::vector<std::size_t> order(plan.tensors.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    const auto free_bytes = [&](std::size_t i) {
      return shares(plan.tensors[i].spec).size() == 1 ? kInt64Max : largest_share(i, plan);
    };
    std::vector<std::int64_t> key(order.size());
    for (std::size_t i = 0; i < order.size(); ++i) key[i] = free_bytes(i);  // those without a choice come first
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return key[a] > key[b]; });
    for (const std::size_t i : order) place(plan.tensors[i], plan.bytes);
    return plan;
  }

  std::int64_t largest_share(std::size_t i, const SavePlan& plan) {
    std::int64_t most = 0;
    for (const Share& share : shares(plan.tensors[i].spec)[0]) most = std::max(most, share.bytes);
    return most;
  }

 private:
  const Shares& shares(const Spec& spec) {
    const auto found = shares_.find(spec);
    return found != shares_.end() ? found->second : shares_.emplace(spec, shares_of(spec)).first->second;
  }

  void place(StoredTensor& tensor, std::vector<std::int64_t>& bytes) {
    const Shares& choices = shares(tensor.spec);
    std::int64_t least = kInt64Max;
    for (std::size_t w = 0; w < choices.size(); ++w) {
      std::int64_t most = 0;
      for (const Share& share : choices[w]) {
        most = std::max(most, bytes[static_cast<std::size_t>(share.rank)] + share.bytes);
      }
      if (most >= least) continue;
      least = most;
      tensor.writer = static_cast<std::int64_t>(w);
    }
    for (const Share& share : choices[static_cast<std::size_t>(tensor.writer)]) {
      bytes[static_cast<std::size_t>(share.rank)] += share.bytes;
    }
  }

  struct Hash {
    std::size_t operator()(const Spec& spec) const noexcept { return spec.hash(); }
  };
  std::size_t ranks_;
  std::unordered_map<Spec, Shares, Hash> shares_;
};

void check_items(const std::vector<SaveItem>& items, std::int64_t ranks) {
  std::set<std::string_view> names;
  for (const SaveItem& item : items) {
    if (item.name.empty() || item.name == "__metadata__" || looks_like_piece(item.name)) {
      fail_invalid("save_checkpoint", {.what = "a tensor cannot have this name in a checkpoint",
                                       .got = in_quotes(item.name),
                                       .expected = "not empty, not __metadata__, not ending in @ and a number"});
    }
    check_text(item.name, "save_checkpoint");
    if (!names.insert(item.name).second) {
      fail_invalid("save_checkpoint", {.what = "two tensors of one name", .got = in_quotes(item.name)});
    }
    if (!stored_name(item.spec.meta().dtype())) {
      fail_unsupported("save_checkpoint", {.what = "safetensors files have no such type",
                                           .got = in_quotes(item.name) + " of " + item.spec.to_string(),
                                           .advice = "at::view_as_real"});
    }
    if (item.spec.mesh().max_rank() >= ranks) {
      fail_invalid("save_checkpoint", {.what = "a tensor lies on ranks that do not save",
                                       .got = in_quotes(item.name) + " of " + item.spec.to_string(),
                                       .expected = "ranks below " + std::to_string(ranks)});
    }
  }
}

}  // namespace

SavePlan plan_save(const std::vector<SaveItem>& items, std::int64_t ranks) {
  check_items(items, ranks);
  std::vector<StoredTensor> tensors;
  std::int64_t total = 0;
  for (const SaveItem& item : items) {
    tensors.push_back({stored_spec(item.spec, "save_checkpoint"), 0});
    total += tensors.back().spec.meta().nbytes();
  }
  Planner planner(ranks);
  SavePlan plan = planner.assign(tensors);
  const std::int64_t share = total / ranks;
  if (*std::max_element(plan.bytes.begin(), plan.bytes.end()) - share <= std::max(kSlackBytes, share / 8)) return plan;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (planner.largest_share(i, plan) < std::max(kLeastPiece, share / 8)) continue;
    if (const auto cut = cut_among_replicas(tensors[i].spec)) tensors[i].spec = *cut;
  }
  return planner.assign(std::move(tensors));
}

}  // namespace dtensor
