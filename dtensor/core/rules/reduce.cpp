#include "dtensor/core/rules/rules.h"

namespace dtensor::rules {
namespace {

// ~ is what is left of the dims. Without reduce() the dims that are named stay whole, or are cut by an algorithm.
constexpr RuleText kRows[] = {
    {"aten::_logcumsumexp", "...->...", "dims(1)"},
    {"aten::all", "...->~", "reduce(and)"},
    {"aten::all.dim", "...->~", "dims(1) keepdim(2) reduce(and)"},
    {"aten::all.dims", "...->~", "dims(1) keepdim(2) reduce(and)"},
    {"aten::amax", "...->~", "dims(1) keepdim(2) reduce(max) carry(max:0)"},
    {"aten::amin", "...->~", "dims(1) keepdim(2) reduce(min) carry(min:0)"},
    {"aten::aminmax", "...->~,~", "dims(1) keepdim(2)"},
    {"aten::any", "...->~", "reduce(or) carry(or:0)"},
    {"aten::any.dim", "...->~", "dims(1) keepdim(2) reduce(or) carry(or:0)"},
    {"aten::any.dims", "...->~", "dims(1) keepdim(2) reduce(or) carry(or:0)"},
    {"aten::argmax", "#...->~", "dims(1) keepdim(2) merged(argmax)"},
    {"aten::argmin", "#...->~", "dims(1) keepdim(2) merged(argmin)"},
    {"aten::count_nonzero", "...->~", "dims(1) reduce(sum)"},
    {"aten::count_nonzero.dim_IntList", "...->~", "dims(1) reduce(sum)"},
    {"aten::cummax", "...->...,...", "dims(1)"},
    {"aten::cummin", "...->...,...", "dims(1)"},
    {"aten::cumprod", "...->...", "dims(1)"},
    {"aten::cumsum", "#...->#...", "dims(1) merged(cumsum:plain) linear(0)"},
    {"aten::dist", "...,...->~"},
    {"aten::histc", "#...->~B", "merged(histc)"},
    {"aten::histogram.bin_ct", "", "replicated"},
    {"aten::histogram.bins_tensor", "", "replicated"},
    {"aten::kthvalue", "...->~,~", "dims(2) keepdim(3)"},
    {"aten::linalg_vector_norm", "#...->~", "dims(2) keepdim(3) merged(vector_norm)"},
    {"aten::logcumsumexp", "...->...", "dims(1)"},
    {"aten::logsumexp", "#...->~", "dims(1) keepdim(2) merged(logsumexp)"},
    {"aten::max", "...->~", "reduce(max) carry(max:0)"},
    {"aten::max.dim", "#...->~,~", "dims(1) keepdim(2) merged(max_dim)"},
    {"aten::mean", "...->~", "reduce(sum) mean(aten::sum) linear(0)"},
    {"aten::mean.dim", "...->~", "dims(1) keepdim(2) reduce(sum) mean(aten::sum.dim_IntList) linear(0)"},
    {"aten::median", "...->~"},
    {"aten::median.dim", "...->~,~", "dims(1) keepdim(2)"},
    {"aten::min", "...->~", "reduce(min) carry(min:0)"},
    {"aten::min.dim", "#...->~,~", "dims(1) keepdim(2) merged(min_dim)"},
    {"aten::mode", "...->~,~", "dims(1) keepdim(2)"},
    {"aten::nanmedian", "...->~"},
    {"aten::nanmedian.dim", "...->~,~", "dims(1) keepdim(2)"},
    {"aten::nansum", "...->~", "dims(1) keepdim(2) reduce(sum)"},
    {"aten::norm.Scalar", "#...->~", "merged(norm)"},
    {"aten::norm.ScalarOpt_dim", "#...->~", "dims(2) keepdim(3) merged(norm)"},
    {"aten::norm.ScalarOpt_dim_dtype", "#...->~", "dims(2) keepdim(3) merged(norm)"},
    {"aten::norm.ScalarOpt_dtype", "#...->~", "merged(norm)"},
    {"aten::prod", "...->~", "reduce(product) carry(product:0)"},
    {"aten::prod.dim_int", "...->~", "dims(1) keepdim(2) reduce(product) carry(product:0)"},
    {"aten::sort", "...->...,...", "dims(1)"},
    {"aten::sort.stable", "...->...,...", "dims(2)"},
    {"aten::std.correction", "#...->~", "dims(1) keepdim(3) merged(std)"},
    {"aten::std_mean.correction", "#...->~,~", "dims(1) keepdim(3) merged(std)"},
    {"aten::sum", "...->~", "reduce(sum) linear(0)"},
    {"aten::sum.dim_IntList", "...->~", "dims(1) keepdim(2) reduce(sum) linear(0)"},
    {"aten::topk", "#...->...,...", "dims(2) merged(topk)"},
    {"aten::var.correction", "#...->~", "dims(1) keepdim(3) merged(var)"},
    {"aten::var_mean.correction", "#...->~,~", "dims(1) keepdim(3) merged(var)"},
};

}  // namespace

std::span<const RuleText> reduce() { return kRows; }

}  // namespace dtensor::rules
