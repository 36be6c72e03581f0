#include <ATen/ATen.h>

#include "tests/testing/chain.h"

namespace dtensor::testing {
namespace {

using sweep::Random;
using T = const Tensors&;

std::string name(std::size_t i) { return "t" + std::to_string(i); }
std::string text(std::int64_t n) { return std::to_string(n); }
std::string text(double n) { return std::to_string(n); }
std::string text(const std::vector<std::int64_t>& list) {
  std::string result = "{";
  for (const std::int64_t n : list) result += (result.size() > 1 ? "," : "") + std::to_string(n);
  return result + "}";
}

double number(Random& random) { return (static_cast<double>(random.below(17)) - 8) / 4; }

// Another shape with as many elements.
std::vector<std::int64_t> reshaped(Random& random, const at::Tensor& tensor) {
  std::vector<std::int64_t> result;
  std::int64_t left = tensor.numel();
  if (left == 0) return tensor.sizes().vec();
  while (result.size() < 3 && left > 1) {
    std::int64_t size = 1 + random.below(left);
    while (left % size != 0) --size;
    result.push_back(size);
    left /= size;
  }
  if (left > 1 || result.empty()) result.push_back(left);
  return result;
}

ChainStep unary(Random& random, T pool, std::size_t i) {
  const double c = number(random);
  const std::string x = name(i);
  switch (random.below(14)) {
    case 0:
      return {"-" + x, [i](T t) { return -t[i]; }};
    case 1:
      return {x + ".tanh()", [i](T t) { return t[i].tanh(); }};
    case 2:
      return {x + ".sigmoid()", [i](T t) { return t[i].sigmoid(); }};
    case 3:
      return {x + ".sin()", [i](T t) { return t[i].sin(); }};
    case 4:
      return {x + " * " + text(c), [i, c](T t) { return t[i] * c; }};
    case 5:
      return {x + " + " + text(c), [i, c](T t) { return t[i] + c; }};
    case 6:
      return {text(c) + " - " + x, [i, c](T t) { return c - t[i]; }};
    case 7:
      return {x + ".pow(2)", [i](T t) { return t[i].pow(2); }};
    case 8:
      return {x + ".clone()", [i](T t) { return t[i].clone(); }};
    case 9:
      return {x + ".relu()", [i](T t) { return t[i].relu(); }, true};
    case 10:
      return {x + ".clamp(-1, 1)", [i](T t) { return t[i].clamp(-1, 1); }, true};
    case 11:
      return {x + ".abs()", [i](T t) { return t[i].abs(); }, true};
    case 12:
      return {"softplus(" + x + ")", [i](T t) { return at::softplus(t[i]); }};
    default:
      break;
  }
  if (pool[i].dim() < 2) return {x + " / 2", [i](T t) { return t[i] / 2; }};
  return {x + ".tril()", [i](T t) { return t[i].tril(); }};
}

ChainStep binary(Random& random, std::size_t i, std::size_t j) {
  const std::string x = name(i), y = name(j);
  switch (random.below(9)) {
    case 0:
      return {x + " + " + y, [i, j](T t) { return t[i] + t[j]; }};
    case 1:
      return {x + " - " + y, [i, j](T t) { return t[i] - t[j]; }};
    case 2:
      return {x + " * " + y, [i, j](T t) { return t[i] * t[j]; }, false, true};
    case 3:
      return {x + " / (" + y + "^2 + 1)", [i, j](T t) { return t[i] / (t[j] * t[j] + 1); }, false, true};
    case 4:
      return {"maximum(" + x + ", " + y + ")", [i, j](T t) { return at::maximum(t[i], t[j]); }, true};
    case 5:
      return {"add(" + x + ", " + y + ", -0.5)", [i, j](T t) { return at::add(t[i], t[j], -0.5); }};
    case 6:
      return {"lerp(" + x + ", " + y + ", 0.25)", [i, j](T t) { return at::lerp(t[i], t[j], 0.25); }, false, true};
    case 7:
      return {"matmul(" + x + ", " + y + ")", [i, j](T t) { return at::matmul(t[i], t[j]); }, false, true};
    default:
      return {"matmul(" + x + ", " + y + "^T)", [i, j](T t) { return at::matmul(t[i], t[j].transpose(-1, -2)); }, false,
              true};
  }
}

ChainStep reduction(Random& random, T pool, std::size_t i) {
  const std::string x = name(i);
  const std::int64_t d = random.below(std::max<std::int64_t>(1, pool[i].dim()));
  const bool keep = random.chance(2);
  const std::string at = "(" + text(d) + (keep ? ", keep)" : ")");
  switch (random.below(12)) {
    case 0:
      return {x + ".sum()", [i](T t) { return t[i].sum(); }};
    case 1:
      return {x + ".sum" + at, [=](T t) { return t[i].sum(d, keep); }};
    case 2:
      return {x + ".mean" + at, [=](T t) { return t[i].mean(d, keep); }};
    case 3:
      return {x + ".mean()", [i](T t) { return t[i].mean(); }};
    case 4:
      return {x + ".amax" + at, [=](T t) { return t[i].amax(d, keep); }, true};
    case 5:
      return {x + ".logsumexp" + at, [=](T t) { return t[i].logsumexp(d, keep); }};
    case 6:
      return {"softmax(" + x + ", " + text(d) + ")", [=](T t) { return at::softmax(t[i], d); }};
    case 7:
      return {"log_softmax(" + x + ", " + text(d) + ")", [=](T t) { return at::log_softmax(t[i], d); }};
    case 8:
      return {x + ".cumsum(" + text(d) + ")", [=](T t) { return t[i].cumsum(d); }};
    case 9:
      return {"(" + x + " + 3).norm()", [i](T t) { return (t[i] + 3).norm(); }};
    case 10:
      return {x + ".var" + at, [=](T t) { return t[i].var(at::IntArrayRef(d), false, keep); }};
    default: {
      const std::int64_t last = pool[i].dim() == 0 ? 1 : pool[i].size(-1);
      return {"layer_norm(" + x + ")", [=](T t) { return at::layer_norm(t[i], {last}, {}, {}, 0.1); }};
    }
  }
}

ChainStep view(Random& random, T pool, std::size_t i) {
  const std::string x = name(i);
  const std::int64_t ndim = pool[i].dim();
  const std::int64_t d = random.below(std::max<std::int64_t>(1, ndim));
  const std::int64_t e = random.below(std::max<std::int64_t>(1, ndim));
  const std::int64_t size = ndim == 0 ? 1 : pool[i].size(d);
  const std::int64_t at = random.below(std::max<std::int64_t>(1, size));
  switch (random.below(14)) {
    case 0:
      return {x + ".transpose(" + text(d) + "," + text(e) + ")", [=](T t) { return t[i].transpose(d, e); }};
    case 1:
    case 2: {
      const auto to = reshaped(random, pool[i]);
      return {x + ".reshape" + text(to), [=](T t) { return t[i].reshape(to); }};
    }
    case 3:
      return {x + ".unsqueeze(" + text(d) + ")", [=](T t) { return t[i].unsqueeze(d); }};
    case 4:
      return {x + ".squeeze()", [=](T t) { return t[i].squeeze(); }};
    case 5: {
      const std::int64_t step = 1 + random.below(2);
      return {x + ".slice(" + text(d) + "," + text(at) + ",-," + text(step) + ")",
              [=](T t) { return t[i].slice(d, at, c10::nullopt, step); }};
    }
    case 6:
      return {x + ".select(" + text(d) + "," + text(at) + ")", [=](T t) { return t[i].select(d, at); }};
    case 7:
      return {x + ".chunk(2," + text(d) + ")[0]", [=](T t) { return t[i].chunk(2, d)[0]; }};
    case 8:
      return {x + ".flatten()", [=](T t) { return t[i].flatten(); }};
    case 9:
      return {x + ".flip(" + text(d) + ")", [=](T t) { return t[i].flip({d}); }};
    case 10:
      return {x + ".roll(1," + text(d) + ")", [=](T t) { return t[i].roll({1}, {d}); }};
    case 11: {
      std::vector<std::int64_t> to = pool[i].sizes().vec();
      to.insert(to.begin(), 2);
      return {x + ".expand" + text(to), [=](T t) { return t[i].expand(to); }};
    }
    case 12: {
      const std::vector<std::int64_t> times(static_cast<std::size_t>(ndim), 2);
      return {x + ".repeat" + text(times), [=](T t) { return t[i].repeat(times); }};
    }
    default:
      return {x + ".contiguous()", [=](T t) { return t[i].contiguous(); }};
  }
}

ChainStep joined(Random& random, T pool, std::size_t i, std::size_t j) {
  const std::int64_t d = random.below(std::max<std::int64_t>(1, pool[i].dim()));
  const std::string both = "({" + name(i) + "," + name(j) + "}, " + text(d) + ")";
  switch (random.below(4)) {
    case 0:
      return {"cat" + both, [=](T t) { return at::cat({t[i], t[j]}, d); }};
    case 1:
      return {"stack" + both, [=](T t) { return at::stack({t[i], t[j]}, d); }};
    default:
      break;
  }
  // libtorch 1.13 writes past the end where a 0-d tensor is asked for several elements.
  if (pool[i].dim() == 0) return {"stack" + both, [=](T t) { return at::stack({t[i], t[j]}, d); }};
  const std::int64_t size = pool[i].size(d);
  std::vector<std::int64_t> rows;
  for (std::int64_t n = random.below(4); n >= 0 && size > 0; --n) rows.push_back(random.below(size));
  return {name(i) + ".index_select(" + text(d) + "," + text(rows) + ")",
          [=](T t) { return t[i].index_select(d, at::tensor(rows, at::kLong)); }};
}

// Writes to a tensor, or to a view of it: what it was taken from must see it.
ChainStep in_place(Random& random, T pool, std::size_t i, std::size_t j) {
  const std::string x = name(i), y = name(j);
  const double c = number(random);
  const std::int64_t d = random.below(std::max<std::int64_t>(1, pool[i].dim()));
  const std::int64_t size = pool[i].dim() == 0 ? 1 : pool[i].size(d);
  const std::int64_t at = random.below(std::max<std::int64_t>(1, size));
  const std::string row = x + ".select(" + text(d) + "," + text(at) + ")";
  switch (random.below(10)) {
    case 0:
      return {x + ".add_(" + text(c) + ")", [=](T t) { return t[i].add_(c); }};
    case 1:
      return {x + ".mul_(" + text(c) + ")", [=](T t) { return t[i].mul_(c); }};
    case 2:
      return {x + ".add_(" + y + ")", [=](T t) { return t[i].add_(t[j]); }};
    case 3:
      return {x + ".copy_(" + y + ")", [=](T t) { return t[i].copy_(t[j]); }};
    case 4:
      return {row + ".mul_(" + text(c) + ")", [=](T t) { return t[i].select(d, at).mul_(c); }};
    case 5:
      return {row + ".zero_()", [=](T t) { return t[i].select(d, at).zero_(); }};
    case 6:
      return {x + ".slice(" + text(d) + "," + text(at) + ").add_(" + text(c) + ")",
              [=](T t) { return t[i].slice(d, at).add_(c); }};
    case 7:
      return {x + ".relu_()", [=](T t) { return t[i].relu_(); }, true};
    case 8:
      return {x + ".transpose(0,-1).mul_(" + text(c) + ")", [=](T t) { return t[i].transpose(0, -1).mul_(c); }};
    default:
      return {x + ".fill_(" + text(c) + ")", [=](T t) { return t[i].fill_(c); }};
  }
}

}  // namespace

ChainStep random_step(Random& random, T pool) {
  const auto any = [&] {
    // The newest half of the time, so that it is a chain.
    const auto n = static_cast<std::int64_t>(pool.size());
    return static_cast<std::size_t>(random.chance(2) ? n - 1 : random.below(n));
  };
  const std::size_t i = any(), j = any();
  switch (random.below(12)) {
    case 0:
    case 1:
    case 2:
      return unary(random, pool, i);
    case 3:
    case 4:
    case 5:
      return binary(random, i, j);
    case 6:
    case 7:
      return reduction(random, pool, i);
    case 8:
    case 9:
      return view(random, pool, i);
    case 10:
      return joined(random, pool, i, j);
    default:
      return in_place(random, pool, i, j);
  }
}

}  // namespace dtensor::testing
