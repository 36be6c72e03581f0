// What programs do with parameters of fully sharded modules beside training them, held to the plain module.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dtensor/dtensor.h"
#include "tests/runtime/helpers.h"

namespace dtensor::testing {
namespace {

struct TwoImpl : torch::nn::Module {
  TwoImpl() {
    a = register_module("a", torch::nn::Linear(8, 8));
    b = register_module("b", torch::nn::Linear(8, 8));
    to(at::kDouble);
    const at::NoGradGuard no_grad;
    double start = 0;
    for (at::Tensor& p : parameters()) p.copy_(numbers(p.sizes(), start += 0.3).mul(0.5));
  }
  at::Tensor forward(const at::Tensor& x) { return b(torch::relu(a(x))); }
  torch::nn::Linear a{nullptr}, b{nullptr};
};
TORCH_MODULE(Two);

at::Tensor full(const at::Tensor& tensor) { return DTensor(tensor.detach()).full_tensor(); }

void on_two(const std::function<void(const DeviceMesh&)>& body) {
  run_ranks(2, [&](World& world) { body(init_device_mesh(world, at::kCPU, {2}, {"dp"})); });
}

void shard_both(Two& two, const DeviceMesh& mesh, const FullyShardOptions& options = {}) {
  fully_shard(*two->a, mesh, options);
  fully_shard(*two->b, mesh, options);
}

const FullyShardOptions kHalves{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};

TEST(UnitUses, OneOperatorReadsTwoUnits) {
  on_two([](const DeviceMesh& mesh) {
    const Two plain;
    Two two;
    shard_both(two, mesh);
    const at::Tensor all = torch::nn::utils::parameters_to_vector(two->parameters());
    EXPECT_TRUE(at::equal(full(all), torch::nn::utils::parameters_to_vector(plain->parameters())));
    const at::Tensor x = numbers({4, 8});
    const at::Tensor y = torch::linear(distribute_tensor(x, mesh, {Shard(0)}), two->a->weight, two->b->bias);
    EXPECT_TRUE(at::allclose(full(y), torch::linear(x, plain->a->weight, plain->b->bias)));
    y.sum().backward();
    EXPECT_TRUE(at::allclose(full(two->b->bias.grad()), at::full({8}, 4.0, at::kDouble)));
  });
}

struct TypesImpl : torch::nn::Module {
  TypesImpl() {
    q = register_parameter("q", numbers({8, 6}).to(at::kBFloat16), false);
    s = register_parameter("s", numbers({8, 1}, 2).to(at::kFloat));
  }
  at::Tensor q, s;
};

TEST(UnitUses, OneModuleHasTwoTypes) {
  on_two([](const DeviceMesh& mesh) {
    TypesImpl types;
    const at::Tensor expected = (types.q * types.s).detach();
    fully_shard(types, mesh);
    EXPECT_TRUE(at::equal(full(types.q * types.s), expected));
  });
}

// In place, with operands of other shapes from the unit itself.
TEST(UnitUses, AUnitIsWrittenWithWhatIsReadFromIt) {
  using Write = std::function<void(TwoImpl&)>;
  const std::vector<Write> writes = {
      [](TwoImpl& m) { m.a->weight.mul_(m.a->bias.unsqueeze(1)); },
      [](TwoImpl& m) { m.a->weight.mul_(m.a->bias); },
      [](TwoImpl& m) { m.a->bias.copy_(m.b->weight.sum(0)); },
      [](TwoImpl& m) { m.a->bias.copy_(m.b->weight[3]); },
      [](TwoImpl& m) { m.a->weight.copy_(m.b->weight.t()); },
      [](TwoImpl& m) { m.a->weight.addmm_(m.b->weight, m.b->weight.t()); },
  };
  on_two([&](const DeviceMesh& mesh) {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < writes.size(); ++i) {
      Two plain, two;
      fully_shard(*two, mesh);
      writes[i](*plain);
      writes[i](*two);
      for (std::size_t p = 0; p < plain->parameters().size(); ++p) {
        EXPECT_TRUE(at::allclose(full(two->parameters()[p]), plain->parameters()[p])) << i << ", " << p;
      }
    }
  });
}

TEST(UnitUses, SetDataStays) {
  on_two([](const DeviceMesh& mesh) {
    Two two;
    fully_shard(*two, mesh);
    const at::Tensor x = distribute_tensor(numbers({4, 8}), mesh, {Shard(0)});
    two->forward(x).sum().backward();
    two->a->weight.set_data(at::zeros_like(two->a->weight));
    two->forward(x).sum().backward();
    EXPECT_EQ(full(two->a->weight).abs().sum().item<double>(), 0);
  });
}

// Looked at between passes, a parameter is its part, of its own type.
TEST(UnitUses, OptimizersAndAveragesSeeTheParts) {
  on_two([](const DeviceMesh& mesh) {
    Two two;
    two->to(at::kFloat);
    const at::Tensor before = two->b->weight.detach().clone();
    shard_both(two, mesh, kHalves);
    const at::Tensor x = distribute_tensor(numbers({4, 8}).to(at::kBFloat16), mesh, {Shard(0)});
    {
      const at::NoGradGuard no_grad;
      two->forward(x);
    }
    EXPECT_TRUE(at::equal(full(two->b->weight.detach().clone()), before));
    torch::optim::Adam optimizer(two->parameters());
    two->forward(x).sum().backward();
    {
      const at::NoGradGuard no_grad;
      two->forward(x);
    }
    optimizer.step();
    for (const auto& [key, state] : optimizer.state()) {
      const DTensor average(static_cast<const torch::optim::AdamParamState&>(*state).exp_avg());
      EXPECT_EQ(average.scalar_type(), at::kFloat) << average.spec().to_string();
      EXPECT_TRUE(average.placements()[0].is_shard(0)) << average.spec().to_string();
    }
  });
}

// Sums of many gradients are kept in the type that they are reduced in.
TEST(UnitUses, AccumulationDoesNotStopAtTheTypesEnd) {
  on_two([](const DeviceMesh& mesh) {
    for (const Placement& batch : {Placement(Shard(0)), Placement(Replicate())}) {
      torch::nn::Linear linear(4, 4);
      fully_shard(*linear, mesh, kHalves);
      const at::Tensor x = distribute_tensor(at::ones({2, 4}), mesh, {batch}).to(at::kBFloat16);
      {
        const GradientAccumulation guard;
        for (int i = 0; i < 299; ++i) linear->forward(x).sum().backward();
      }
      linear->forward(x).sum().backward();
      EXPECT_EQ(full(linear->bias.grad())[0].item<double>(), 600);
      EXPECT_EQ(linear->bias.grad().scalar_type(), at::kFloat);
    }
  });
}

TEST(UnitUses, ParametersOfOneRankHaveTheTypeThatWasAskedFor) {
  run_ranks(1, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {1}, {"dp"});
    torch::nn::Linear linear(4, 4);
    fully_shard(*linear, mesh, kHalves);
    const at::Tensor x = distribute_tensor(at::ones({2, 4}), mesh, {Shard(0)}).to(at::kBFloat16);
    linear->forward(x).sum().backward();
    EXPECT_EQ(linear->bias.grad().scalar_type(), at::kFloat);
  });
}

