#include "dtensor/core/layout.h"

#include <algorithm>

#include "dtensor/core/checked.h"

namespace dtensor {
namespace {

using Mode = Layout::Mode;
using Modes = Layout::Modes;

std::string mode_list(const Modes& modes, std::int64_t Mode::*field) {
  std::string text = "(";
  for (std::size_t i = 0; i < modes.size(); ++i) text += (i ? "," : "") + std::to_string(modes[i].*field);
  return text + ")";
}

Modes zip_modes(const Dims& sizes, const Dims& strides) {
  if (sizes.size() != strides.size()) {
    fail_invalid("layout",
                 {.what = "sizes and strides differ in number",
                  .got = std::to_string(sizes.size()) + " sizes and " + std::to_string(strides.size()) + " strides",
                  .expected = "one stride for each size"});
  }
  Modes modes;
  for (std::size_t i = 0; i < sizes.size(); ++i) modes.push_back({sizes[i], strides[i]});
  return modes;
}

}  // namespace

Layout::Layout(Modes modes) : modes_(std::move(modes)) {
  std::int64_t last = 0;
  for (const Mode& mode : modes_) {
    if (mode.size < 1 || mode.stride < 0) {
      fail_invalid("layout", {.what = "a mode has no meaning",
                              .got = std::to_string(mode.size) + ":" + std::to_string(mode.stride),
                              .expected = "size >= 1 and stride >= 0"});
    }
    std::int64_t reach = 0;
    if (__builtin_mul_overflow(numel_, mode.size, &numel_) || __builtin_mul_overflow(mode.size, mode.stride, &reach) ||
        __builtin_add_overflow(last, reach, &last)) {
      fail_invalid("layout", {.what = "the sizes overflow", .got = to_string(), .expected = "offsets below 2^63"});
    }
  }
}

Layout::Layout(const Dims& sizes, const Dims& strides) : Layout(zip_modes(sizes, strides)) {}

Layout Layout::row_major(const Dims& sizes) {
  Modes modes;
  modes.resize(sizes.size(), Mode{1, 1});
  std::int64_t stride = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    modes[i] = {sizes[i], stride};
    const auto next = checked_mul(stride, std::max<std::int64_t>(sizes[i], 1));
    if (!next) fail_invalid("layout", {.what = "the sizes overflow", .expected = "a product below 2^63"});
    stride = *next;
  }
  return Layout(std::move(modes));
}

std::int64_t Layout::cosize() const noexcept {
  std::int64_t last = 0;
  for (const Mode& mode : modes_) last += (mode.size - 1) * mode.stride;
  return last + 1;
}

std::int64_t Layout::operator()(std::int64_t index) const noexcept {
  std::int64_t result = 0;
  for (std::size_t i = modes_.size(); i-- > 0;) {
    result += index % modes_[i].size * modes_[i].stride;
    index /= modes_[i].size;
  }
  return result;
}

Dims Layout::coordinate(std::int64_t index) const {
  Dims result(modes_.size());
  for (std::size_t i = modes_.size(); i-- > 0;) {
    result[i] = index % modes_[i].size;
    index /= modes_[i].size;
  }
  return result;
}

std::int64_t Layout::offset(const Dims& coordinate) const noexcept {
  std::int64_t result = 0;
  for (std::size_t i = 0; i < modes_.size(); ++i) result += coordinate[i] * modes_[i].stride;
  return result;
}

std::vector<std::int64_t> Layout::offsets() const {
  std::vector<std::int64_t> result = {0};
  result.reserve(static_cast<std::size_t>(numel_));
  for (std::size_t i = modes_.size(); i-- > 0;) {
    const std::size_t block = result.size();
    for (std::int64_t step = 1; step < modes_[i].size; ++step) {
      for (std::size_t j = 0; j < block; ++j) result.push_back(result[j] + step * modes_[i].stride);
    }
  }
  return result;
}

bool Layout::injective() const {
  Modes sorted = modes_;
  std::sort(sorted.begin(), sorted.end(), [](const Mode& a, const Mode& b) { return a.stride < b.stride; });
  std::int64_t reach = 0;
  for (const Mode& mode : sorted) {
    if (mode.size == 1) continue;
    if (mode.stride <= reach) return false;
    reach += (mode.size - 1) * mode.stride;
  }
  return true;
}

