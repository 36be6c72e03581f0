#include <ATen/ops/full.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "bench/comm/measure.h"

namespace dtensor::bench {

std::vector<Sample> measure_native_gloo(const std::string& file, int rank, int size) {
  auto store = c10::make_intrusive<c10d::FileStore>(file, size);
  auto options = c10d::ProcessGroupGloo::Options::create(std::chrono::minutes(2));
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  const auto group = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
  const auto views = views_of_sizes();
  auto samples = measure({.all_reduce =
                              [&](std::int64_t bytes) {
                                std::vector<at::Tensor> part = {views.at(bytes)};
                                group->allreduce(part)->wait();
                              },
                          .barrier = [&] { group->barrier()->wait(); },
                          .largest =
                              [&](float mine) {
                                std::vector<at::Tensor> number = {at::full({1}, mine, at::kFloat)};
                                c10d::AllreduceOptions most;
                                most.reduceOp = c10d::ReduceOp::MAX;
                                group->allreduce(number, most)->wait();
                                return number[0].item<float>();
                              }});
  if (rank != 0) samples.clear();
  return samples;
}

}  // namespace dtensor::bench
