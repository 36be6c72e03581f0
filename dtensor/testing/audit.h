#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <string>
#include <vector>

#include "dtensor/core/mesh.h"

// Is an operator's rule right, and does it say all there is to say? For the rows of a program's own, and for ours.
namespace dtensor::testing {

struct AuditOptions {
  Dims mesh = {3};
  // How many layouts of the operands to try; all there are on one mesh dim when they are no more, else a sample.
  std::int64_t most_layouts = 200;
  // How many ways of a layout to run: the chosen one, and a sample where there are more.
  std::int64_t most_ways = 12;
  std::uint64_t seed = 1;
  // On more than one mesh dim: also orders of cuts, and dims in factors.
  bool odd_layouts = true;
};

struct AuditReport {
  std::int64_t layouts = 0;
  std::int64_t ways = 0;     // that were run
  std::int64_t refused = 0;  // layouts that the operator does not take, with an error that is the same on all ranks
  std::vector<std::string> wrong;
};

// Runs a call on every layout of its operands (whole tensors among the arguments), in every way that the rule has and
// not only the cheapest, on ranks that are threads, and compares results and written arguments with the plain call, and
// all replicas with each other, bit for bit. Partial operands are split unevenly.
//   audit("aten::mm", {x, w}).wrong
AuditReport audit(const std::string& op, std::vector<c10::IValue> args, const AuditOptions& options = {});

// Layouts on one mesh dim of two ranks on which the operator, run on the parts as they are, gives parts of the right
// results, and that the rule would move: `S(0); R -> S(0)`. Found by trying all of them, with two sets of values.
// Dims of the same size are cut together, so give dims that have nothing to do with each other different sizes.
std::vector<std::string> missing_rows(const std::string& op, std::vector<c10::IValue> args);

}  // namespace dtensor::testing
