#include "tests/runtime/random_cases.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/alpha_dropout.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/feature_alpha_dropout.h>
#include <ATen/ops/feature_dropout.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/native_dropout.h>
#include <ATen/ops/normal.h>
#include <ATen/ops/rand_like.h>
#include <ATen/ops/randint_like.h>
#include <ATen/ops/randn_like.h>
#include <ATen/ops/rrelu.h>

#include <cstring>
#include <map>
#include <mutex>

#include "dtensor/core/text.h"
#include "dtensor/runtime/dispatch.h"
#include "dtensor/runtime/factories.h"
#include "dtensor/runtime/random.h"

namespace dtensor::testing {
namespace {

using Tensors = std::vector<at::Tensor>;

struct At {
  World& world;
  const DeviceMesh& mesh;
  const Placements& placements;
  at::IntArrayRef sizes;

  at::Tensor empty(c10::ScalarType type) const { return dtensor::empty(sizes, mesh, placements, type); }
  at::Tensor rand(c10::ScalarType type = at::kFloat) const { return dtensor::rand(sizes, mesh, placements, type); }
  // For tensors of one dim.
  Placements along_rows() const {
    Placements result = placements;
    for (Placement& placement : result) {
      if (placement.is_shard()) placement = Shard(0);
    }
    return result;
  }
};

using Body = std::function<Tensors(const At&)>;

RandomCase named(const std::string& name, const Body& body) {
  return {name, [body](World& world, const DeviceMesh& mesh, const Placements& placements, const Dims& shape) {
            return body({world, mesh, placements, at::IntArrayRef(shape.data(), shape.size())});
          }};
}

// One case for each type.
void add_fills(std::vector<RandomCase>& list, const std::string& name, const std::vector<c10::ScalarType>& types,
               const std::function<void(at::Tensor&)>& fill) {
  for (const c10::ScalarType type : types) {
    list.push_back(named(name + " " + c10::toString(type), [=](const At& at) {
      at::Tensor x = at.empty(type);
      fill(x);
      return Tensors{x};
    }));
  }
}

Tensors with_gradient(const At& at, const std::function<at::Tensor(const at::Tensor&)>& fn) {
  const at::Tensor x = at.rand().sub(0.5).detach().requires_grad_(true);
  const at::Tensor y = fn(x);
  y.backward(at::rand_like(y));
  return {y.detach(), x.grad()};
}

std::vector<RandomCase> make_cases() {
  using std::vector;
  const vector<c10::ScalarType> floating = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};
  const vector<c10::ScalarType> integral = {at::kLong, at::kInt, at::kByte, at::kChar, at::kShort};
  vector<c10::ScalarType> real = floating;
  real.insert(real.end(), integral.begin(), integral.end());
  vector<RandomCase> list;
  for (const auto type : floating) {
    list.push_back(
        named(std::string("rand ") + c10::toString(type), [=](const At& at) { return Tensors{at.rand(type)}; }));
    list.push_back(named(std::string("randn ") + c10::toString(type), [=](const At& at) {
      return Tensors{dtensor::randn(at.sizes, at.mesh, at.placements, type)};
    }));
  }
  list.push_back(named("randn complex", [](const At& at) {
    return Tensors{dtensor::randn(at.sizes, at.mesh, at.placements, at::kComplexDouble),
                   dtensor::rand(at.sizes, at.mesh, at.placements, at::kComplexFloat)};
  }));
  list.push_back(named("randint", [](const At& at) {
    return Tensors{dtensor::randint(-5, 100, at.sizes, at.mesh, at.placements),
                   dtensor::randint(0, 2, at.sizes, at.mesh, at.placements, at::kBool),
                   dtensor::randint(0, 200, at.sizes, at.mesh, at.placements, at::kByte)};
  }));
  list.push_back(named("randperm", [](const At& at) {
    std::int64_t n = 1;
    for (const std::int64_t size : at.sizes) n *= size;
    return Tensors{dtensor::randperm(n, at.mesh, at.along_rows()),
                   dtensor::randperm(5003, at.mesh, at.along_rows(), at::kInt)};
  }));
  add_fills(list, "uniform_", floating, [](at::Tensor& x) { x.uniform_(-2, 3); });
  add_fills(list, "uniform_", {at::kComplexFloat}, [](at::Tensor& x) { x.uniform_(); });
  add_fills(list, "normal_", floating, [](at::Tensor& x) { x.normal_(1, 2); });
  add_fills(list, "log_normal_", floating, [](at::Tensor& x) { x.log_normal_(0.5, 0.25); });
  add_fills(list, "exponential_", floating, [](at::Tensor& x) { x.exponential_(1.5); });
  add_fills(list, "cauchy_", floating, [](at::Tensor& x) { x.cauchy_(1, 2); });
  add_fills(list, "geometric_", real, [](at::Tensor& x) { x.geometric_(0.25); });
  add_fills(list, "random_", real, [](at::Tensor& x) { x.random_(); });
  add_fills(list, "random_", {at::kBool}, [](at::Tensor& x) { x.random_(); });
  add_fills(list, "random_.to", real, [](at::Tensor& x) { x.random_(100); });
  add_fills(list, "random_.from", {at::kFloat, at::kLong, at::kInt, at::kChar},
            [](at::Tensor& x) { x.random_(-7, 9); });
  add_fills(list, "bernoulli_", real, [](at::Tensor& x) { x.bernoulli_(0.3); });
  add_fills(list, "bernoulli_", {at::kBool}, [](at::Tensor& x) { x.bernoulli_(0.3); });
  list.push_back(named("bernoulli_ of a tensor", [](const At& at) {
    const at::Tensor p = at.rand();
    at::Tensor x = at.empty(at::kDouble);
    x.bernoulli_(p);
    return Tensors{x, at::bernoulli(p), at::bernoulli(p, 0.2)};
  }));
  list.push_back(named("like", [](const At& at) {
    const at::Tensor x = at.rand();
    return Tensors{at::rand_like(x), at::randn_like(x), at::rand_like(x, at::kDouble), at::randint_like(x, 9),
                   at::randint_like(x, 3, 9, at::kLong)};
  }));
  list.push_back(named("normal of tensors", [](const At& at) {
    const at::Tensor mean = at.rand(), std = at.rand();
    return Tensors{at::normal(mean, 0.5), at::normal(1.0, std), at::normal(mean, std)};
  }));
  list.push_back(named("views", [](const At& at) {
    at::Tensor x = at.rand(), y = at.rand();
    x.transpose(0, 1).uniform_(5, 6);
    y.unsqueeze(0).normal_();
    return Tensors{x, y, at::rand_like(x.transpose(0, 1))};
  }));
  list.push_back(named("dropout", [](const At& at) {
    return with_gradient(at, [](const at::Tensor& x) { return at::dropout(x, 0.4, true); });
  }));
  list.push_back(named("dropout_", [](const At& at) {
    return with_gradient(at, [](const at::Tensor& x) {
      at::Tensor y = x.mul(2);
      return at::dropout_(y, 0.4, true);
    });
  }));
  list.push_back(named("native_dropout", [](const At& at) {
    const auto [y, mask] = at::native_dropout(at.rand(at::kBFloat16), 0.5, true);
    return Tensors{y, mask};
  }));
  list.push_back(named("feature_dropout", [](const At& at) {
    return with_gradient(at, [](const at::Tensor& x) { return at::feature_dropout(x, 0.4, true); });
  }));
  list.push_back(named("alpha_dropout", [](const At& at) {
    return with_gradient(at, [](const at::Tensor& x) { return at::alpha_dropout(x, 0.4, true); });
  }));
  list.push_back(named("feature_alpha_dropout", [](const At& at) {
    return with_gradient(at, [](const at::Tensor& x) { return at::feature_alpha_dropout(x, 0.4, true); });
  }));
  list.push_back(named("multinomial", [](const At& at) {
    if (at.sizes.size() != 2) return Tensors{};
    const at::Tensor x = at.rand();
    return Tensors{at::multinomial(x, 1), at::multinomial(x, 3), at::multinomial(x, 6, true),
                   at::multinomial(at.rand(at::kHalf), 2)};
  }));
  list.push_back(named("rrelu", [](const At& at) {
    return with_gradient(at, [](const at::Tensor& x) { return at::rrelu(x, 0.1, 0.4, true); });
  }));
  list.push_back(named("generator", [](const At& at) {
    at::Generator generator = at::detail::createCPUGenerator(5);
    at::Tensor x = at.empty(at::kFloat), y = at.empty(at::kFloat);
    x.uniform_(0, 1, generator);
    y.uniform_(0, 1, generator);
    return Tensors{x, y, dtensor::randn(at.sizes, at.mesh, at.placements, {}, generator)};
  }));
  list.push_back(named("stream", [](const At& at) {
    const at::Tensor before = at.rand();
    const RandomStream mine(at.world, 7);
    return Tensors{before, at.rand()};
  }));
  return list;
}

// What one rank draws alone.
const std::vector<at::Tensor>& reference(const RandomCase& random_case, const Dims& shape) {
  static std::mutex mutex;
  static std::map<std::string, std::vector<at::Tensor>> known;
  const std::lock_guard lock(mutex);
  const std::string key = random_case.name + " [" + join_numbers(shape) + "]";
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  std::vector<at::Tensor>& result = known[key];
  run_ranks(1, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {1});
    manual_seed(world, 99);
    for (const at::Tensor& tensor : random_case.run(world, mesh, {Replicate()}, shape)) {
      result.push_back(DTensor(tensor).to_local().clone());
    }
  });
  return result;
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  return x.nbytes() == 0 || std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()) == 0;
}

}  // namespace

