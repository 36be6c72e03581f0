#pragma once

#include <memory>
#include <string>
#include <vector>

#include "examples/gpt/distribute.h"

namespace dtensor::testing {

// Odd sizes: neither the heads nor the vocabulary can be divided by two.
inline GptOptions small_gpt() { return {.vocabulary = 13, .context = 7, .width = 12, .heads = 3, .layers = 2}; }

inline Gpt make_gpt(const GptOptions& options, c10::ScalarType type = at::kDouble) {
  Gpt model(options);
  const torch::NoGradGuard no_grad;
  double start = 0;
  for (at::Tensor& p : model->parameters()) {
    const at::Tensor values = at::arange(p.numel(), at::kDouble).mul(0.61).add(start += 1).sin().mul(0.3);
    p.copy_(p.dim() == 1 ? values.add(p.size(0) == options.width ? 1.0 : 0.0).view(p.sizes()) : values.view(p.sizes()));
  }
  model->to(type);
  return model;
}

struct Text {
  at::Tensor text, next;
};
inline Text text_of(const GptOptions& options, std::int64_t batch, std::int64_t step) {
  const at::Tensor all = at::arange(batch * (options.context + 1), at::kLong)
                             .mul(step * 2 + 3)
                             .add(step)
                             .remainder(options.vocabulary)
                             .view({batch, options.context + 1});
  return {all.narrow(1, 0, options.context).contiguous(), all.narrow(1, 1, options.context).contiguous()};
}

inline std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name, std::vector<at::Tensor> all) {
  if (name == "SGD") {
    return std::make_unique<torch::optim::SGD>(std::move(all),
                                               torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01));
  }
  return std::make_unique<torch::optim::AdamW>(std::move(all), torch::optim::AdamWOptions(0.005).weight_decay(0.1));
}

// The losses of a training; `place` lays out a batch.
template <class Place>
std::vector<double> train_gpt(Gpt& model, const GptOptions& options, const std::string& optimizer, std::int64_t batch,
                              std::int64_t steps, Place place) {
  const auto stepper = make_optimizer(optimizer, model->parameters());
  std::vector<double> losses;
  for (std::int64_t step = 0; step < steps; ++step) {
    const Text data = text_of(options, batch, step % 5);
    stepper->zero_grad();
    const at::Tensor loss = model->loss(place(data.text), place(data.next));
    loss.backward();
    stepper->step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

}  // namespace dtensor::testing
