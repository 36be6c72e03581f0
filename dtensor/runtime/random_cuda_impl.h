#pragma once

// Between random_cuda.cu, which knows nothing of torch, and random_cuda.cpp, which does.

#include <cstdint>

#include "dtensor/core/random_plan.h"

namespace dtensor {

// Elements that follow each other in the whole tensor and in memory; runs ascend in both.
struct DeviceRun {
  std::int64_t global;
  std::int64_t local;
};

// Values of `count` elements to `out`; `runs` (device memory) says which. Nothing waits. The error's text, or null.
const char* launch_random(const RandomPlan& plan, const DeviceRun* runs, std::int64_t run_count, std::int64_t count,
                          void* out, void* stream);

}  // namespace dtensor
