// Plans played by thread ranks: every rank ends with exactly its part, and moves exactly the bytes that the plan says.
#include "dtensor/runtime/execute.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <thread>

#include "dtensor/comm/threads.h"
#include "dtensor/comm/world.h"
#include "dtensor/core/error.h"
#include "dtensor/runtime/meta.h"
#include "tests/core/sweep.h"
#include "tests/runtime/helpers.h"

namespace dtensor {
namespace {

using testing::error_of;

using sweep::Random;

// ---- the literal model: the whole tensor, and a rank's part of it element by element

// What one place of the Partial mesh dims contributes: small whole numbers, unlike on all of them, so that sums,
// products and extremes are exact and a part too many or too few is seen.
at::Tensor contribution(const Spec& spec, const Dims& at) {
  std::int64_t seed = 0;
  std::int64_t unit = 1;
  for (std::int64_t m = 0; m < spec.mesh().ndim(); ++m) {
    seed = seed * 7 + (spec.partials()[m] && spec.mesh().shape()[m] > 1 ? at[m] + 1 : 0);
    if (spec.partials()[m] == ReduceOp::kAvg) unit = 840;  // averages over up to 8 ranks are whole numbers too
  }
  const std::int64_t n = spec.meta().numel();
  const auto index = at::arange(n, at::kLong);
  return index.mul(5).add(seed * 3).remainder(11).sub(4).mul(unit).to(scalar_type_of(spec.meta().dtype()));
}

at::Tensor take(const at::Tensor& whole, const Spec& spec, const Dims& at) {
  const sweep::Indices elements = sweep::elements_of(box_of(spec, at), spec.meta().shape());
  const auto index = at::tensor(elements, at::kLong);
  const Dims shape = spec.local_shape(at);
  return whole.index_select(0, index).view({shape.data(), shape.size()});
}

at::Tensor combined(ReduceOp op, const at::Tensor& a, const at::Tensor& b) {
  switch (op) {
    case ReduceOp::kProduct:
      return a.mul(b);
    case ReduceOp::kMin:
      return at::minimum(a, b);
    case ReduceOp::kMax:
      return at::maximum(a, b);
    default:
      return a.add(b);
  }
}

double identity(ReduceOp op) {
  if (op == ReduceOp::kMax) return -std::numeric_limits<double>::infinity();
  return op == ReduceOp::kProduct ? 1.0 : -0.0;
}

// What the rank at `at` must hold: the parts of all places that end, those of its own place that stay.
at::Tensor expected_local(const Spec& from, const Spec& to, const Dims& at) {
  const bool one_mesh = from.mesh() == to.mesh();
  at::Tensor whole;
  double divisor = 1;
  std::optional<ReduceOp> embeds;
  for (std::int64_t m = 0; m < from.mesh().ndim(); ++m) {
    const auto op = from.partials()[m];
    if (op == ReduceOp::kAvg && !(one_mesh && to.partials()[m])) divisor *= static_cast<double>(from.mesh().shape()[m]);
  }
  for (std::int64_t m = 0; m < to.mesh().ndim(); ++m) {
    const auto op = to.partials()[m];
    const bool stays = one_mesh && from.partials()[m];
    if (op && op != ReduceOp::kAvg && !stays && at[m] != 0) embeds = op;
  }
  sweep::for_each_coordinate(from.mesh(), [&](const Dims& other) {
    ReduceOp op = ReduceOp::kSum;
    for (std::int64_t m = 0; m < from.mesh().ndim(); ++m) {
      if (!from.partials()[m]) {
        if (other[m] != 0) return;
        continue;
      }
      op = *from.partials()[m];
      if (one_mesh && to.partials()[m] && other[m] != at[m]) return;
    }
    const at::Tensor part = contribution(from, other);
    whole = whole.defined() ? combined(op, whole, part) : part;
  });
  if (divisor != 1) whole = whole.div(divisor);
  at::Tensor local = take(whole, to, at);
  if (embeds) local = at::full(local.sizes(), identity(*embeds), local.options());
  return local;
}

at::Tensor source_local(const Spec& spec, const Dims& at) { return take(contribution(spec, at), spec, at); }

// To the bit: -0.0 is not 0.0.
bool same_values(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  const at::Tensor x = a.contiguous();
  const at::Tensor y = b.contiguous();
  return std::memcmp(x.data_ptr(), y.data_ptr(), static_cast<std::size_t>(x.nbytes())) == 0;
}

// ---- playing

struct Sums {
  std::mutex mutex;
  std::map<std::int64_t, std::int64_t> received;  // by case
};

void play_case(World& world, const DeviceMesh& mesh, const Spec& from, const Spec& to, const PlanOptions& options,
               std::int64_t number, Sums& sums) {
  const Plan plan = make_plan(from, to, options);
  SCOPED_TRACE("case " + std::to_string(number) + ", rank " + std::to_string(world.rank()) + "\n" + plan.to_string());
  const auto source = from.mesh().coordinate(world.rank());
  const auto target = to.mesh().coordinate(world.rank());
  const at::Tensor local = source ? source_local(from, *source) : at::Tensor();
  const at::Tensor before = local.defined() ? local.clone() : local;
  const auto execution = start(mesh, plan, local);
  const at::Tensor result = execution->result();
  EXPECT_TRUE(execution->done());
  ASSERT_EQ(result.defined(), target.has_value());
  if (target) {
    const at::Tensor expected = expected_local(from, to, *target);
    ASSERT_TRUE(same_values(result, expected)) << "got\n" << result << "\nexpected\n" << expected;
    if (!plan.steps().empty() && local.defined() && local.numel() > 0) {
      EXPECT_FALSE(result.is_alias_of(local)) << "the result shares memory with what it came from";
    }
  }
  if (local.defined()) {
    EXPECT_TRUE(same_values(local, before)) << "the source was written to";
  }
  const std::lock_guard lock(sums.mutex);
  sums.received[number] += execution->received();
}

Spec random_spec(Random& random, const Mesh& mesh, const TensorMeta& meta, ReduceOp op) {
  const auto ndim = meta.ndim();
  if (random.chance(4) && ndim > 0) {
    Placements placements(static_cast<std::size_t>(mesh.ndim()), Replicate());
    placements[static_cast<std::size_t>(random.below(mesh.ndim()))] =
        StridedShard(random.below(ndim), 1 + random.below(4));
    return Spec::make(meta, mesh, placements);
  }
  sweep::Case c = sweep::random_case(random, mesh, meta.shape());
  for (Placement& placement : c.placements) {
    if (placement.is_partial()) placement = Partial(op == ReduceOp::kSum && random.chance(3) ? ReduceOp::kAvg : op);
  }
  return Spec::make(meta, mesh, c.placements, c.order);
}

PlanOptions random_options(Random& random) {
  CostConstants constants;
  constants.link.message_ps = random.below(3) * 1'000'000;
  constants.link.kib_ps = std::int64_t{4'096} << random.below(20);
  constants.step_ps = random.below(2) * 5'000'000;
  return {.cost = CostModel(constants)};
}

TensorMeta random_meta(Random& random, std::int64_t max_size) {
  const Dims shape = random.chance(12) ? Dims{} : sweep::random_shape(random, 3, max_size);
  if (shape.size() < 2 || random.chance(2)) return {shape, DType::kF64};
  // Column-major.
  Dims stride(shape.size());
  std::int64_t next = 1;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    stride[d] = next;
    next *= std::max<std::int64_t>(shape[d], 1);
  }
  return {shape, stride, DType::kF64};
}

struct Drawn {
  Spec from;
  Spec to;
  PlanOptions options;
};

std::vector<Drawn> draw(std::uint64_t seed, const Mesh& from_mesh, const Mesh& to_mesh, std::int64_t count,
                        std::int64_t max_size, std::int64_t staging) {
  Random random(seed);
  std::vector<Drawn> drawn;
  while (static_cast<std::int64_t>(drawn.size()) < count) {
    const ReduceOp op = random.pick(std::vector<ReduceOp>{ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kProduct});
    const TensorMeta meta = random_meta(random, max_size);
    const Spec from = random_spec(random, from_mesh, meta, op);
    const Spec to = random_spec(random, to_mesh, meta, op);
    if (why_not(from, to)) continue;
    PlanOptions options = random_options(random);
    options.staging = staging;
    drawn.push_back({from, to, options});
  }
  return drawn;
}

using Runner = std::function<void(std::int64_t, const std::function<void(World&)>&)>;

void play_all(const Runner& run, std::int64_t ranks, const std::vector<Drawn>& drawn) {
  Sums sums;
  run(ranks, [&](World& world) {
    for (std::size_t i = 0; i < drawn.size(); ++i) {
      const DeviceMesh mesh = init_device_mesh(world, at::kCPU, drawn[i].from.mesh());
      play_case(world, mesh, drawn[i].from, drawn[i].to, drawn[i].options, static_cast<std::int64_t>(i), sums);
      if (::testing::Test::HasFatalFailure()) throw std::runtime_error("a case failed");
    }
  });
  for (std::size_t i = 0; i < drawn.size(); ++i) {
    const Plan plan = make_plan(drawn[i].from, drawn[i].to, drawn[i].options);
    if (!plan.exact()) continue;
    // An all-reduce's shares are rounded up to whole elements, rank by rank; the plan's total is not.
    std::int64_t slack = 0;
    for (const Step& step : plan.steps()) {
      if (step.kind == StepKind::kAllReduce) slack += ranks * ranks * 8;
    }
    EXPECT_GE(sums.received[static_cast<std::int64_t>(i)], plan.received().total) << plan.to_string();
    EXPECT_LE(sums.received[static_cast<std::int64_t>(i)], plan.received().total + slack) << plan.to_string();
  }
}

void on_threads(std::int64_t ranks, const std::function<void(World&)>& body) { run_ranks(ranks, body); }

// ---- ranks that cannot read each other's memory, as on any other backend: packed messages

class Distant final : public Communicator {
  using Counts = std::vector<std::int64_t>;

