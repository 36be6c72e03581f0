#include "dtensor/parallel/styles.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>

#include "dtensor/core/error.h"
#include "dtensor/parallel/mesh_dim.h"
#include "dtensor/runtime/buckets.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/module.h"
#include "dtensor/runtime/one_model.h"
#include "dtensor/runtime/payload.h"
#include "dtensor/runtime/redistribute.h"
#include "dtensor/runtime/tensor.h"

namespace dtensor {
namespace {

class Layouts;

// The last input that was moved, so that the layers that share it (wq, wk, wv) share what came of it. Each layer reads
// it once: when a layer asks again, that is another forward pass, and the program may have written to the input through
// data(), where nobody counts.
class Memo {
 public:
  at::Tensor find(const at::Tensor& x, const Spec& to, const Layouts* reader) {
    if (x.unsafeGetTensorImpl() != from_ || !to_ || !(*to_ == to) || at::GradMode::is_enabled() != grad_) return {};
    // Nobody counts writes to inference tensors; what had no gradient to give then may have one now.
    if (x.is_inference() || x._version() != version_ || x.requires_grad() != needs_grad_) return {};
    // The address may be another tensor's by now.
    const auto alive = known_.lock();
    if (!alive || std::find(readers_.begin(), readers_.end(), reader) != readers_.end()) return {};
    readers_.push_back(reader);
    auto moved = moved_.lock();
    return moved ? at::Tensor(std::move(moved)) : at::Tensor();
  }
  void keep(const at::Tensor& x, const Spec& to, const at::Tensor& moved, const Layouts* reader) {
    if (x.is_inference()) return;
    readers_ = {reader};
    from_ = x.unsafeGetTensorImpl();
    known_ = WeakTensor(x.getIntrusivePtr());
    version_ = x._version();
    needs_grad_ = x.requires_grad();
    to_ = to;
    grad_ = at::GradMode::is_enabled();
    moved_ = WeakTensor(moved.getIntrusivePtr());
    // Autograd keeps what it needs; without it the next of those who share would find nothing.
    held_ = grad_ ? at::Tensor() : moved;
  }

 private:
  const c10::TensorImpl* from_ = nullptr;
  WeakTensor known_{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
  WeakTensor moved_{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
  std::uint32_t version_ = 0;
  std::optional<Spec> to_;
  bool grad_ = false;
  bool needs_grad_ = false;
  at::Tensor held_;
  std::vector<const Layouts*> readers_;
};

class Layouts final : public ParameterStyle {
 public:
  Layouts(std::int64_t mesh_dim, std::optional<Placement> input, std::optional<Placement> output,
          std::shared_ptr<Memo> memo)
      : mesh_dim_(mesh_dim), input_(input), output_(output), memo_(std::move(memo)) {}

  at::Tensor input(const at::Tensor& x) override {
    if (!input_ || !has_payload(x)) return x;
    const Spec to = with_placement_on(payload_of(x).spec, mesh_dim_, *input_);
    if (const at::Tensor known = memo_->find(x, to, this); known.defined()) return known;
    const at::Tensor result = moved(x, to);
    memo_->keep(x, to, result, this);
    return result;
  }

  at::Tensor output(const at::Tensor& y) override {
    if (!output_ || !has_payload(y)) return y;
    return moved(y, with_placement_on(payload_of(y).spec, mesh_dim_, *output_));
  }

 private:
  // A gradient that comes back as a Partial is reduced here, once for all who share the tensor, also where nothing has
  // to be moved.
  static at::Tensor moved(const at::Tensor& tensor, const Spec& to) {
    const Payload& payload = payload_of(tensor);
    return payload.spec == to ? with_gradient_at_home(tensor) : redistribute(tensor, to, payload.mesh, {});
  }

  const std::int64_t mesh_dim_;
  const std::optional<Placement> input_;
  const std::optional<Placement> output_;
  const std::shared_ptr<Memo> memo_;
};

// ---- names

std::vector<std::string> parts_of(const std::string& name) {
  std::vector<std::string> parts;
  if (name.empty()) return parts;
  std::size_t from = 0;
  for (std::size_t dot = name.find('.'); dot != std::string::npos; dot = name.find('.', from)) {
    parts.push_back(name.substr(from, dot - from));
    from = dot + 1;
  }
  parts.push_back(name.substr(from));
  return parts;
}

// `*` inside a part stands for any characters.
bool fits_part(std::string_view pattern, std::string_view text) {
  if (pattern.empty()) return text.empty();
  if (pattern[0] == '*') {
    for (std::size_t skip = 0; skip <= text.size(); ++skip) {
      if (fits_part(pattern.substr(1), text.substr(skip))) return true;
    }
    return false;
  }
  return !text.empty() && pattern[0] == text[0] && fits_part(pattern.substr(1), text.substr(1));
}

bool fits(const std::string& pattern, const std::string& name) {
  const auto wanted = parts_of(pattern), given = parts_of(name);
  return std::equal(wanted.begin(), wanted.end(), given.begin(), given.end(), fits_part);
}

// How many characters have to be changed, added or left out.
std::size_t distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t corner = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t change = corner + (a[i - 1] != b[j - 1]);
      corner = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, change});
    }
  }
  return row[b.size()];
}

