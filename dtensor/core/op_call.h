#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dtensor/core/hash.h"
#include "dtensor/core/spec.h"

namespace dtensor {

// A static (non-tensor) argument as rules see it. A small value.
class StaticArg {
 public:
  enum class Kind : std::uint8_t { kNone, kBool, kInt, kInts, kNumber, kDType, kText };
  // What a number (a Scalar) is, which decides the type of results.
  enum class NumberType : std::uint8_t { kBool, kIntegral, kFloating, kComplex };

  StaticArg() = default;
  static StaticArg none() { return {}; }
  static StaticArg boolean(bool value) { return of(Kind::kBool, value ? 1 : 0); }
  static StaticArg integer(std::int64_t value) { return of(Kind::kInt, value); }
  // Also for lists of bools (0 and 1).
  static StaticArg integers(Dims values) {
    StaticArg arg = of(Kind::kInts, 0);
    arg.ints_ = std::move(values);
    return arg;
  }
  static StaticArg number(NumberType type, double value, double imaginary = 0) {
    StaticArg arg = of(Kind::kNumber, static_cast<std::int64_t>(type));
    arg.number_ = value;
    arg.imaginary_ = imaginary;
    return arg;
  }
  static StaticArg dtype(DType value) { return of(Kind::kDType, static_cast<std::int64_t>(value)); }
  static StaticArg text(std::string value) {
    StaticArg arg = of(Kind::kText, 0);
    arg.text_ = std::move(value);
    return arg;
  }

  Kind kind() const noexcept { return kind_; }
  bool is_none() const noexcept { return kind_ == Kind::kNone; }
  // Pre for each: the kind.
  bool as_bool() const noexcept { return int_ != 0; }
  std::int64_t as_int() const noexcept { return int_; }
  DType as_dtype() const noexcept { return static_cast<DType>(int_); }
  NumberType number_type() const noexcept { return static_cast<NumberType>(int_); }
  double as_double() const noexcept { return number_; }
  const std::string& as_text() const noexcept { return text_; }
  // An int list, or a single int as a list of one; empty when neither.
  Dims as_ints() const { return kind_ == Kind::kInt ? Dims{int_} : ints_; }
  // -1, 0 (also for what is not finite or has no order) or 1.
  int sign() const noexcept {
    if (kind_ == Kind::kInt || kind_ == Kind::kBool) return int_ < 0 ? -1 : int_ > 0;
    if (kind_ != Kind::kNumber || number_type() == NumberType::kComplex || !std::isfinite(number_)) return 0;
    return number_ < 0 ? -1 : number_ > 0;
  }

  // How large a number is, and how small: 0 where every floating type has it (for `small`, its reciprocal) as a finite
  // value, 1 where all but half have it, 2 where double alone has it, 3 where none has it (infinities and NaN; for
  // `small`, zero). What is no number is ordinary.
  struct Magnitude {
    std::uint8_t large = 0;
    std::uint8_t small = 0;
    friend bool operator==(const Magnitude&, const Magnitude&) = default;
  };
  Magnitude magnitude() const noexcept {
    if (kind_ != Kind::kInt && kind_ != Kind::kBool && kind_ != Kind::kNumber) return {};
    constexpr double kHalf = 65504, kFloat = 3e38, kDouble = 1.7e308;
    const double value = std::fabs(kind_ == Kind::kNumber ? number_ : static_cast<double>(int_));
    if (!std::isfinite(value) || !std::isfinite(imaginary_)) return {3, 3};
    const double size = std::fmax(value, std::fabs(imaginary_));
    const auto large = static_cast<std::uint8_t>(size <= kHalf ? 0 : size <= kFloat ? 1 : 2);
    const auto small = static_cast<std::uint8_t>(size >= 1 / kHalf     ? 0
                                                 : size >= 1 / kFloat  ? 1
                                                 : size >= 1 / kDouble ? 2
                                                                       : 3);
    return {large, small};
  }

  std::size_t hash() const noexcept {
    Hasher hasher;
    hasher.add(static_cast<std::uint64_t>(kind_) + 16 * static_cast<std::uint64_t>(int_));
    hasher.add(std::hash<double>()(number_));
    hasher.add(std::hash<double>()(imaginary_));
    hasher.add_all(ints_);
    hasher.add_all(text_);
    return hasher.value();
  }
  friend bool operator==(const StaticArg&, const StaticArg&) = default;

 private:
  static StaticArg of(Kind kind, std::int64_t value) {
    StaticArg arg;
    arg.kind_ = kind;
    arg.int_ = value;
    return arg;
  }

  Kind kind_ = Kind::kNone;
  std::int64_t int_ = 0;
  double number_ = 0;
  double imaginary_ = 0;
  Dims ints_;
  std::string text_;
};

// What one argument of the schema stands for.
struct ArgRef {
  // A tensor argument: operands [first, first+count); more than one for a list, none for an absent optional.
  static ArgRef tensors(std::size_t first, std::size_t count = 1) { return {true, first, count, {}}; }
  static ArgRef value(StaticArg arg) { return {false, 0, 0, std::move(arg)}; }

  bool is_tensor = false;
  std::size_t first = 0;
  std::size_t count = 0;
  StaticArg constant;
};

// One call of an operator, in global terms alone.
struct OpCall {
  // With its overload: "aten::add.Tensor", "aten::mm". In place ("aten::add_.Tensor") and `out` forms keep their names;
  // the tensors given as `out` are the last operands.
  std::string_view name;
  // Every tensor, as it lies, in schema order. No value: a plain number as a 0-d tensor, which follows anything.
  std::vector<std::optional<Spec>> operands;
  // One per schema argument, defaults filled in.
  std::vector<ArgRef> args;
  // The results, in global terms. No value: an output that is undefined.
  std::vector<std::optional<TensorMeta>> outputs;
  // Where each operand stands in its list; lists of optional tensors may have gaps. Empty: no list has any.
  std::vector<std::size_t> items = {};
  // The value of each operand that is a plain number; none where it is not known, as that of a number on a GPU. Empty:
  // no value is known.
  std::vector<StaticArg> numbers = {};

  // The static argument at a schema position; none where the call has no such argument.
  const StaticArg& constant(std::size_t position) const {
    static const StaticArg none;
    return position < args.size() ? args[position].constant : none;
  }
};

}  // namespace dtensor
