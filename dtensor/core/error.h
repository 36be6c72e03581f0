#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace dtensor {

enum class ErrorKind {
  kInvalidArgument,  // your fault: what was passed cannot mean anything
  kNotSupported,     // it means something, and we do not do it
  kCommunication,    // a peer is lost, late or does something else
  kInternal,         // our fault
};

// The one exception of this library. The text reads `[where] what; got …; expected …; try …`.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& text) : std::runtime_error(text), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

// The parts of an error text; empty parts are left out.
struct Complaint {
  std::string what;
  std::string got = {};
  std::string expected = {};
  std::string advice = {};  // printed after "try"
};

std::string format_complaint(std::string_view where, const Complaint& complaint);

[[noreturn]] void fail(ErrorKind kind, std::string_view where, const Complaint& complaint);
[[noreturn]] void fail_invalid(std::string_view where, const Complaint& complaint);
[[noreturn]] void fail_unsupported(std::string_view where, const Complaint& complaint);

// An expected "no" is a value: a T, or the reason why there is none.
//   OrReason<Spec> view = flatten(spec, 0, 1);
//   if (!view) log(view.reason());
struct Reason {
  std::string text;
};

template <class T>
class [[nodiscard]] OrReason {
 public:
  OrReason(T value) : value_(std::move(value)) {}
  OrReason(Reason reason) : reason_(std::move(reason.text)) {}

  explicit operator bool() const noexcept { return value_.has_value(); }
  const T& operator*() const { return *value_; }
  T& operator*() { return *value_; }
  const T* operator->() const { return &*value_; }
  const std::string& reason() const noexcept { return reason_; }

 private:
  std::optional<T> value_;
  std::string reason_;
};

}  // namespace dtensor
