#include "dtensor/core/rules/rules.h"

namespace dtensor::rules {
namespace {

// Convolution, pooling, padding, resampling: planes are whole (but for halos), batch and (mostly) channels may be cut.
// The channels of a convolution's result may be cut where they are not in groups and the weight is not transposed. Its
// input channels are whole (`*`, so that no halo cuts them either): kernels refuse to sum over none of them, and a rank
// that has none may still hold a part of the bias.
constexpr RuleText kRows[] = {
    {"aten::_adaptive_avg_pool2d", "...HW->...HW", "weighted(0)"},
    {"aten::_adaptive_avg_pool2d_backward", "...HW,...HW->...HW", "weighted(0)"},
    {"aten::_adaptive_avg_pool3d", "...DHW->...DHW", "weighted(0)"},
    {"aten::_adaptive_avg_pool3d_backward", "...DHW,...DHW->...DHW", "weighted(0)"},
    {"aten::_upsample_bicubic2d_aa", "ncHW->ncHW", "weighted(0)"},
    {"aten::_upsample_bicubic2d_aa_backward", "ncHW->ncHW", "size(2) weighted(0)"},
    {"aten::_upsample_bilinear2d_aa", "ncHW->ncHW", "weighted(0)"},
    {"aten::_upsample_bilinear2d_aa_backward", "ncHW->ncHW", "size(2) weighted(0)"},
    {"aten::_upsample_lanczos2d_aa", "ncHW->ncHW", "weighted(0)"},
    {"aten::_upsample_lanczos2d_aa_backward", "ncHW->ncHW", "size(2) weighted(0)"},
    {"aten::_upsample_nearest_exact1d", "ncW->ncW", "linear(0)"},
    {"aten::_upsample_nearest_exact1d_backward", "ncW->ncW", "size(2) linear(0)"},
    {"aten::_upsample_nearest_exact2d", "ncHW->ncHW", "linear(0)"},
    {"aten::_upsample_nearest_exact2d_backward", "ncHW->ncHW", "size(2) linear(0)"},
    {"aten::_upsample_nearest_exact3d", "ncDHW->ncDHW", "linear(0)"},
    {"aten::_upsample_nearest_exact3d_backward", "ncDHW->ncDHW", "size(2) linear(0)"},
    {"aten::adaptive_max_pool2d", "...HW->...HW,...HW"},
    {"aten::adaptive_max_pool2d_backward", "...HW,...HW,...HW->...HW", "linear(0)"},
    {"aten::adaptive_max_pool3d", "...DHW->...DHW,...DHW"},
    {"aten::adaptive_max_pool3d_backward", "...DHW,...DHW,...DHW->...DHW", "linear(0)"},
    {"aten::avg_pool2d", "#...HW->#...HW", "halo(avg_pool) window(over:0,kernel:1,stride:2,padding:3) weighted(0)"},
    {"aten::avg_pool2d_backward", "#...HW,#...HW->#...HW",
     "halo(avg_pool_backward) window(over:1,kernel:2,stride:3,padding:4) weighted(0)"},
    {"aten::avg_pool3d", "#...DHW->#...DHW", "halo(avg_pool) window(over:0,kernel:1,stride:2,padding:3) weighted(0)"},
    {"aten::avg_pool3d_backward", "#...DHW,#...DHW->#...DHW",
     "halo(avg_pool_backward) window(over:1,kernel:2,stride:3,padding:4) weighted(0)"},
    {"aten::channel_shuffle", "nC...->nC...", "same(0)"},
    {"aten::col2im", "...KL->...CHW", "linear(0)"},
    {"aten::constant_pad_nd", "...->...", "pads(1)"},
    {"aten::convolution", "#n*@,oI@,+o->#no@",
     "only_if(6=0:o@) only_if(8=1:o) halo(convolution) "
     "window(over:0,kernel_of:1,stride:3,padding:4,dilation:5) linear(0) linear(1)"},
    {"aten::convolution_backward", "#no@,#n*@,oI@->#n*@,oI@,o",
     "skip_empty only_if(7=0:o@) only_if(9=1:o) halo(convolution_backward) "
     "window(over:1,kernel_of:2,stride:4,padding:5,dilation:6) linear(0)"},
    {"aten::grid_sampler_2d", "ncHW,nXYZ->ncXY", "weighted(0)"},
    {"aten::grid_sampler_2d_backward", "ncXY,ncHW,nXYZ->ncHW,nXYZ", "skip_empty weighted(0)"},
    {"aten::grid_sampler_3d", "ncDHW,nXYZV->ncXYZ", "weighted(0)"},
    {"aten::grid_sampler_3d_backward", "ncXYZ,ncDHW,nXYZV->ncDHW,nXYZV", "skip_empty weighted(0)"},
    {"aten::im2col", "...CHW->...KL", "linear(0)"},
    {"aten::max_pool2d_with_indices", "#...HW->#...HW,#...HW",
     "halo(max_pool) window(over:0,kernel:1,stride:2,padding:3,dilation:4)"},
    {"aten::max_pool2d_with_indices_backward", "#...HW,#...HW,#...HW->#...HW",
     "halo(max_pool_backward) window(over:1,kernel:2,stride:3,padding:4,dilation:5) linear(0)"},
    {"aten::max_pool3d_with_indices", "#...DHW->#...DHW,#...DHW",
     "halo(max_pool) window(over:0,kernel:1,stride:2,padding:3,dilation:4)"},
    {"aten::max_pool3d_with_indices_backward", "#...DHW,#...DHW,#...DHW->#...DHW",
     "halo(max_pool_backward) window(over:1,kernel:2,stride:3,padding:4,dilation:5) linear(0)"},
    {"aten::max_unpool2d", "...HW,...HW->...HW", "linear(0)"},
    {"aten::max_unpool3d", "...DHW,...DHW->...DHW", "linear(0)"},
    {"aten::pixel_shuffle", "...CHW->...CHW", "same(0)"},
    {"aten::pixel_unshuffle", "...CHW->...CHW", "same(0)"},
    {"aten::reflection_pad1d", "...W->...W", "linear(0)"},
    {"aten::reflection_pad1d_backward", "...W,...W->...W", "linear(0)"},
    {"aten::reflection_pad2d", "...HW->...HW", "linear(0)"},
    {"aten::reflection_pad2d_backward", "...HW,...HW->...HW", "linear(0)"},
    {"aten::reflection_pad3d", "...DHW->...DHW", "linear(0)"},
    {"aten::reflection_pad3d_backward", "...DHW,...DHW->...DHW", "linear(0)"},
    {"aten::replication_pad1d", "...W->...W", "linear(0)"},
    {"aten::replication_pad1d_backward", "...W,...W->...W", "linear(0)"},
    {"aten::replication_pad2d", "...HW->...HW", "linear(0)"},
    {"aten::replication_pad2d_backward", "...HW,...HW->...HW", "linear(0)"},
    {"aten::replication_pad3d", "...DHW->...DHW", "linear(0)"},
    {"aten::replication_pad3d_backward", "...DHW,...DHW->...DHW", "linear(0)"},
    {"aten::upsample_bicubic2d", "ncHW->ncHW", "weighted(0)"},
    {"aten::upsample_bicubic2d_backward", "ncHW->ncHW", "size(2) weighted(0)"},
    {"aten::upsample_bilinear2d", "ncHW->ncHW", "weighted(0)"},
    {"aten::upsample_bilinear2d_backward", "ncHW->ncHW", "size(2) weighted(0)"},
    {"aten::upsample_linear1d", "ncW->ncW", "weighted(0)"},
    {"aten::upsample_linear1d_backward", "ncW->ncW", "size(2) weighted(0)"},
    {"aten::upsample_nearest1d", "ncW->ncW", "linear(0)"},
    {"aten::upsample_nearest1d_backward", "ncW->ncW", "size(2) linear(0)"},
    {"aten::upsample_nearest2d", "ncHW->ncHW", "linear(0)"},
    {"aten::upsample_nearest2d_backward", "ncHW->ncHW", "size(2) linear(0)"},
    {"aten::upsample_nearest3d", "ncDHW->ncDHW", "linear(0)"},
    {"aten::upsample_nearest3d_backward", "ncDHW->ncDHW", "size(2) linear(0)"},
    {"aten::upsample_trilinear3d", "ncDHW->ncDHW", "weighted(0)"},
    {"aten::upsample_trilinear3d_backward", "ncDHW->ncDHW", "size(2) weighted(0)"},
};

}  // namespace

std::span<const RuleText> conv() { return kRows; }

}  // namespace dtensor::rules