std::string Layout::to_string() const {
  return mode_list(modes_, &Mode::size) + ":" + mode_list(modes_, &Mode::stride);
}

Layout coalesce(const Layout& a) {
  Modes modes;
  for (const Mode& mode : a.modes()) {
    if (mode.size == 1) continue;
    if (!modes.empty() && modes.back().stride == mode.size * mode.stride) {
      modes.back() = {modes.back().size * mode.size, mode.stride};
    } else {
      modes.push_back(mode);
    }
  }
  if (modes.empty()) modes.push_back({1, 1});
  return Layout(std::move(modes));
}

OrReason<Layout> compose(const Layout& a, const Layout& b) {
  if (b.cosize() > a.numel()) {
    return Reason{b.to_string() + " reaches index " + std::to_string(b.cosize() - 1) + " of " + a.to_string() +
                  ", which has " + std::to_string(a.numel())};
  }
  const Layout base = coalesce(a);
  const Modes& digits = base.modes();
  // How far each digit of `a` is driven by all modes of b together; a sum past its size would carry into the next one.
  Dims reach(digits.size());
  Modes result;
  for (const Mode& mode : b.modes()) {
    std::int64_t left = mode.size;
    std::int64_t stride = mode.stride;
    Modes pieces;  // innermost first
    for (std::size_t k = digits.size(); k-- > 0 && left > 1;) {
      const std::int64_t size = digits[k].size;
      if (stride % size == 0 && stride > 0) {
        stride /= size;
        continue;
      }
      if (stride > 0 && size % stride != 0 && k != 0) {
        return Reason{"stride " + std::to_string(mode.stride) + " does not fit the digits of " + base.to_string()};
      }
      const std::int64_t room = stride == 0 ? left : ceil_div(size, stride);
      const std::int64_t take = std::min(left, room);
      if (left % take != 0) {
        return Reason{"size " + std::to_string(mode.size) + " does not fit the digits of " + base.to_string()};
      }
      pieces.push_back({take, stride * digits[k].stride});
      reach[k] += (take - 1) * stride;
      if (reach[k] >= size) return Reason{b.to_string() + " carries across the digits of " + base.to_string()};
      left /= take;
      stride = 1;
    }
    if (left > 1) return Reason{b.to_string() + " does not fit into " + base.to_string()};
    if (pieces.empty()) pieces.push_back({1, 0});
    result.append(std::make_reverse_iterator(pieces.end()), std::make_reverse_iterator(pieces.begin()));
  }
  return Layout(std::move(result));
}

OrReason<Layout> complement(const Layout& a, std::int64_t total) {
  Modes sorted = a.modes();
  std::sort(sorted.begin(), sorted.end(), [](const Mode& x, const Mode& y) { return x.stride < y.stride; });
  Modes steps;  // innermost first
  std::int64_t covered = 1;
  for (const Mode& mode : sorted) {
    if (mode.size == 1) continue;
    if (mode.stride == 0 || mode.stride % covered != 0) {
      return Reason{a.to_string() + " does not tile: stride " + std::to_string(mode.stride) + " is not a multiple of " +
                    std::to_string(covered)};
    }
    if (mode.stride > covered) steps.push_back({mode.stride / covered, covered});
    covered = mode.stride * mode.size;
  }
  if (total % covered != 0) {
    return Reason{a.to_string() + " does not tile " + std::to_string(total) + " offsets"};
  }
  if (total > covered) steps.push_back({total / covered, covered});
  Modes modes(std::make_reverse_iterator(steps.end()), std::make_reverse_iterator(steps.begin()));
  return Layout(std::move(modes));
}

OrReason<Layout> divide(const Layout& a, const Layout& tile) {
  const auto rest = complement(tile, a.numel());
  if (!rest) return Reason{rest.reason()};
  return compose(a, concat(*rest, tile));
}

Layout concat(const Layout& a, const Layout& b) {
  Modes modes = a.modes();
  modes.append(b.modes().begin(), b.modes().end());
  return Layout(std::move(modes));
}

}  // namespace dtensor