struct Head : torch::nn::LinearImpl {
  using LinearImpl::LinearImpl;
  void tie(const at::Tensor& other) { parameters_["weight"] = weight = other; }
};

struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    tokens = register_module("tokens", torch::nn::Embedding(12, 8));
    tokens->weight.set_data(numbers({12, 8}));
    head = register_module("head", std::make_shared<Head>(torch::nn::LinearOptions(8, 12).bias(false)));
    head->tie(tokens->weight);
  }
  at::Tensor forward(const at::Tensor& ids) { return head->forward(tokens(ids)); }
  torch::nn::Embedding tokens{nullptr};
  std::shared_ptr<Head> head;
};

// An embedding by rows and a head by columns are one cut of a weight that they share.
TEST(UnitUses, ATiedWeightHasTwoStyles) {
  on_two([](const DeviceMesh& mesh) {
    TiedImpl plain, tied;
    parallelize_module(tied, mesh, {{"tokens", RowwiseParallel()}, {"head", ColwiseParallel()}});
    const at::Tensor ids = at::arange(10, at::kLong).view({2, 5});
    const at::Tensor expected = plain.forward(ids);
    const at::Tensor logits = tied.forward(distribute_tensor(ids, mesh, {Replicate()}));
    EXPECT_TRUE(DTensor(logits).placements()[0].is_shard(2)) << DTensor(logits).spec().to_string();
    EXPECT_TRUE(at::allclose(full(logits), expected));
    expected.pow(2).sum().backward();
    logits.pow(2).sum().backward();
    EXPECT_TRUE(at::allclose(full(tied.tokens->weight.grad()), plain.tokens->weight.grad()));
    TiedImpl other;
    const std::string error = error_of([&] {
      parallelize_module(other, mesh, {{"tokens", ColwiseParallel()}, {"head", ColwiseParallel()}});
    });
    EXPECT_NE(error.find("cut differently"), std::string::npos) << error;
  });
}

// The input that a style moved is remembered for the next one: not when it was written, or began to want a gradient.
TEST(UnitUses, MovedInputsAreNotOutOfDate) {
  on_two([](const DeviceMesh& mesh) {
    Two plain, two;
    parallelize_module(*two, mesh, {{"a", ColwiseParallel()}, {"b", ColwiseParallel()}});
    {
      const c10::InferenceMode inference;
      const at::Tensor x = distribute_tensor(numbers({4, 8}), mesh, {Shard(0)});
      two->a(x);
      x.add_(1);
      EXPECT_TRUE(at::allclose(DTensor(two->b(x)).full_tensor(), plain->b(numbers({4, 8}) + 1)));
    }
    const at::Tensor x = distribute_tensor(numbers({4, 8}), mesh, {Shard(0)});
    const at::Tensor y = two->a(x);
    x.requires_grad_();
    (two->a(x).pow(2).sum() + y.sum()).backward();
    EXPECT_TRUE(x.grad().defined());
  });
}

// What cannot be done is said before anything is changed.
TEST(UnitUses, RefusedModulesStayAsTheyWere) {
  on_two([](const DeviceMesh& mesh) {
    Two two;
    two->register_buffer("alias", two->b->weight.detach());  // tensors of one module that share memory
    for (const std::string& error : {error_of([&] {
                                       parallelize_module(*two, mesh, {{"a", ColwiseParallel()}});
                                     }),
                                     error_of([&] { fully_shard(*two, mesh); })}) {
      EXPECT_NE(error.find("b.weight"), std::string::npos) << error;
      for (const at::Tensor& p : two->parameters()) EXPECT_FALSE(is_dtensor(p));
    }
  });
}

}  // namespace
}  // namespace dtensor::testing
