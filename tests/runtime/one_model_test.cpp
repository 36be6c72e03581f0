// One model by default: whose values a distributed tensor gets, and what ranks that are threads draw.
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/version.h>

#include <functional>
#include <mutex>
#include <thread>

#include "dtensor/comm/world.h"
#include "dtensor/runtime/factories.h"
#include "dtensor/runtime/module.h"
#include "dtensor/runtime/random.h"
#include "dtensor/runtime/tensor.h"
#include "tests/runtime/helpers.h"

namespace dtensor::testing {
namespace {

// What every rank has, when all have ended.
template <class T, class Fn>
std::vector<T> on_ranks(std::int64_t n, Fn fn) {
  std::vector<T> results(static_cast<std::size_t>(n));
  run_ranks(n, [&](World& world) { results[static_cast<std::size_t>(world.rank())] = fn(world); });
  return results;
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

at::Generator seeded(std::uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); }

double mine(const World& world) { return static_cast<double>(world.rank() + 1); }

// ---- ranks that are threads draw as processes do

TEST(ThreadRanks, DrawFromLibtorchsDefaultSeed) {
  const auto drawn = on_ranks<at::Tensor>(4, [](World&) { return torch::randn({5, 3}); });
  const at::Tensor expected = torch::randn({5, 3}, seeded(c10::default_rng_seed_val));
  for (const at::Tensor& one : drawn) EXPECT_TRUE(at::equal(one, expected));
}

TEST(ThreadRanks, SeedTheirOwnGenerator) {
  torch::manual_seed(11);
  const auto drawn = on_ranks<at::Tensor>(4, [](World& world) {
    torch::manual_seed(100 + static_cast<std::uint64_t>(world.rank()));
    EXPECT_EQ(at::globalContext().defaultGenerator(at::kCPU).current_seed(), 100 + world.rank());
    at::Tensor result;
    for (int i = 0; i < 50; ++i) result = torch::rand({7});
    return result;
  });
  for (std::size_t r = 0; r < drawn.size(); ++r) {
    const at::Generator generator = seeded(100 + r);
    at::Tensor expected;
    for (int i = 0; i < 50; ++i) expected = torch::rand({7}, generator);
    EXPECT_TRUE(at::equal(drawn[r], expected)) << r;
  }
  // The generator of other threads is where it was.
  EXPECT_EQ(at::globalContext().defaultGenerator(at::kCPU).current_seed(), 11);
  EXPECT_TRUE(at::equal(torch::rand({7}), torch::rand({7}, seeded(11))));
}

TEST(ThreadRanks, KeepStatesOfTheirOwn) {
  on_ranks<int>(2, [](World& world) {
    at::Generator shared = at::globalContext().defaultGenerator(at::kCPU);
    torch::manual_seed(5 + static_cast<std::uint64_t>(world.rank()));
    const at::Tensor state = shared.get_state();
    const at::Generator copy = shared.clone();
    const at::Tensor first = torch::rand({3});
    EXPECT_TRUE(at::equal(first, torch::rand({3}, copy)));
    EXPECT_FALSE(at::equal(first, torch::rand({3})));
    shared.set_state(state);
    EXPECT_TRUE(at::equal(first, torch::rand({3})));
    // Named, it is the rank's own, too.
    shared.set_state(state);
    EXPECT_TRUE(at::equal(first, torch::rand({3}, shared)));
    return 0;
  });
}

// Every way to draw that is no method of a generator.
using Draw = std::function<at::Tensor()>;
std::vector<std::pair<std::string, Draw>> draws() {
  return {
      {"rand",
       [] {
         return torch::rand({3, 2});
       }},
      {"randn",
       [] {
         return torch::randn({3, 2}, at::kDouble);
       }},
      {"randint", [] { return torch::randint(0, 100, {6}); }},
      {"randperm", [] { return torch::randperm(9); }},
      {"rand_like", [] { return torch::rand_like(torch::ones({4})); }},
      {"randn_like", [] { return torch::randn_like(torch::ones({4})); }},
      {"randint_like", [] { return torch::randint_like(torch::ones({4}), 50); }},
      {"normal", [] { return torch::normal(0.5, 2.0, {4}); }},
      {"normal of means", [] { return at::normal(torch::ones({4}), 2.0); }},
      {"bernoulli", [] { return torch::bernoulli(torch::full({20}, 0.5)); }},
      {"multinomial", [] { return torch::multinomial(torch::ones({30}), 6); }},
      {"multinomial with replacement", [] { return torch::multinomial(torch::ones({30}), 6, true); }},
      {"poisson", [] { return torch::poisson(torch::full({9}, 30.0)); }},
      {"binomial", [] { return torch::binomial(torch::full({9}, 30.0), torch::full({9}, 0.5)); }},
      {"dropout", [] { return torch::dropout(torch::ones({40}), 0.5, true); }},
      {"native_dropout", [] { return std::get<0>(torch::native_dropout(torch::ones({40}), 0.5, true)); }},
      {"feature_dropout",
       [] {
         return torch::feature_dropout(torch::ones({40, 2, 2}), 0.5, true);
       }},
      {"alpha_dropout", [] { return torch::alpha_dropout(torch::ones({40}), 0.5, true); }},
      {"rrelu", [] { return torch::rrelu(torch::full({9}, -1.0), 0.1, 0.3, true); }},
      {"uniform_", [] { return torch::empty({5}).uniform_(-1, 1); }},
      {"normal_", [] { return torch::empty({40}).normal_(); }},
      {"exponential_", [] { return torch::empty({5}).exponential_(); }},
      {"cauchy_", [] { return torch::empty({5}).cauchy_(); }},
      {"log_normal_", [] { return torch::empty({5}).log_normal_(); }},
      {"geometric_", [] { return torch::empty({25}).geometric_(0.1); }},
      {"random_", [] { return torch::empty({5}).random_(); }},
      {"random_ in a range", [] { return torch::empty({5}).random_(3, 300); }},
      {"bernoulli_", [] { return torch::empty({40}).bernoulli_(0.5); }},
      {"a layer", [] { return torch::nn::Linear(4, 5)->weight.detach().clone(); }},
      {"orthogonal_",
       [] {
         return torch::nn::init::orthogonal_(torch::empty({4, 4}));
       }},
  };
}

// A rank's draws are those of a process that has nothing but this generator.
TEST(ThreadRanks, CoverEveryOperatorThatDraws) {
  for (const auto& [name, draw] : draws()) {
    torch::manual_seed(3);
    const at::Tensor expected = draw();
    ASSERT_FALSE(at::equal(expected, draw())) << name << " draws nothing: the case is of no use";
    const auto drawn = on_ranks<at::Tensor>(3, [&, &one = draw](World&) {
      torch::manual_seed(3);
      return one();
    });
    for (const at::Tensor& one : drawn) EXPECT_TRUE(at::equal(one, expected)) << name;
  }
}

TEST(ThreadRanks, LeaveDistributedDrawsAlone) {
  const auto drawn = on_ranks<std::vector<at::Tensor>>(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    manual_seed(world, 4);
    torch::manual_seed(static_cast<std::uint64_t>(world.rank()));
    const DTensor x = zeros({6}, mesh, {Shard(0)});
    x.uniform_(0, 1);
    const at::Tensor before = torch::rand({2});
    return std::vector<at::Tensor>{x.full_tensor(), rand({6}, mesh, {Shard(0)}).full_tensor(), before};
  });
  EXPECT_TRUE(at::equal(drawn[0][0], drawn[1][0])) << "the tensor's values do not depend on the rank's generator";
  EXPECT_TRUE(at::equal(drawn[0][1], drawn[1][1]));
  EXPECT_FALSE(at::equal(drawn[0][2], drawn[1][2]));
}

// As in a process: an optimizer's step, a backward pass and dropout inside of a model.
TEST(ThreadRanks, TrainAlikeWithoutASeed) {
  const auto losses = on_ranks<double>(4, [](World&) {
    torch::nn::Sequential net(torch::nn::Linear(4, 8), torch::nn::Dropout(0.5), torch::nn::Linear(8, 1));
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    double last = 0;
    for (int i = 0; i < 5; ++i) {
      optimizer.zero_grad();
      const at::Tensor loss = net->forward(torch::randn({3, 4})).pow(2).mean();
      loss.backward();
      optimizer.step();
      last = loss.item<double>();
    }
    return last;
  });
  for (const double loss : losses) EXPECT_EQ(loss, losses[0]);
}

// ---- distribute_tensor

#if TORCH_VERSION_MAJOR >= 2
using WarningGuard = c10::WarningUtils::WarningHandlerGuard;
#else
using WarningGuard = c10::Warning::WarningHandlerGuard;
#endif

// Keeps what is warned of on this thread.
class Warnings : public c10::WarningHandler {
 public:
  Warnings() : guard_(this) {}
#if TORCH_VERSION_MAJOR >= 2
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
#else
  void process(const c10::SourceLocation&, const std::string& text, const bool) override { texts.push_back(text); }
#endif
  std::vector<std::string> texts;

