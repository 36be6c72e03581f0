#pragma once

#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

#include "dtensor/core/propagate.h"

namespace dtensor {

// How a call would run: the rule, the chosen way, what would be moved and how many bytes that is, and the other ways.
// Nothing is run or sent. `op` is "aten::add.Tensor", or "mm" for "aten::mm"; arguments that are left out have their
// defaults.
//   std::cout << explain("mm", x, w);
std::string explain_call(const std::string& op, std::vector<c10::IValue> args);

template <class... Args>
std::string explain(const std::string& op, const Args&... args) {
  return explain_call(op, {c10::IValue(args)...});
}

// All ways to run a call, the chosen one first (DecideOptions::nth counts in this order), or why there is none.
OrReason<std::vector<Candidate>> ways_to_run(const std::string& op, std::vector<c10::IValue> args);

}  // namespace dtensor
