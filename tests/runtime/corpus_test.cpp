// Wrong answers that users of other libraries have met, by the number of the report (pytorch/pytorch unless said).
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dtensor/comm/world.h"
#include "dtensor/core/error.h"
#include "dtensor/runtime/clip.h"
#include "dtensor/runtime/local_map.h"
#include "dtensor/runtime/payload.h"
#include "dtensor/runtime/random.h"
#include "dtensor/runtime/record.h"
#include "dtensor/runtime/tensor.h"
#include "dtensor/testing/parts.h"
#include "tests/runtime/helpers.h"

namespace dtensor {
namespace {

using testing::error_of;
using testing::numbers;
using testing::parts_of;

using Body = std::function<void(const std::shared_ptr<const DeviceMesh>&)>;
void on_ranks(const Dims& shape, const Body& body) {
  run_ranks(Mesh::make(shape).size(),
            [&](World& world) { body(std::make_shared<const DeviceMesh>(init_device_mesh(world, at::kCPU, shape))); });
}

// Laid out as the text says; Partials are split unevenly.
DTensor laid(const at::Tensor& whole, const std::shared_ptr<const DeviceMesh>& mesh, const char* placements) {
  const TensorMeta meta(Dims(whole.sizes().begin(), whole.sizes().end()), DType::kF64);
  const Spec spec = Spec::make(meta, *mesh, parse_placements(placements));
  return wrap(parts_of(whole, spec, 11)[static_cast<std::size_t>(mesh->rank())].clone(), spec, mesh);
}

void expect_whole(const at::Tensor& got, const at::Tensor& expected) {
  const at::Tensor full = DTensor(got.detach()).full_tensor();
  EXPECT_EQ(testing::difference(full, expected), "") << DTensor(got).spec().to_string();
}

TEST(Corpus, Issue149768And163193ANumberIsAddedToAPartialOnce) {
  const at::Tensor x = numbers({5, 3});
  on_ranks({3}, [&](const auto& mesh) {
    expect_whole(laid(x, mesh, "P(sum)") + 10, x + 10);
    expect_whole(laid(x, mesh, "S(0)").sum() + 1e-6, x.sum() + 1e-6);
    expect_whole(10 - laid(x, mesh, "P(sum)"), 10 - x);
    expect_whole(laid(x, mesh, "P(sum)").sub_(2), x - 2);
  });
}

TEST(Corpus, Issue153603ANumberIsNotRememberedFromTheCallBefore) {
  on_ranks({2}, [&](const auto& mesh) {
    const at::Tensor x = numbers({4});
    for (const double c : {1.0, 2.0, 3.0}) expect_whole(laid(x, mesh, "S(0)").mean() * c, x.mean() * c);
  });
}

TEST(Corpus, Issue165962ExtremesAndNormsOfAPartialAreThoseOfTheValue) {
  const at::Tensor x = numbers({5, 3});
  on_ranks({3}, [&](const auto& mesh) {
    const DTensor p = laid(x, mesh, "P(sum)");
    expect_whole(p.max(), x.max());
    expect_whole(p.amin(0), x.amin(0));
    expect_whole(p.norm(), x.norm());
    expect_whole(at::linalg_vector_norm(p, 1, 1), at::linalg_vector_norm(x, 1, 1));
    expect_whole(p.argmax(0), x.argmax(0));
  });
}

TEST(Corpus, Issue163374ClampInPlaceOnAPartial) {
  on_ranks({4}, [&](const auto& mesh) {
    const at::Tensor x = numbers({5, 3}) * 10;
    DTensor p = laid(x, mesh, "P(sum)");
    p.clamp_(-1, 2);
    expect_whole(p, x.clamp(-1, 2));
  });
}

TEST(Corpus, Issue172041PartialSumToPartialAvg) {
  const at::Tensor x = numbers({5, 3});
  on_ranks({3}, [&](const auto& mesh) {
    const DTensor p = laid(x, mesh, "P(sum)");
    const std::string error = error_of([&] { expect_whole(p.redistribute({Partial(ReduceOp::kAvg)}), x); });
    EXPECT_TRUE(error == "no error" || error.find("[redistribute]") != std::string::npos) << error;
  });
}

TEST(Corpus, Issue175776IndicesOfMaxOverACutDim) {
  const at::Tensor x = numbers({7, 3});
  on_ranks({3}, [&](const auto& mesh) {
    for (const char* placements : {"S(0)", "S(1)", "P(sum)", "R"}) {
      const auto got = laid(x, mesh, placements).max(0);
      const auto expected = x.max(0);
      expect_whole(std::get<0>(got), std::get<0>(expected));
      expect_whole(std::get<1>(got), std::get<1>(expected));
    }
  });
}

TEST(Corpus, Issue162692MeanOverUnevenAndEmptyShards) {
  on_ranks({4}, [&](const auto& mesh) {
    for (const std::int64_t rows : {5, 3, 1}) {
      const at::Tensor x = numbers({rows, 3});
      expect_whole(laid(x, mesh, "S(0)").mean(), x.mean());
      expect_whole(laid(x, mesh, "S(0)").mean(0), x.mean(0));
      expect_whole(laid(x, mesh, "S(0)").var(0, false), x.var(0, false));
    }
  });
}

TEST(Corpus, Issue172812LocalMapOnUnevenShards) {
  const at::Tensor x = numbers({5, 3});
  on_ranks({3}, [&](const auto& mesh) {
    const DTensor y = local_map([](const auto& locals) { return locals[0] * 2; }, {laid(x, mesh, "S(0)")}, {Shard(0)},
                                {.shape = Dims{5, 3}});
    expect_whole(y, x * 2);
  });
}

TEST(Corpus, Issue179502AViewThatWouldMoveIsRefusedOrRight) {
  const at::Tensor x = numbers({12, 8});
  on_ranks({4}, [&](const auto& mesh) {
    const DTensor d = laid(x, mesh, "S(1)");
    const std::string error = error_of([&] { expect_whole(d.view({16, 6}), x.view({16, 6})); });
    EXPECT_NE(error.find("[aten::view]"), std::string::npos) << error;
    expect_whole(d.reshape({16, 6}), x.view({16, 6}));
  });
}

TEST(Corpus, Issue164558And172102LinearOnASequenceThatIsCut) {
  const at::Tensor x = numbers({3, 5, 4}), w = numbers({2, 4}, 1), b = numbers({2}, 2);
  on_ranks({2}, [&](const auto& mesh) {
    expect_whole(at::linear(laid(x, mesh, "S(1)"), laid(w, mesh, "R"), laid(b, mesh, "R")), at::linear(x, w, b));
  });
}

TEST(Corpus, Issue166598MatmulOfDifferentShardOrders) {
  const at::Tensor x = numbers({5, 8}), w = numbers({8, 3}, 1);
  on_ranks({2, 2}, [&](const auto& mesh) {
    for (const char* a : {"S(1),S(1)", "S(1,2),S(1)", "R,S(1)"}) {
      for (const char* b : {"S(0),S(0)", "S(0,2),S(0)", "S(0),R"}) {
        expect_whole(at::mm(laid(x, mesh, a), laid(w, mesh, b)), at::mm(x, w));
      }
    }
  });
}

TEST(Corpus, Issue129206And129229And130760FullTensorOfACutThatIsCutAgain) {
  on_ranks({2, 3}, [&](const auto& mesh) {
    for (const std::int64_t rows : {12, 7, 5}) {
      const at::Tensor x = numbers({rows, 2});
      for (const char* placements : {"S(0),S(0)", "S(0,3),S(0)"}) expect_whole(laid(x, mesh, placements), x);
    }
  });
}

TEST(Corpus, Issue172932ToLocalAndFromLocalOfAPartialKeepGradients) {
  const at::Tensor x = numbers({5, 3});
  on_ranks({3}, [&](const auto& mesh) {
    DTensor p = laid(x, mesh, "P(sum)");
    p.requires_grad_(true);
    const DTensor again = from_local(p.to_local(), *mesh, {Partial()});
    (DTensor(again).redistribute({Replicate()}) * 3).sum().backward();
    expect_whole(p.grad(), at::full_like(x, 3));
  });
}

TEST(Corpus, Issue103306And115310UnevenShardsAreGathered) {
  on_ranks({4}, [&](const auto& mesh) {
    for (const std::int64_t rows : {1, 2, 3, 5, 6, 7, 9}) {
      const at::Tensor x = numbers({rows, 3});
      expect_whole(laid(x, mesh, "S(0)"), x);
      expect_whole(laid(x, mesh, "S(0)") * 2, x * 2);
    }
  });
}

TEST(Corpus, Issue144109FromLocalRefusesPartsThatAreNoChunks) {
  on_ranks({2}, [&](const auto& mesh) {
    const at::Tensor part = numbers({mesh->rank() == 0 ? 3 : 1, 2});
    const std::string error = error_of([&] { from_local(part, *mesh, {Shard(0)}, {.shape = Dims{4, 2}}); });
    EXPECT_NE(error.find("[from_local]"), std::string::npos) << error;
  });
}

TEST(Corpus, Issue178582GradientOfTopk) {
  const at::Tensor x = numbers({7, 3});
  at::Tensor plain = x.clone().requires_grad_(true);
  std::get<0>(plain.topk(2, 0)).pow(2).sum().backward();
  on_ranks({3}, [&](const auto& mesh) {
    DTensor d = laid(x, mesh, "S(0)");
    d.requires_grad_(true);
    std::get<0>(d.topk(2, 0)).pow(2).sum().backward();
    expect_whole(d.grad(), plain.grad());
  });
}

// transformers #46113, and 169450: the norm was right and nothing was scaled.
TEST(Corpus, TransformersIssue46113ClipGradNormScalesWhatLiesAnyhow) {
  const at::Tensor a = numbers({5, 3}), b = numbers({4}, 1), c = numbers({2, 3}, 2);
  const auto clipped = [](std::vector<at::Tensor> leaves) {
    at::Tensor loss;
    for (at::Tensor& leaf : leaves) {
      leaf.requires_grad_(true);
      const at::Tensor term = (leaf * leaf).sum();
      loss = loss.defined() ? loss + term : term;
    }
    loss.backward();
    return torch::nn::utils::clip_grad_norm_(leaves, 0.5);
  };
  std::vector<at::Tensor> plain = {a.clone(), b.clone(), c.clone()};
  const double norm = clipped(plain);
  on_ranks({3}, [&](const auto& mesh) {
    std::vector<at::Tensor> mine = {laid(a, mesh, "S(0)"), laid(b, mesh, "R"), laid(c, mesh, "P(sum)")};
    EXPECT_NEAR(clipped(mine), norm, 1e-9);
    for (std::size_t i = 0; i < mine.size(); ++i) expect_whole(mine[i].grad(), plain[i].grad());
  });
}

// A gather in one go over both mesh dims takes the pieces of a nested cut for those of a flat one: rows are lost.
// There the way that was chosen needed a layout that nothing could bring about: what is cut along a dim joins a sum.
TEST(Corpus, Issue177168AWayThatIsChosenCanBeGone) {
  const at::Tensor a = numbers({3, 4, 5}, 0.2), b = numbers({3, 4, 6}, 1.1), c = numbers({3, 6, 5}, 2.3);
  const at::Tensor expected = at::baddbmm(a, b, c, 0.5, 2);
  const std::vector<std::pair<Dims, std::vector<const char*>>> layouts = {
      {{3}, {"R", "S(0)", "S(1)", "S(2)", "P"}},
      {{2, 2}, {"R,R", "S(0),S(1)", "S(2),S(1)", "S(1),P", "P,S(2)", "S(2),S(2)"}}};
  for (const auto& [shape, all] : layouts) {
    on_ranks(shape, [&, &all = all](const auto& mesh) {
      for (const char* x : all) {
        for (const char* y : all) {
          for (const char* z : all) {
            SCOPED_TRACE(std::string(x) + " " + y + " " + z);
            expect_whole(at::baddbmm(laid(a, mesh, x), laid(b, mesh, y), laid(c, mesh, z), 0.5, 2), expected);
          }
        }
      }
    });
  }
}

TEST(Corpus, Issue194457NestedUnevenCutsAreGatheredAsTheyAreCut) {
  on_ranks({2, 2}, [&](const auto& mesh) {
    for (const std::int64_t rows : {5, 3, 6, 7, 9}) {
      const at::Tensor x = numbers({rows, 3});
      for (const char* placements : {"S(0),S(0)", "S(0,2),S(0)"}) {
        const DTensor d = laid(x, mesh, placements);
        expect_whole(d.redistribute({Replicate(), Replicate()}), x);
        expect_whole(d.redistribute({Shard(1), Replicate()}), x);
        expect_whole(d.redistribute({Replicate(), Shard(0)}), x);
      }
    }
  });
}

TEST(Corpus, Issue180346And180501ClipNormOverDifferentMeshes) {
  const at::Tensor a = numbers({5, 2}), b = numbers({3}, 1), c = numbers({2, 3}, 2);
  const auto with_gradients = [](const std::vector<at::Tensor>& leaves) {
    for (const at::Tensor& leaf : leaves) {
      leaf.requires_grad_(true);
      (leaf * leaf).sum().backward();
    }
    return leaves;
  };
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const double type : {2.0, 1.0, 3.0, 0.0, kInfinity, -kInfinity}) {
    const std::vector<at::Tensor> plain = {a.clone(), b.clone(), b.clone(), c.clone()};
    const double norm = torch::nn::utils::clip_grad_norm_(with_gradients(plain), 0.05, type);
    run_ranks(6, [&](World& world) {
      const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3, 2}, {"a", "b"});
      const std::vector<at::Tensor> mine = {
          distribute_tensor(a, mesh, {Shard(0), Replicate()}), distribute_tensor(b, mesh, {Replicate(), Shard(0)}),
          distribute_tensor(b, mesh["a"], {Shard(0)}), distribute_tensor(c, mesh["b"], {Replicate()})};
      with_gradients(mine);
      CommRecorder recorder;
      EXPECT_NEAR(clip_grad_norm_(mine, 0.05, type), norm, 1e-9) << type;
      // One transfer for the first mesh, one for the second; every rank of the third holds it all.
      EXPECT_EQ(recorder.events().size(), 2) << recorder.to_string();
      for (const CommEvent& event : recorder.events()) EXPECT_LE(event.bytes, 2 * 5 * 8) << recorder.to_string();
      for (std::size_t i = 0; i < mine.size(); ++i) expect_whole(mine[i].grad(), plain[i].grad());
    });
  }
}