 private:
  const WarningGuard guard_;
};

TEST(DistributeTensor, TakesTheFirstRanksValuesAndWarnsOnce) {
  run_ranks(3, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3}, {"x"});
    Warnings warnings;
    for (int i = 0; i < 3; ++i) {
      const at::Tensor full = numbers({4, 5}) * (world.rank() == 1 ? 1 : mine(world));
      for (const Placement& placement : {Placement(Replicate()), Placement(Shard(0)), Placement(Shard(1))}) {
        const at::Tensor x = distribute_tensor(full, mesh, {placement}).full_tensor();
        EXPECT_TRUE(at::equal(x, numbers({4, 5})));
      }
      EXPECT_TRUE(at::equal(full, numbers({4, 5}) * (world.rank() == 1 ? 1 : mine(world)))) << "the caller's own";
    }
    EXPECT_EQ(warnings.texts.size(), world.rank() == 0 ? 1 : 0);
    for (const std::string& text : warnings.texts) {
      for (const char* part : {"one_model_test.cpp:", "rank 2 passed other values than rank 0", "from_local"}) {
        EXPECT_TRUE(contains(text, part)) << text;
      }
    }
    const DTensor equal = distribute_tensor(numbers({4}), mesh, {Shard(0)});
    EXPECT_EQ(warnings.texts.size(), world.rank() == 0 ? 1 : 0);
  });
}

