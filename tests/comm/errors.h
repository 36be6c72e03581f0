#pragma once

#include <gtest/gtest.h>

#include <string>

#include "dtensor/core/error.h"

namespace dtensor::testing {

// The text of the Error that `call` throws; a failure when it throws none.
template <class Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace dtensor::testing

#define EXPECT_CONTAINS(text, part)                                                                                 \
  EXPECT_PRED2([](const std::string& t, const std::string& p) { return ::dtensor::testing::contains(t, p); }, text, \
               part)