[[noreturn]] void fail_unknown(const std::string& pattern, std::vector<std::string> names) {
  std::stable_sort(names.begin(), names.end(), [&](const std::string& a, const std::string& b) {
    return distance(pattern, a) < distance(pattern, b);
  });
  std::string nearest;
  for (std::size_t i = 0; i < std::min<std::size_t>(names.size(), 3); ++i) {
    nearest += (i ? ", \"" : "\"") + names[i] + "\"";
  }
  fail_invalid("parallelize_module", {.what = "a name in the plan that fits no module",
                                      .got = "\"" + pattern + "\"",
                                      .expected = "a module's name; the nearest are " + nearest});
}

// ---- what is to be done

struct Cutting {
  Placement placement = Replicate();
  std::int64_t blocks = 1;
};

const char* style_name(ParallelStyle::Kind kind) {
  switch (kind) {
    case ParallelStyle::Kind::kColwise:
      return "ColwiseParallel";
    case ParallelStyle::Kind::kRowwise:
      return "RowwiseParallel";
    case ParallelStyle::Kind::kSequence:
      return "SequenceParallel";
    case ParallelStyle::Kind::kInput:
      return "PrepareModuleInput";
    case ParallelStyle::Kind::kOutput:
      return "PrepareModuleOutput";
  }
  return "";
}

struct Task {
  std::string name;
  at::Tensor tensor;
  Cutting cutting;
  std::optional<ParallelStyle> style;   // of a weight
  std::optional<ParallelStyle> lookup;  // of the embedding that it is tied to
  bool embedding = false;
};

bool cuts(const Task& task) {
  return task.style &&
         (task.style->kind == ParallelStyle::Kind::kColwise || task.style->kind == ParallelStyle::Kind::kRowwise);
}

// Another module has the same parameter: an embedding and a head may each have a style, when they cut it alike.
void tie(Task& known, Task&& other) {
  if (!other.style) return;
  if (!known.style) {
    known = std::move(other);
    return;
  }
  const Cutting &mine = known.cutting, &its = other.cutting;
  const bool alike = mine.placement == its.placement && mine.blocks == its.blocks;
  if (cuts(known) && cuts(other) && !alike) {
    fail_invalid("parallelize_module", {.what = "one parameter, that two styles cut differently",
                                        .got = "\"" + known.name + "\" by " + style_name(known.style->kind) +
                                               " and \"" + other.name + "\" by " + style_name(other.style->kind),
                                        .expected = "an embedding by rows and a linear layer by columns, say"});
  }
  if (!cuts(known)) known.cutting = other.cutting;
  if (known.embedding == other.embedding) return;
  if (known.embedding) {
    known.lookup = std::exchange(known.style, other.style);
    known.embedding = false;
  } else {
    known.lookup = other.style;
  }
}

// How a module's own parameter is cut.
Cutting cutting_of(const ParallelStyle& style, const torch::nn::Module& module, const std::string& parameter,
                   const std::string& name) {
  const bool colwise = style.kind == ParallelStyle::Kind::kColwise;
  if (!colwise && style.kind != ParallelStyle::Kind::kRowwise) return {};
  const bool linear = dynamic_cast<const torch::nn::LinearImpl*>(&module) != nullptr;
  const bool embedding = dynamic_cast<const torch::nn::EmbeddingImpl*>(&module) != nullptr;
  if (!linear && !embedding) {
    fail_invalid("parallelize_module", {.what = std::string(style_name(style.kind)) + " of a module that is neither",
                                        .got = "\"" + name + "\", a " + module.name(),
                                        .expected = "a Linear or an Embedding",
                                        .advice = "distribute_module, with the placements of its parameters"});
  }
  if (embedding) return {Shard(colwise ? 1 : 0), style.options.blocks};
  if (parameter == "bias") return colwise ? Cutting{Shard(0), style.options.blocks} : Cutting{};
  return {Shard(colwise ? 0 : 1), style.options.blocks};
}