TEST(DistributeTensor, TakesTheFirstOfEachRowOfASubMesh) {
  run_ranks(6, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2, 3}, {"dp", "tp"});
    Warnings silent;
    const at::Tensor full = at::full({4, 3}, mine(world));
    const double first = static_cast<double>(world.rank() / 3 * 3 + 1);
    EXPECT_TRUE(at::equal(distribute_tensor(full, mesh["tp"], {Shard(0)}).full_tensor(), at::full({4, 3}, first)));
    // The same index in every row.
    const DTensor second = distribute_tensor(full, mesh["tp"], {Shard(1)}, {.source = 1});
    EXPECT_TRUE(at::equal(second.full_tensor(), at::full({4, 3}, first + 1)));
    EXPECT_TRUE(second.mesh() == mesh["tp"]);
    const double column = static_cast<double>(world.rank() % 3 + 1);
    EXPECT_TRUE(at::equal(distribute_tensor(full, mesh["dp"], {Replicate()}).full_tensor(), at::full({4, 3}, column)));
    EXPECT_TRUE(at::equal(distribute_tensor(full, mesh, {Shard(0), Shard(1)}).full_tensor(), at::full({4, 3}, 1.0)));
    const DTensor last = distribute_tensor(full, mesh, {Shard(0), Replicate()}, {.source = 5});
    EXPECT_TRUE(at::equal(last.full_tensor(), at::full({4, 3}, 6.0)));
  });
}

