#include "dtensor/core/rules/rules.h"

namespace dtensor::rules {
namespace {

// A mean is the sum divided by the global number of elements; nll_loss divides by the weights that it met, so its mean
// over a cut batch is an algorithm, and its backward is told the divisor.
constexpr RuleText kRows[] = {
    {"aten::binary_cross_entropy", "...,...,...->~", "reduction(3)"},
    {"aten::binary_cross_entropy_backward", "~,...,...,...->...", "reduction(4) linear(0)"},
    {"aten::binary_cross_entropy_with_logits", "...,...,...,...->~", "reduction(4)"},
    {"aten::huber_loss", "...,...->~", "reduction(2)"},
    {"aten::huber_loss_backward", "~,...,...->...", "reduction(3) linear(0)"},
    {"aten::mse_loss", "...,...->~", "reduction(2)"},
    {"aten::mse_loss_backward", "~,...,...->...", "reduction(3) times(0:1,2)"},
    {"aten::multi_margin_loss", "...C,...,C->~", "reduction(5)"},
    {"aten::multi_margin_loss_backward", "~,...C,...,C->...C", "reduction(6) linear(0)"},
    {"aten::multilabel_margin_loss_backward", "~,...C,...C,...C->...C", "reduction(3) linear(0)"},
    {"aten::multilabel_margin_loss_forward", "...C,...C->~,...C", "reduction(2:whole)"},
    {"aten::nll_loss_backward", "~,#...C,...,#C,->#...C", "reduction(4:given) located(nll_loss_backward) linear(0)"},
    {"aten::nll_loss_forward", "#...C,#...,#C->~,", "reduction(3:whole) merged(nll_loss)"},
    {"aten::smooth_l1_loss", "...,...->~", "reduction(2)"},
    {"aten::smooth_l1_loss_backward", "~,...,...->...", "reduction(3) linear(0)"},
    {"aten::soft_margin_loss", "...,...->~", "reduction(2)"},
    {"aten::soft_margin_loss_backward", "~,...,...->...", "reduction(3) linear(0)"},
};

}  // namespace

std::span<const RuleText> loss() { return kRows; }

}  // namespace dtensor::rules
