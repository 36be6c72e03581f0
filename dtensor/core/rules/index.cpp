#include "dtensor/core/rules/rules.h"

namespace dtensor::rules {
namespace {

// Dims along which elements are joined or moved are whole; those along which they are looked up may be cut, where the
// kernel knows what it holds. A row with one ... stands for all tensors of a
// list.
constexpr RuleText kRows[] = {
    {"aten::_index_put_impl", "...,*,...->...", "index linear(0,2)"},
    {"aten::_unique2", "", "replicated"},
    {"aten::_unsafe_index.Tensor", "...,*->...", "index same(0)"},
    {"aten::_unsafe_index_put", "...,*,...->...", "index linear(0,2)"},
    {"aten::cat", "...->...", "exact dims(1) same(0)"},
    {"aten::diag_embed", "...N->...MM", "only_if(2=-2) only_if(3=-1) linear(0)"},
    {"aten::diagonal_scatter", "", "replicated"},
    {"aten::embedding", "#Vd,...->...d", "located(embedding) linear(0)"},
    {"aten::embedding_dense_backward", "...d,...->Vd", "whole_if(4) linear(0)"},
    {"aten::flip", "...->...", "dims(1) same(0)"},
    {"aten::gather", "#...,...->...", "exact dims(1) located(gather) linear(0)"},
    {"aten::index.Tensor", "...,*->...", "index same(0)"},
    {"aten::index_add", "#...,I,...->#...", "exact dims(1) located(index_add) times(0,2:4)"},
    {"aten::index_copy", "...,I,...->...", "exact dims(1) linear(0,2)"},
    {"aten::index_fill.int_Scalar", "...,I->...", "exact dims(1)"},
    {"aten::index_fill.int_Tensor", "...,I,->...", "exact dims(1)"},
    {"aten::index_put", "...,*,...->...", "index linear(0,2)"},
    {"aten::index_reduce", "...,I,...->...", "exact dims(1)"},
    {"aten::index_select", "#...,I->...", "exact dims(1) located(index_select) same(0)"},
    {"aten::isin.Scalar_Tensor", "", "replicated"},
    {"aten::isin.Tensor_Tensor", "...,*->..."},
    {"aten::masked_scatter", "", "replicated"},
    {"aten::masked_select", "", "replicated"},
    {"aten::nonzero", "", "replicated"},
    {"aten::put", "", "replicated"},
    {"aten::repeat", "...->...", "exact same(0)"},
    {"aten::roll", "...->...", "dims(2) same(0)"},
    {"aten::rot90", "...->...", "exact dims(2) same(0)"},
    {"aten::scatter.reduce", "...,...,...->...", "exact dims(1)"},
    {"aten::scatter.src", "#...,...,...->#...", "exact dims(1) located(scatter)"},
    {"aten::scatter.value", "#...,...->#...", "exact dims(1) located(scatter)"},
    {"aten::scatter.value_reduce", "...,...->...", "exact dims(1)"},
    {"aten::scatter_add", "#...,...,...->#...", "exact dims(1) located(scatter) linear(0,2)"},
    {"aten::scatter_reduce.two", "...,...,...->...", "exact dims(1)"},
    {"aten::searchsorted.Scalar", "N,N->"},
    {"aten::searchsorted.Tensor", "...N,...m,...N->...m"},
    {"aten::select_backward", "...->^", "dims(2) size(1) linear(0) key(3:nothing)"},
    {"aten::select_scatter", "^,...->^", "exact dims(2) linear(0,1)"},
    {"aten::slice_backward", "...->...", "dims(2) size(1) linear(0)"},
    {"aten::slice_scatter", "...,...->...", "exact dims(2) linear(0,1)"},
    {"aten::stack", "...->^", "exact dims(1) same(0)"},
    {"aten::take", "*,...->...", "linear(0)"},
    {"aten::tril", "...MN->...MN", "linear(0)"},
    {"aten::triu", "...MN->...MN", "linear(0)"},
    {"aten::unique_consecutive", "", "replicated"},
};

}  // namespace

std::span<const RuleText> index() { return kRows; }

}  // namespace dtensor::rules
