#include "dtensor/core/rules/rules.h"

namespace dtensor::rules {
namespace {

// The dims that are normalized over are whole, or cut by an algorithm. Of a layer norm's backward the gradients of
// weight and bias are summed over the others.
constexpr RuleText kRows[] = {
    {"aten::_batch_norm_no_update", "nc*,c,c,c,c->nc*,S,S,R"},
    {"aten::_batch_norm_with_update", "#Nc*,c,c,c,c->#Nc*,c,c,R", "merged(batch_norm)"},
    {"aten::_fused_rms_norm", "#...@,#@->#...@,...@", "group(1) merged(rms_norm)"},
    {"aten::_fused_rms_norm_backward", "#...@,#...@,...@,#@->#...@,#@", "group(2) merged(rms_norm_backward) linear(0)"},
    {"aten::_log_softmax", "#...->#...", "dims(1) merged(log_softmax)"},
    {"aten::_log_softmax_backward_data", "#...,#...->#...", "dims(2) merged(log_softmax_backward) linear(0)"},
    {"aten::_native_batch_norm_legit", "#nc*,c,c,c,c->#nc*,c,c", "merged(batch_norm) only_if(5=0:n)"},
    {"aten::_native_batch_norm_legit.no_stats", "#nc*,c,c->#nc*,c,c", "merged(batch_norm) only_if(3=0:n)"},
    {"aten::_safe_softmax", "#...->#...", "dims(1) merged(safe_softmax)"},
    {"aten::_scaled_dot_product_cudnn_attention", "...LE,...SE,...SV,...LS->...LV,...MO,*,*,*,*,*"},
    {"aten::_scaled_dot_product_cudnn_attention_backward",
     "...LV,...LE,...SE,...SV,...LV,...MO,*,*,...LS,*,*->...LE,...SE,...SV", "linear(0)"},
    {"aten::_scaled_dot_product_efficient_attention", "...LE,...SE,...SV,...LS->...LV,...M,*,*"},
    {"aten::_scaled_dot_product_efficient_attention_backward",
     "...LV,...LE,...SE,...SV,...LS,...LV,...M,*,*->...LE,...SE,...SV,...LS", "linear(0)"},
    {"aten::_scaled_dot_product_flash_attention", "...LE,...SE,...SV->...LV,...M,*,*,*,*,*"},
    {"aten::_scaled_dot_product_flash_attention.quantized", "...LE,...SE,...SV,*,*,*->...LV,...M,*,*,*,*,*"},
    {"aten::_scaled_dot_product_flash_attention_backward",
     "...LV,...LE,...SE,...SV,...LV,...M,*,*,*,*->...LE,...SE,...SV", "linear(0)"},
    {"aten::_scaled_dot_product_flash_attention_for_cpu", "...lE,...SE,...SV,...lS->...lV,...l", "only_if(4=0:l)"},
    {"aten::_scaled_dot_product_flash_attention_for_cpu_backward",
     "...lV,...lE,...SE,...SV,...lV,...l,...lS->...lE,...SE,...SV", "only_if(7=0:l) linear(0)"},
    {"aten::_softmax", "#...->#...", "dims(1) merged(softmax)"},
    {"aten::_softmax_backward_data", "#...,#...->#...", "dims(2) merged(softmax_backward) linear(0)"},
    {"aten::batch_norm_backward", "#nc*,#nc*,c,c,c,c,c,R->#nc*,c,c",
     "skip_empty merged(batch_norm_backward) only_if(7=0:n) linear(0)"},
    {"aten::glu", "...->...", "dims(1)"},
    {"aten::glu_backward", "...,...->...", "dims(2) times(0:1)"},
    {"aten::native_batch_norm", "#nc*,c,c,c,c->#nc*,c,c", "merged(batch_norm) only_if(5=0:n)"},
    {"aten::native_batch_norm_backward", "#nc*,#nc*,c,c,c,c,c->#nc*,c,c",
     "skip_empty merged(batch_norm_backward) only_if(7=0:n) linear(0)"},
    {"aten::native_group_norm", "#nC*,#C,#C->#nC*,nG,nG", "merged(group_norm) scaled(3:0)"},
    {"aten::native_group_norm_backward", "#nC*,#nC*,nG,nG,#C->#nC*,#C,#C",
     "skip_empty merged(group_norm_backward) scaled(5:0) linear(0)"},
    {"aten::native_layer_norm", "#...@,#@,#@->#...@,...@,...@", "group(1) merged(layer_norm)"},
    {"aten::native_layer_norm_backward", "#...@,#...@,...@,...@,#@,#@->#...@,#@,#@",
     "group(2) merged(layer_norm_backward) linear(0)"},
};

}  // namespace

std::span<const RuleText> norm() { return kRows; }

}  // namespace dtensor::rules
