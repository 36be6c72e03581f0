// Gradients are those of the plain program, or an error: whatever the program does between two backward passes, and
// whatever only one of its ranks does.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>

#include "dtensor/dtensor.h"
#include "dtensor/runtime/backward.h"
#include "tests/runtime/helpers.h"

namespace dtensor::testing {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void on_ranks(const Dims& shape, const std::function<void(const DeviceMesh&)>& body) {
  std::int64_t n = 1;
  for (const std::int64_t size : shape) n *= size;
  run_ranks(n, [&](World& world) { body(init_device_mesh(world, at::kCPU, shape)); });
}

at::Tensor full(const at::Tensor& tensor) { return DTensor(tensor).full_tensor(); }

// ---- torch::autograd::Function

struct Square : torch::autograd::Function<Square> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x) {
    ctx->save_for_backward({x});
    return x * x;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    return {2 * ctx->get_saved_variables()[0] * gradients[0]};
  }
};

// Takes and saves DTensors by their own type.
struct Product : torch::autograd::Function<Product> {
  static at::Tensor forward(AutogradContext* ctx, DTensor x, const DTensor& y) {
    ctx->save_for_backward({x, y});
    return x * y;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    return {saved[1] * gradients[0], saved[0] * gradients[0]};
  }
};

struct Sum : torch::autograd::Function<Sum> {
  static at::Tensor forward(AutogradContext*, const std::vector<DTensor>& list, double factor) {
    at::Tensor sum = list[0] * factor;
    for (std::size_t i = 1; i < list.size(); ++i) sum = sum + list[i] * factor;
    return sum;
  }
  static variable_list backward(AutogradContext*, const variable_list& gradients) {
    return {gradients[0], 2 * gradients[0], at::Tensor()};
  }
};

struct Maybe : torch::autograd::Function<Maybe> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const c10::optional<DTensor>& y) {
    ctx->saved_data["both"] = y.has_value();
    return y ? x + *y : x * 1;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    return {gradients[0], ctx->saved_data["both"].toBool() ? 3 * gradients[0] : at::Tensor()};
  }
};

TEST(CustomFunction, TakesADTensorAsATensor) {
  on_ranks({2}, [](const DeviceMesh& mesh) {
    for (const Placement& placement : {Placement(Replicate()), Placement(Shard(0))}) {
      DTensor x = distribute_tensor(at::ones({4}), mesh, {placement});
      x.requires_grad_();
      (Square::apply(x) + 5 * x).sum().backward();
      EXPECT_TRUE(at::equal(full(x.grad()), at::full({4}, 7.0))) << placement.to_string();
      const DTensor fixed = x;
      x.mutable_grad() = at::Tensor();
      (Square::apply(fixed) + Square::apply(DTensor(x))).sum().backward();
      EXPECT_TRUE(at::equal(full(x.grad()), at::full({4}, 4.0)));
    }
  });
}

TEST(CustomFunction, SavesDTensors) {
  on_ranks({2}, [](const DeviceMesh& mesh) {
    DTensor x = distribute_tensor(at::full({4}, 2.0), mesh, {Shard(0)});
    DTensor y = distribute_tensor(at::full({4}, 3.0), mesh, {Replicate()});
    x.requires_grad_();
    y.requires_grad_();
    Product::apply(x, y).sum().backward();
    EXPECT_TRUE(at::equal(full(x.grad()), at::full({4}, 3.0)));
    EXPECT_TRUE(at::equal(full(y.grad()), at::full({4}, 2.0)));
  });
}

