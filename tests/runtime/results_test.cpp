// Operators with a row run by it, also where this libtorch has no meta kernel that says what their results will be.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "dtensor/comm/world.h"
#include "dtensor/runtime/dispatch.h"
#include "dtensor/runtime/tensor.h"
#include "tests/runtime/helpers.h"

namespace dtensor {
namespace {

using testing::numbers;

struct Case {
  std::string name;
  std::vector<at::IntArrayRef> shapes;
  std::function<at::Tensor(const std::vector<at::Tensor>&)> call;
};

const std::vector<Case>& cases() {
  using Tensors = std::vector<at::Tensor>;
  static const std::vector<std::int64_t> batch = {5, 4, 6, 6}, rows = {5, 4}, square = {5, 3, 3};
  static const std::vector<Case> table = {
      {"var", {rows}, [](const Tensors& t) { return at::var(t[0], {1}, true); }},
      {"std", {rows}, [](const Tensors& t) { return at::std(t[0], {1}, true); }},
      {"prod", {rows}, [](const Tensors& t) { return at::prod(t[0], 1); }},
      {"nansum", {rows}, [](const Tensors& t) { return at::nansum(t[0], {1}); }},
      {"log_sigmoid", {rows}, [](const Tensors& t) { return at::log_sigmoid(t[0]); }},
      {"huber_loss", {rows, rows}, [](const Tensors& t) { return at::huber_loss(t[0], t[1], 0); }},
      {"cdist", {rows, rows}, [](const Tensors& t) { return at::cdist(t[0], t[1]); }},
      {"adaptive_avg_pool2d",
       {batch},
       [](const Tensors& t) {
         return at::adaptive_avg_pool2d(t[0], {2, 3});
       }},
      {"reflection_pad2d",
       {batch},
       [](const Tensors& t) {
         return at::reflection_pad2d(t[0], {1, 2, 2, 1});
       }},
      {"matrix_exp", {square}, [](const Tensors& t) { return at::matrix_exp(t[0]); }},
  };
  return table;
}

TEST(Results, AreTriedOutWhereNoMetaKernelSaysThem) {
  run_ranks(3, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3}, {"x"});
    const torch::NoGradGuard no_grad;
    const NoRuleGuard guard(NoRule::kRefuse);
    for (const Case& one : cases()) {
      SCOPED_TRACE(one.name);
      std::vector<at::Tensor> plain, ours;
      for (std::size_t i = 0; i < one.shapes.size(); ++i) {
        plain.push_back(numbers(one.shapes[i], 0.3 + static_cast<double>(i)));
        ours.push_back(distribute_tensor(plain[i], mesh, {Shard(0)}));
      }
      const at::Tensor expected = one.call(plain);
      const at::Tensor result = one.call(ours);
      EXPECT_EQ(result.sizes(), expected.sizes());
      EXPECT_EQ(result.scalar_type(), expected.scalar_type());
      EXPECT_FALSE(DTensor(result).spec().is_replicated());
      EXPECT_TRUE(at::allclose(DTensor(result).full_tensor(), expected));
    }
  });
}

}  // namespace
}  // namespace dtensor