// Numbers are the tensor's: the same on every mesh and placement.
TEST(Corpus, Issue168058RandomNumbersDoNotDependOnTheLayout) {
  std::vector<at::Tensor> drawn;
  for (const Dims& shape : {Dims{1}, Dims{3}, Dims{2, 2}}) {
    for (const bool first : {true, false}) {
      at::Tensor whole;
      run_ranks(Mesh::make(shape).size(), [&](World& world) {
        const DeviceMesh mesh = init_device_mesh(world, at::kCPU, shape);
        manual_seed(world, 7);
        const Placements placements(shape.size(), Shard(first ? 0 : 1));
        const DTensor x = randn({5, 4}, mesh, placements);
        const at::Tensor both = at::stack({x.full_tensor(), DTensor(at::dropout(x, 0.5, true)).full_tensor()});
        if (world.rank() == 0) whole = both;
      });
      drawn.push_back(whole);
    }
  }
  for (const at::Tensor& other : drawn) EXPECT_TRUE(at::equal(other, drawn[0]));
}

// A seed counts whenever it is set, and what is drawn afterwards starts from it.
TEST(Corpus, Issue160482ASeedIsHeardAtAnyTime) {
  run_ranks(2, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2});
    manual_seed(world, 3);
    const at::Tensor first = rand({6}, mesh, {Shard(0)}).full_tensor();
    const at::Tensor second = rand({6}, mesh, {Shard(0)}).full_tensor();
    EXPECT_FALSE(at::equal(first, second));
    manual_seed(world, 3);
    EXPECT_TRUE(at::equal(rand({6}, mesh, {Shard(0)}).full_tensor(), first));
    manual_seed(world, 4);
    EXPECT_FALSE(at::equal(rand({6}, mesh, {Shard(0)}).full_tensor(), first));
  });
}

}  // namespace
}  // namespace dtensor
