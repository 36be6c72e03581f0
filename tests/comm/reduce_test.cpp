#include "dtensor/comm/reduce.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <cstring>
#include <limits>
#include <vector>

#include "tests/comm/errors.h"

namespace dtensor {
namespace {

using c10::ScalarType;
using testing::error_of;

template <class T>
std::vector<T> reduce(ReduceOp op, ScalarType dtype, const std::vector<std::vector<T>>& parts) {
  std::vector<const void*> pointers;
  for (const auto& part : parts) pointers.push_back(part.data());
  std::vector<T> out(parts[0].size());
  reduce_parts(op, dtype, out.data(), pointers, static_cast<std::int64_t>(out.size()));
  return out;
}

template <class T>
T reduce_one(ReduceOp op, ScalarType dtype, const std::vector<T>& values) {
  std::vector<std::vector<T>> parts;
  for (T value : values) parts.push_back({value});
  return reduce(op, dtype, parts)[0];
}

template <class T>
void check_integers(ScalarType dtype) {
  const std::vector<T> v = {T(6), T(3), T(12)};
  EXPECT_EQ(reduce_one<T>(ReduceOp::kSum, dtype, v), T(21));
  EXPECT_EQ(reduce_one<T>(ReduceOp::kProduct, dtype, v), T(216));
  EXPECT_EQ(reduce_one<T>(ReduceOp::kMin, dtype, v), T(3));
  EXPECT_EQ(reduce_one<T>(ReduceOp::kMax, dtype, v), T(12));
  EXPECT_EQ(reduce_one<T>(ReduceOp::kAnd, dtype, v), T(0));
  EXPECT_EQ(reduce_one<T>(ReduceOp::kOr, dtype, v), T(15));
  EXPECT_EQ(reduce_one<T>(ReduceOp::kXor, dtype, v), T(9));
  const T top = std::numeric_limits<T>::max(), bottom = std::numeric_limits<T>::min();
  EXPECT_EQ(reduce_one<T>(ReduceOp::kSum, dtype, {top, T(1)}), bottom);
  EXPECT_EQ(reduce_one<T>(ReduceOp::kProduct, dtype, {top, T(2)}), T(-2));
  EXPECT_EQ(reduce_one<T>(ReduceOp::kMin, dtype, {top, bottom}), bottom);
}

TEST(Reduce, Integers) {
  check_integers<std::int64_t>(ScalarType::Long);
  check_integers<std::int32_t>(ScalarType::Int);
  check_integers<std::int16_t>(ScalarType::Short);
  check_integers<std::int8_t>(ScalarType::Char);
  check_integers<std::uint8_t>(ScalarType::Byte);
}

template <class T>
void check_floats(ScalarType dtype) {
  const std::vector<T> v = {T(1.5f), T(-2.0f), T(4.0f), T(0.5f)};
  EXPECT_EQ(float(reduce_one<T>(ReduceOp::kSum, dtype, v)), 4.0f);
  EXPECT_EQ(float(reduce_one<T>(ReduceOp::kAvg, dtype, v)), 1.0f);
  EXPECT_EQ(float(reduce_one<T>(ReduceOp::kProduct, dtype, v)), -6.0f);
  EXPECT_EQ(float(reduce_one<T>(ReduceOp::kMin, dtype, v)), -2.0f);
  EXPECT_EQ(float(reduce_one<T>(ReduceOp::kMax, dtype, v)), 4.0f);
  const T nan = std::numeric_limits<T>::quiet_NaN();
  for (const auto op : {ReduceOp::kMin, ReduceOp::kMax}) {
    EXPECT_TRUE(std::isnan(float(reduce_one<T>(op, dtype, {nan, T(1.f), T(2.f)}))));
    EXPECT_TRUE(std::isnan(float(reduce_one<T>(op, dtype, {T(1.f), nan, T(2.f)}))));
    EXPECT_TRUE(std::isnan(float(reduce_one<T>(op, dtype, {T(1.f), T(2.f), nan}))));
  }
  const T top = std::numeric_limits<T>::max();
  const T inf = std::numeric_limits<T>::infinity();
  for (const std::size_t n : {2, 3, 5, 7}) {
    for (const T value : {top, T(-top)}) {
      const auto average = double(reduce_one<T>(ReduceOp::kAvg, dtype, std::vector<T>(n, value)));
      EXPECT_TRUE(std::isfinite(average)) << n;
      EXPECT_DOUBLE_EQ(average, double(value)) << n;
    }
  }
  EXPECT_EQ(float(reduce_one<T>(ReduceOp::kAvg, dtype, {inf, T(1.f)})), std::numeric_limits<float>::infinity());
  EXPECT_EQ(float(reduce_one<T>(ReduceOp::kAvg, dtype, {top, top, T(-inf)})), -std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(float(reduce_one<T>(ReduceOp::kAvg, dtype, {inf, T(-inf)}))));
}

TEST(Reduce, Floats) {
  check_floats<double>(ScalarType::Double);
  check_floats<float>(ScalarType::Float);
  check_floats<c10::Half>(ScalarType::Half);
  check_floats<c10::BFloat16>(ScalarType::BFloat16);
}

TEST(Reduce, HalfTypesAccumulateInFloat) {
  // 256 + 1 is 256 in bf16 and 2048 + 1 is 2048 in f16: rounded after every step, the sums would not move.
  EXPECT_EQ(float(reduce_one<c10::BFloat16>(ReduceOp::kSum, ScalarType::BFloat16, {256.f, 1.f, 1.f})), 258.f);
  EXPECT_EQ(float(reduce_one<c10::Half>(ReduceOp::kSum, ScalarType::Half, {2048.f, 1.f, 1.f})), 2050.f);
}

TEST(Reduce, OrderIsThatOfTheParts) {
  EXPECT_EQ(reduce_one<float>(ReduceOp::kSum, ScalarType::Float, {1e8f, -1e8f, 1.f}), 1.f);
  EXPECT_EQ(reduce_one<float>(ReduceOp::kSum, ScalarType::Float, {1.f, 1e8f, -1e8f}), 0.f);
}

TEST(Reduce, Bools) {
  // Bytes other than 0 and 1 are true.
  const std::vector<std::vector<std::uint8_t>> parts = {{0, 0, 1, 2}, {0, 1, 0, 4}};
  using Bytes = std::vector<std::uint8_t>;
  EXPECT_EQ(reduce(ReduceOp::kAnd, ScalarType::Bool, parts), (Bytes{0, 0, 0, 1}));
  EXPECT_EQ(reduce(ReduceOp::kMin, ScalarType::Bool, parts), (Bytes{0, 0, 0, 1}));
  EXPECT_EQ(reduce(ReduceOp::kOr, ScalarType::Bool, parts), (Bytes{0, 1, 1, 1}));
  EXPECT_EQ(reduce(ReduceOp::kMax, ScalarType::Bool, parts), (Bytes{0, 1, 1, 1}));
  EXPECT_EQ(reduce(ReduceOp::kXor, ScalarType::Bool, parts), (Bytes{0, 1, 1, 0}));
}

TEST(Reduce, Complex) {
  using C = std::complex<float>;
  using D = std::complex<double>;
  EXPECT_EQ(reduce_one<C>(ReduceOp::kSum, ScalarType::ComplexFloat, {{1, 2}, {3, -4}}), C(4, -2));
  EXPECT_EQ(reduce_one<C>(ReduceOp::kAvg, ScalarType::ComplexFloat, {{1, 2}, {3, -4}}), C(2, -1));
  EXPECT_EQ(reduce_one<C>(ReduceOp::kProduct, ScalarType::ComplexFloat, {{1, 2}, {3, -4}, {0, 1}}), C(-2, 11));
  EXPECT_EQ(reduce_one<D>(ReduceOp::kProduct, ScalarType::ComplexDouble, {{1, 2}, {3, -4}}), D(11, 2));
  const double top = std::numeric_limits<double>::max();
  EXPECT_EQ(reduce_one<D>(ReduceOp::kAvg, ScalarType::ComplexDouble, {{top, 1}, {top, 3}}), D(top, 2));
}

// Every length around the block size, with `out` apart from and equal to each of the parts.
TEST(Reduce, LengthsAndAliases) {
  for (const std::int64_t count : {0, 1, 3, 1023, 1024, 1025, 5000}) {
    for (int alias = -1; alias < 3; ++alias) {
      std::vector<std::vector<double>> parts(3, std::vector<double>(static_cast<std::size_t>(count) + 1, -7.0));
      for (std::int64_t i = 0; i < count; ++i) {
        for (int p = 0; p < 3; ++p) parts[std::size_t(p)][std::size_t(i)] = double(i + 1) * std::pow(10.0, p);
      }
      std::vector<double> fresh(static_cast<std::size_t>(count) + 1, -7.0);
      double* out = alias < 0 ? fresh.data() : parts[std::size_t(alias)].data();
      const std::vector<const void*> pointers = {parts[0].data(), parts[1].data(), parts[2].data()};
      reduce_parts(ReduceOp::kSum, ScalarType::Double, out, pointers, count);
      for (std::int64_t i = 0; i < count; ++i) ASSERT_EQ(out[i], double(i + 1) * 111.0) << i;
      EXPECT_EQ(out[count], -7.0) << "written past the end";
    }
  }
}

TEST(Reduce, BlockOfDoublesWithOneOverflowIsAveragedElsewhereAsUsual) {
  const double top = std::numeric_limits<double>::max();
  std::vector<double> a(2000, 1.0), b(2000, 2.0);
  a[1500] = b[1500] = top;
  const auto out = reduce<double>(ReduceOp::kAvg, ScalarType::Double, {a, b});
  for (std::size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], i == 1500 ? top : 1.5) << i;
}

// On tensors, as GPUs do it: what the loops over memory give, to the rounding of a sum.
TEST(Reduce, TensorsAreReducedAlike) {
  for (const auto type : {ScalarType::Double, ScalarType::Float, ScalarType::Half, ScalarType::BFloat16,
                          ScalarType::Long, ScalarType::Byte, ScalarType::Bool, ScalarType::ComplexFloat}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct,
                              ReduceOp::kAnd, ReduceOp::kOr, ReduceOp::kXor}) {
      if (!can_reduce(type, op)) continue;
      SCOPED_TRACE(std::string(to_string(op)) + " of " + c10::toString(type));
      std::vector<at::Tensor> parts;
      std::vector<const void*> memory;
      for (int i = 0; i < 3; ++i) {
        parts.push_back(at::arange(20, at::kDouble).mul(i + 1).remainder(7).to(type));
        memory.push_back(parts.back().data_ptr());
      }
      const at::Tensor expected = at::empty_like(parts[0]);
      reduce_parts(op, type, expected.data_ptr(), memory, 20);
      const at::Tensor got = reduce_tensors(op, parts);
      EXPECT_EQ(got.scalar_type(), type);
      EXPECT_TRUE(at::allclose(got.to(at::kComplexDouble), expected.to(at::kComplexDouble), 1e-6, 0))
          << got << expected;
    }
  }
  const double top = std::numeric_limits<double>::max();
  const at::Tensor large = at::full({2}, top, at::kDouble);
  EXPECT_EQ(reduce_tensors(ReduceOp::kAvg, {large, large})[0].item<double>(), top);
}

TEST(Reduce, RefusesWhatATypeDoesNotHave) {
  EXPECT_FALSE(can_reduce(ScalarType::Long, ReduceOp::kAvg));
  EXPECT_FALSE(can_reduce(ScalarType::Bool, ReduceOp::kSum));
  EXPECT_FALSE(can_reduce(ScalarType::ComplexFloat, ReduceOp::kMax));
  EXPECT_FALSE(can_reduce(ScalarType::Float, ReduceOp::kXor));
  EXPECT_FALSE(can_reduce(ScalarType::QInt8, ReduceOp::kSum));
  EXPECT_TRUE(can_reduce(ScalarType::Bool, ReduceOp::kXor));
  EXPECT_EQ(error_of([] {
              reduce_one<std::int64_t>(ReduceOp::kAvg, ScalarType::Long, {1, 2});
            }),
            "[reduce] values of this type have no such reduction; got avg of Long");
}

}  // namespace
}  // namespace dtensor
