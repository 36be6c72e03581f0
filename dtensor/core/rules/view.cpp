#include "dtensor/core/rules/rules.h"

namespace dtensor::rules {
namespace {

// Views alias their operand where their rule is free. Those that may `move` redistribute it where they have no free
// form, and the result is then a copy; a plain `view` is refused instead.
constexpr RuleText kRows[] = {
    {"aten::_conj", "", "view(identity)"},
    {"aten::_neg_view", "...->...", "linear(0)"},
    {"aten::_reshape_alias", "", "view(reshape_strides) move"},
    {"aten::_unsafe_view", "", "view(reshape) move"},
    {"aten::alias", "", "view(identity)"},
    {"aten::detach", "", "view(identity)"},
    {"aten::diagonal", "", "view(diagonal) move"},
    {"aten::diagonal_copy", "", "view(diagonal) move"},
    {"aten::expand", "", "view(expand) move"},
    {"aten::expand_copy", "", "view(expand) move"},
    {"aten::narrow", "", "view(narrow) move"},
    {"aten::narrow_copy", "", "view(narrow) move"},
    {"aten::permute", "", "view(permute)"},
    {"aten::permute_copy", "", "view(permute)"},
    {"aten::reshape", "", "view(reshape) move"},
    {"aten::select.int", "", "view(select) move key(2:nothing)"},
    {"aten::select_copy.int", "", "view(select) move key(2:nothing)"},
    {"aten::slice.Tensor", "", "view(slice) move"},
    {"aten::slice_copy.Tensor", "", "view(slice) move"},
    {"aten::split.Tensor", "", "view(split) move"},
    {"aten::split_copy.Tensor", "", "view(split) move"},
    {"aten::split_with_sizes", "", "view(split_sizes) move"},
    {"aten::split_with_sizes_copy", "", "view(split_sizes) move"},
    {"aten::squeeze", "", "view(squeeze) move"},
    {"aten::squeeze.dim", "", "view(squeeze_dims) move"},
    {"aten::squeeze.dims", "", "view(squeeze_dims) move"},
    {"aten::squeeze_copy", "", "view(squeeze) move"},
    {"aten::squeeze_copy.dim", "", "view(squeeze_dims) move"},
    {"aten::squeeze_copy.dims", "", "view(squeeze_dims) move"},
    {"aten::t", "", "view(t)"},
    {"aten::t_copy", "", "view(t)"},
    {"aten::transpose.int", "", "view(transpose)"},
    {"aten::transpose_copy.int", "", "view(transpose)"},
    {"aten::unbind.int", "", "view(unbind) move"},
    {"aten::unbind_copy.int", "", "view(unbind) move"},
    {"aten::unfold", "", "view(unfold) move"},
    {"aten::unfold_copy", "", "view(unfold) move"},
    {"aten::unsafe_split.Tensor", "", "view(split) move"},
    {"aten::unsafe_split_with_sizes", "", "view(split_sizes) move"},
    {"aten::unsqueeze", "", "view(unsqueeze)"},
    {"aten::unsqueeze_copy", "", "view(unsqueeze)"},
    {"aten::view", "", "view(reshape)"},
    {"aten::view.dtype", "...->...", "exact"},
    {"aten::view_as_complex", "...C->...", "linear(0)"},
    {"aten::view_as_real", "...->...C", "linear(0)"},
    {"aten::view_copy", "", "view(reshape) move"},
    {"aten::view_copy.dtype", "...->...", "exact"},
};

}  // namespace

std::span<const RuleText> view() { return kRows; }

}  // namespace dtensor::rules
