#include "dtensor/testing/parts.h"

#include <ATen/ATen.h>

#include <cstring>
#include <numeric>
#include <random>

#include "dtensor/core/boxes.h"
#include "dtensor/core/coordinates.h"
#include "dtensor/core/text.h"
#include "dtensor/runtime/identity.h"
#include "dtensor/runtime/meta.h"

namespace dtensor::testing {
namespace {

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::int64_t below(std::int64_t n) { return static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(n)); }
  // Of a tensor's shape and type: integers from `low` on, `count` of them.
  at::Tensor integers(const at::Tensor& like, std::int64_t low, std::int64_t count) {
    std::vector<std::int64_t> values(static_cast<std::size_t>(like.numel()));
    for (std::int64_t& value : values) value = low + below(count);
    return at::tensor(values, at::kLong).view(like.sizes()).to(like.scalar_type());
  }

 private:
  std::mt19937_64 engine_;
};

at::Tensor identity_like(const at::Tensor& tensor, ReduceOp op) {
  at::Tensor result = at::empty_like(tensor, at::MemoryFormat::Contiguous);
  fill_identity(result, op);
  return result;
}

// For every element: some parts are the identity, one (at least) is what the others leave of the value.
std::vector<at::Tensor> split(const at::Tensor& value, ReduceOp op, std::int64_t count, Random& random) {
  if (value.scalar_type() == at::kBool && op == ReduceOp::kMin) op = ReduceOp::kAnd;
  if (value.scalar_type() == at::kBool && op == ReduceOp::kMax) op = ReduceOp::kOr;
  std::vector<at::Tensor> parts;
  const auto last = static_cast<std::size_t>(random.below(count));
  const at::Tensor identity = identity_like(value, op);
  const auto somewhere = [&](std::int64_t one_in) { return random.integers(value, 0, one_in).eq(0); };
  at::Tensor rest = value;
  if (op == ReduceOp::kAvg) rest = value * count;
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
    at::Tensor part;
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg:
        part = random.integers(value, -4, 9);
        break;
      case ReduceOp::kMin:
        part = at::where(somewhere(4).logical_or(value.eq(identity)), identity, value + random.integers(value, 0, 5));
        break;
      case ReduceOp::kMax:
        part = at::where(somewhere(4).logical_or(value.eq(identity)), identity, value - random.integers(value, 0, 5));
        break;
      case ReduceOp::kProduct:
        part = random.integers(value, 0, 2) * 2 - 1;
        break;
      case ReduceOp::kAnd:
        part = value.bitwise_or(random.integers(value, 0, 2));
        break;
      case ReduceOp::kOr:
        part = value.bitwise_and(random.integers(value, 0, 2));
        break;
      case ReduceOp::kXor:
        part = random.integers(value, 0, 2);
        break;
    }
    part = part.to(value.scalar_type());
    if (i != last) {
      if (op == ReduceOp::kSum || op == ReduceOp::kAvg) rest = rest - part;
      if (op == ReduceOp::kProduct) rest = rest * part;  // each is its own inverse
      if (op == ReduceOp::kXor) rest = rest.bitwise_xor(part);
    }
    parts.push_back(std::move(part));
  }
  parts[last] = rest.to(value.scalar_type());
  return parts;
}

at::Tensor combined(const at::Tensor& a, const at::Tensor& b, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return a + b;
    case ReduceOp::kProduct:
      return a * b;
    case ReduceOp::kMin:
      return at::minimum(a, b);
    case ReduceOp::kMax:
      return at::maximum(a, b);
    case ReduceOp::kAnd:
      return a.bitwise_and(b);
    case ReduceOp::kOr:
      return a.bitwise_or(b);
    case ReduceOp::kXor:
      return a.bitwise_xor(b);
  }
  return a;
}

at::Tensor elements_of(const Spec& spec, const Dims& at) {
  std::vector<std::int64_t> elements;
  for_each_run(box_of(spec, at), spec.meta().shape(), [&](std::int64_t global, std::int64_t, std::int64_t length) {
    for (std::int64_t i = 0; i < length; ++i) elements.push_back(global + i);
  });
  return at::tensor(elements, at::kLong);
}

// Which of the parts that a Partial is split into the rank has.
std::size_t place_of(const Spec& spec, const Dims& at) {
  std::int64_t place = 0;
  for (std::size_t m = 0; m < at.size(); ++m) {
    if (spec.partials()[m]) place = place * spec.mesh().shape()[m] + at[m];
  }
  return static_cast<std::size_t>(place);
}

}  // namespace

std::vector<Dims> coordinates_of(const Mesh& mesh) {
  std::vector<std::int64_t> dims(static_cast<std::size_t>(mesh.ndim()));
  std::iota(dims.begin(), dims.end(), 0);
  std::vector<Dims> result;
  Dims at(dims.size());
  do result.push_back(at);
  while (next_coordinate(at, mesh.shape(), dims));
  return result;
}

