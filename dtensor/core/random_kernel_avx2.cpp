#include "dtensor/core/random_kernel_impl.h"

namespace dtensor {

void random_kernel_avx2(const RandomTask& task) { run_task(task); }

}  // namespace dtensor
