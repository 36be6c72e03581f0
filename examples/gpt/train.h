#pragma once

// Training the transformer of model.h, on one device or distributed as distribute.h does it.
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "examples/gpt/distribute.h"

struct TrainOptions {
  GptOptions model;
  Parallelism parallel;
  std::int64_t steps = 100;
  std::int64_t batch = 8;  // sequences, of all ranks together
  double learning_rate = 3e-3;
  std::int64_t seed = 1;
  std::string dtype = "f32";  // f32, f64, bf16
  at::DeviceType device = at::kCPU;
  std::string resume;           // go on from the newest checkpoint in this folder
  std::string save;             // where checkpoints go
  std::int64_t save_every = 0;  // steps; 0: after the last one only
};

struct Communication {
  std::int64_t count = 0;
  std::int64_t bytes = 0;  // that came to this rank
};

struct TrainResult {
  std::vector<double> losses;
  std::int64_t first_step = 0;  // what it was resumed at
  double seconds = 0;           // of the steps after the second
  std::int64_t tokens = 0;
  std::map<std::string, Communication> communication;  // of one step: "all-reduce tp"
  double tokens_per_second() const { return seconds > 0 ? static_cast<double>(tokens) / seconds : 0; }
};

// Bytes as token numbers: those that occur, in their order.
class Tokens {
 public:
  explicit Tokens(const std::string& text);
  std::int64_t vocabulary() const { return static_cast<std::int64_t>(bytes_.size()); }
  std::int64_t size() const { return tokens_.numel(); }
  // [batch, context + 1], the same for the same seed and step wherever it is asked for.
  at::Tensor batch(const TrainOptions& options, std::int64_t step) const;

 private:
  std::string bytes_;
  at::Tensor tokens_;
};

// Called after every step.
using Progress = std::function<void(std::int64_t step, double loss, const TrainResult& so_far)>;

// Without a mesh: plain libtorch.
TrainResult train(const Tokens& tokens, const TrainOptions& options, const dtensor::DeviceMesh* mesh,
                  const Progress& progress);
