#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <map>

#include "dtensor/comm/world.h"
#include "dtensor/runtime/explain.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/payload.h"
#include "dtensor/testing/audit.h"
#include "dtensor/testing/parts.h"
#include "dtensor/testing/plain_call.h"

namespace dtensor::testing {
namespace {

using Layout = std::vector<Spec>;
using Tensors = std::vector<at::Tensor>;
constexpr std::int64_t kRanks = 2;
constexpr std::size_t kMostLayouts = 4000;

// Other values of the same kind: floats between 0 and 1, masks the other way round; indices stay.
at::Tensor other_values(const at::Tensor& tensor) {
  if (tensor.scalar_type() == at::kBool) return tensor.logical_not();
  if (!tensor.is_floating_point()) return tensor;
  return (tensor.reshape({-1}).flip({0}).view(tensor.sizes()) * 1.7).sin().abs() * 0.9 + 0.05;
}

// A part that is empty proves nothing. Parts of integers are anything: kernels take them for indices that are in range,
// or divide by them.
std::vector<Placement> choices_for(const at::Tensor& tensor) {
  const bool integers = at::isIntegralType(tensor.scalar_type(), false);
  std::vector<Placement> result;
  for (const Placement& placement : placements_for(tensor)) {
    if (placement.is_shard() && tensor.size(placement.dim()) < kRanks) continue;
    if (placement.is_partial() && placement.op() == ReduceOp::kAvg) continue;  // with sum
    if (placement.is_partial() && integers) continue;
    result.push_back(placement);
  }
  return result;
}

// Are dims of the same size, of whatever operands, cut together? Kernels trust that theirs fit together, too.
bool fits_together(const Layout& layout) {
  std::map<std::int64_t, bool> cut;  // by size
  for (const Spec& spec : layout) {
    const Dims whole = spec.meta().shape();
    const Dims local = spec.local_shape({0});
    for (std::size_t d = 0; d < whole.size(); ++d) {
      if (whole[d] < kRanks) continue;
      const auto [known, fresh] = cut.emplace(whole[d], local[d] != whole[d]);
      if (!fresh && known->second != (local[d] != whole[d])) return false;
    }
  }
  return true;
}

void add_layouts(const PlainCall& call, const Mesh& mesh, const Layout& some, std::vector<Layout>& result) {
  if (result.size() == kMostLayouts) return;
  if (!fits_together(some)) return;
  if (some.size() == call.tensors().size()) return result.push_back(some);
  const at::Tensor& tensor = call.tensors()[some.size()];
  for (const Placement& placement : choices_for(tensor)) {
    Layout more = some;
    more.push_back(Spec::make(meta_of(tensor.contiguous()), mesh, {placement}));
    add_layouts(call, mesh, more, result);
  }
}

// One set of values: the call on the whole, and on the parts of any layout.
class Trial {
 public:
  Trial(const PlainCall& call, Tensors tensors, std::uint64_t seed)
      : call_(call), tensors_(std::move(tensors)), seed_(seed) {
    Tensors own;
    for (const at::Tensor& tensor : tensors_) own.push_back(tensor.clone());
    expected_ = call.run(own);
  }

  // By result, by rank; none where a kernel does not take its part.
  std::optional<std::vector<Tensors>> run(const Layout& layout) {
    std::vector<Tensors> results(expected_.size());
    for (std::size_t rank = 0; rank < static_cast<std::size_t>(kRanks); ++rank) {
      Tensors locals;
      for (std::size_t i = 0; i < layout.size(); ++i) {
        auto& parts = parts_[{i, dtensor::to_string(layout[i].placements())}];
        if (parts.empty()) parts = parts_of(tensors_[i], layout[i], seed_ + i);
        locals.push_back(call_.writes() ? parts[rank].clone() : parts[rank]);
      }
      try {
        const Tensors local_results = call_.run(locals);
        if (local_results.size() != results.size()) return std::nullopt;  // fewer pieces of a list
        for (std::size_t k = 0; k < results.size(); ++k) results[k].push_back(local_results[k]);
      } catch (const std::exception&) {
        return std::nullopt;
      }
    }
    return results;
  }

