// Core's algebra against the tensor library itself: cutting, viewing and striding real tensors gives what specs say.
#include "dtensor/runtime/meta.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "dtensor/core/view.h"
#include "tests/core/expect_error.h"
#include "tests/core/sweep.h"

namespace dtensor {
namespace {

std::vector<std::int64_t> list(const Dims& dims) { return {dims.begin(), dims.end()}; }

// The elements of a full tensor that a rank holds, as an ordinary (contiguous) local tensor.
at::Tensor local_part(const at::Tensor& full, const Spec& spec, const Dims& coordinate) {
  at::Tensor local = full;
  const Box box = box_of(spec, coordinate);
  for (std::size_t d = 0; d < box.dims.size(); ++d) {
    std::vector<at::Tensor> pieces = {local.narrow(static_cast<std::int64_t>(d), 0, 0)};
    for (const Interval& run : runs_of(box.dims[d])) {
      pieces.push_back(local.narrow(static_cast<std::int64_t>(d), run.begin, run.size()));
    }
    local = at::cat(pieces, static_cast<std::int64_t>(d));
  }
  return local.contiguous();
}

// The libtorch whose headers were compiled is the one that is loaded, where several are installed.
TEST(Meta, LoadedLibtorchIsTheChosenOne) {
  std::ifstream maps("/proc/self/maps");
  std::string line;
  int seen = 0;
  while (std::getline(maps, line)) {
    if (line.find("libtorch_cpu.so") == std::string::npos && line.find("libc10.so") == std::string::npos) continue;
    ++seen;
    EXPECT_NE(line.find(DTENSOR_TORCH_LIBRARIES), std::string::npos) << line;
  }
  EXPECT_GT(seen, 0);
}

TEST(Meta, TypesGoBothWays) {
  for (const char* name : {"bool", "u8", "i8", "i16", "i32", "i64", "bf16", "f16", "f32", "f64", "c64", "c128"}) {
    const DType dtype = *dtype_from(name);
    EXPECT_EQ(dtype_of(scalar_type_of(dtype)), dtype);
    EXPECT_EQ(static_cast<std::int64_t>(c10::elementSize(scalar_type_of(dtype))), element_size(dtype));
  }
  EXPECT_ERROR(dtype_of(c10::ScalarType::QInt8), kNotSupported,
               "[dtype] tensors of this type cannot be distributed; got QInt8");
}

TEST(Meta, OfTensors) {
  const at::Tensor t = at::empty({4, 6}, at::kFloat);
  EXPECT_EQ(meta_of(t).to_string(), "f32[4,6]");
  EXPECT_EQ(meta_of(t.t()).to_string(), "f32[6,4]{1,6}");
  EXPECT_EQ(meta_of(at::empty({}, at::kLong)).to_string(), "i64[]");
  // Row-major is what the tensor library calls contiguous, zeros and ones included.
  for (const Dims& shape : {Dims{0, 5}, Dims{5, 0, 3}, Dims{1, 1}, Dims{3, 1, 2}}) {
    EXPECT_EQ(meta_of(at::empty(list(shape))), TensorMeta(shape, DType::kF32));
  }
}

TEST(Meta, ChunkRuleIsTheTensorLibrarys) {
  for (std::int64_t n = 1; n <= 40; ++n) {
    const at::Tensor full = at::arange(n);
    for (std::int64_t k = 1; k <= 12; ++k) {
      const auto chunks = full.chunk(k);
      for (std::int64_t r = 0; r < k; ++r) {
        const Interval ours = chunk({0, n}, k, r);
        const std::int64_t size = r < static_cast<std::int64_t>(chunks.size()) ? chunks[r].size(0) : 0;
        ASSERT_EQ(ours.size(), size) << n << " in " << k;
        if (size > 0) {
          ASSERT_EQ(chunks[r][0].item<std::int64_t>(), ours.begin);
        }
      }
    }
  }
}

// A view that is called expressible is the view of every rank's own local tensor, with no copy.
TEST(Meta, ExpressibleViewsAreViewsOfTheLocals) {
  sweep::Random random(41);
  const std::vector<Dims> meshes = sweep::mesh_shapes(6, 3);
  std::int64_t checked = 0;
  for (int i = 0; i < 400; ++i) {
    const Mesh mesh = Mesh::make(random.pick(meshes));
    const Spec spec =
        sweep::random_case(random, mesh, {1 + random.below(6), 1 + random.below(6), 1 + random.below(4)}).spec();
    const Dims& shape = spec.meta().shape();
    const Dims target = random.chance(2) ? Dims{shape[0] * shape[1], shape[2]} : Dims{shape[0], shape[1] * shape[2]};
    const auto view = reshape(spec, target);
    ASSERT_TRUE(view) << view.reason();
    const auto back = reshape(*view, shape);
    ASSERT_TRUE(back) << back.reason();
    const at::Tensor full = at::arange(spec.meta().numel()).view(list(shape));
    sweep::for_each_coordinate(mesh, [&](const Dims& at) {
      const at::Tensor local = local_part(full, spec, at);
      const at::Tensor viewed = local.view(list(view->local_shape(at)));
      ASSERT_TRUE(at::equal(viewed, local_part(full.view(list(target)), *view, at))) << spec.to_string();
      ASSERT_TRUE(at::equal(viewed.view(list(back->local_shape(at))), local_part(full, *back, at)));
      ++checked;
    });
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(checked, 500);
}

TEST(Meta, LocalStridesAreDenseAndInOrder) {
  sweep::Random random(42);
  const std::vector<Dims> meshes = sweep::mesh_shapes(6, 2);
  for (int i = 0; i < 300; ++i) {
    const Mesh mesh = Mesh::make(random.pick(meshes));
    const Spec spec = permute(
        sweep::random_case(random, mesh, {2 + random.below(6), 2 + random.below(6), 2 + random.below(5)}).spec(),
        {2, 0, 1});
    sweep::for_each_coordinate(mesh, [&](const Dims& at) {
      const at::Tensor fresh = at::empty_strided(list(spec.local_shape(at)), list(spec.local_stride(at)));
      ASSERT_TRUE(fresh.is_non_overlapping_and_dense() || fresh.numel() == 0) << spec.to_string();
      // Undoing the permutation gives a contiguous tensor, as it does for the whole.
      ASSERT_TRUE(fresh.permute({1, 2, 0}).is_contiguous()) << spec.to_string();
    });
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace dtensor
