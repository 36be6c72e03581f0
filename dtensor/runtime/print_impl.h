#pragma once

#include <ATen/core/Tensor.h>

#include <iosfwd>

namespace dtensor {

// Prints the spec of a distributed tensor and the values of its local tensor, without communication: values that are
// not there yet, out of date or let go are left out, and the text says why.
std::ostream& print_local(std::ostream& out, const at::Tensor& tensor);

}  // namespace dtensor