TEST(DistributeTensor, NeedsTheTensorOnTheSourceAlone) {
  run_ranks(4, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2, 2}, {"a", "b"});
    const at::Tensor images = numbers({4, 3, 2, 5}).contiguous(at::MemoryFormat::ChannelsLast);
    for (const Placements& placements :
         {Placements{Shard(0), Shard(1)}, Placements{Replicate(), Shard(2)}, Placements{Partial(), Replicate()}}) {
      const at::Tensor given = world.rank() == 2 ? images.clone().requires_grad_(true) : at::Tensor();
      const DTensor x = distribute_tensor(given, mesh, placements, {.source = 2});
      EXPECT_EQ(x.scalar_type(), at::kDouble);
      EXPECT_EQ(x.strides(), images.strides()) << "shape, type and memory order are the source's";
      EXPECT_TRUE(x.requires_grad());
      EXPECT_TRUE(at::equal(x.full_tensor(), images));
    }
    const std::string none = error_of([&] { distribute_tensor({}, mesh, {Shard(0), Shard(1)}, {.source = 2}); });
    EXPECT_EQ(none.find("[distribute_tensor] the tensor is undefined on the source; got source 2, world rank 2"), 0)
        << none;
    // Another shape elsewhere does not matter.
    const at::Tensor other = world.rank() == 0 ? at::ones({3}, at::kLong) : at::zeros({2, 2});
    EXPECT_TRUE(at::equal(distribute_tensor(other, mesh, {Shard(0), Replicate()}, {.source = 0}).full_tensor(),
                          at::ones({3}, at::kLong)));
  });
}

TEST(DistributeTensor, TakesNoPartOutsideOfTheMesh) {
  run_ranks(3, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, Mesh::from_ranks({2}, {2, 0}, {"x"}));
    const at::Tensor full = at::full({4}, mine(world));
    Warnings silent;
    for (const DistributeOptions& options : {DistributeOptions{}, DistributeOptions{.source = 0}}) {
      const DTensor x = distribute_tensor(full, mesh, {Shard(0)}, options);
      EXPECT_EQ(x.to_local().defined(), world.rank() != 1);
      if (world.rank() != 1) {
        EXPECT_TRUE(at::equal(x.to_local(), at::full({2}, 3.0))) << "rank 2 is the mesh's first";
      }
    }
  });
}

TEST(DistributeTensor, ComparesEqualCopies) {
  run_ranks(3, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3}, {"x"});
    const DistributeOptions equal{.equal_copies = true};
    EXPECT_TRUE(at::equal(distribute_tensor(numbers({4, 5}), mesh, {Shard(0)}, equal).full_tensor(), numbers({4, 5})));
    at::Tensor full = numbers({4, 5});
    if (world.rank() > 0) full[3][4] += 1e-15;
    EXPECT_EQ(error_of([&] { distribute_tensor(full, mesh, {Shard(0)}, equal); }),
              "[distribute_tensor] equal_copies, and yet the ranks have different values; got \"tensor\" of ranks 1,2 "
              "differ from those of rank 0; expected the same bits on all ranks; try without equal_copies all ranks "
              "take the values of one");
    EXPECT_TRUE(
        contains(error_of([&] { distribute_tensor(full, mesh, {Shard(0)}, {.source = 0, .equal_copies = true}); }),
                 "nothing is compared"));
    EXPECT_TRUE(
        contains(error_of([&] { distribute_tensor(full, mesh, {Shard(0)}, {.source = 3}); }), "expected 0 to 2"));
  });
}