 public:
  explicit Distant(CommunicatorPtr inner)
      : Communicator("distant", "test", inner->rank(), inner->ranks()), inner_(std::move(inner)) {}
  WorkPtr all_reduce(const at::Tensor& buffer, ReduceOp op) override { return inner_->all_reduce(buffer, op); }
  WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input, const Counts& counts) override {
    return inner_->all_gather(output, input, counts);
  }
  WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input, const Counts& counts,
                         ReduceOp op) override {
    return inner_->reduce_scatter(output, input, counts, op);
  }
  WorkPtr all_to_all(const at::Tensor& output, const at::Tensor& input, const Counts& recv_counts,
                     const Counts& send_counts) override {
    return inner_->all_to_all(output, input, recv_counts, send_counts);
  }
  WorkPtr broadcast(const at::Tensor& buffer, std::int64_t root) override { return inner_->broadcast(buffer, root); }
  WorkPtr scatter(const at::Tensor& output, const at::Tensor& input, const Counts& counts, std::int64_t root) override {
    return inner_->scatter(output, input, counts, root);
  }
  WorkPtr send(const at::Tensor& buffer, std::int64_t to, std::int64_t tag) override {
    return inner_->send(buffer, to, tag);
  }
  WorkPtr receive(const at::Tensor& buffer, std::int64_t from, std::int64_t tag) override {
    return inner_->receive(buffer, from, tag);
  }
  WorkPtr barrier() override { return inner_->barrier(); }