TEST(CustomFunction, TakesListsAndOptionalDTensors) {
  on_ranks({2}, [](const DeviceMesh& mesh) {
    std::vector<DTensor> list;
    for (int i = 0; i < 2; ++i) {
      list.emplace_back(distribute_tensor(at::ones({4}), mesh, {Shard(0)}));
      list.back().requires_grad_();
    }
    Sum::apply(list, 3.0).sum().backward();
    EXPECT_TRUE(at::equal(full(list[0].grad()), at::full({4}, 1.0)));
    EXPECT_TRUE(at::equal(full(list[1].grad()), at::full({4}, 2.0)));
    for (const DTensor& x : list) x.mutable_grad() = at::Tensor();
    Maybe::apply(list[0], c10::optional<DTensor>(list[1])).sum().backward();
    EXPECT_TRUE(at::equal(full(list[1].grad()), at::full({4}, 3.0)));
    Maybe::apply(list[0], c10::optional<DTensor>()).sum().backward();
    EXPECT_TRUE(at::equal(full(list[0].grad()), at::full({4}, 2.0)));
  });
}

TEST(CustomFunction, AnyModuleAndScriptsTakeDTensors) {
  on_ranks({2}, [](const DeviceMesh& mesh) {
    DTensor x = distribute_tensor(at::ones({4, 3}), mesh, {Shard(0)});
    x.requires_grad_();
    torch::nn::AnyModule any(torch::nn::Tanh{});
    any.forward<at::Tensor>(x).sum().backward();
    EXPECT_TRUE(at::allclose(full(x.grad()), 1 - at::ones({4, 3}).tanh().square()));
    x.mutable_grad() = at::Tensor();
    torch::jit::Module script("m");
    script.define("def forward(self, x):\n  return x * x\n");
    script.forward({x}).toTensor().sum().backward();
    EXPECT_TRUE(at::equal(full(x.grad()), at::full({4, 3}, 2.0)));
  });
}

// ---- undefined and plain gradients

struct NoGradient : torch::autograd::Function<NoGradient> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x) { return x * 2; }
  static variable_list backward(AutogradContext*, const variable_list&) { return {at::Tensor()}; }
};

struct PlainGradient : torch::autograd::Function<PlainGradient> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x) { return x * 2; }
  static variable_list backward(AutogradContext*, const variable_list& gradients) {
    return {at::full(gradients[0].sizes(), 3.0)};
  }
};

TEST(UndefinedGradient, PassesEveryNode) {
  on_ranks({2}, [](const DeviceMesh& mesh) {
    const at::Tensor local = at::ones({4}).requires_grad_();
    const at::Tensor x = from_local(local, mesh, {Replicate()});
    NoGradient::apply(x).sum().backward();
    const at::Tensor y = distribute_tensor(at::ones({4}), mesh, {Shard(0)}).requires_grad_();
    const at::Tensor moved = DTensor(y).redistribute({Replicate()});
    NoGradient::apply(moved).sum().backward();
    const at::Tensor taken = DTensor(y).to_local();
    NoGradient::apply(taken).sum().backward();
    for (const at::Tensor& leaf : {local, y}) {
      EXPECT_TRUE(!leaf.grad().defined() || full(leaf.grad()).abs().sum().item<double>() == 0);
    }
  });
}

TEST(UndefinedGradient, PlainOnesAreTheSameOnAllRanks) {
  on_ranks({2}, [](const DeviceMesh& mesh) {
    const at::Tensor local = at::ones({2}).requires_grad_();
    const at::Tensor x = from_local(local, mesh, {Shard(0)});
    PlainGradient::apply(x).sum().backward();
    EXPECT_TRUE(at::equal(local.grad(), at::full({2}, 3.0)));
    const at::Tensor y = distribute_tensor(at::ones({4}), mesh, {Shard(0)}).requires_grad_();
    const at::Tensor moved = DTensor(y).redistribute({Replicate()});
    PlainGradient::apply(moved).sum().backward();
    EXPECT_TRUE(at::equal(full(y.grad()), at::full({4}, 3.0)));
  });
}

// ---- leaves

