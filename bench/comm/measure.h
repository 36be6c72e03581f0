#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace dtensor::bench {

// Seconds that one all-reduce of so many bytes (of float) takes.
struct Sample {
  std::int64_t bytes = 0;
  double seconds = 0;
};

// One line of the table: a backend on so many ranks.
struct Series {
  std::string backend;
  std::int64_t ranks = 0;
  std::vector<Sample> samples;
};

// What is measured: an all-reduce of the first `bytes` of this rank's buffer; and what measuring takes: a barrier, and
// the largest of the ranks' numbers.
struct Subject {
  std::function<void(std::int64_t bytes)> all_reduce;
  std::function<void()> barrier;
  std::function<float(float)> largest;
};

// 8 bytes, and 1 KB to 64 MB by fours.
const std::vector<std::int64_t>& message_sizes();

// The first `bytes` of one buffer, by size.
std::map<std::int64_t, at::Tensor> views_of_sizes();

// Called by every rank together. The best of a few rounds: other programs only ever add to it.
std::vector<Sample> measure(const Subject& subject);

// Seconds that it takes two threads to copy so many bytes each, at the same time: what an all-reduce on two ranks must
// read and write at least, since every rank's buffer is read and written once.
double copy_seconds(std::int64_t bytes);

std::string to_text(const std::vector<Sample>& samples);
std::vector<Sample> from_text(const std::string& text);

// Without dtensor: MPI_Allreduce, and the all-reduce of libtorch's Gloo process group that meets at `file`. The samples
// are rank 0's; other ranks return none.
std::vector<Sample> measure_native_mpi();
std::vector<Sample> measure_native_gloo(const std::string& file, int rank, int size);

// Two panels, 2 ranks and 4 ranks and so on: time over size, both logarithmic.
std::string draw_svg(const std::vector<Series>& series);

}  // namespace dtensor::bench
