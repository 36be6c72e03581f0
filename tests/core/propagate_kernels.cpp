#include "tests/core/propagate_kernels.h"

namespace dtensor::play_rules {
namespace {

using calls::flag;
using calls::i;
using calls::ints;

Dims broadcast_shape(const Dims& a, const Dims& b) {
  Dims shape = a.size() >= b.size() ? a : b;
  const Dims& shorter = a.size() >= b.size() ? b : a;
  for (std::size_t d = 0; d < shorter.size(); ++d) {
    std::int64_t& size = shape[shape.size() - shorter.size() + d];
    if (size == 1) size = shorter[d];
  }
  return shape;
}

Kernel unary(double (*fn)(double)) {
  return [fn](const LocalCall& call) {
    const Array& x = call.operands[0];
    return std::vector{make_array(x.shape, [&](const Dims& at) { return fn(x.at(at)); })};
  };
}

Kernel binary(double (*fn)(double, double)) {
  return [fn](const LocalCall& call) {
    const Array& a = call.operands[0];
    const Array& b = call.operands[1];
    return std::vector{
        make_array(broadcast_shape(a.shape, b.shape), [&](const Dims& at) { return fn(a.at(at), b.at(at)); })};
  };
}

Kernel ternary(double (*fn)(double, double, double)) {
  return [fn](const LocalCall& call) {
    const auto& o = call.operands;
    const Dims shape = broadcast_shape(broadcast_shape(o[0].shape, o[1].shape), o[2].shape);
    return std::vector{make_array(shape, [&](const Dims& at) { return fn(o[0].at(at), o[1].at(at), o[2].at(at)); })};
  };
}

Kernel scalar(double (*fn)(double, double)) {
  return [fn](const LocalCall& call) {
    const Array& x = call.operands[0];
    return std::vector{make_array(x.shape, [&](const Dims& at) { return fn(x.at(at), call.args[1].as_double()); })};
  };
}

Array matmul(const Array& x, const Array& w) {
  return make_array({x.shape[0], w.shape[1]}, [&](const Dims& at) {
    double sum = 0;
    for (std::int64_t k = 0; k < x.shape[1]; ++k) sum += x.at({at[0], k}) * w.at({k, at[1]});
    return sum;
  });
}

// Over dims() of argument 1, or all of them; keepdim in argument 2.
Array reduced(const LocalCall& call, ReduceOp op, bool mean = false) {
  const Array& x = call.operands[0];
  const auto ndim = static_cast<std::int64_t>(x.shape.size());
  InlineVec<bool, 8> gone(x.shape.size(), call.args[1].as_ints().empty());
  for (std::int64_t d : call.args[1].as_ints()) gone[d < 0 ? d + ndim : d] = true;
  const bool keep = call.args.size() > 2 && call.args[2].as_bool();
  Dims kept;  // shape with size 1 where reduced
  Dims shape;
  double count = 1;
  for (std::size_t d = 0; d < x.shape.size(); ++d) {
    kept.push_back(gone[d] ? 1 : x.shape[d]);
    if (!gone[d] || keep) shape.push_back(kept.back());
    if (gone[d]) count *= static_cast<double>(x.shape[d]);
  }
  Array result = Array::filled(kept, identity_of(op));
  for_each_index(x.shape, [&](const Dims& at) {
    std::int64_t flat = 0;
    for (std::size_t d = 0; d < kept.size(); ++d) flat = flat * kept[d] + (gone[d] ? 0 : at[d]);
    double& value = result.data[static_cast<std::size_t>(flat)];
    value = combine(op, value, x.at(at));
  });
  for (double& value : result.data) value /= mean ? count : 1;
  result.shape = shape;
  return result;
}

Array sliced(const Array& x, std::int64_t dim, std::int64_t start, std::int64_t end, std::int64_t step) {
  Dims shape = x.shape;
  shape[dim] = std::max<std::int64_t>(0, (end - start + step - 1) / step);
  return make_array(shape, [&](Dims at) {
    at[dim] = start + at[dim] * step;
    return x.at(at);
  });
}

std::vector<Array> split_by(const Array& x, const Dims& sizes, std::int64_t dim) {
  std::vector<Array> parts;
  std::int64_t start = 0;
  for (std::int64_t size : sizes) {
    parts.push_back(sliced(x, dim, start, start + size, 1));
    start += size;
  }
  return parts;
}

// Without broadcasting; nothing (0) where the index lies outside, as happens with a wrong row.
double* strict_find(Array& x, const Dims& index) {
  std::int64_t flat = 0;
  for (std::size_t d = 0; d < x.shape.size(); ++d) {
    if (index[d] >= x.shape[d]) return nullptr;
    flat = flat * x.shape[d] + index[d];
  }
  return &x.data[static_cast<std::size_t>(flat)];
}
double strict_at(Array x, const Dims& index) {
  const double* found = strict_find(x, index);
  return found ? *found : 0;
}

// Any number as an index below a size.
std::int64_t as_index(double id, std::int64_t size) {
  return static_cast<std::int64_t>(std::abs(id)) % std::max<std::int64_t>(1, size);
}

void add_pointwise(Kernels& k) {
  k["aten::add.Tensor"] = k["aten::add_.Tensor"] = binary([](double a, double b) { return a + b; });
  k["aten::mul.Tensor"] = k["aten::mul_.Tensor"] = binary([](double a, double b) { return a * b; });
  k["aten::div.Tensor"] = binary([](double a, double b) { return a / (b * b + 1); });
  k["aten::maximum"] = binary([](double a, double b) { return std::max(a, b); });
  k["aten::copy_"] = [](const LocalCall& call) {
    return std::vector{make_array(call.operands[0].shape, [&](const Dims& at) { return call.operands[1].at(at); })};
  };
  k["aten::relu"] = unary([](double x) { return std::max(x, 0.0); });
  k["aten::neg"] = unary([](double x) { return -x; });
  k["aten::square"] = unary([](double x) { return x * x; });
  k["aten::clone"] = unary([](double x) { return x; });
  k["aten::add.Scalar"] = scalar([](double x, double c) { return x + c; });
  k["aten::mul.Scalar"] = scalar([](double x, double c) { return x * c; });
  k["aten::fill_.Scalar"] = scalar([](double, double c) { return c; });
  k["aten::where.self"] = ternary([](double c, double a, double b) { return c > 0 ? a : b; });
  k["aten::minimum"] = binary([](double a, double b) { return std::min(a, b); });
  k["aten::sub.Tensor"] = binary([](double a, double b) { return a - b; });
  k["aten::gt.Tensor"] = binary([](double a, double b) { return a > b ? 1.0 : 0.0; });
  k["aten::threshold_backward"] = binary([](double g, double x) { return x > 0 ? g : 0; });
  k["aten::masked_fill.Scalar"] = [](const LocalCall& call) {
    const Array& x = call.operands[0];
    return std::vector{make_array(
        x.shape, [&](const Dims& at) { return call.operands[1].at(at) > 0 ? call.args[2].as_double() : x.at(at); })};
  };
  k["aten::addcmul"] = ternary([](double a, double b, double c) { return a + 2 * b * c; });
  k["aten::addcdiv"] = ternary([](double a, double b, double c) { return a + 2 * b / (c * c + 1); });
  k["aten::lerp.Tensor"] = ternary([](double a, double b, double c) { return a + c * (b - a); });
}

void add_matmul(Kernels& k) {
  k["aten::mm"] = [](const LocalCall& call) { return std::vector{matmul(call.operands[0], call.operands[1])}; };
  k["aten::addmm"] = [](const LocalCall& call) {
    const Array product = matmul(call.operands[1], call.operands[2]);
    return std::vector{
        make_array(product.shape, [&](const Dims& at) { return call.operands[0].at(at) + product.at(at); })};
  };
  k["aten::dot"] = [](const LocalCall& call) {
    Array x = call.operands[0];
    Array y = call.operands[1];
    x.shape = {1, x.shape[0]};
    y.shape = {y.shape[0], 1};
    Array result = matmul(x, y);
    result.shape = {};
    return std::vector{result};
  };
  k["aten::mv"] = [](const LocalCall& call) {
    Array v = call.operands[1];
    v.shape.push_back(1);
    Array result = matmul(call.operands[0], v);
    result.shape.pop_back();
    return std::vector{result};
  };
  k["aten::bmm"] = [](const LocalCall& call) {
    const Array& x = call.operands[0];
    const Array& y = call.operands[1];
    return std::vector{make_array({x.shape[0], x.shape[1], y.shape[2]}, [&](const Dims& at) {
      double sum = 0;
      for (std::int64_t j = 0; j < x.shape[2]; ++j) sum += x.at({at[0], at[1], j}) * y.at({at[0], j, at[2]});
      return sum;
    })};
  };
  k["aten::linear"] = [](const LocalCall& call) {
    const Array& x = call.operands[0];
    const Array& w = call.operands[1];
    Dims shape = x.shape;
    shape.back() = w.shape[0];
    return std::vector{make_array(shape, [&](Dims at) {
      const std::int64_t n = at.back();
      double sum = call.operands[2].at({n});
      for (at.back() = 0; at.back() < w.shape[1]; ++at.back()) sum += x.at(at) * w.at({n, at.back()});
      return sum;
    })};
  };
}

void add_reductions(Kernels& k) {
  k["aten::sum.dim_IntList"] = [](const LocalCall& call) { return std::vector{reduced(call, ReduceOp::kSum)}; };
  k["aten::mean.dim"] = [](const LocalCall& call) { return std::vector{reduced(call, ReduceOp::kSum, true)}; };
  k["aten::amax"] = [](const LocalCall& call) {
    const Array result = reduced(call, ReduceOp::kMax);
    const bool throws = !result.data.empty() && call.operands[0].data.empty();
    return std::vector{throws ? Array{{-1}, {}} : result};
  };
  k["aten::mse_loss"] = [](const LocalCall& call) {
    LocalCall squares{binary([](double a, double b) { return (a - b) * (a - b); })(call),
                      {{}, StaticArg(), flag(false)}};
    const std::int64_t reduction = call.args[2].as_int();
    return reduction == 0 ? squares.operands : std::vector{reduced(squares, ReduceOp::kSum, reduction == 1)};
  };
  for (const auto& [name, op] : {std::pair{"aten::amin", ReduceOp::kMin}, {"aten::prod.dim_int", ReduceOp::kProduct}}) {
    k[name] = [op = op](const LocalCall& call) {
      const Array result = reduced(call, op);
      const bool throws = op == ReduceOp::kMin && !result.data.empty() && call.operands[0].data.empty();
      return std::vector{throws ? Array{{-1}, {}} : result};
    };
  }
  // The largest value and where it is first.
  k["aten::max.dim"] = [](const LocalCall& call) {
    const Array& x = call.operands[0];
    const std::int64_t dim = call.args[1].as_int();
    Array values = reduced({{x}, {{}, ints({dim}), call.args[2]}}, ReduceOp::kMax);
    Array places = values;
    std::size_t flat = 0;
    Dims kept = x.shape;
    kept[dim] = 1;
    for_each_index(kept, [&](Dims at) {
      while (x.at(at) != values.data[flat]) ++at[dim];
      places.data[flat++] = static_cast<double>(at[dim]);
    });
    return std::vector{values, places};
  };
  k["aten::mse_loss_backward"] = [](const LocalCall& call) {
    const auto& o = call.operands;
    const double divisor = call.args[3].as_int() == 1 ? static_cast<double>(o[1].data.size()) : 1;
    return std::vector{make_array(
        o[1].shape, [&](const Dims& at) { return o[0].at(at) * 2 * (o[1].at(at) - o[2].at(at)) / divisor; })};
  };
  // The loss and the weights it met; class ids are targets modulo the classes.
  k["aten::nll_loss_forward"] = [](const LocalCall& call) {
    const auto& o = call.operands;
    Array none = Array::filled(o[1].shape, 0);
    Array loss = Array::filled({}, 0);
    Array total = Array::filled({}, 0);
    std::size_t flat = 0;
    for_each_index(o[1].shape, [&](Dims at) {
      const std::int64_t id = as_index(o[1].at(at), o[0].shape.back());
      at.push_back(id);
      none.data[flat] = -o[2].at({id}) * o[0].at(at);
      loss.data[0] += none.data[flat++];
      total.data[0] += o[2].at({id});
    });
    const std::int64_t reduction = call.args[3].as_int();
    if (reduction == 0) return std::vector{none, Array::filled({}, 0)};
    if (reduction == 1) loss.data[0] /= total.data[0];
    return std::vector{loss, total};
  };
  // dx needs its whole row, dw and db all rows; all are linear in the gradient.
  k["aten::native_layer_norm_backward"] = [](const LocalCall& call) {
    const auto& o = call.operands;
    const Array& g = o[0];
    const Array& x = o[1];
    Array dx = Array::filled(x.shape, 0);
    Array dw = Array::filled({x.shape.back()}, 0);
    Array db = dw;
    std::size_t flat = 0;
    for_each_index(x.shape, [&](const Dims& at) {
      double row = 0;
      Dims other = at;
      for (other.back() = 0; other.back() < x.shape.back(); ++other.back()) row += g.at(other) * x.at(other);
      const auto column = static_cast<std::size_t>(at.back());
      dx.data[flat++] = (g.at(at) * o[4].at({at.back()}) - row) * o[3].at(at);
      dw.data[column] += g.at(at) * (x.at(at) - o[2].at(at));
      db.data[column] += g.at(at);
    });
    return std::vector{dx, dw, db};
  };
}

void add_lookups(Kernels& k) {
  k["aten::cumsum"] = [](const LocalCall& call) {
    const Array& x = call.operands[0];
    const std::int64_t dim = call.args[1].as_int();
    return std::vector{make_array(x.shape, [&](Dims at) {
      double sum = x.at(at);
      while (at[dim]-- > 0) sum += x.at(at);
      return sum;
    })};
  };
  k["aten::embedding"] = [](const LocalCall& call) {
    const Array& w = call.operands[0];
    const Array& ids = call.operands[1];
    Dims shape = ids.shape;
    shape.push_back(w.shape[1]);
    return std::vector{make_array(shape, [&](const Dims& at) {
      const double id = ids.at(Dims(at.begin(), at.end() - 1));
      return w.at({as_index(id, w.shape[0]), at.back()});
    })};
  };
  k["aten::cat"] = [](const LocalCall& call) {
    const Array& a = call.operands[0];
    const Array& b = call.operands[1];
    const std::int64_t dim = call.args[1].as_int();
    Dims shape = a.shape;
    shape[dim] += b.shape[dim];
    return std::vector{make_array(shape, [&](Dims at) {
      if (at[dim] < a.shape[dim]) return a.at(at);
      at[dim] -= a.shape[dim];
      return b.at(at);
    })};
  };
  k["aten::gather"] = [](const LocalCall& call) {
    const std::int64_t dim = call.args[1].as_int();
    return std::vector{make_array(call.operands[1].shape, [&](Dims at) {
      const double id = call.operands[1].at(at);
      at[dim] = as_index(id, call.operands[0].shape[dim]);
      return strict_at(call.operands[0], at);
    })};
  };
  k["aten::scatter_add"] = [](const LocalCall& call) {
    const std::int64_t dim = call.args[1].as_int();
    Array result = call.operands[0];
    for_each_index(call.operands[1].shape, [&](Dims at) {
      const double value = strict_at(call.operands[2], at);
      at[dim] = as_index(call.operands[1].at(at), result.shape[dim]);
      if (double* target = strict_find(result, at)) *target += value;
    });
    return std::vector{result};
  };
  k["aten::select_backward"] = [](const LocalCall& call) {
    const std::int64_t dim = call.args[2].as_int();
    return std::vector{make_array(call.args[1].as_ints(), [&](Dims at) {
      if (at[dim] != call.args[3].as_int()) return 0.0;
      at.erase(static_cast<std::size_t>(dim));
      return call.operands[0].at(at);
    })};
  };
  k["aten::embedding_dense_backward"] = [](const LocalCall& call) {
    const Array& g = call.operands[0];
    const std::int64_t rows = call.args[2].as_int();
    Array result = Array::filled({rows, g.shape.back()}, 0);
    for_each_index(g.shape, [&](const Dims& at) {
      const std::int64_t id = as_index(call.operands[1].at(Dims(at.begin(), at.end() - 1)), rows);
      result.data[static_cast<std::size_t>(id * g.shape.back() + at.back())] += g.at(at);
    });
    return std::vector{result};
  };
  k["aten::index_select"] = [](const LocalCall& call) {
    const std::int64_t dim = call.args[1].as_int();
    Dims shape = call.operands[0].shape;
    shape[dim] = call.operands[1].shape[0];
    return std::vector{make_array(shape, [&](Dims at) {
      at[dim] = as_index(call.operands[1].at({at[dim]}), call.operands[0].shape[dim]);
      return call.operands[0].at(at);
    })};
  };
  k["aten::stack"] = [](const LocalCall& call) {
    const std::int64_t dim = call.args[1].as_int();
    Dims shape = call.operands[0].shape;
    shape.insert(static_cast<std::size_t>(dim), static_cast<std::int64_t>(call.operands.size()));
    return std::vector{make_array(shape, [&](Dims at) {
      const auto which = static_cast<std::size_t>(at[dim]);
      at.erase(static_cast<std::size_t>(dim));
      return call.operands[which].at(at);
    })};
  };
  k["aten::slice_backward"] = [](const LocalCall& call) {
    const auto& a = call.args;
    const std::int64_t dim = a[2].as_int();
    return std::vector{make_array(a[1].as_ints(), [&](Dims at) {
      if (at[dim] < a[3].as_int() || at[dim] >= a[4].as_int()) return 0.0;
      at[dim] -= a[3].as_int();
      return call.operands[0].at(at);
    })};
  };
}

// A 1-d convolution as aten::convolution takes it: x [n,i,w], weight [o,i,k] ([i,o,k] transposed), bias [o], stride 1.
void add_planes(Kernels& k) {
  k["aten::convolution"] = [](const LocalCall& call) {
    const auto& o = call.operands;
    const bool transposed = call.args[6].as_bool();
    const std::int64_t groups = call.args[8].as_int();
    const std::int64_t width = o[1].shape[2];
    const std::int64_t inputs = transposed ? o[1].shape[0] : o[1].shape[1];
    const std::int64_t outputs = transposed ? o[1].shape[1] : o[1].shape[0];
    const std::int64_t space = transposed ? o[0].shape[2] + width - 1 : o[0].shape[2] - width + 1;
    return std::vector{make_array({o[0].shape[0], outputs, space}, [&](const Dims& at) {
      double sum = o[2].at({at[1]});
      for (std::int64_t c = 0; c < inputs; ++c) {
        const std::int64_t channel =
            transposed ? c : c + (at[1] / std::max<std::int64_t>(1, outputs / groups)) * inputs;
        for (std::int64_t w = 0; w < width; ++w) {
          const std::int64_t from = transposed ? at[2] - w : at[2] + w;
          if (from < 0 || from >= o[0].shape[2] || channel >= o[0].shape[1]) continue;
          sum += o[0].at({at[0], channel, from}) * o[1].at(transposed ? Dims{c, at[1], w} : Dims{at[1], c, w});
        }
      }
      return sum;
    })};
  };
  k["aten::constant_pad_nd"] = [](const LocalCall& call) {
    const Array& x = call.operands[0];
    const Dims pads = call.args[1].as_ints();
    Dims shape = x.shape;
    Dims before(shape.size(), 0);
    for (std::size_t p = 0; 2 * p < pads.size(); ++p) {
      before[shape.size() - 1 - p] = pads[2 * p];
      shape[shape.size() - 1 - p] += pads[2 * p] + pads[2 * p + 1];
    }
    return std::vector{make_array(shape, [&](Dims at) {
      for (std::size_t d = 0; d < at.size(); ++d) {
        at[d] -= before[d];
        if (at[d] < 0 || at[d] >= x.shape[d]) return 7.0;
      }
      return x.at(at);
    })};
  };
  k["aten::repeat"] = [](const LocalCall& call) {
    const Array& x = call.operands[0];
    Dims shape = call.args[1].as_ints();
    const std::size_t fresh = shape.size() - x.shape.size();
    for (std::size_t d = fresh; d < shape.size(); ++d) shape[d] *= x.shape[d - fresh];
    return std::vector{make_array(shape, [&](const Dims& at) {
      Dims from;
      for (std::size_t d = fresh; d < at.size(); ++d) from.push_back(at[d] % x.shape[d - fresh]);
      return x.at(from);
    })};
  };
  // Each sample minus the mean of all it has, times how many samples there are said to be over how many there are.
  k["aten::native_group_norm"] = [](const LocalCall& call) {
    const Array& x = call.operands[0];
    const std::int64_t n = x.shape[0];
    const double told = n == 0 ? 1 : static_cast<double>(call.args[3].as_int()) / static_cast<double>(n);
    Array mean = Array::filled({n, 1}, 0);
    for_each_index(x.shape, [&](const Dims& at) { mean.data[static_cast<std::size_t>(at[0])] += told * x.at(at); });
    const Array y = make_array(x.shape, [&](const Dims& at) {
      return (x.at(at) - mean.at({at[0], 0})) * call.operands[1].at({at[1]}) + call.operands[2].at({at[1]});
    });
    return std::vector{y, mean, mean};
  };
}

void add_views(Kernels& k) {
  k["aten::diagonal"] = [](const LocalCall& call) {
    const Array& x = call.operands[0];
    const std::int64_t a = call.args[2].as_int();
    const std::int64_t b = call.args[3].as_int();
    Dims shape;
    for (std::int64_t d = 0; d < static_cast<std::int64_t>(x.shape.size()); ++d) {
      if (d != a && d != b) shape.push_back(x.shape[d]);
    }
    shape.push_back(std::min(x.shape[a], x.shape[b]));
    return std::vector{make_array(shape, [&](const Dims& at) {
      Dims from;
      std::size_t next = 0;
      for (std::int64_t d = 0; d < static_cast<std::int64_t>(x.shape.size()); ++d) {
        from.push_back(d == a || d == b ? at.back() : at[next++]);
      }
      return x.at(from);
    })};
  };
  k["aten::unfold"] = [](const LocalCall& call) {
    const Array& x = call.operands[0];
    const std::int64_t dim = call.args[1].as_int();
    const std::int64_t size = call.args[2].as_int();
    const std::int64_t step = call.args[3].as_int();
    Dims shape = x.shape;
    shape[dim] = (x.shape[dim] - size) / step + 1;
    shape.push_back(size);
    return std::vector{make_array(shape, [&](const Dims& at) {
      Dims from(at.begin(), at.end() - 1);
      from[dim] = from[dim] * step + at.back();
      return x.at(from);
    })};
  };
  k["aten::t"] = [](const LocalCall& call) {
    const Array& x = call.operands[0];
    return std::vector{make_array({x.shape[1], x.shape[0]}, [&](const Dims& at) { return x.at({at[1], at[0]}); })};
  };
  k["aten::view"] = k["aten::_unsafe_view"] = [](const LocalCall& call) {
    return std::vector{Array{call.args[1].as_ints(), call.operands[0].data}};
  };
  k["aten::squeeze"] = [](const LocalCall& call) {
    Dims shape;
    for (std::int64_t size : call.operands[0].shape) {
      if (size != 1) shape.push_back(size);
    }
    return std::vector{Array{shape, call.operands[0].data}};
  };
  k["aten::expand"] = [](const LocalCall& call) {
    return std::vector{make_array(call.args[1].as_ints(), [&](const Dims& at) { return call.operands[0].at(at); })};
  };
  k["aten::select.int"] = [](const LocalCall& call) {
    const std::int64_t dim = call.args[1].as_int();
    Dims shape = call.operands[0].shape;
    shape.erase(static_cast<std::size_t>(dim));
    return std::vector{make_array(shape, [&](Dims at) {
      at.insert(static_cast<std::size_t>(dim), call.args[2].as_int());
      return call.operands[0].at(at);
    })};
  };
  k["aten::slice.Tensor"] = [](const LocalCall& call) {
    const auto& a = call.args;
    return std::vector{sliced(call.operands[0], a[1].as_int(), a[2].as_int(), a[3].as_int(), a[4].as_int())};
  };
  k["aten::split_with_sizes"] = [](const LocalCall& call) {
    return split_by(call.operands[0], call.args[1].as_ints(), call.args[2].as_int());
  };
  k["aten::_reshape_alias"] = k["aten::view"];
  k["aten::unbind.int"] = [select = k["aten::select.int"]](const LocalCall& call) {
    std::vector<Array> results;
    const std::int64_t dim = call.args[1].as_int();
    for (std::int64_t at = 0; at < call.operands[0].shape[dim]; ++at) {
      results.push_back(select({call.operands, {{}, call.args[1], i(at)}})[0]);
    }
    return results;
  };
  k["aten::split.Tensor"] = [](const LocalCall& call) {
    const std::int64_t dim = call.args[2].as_int();
    const std::int64_t size = call.operands[0].shape[dim];
    Dims sizes;
    for (std::int64_t left = size; left > 0; left -= sizes.back())
      sizes.push_back(std::min(left, call.args[1].as_int()));
    return split_by(call.operands[0], sizes, dim);
  };
  k["aten::permute"] = [](const LocalCall& call) {
    const Dims order = call.args[1].as_ints();
    Dims shape;
    for (std::int64_t d : order) shape.push_back(call.operands[0].shape[d]);
    return std::vector{make_array(shape, [&](const Dims& at) {
      Dims from(at.size());
      for (std::size_t d = 0; d < at.size(); ++d) from[order[d]] = at[d];
      return call.operands[0].at(from);
    })};
  };
}

Kernels make_kernels() {
  Kernels k;
  add_pointwise(k);
  add_matmul(k);
  add_reductions(k);
  add_lookups(k);
  add_planes(k);
  add_views(k);
  return k;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels all = make_kernels();
  return all;
}

}  // namespace dtensor::play_rules