TEST(DistributeTensor, NamesWhoPassedAnotherShapeOrType) {
  run_ranks(3, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3}, {"x"});
    const bool odd = world.rank() == 2;
    EXPECT_EQ(error_of([&] {
                distribute_tensor(at::ones({odd ? 5 : 4, 2}), mesh, {Shard(0)});
              }),
              "[distribute_tensor] the ranks pass different tensors; got \"tensor\", f32[4,2] on rank 0, \"tensor\", "
              "f32[5,2] on rank 2; expected the same names, shapes and types on all ranks; try from_local where each "
              "rank has its own part, or a source: {.source = 0}");
    EXPECT_TRUE(
        contains(error_of([&] { distribute_tensor(at::ones({4}, odd ? at::kDouble : at::kFloat), mesh, {Shard(0)}); }),
                 "f64[4] on rank 2"));
    EXPECT_TRUE(contains(error_of([&] { distribute_tensor(odd ? at::Tensor() : at::ones({4}), mesh, {Shard(0)}); }),
                         "undefined on rank 2"));
    EXPECT_EQ(error_of([&] { distribute_tensor({}, mesh, {Shard(0)}); }),
              "[distribute_tensor] the tensor is undefined");
    // Another order in memory is no difference of values: the first rank's is taken.
    Warnings warnings;
    const at::Tensor full = numbers({4, 6}), turned = odd ? full : full.t().contiguous().t();
    const DTensor x = distribute_tensor(turned, mesh, {Shard(0)});
    EXPECT_EQ(x.strides(), at::IntArrayRef({1, 4}));
    EXPECT_TRUE(at::equal(x.full_tensor(), full));
    EXPECT_TRUE(warnings.texts.empty());
  });
}

TEST(DistributeTensor, SharesEveryKindOfTensor) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    Warnings silent;
    for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kByte,
                                      at::kBool, at::kComplexFloat, at::kComplexDouble}) {
      for (const Dims& shape : {Dims{}, Dims{5}, Dims{3, 4}, Dims{0, 3}}) {
        const at::Tensor first = numbers({shape.data(), shape.size()}).mul(9).to(type);
        const at::Tensor given = world.rank() == 0 ? first : first.logical_not().to(type);
        EXPECT_TRUE(at::equal(distribute_tensor(given, mesh, {Replicate()}).to_local(), first)) << type;
      }
    }
    const at::Tensor full = numbers({4, 6}) * mine(world);
    for (const at::Tensor& odd : {full.t(), full.slice(1, 0, 6, 2), full[0].expand({3, 6}),
                                  at::complex(full, full).conj(), at::imag(at::complex(full, full).conj())}) {
      const at::Tensor expected = DTensor(from_local(odd.contiguous().clone(), mesh, {Replicate()})).to_local();
      const at::Tensor value = distribute_tensor(odd, mesh, {Shard(0)}).full_tensor();
      if (world.rank() == 0) {
        EXPECT_TRUE(at::equal(value, expected));
      }
      EXPECT_TRUE(at::equal(value, distribute_tensor(value, mesh, {Replicate()}, {.equal_copies = true}).to_local()));
    }
  });
}

// ---- distribute_module

TEST(DistributeModule, TrainsOneModelWithoutASeed) {
  for (const bool own_seeds : {false, true}) {
    std::vector<std::vector<at::Tensor>> before(4), after(4);
    run_ranks(4, [&](World& world) {
      const auto rank = static_cast<std::size_t>(world.rank());
      const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {4}, {"dp"});
      if (own_seeds) torch::manual_seed(rank);  // as processes do that start from a seed of their own
      torch::nn::Sequential net(torch::nn::Linear(4, 3), torch::nn::BatchNorm1d(3), torch::nn::Linear(3, 2));
      for (const at::Tensor& p : net->parameters()) before[rank].push_back(p.detach().clone());
      distribute_module(net, mesh);
      for (const at::Tensor& p : net->parameters()) after[rank].push_back(DTensor(p.detach()).to_local().clone());
    });
    for (std::size_t r = 0; r < 4; ++r) {
      for (std::size_t i = 0; i < before[0].size(); ++i) EXPECT_TRUE(at::equal(after[r][i], before[0][i])) << r;
    }
  }
}