TEST(LeafHooks, FollowTheTensor) {
  on_ranks({2}, [](const DeviceMesh& mesh) {
    const at::Tensor p = distribute_tensor(numbers({4, 3}), mesh, {Replicate()});
    const at::Tensor x = distribute_tensor(numbers({6, 4}), mesh, {Shard(0)});
    const at::Tensor expected = at::mm(numbers({6, 4}).t(), at::ones({6, 3}, at::kDouble));
    for (int i = 0; i < 5; ++i) {
      const at::Tensor leaf = p.detach().requires_grad_();
      // As if the allocator had given it the memory of the last leaf's state, which it does at times.
      payload_of(leaf).hooked = torch::autograd::impl::get_autograd_meta(leaf);
      at::mm(x, leaf).sum().backward();
      ASSERT_EQ(DTensor(leaf.grad()).placements(), Placements{Replicate()}) << "iteration " << i;
      ASSERT_TRUE(at::allclose(DTensor(leaf.grad()).to_local(), expected)) << "iteration " << i;
    }
  });
}

// Recomputation by hand: leaves are made in the backward pass.
struct Recomputed : torch::autograd::Function<Recomputed> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& w) {
    ctx->save_for_backward({x, w});
    return at::mm(x, w).tanh();
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    const at::AutoGradMode enable(true);
    const at::Tensor x = saved[0].detach().requires_grad_(), w = saved[1].detach().requires_grad_();
    const at::Tensor y = at::mm(x, w).tanh();
    y.backward(gradients[0]);
    return {x.grad(), w.grad()};
  }
};

TEST(LeafHooks, RecomputationGivesTheSameGradients) {
  const auto train = [](const at::Tensor& x, std::vector<at::Tensor> weights) {
    at::Tensor h = x;
    for (const at::Tensor& w : weights) h = Recomputed::apply(h, w);
    (h * h).sum().backward();
  };
  std::vector<at::Tensor> plain;
  for (int i = 0; i < 12; ++i) plain.push_back(numbers({4, 4}, 0.3 * i).requires_grad_());
  for (int step = 0; step < 3; ++step) train(numbers({6, 4}), plain);
  on_ranks({2}, [&](const DeviceMesh& mesh) {
    std::vector<at::Tensor> weights;
    for (int i = 0; i < 12; ++i) {
      weights.push_back(distribute_tensor(numbers({4, 4}, 0.3 * i), mesh, {Replicate()}).requires_grad_());
    }
    for (int step = 0; step < 3; ++step) train(distribute_tensor(numbers({6, 4}), mesh, {Shard(0)}), weights);
    for (int i = 0; i < 12; ++i) {
      ASSERT_EQ(DTensor(weights[i].grad()).placements(), Placements{Replicate()});
      ASSERT_TRUE(at::allclose(DTensor(weights[i].grad()).to_local(), plain[i].grad(), 1e-10, 1e-12)) << i;
    }
  });
}

TEST(LeafHooks, DoNotPileUp) {
  on_ranks({2}, [](const DeviceMesh& mesh) {
    const at::Tensor a = distribute_tensor(numbers({4}), mesh, {Replicate()}).requires_grad_();
    const at::Tensor b = a.detach().requires_grad_();
    for (int i = 0; i < 50; ++i) (a * a + b * b).sum().backward();
    for (const at::Tensor& leaf : {a, b}) {
      EXPECT_EQ(torch::autograd::impl::get_autograd_meta(leaf)->cpp_hooks_list_->size(), 1);
      EXPECT_TRUE(at::allclose(full(leaf.grad()), 100 * numbers({4})));
    }
  });
}

// The program's own hooks stay, before ours and after it.
TEST(LeafHooks, LeaveThoseOfTheProgram) {
  on_ranks({2}, [](const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(numbers({6, 4}), mesh, {Shard(0)});
    for (const bool first : {true, false}) {
      const at::Tensor leaf = distribute_tensor(numbers({4, 3}), mesh, {Replicate()}).requires_grad_();
      int called = 0;
      const auto count = [&](const at::Tensor& gradient) {
        ++called;
        return gradient * 2;
      };
      if (first) leaf.register_hook(count);
      const at::Tensor y = at::mm(x, leaf);
      if (!first) leaf.register_hook(count);
      y.sum().backward();
      EXPECT_EQ(called, 1);
      EXPECT_EQ(DTensor(leaf.grad()).placements(), Placements{Replicate()});
      EXPECT_TRUE(at::allclose(full(leaf.grad()), 2 * at::mm(numbers({6, 4}).t(), at::ones({6, 3}, at::kDouble))));
    }
  });
}

