#pragma once

#include <span>

#include "dtensor/core/rule.h"

// The tables, one function for each family; rows sorted by name.
namespace dtensor::rules {

std::span<const RuleText> conv();
std::span<const RuleText> copy();
std::span<const RuleText> index();
std::span<const RuleText> linalg();
std::span<const RuleText> loss();
std::span<const RuleText> matmul();
std::span<const RuleText> norm();
std::span<const RuleText> pointwise();
std::span<const RuleText> reduce();
std::span<const RuleText> special();
std::span<const RuleText> view();

}  // namespace dtensor::rules
