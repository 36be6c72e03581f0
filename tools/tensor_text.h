#pragma once

#include <algorithm>
#include <string>

namespace dtensor {

// A tensor as people type it: `7x5` is a shape of floats; everything else must be a tensor's full text.
inline std::string tensor_text(const std::string& given) {
  if (given.empty() || given[0] < '0' || given[0] > '9') return given;
  std::string text = "f32[" + given + "]";
  std::replace(text.begin(), text.end(), 'x', ',');
  return text;
}

}  // namespace dtensor