TEST(PlainGrad, IsAddedTo) {
  on_ranks({2}, [](const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(numbers({6, 4}), mesh, {Shard(0)});
    const at::Tensor expected = at::mm(numbers({6, 4}).t(), at::ones({6, 3}, at::kDouble)) + 1;
    for (const Placement& placement : {Placement(Replicate()), Placement(Shard(0))}) {
      for (const bool accumulate : {false, true}) {
        const at::Tensor p = distribute_tensor(numbers({4, 3}), mesh, {placement}).requires_grad_();
        const at::Tensor given = at::ones({4, 3}, at::kDouble);
        p.mutable_grad() = given;
        {
          std::optional<GradientAccumulation> guard;
          if (accumulate) guard.emplace();
          at::mm(x, p).sum().backward();
        }
        ASSERT_TRUE(is_dtensor(p.grad()));
        EXPECT_TRUE(at::allclose(full(p.grad()), expected)) << placement.to_string() << accumulate;
        EXPECT_TRUE(at::equal(given, at::ones({4, 3}, at::kDouble)));
      }
    }
    // In a bucket.
    torch::nn::Linear layer(torch::nn::LinearOptions(4, 3).bias(false));
    layer->to(at::kDouble);
    distribute_module(*layer, mesh);
    layer->weight.mutable_grad() = at::ones({3, 4}, at::kDouble);
    layer->forward(x).sum().backward();
    EXPECT_TRUE(at::allclose(full(layer->weight.grad()), expected.t()));
    // Of another shape.
    layer->weight.mutable_grad() = at::ones({4, 3}, at::kDouble);
    const std::string error = error_of([&] { layer->forward(x).sum().backward(); });
    EXPECT_NE(error.find("the plain tensor in .grad() has another shape"), std::string::npos) << error;
  });
}

// ---- ranks that do not all do the same

// The gradient of one of its arguments comes home by two steps, those of the others by one.
struct Given : torch::autograd::Function<Given> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& a, const at::Tensor& b, const at::Tensor& c,
                            std::int64_t turn) {
    ctx->saved_data["a"] = a;
    ctx->saved_data["turn"] = turn;
    return (a + b + c).detach();
  }
  static variable_list backward(AutogradContext* ctx, const variable_list&) {
    const DeviceMesh& mesh = DTensor(ctx->saved_data["a"].toTensor()).mesh();
    const at::Tensor value = numbers({256, 256}), rows = value.chunk(2)[(*mesh.coordinate())[1]];
    variable_list result = {from_local(rows / 2, mesh, {Partial(), Shard(0)}),
                            from_local(value / 2, mesh, {Replicate(), Partial()}),
                            from_local(value / 2, mesh, {Partial(), Replicate()})};
    std::rotate(result.begin(), result.begin() + ctx->saved_data["turn"].toInt(), result.end());
    result.emplace_back();
    return result;
  }
};

TEST(PendingPlan, OneRankMayKeepAGradient) {
  on_ranks({2, 2}, [](const DeviceMesh& mesh) {
    for (std::int64_t turn = 0; turn < 3; ++turn) {
      std::vector<at::Tensor> leaves, kept;
      for (int i = 0; i < 3; ++i) {
        leaves.push_back(distribute_tensor(numbers({256, 256}), mesh, {Replicate(), Replicate()}).requires_grad_());
        static_cast<void>(leaves[i] * 2);  // its hook comes before the program's
        leaves[i].register_hook([&](const at::Tensor& gradient) {
          if (mesh.rank() == 0) kept.push_back(gradient);
          return gradient;
        });
      }
      const at::Tensor y = Given::apply(leaves[0], leaves[1], leaves[2], turn);
      for (int pass = 0; pass < 2; ++pass) y.sum().backward({}, /*retain_graph=*/true);
      for (const at::Tensor& leaf : leaves) {
        ASSERT_TRUE(at::allclose(DTensor(leaf.grad()).to_local(), 2 * numbers({256, 256}))) << turn;
      }
    }
  });
}