const std::vector<RandomCase>& random_cases() {
  static const std::vector<RandomCase> list = make_cases();
  return list;
}

std::string check_random_cases(World& world, const DeviceMesh& mesh, const Placements& placements, const Dims& shape,
                               const std::string& only) {
  std::string complaints;
  const NoRuleGuard guard(NoRule::kRefuse);
  for (const RandomCase& random_case : random_cases()) {
    if (random_case.name.rfind(only, 0) != 0) continue;
    const auto& expected = reference(random_case, shape);
    manual_seed(world, 99);
    const auto got = random_case.run(world, mesh, placements, shape);
    for (std::size_t i = 0; i < got.size(); ++i) {
      const DTensor tensor = got[i];
      const at::Tensor local = tensor.to_local();
      const DTensor part = distribute_tensor(expected[i].to(local.device()), mesh, tensor.placements());
      if (same_bytes(part.to_local().cpu(), local.cpu())) continue;
      complaints += random_case.name + ", result " + std::to_string(i) + ", rank " + std::to_string(world.rank()) +
                    ": " + tensor.spec().to_string() + "\n";
    }
  }
  return complaints;
}

std::vector<Placements> sharded_placements(std::int64_t mesh_ndim, std::int64_t tensor_ndim) {
  std::vector<Placements> result = {{}};
  for (std::int64_t m = 0; m < mesh_ndim; ++m) {
    std::vector<Placements> next;
    for (const Placements& some : result) {
      for (std::int64_t d = -1; d < tensor_ndim; ++d) {
        next.push_back(some);
        next.back().push_back(d < 0 ? Placement(Replicate()) : Placement(Shard(d)));
      }
    }
    result = std::move(next);
  }
  return result;
}

std::vector<Dims> mesh_shapes_of(std::int64_t ranks, std::int64_t max_dims) {
  if (ranks == 1) return {Dims{1}};
  std::vector<Dims> result = {Dims{ranks}};
  if (max_dims == 1) return result;
  for (std::int64_t first = 2; first < ranks; ++first) {
    if (ranks % first != 0) continue;
    for (const Dims& rest : mesh_shapes_of(ranks / first, max_dims - 1)) {
      Dims shape = {first};
      for (const std::int64_t size : rest) shape.push_back(size);
      result.push_back(shape);
    }
  }
  return result;
}

}  // namespace dtensor::testing