struct OddImpl : torch::nn::Module {
  explicit OddImpl(double value) {
    big = register_parameter("big", torch::full({9 << 20}, value));  // more than the buffer that values are sent in
    for (int i = 0; i < 5; ++i) {
      small.push_back(register_parameter("small" + std::to_string(i), torch::full({i, 3}, value + i)));
    }
    count = register_buffer("count", torch::full({}, value, at::kLong));
    equal = register_parameter("equal", torch::ones({4}));
    images = register_parameter("images", torch::full({2, 3, 4, 4}, value).contiguous(at::MemoryFormat::ChannelsLast));
    images.index_put_({0, 1, 2, 3}, -value);
  }
  at::Tensor big, count, equal, images;
  std::vector<at::Tensor> small;
};
TORCH_MODULE(Odd);

TEST(DistributeModule, SendsLargeModelsInPieces) {
  run_ranks(2, [](World& world) {
    const at::NoGradGuard no_grad;
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    Odd odd(mine(world)), first(1.0), second(2.0);
    const auto place = [](const std::string&, const at::Tensor& p) -> Placements {
      return {p.dim() > 0 ? Placement(Shard(0)) : Placement(Replicate())};
    };
    const auto check = [&](const Odd& got, const Odd& want) {
      EXPECT_TRUE(at::equal(DTensor(got->big).full_tensor(), want->big));
      for (std::size_t i = 0; i < want->small.size(); ++i) {
        EXPECT_TRUE(at::equal(DTensor(got->small[i]).full_tensor(), want->small[i]));
      }
      EXPECT_TRUE(at::equal(DTensor(got->count).full_tensor(), want->count));
      EXPECT_TRUE(at::equal(DTensor(got->equal).full_tensor(), want->equal));
      EXPECT_TRUE(at::equal(DTensor(got->images).full_tensor(), want->images));
      EXPECT_EQ(got->images.strides(), want->images.strides());
    };
    distribute_module(odd, mesh, place);
    check(odd, first);
    Odd named(mine(world));
    distribute_module(named, mesh, place, {.source = 1});
    check(named, second);
  });
}

TEST(DistributeModule, ComparesEqualCopies) {
  run_ranks(3, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3}, {"x"});
    torch::nn::Sequential net(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
    {
      const at::NoGradGuard no_grad;
      if (world.rank() == 1) net->named_parameters()["1.bias"][0] = 7;
    }
    EXPECT_EQ(error_of([&] { distribute_module(net, mesh, {}, {.equal_copies = true}); }),
              "[distribute_module] equal_copies, and yet the ranks have different values; got \"1.bias\" of rank 1 "
              "differ from those of rank 0; expected the same bits on all ranks; try without equal_copies all ranks "
              "take the values of one");
    EXPECT_FALSE(is_dtensor(net->parameters()[0])) << "nothing was changed";
    torch::nn::Linear equal(4, 3);
    distribute_module(equal, mesh, {}, {.equal_copies = true});
    EXPECT_TRUE(is_dtensor(equal->weight));
  });
}

TEST(DistributeModule, NamesModulesThatDiffer) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    torch::nn::Sequential net(torch::nn::Linear(4, 3), torch::nn::Linear(3, world.rank() == 1 ? 5 : 2));
    EXPECT_EQ(
        error_of([&] { distribute_module(net, mesh); }),
        "[distribute_module] the ranks pass different tensors; got \"1.weight\", f32[2,3], requires a gradient on "
        "rank 0, \"1.weight\", f32[5,3], requires a gradient on rank 1; expected the same names, shapes and types "
        "on all ranks; try the same model on all ranks");
    torch::nn::Sequential longer(torch::nn::Linear(4, 3));
    if (world.rank() == 1) longer->push_back(torch::nn::Linear(3, 2));
    EXPECT_TRUE(
        contains(error_of([&] { distribute_module(longer, mesh); }), "nothing more on rank 0, \"1.weight\", f32[2,3]"));
    EXPECT_FALSE(is_dtensor(net->parameters()[0]));
  });
}

