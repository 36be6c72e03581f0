#pragma once

#include <algorithm>

#include "dtensor/core/plan_impl.h"

// What ranks hold before and after a step. It is a product over the tensor dims, so each tensor dim is looked at along
// its own mesh dims only.
namespace dtensor {

bool one_interval(const DimLayout& dim);
Interval interval_of(const Factor& factor, const Dims& at);
inline std::int64_t common_size(const Interval& a, const Interval& b) {
  return std::max<std::int64_t>(0, std::min(a.end, b.end) - std::max(a.begin, b.begin));
}
std::int64_t held_size(const DimLayout& dim, const Dims& at);
std::int64_t held_size(const Spec& spec, const Dims& at);
// How many elements are held both by a place under one spec and by a place under another.
std::int64_t common_size(const Spec& a, const Dims& at_a, const Spec& b, const Dims& at_b);

// Elements that a place holds before, after, and both times.
struct Held3 {
  std::int64_t before = 1;
  std::int64_t after = 1;
  std::int64_t common = 1;
};

// All coordinates along some mesh dims, or a few along each when they are too many.
class Census {
 public:
  Census(const Dims& shape, std::uint32_t mask, std::int64_t most) : at_(shape.size()), strides_(shape.size()) {
    for (std::size_t m = 0; m < shape.size(); ++m) {
      if (mask >> m & 1) {
        dims_.push_back(static_cast<std::int64_t>(m));
        population_ = scaled(population_, shape[m], 1);
      } else {
        copies_ = scaled(copies_, shape[m], 1);
      }
    }
    exact_ = population_ <= most;
    for (std::int64_t m : dims_) {
      Dims list;
      const std::int64_t few[] = {0, 1, shape[m] / 2, shape[m] - 1};
      for (std::int64_t i = 0; i < (exact_ ? shape[m] : 4); ++i) {
        const std::int64_t index = exact_ ? i : few[i];
        if (list.empty() || index > list.back()) list.push_back(index);
      }
      indices_.push_back(std::move(list));
    }
    for (std::size_t j = dims_.size(); j-- > 0;) {
      strides_[dims_[j]] = sample_;
      sample_ *= static_cast<std::int64_t>(indices_[j].size());
    }
  }

  bool exact() const { return exact_; }
  std::size_t size() const { return static_cast<std::size_t>(sample_); }
  const MeshDims& dims() const { return dims_; }
  // The indices looked at along the j-th of the dims.
  const Dims& indices(std::size_t j) const { return indices_[j]; }
  // Between places that differ by one in the list of indices of a mesh dim; 0 for mesh dims that are not looked at.
  std::int64_t stride(std::int64_t m) const { return strides_[m]; }
  // What a sum over the sample stands for.
  std::int64_t whole(std::int64_t sum) const { return scaled(scaled(sum, population_, sample_), copies_, 1); }

  template <class Fn>
  void each(Fn fn) {
    Dims digits(dims_.size());
    for (std::size_t j = 0; j < dims_.size(); ++j) at_[dims_[j]] = indices_[j][0];
    for (std::size_t i = 0; i < size(); ++i) {
      fn(i, static_cast<const Dims&>(at_));
      for (std::size_t j = dims_.size(); j-- > 0;) {
        const bool again = ++digits[j] == static_cast<std::int64_t>(indices_[j].size());
        if (again) digits[j] = 0;
        at_[dims_[j]] = indices_[j][digits[j]];
        if (!again) break;
      }
    }
  }

 private:
  Dims at_;
  Dims strides_;
  MeshDims dims_;
  InlineVec<Dims, 4> indices_;
  std::int64_t population_ = 1;
  std::int64_t sample_ = 1;
  std::int64_t copies_ = 1;
  bool exact_ = true;
};

// What the places of a census hold in a step; of what is held afterwards, what all ranks along some mesh dims hold
// together.
class Holdings {
 public:
  Holdings(const Step& step, Census& census, std::uint32_t together = 0);
  const Held3& operator[](std::size_t i) const { return held_[i]; }

 private:
  void add_intervals(const Factor& before, const Factor& after);
  // One by one, each combination of the indices that matter once.
  void add_sets(const DimLayout& before, const DimLayout& after);

  const StepKind kind_;
  Census& census_;
  const std::uint32_t together_;
  std::vector<Held3> held_;
};

}  // namespace dtensor
