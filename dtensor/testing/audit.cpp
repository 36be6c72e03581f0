#include "dtensor/testing/audit.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <mutex>
#include <random>

#include "dtensor/comm/world.h"
#include "dtensor/core/error.h"
#include "dtensor/runtime/dispatch.h"
#include "dtensor/runtime/explain.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/payload.h"
#include "dtensor/runtime/tensor.h"
#include "dtensor/testing/parts.h"
#include "dtensor/testing/plain_call.h"

namespace dtensor::testing {
namespace {

using Layout = std::vector<Spec>;
using Tensors = std::vector<at::Tensor>;
constexpr std::size_t kMostWrong = 10;

class Layouts {
 public:
  Layouts(const PlainCall& call, const Mesh& mesh, const AuditOptions& options)
      : call_(call), mesh_(mesh), options_(options), engine_(options.seed) {}

  std::vector<Layout> all() {
    double count = 1;
    for (const at::Tensor& tensor : call_.tensors()) {
      count *= std::pow(static_cast<double>(placements_for(tensor).size()), static_cast<double>(mesh_.ndim()));
    }
    std::vector<Layout> result;
    if (mesh_.ndim() == 1 && count <= static_cast<double>(options_.most_layouts)) {
      add_all({}, result);
      return result;
    }
    for (std::int64_t i = 0; i < options_.most_layouts; ++i) result.push_back(random_layout());
    return result;
  }

 private:
  std::int64_t below(std::int64_t n) { return static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(n)); }

  void add_all(const Layout& some, std::vector<Layout>& result) const {
    if (some.size() == call_.tensors().size()) return result.push_back(some);
    const at::Tensor& tensor = call_.tensors()[some.size()];
    for (const Placement& placement : placements_for(tensor)) {
      Layout more = some;
      more.push_back(Spec::make(meta_of(tensor.contiguous()), mesh_, {placement}));
      add_all(more, result);
    }
  }

  // Half of all operands lie as one of the same shape before them: else few rows fit as they lie.
  Layout random_layout() {
    Layout layout;
    for (const at::Tensor& tensor : call_.tensors()) {
      const TensorMeta meta = meta_of(tensor.contiguous());
      const auto alike = std::find_if(layout.begin(), layout.end(), [&](const Spec& spec) {
        return spec.meta().shape() == meta.shape() && !spec.has_partial();
      });
      if (alike != layout.end() && below(2) == 0) {
        layout.push_back(*Spec::from_dims(meta, mesh_, alike->dims(), alike->partials()));
      } else {
        layout.push_back(random_spec(tensor, meta));
      }
    }
    return layout;
  }

  Spec random_spec(const at::Tensor& tensor, const TensorMeta& meta) {
    const std::vector<Placement> known = placements_for(tensor);
    Placements placements;
    std::optional<Placement> partial;  // one kind in a spec
    for (std::int64_t m = 0; m < mesh_.ndim(); ++m) {
      Placement placement = known[static_cast<std::size_t>(below(static_cast<std::int64_t>(known.size())))];
      // Cuts and sums are what is met most.
      if (placement.is_partial() && below(3) != 0) placement = known[static_cast<std::size_t>(below(tensor.dim() + 1))];
      if (placement.is_partial()) placement = partial.value_or(placement);
      if (placement.is_partial()) partial = placement;
      placements.push_back(placement);
    }
    const Spec spec = Spec::make(meta, mesh_, placements);
    if (!options_.odd_layouts || below(3) != 0) return spec;
    // The cuts of a dim in the other order, or on the minor of two factors.
    DimLayouts dims = spec.dims();
    for (DimLayout& dim : dims) {
      if (dim.size() != 1 || dim[0].cuts.empty()) continue;
      std::reverse(dim[0].cuts.begin(), dim[0].cuts.end());
      for (std::int64_t major = 2; major < dim[0].size && below(2) == 0; ++major) {
        if (dim[0].size % major != 0) continue;
        dim = {Factor{major, {}}, Factor{dim[0].size / major, dim[0].cuts}};
        break;
      }
    }
    const auto odd = Spec::from_dims(meta, mesh_, dims, spec.partials());
    return odd ? *odd : spec;
  }