TEST(DistributeModule, KeepsWhatIsDistributedAlready) {
  run_ranks(2, [](World& world) {
    const at::NoGradGuard no_grad;
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    torch::nn::Linear linear(4, 3);
    linear->weight.fill_(mine(world));
    linear->bias.fill_(mine(world));
    distribute_in_place(linear->weight, mesh, {Shard(1)}, {.source = 1});
    distribute_module(linear, mesh);
    EXPECT_TRUE(at::equal(DTensor(linear->weight).full_tensor(), at::full({3, 4}, 2.0)));
    EXPECT_TRUE(at::equal(DTensor(linear->bias).full_tensor(), at::full({3}, 1.0)));
  });
}

TEST(DistributeModule, SharesGradientsToo) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    torch::nn::Linear linear(2, 3);
    linear->weight.mutable_grad() = at::full({3, 2}, mine(world));
    distribute_module(linear, mesh);
    EXPECT_TRUE(at::equal(DTensor(linear->weight.grad()).to_local(), at::full({3, 2}, 1.0)));
  });
}

// One rank alone: whatever was sent, it would wait for the other.
TEST(DistributeModule, SendsNothingOfTheMetaDevice) {
  WorldOptions options;
  options.timeout = std::chrono::seconds(20);
  run_ranks(
      2,
      [](World& world) {
        const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
        if (world.rank() == 1) return;
        struct MetaImpl : torch::nn::Module {
          MetaImpl() { register_parameter("weight", torch::empty({6, 4}, at::kMeta)); }
        };
        MetaImpl meta;
        distribute_module(meta, mesh, [](const std::string&, const at::Tensor&) { return Placements{Shard(0)}; });
        EXPECT_EQ(DTensor(meta.parameters()[0].detach()).to_local().sizes(), at::IntArrayRef({3, 4}));
        EXPECT_TRUE(meta.parameters()[0].requires_grad());
      },
      options);
}

// The source has values, the others have room for none yet.
TEST(DistributeModule, FillsMetaTensorsFromASource) {
  run_ranks(2, [](World& world) {
    struct NetImpl : torch::nn::Module {
      explicit NetImpl(const at::Device& device) {
        register_parameter("weight", torch::ones({6, 4}, device));
        register_buffer("mask", torch::ones({6}, at::kMeta));
        register_buffer("scale", torch::ones({6}));
      }
    };
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    NetImpl net(world.rank() == 1 ? at::kCPU : at::kMeta);
    const auto place = [](const std::string&, const at::Tensor&) { return Placements{Shard(0)}; };
    EXPECT_EQ(error_of([&] { distribute_module(net, mesh, place); }),
              "[distribute_module] a tensor without values on some ranks; got \"weight\" on the meta device on rank 0, "
              "with values on rank 1; expected the same on all ranks; try a source that has the values: {.source = 0}");
    distribute_module(net, mesh, place, {.source = 1});
    EXPECT_TRUE(at::equal(DTensor(net.parameters()[0].detach()).full_tensor(), at::ones({6, 4})));
    EXPECT_TRUE(is_dtensor(net.buffers()[0]));
  });
}

// ---- modules as people write them

struct MaskedImpl : torch::nn::Module {
  MaskedImpl() {
    mask = register_buffer("mask", torch::tril(torch::ones({4, 4})).view({1, 1, 4, 4}));
    weight = register_parameter("weight", torch::arange(12.0).view({3, 4}));
    rows = register_buffer("rows", torch::arange(4.0).expand({3, 4}));
    turned = register_buffer("turned", torch::arange(6.0).view({2, 3}).t());
  }
  at::Tensor forward(const at::Tensor& x) {
    return (x.matmul(weight.t()).matmul(weight) * mask).sum() + rows.sum() + turned.sum();
  }
  at::Tensor mask, weight, rows, turned;
};
TORCH_MODULE(Masked);

