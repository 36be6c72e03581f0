#include "dtensor/core/rules/rules.h"

namespace dtensor::rules {
namespace {

// Letters that the result lacks are summed. An added operand (+) is added once, so it turns Partial with the sum. Some
// kernels want sizes that are multiples of something: parts are given them by an algorithm.
constexpr RuleText kRows[] = {
    {"aten::_grouped_mm", "#BMK,#BKN,*,*->#BMN;#_K,#_KN,*,*->#_N;#M_,#_N,*,*->#_MN;#_MK,#K_,*,*->#M_",
     "located(grouped_mm) linear(0) linear(1)"},
    {"aten::_scaled_mm", "#mK,#KN,#mK,#KN,+#N,*->#mN", "located(scaled_mm)"},
    {"aten::addmm", "+mn,mk,kn->mn", "linear(1) linear(2)"},
    {"aten::addmm.dtype", "+mn,mk,kn->mn", "linear(1) linear(2)"},
    {"aten::addmv", "+m,mk,k->m", "linear(1) linear(2)"},
    {"aten::addr", "+mn,m,n->mn", "linear(1) linear(2)"},
    {"aten::baddbmm", "+bmn,bmk,bkn->bmn", "linear(1) linear(2)"},
    {"aten::baddbmm.dtype", "+bmn,bmk,bkn->bmn", "linear(1) linear(2)"},
    {"aten::bmm", "bmk,bkn->bmn", "linear(0) linear(1)"},
    {"aten::bmm.dtype", "bmk,bkn->bmn", "linear(0) linear(1)"},
    {"aten::dot", "k,k->", "linear(0) linear(1)"},
    {"aten::ger", "m,n->mn", "linear(0) linear(1)"},
    {"aten::linear", "...k,nk,+n->...n", "linear(0) linear(1)"},
    {"aten::mm", "mk,kn->mn", "linear(0) linear(1)"},
    {"aten::mm.dtype", "mk,kn->mn", "linear(0) linear(1)"},
    {"aten::mv", "mk,k->m", "linear(0) linear(1)"},
    {"aten::vdot", "k,k->", "linear(0) linear(1)"},
};

}  // namespace

std::span<const RuleText> matmul() { return kRows; }

}  // namespace dtensor::rules
