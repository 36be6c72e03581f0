#pragma once

#include <string>
#include <vector>

#include "examples/gpt/train.h"

// "12,345", "3.2 MB".
std::string with_commas(std::int64_t number);
std::string in_bytes(std::int64_t bytes);

// On stderr: a bar that is redrawn on a terminal, a line now and then elsewhere.
class ProgressBar {
 public:
  ProgressBar(std::string title, std::int64_t steps);
  void show(std::int64_t step, double loss, const TrainResult& so_far);

 private:
  std::string title_;
  std::int64_t steps_;
  bool terminal_;
};

struct Curve {
  std::string name;
  std::vector<double> losses;
};
void write_csv(const std::string& path, const std::vector<Curve>& curves, std::int64_t first_step);
void write_svg(const std::string& path, const std::vector<Curve>& curves);

// What was reached, and beside it, where there is one, plain libtorch.
std::string table_of(const std::string& name, const TrainResult& result, const TrainResult* plain);
// Relative, over all steps.
double largest_difference(const std::vector<double>& a, const std::vector<double>& b);