// One rank reads a result of two steps at once, one never does.
TEST(PendingPlan, OneRankMayAskForTheResult) {
  on_ranks({2, 2}, [](const DeviceMesh& mesh) {
    const at::Tensor whole = numbers({256, 256}), rows = whole.chunk(2)[(*mesh.coordinate())[1]];
    const DTensor x = from_local(rows / 2, mesh, {Partial(), Shard(0)});
    const DTensor other = from_local(whole / 2, mesh, {Replicate(), Partial()});
    const Placements replicated = {Replicate(), Replicate()};
    const Spec to = Spec::make(x.spec().meta(), mesh, replicated);
    ASSERT_EQ(make_plan(x.spec(), to).steps().size(), 2);
    for (int round = 0; round < 3; ++round) {
      DTensor y = x.redistribute(replicated, {.async = true});
      if (mesh.rank() == 0) {
        EXPECT_TRUE(at::allclose(y.to_local(), whole));
      }
      if (mesh.rank() == 1) y = DTensor();
      const DTensor z = other.redistribute(replicated, {.async = true});
      EXPECT_TRUE(at::allclose(z.to_local(), whole));
      if (y.defined()) {
        EXPECT_TRUE(at::allclose(y.to_local(), whole));
      }
    }
  });
}

// ---- writes

TEST(AsyncRedistribute, HasTheValuesOfTheCall) {
  on_ranks({2}, [](const DeviceMesh& mesh) {
    const at::Tensor whole = numbers({6, 4});
    const std::vector<std::function<void(const DTensor&)>> writes = {
        [](const DTensor& x) { x.data().add_(1); },
        [](const DTensor& x) { x.to_local().data().add_(1); },
        [](const DTensor& x) { static_cast<const at::Tensor&>(x).add_(1); },
        [](const DTensor& x) { x.to_local().add_(1); },
    };
    const std::vector<std::pair<Placement, Placement>> moves = {
        {Shard(0), Replicate()}, {Shard(0), Shard(1)}, {Partial(), Replicate()}, {Partial(), Shard(0)}};
    for (std::size_t i = 0; i < writes.size(); ++i) {
      for (const auto& [from, to] : moves) {
        const DTensor x = from.is_partial() ? from_local(whole.clone(), mesh, {from})
                                            : DTensor(distribute_tensor(whole, mesh, {from}));
        const DTensor y = x.redistribute({to}, {.async = true});
        writes[i](x);
        EXPECT_TRUE(at::allclose(full(y), from.is_partial() ? 2 * whole : whole))
            << "write " << i << ", " << from.to_string() << " to " << to.to_string();
      }
    }
  });
}

TEST(PartialSum, IsAddedToInPlace) {
  on_ranks({2}, [](const DeviceMesh& mesh) {
    const at::Tensor a = numbers({4, 6}), b = numbers({6, 4}, 0.4), r = numbers({4, 4}, 0.8);
    const at::Tensor product = at::mm(a, b);
    for (const Placement& placement : {Placement(Replicate()), Placement(Shard(0)), Placement(Partial())}) {
      const at::Tensor other = placement.is_partial() ? at::Tensor(from_local(r / 2, mesh, {placement}))
                                                      : at::Tensor(distribute_tensor(r, mesh, {placement}));
      at::Tensor h = at::mm(distribute_tensor(a, mesh, {Shard(1)}), distribute_tensor(b, mesh, {Shard(0)}));
      ASSERT_TRUE(DTensor(h).placements()[0].is_partial());
      h += other;
      EXPECT_TRUE(at::allclose(full(h), product + r)) << placement.to_string();
      at::Tensor k = at::mm(distribute_tensor(a, mesh, {Shard(1)}), distribute_tensor(b, mesh, {Shard(0)}));
      k.add_(other, 0.5);
      EXPECT_TRUE(at::allclose(full(k), product + 0.5 * r)) << placement.to_string();
      at::Tensor list = at::mm(distribute_tensor(a, mesh, {Shard(1)}), distribute_tensor(b, mesh, {Shard(0)}));
      const std::vector<at::Tensor> sums = {list}, others = {other};
      at::_foreach_add_(sums, others);
      EXPECT_TRUE(at::allclose(full(list), product + r)) << placement.to_string();
    }
  });
}

