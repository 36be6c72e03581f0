#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstring>
#include <vector>

#include "dtensor/core/boxes.h"
#include "dtensor/core/error.h"
#include "dtensor/runtime/random_cuda_impl.h"
#include "dtensor/runtime/random_device.h"

namespace dtensor {

void draw_on_device(const RandomKey& key, const Draw& draw, const Spec& spec, const Dims& coordinate,
                    const at::Tensor& out) {
  if (draw.kind == Draw::Kind::kPermutation) {
    const at::Tensor host = at::empty(out.sizes(), out.options().device(c10::DeviceType::CPU));
    draw_local(key, draw, spec, coordinate, host.data_ptr());
    out.copy_(host);
    return;
  }
  std::vector<DeviceRun> runs;
  for_each_run(box_of(spec, coordinate), spec.meta().shape(),
               [&](std::int64_t global, std::int64_t local, std::int64_t) {
                 runs.push_back({global, local});
               });
  if (runs.empty()) return;
  const auto words = static_cast<std::int64_t>(2 * runs.size());
  const at::Tensor host = at::empty({words}, at::kLong);
  std::memcpy(host.data_ptr(), runs.data(), runs.size() * sizeof(DeviceRun));
  const at::Tensor table = host.to(out.device());
  const c10::cuda::CUDAGuard guard(out.device());
  const char* error =
      launch_random(random_plan(key, draw, spec.meta().dtype()), static_cast<const DeviceRun*>(table.data_ptr()),
                    words / 2, out.numel(), out.data_ptr(), c10::cuda::getCurrentCUDAStream().stream());
  if (error) fail(ErrorKind::kInternal, "random", {.what = "the kernel was not started", .got = error});
}

}  // namespace dtensor