  const PlainCall& call_;
  const Mesh& mesh_;
  const AuditOptions& options_;
  std::mt19937_64 engine_;
};

// One result as a rank has it.
struct Result {
  std::optional<Spec> spec;  // none: a plain tensor
  at::Tensor local;
};

struct Outcome {
  std::size_t layout = 0;
  std::int64_t nth = 0;
  std::string row;
  std::string error;
  bool refused = false;
  bool lost = false;  // another rank failed meanwhile
  std::vector<Result> results;
};

class Auditor {
 public:
  Auditor(const PlainCall& call, const AuditOptions& options)
      : call_(call),
        mesh_(Mesh::make(options.mesh)),
        most_ways_(std::max<std::int64_t>(1, options.most_ways)),
        seed_(options.seed),
        layouts_(Layouts(call, mesh_, options).all()),
        outcomes_(static_cast<std::size_t>(mesh_.size())) {
    Tensors own;
    for (const at::Tensor& tensor : call.tensors()) own.push_back(tensor.clone());
    for (const at::Tensor& result : call.run(own)) expected_.push_back(result.defined() ? result.clone() : result);
  }

  AuditReport report() {
    while (layout_ < layouts_.size() && report_.wrong.size() < kMostWrong) {
      try {
        run_ranks(mesh_.size(), [&](World& world) { run_from(world, layout_, nth_); },
                  {.timeout = std::chrono::seconds(60)});
      } catch (const std::exception& error) {
        broken_ = error.what();
      }
      check();
    }
    report_.layouts = static_cast<std::int64_t>(layouts_.size());
    return report_;
  }

 private:
  // From this way of this layout on, until the end or an error that is not a refusal.
  void run_from(World& world, std::size_t layout, std::int64_t nth) {
    const auto mesh = std::make_shared<const DeviceMesh>(init_device_mesh(world, at::kCPU, mesh_));
    auto& outcomes = outcomes_[static_cast<std::size_t>(world.rank())];
    for (; layout < std::min(layouts_.size(), layout_ + kBatch); ++layout, nth = 0) {
      const auto ways = ways_to_run(call_.op(), call_.with(inputs(layout, mesh)));
      const auto count = ways ? static_cast<std::int64_t>(ways->size()) : 1;
      // Beyond so many, every few of them, so that all kinds are met over the layouts.
      const std::int64_t step = (count + most_ways_ - 1) / most_ways_;
      for (; nth < count; nth += nth == 0 ? 1 + static_cast<std::int64_t>(layout) % step : step) {
        outcomes.push_back(
            {layout, nth, ways ? (*ways)[static_cast<std::size_t>(nth)].row : "no rule", {}, false, false, {}});
        run_one(outcomes.back(), mesh);
      }
    }
  }

  void run_one(Outcome& outcome, const std::shared_ptr<const DeviceMesh>& mesh) {
    const DecideGuard guard({.nth = outcome.nth});
    try {
      for (const at::Tensor& result : call_.run(inputs(outcome.layout, mesh))) {
        if (result.defined() && is_dtensor(result)) {
          outcome.results.push_back({payload_of(result).spec, payload_of(result).local().clone()});
        } else {
          outcome.results.push_back({std::nullopt, result});
        }
      }
    } catch (const Error& error) {
      outcome.error = error.what();
      outcome.refused = error.kind() == ErrorKind::kInvalidArgument || error.kind() == ErrorKind::kNotSupported;
      outcome.lost = error.kind() == ErrorKind::kCommunication;
      if (!outcome.refused) throw;
    } catch (const std::exception& error) {
      outcome.error = error.what();
      throw;
    }
  }

  Tensors inputs(std::size_t layout, const std::shared_ptr<const DeviceMesh>& mesh) {
    Tensors result;
    for (std::size_t i = 0; i < call_.tensors().size(); ++i) {
      const Spec& spec = layouts_[layout][i];
      const Tensors& parts = parts_for(i, spec);
      result.push_back(wrap(parts[static_cast<std::size_t>(mesh->rank())].clone(), spec, mesh));
    }
    return result;
  }

  const Tensors& parts_for(std::size_t operand, const Spec& spec) {
    const std::lock_guard lock(mutex_);
    auto& parts = parts_[{operand, spec.to_string()}];
    if (parts.empty()) parts = parts_of(call_.tensors()[operand], spec, seed_ + operand);
    return parts;
  }

