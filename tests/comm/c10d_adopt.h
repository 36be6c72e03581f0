#pragma once

#include <cstdint>
#include <string>

namespace dtensor::testing {

// The contract over process groups that the program made itself, which meet at files below `folder`.
void run_adopted(const std::string& folder, std::int64_t rank, std::int64_t size);

}  // namespace dtensor::testing
