#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

namespace dtensor {

// While it lives, the gradients of backward passes that are started add up in the leaves as they are produced, without
// communication. They are reduced once, all together, by the first that touches them otherwise: the optimizer, a norm,
// a print. `.grad()` shows the leaf's own placements all the time.
//
//   {
//     const GradientAccumulation guard;
//     for (const at::Tensor& batch : first_batches) loss(batch).backward();
//   }
//   loss(last_batch).backward();
//   optimizer.step();  // one reduction for each parameter
class GradientAccumulation {
 public:
  GradientAccumulation();

 private:
  c10::DebugInfoGuard guard_;  // is carried into the threads of a backward pass
};

}  // namespace dtensor