Spec spec_of(const Task& task, const MeshDim& at) {
  const Placements whole(static_cast<std::size_t>(at.mesh.ndim()), Replicate());
  const Spec now =
      is_dtensor(task.tensor) ? payload_of(task.tensor).spec : Spec::make(dense_meta(task.tensor), at.mesh, whole);
  if (is_dtensor(task.tensor) && !(*payload_of(task.tensor).mesh == at.mesh)) {
    fail_invalid("parallelize_module", {.what = "a parameter that is distributed over another mesh",
                                        .got = "\"" + task.name + "\" on " + payload_of(task.tensor).mesh->to_string(),
                                        .expected = at.mesh.to_string()});
  }
  if (is_dtensor(task.tensor) && payload_of(task.tensor).unit) {
    fail_invalid("parallelize_module", {.what = "a parameter that is fully sharded already",
                                        .got = "\"" + task.name + "\", " + now.to_string(),
                                        .advice = "parallelize_module first, then fully_shard"});
  }
  const Cutting& cutting = task.cutting;
  if (cutting.placement.is_replicate()) return now;
  if (cutting.blocks == 1) return with_placement_on(now, at.dim, cutting.placement);
  const auto dim = static_cast<std::size_t>(cutting.placement.dim());
  const std::int64_t size = now.meta().shape()[dim];
  if (cutting.blocks < 1 || size % cutting.blocks != 0) {
    fail_invalid("parallelize_module", {.what = "a dim that does not consist of so many blocks",
                                        .got = std::to_string(cutting.blocks) + " blocks of \"" + task.name + "\", " +
                                               now.meta().to_string() + ", dim " + std::to_string(dim),
                                        .expected = "a divisor of " + std::to_string(size)});
  }
  DimLayouts dims = now.dims();
  Factor blocks{cutting.blocks, {}};
  blocks.cuts.push_back({static_cast<std::int32_t>(at.dim), at.mesh.size(at.dim)});
  DimLayout layout;
  layout.push_back(blocks);
  layout.push_back(Factor{size / cutting.blocks, {}});
  dims[dim] = layout;
  return expect_spec(Spec::from_dims(now.meta(), at.mesh, dims, now.partials()), "parallelize_module");
}

std::vector<Task> tasks_of(torch::nn::Module& module, const ParallelPlan& plan) {
  struct Found {
    std::string name;
    torch::nn::Module* module;
    std::optional<ParallelStyle> own;        // cuts its parameters
    std::optional<Placement> input, output;  // prepared
  };
  std::vector<Found> modules;
  std::vector<std::string> names;
  modules.push_back({"", &module, {}, {}, {}});
  for (const auto& item : module.named_modules(/*name_prefix=*/std::string(), /*include_self=*/false)) {
    modules.push_back({item.key(), item.value().get(), {}, {}, {}});
    names.push_back(item.key());
  }
  for (const auto& [pattern, style] : plan) {
    bool any = false;
    for (Found& found : modules) {
      if (!fits(pattern, found.name)) continue;
      any = true;
      if (style.kind == ParallelStyle::Kind::kInput) {
        for (Found& inner : modules) {
          const bool inside =
              found.name.empty() || inner.name == found.name || inner.name.rfind(found.name + ".", 0) == 0;
          if (inside) inner.input = style.options.input;
        }
      } else if (style.kind == ParallelStyle::Kind::kOutput) {
        found.output = style.options.output;
        if (!found.module->named_parameters(false).contains("weight")) {
          fail_invalid("parallelize_module",
                       {.what = "PrepareModuleOutput of a module without a weight of its own",
                        .got = "\"" + found.name + "\", a " + found.module->name(),
                        .advice = "the style of the module inside that gives the result, or with_hooks"});
        }
      } else {
        found.own = style;
      }
    }
    if (!any) fail_unknown(pattern, names);
  }
  std::vector<Task> tasks;
  std::map<const c10::TensorImpl*, std::size_t> seen;
  for (const Found& found : modules) {
    const std::string prefix = found.name.empty() ? "" : found.name + ".";
    const auto add = [&](const std::string& key, const at::Tensor& tensor, bool parameter) {
      if (!tensor.defined()) return;
      Task task{prefix + key, tensor, {}, {}, {}, dynamic_cast<torch::nn::EmbeddingImpl*>(found.module) != nullptr};
      if (parameter && found.own) {
        task.cutting = cutting_of(*found.own, *found.module, key, found.name);
      }
      if (parameter && key == "weight") {
        if (found.own) {
          task.style = found.own;
        } else if (found.input || found.output) {
          task.style = ParallelStyle{ParallelStyle::Kind::kInput, {.input = found.input}};
        }
        if (found.output && task.style) task.style->options.output = found.output;
      }
      const auto [at, first] = seen.emplace(tensor.unsafeGetTensorImpl(), tasks.size());
      if (first) {
        tasks.push_back(std::move(task));
      } else {
        tie(tasks[at->second], std::move(task));
      }
    };
    for (const auto& item : found.module->named_parameters(/*recurse=*/false)) add(item.key(), item.value(), true);
    for (const auto& item : found.module->named_buffers(/*recurse=*/false)) add(item.key(), item.value(), false);
  }
  return tasks;
}

}  // namespace

