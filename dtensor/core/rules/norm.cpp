#include "dtensor/core/rules/rules.h"

namespace dtensor::rules {
namespace {

// The dims that are normalized over are whole, or cut by an algorithm. Of a layer norm's backward the gradients of
// weight and bias are summed over the others.
constexpr RuleText kRows[] = {
    {"aten::_log_softmax", "#...->#...", "dims(1) merged(log_softmax)"},
    {"aten::_log_softmax_backward_data", "#...,#...->#...", "dims(2) merged(log_softmax_backward) linear(0)"},
    {"aten::_softmax", "#...->#...", "dims(1) merged(softmax)"},
    {"aten::_softmax_backward_data", "#...,#...->#...", "dims(2) merged(softmax_backward) linear(0)"},
    {"aten::native_layer_norm", "#...@,#@,#@->#...@,...@,...@", "group(1) merged(layer_norm)"},
    {"aten::native_layer_norm_backward", "#...@,#...@,...@,...@,#@,#@->#...@,#@,#@",
     "group(2) merged(layer_norm_backward) linear(0)"},
};

}  // namespace

std::span<const RuleText> norm() { return kRows; }

}  // namespace dtensor::rules