 private:
  CommunicatorPtr inner_;
};

class DistantTransport final : public Transport {
 public:
  explicit DistantTransport(TransportPtr inner) : inner_(std::move(inner)) {}
  std::int64_t rank() const override { return inner_->rank(); }
  std::int64_t size() const override { return inner_->size(); }
  std::string backend() const override { return inner_->backend(); }
  CommunicatorPtr make_group(const std::vector<std::int64_t>& ranks, const GroupOptions& options) override {
    return std::make_shared<Distant>(inner_->make_group(ranks, options));
  }
  void leave(const std::string& why) override { inner_->leave(why); }

 private:
  TransportPtr inner_;
};

void on_distant_ranks(std::int64_t ranks, const std::function<void(World&)>& body) {
  std::vector<std::thread> threads;
  for (const TransportPtr& transport : make_thread_transports(ranks)) {
    threads.emplace_back([&body, transport] {
      World world(std::make_shared<DistantTransport>(transport));
      try {
        body(world);
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
        world.leave(error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// ---- cases

bool any_step(const std::vector<Drawn>& drawn, const std::function<bool(const Step&)>& is_one) {
  for (const Drawn& one : drawn) {
    const Plan plan = make_plan(one.from, one.to, one.options);
    for (const Step& step : plan.steps()) {
      if (is_one(step)) return true;
    }
  }
  return false;
}

class OnMeshes : public ::testing::TestWithParam<Dims> {};

std::string mesh_name(const ::testing::TestParamInfo<Dims>& info) {
  std::string name;
  for (const std::int64_t size : info.param) name += (name.empty() ? "" : "x") + std::to_string(size);
  return name;
}

TEST_P(OnMeshes, EveryRankEndsWithItsPart) {
  const Mesh mesh = Mesh::make(GetParam());
  play_all(on_threads, mesh.size(), draw(1, mesh, mesh, sweep::rounds(600), 9, PlanOptions::kStaging));
}

TEST_P(OnMeshes, LargeOnesAreReadInPlace) {
  const Mesh mesh = Mesh::make(GetParam());
  const auto drawn = draw(2, mesh, mesh, 30, 60, PlanOptions::kStaging);
  EXPECT_TRUE(mesh.size() == 1 || any_step(drawn, [](const Step& step) { return step.received.max >= 64 << 10; }));
  play_all(on_threads, mesh.size(), drawn);
}

TEST_P(OnMeshes, LargeOnesGoInChunks) {
  const Mesh mesh = Mesh::make(GetParam());
  const auto drawn = draw(3, mesh, mesh, 30, 60, 1);
  EXPECT_TRUE(mesh.size() == 1 || any_step(drawn, [](const Step& step) { return step.chunks > 1; }));
  play_all(on_distant_ranks, mesh.size(), drawn);
}

INSTANTIATE_TEST_SUITE_P(Execute, OnMeshes,
                         ::testing::Values(Dims{1}, Dims{2}, Dims{3}, Dims{4}, Dims{5}, Dims{8}, Dims{2, 2}, Dims{3, 2},
                                           Dims{2, 3}, Dims{4, 2}, Dims{1, 3}, Dims{2, 2, 2}, Dims{2, 1, 3}),
                         mesh_name);

TEST(Execute, OnEveryMeshOfUpToEightRanks) {
  std::uint64_t seed = 100;
  for (const Dims& shape : sweep::mesh_shapes(8, 3)) {
    const Mesh mesh = Mesh::make(shape);
    play_all(on_threads, mesh.size(), draw(seed++, mesh, mesh, sweep::rounds(60), 5, PlanOptions::kStaging));
  }
}

TEST(Execute, AcrossMeshes) {
  const std::vector<std::pair<Mesh, Mesh>> pairs = {
      {Mesh::from_ranks({2}, {0, 1}), Mesh::from_ranks({2}, {2, 3})},           // apart
      {Mesh::from_ranks({4}, {0, 1, 2, 3}), Mesh::from_ranks({2}, {1, 2})},     // nested
      {Mesh::from_ranks({2}, {1, 3}), Mesh::from_ranks({2, 2}, {3, 2, 1, 0})},  // turned
      {Mesh::from_ranks({3}, {0, 1, 2}), Mesh::from_ranks({2, 2}, {2, 3, 4, 5})},
      {Mesh::from_ranks({1}, {5}), Mesh::from_ranks({2, 3}, {0, 1, 2, 3, 4, 5})},
  };
  std::uint64_t seed = 10;
  for (const auto& [from, to] : pairs) {
    const auto drawn = draw(seed++, from, to, 60, 9, PlanOptions::kStaging);
    std::int64_t broadcasts = 0;
    for (const Drawn& one : drawn)
      broadcasts += make_plan(one.from, one.to, one.options).way() == Route::Way::kBroadcast;
    play_all(on_threads, 6, drawn);
    if (to.size() > from.size()) {
      EXPECT_GT(broadcasts, 0);
    }
  }
}

// Several redistributions under way at once, asked for in another order than they were started in.
TEST(Execute, MayBeLeftPending) {
  run_ranks(4, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {4}, {"x"});
    const Dims at = *mesh.coordinate();
    const Spec rows = Spec::make({{8, 4}, DType::kF64}, mesh, {Shard(0)});
    const Spec columns = Spec::make({{8, 4}, DType::kF64}, mesh, {Shard(1)});
    const Spec whole = Spec::make({{8, 4}, DType::kF64}, mesh, {Replicate()});
    const auto first = start(mesh, make_plan(rows, whole), source_local(rows, at));
    const auto second = start(mesh, make_plan(rows, columns), source_local(rows, at));
    EXPECT_FALSE(first->done());
    EXPECT_TRUE(same_values(second->result(), expected_local(rows, columns, at)));
    EXPECT_TRUE(same_values(first->result(), expected_local(rows, whole, at)));
    EXPECT_TRUE(first->done());
    EXPECT_TRUE(same_values(first->result(), expected_local(rows, whole, at))) << "asked for again";
  });
}

// A part that does not lie densely in memory.
TEST(Execute, TakesAnyStrides) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    const Spec rows = Spec::make({{6, 4}, DType::kF64}, mesh, {Shard(0)});
    const Spec whole = Spec::make({{6, 4}, DType::kF64}, mesh, {Replicate()});
    const at::Tensor local = source_local(rows, *mesh.coordinate());
    const at::Tensor strided = at::empty({4, 9}, local.options()).t().narrow(0, 2, 3);
    strided.copy_(local);
    const at::Tensor result = execute(mesh, make_plan(rows, whole), strided);
    EXPECT_TRUE(same_values(result, expected_local(rows, whole, *mesh.coordinate())));
  });
}

TEST(Execute, AveragesOfHalvesDoNotOverflow) {
  run_ranks(4, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2, 2}, {"a", "b"});
    const TensorMeta meta({6}, DType::kF16);
    const Spec parts = Spec::make(meta, mesh, {Partial(ReduceOp::kAvg), Partial(ReduceOp::kAvg)});
    for (const Placements& to : {Placements{Replicate(), Replicate()}, Placements{Shard(0), Replicate()}}) {
      const auto local = at::full({6}, 60000.0, at::kHalf);
      const at::Tensor result = execute(mesh, make_plan(parts, Spec::make(meta, mesh, to)), local);
      EXPECT_TRUE(at::equal(result, at::full_like(result, 60000.0)));
    }
  });
}