std::vector<at::Tensor> parts_of(const at::Tensor& whole, const Spec& spec, std::uint64_t seed) {
  Random random(seed);
  std::vector<at::Tensor> pieces = {whole.contiguous()};
  for (std::int64_t m = 0; m < spec.mesh().ndim(); ++m) {
    if (!spec.partials()[m]) continue;
    std::vector<at::Tensor> next;
    for (const at::Tensor& piece : pieces) {
      for (at::Tensor& part : split(piece, *spec.partials()[m], spec.mesh().shape()[m], random)) {
        next.push_back(std::move(part));
      }
    }
    pieces = std::move(next);
  }
  std::vector<at::Tensor> result;
  for (const Dims& at : coordinates_of(spec.mesh())) {
    const Dims shape = spec.local_shape(at);
    const Dims stride = spec.local_stride(at);
    const at::Tensor local = at::empty_strided({shape.data(), shape.size()}, {stride.data(), stride.size()},
                                               whole.options().requires_grad(false));
    local.copy_(pieces[place_of(spec, at)].reshape({-1}).index_select(0, elements_of(spec, at)).view(local.sizes()));
    result.push_back(local);
  }
  return result;
}

OrReason<at::Tensor> whole_of(const Spec& spec, const std::vector<at::Tensor>& parts) {
  std::size_t places = 1;
  ReduceOp op = ReduceOp::kSum;
  std::int64_t divisor = 1;
  for (std::int64_t m = 0; m < spec.mesh().ndim(); ++m) {
    if (!spec.partials()[m]) continue;
    places *= static_cast<std::size_t>(spec.mesh().shape()[m]);
    op = *spec.partials()[m];
    if (op == ReduceOp::kAvg) divisor *= spec.mesh().shape()[m];
  }
  const auto type = scalar_type_of(spec.meta().dtype());
  std::vector<at::Tensor> pieces;
  for (std::size_t p = 0; p < places; ++p) pieces.push_back(at::zeros({spec.meta().numel()}, type));
  const at::Tensor known = at::zeros({static_cast<std::int64_t>(places), spec.meta().numel()}, at::kBool);
  std::size_t rank = 0;
  for (const Dims& at : coordinates_of(spec.mesh())) {
    const at::Tensor& part = parts[rank];
    const Dims shape = spec.local_shape(at);
    if (!part.defined() || part.sizes() != at::IntArrayRef(shape.data(), shape.size()) || part.scalar_type() != type) {
      return Reason{"rank " + std::to_string(rank) + " has " +
                    (part.defined() ? meta_of(part).to_string() : "nothing") + ", which is not its part of " +
                    spec.to_string()};
    }
    const at::Tensor elements = elements_of(spec, at);
    at::Tensor& piece = pieces[place_of(spec, at)];
    const at::Tensor flags = known[static_cast<std::int64_t>(place_of(spec, at))];
    const at::Tensor mine = part.resolve_conj().resolve_neg().reshape({-1});
    const at::Tensor seen = flags.index_select(0, elements);
    if (!same_bits(piece.index_select(0, elements).masked_select(seen), mine.masked_select(seen))) {
      return Reason{"rank " + std::to_string(rank) + " has another replica of " + spec.to_string()};
    }
    piece.index_copy_(0, elements, mine);
    flags.index_fill_(0, elements, true);
    ++rank;
  }
  at::Tensor whole = pieces[0];
  for (std::size_t p = 1; p < places; ++p) whole = combined(whole, pieces[p], op);
  if (divisor != 1) whole = whole / divisor;
  const Dims& shape = spec.meta().shape();
  return whole.view({shape.data(), shape.size()});
}

std::string difference(const at::Tensor& got, const at::Tensor& expected) {
  if (got.sizes() != expected.sizes() || got.scalar_type() != expected.scalar_type()) {
    return "is " + meta_of(got).to_string() + " instead of " + meta_of(expected).to_string();
  }
  if (got.numel() == 0) return {};
  const auto wide = c10::isComplexType(got.scalar_type()) ? at::kComplexDouble : at::kDouble;
  const bool narrow = got.scalar_type() == at::kHalf || got.scalar_type() == at::kBFloat16;
  const bool single = got.scalar_type() == at::kFloat || got.scalar_type() == at::kComplexFloat;
  const double tolerance = narrow ? 4e-2 : single ? 2e-4 : 1e-8;
  const at::Tensor a = got.resolve_conj().to(wide).reshape({-1});
  const at::Tensor b = expected.resolve_conj().to(wide).reshape({-1});
  const at::Tensor close = at::isclose(a, b, tolerance, tolerance, true);
  if (close.all().item<bool>()) return {};
  const std::int64_t at = close.to(at::kInt).argmin().item<std::int64_t>();
  const auto text = [&](const at::Tensor& tensor) {
    const at::Tensor one = c10::isComplexType(tensor.scalar_type()) ? at::abs(tensor[at]) : tensor[at];
    return std::to_string(one.item<double>());
  };
  return "element " + std::to_string(at) + " is " + text(a) + " instead of " + text(b);
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  const at::Tensor x = a.resolve_conj().resolve_neg().contiguous();
  const at::Tensor y = b.resolve_conj().resolve_neg().contiguous();
  return x.numel() == 0 || std::memcmp(x.data_ptr(), y.data_ptr(), static_cast<std::size_t>(x.nbytes())) == 0;
}

}  // namespace dtensor::testing
