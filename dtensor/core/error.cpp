#include "dtensor/core/error.h"

namespace dtensor {

std::string format_complaint(std::string_view where, const Complaint& complaint) {
  std::string text = "[" + std::string(where) + "] " + complaint.what;
  if (!complaint.got.empty()) text += "; got " + complaint.got;
  if (!complaint.expected.empty()) text += "; expected " + complaint.expected;
  if (!complaint.advice.empty()) text += "; try " + complaint.advice;
  return text;
}

void fail(ErrorKind kind, std::string_view where, const Complaint& complaint) {
  throw Error(kind, format_complaint(where, complaint));
}

void fail_invalid(std::string_view where, const Complaint& complaint) {
  fail(ErrorKind::kInvalidArgument, where, complaint);
}

void fail_unsupported(std::string_view where, const Complaint& complaint) {
  fail(ErrorKind::kNotSupported, where, complaint);
}

}  // namespace dtensor
