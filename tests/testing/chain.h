#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "dtensor/core/cost.h"
#include "dtensor/core/spec.h"
#include "tests/core/sweep.h"

// Random programs: a few operators one after the other on a few tensors, laid out oddly. What one call leaves behind
// (factored dims, Partials, views) is what the next one gets.
namespace dtensor::testing {

using Tensors = std::vector<at::Tensor>;

// One operator: reads tensors of the pool, and may write to them; its result joins the pool.
struct ChainStep {
  std::string text;  // `t3 = t0.mul_(2)`
  std::function<at::Tensor(const Tensors&)> run;
  bool kinked = false;      // its gradient jumps, so that rounding may decide it
  bool multiplies = false;  // tensors: 0 times infinity, where the one is a part of a sum
};

struct Chain {
  std::uint64_t seed = 0;
  Dims mesh;
  Tensors inputs;  // whole
  std::vector<Spec> specs;
  std::vector<ChainStep> steps;
  CostConstants cost;
  std::int64_t nth = 0;
  bool special = false;  // NaN, infinities, -0.0; then without products of tensors, and so without gradients
  std::string to_string() const;
};

// The same for the same seed. Every step runs on the whole tensors.
Chain make_chain(std::uint64_t seed);

struct ChainResult {
  std::string wrong;    // nothing: it agrees with the plain run, gradients too
  std::string refused;  // what stopped it, the same on all ranks
  bool backward = false;
};
ChainResult play(const Chain& chain);

// The steps that can be taken with this pool: one at random; no text where there is none.
ChainStep random_step(sweep::Random& random, const Tensors& pool);

}  // namespace dtensor::testing
