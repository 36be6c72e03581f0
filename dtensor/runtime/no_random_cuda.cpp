// Without a kernel for GPUs: values are made on the CPU and copied.
#include <ATen/ops/empty.h>

#include "dtensor/runtime/random_device.h"

namespace dtensor {

void draw_on_device(const RandomKey& key, const Draw& draw, const Spec& spec, const Dims& coordinate,
                    const at::Tensor& out) {
  const at::Tensor host = at::empty(out.sizes(), out.options().device(c10::DeviceType::CPU));
  draw_local(key, draw, spec, coordinate, host.data_ptr());
  out.copy_(host);
}

}  // namespace dtensor
