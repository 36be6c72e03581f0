#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace dtensor {

// While it lives, this thread has a default CPU generator of its own, as a process has: draws without a generator and
// torch::manual_seed use it. It starts from libtorch's default seed (c10::default_rng_seed_val), so that ranks that are
// threads draw the same values. Threads that the rank starts itself draw from libtorch's shared generator.
//
// How: libtorch's default generator is one object for the whole process, and kernels read its state directly. So the
// operators that take a generator have a kernel under a dispatch key that only these threads include; it puts the
// thread's generator in the place of none. Seeds and states go through virtual functions of the default generator,
// which find the thread's. Other threads, and operators that draw nothing, take no longer than before.
class RankGenerator {
 public:
  RankGenerator();
  ~RankGenerator();
  RankGenerator(const RankGenerator&) = delete;
  RankGenerator& operator=(const RankGenerator&) = delete;

 private:
  at::Generator generator_;
  const at::Generator* before_;
  const c10::impl::IncludeDispatchKeyGuard key_;
};

}  // namespace dtensor