TEST(PartialSum, OptimizersStepALeaf) {
  const auto run = [](const at::Tensor& leaf, const std::string& name) {
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    const std::vector<at::Tensor> leaves = {leaf};
    if (name == "SGD") {
      optimizer = std::make_unique<torch::optim::SGD>(leaves, torch::optim::SGDOptions(0.1).momentum(0.9));
    } else {
      optimizer = std::make_unique<torch::optim::AdamW>(leaves, torch::optim::AdamWOptions(0.1));
    }
    for (int step = 0; step < 3; ++step) {
      optimizer->zero_grad();
      (leaf * leaf).sum().backward();
      optimizer->step();
    }
  };
  on_ranks({2}, [&](const DeviceMesh& mesh) {
    for (const char* name : {"SGD", "AdamW"}) {
      const at::Tensor plain = numbers({4}).requires_grad_();
      const at::Tensor leaf = at::Tensor(from_local(numbers({4}) / 2, mesh, {Partial()})).requires_grad_();
      run(plain, name);
      run(leaf, name);
      EXPECT_TRUE(at::allclose(full(leaf.detach()), plain.detach(), 1e-10, 1e-12)) << name;
    }
  });
}

TEST(PartialSum, NormsHaveSecondDerivatives) {
  const auto derivatives = [](const at::Tensor& x, const at::Tensor& w, const at::Tensor& b, bool layer) {
    const at::Tensor y = layer ? at::layer_norm(x, {4}, w, b) : at::batch_norm(x, w, b, {}, {}, true, 0.1, 1e-5, false);
    const at::Tensor first = torch::autograd::grad({y.pow(3).sum()}, {x}, {}, {}, true)[0];
    return torch::autograd::grad({first.pow(2).sum()}, {x, w, b}, {}, {}, false, true);
  };
  for (const bool layer : {true, false}) {
    const variable_list plain = derivatives(numbers({6, 4}).requires_grad_(), numbers({4}, 0.3).requires_grad_(),
                                            numbers({4}, 0.6).requires_grad_(), layer);
    on_ranks({2}, [&](const DeviceMesh& mesh) {
      const at::Tensor w = distribute_tensor(numbers({4}, 0.3), mesh, {Replicate()}).requires_grad_();
      const at::Tensor b = distribute_tensor(numbers({4}, 0.6), mesh, {Replicate()}).requires_grad_();
      const at::Tensor x = distribute_tensor(numbers({6, 4}), mesh, {Shard(0)}).requires_grad_();
      const variable_list got = derivatives(x, w, b, layer);
      for (std::size_t i = 0; i < got.size(); ++i) {
        ASSERT_EQ(got[i].defined(), plain[i].defined()) << layer << i;
        if (got[i].defined()) {
          EXPECT_TRUE(at::allclose(full(got[i]), plain[i], 1e-8, 1e-10)) << layer << i;
        }
      }
    });
  }
}

