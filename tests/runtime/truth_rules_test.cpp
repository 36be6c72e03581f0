// Values that only some layouts get wrong: infinities and zeros beside a Partial, integers, tensors without elements.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <set>

#include "dtensor/comm/world.h"
#include "dtensor/runtime/dispatch.h"
#include "dtensor/runtime/record.h"
#include "dtensor/runtime/tensor.h"
#include "tests/runtime/helpers.h"

namespace dtensor {
namespace {

using testing::error_of;
using testing::numbers;

constexpr double kInf = std::numeric_limits<double>::infinity();

void on(std::int64_t ranks, const std::function<void(const DeviceMesh&)>& body) {
  run_ranks(ranks, [&](World& world) { body(init_device_mesh(world, at::kCPU, {ranks}, {"x"})); });
}

at::Tensor whole(const at::Tensor& tensor) { return DTensor(tensor).full_tensor(); }

// To the bit, but for NaN, which equals NaN.
bool same(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  if (a.is_complex()) return same(at::view_as_real(a), at::view_as_real(b));
  if (!a.is_floating_point()) return at::equal(a, b);
  return at::equal(a.isnan(), b.isnan()) && at::equal(a.nan_to_num(0.5, 1e30, -1e30), b.nan_to_num(0.5, 1e30, -1e30)) &&
         at::equal(at::signbit(a), at::signbit(b).logical_or(b.isnan().logical_and(at::signbit(a))));
}

// The sum of rank 0's part and rank 1's, unreduced; other ranks hold zeros.
at::Tensor sum_of(const DeviceMesh& mesh, const at::Tensor& first, const at::Tensor& second) {
  const at::Tensor part = mesh.rank() == 0 ? first : mesh.rank() == 1 ? second : at::zeros_like(first);
  return from_local(part.clone(), mesh, {Partial()});
}

bool is_partial(const at::Tensor& tensor) { return DTensor(tensor).spec().has_partial(); }

// ---- Partial with infinities and zeros

TEST(PartialFactors, InfinitiesAndZerosGiveWhatPlainGives) {
  on(3, [](const DeviceMesh& mesh) {
    for (const auto type : {at::kDouble, at::kFloat}) {
      const at::Tensor a = at::tensor({1.0, 0.0, -2.0, 3.0}).to(type), b = at::tensor({0.0, 2.0, 1.0, -3.0}).to(type);
      const at::Tensor full = a + b;
      const auto y = [&] { return sum_of(mesh, a, b); };
      const at::Tensor inf = at::full({4}, kInf, type), zero = at::zeros({4}, type);
      const at::Tensor r_inf = distribute_tensor(inf, mesh, {Replicate()});
      const at::Tensor r_zero = distribute_tensor(zero, mesh, {Replicate()});
      const at::Tensor r_one = distribute_tensor(inf.narrow(0, 0, 1).squeeze(), mesh, {Replicate()});
      EXPECT_TRUE(same(whole(y() * kInf), full * kInf));
      EXPECT_TRUE(same(whole(kInf * y()), full * kInf));
      EXPECT_TRUE(same(whole(y() * -kInf), full * -kInf));
      EXPECT_TRUE(same(whole(y() / 0.0), full / 0.0));
      EXPECT_TRUE(same(whole(y() / 0), full / 0));
      EXPECT_TRUE(same(whole(y() / kInf), full / kInf));
      EXPECT_TRUE(same(whole(y() / 1e-320), full / 1e-320));
      EXPECT_TRUE(same(whole(at::mul(y(), at::Scalar(kInf))), full * kInf));
      EXPECT_TRUE(same(whole(at::div(y(), at::Scalar(0.0))), full / 0.0));
      EXPECT_TRUE(same(whole(at::mul(y(), r_inf)), full * inf));
      EXPECT_TRUE(same(whole(at::mul(r_inf, y())), full * inf));
      EXPECT_TRUE(same(whole(at::mul(y(), r_one)), full * kInf));
      EXPECT_TRUE(same(whole(at::div(y(), r_zero)), full / zero));
      EXPECT_TRUE(same(whole(at::addcmul(y(), y(), r_inf)), at::addcmul(full, full, inf)));
      EXPECT_TRUE(same(whole(at::addcdiv(y(), y(), r_zero)), at::addcdiv(full, full, zero)));
      EXPECT_TRUE(same(whole(at::addcmul(y(), y(), r_zero, kInf)), at::addcmul(full, full, zero, kInf)));
      EXPECT_TRUE(same(whole(at::add(y(), y(), kInf)), at::add(full, full, kInf)));
      EXPECT_TRUE(same(whole(at::sub(y(), y(), kInf)), at::sub(full, full, kInf)));
      EXPECT_TRUE(same(whole(at::lerp(y(), y(), kInf)), at::lerp(full, full, kInf)));
      EXPECT_TRUE(same(whole(at::lerp(y(), y(), r_inf)), at::lerp(full, full, inf)));
      EXPECT_TRUE(same(whole(y().sum() / 0.0), full.sum() / 0.0));
      EXPECT_TRUE(same(whole(y().mean() * kInf), full.mean() * kInf));
      EXPECT_TRUE(same(whole(y().mul_(kInf)), full * kInf));
      EXPECT_TRUE(same(whole(y().div_(0.0)), full / 0.0));
      EXPECT_TRUE(same(whole(y().mul_(r_inf)), full * inf));
    }
  });
}

// The product of a row cut over two ranks.
TEST(PartialFactors, AProductOfMatricesIsScaledByInfinity) {
  on(2, [](const DeviceMesh& mesh) {
    const at::Tensor row = at::tensor({1.0, 0.0}).view({1, 2}), column = at::tensor({1.0, 1.0}).view({2, 1});
    const at::Tensor y = at::mm(distribute_tensor(row, mesh, {Shard(1)}), distribute_tensor(column, mesh, {Shard(0)}));
    ASSERT_TRUE(is_partial(y));
    EXPECT_EQ(whole(y * kInf).item<double>(), kInf);
    EXPECT_EQ(whole(y / 0.0).item<double>(), kInf);
    EXPECT_EQ(whole(y.sum() / 0.0).item<double>(), kInf);
  });
}

TEST(PartialFactors, FiniteNumbersStayUnreduced) {
  on(2, [](const DeviceMesh& mesh) {
    const at::Tensor y = sum_of(mesh, numbers({6}), numbers({6}, 0.7));
    const CommPolicyGuard forbid(CommPolicy::kForbid);
    for (const double factor : {2.0, -0.5, 1e-8, 1e30}) {
      EXPECT_TRUE(is_partial(y * factor)) << factor;
      EXPECT_TRUE(is_partial(y / factor)) << factor;
      EXPECT_TRUE(is_partial(y.add(y, factor))) << factor;
    }
    EXPECT_TRUE(is_partial(y * 0.0));
    EXPECT_TRUE(is_partial(y * 3));
    EXPECT_TRUE(is_partial(y / 3));
    EXPECT_TRUE(is_partial(y * at::scalar_tensor(2.0)));
    EXPECT_TRUE(is_partial(y * distribute_tensor(at::ones({6}, at::kLong), mesh, {Replicate()})));
  });
}

// The same call once with an ordinary number and once with another: one is not decided by the other.
TEST(PartialFactors, TheCacheSeparatesFiniteFromInfinite) {
  on(2, [](const DeviceMesh& mesh) {
    const at::Tensor a = at::tensor({1.0, 0.0}), b = at::tensor({0.0, 2.0}), full = a + b;
    const at::Tensor y = sum_of(mesh, a, b);
    for (const double factor : {2.0, kInf, 2.0, -kInf, 0.0, 1e-320, 3.0}) {
      EXPECT_TRUE(same(whole(y * factor), full * factor)) << factor;
      EXPECT_TRUE(same(whole(y / factor), full / factor)) << factor;
      EXPECT_TRUE(same(whole(at::mul(y, at::Scalar(factor))), full * factor)) << factor;
      EXPECT_TRUE(same(whole(at::div(y, at::Scalar(factor))), full / factor)) << factor;
    }
  });
}

// Half has no number above 65504: a factor of 1e5 is an infinity.
TEST(PartialFactors, ANumberIsFiniteInTheTypeOfTheResult) {
  on(2, [](const DeviceMesh& mesh) {
    for (const auto type : {at::kHalf, at::kBFloat16, at::kFloat}) {
      const at::Tensor a = at::tensor({1.0, 0.0}).to(type), b = at::tensor({0.0, 2.0}).to(type), full = a + b;
      for (const double factor : {1e5, 1e-6, 1e39, 1e-42}) {
        EXPECT_TRUE(same(whole(sum_of(mesh, a, b) * factor), full * factor)) << type << " " << factor;
        EXPECT_TRUE(same(whole(sum_of(mesh, a, b) / factor), full / factor)) << type << " " << factor;
      }
    }
  });
}

// ---- Partial sums of integers

TEST(PartialIntegers, AveragesAndInterpolationsAreThoseOfTheSum) {
  on(3, [](const DeviceMesh& mesh) {
    const at::Tensor a = at::arange(2 * 3 * 6 * 6, at::kLong).remainder(11).view({2, 3, 6, 6});
    const at::Tensor b = at::arange(2 * 3 * 6 * 6, at::kLong).remainder(7).sub(3).view({2, 3, 6, 6}), full = a + b;
    const auto y = [&] { return sum_of(mesh, a, b); };
    EXPECT_TRUE(same(whole(at::avg_pool2d(y(), {2, 2})), at::avg_pool2d(full, {2, 2})));
    EXPECT_TRUE(same(whole(at::avg_pool2d(y(), {3, 3}, {1, 1}, {1, 1})), at::avg_pool2d(full, {3, 3}, {1, 1}, {1, 1})));
    EXPECT_TRUE(same(whole(at::avg_pool3d(y(), {2, 2, 2})), at::avg_pool3d(full, {2, 2, 2})));
    EXPECT_TRUE(same(whole(at::avg_pool1d(y().select(0, 0), {2})), at::avg_pool1d(full.select(0, 0), {2})));
    EXPECT_TRUE(same(whole(y() / 2), full / 2));
    EXPECT_TRUE(same(whole(at::mean(y(), at::kDouble)), at::mean(full, at::kDouble)));
    EXPECT_TRUE(same(whole(y() * 3), full * 3));
    const auto bytes = [&](const at::Tensor& tensor) { return tensor.abs().mul(9).to(at::kByte); };
    const at::Tensor u = sum_of(mesh, bytes(a), bytes(b)), plain = bytes(a) + bytes(b);
    const auto sizes = std::vector<std::int64_t>{4, 5};
    const std::string error = error_of([&] { at::upsample_bilinear2d(plain, sizes, false); });
    if (error == "no error") {
      EXPECT_TRUE(same(whole(at::upsample_bilinear2d(u, sizes, false)), at::upsample_bilinear2d(plain, sizes, false)));
      EXPECT_TRUE(same(whole(at::upsample_nearest2d(u, sizes)), at::upsample_nearest2d(plain, sizes)));
    }
  });
}

// ---- tensors without elements

struct Reduction {
  const char* name;
  std::function<std::vector<at::Tensor>(const at::Tensor&)> run;
};

template <class... T>
std::vector<at::Tensor> listed(const std::tuple<T...>& results) {
  return std::apply([](const auto&... one) { return std::vector<at::Tensor>{one...}; }, results);
}

std::vector<Reduction> reductions() {
  using T = const at::Tensor&;
  std::vector<Reduction> all;
  const auto one = [&](const char* name, std::function<at::Tensor(T)> run) {
    all.push_back({name, [run = std::move(run)](T x) { return std::vector<at::Tensor>{run(x)}; }});
  };
  one("max()", [](T x) { return x.max(); });
  one("min()", [](T x) { return x.min(); });
  one("argmax()", [](T x) { return x.argmax(); });
  one("argmin()", [](T x) { return x.argmin(); });
  one("all()", [](T x) { return x.all(); });
  one("any()", [](T x) { return x.any(); });
  one("sum()", [](T x) { return x.sum(); });
  one("prod()", [](T x) { return x.prod(); });
  one("mean()", [](T x) { return x.mean(); });
  one("median()", [](T x) { return x.median(); });
  one("nanmedian()", [](T x) { return x.nanmedian(); });
  one("norm()", [](T x) { return x.norm(); });
  one("norm(inf)", [](T x) { return x.norm(kInf); });
  one("var()", [](T x) { return x.var(); });
  one("std()", [](T x) { return x.std(); });
  one("nansum()", [](T x) { return x.nansum(); });
  one("count_nonzero()", [](T x) { return x.count_nonzero(); });
  one("mse_loss", [](T x) { return at::mse_loss(x, x); });
  one("mse_loss(sum)", [](T x) { return at::mse_loss(x, x, at::Reduction::Sum); });
  all.push_back({"aminmax()", [](T x) { return listed(x.aminmax()); }});
  for (const std::int64_t d : {0, 1}) {
    for (const bool keep : {false, true}) {
      one("amax(dim)", [=](T x) { return x.amax({d}, keep); });
      one("amin(dim)", [=](T x) { return x.amin({d}, keep); });
      one("argmax(dim)", [=](T x) { return x.argmax(d, keep); });
      one("argmin(dim)", [=](T x) { return x.argmin(d, keep); });
      one("all(dim)", [=](T x) { return x.all(d, keep); });
      one("any(dim)", [=](T x) { return x.any(d, keep); });
      one("sum(dim)", [=](T x) { return x.sum({d}, keep); });
      one("prod(dim)", [=](T x) { return x.prod(d, keep); });
      one("mean(dim)", [=](T x) { return x.mean({d}, keep); });
      one("logsumexp", [=](T x) { return x.logsumexp({d}, keep); });
      one("norm(dim)", [=](T x) { return x.norm(2, {d}, keep); });
      one("norm(dim,inf)", [=](T x) { return x.norm(kInf, {d}, keep); });
      one("vector_norm(dim)", [=](T x) { return at::linalg_vector_norm(x, 2, at::IntArrayRef{d}, keep); });
      one("var(dim)", [=](T x) { return x.var(at::IntArrayRef{d}, true, keep); });
      all.push_back({"max(dim)", [=](T x) { return listed(x.max(d, keep)); }});
      all.push_back({"min(dim)", [=](T x) { return listed(x.min(d, keep)); }});
      all.push_back({"median(dim)", [=](T x) { return listed(x.median(d, keep)); }});
      all.push_back({"nanmedian(dim)", [=](T x) { return listed(x.nanmedian(d, keep)); }});
      all.push_back({"mode", [=](T x) { return listed(x.mode(d, keep)); }});
      all.push_back({"kthvalue", [=](T x) { return listed(x.kthvalue(1, d, keep)); }});
      all.push_back({"var_mean", [=](T x) { return listed(at::var_mean(x, at::IntArrayRef{d}, true, keep)); }});
      all.push_back({"aminmax(dim)", [=](T x) { return listed(x.aminmax(d, keep)); }});
    }
    one("cumsum", [=](T x) { return x.cumsum(d); });
    one("cumprod", [=](T x) { return x.cumprod(d); });
    all.push_back({"cummax", [=](T x) { return listed(x.cummax(d)); }});
    all.push_back({"cummin", [=](T x) { return listed(x.cummin(d)); }});
    one("logcumsumexp", [=](T x) { return x.logcumsumexp(d); });
    one("softmax", [=](T x) { return x.softmax(d); });
    all.push_back({"sort", [=](T x) { return listed(x.sort(d)); }});
    all.push_back({"topk", [=](T x) { return listed(x.topk(0, d)); }});
  }
  return all;
}

// The text of an error takes libtorch a while: it is asked for only where it is shown.
bool throws(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception&) {
    return true;
  }
  return false;
}

TEST(EmptyTensors, ReductionsGiveWhatPlainGives) {
  std::mutex mutex;
  std::set<std::string> wrong;
  on(2, [&](const DeviceMesh& mesh) {
    for (const auto type : {at::kFloat, at::kHalf, at::kLong, at::kByte, at::kBool, at::kComplexFloat}) {
      for (const auto& sizes : std::vector<std::vector<std::int64_t>>{{0, 3}, {3, 0}}) {
        const at::Tensor plain = at::empty(sizes, type);
        for (const Placement& placement : {Placement(Shard(0)), Placement(Shard(1)), Placement(Partial())}) {
          if (placement.is_partial() && type == at::kBool) continue;
          const at::Tensor x = distribute_tensor(plain, mesh, {placement});
          for (const Reduction& reduction : reductions()) {
            std::vector<at::Tensor> expected, got;
            const bool refused = throws([&] { expected = reduction.run(plain); });
            const bool refuses = throws([&] { got = reduction.run(x); });
            std::string problem;
            // Where a kernel lacks the type, plain says so even if there is nothing to compute; then ours is not run.
            const bool nothing =
                std::all_of(got.begin(), got.end(), [](const at::Tensor& one) { return one.numel() == 0; });
            if (refused && !refuses && nothing) {
              const std::string error = error_of([&] { reduction.run(plain); });
              const bool type_is_missing = error.find("not implemented for") != std::string::npos ||
                                           error.find("Expected floating point type") != std::string::npos;
              if (type_is_missing) continue;
            }
            if (refused != refuses) {
              problem = refused ? "plain refuses it" : error_of([&] { got = reduction.run(x); }).substr(0, 160);
            }
            for (std::size_t i = 0; problem.empty() && i < expected.size(); ++i) {
              if (!same(whole(got[i]), expected[i])) problem = "another value";
            }
            if (problem.empty()) continue;
            const std::lock_guard lock(mutex);
            wrong.insert(std::string(reduction.name) + " of " + DTensor(x).spec().to_string() + ": " + problem);
          }
        }
      }
    }
  });
  std::size_t shown = 0;
  for (const std::string& one : wrong) {
    if (++shown <= 40) ADD_FAILURE() << one;
  }
  EXPECT_EQ(wrong.size(), 0u);
}

}  // namespace
}  // namespace dtensor
