#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <bit>
#include <cstring>

#include "dtensor/core/provenance.h"
#include "dtensor/runtime/op_info_impl.h"
#include "dtensor/runtime/payload.h"

namespace dtensor {

// ---- numbers

inline std::uint64_t number_word(double value) noexcept { return std::bit_cast<std::uint64_t>(value); }
inline std::uint64_t number_word(std::int64_t value) noexcept { return static_cast<std::uint64_t>(value); }
inline std::uint64_t number_word(bool value) noexcept { return value ? 1 : 0; }
inline std::uint64_t number_word(const c10::Scalar& value) {
  if (value.isFloatingPoint()) return number_word(value.toDouble());
  if (value.isComplex())
    return mix(number_word(value.toComplexDouble().real()), number_word(value.toComplexDouble().imag()));
  return number_word(value.toLong());
}
// 0 for what is no number.
std::uint64_t number_word(const c10::IValue& value);
// The bits of a 0-d tensor; on another device than the CPU only its type, since reading it would wait.
std::uint64_t number_word(const at::Tensor& number);

// ---- one call

// The provenance of a call's results, operand by operand.
class CallProvenance {
 public:
  CallProvenance(const OpInfo& info, std::uint64_t identity) : info_(info), mixed_{identity, {}} {}

  void add_operand(const Provenance& operand) noexcept {
    if (count_ < operands_.size()) operands_[count_] = &operand;
    ++count_;
    mixed_.mix_in(operand);
  }
  void add_word(std::uint64_t word) noexcept { mixed_.made = mix(mixed_.made, word); }
  // A number that is not in the key.
  void add_number(std::uint64_t word, bool is_one) noexcept {
    add_word(word);
    only_ones_ = only_ones_ && is_one;
  }

  Provenance result() const noexcept {
    switch (info_.flow) {
      case OpInfo::Flow::kMix:
        break;
      case OpInfo::Flow::kSum:
        if (count_ == 2 && only_ones_) {
          Provenance sum = *operands_[0];
          sum.add(*operands_[1]);
          return sum;
        }
        break;
      case OpInfo::Flow::kSame:
      case OpInfo::Flow::kCopy:  // the target is not read
        if (count_ == 1) return *operands_[0];
        break;
    }
    return mixed_;
  }
  std::uint64_t operand(std::size_t i) const noexcept {
    return i < count_ && i < operands_.size() ? operands_[i]->made : 0;
  }

 private:
  const OpInfo& info_;
  Provenance mixed_;
  std::array<const Provenance*, 2> operands_ = {};
  std::size_t count_ = 0;
  bool only_ones_ = true;
};

// The `output`-th result's.
inline Provenance of_output(const Provenance& call, std::size_t output) noexcept {
  if (output == 0) return call;
  Provenance result = call;
  result.made = mix(call.made, output);
  return result;
}

// Writes an entry into the rank's history.
inline void note_made(const DeviceMesh& mesh, std::uint64_t made, const std::string& name, std::uint64_t first,
                      std::uint64_t second) noexcept {
  if (mesh.context()) mesh.context()->provenance().history().add(made, &name, first, second);
}

// The tensor was written, and is what the provenance says now. Its base, where it is a view, has changed too.
void note_written_elsewhere(const at::Tensor& tensor, Payload& payload);
inline void note_written(const at::Tensor& tensor, Payload& payload, const Provenance& provenance) {
  payload.provenance = provenance;
  // Neither a view nor a parameter.
  if (!tensor.unsafeGetTensorImpl()->autograd_meta() && !payload.traits) return;
  note_written_elsewhere(tensor, payload);
}

// ---- leaves

// A checksum of the values of a plain tensor, element by element whatever its strides; 0 where they are not looked at.
std::uint64_t values_of_plain(const at::Tensor& plain);

// Of a tensor that the program makes of local tensors by `call` ("from_local").
Provenance of_leaf(const std::string& call, const Spec& spec, const DeviceMesh& mesh, const at::Tensor& local);
// The call of tensors whose values come from one rank.
const std::string& distribute_name();
// Of one whose values come from one rank, or do not matter.
Provenance of_numbered_leaf(const std::string& call, const Spec& spec, const DeviceMesh& mesh);

// DTENSOR_CHECK=values: an error on all ranks where the replicas of a result differ in bits.
void check_replicas_of(const at::Tensor& tensor, const std::string& op);

}  // namespace dtensor
