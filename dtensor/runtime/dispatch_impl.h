#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "dtensor/core/plan.h"
#include "dtensor/core/propagate.h"
#include "dtensor/runtime/algorithms/algorithm.h"
#include "dtensor/runtime/op_info_impl.h"
#include "dtensor/runtime/payload.h"

namespace dtensor {

// One tensor among a call's arguments.
struct Operand {
  at::Tensor tensor;
  Payload* payload;  // null: a plain number
  std::size_t arg;
  std::size_t item;       // in a list
  at::Tensor plain = {};  // the caller's, where `tensor` stands for a plain one or for one of a sub-mesh
};

// A call as the kernel sees it.
struct LocalCall {
  const OpInfo& info;
  const c10::OperatorHandle& op;
  torch::jit::Stack& stack;
  InlineVec<Operand, 6> operands;
  std::shared_ptr<const DeviceMesh> mesh;  // of the first distributed operand
  bool copied = false;                     // the operator ran on a copy of what lies here

  c10::IValue& arg(std::size_t i) { return stack[stack.size() - info.args.size() + i]; }
  const c10::IValue& arg(std::size_t i) const { return stack[stack.size() - info.args.size() + i]; }
};

// What to do for one key: a decision, and all of it that can be worked out beforehand on this rank.
struct Prepared {
  std::vector<std::uint64_t> words;  // the key
  std::size_t hash = 0;
  std::uint64_t identity = 0;  // of the operator, its static arguments and all layouts; the same in every process
  std::vector<std::optional<Spec>> operands;  // keeps the key's specs alive
  Decision decision;
  bool replicated = false;               // there was no rule
  bool moves = false;                    // some operand is redistributed
  std::vector<std::vector<Plan>> plans;  // per operand
  std::vector<std::pair<std::size_t, c10::IValue>> rewrites;
  std::optional<c10::OperatorHandle> other_op;      // what runs instead
  std::optional<c10::OperatorHandle> out_of_place;  // of an in-place form: no way, but this one has
  AlgorithmFn algorithm = nullptr;                  // runs instead of the operator
  bool runs = true;                                 // is the operator run here?
  bool fills = false;                               // are the results the identity instead?
  std::vector<Dims> output_shapes;                  // of the local results
  std::vector<Dims> output_strides;                 // likewise, in the order of memory that the specs say
  std::vector<std::int64_t> offsets;                // of results that are views, within the operand
  bool as_it_lies = false;                          // runs on the parts as they are, but for
  Dims sizes;                                       // those of its only rewrite
};

// The local tensor of a result that is no view, in the memory order and of the type that its spec says, so that views
// of the whole are views of it: itself, or a copy. Kernels choose an order by the strides of their operands, and those
// of a local tensor say less than those of the whole where it has one row, or none.
at::Tensor copy_in_order(const at::Tensor& local, const Prepared& prepared, std::size_t output);
inline at::Tensor in_order(at::Tensor local, const Prepared& prepared, std::size_t output) {
  if (output >= prepared.output_strides.size() || !local.defined()) return local;
  const Dims& strides = prepared.output_strides[output];
  const at::IntArrayRef sizes = local.sizes(), now = local.strides();
  bool lies = sizes.size() == strides.size();
  for (std::size_t d = 0; lies && d < sizes.size(); ++d) lies = now[d] == strides[d] || sizes[d] == 1;
  return lies ? local : copy_in_order(local, prepared, output);
}

// Finds the tensors among the arguments and the mesh they are on. Errors: plain tensors, writing to a lost alias.
void collect(LocalCall& call);

// Any call of any operator.
void run_boxed(const OpInfo& info, const c10::OperatorHandle& op, torch::jit::Stack* stack);

// How this thread decides; the usual way unless a DecideGuard says otherwise.
DecideOptions& decide_options();

// Autograd and autocast are above us, and done when an operator comes here.
inline const c10::DispatchKeySet kAboveUs =
    c10::autograd_dispatch_keyset_with_ADInplaceOrView |
    c10::DispatchKeySet({c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA});

// All ways to run the call, the chosen one first.
OrReason<std::vector<Candidate>> ways_of(const LocalCall& call);

// Decides, on a miss. Errors: what the operator itself says of its arguments, and what has no way.
std::shared_ptr<const Prepared> prepare(const LocalCall& call, std::vector<std::uint64_t> words, std::size_t hash);

// Shapes, strides and types of an operator's results, or its own complaint about the arguments; no value for an
// undefined result, none at all where it cannot be said.
using GlobalResults = std::optional<std::vector<std::optional<TensorMeta>>>;
GlobalResults global_results(const LocalCall& call);
// Where the results of an operator that returns views begin in the memory of its first operand, as a whole.
std::vector<std::int64_t> view_offsets(const LocalCall& call);

// as_strided and its like mean memory: that can be told only where the whole tensor lies densely, with the strides that
// it shows. An error where it does not.
void check_no_gaps(const Spec& spec, const std::string& op);

// The call as rules see it.
OpCall describe(const LocalCall& call, std::vector<std::optional<TensorMeta>> results);

// A static argument as rules see it.
StaticArg static_arg(const OpInfo::Arg& arg, const c10::IValue& value);
// The value of a plain tensor of one element; none where it is not in this machine's memory.
StaticArg number_of(const at::Tensor& plain);

}  // namespace dtensor