TEST(DistributeModule, TakesBuffersThatAreViews) {
  Masked plain;
  const at::Tensor x = torch::arange(64.0).view({2, 2, 4, 4});
  const at::Tensor loss = plain->forward(x);
  loss.backward();
  run_ranks(2, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    Masked masked;
    distribute_module(masked, mesh);
    for (const at::Tensor& tensor : {masked->mask, masked->weight, masked->rows, masked->turned}) {
      EXPECT_TRUE(is_dtensor(tensor) && !tensor.is_view());
    }
    EXPECT_TRUE(masked->weight.requires_grad() && masked->weight.is_leaf());
    EXPECT_EQ(masked->turned.strides(), plain->turned.strides());
    const at::Tensor again = masked->forward(distribute_tensor(x, mesh, {Shard(0)}));
    EXPECT_TRUE(at::equal(DTensor(again.detach()).full_tensor(), loss.detach()));
    again.backward();
    EXPECT_TRUE(at::allclose(DTensor(masked->weight.grad()).full_tensor(), plain->weight.grad()));
    // They can be written, and viewed, as tensors of their own.
    const at::NoGradGuard no_grad;
    masked->mask.mul_(2);
    masked->mask.view({4, 4})[0].zero_();
    EXPECT_TRUE(at::equal(DTensor(masked->mask).full_tensor().view({4, 4})[1], plain->mask.view({4, 4})[1] * 2));
    masked->rows.add_(1);
    EXPECT_TRUE(at::equal(DTensor(masked->rows).full_tensor(), plain->rows + 1));
  });
}

TEST(DistributeModule, LeavesOtherHandlesTheirValues) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    struct NetImpl : torch::nn::Module {
      explicit NetImpl(const at::Tensor& base) { register_buffer("mask", base.view({2, 3})); }
    };
    const at::Tensor base = at::full({6}, mine(world));
    NetImpl net(base);
    torch::nn::Linear linear(4, 4);
    const at::Tensor alias = linear->weight.detach(), before = alias.clone();
    distribute_module(net, mesh);
    distribute_module(linear, mesh);
    EXPECT_TRUE(at::equal(base, at::full({6}, mine(world)))) << "the caller's tensor is the caller's";
    EXPECT_TRUE(at::equal(DTensor(net.buffers()[0]).to_local(), at::full({2, 3}, 1.0)));
    const at::NoGradGuard no_grad;
    linear->weight.zero_();
    EXPECT_TRUE(at::equal(alias, before));
  });
}

TEST(DistributeModule, RefusesTensorsThatShareMemoryWithEachOther) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    struct NetImpl : torch::nn::Module {
      NetImpl(const at::Tensor& a, const at::Tensor& b) {
        register_buffer("a", a);
        register_buffer("b", b);
      }
    };
    const at::Tensor base = at::ones({6});
    NetImpl overlap(base.narrow(0, 0, 4), base.narrow(0, 3, 3));
    EXPECT_EQ(
        error_of([&] { distribute_module(overlap, mesh); }),
        "[distribute_module] two tensors of the module share memory, and would not any more; got \"a\" and \"b\"; "
        "expected one tensor that is registered twice, or memory of their own; try clone() one of them");
    EXPECT_FALSE(is_dtensor(overlap.buffers()[0])) << "nothing was changed";
    // Pieces of one buffer that do not overlap, and one tensor under two names.
    NetImpl apart(base.narrow(0, 0, 3), base.narrow(0, 3, 3));
    distribute_module(apart, mesh);
    EXPECT_TRUE(is_dtensor(apart.buffers()[1]));
    NetImpl tied(base, base);
    distribute_module(tied, mesh);
    EXPECT_TRUE(tied.buffers()[0].is_same(tied.buffers()[1]));
    // A view whose gradient goes to a plain tensor.
    const at::Tensor source = at::ones({6}).requires_grad_(true);
    NetImpl computed(source.view({2, 3}), at::ones({1}));
    EXPECT_TRUE(contains(error_of([&] { distribute_module(computed, mesh); }), "\"a\", f32[2,3]; expected a leaf"));
  });
}

}  // namespace
}  // namespace dtensor::testing