  // Is the result these parts, laid out so?
  bool is(std::size_t k, const Tensors& parts, const Placement& placement, const Mesh& mesh) const {
    const Spec spec = Spec::make(meta_of(expected_[k].contiguous()), mesh, {placement});
    const auto whole = whole_of(spec, parts);
    return whole && difference(*whole, expected_[k]).empty();
  }

  const Tensors& expected() const { return expected_; }

 private:
  const PlainCall& call_;
  Tensors tensors_;
  std::uint64_t seed_;
  Tensors expected_;
  std::map<std::pair<std::size_t, std::string>, Tensors> parts_;
};

// How the results lie when the parts are run as they are, if they are right at all.
std::optional<std::string> right_on(std::vector<Trial>& trials, const Layout& layout, const Mesh& mesh) {
  const Tensors& expected = trials[0].expected();
  std::vector<std::vector<Placement>> possible;
  for (const at::Tensor& result : expected) {
    possible.push_back(result.defined() ? placements_for(result) : std::vector<Placement>{Replicate()});
  }
  for (Trial& trial : trials) {
    const auto results = trial.run(layout);
    if (!results) return std::nullopt;
    for (std::size_t k = 0; k < expected.size(); ++k) {
      if (!expected[k].defined()) continue;
      std::erase_if(possible[k], [&](const Placement& p) { return !trial.is(k, (*results)[k], p, mesh); });
      if (possible[k].empty()) return std::nullopt;
    }
  }
  std::string text;
  for (const auto& placements : possible) text += (text.empty() ? "" : "; ") + placements[0].to_string();
  return text;
}

bool has_row(const PlainCall& call, const Layout& layout, const std::shared_ptr<const DeviceMesh>& mesh) {
  Tensors inputs;
  for (std::size_t i = 0; i < layout.size(); ++i) {
    const auto at = *mesh->coordinate();
    const Dims shape = layout[i].local_shape(at);
    inputs.push_back(wrap(at::zeros({shape.data(), shape.size()}, call.tensors()[i].options()), layout[i], mesh));
  }
  const auto ways = ways_to_run(call.op(), call.with(inputs));
  if (!ways) return false;
  for (const Candidate& way : *ways) {
    bool stays = true;
    for (std::size_t i = 0; i < layout.size(); ++i) {
      stays = stays && way.decision.inputs[i] && *way.decision.inputs[i] == layout[i];
    }
    if (stays) return true;
  }
  return false;
}

}  // namespace

std::vector<std::string> missing_rows(const std::string& op, std::vector<c10::IValue> args) {
  const at::NoGradGuard no_grad;
  const PlainCall call(op, std::move(args));
  const Mesh mesh = Mesh::make({kRanks});
  for (const at::Tensor& tensor : call.tensors()) {
    if (tensor.numel() == 0) return {};  // of nothing everything is right
  }
  // Two sets of values, each split in two ways.
  Tensors others;
  for (const at::Tensor& tensor : call.tensors()) others.push_back(other_values(tensor));
  std::vector<Trial> trials;
  trials.emplace_back(call, call.tensors(), 1);
  try {
    trials.emplace_back(call, others, 101);
  } catch (const std::exception&) {
    // Not any values will do: a matrix that can be factorized.
  }
  for (const std::uint64_t seed : {201, 301, 401}) trials.emplace_back(call, call.tensors(), seed);

  std::vector<Layout> layouts;
  add_layouts(call, mesh, {}, layouts);
  std::vector<std::pair<Layout, std::string>> right;
  for (const Layout& layout : layouts) {
    if (auto text = right_on(trials, layout, mesh)) right.emplace_back(layout, std::move(*text));
  }
  std::vector<std::string> missing;
  run_ranks(kRanks, [&](World& world) {
    if (world.rank() != 0) return;
    const auto device = std::make_shared<const DeviceMesh>(init_device_mesh(world, at::kCPU, mesh));
    for (const auto& [layout, text] : right) {
      if (has_row(call, layout, device)) continue;
      std::string row;
      for (const Spec& spec : layout) row += (row.empty() ? "" : "; ") + dtensor::to_string(spec.placements());
      missing.push_back(row + " -> " + text);
    }
  });
  return missing;
}

}  // namespace dtensor::testing
