#include "dtensor/core/rules/rules.h"

namespace dtensor::rules {
namespace {

// Copies keep any Partial; a value filled into a sum is written by its owner alone.
constexpr RuleText kRows[] = {
    {"aten::_local_scalar_dense", "", "replicated"},
    {"aten::_to_copy", "...->...", "same(0)"},
    {"aten::alias_copy", "...->...", "same(0)"},
    {"aten::clone", "...->...", "same(0)"},
    {"aten::contiguous", "...->...", "same(0)"},
    {"aten::copy", "...,...->...", "same(0,1)"},
    {"aten::copy_", "...,...->...", "same(0,1)"},
    {"aten::detach_copy", "...->...", "same(0)"},
    {"aten::empty_like", "", "like"},
    {"aten::equal", "", "replicated"},
    {"aten::fill.Scalar", "...->...", "fill(0)"},
    {"aten::fill.Tensor", "...,->...", "fill(0)"},
    {"aten::full_like", "", "like"},
    {"aten::lift", "...->...", "same(0)"},
    {"aten::lift_fresh", "...->...", "same(0)"},
    {"aten::lift_fresh_copy", "...->...", "same(0)"},
    {"aten::linspace.Scalar_Tensor", "", "replicated"},
    {"aten::linspace.Tensor_Scalar", "", "replicated"},
    {"aten::linspace.Tensor_Tensor", "", "replicated"},
    {"aten::logspace.Scalar_Tensor", "", "replicated"},
    {"aten::logspace.Tensor_Scalar", "", "replicated"},
    {"aten::logspace.Tensor_Tensor", "", "replicated"},
    {"aten::new_empty", "", "fresh size(1)"},
    {"aten::new_empty_strided", "", "fresh size(1)"},
    {"aten::new_full", "", "fresh size(1)"},
    {"aten::new_ones", "", "fresh size(1)"},
    {"aten::new_zeros", "", "fresh size(1)"},
    {"aten::ones_like", "", "like"},
    {"aten::zero", "...->...", "same(0)"},
    {"aten::zeros_like", "", "like"},
};

}  // namespace

std::span<const RuleText> copy() { return kRows; }

}  // namespace dtensor::rules
