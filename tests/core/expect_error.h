#pragma once

#include <gtest/gtest.h>

#include "dtensor/core/error.h"

// The statement throws dtensor::Error of this kind with exactly this text.
#define EXPECT_ERROR(statement, error_kind, text)                               \
  try {                                                                         \
    statement;                                                                  \
    ADD_FAILURE() << "no error from " #statement;                               \
  } catch (const dtensor::Error& error) {                                       \
    EXPECT_EQ(std::string(error.what()), text);                                 \
    EXPECT_TRUE(error.kind() == dtensor::ErrorKind::error_kind) << #error_kind; \
  }
