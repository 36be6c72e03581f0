#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dtensor/core/inline_vec.h"
#include "dtensor/core/rule.h"

namespace dtensor {

// What is known of an operator before it is called: its schema as the dispatcher needs it, and its rule.
struct OpInfo {
  explicit OpInfo(const c10::OperatorHandle& op);

  enum class ArgKind : std::uint8_t { kTensor, kTensorList, kOptionalTensorList, kDType, kOther };
  struct Arg {
    std::string name;
    ArgKind kind = ArgKind::kOther;
    bool written = false;
    KeyUse key = KeyUse::kPlain;
  };
  struct Return {
    bool is_tensor = false;
    bool is_list = false;
    int written_arg = -1;  // the argument that is returned, of in-place and `out` forms
    bool alias = false;    // shares memory with an argument that is not written
  };

  std::string name;  // with the overload: "aten::add.Tensor"
  std::vector<Arg> args;
  std::vector<std::size_t> tensor_args;  // those that are tensors or lists of them
  std::vector<std::size_t> key_args;     // static ones that belong into the key
  std::vector<Return> returns;
  std::optional<FoundRule> rule;
  bool takes_generator = false;
  bool drops = false;  // has an argument that makes it drop elements by itself
  bool returns_alias = false;
  bool copies = false;  // the form of a view that gives no alias
  bool writes = false;
  bool in_place = false;      // writes its first argument and returns it
  bool out = false;           // writes arguments given for the results
  bool accumulates = false;   // what autograd adds gradients with
  bool reads_real = false;    // takes complex numbers apart where they lie
  bool reads_memory = false;  // counts in memory, not in elements
  bool scales = false;        // whether a number given as a tensor is finite or zero decides

  // How the result's provenance comes from the operands': a hash of all, their sum (gradients are added in any order),
  // or that of the tensor which is copied.
  enum class Flow : std::uint8_t { kMix, kSum, kSame, kCopy };
  Flow flow = Flow::kMix;
  bool reads_self = true;                // in place: does it read what it writes?
  std::uint64_t identity = 0;            // of its functional form, the same in every process
  std::vector<std::size_t> number_args;  // static arguments that are not, or not always, in the key

  // Does the operator read the argument's values?
  bool reads(std::size_t arg) const { return !args[arg].written || (!out && (arg != 0 || reads_self)); }
  // For the history: "the plain tensor given as argument "mask" of aten::masked_fill".
  std::vector<std::string> plain_names;
};

// "aten::add.Tensor" of "aten::add_.Tensor", if there is one with as many arguments.
std::optional<c10::OperatorHandle> plain_form(const OpInfo& info);

}  // namespace dtensor