TEST(Execute, RefusesWhatIsNotItsPart) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    const Spec rows = Spec::make({{6, 4}, DType::kF64}, mesh, {Shard(0)});
    const Spec whole = Spec::make({{6, 4}, DType::kF64}, mesh, {Replicate()});
    const Plan plan = make_plan(rows, whole);
    EXPECT_EQ(
        error_of([&] {
          execute(mesh, plan, at::zeros({2, 4}, at::kDouble));
        }),
        "[redistribute] the local tensor is not this rank's part; got f64[2,4]; expected f64[3,4] of f64[6,4] @ 2(x) : "
        "S(0)");
    EXPECT_EQ(
        error_of([&] {
          execute(mesh, plan, at::zeros({3, 4}, at::kFloat));
        }),
        "[redistribute] the local tensor is not this rank's part; got f32[3,4]; expected f64[3,4] of f64[6,4] @ 2(x) : "
        "S(0)");
    EXPECT_EQ(error_of([&] { execute(mesh, plan, {}); }),
              "[redistribute] the local tensor is undefined; got nothing; expected f64[3,4] of f64[6,4] @ 2(x) : S(0)");
    EXPECT_EQ(error_of([&] {
                execute(DeviceMesh(mesh, DeviceKind::kCpu, world.rank(), 2), plan, at::zeros({3, 4}, at::kDouble));
              }),
              "[redistribute] the mesh belongs to no world, so nothing can be sent over it; got 2(x); try "
              "init_device_mesh(world, device, mesh)");
  });
}

// A world that has ended gives no groups any more, whoever still holds a mesh of it.
TEST(Execute, AMeshOutlivesItsWorld) {
  std::optional<DeviceMesh> kept;
  run_ranks(1, [&](World& world) { kept.emplace(init_device_mesh(world, at::kCPU, {1}, {"x"})); });
  EXPECT_EQ(error_of([&] { group_of(*kept, {0}, "late"); }), "[World::group] this rank has left its world");
}

}  // namespace
}  // namespace dtensor
