#include "dtensor/comm/c10d.h"
#include "dtensor/comm/c10d_backend_impl.h"
#include "dtensor/core/error.h"

namespace dtensor {

bool nccl_was_built() { return false; }

std::unique_ptr<C10dBackend> make_nccl_backend(const std::string&) {
  fail_unsupported("make_c10d_transport", {.what = "this build has no NCCL: its libtorch has no CUDA",
                                           .advice = "building with a libtorch that has CUDA, or the backend gloo"});
}

}  // namespace dtensor