ColwiseParallel::ColwiseParallel(const StyleOptions& given) : ParallelStyle{Kind::kColwise, given} {
  if (!options.input) options.input = Replicate();
  if (!options.output) options.output = Shard(-1);
}
RowwiseParallel::RowwiseParallel(const StyleOptions& given) : ParallelStyle{Kind::kRowwise, given} {
  if (!options.output) options.output = Replicate();
}
SequenceParallel::SequenceParallel(std::int64_t dim)
    : ParallelStyle{Kind::kSequence, {.input = Shard(dim), .output = Shard(dim)}} {}
PrepareModuleInput::PrepareModuleInput(const Placement& layout) : ParallelStyle{Kind::kInput, {.input = layout}} {}
PrepareModuleOutput::PrepareModuleOutput(const Placement& layout) : ParallelStyle{Kind::kOutput, {.output = layout}} {}

void parallelize_module(torch::nn::Module& module, const DeviceMesh& mesh, const ParallelPlan& plan,
                        const ParallelizeOptions& options) {
  const MeshDim at = mesh_dim_of(mesh, "parallelize_module");
  const std::vector<Task> tasks = tasks_of(module, plan);
  std::vector<Spec> specs;
  specs.reserve(tasks.size());
  std::vector<ToDistribute> plain;
  std::vector<bool> is_plain;
  for (const Task& task : tasks) {
    specs.push_back(spec_of(task, at));
    is_plain.push_back(!is_dtensor(task.tensor));
    if (is_plain.back()) plain.push_back({task.name, task.tensor, specs.back()});
  }
  distribute_all("parallelize_module", plain, at.mesh,
                 {.source = options.source, .equal_copies = options.equal_copies});

  const auto memo = std::make_shared<Memo>();
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    const Task& task = tasks[i];
    if (!is_plain[i]) redistribute_in_place(task.tensor, specs[i]);
    if (!task.style) continue;
    Payload& payload = payload_of(task.tensor);
    const auto traits = payload.traits ? payload.traits : std::make_shared<ParameterTraits>();
    const auto layouts = [&](const ParallelStyle& style) {
      StyleOptions own = style.options;
      if (style.kind == ParallelStyle::Kind::kRowwise && !own.input) {
        // Tokens have no last dim that could be cut.
        own.input = task.cutting.placement.is_shard(1) ? Placement(Shard(-1)) : Placement(Replicate());
      }
      return std::make_shared<Layouts>(at.dim, own.input, own.output, memo);
    };
    traits->style = layouts(*task.style);
    traits->lookup = task.lookup ? layouts(*task.lookup) : nullptr;
    exchange(task.tensor, wrap(payload.local(), payload.spec, payload.mesh, {.traits = traits}));
  }
  make_buckets(module.parameters(), DistributeModuleOptions().bucket_bytes);
}

}  // namespace dtensor