// The gradient of `cat` is cut into views, one for each leaf: to write to one does not concern the other.
TEST(CatGradient, IsRightInEveryPass) {
  for (const bool accumulate : {false, true}) {
    on_ranks({2}, [&](const DeviceMesh& mesh) {
      const at::Tensor a = distribute_tensor(numbers({4, 3}), mesh, {Replicate()}).requires_grad_();
      const at::Tensor b = distribute_tensor(numbers({4, 3}, 0.5), mesh, {Shard(0)}).requires_grad_();
      const at::Tensor pa = numbers({4, 3}).requires_grad_(), pb = numbers({4, 3}, 0.5).requires_grad_();
      for (int pass = 0; pass < 3; ++pass) {
        {
          std::optional<GradientAccumulation> guard;
          if (accumulate && pass < 2) guard.emplace();
          at::cat({a, b}).pow(2).sum().backward();
        }
        at::cat({pa, pb}).pow(2).sum().backward();
        if (accumulate && pass < 2) continue;
        EXPECT_TRUE(at::allclose(full(a.grad()), pa.grad())) << pass;
        EXPECT_TRUE(at::allclose(full(b.grad()), pb.grad())) << pass;
      }
      // Without a look between the passes.
      for (const at::Tensor& leaf : {a, b, pa, pb}) leaf.mutable_grad() = at::Tensor();
      for (int pass = 0; pass < 3; ++pass) {
        at::cat({a, b}).pow(2).sum().backward();
        at::cat({pa, pb}).pow(2).sum().backward();
      }
      EXPECT_TRUE(at::allclose(full(b.grad()), pb.grad()));
      EXPECT_TRUE(at::allclose(full(a.grad()), pa.grad()));
    });
  }
}

// One gradient, or views of it, may belong to several leaves.
TEST(SharedGradient, IsRightInEveryPass) {
  const std::vector<std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>> programs = {
      [](const at::Tensor& a, const at::Tensor& b) { return a + b; },
      [](const at::Tensor& a, const at::Tensor& b) { return b + a; },
      [](const at::Tensor& a, const at::Tensor& b) { return a.t() + b; },
      [](const at::Tensor& a, const at::Tensor& b) { return b.t() + a; },
      [](const at::Tensor& a, const at::Tensor& b) {
        return at::stack({a, b});
      },
  };
  for (std::size_t i = 0; i < programs.size(); ++i) {
    on_ranks({2}, [&](const DeviceMesh& mesh) {
      const at::Tensor a = distribute_tensor(numbers({4, 4}), mesh, {Shard(0)}).requires_grad_();
      const at::Tensor b = distribute_tensor(numbers({4, 4}, 0.5), mesh, {Replicate()}).requires_grad_();
      const at::Tensor pa = numbers({4, 4}).requires_grad_(), pb = numbers({4, 4}, 0.5).requires_grad_();
      for (int pass = 0; pass < 3; ++pass) {
        std::optional<GradientAccumulation> guard;
        if (pass < 2) guard.emplace();
        programs[i](a, b).pow(2).sum().backward();
        programs[i](pa, pb).pow(2).sum().backward();
      }
      EXPECT_TRUE(at::allclose(full(b.grad()), pb.grad())) << i;
      EXPECT_TRUE(at::allclose(full(a.grad()), pa.grad())) << i;
    });
  }
}

// ---- is this a backward pass?

TEST(InBackward, IsToldInMicroseconds) {
  EXPECT_FALSE(in_backward());
  const at::Tensor x = at::ones({3}).requires_grad_();
  const at::Tensor y = x * 2;
  int inside = 0;
  y.register_hook([&](const at::Tensor&) { inside += in_backward(); });
  x.register_hook([&](const at::Tensor&) {
    inside += in_backward();
    torch::autograd::Engine::get_default_engine().queue_callback([&] { inside += in_backward(); });
  });
  y.sum().backward();
  EXPECT_EQ(inside, 3);
  EXPECT_FALSE(in_backward());
  const auto begin = std::chrono::steady_clock::now();
  constexpr int kCalls = 1000;
  int outside = 0;
  for (int i = 0; i < kCalls; ++i) outside += in_backward();
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
  EXPECT_EQ(outside, 0);
  EXPECT_LT(took.count() / kCalls, 20) << "microseconds a call";
  RecordProperty("microseconds", std::to_string(took.count() / kCalls));
  std::printf("in_backward: %.4f us a call\n", took.count() / kCalls);
}

}  // namespace
}  // namespace dtensor::testing
