#include "examples/gpt/train.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <optional>

namespace {

// libtorch's generator is one for all threads of a process: whoever makes the model makes it alone, from the same seed.
Gpt make_model(const TrainOptions& options) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(static_cast<std::uint64_t>(options.seed));
  Gpt model(options.model);
  model->to(options.device);
  if (options.dtype == "f64") model->to(at::kDouble);
  if (options.dtype == "bf16" && options.parallel.fsdp) {
    model->future.set_data(model->future.to(at::kBFloat16));  // parameters are bf16 while they are gathered
  } else if (options.dtype == "bf16") {
    model->to(at::kBFloat16);
  }
  return model;
}

}  // namespace

Tokens::Tokens(const std::string& text) : bytes_(text) {
  std::sort(bytes_.begin(), bytes_.end());
  bytes_.erase(std::unique(bytes_.begin(), bytes_.end()), bytes_.end());
  std::vector<std::int64_t> numbers;
  numbers.reserve(text.size());
  for (const char c : text) numbers.push_back(std::lower_bound(bytes_.begin(), bytes_.end(), c) - bytes_.begin());
  tokens_ = torch::tensor(numbers, at::kLong);
}

at::Tensor Tokens::batch(const TrainOptions& options, std::int64_t step) const {
  std::vector<at::Tensor> rows;
  const std::int64_t length = options.model.context + 1;
  auto state = static_cast<std::uint64_t>(options.seed * 1'000'003 + step) * 0x9E3779B97F4A7C15u + 1;
  for (std::int64_t i = 0; i < options.batch; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const auto start = static_cast<std::int64_t>((state >> 33) % static_cast<std::uint64_t>(size() - length + 1));
    rows.push_back(tokens_.narrow(0, start, length));
  }
  return at::stack(rows);
}

TrainResult train(const Tokens& tokens, const TrainOptions& options, const dtensor::DeviceMesh* mesh,
                  const Progress& progress) {
  Gpt model = make_model(options);
  if (mesh) {
    Parallelism parallel = options.parallel;
    if (options.dtype == "bf16") {
      parallel.fsdp_options.param_dtype = at::kBFloat16;
      parallel.fsdp_options.reduce_dtype = at::kFloat;
    }
    distribute_gpt(model, *mesh, parallel);
  }
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(options.learning_rate));
  const auto place = [&](const at::Tensor& part) {
    const at::Tensor batch = part.to(options.device).contiguous();
    return mesh ? distribute_batch(batch, *mesh) : batch;
  };

  TrainResult result;
  if (!options.resume.empty()) {
    const dtensor::LoadReport report = dtensor::load_checkpoint(options.resume, *model, optimizer);
    result.first_step = report.step.value_or(0);
  }
  const auto save_after = [&](std::int64_t steps) {
    if (options.save.empty()) return;
    const bool due = options.save_every > 0 && steps % options.save_every == 0;
    if (due || steps == options.steps)
      dtensor::save_checkpoint(options.save, *model, optimizer, {.step = steps, .keep = 2});
  };
  using Clock = std::chrono::steady_clock;
  for (std::int64_t step = result.first_step; step < options.steps; ++step) {
    const std::int64_t done = step - result.first_step;
    const auto start = Clock::now();
    std::optional<dtensor::CommRecorder> recorder;
    if (done == 1) recorder.emplace();
    const at::Tensor batch = tokens.batch(options, step);
    optimizer.zero_grad();
    const at::Tensor loss =
        model->loss(place(batch.narrow(1, 0, options.model.context)), place(batch.narrow(1, 1, options.model.context)));
    loss.backward();
    optimizer.step();
    const double value = loss.item<double>();
    result.losses.push_back(value);
    if (recorder) {
      for (const dtensor::CommEvent& event : recorder->events()) {
        Communication& kind = result.communication[event.collective + " " + event.group];
        ++kind.count;
        kind.bytes += event.bytes;
      }
    }
    if (done > 1) {  // decisions are made, and all memory is there
      result.seconds += std::chrono::duration<double>(Clock::now() - start).count();
      result.tokens += options.batch * options.model.context;
    }
    save_after(step + 1);
    progress(step, value, result);
  }
  return result;
}