  void check() {
    std::size_t done = outcomes_[0].size();
    for (const auto& outcomes : outcomes_) done = std::min(done, outcomes.size());
    done = std::min(done, first_lost(done) + (first_lost(done) == 0 ? 1 : 0));
    for (std::size_t i = 0; i < done; ++i) {
      const std::string wrong = wrong_with(i);
      const Outcome& first = outcomes_[0][i];
      ++report_.ways;
      if (first.refused) ++report_.refused;
      if (!wrong.empty()) {
        report_.wrong.push_back(call_.op() + " on " + to_string(layouts_[first.layout]) + " by " + first.row + ": " +
                                wrong);
      }
      layout_ = first.layout;
      nth_ = first.nth + 1;
    }
    if (broken_.empty()) {
      layout_ = std::min(layouts_.size(), batch_start_ + kBatch);
      nth_ = 0;
    } else if (done == 0) {
      report_.wrong.push_back(call_.op() + " on " + to_string(layouts_[layout_]) + ": " + broken_);
      ++layout_;
      nth_ = 0;
    }
    broken_.clear();
    batch_start_ = layout_;
    for (auto& outcomes : outcomes_) outcomes.clear();
  }

  // The first way that some ranks could not finish because others had already failed at a later one.
  std::size_t first_lost(std::size_t done) const {
    for (std::size_t i = 0; i < done; ++i) {
      bool lost = false;
      bool failed = false;
      for (const auto& outcomes : outcomes_) {
        lost = lost || outcomes[i].lost;
        failed = failed || (!outcomes[i].error.empty() && !outcomes[i].lost);
      }
      if (lost && !failed) return i;
    }
    return done;
  }

  std::string wrong_with(std::size_t i) const {
    const Outcome& first = outcomes_[0][i];
    for (const auto& outcomes : outcomes_) {
      const Outcome& other = outcomes[i];
      if (other.row != first.row || other.results.size() != first.results.size()) {
        return "ranks differ: " + (first.error.empty() ? other.error : first.error);
      }
      if (!other.error.empty() && !other.refused) return other.error;
    }
    if (first.refused) return {};
    if (first.results.size() != expected_.size()) return "it gives another number of results";
    for (std::size_t k = 0; k < expected_.size(); ++k) {
      std::string wrong = wrong_result(i, k);
      if (!wrong.empty()) return "result " + std::to_string(k) + " " + wrong;
    }
    return {};
  }

  std::string wrong_result(std::size_t i, std::size_t k) const {
    const auto& spec = outcomes_[0][i].results[k].spec;
    Tensors parts;
    for (const auto& outcomes : outcomes_) {
      const Result& result = outcomes[i].results[k];
      if (result.spec != spec) return "has another spec on another rank";
      if (result.local.defined() != expected_[k].defined()) return "is there, or is not, against the plain call";
      parts.push_back(result.local);
    }
    if (!expected_[k].defined()) return {};
    if (!spec) return difference(parts[0], expected_[k]);
    const auto whole = whole_of(*spec, parts);
    if (!whole) return whole.reason();
    const std::string text = difference(*whole, expected_[k]);
    return text.empty() ? text : text + " (as " + spec->to_string() + ")";
  }

  static constexpr std::size_t kBatch = 64;
  const PlainCall& call_;
  const Mesh mesh_;
  const std::int64_t most_ways_;
  const std::uint64_t seed_;
  const std::vector<Layout> layouts_;
  Tensors expected_;
  std::vector<std::vector<Outcome>> outcomes_;  // by rank
  std::size_t layout_ = 0;                      // where to go on
  std::size_t batch_start_ = 0;
  std::int64_t nth_ = 0;
  std::string broken_;
  AuditReport report_;
  std::mutex mutex_;
  std::map<std::pair<std::size_t, std::string>, Tensors> parts_;
};

}  // namespace

AuditReport audit(const std::string& op, std::vector<c10::IValue> args, const AuditOptions& options) {
  const at::NoGradGuard no_grad;
  const PlainCall call(op, std::move(args));
  return Auditor(call, options).report();
}

}  // namespace dtensor::testing
