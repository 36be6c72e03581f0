// Operators that libtorch makes of others, mixed types, and kernels that choose by the shape of a local tensor: results
// are distributed, and what one device gives.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>

#include "dtensor/comm/world.h"
#include "dtensor/runtime/dispatch.h"
#include "dtensor/runtime/module.h"
#include "dtensor/runtime/record.h"
#include "dtensor/runtime/tensor.h"
#include "tests/runtime/helpers.h"

namespace dtensor {
namespace {

using testing::error_of;
using testing::numbers;

void on(std::int64_t ranks, const std::function<void(const DeviceMesh&)>& body) {
  run_ranks(ranks, [&](World& world) { body(init_device_mesh(world, at::kCPU, {ranks}, {"x"})); });
}

at::Tensor whole(const at::Tensor& tensor) { return DTensor(tensor).full_tensor(); }

using T = const at::Tensor&;

TEST(Composites, RepeatInterleaveKeepsTheLayout) {
  on(3, [](const DeviceMesh& mesh) {
    const at::Tensor full = numbers({4, 6, 2});
    for (const std::int64_t cut : {0, 1, 2}) {
      for (const std::int64_t dim : {0, 1, 2, -1}) {
        const at::Tensor x = distribute_tensor(full, mesh, {Shard(cut)}).requires_grad_(true);
        const CommPolicyGuard forbid(CommPolicy::kForbid);
        const at::Tensor y = x.repeat_interleave(3, dim);
        EXPECT_TRUE(is_dtensor(y));
        const CommPolicyGuard allow(CommPolicy::kAllow);
        EXPECT_TRUE(at::equal(whole(y), full.repeat_interleave(3, dim))) << cut << " " << dim;
        y.sum().backward();
        EXPECT_TRUE(at::equal(whole(x.grad()), at::full_like(full, 3)));
      }
    }
    const at::Tensor x = distribute_tensor(full, mesh, {Shard(0)});
    EXPECT_TRUE(at::equal(whole(x.repeat_interleave(2)), full.repeat_interleave(2)));
    const at::Tensor counts = at::tensor({1, 0, 2, 3}, at::kLong);
    EXPECT_TRUE(at::equal(whole(x.repeat_interleave(counts, 0)), full.repeat_interleave(counts, 0)));
    const at::Tensor ours = distribute_tensor(counts, mesh, {Shard(0)});
    EXPECT_TRUE(at::equal(whole(x.repeat_interleave(ours, 0)), full.repeat_interleave(counts, 0)));
    EXPECT_TRUE(at::equal(whole(x.repeat_interleave(0, 0)), full.repeat_interleave(0, 0)));
  });
}

TEST(Composites, OneHotIsDistributed) {
  on(2, [](const DeviceMesh& mesh) {
    const at::Tensor classes = at::tensor({2, 0, 1, 1, 2}, at::kLong);
    for (const Placement& placement : {Placement(Shard(0)), Placement(Replicate())}) {
      const at::Tensor y = distribute_tensor(classes, mesh, {placement});
      for (const std::int64_t n : {3, 5, -1}) {
        const at::Tensor result = at::one_hot(y, n);
        ASSERT_TRUE(is_dtensor(result));
        EXPECT_TRUE(at::equal(whole(result), at::one_hot(classes, n)));
        EXPECT_EQ(DTensor(result).placements(), Placements{placement});
      }
      EXPECT_NE(error_of([&] { at::one_hot(y, 2); }).find("smaller than the number of classes"), std::string::npos);
      EXPECT_NE(error_of([&] { at::one_hot(y - 1, 5); }).find("non-negative"), std::string::npos);
    }
  });
}

// Every one of these mixes tensors of its own with the caller's.
TEST(Composites, GiveDistributedResults) {
  struct Call {
    const char* name;
    std::function<at::Tensor(T)> run;
  };
  const std::vector<Call> calls = {
      {"linalg_matrix_rank", [](T x) { return at::linalg_matrix_rank(x); }},
      {"linalg_matrix_rank tol", [](T x) { return at::linalg_matrix_rank(x, 1e-3); }},
      {"linalg_pinv", [](T x) { return at::linalg_pinv(x); }},
      {"pinverse", [](T x) { return at::pinverse(x); }},
      {"vander", [](T x) { return at::vander(x.select(1, 0)); }},
      {"vander increasing", [](T x) { return at::vander(x.select(1, 0), 3, true); }},
      {"cov", [](T x) { return at::cov(x); }},
      {"corrcoef", [](T x) { return at::corrcoef(x); }},
      {"kron", [](T x) { return at::kron(x, x); }},
      {"diff", [](T x) { return at::diff(x); }},
      {"trapezoid", [](T x) { return at::trapezoid(x); }},
      {"cumulative_trapezoid", [](T x) { return at::cumulative_trapezoid(x); }},
      {"tensordot", [](T x) { return at::tensordot(x, x, {0}, {0}); }},
      {"block_diag",
       [](T x) {
         return at::block_diag({x, x});
       }},
      {"cartesian_prod",
       [](T x) {
         return at::cartesian_prod({x.select(1, 0), x.select(1, 1)});
       }},
      {"nuclear_norm", [](T x) { return at::nuclear_norm(x); }},
      {"linalg_norm", [](T x) { return at::linalg_norm(x); }},
      {"linalg_cond", [](T x) { return at::linalg_cond(x); }},
      {"matrix_power", [](T x) { return at::matrix_power(x, 3); }},
      {"linalg_det", [](T x) { return at::linalg_det(x); }},
      {"linalg_inv", [](T x) { return at::linalg_inv(x + at::eye(4, at::kDouble).mul(9)); }},
      {"cosine_similarity", [](T x) { return at::cosine_similarity(x, x * 2 + 1); }},
      {"pairwise_distance", [](T x) { return at::pairwise_distance(x, x * 2); }},
      {"triplet_margin_loss", [](T x) { return at::triplet_margin_loss(x, x * 2, x + 1); }},
      {"cosine_embedding_loss", [](T x) { return at::cosine_embedding_loss(x, x * 2, x.select(1, 0).sign()); }},
      {"margin_ranking_loss", [](T x) { return at::margin_ranking_loss(x, x * 2, x.sign()); }},
      {"hinge_embedding_loss", [](T x) { return at::hinge_embedding_loss(x, x.sign()); }},
      {"kl_div", [](T x) { return at::kl_div(x.log_softmax(1), x.softmax(1)); }},
      {"poisson_nll_loss", [](T x) { return at::poisson_nll_loss(x, x.abs(), true, true, 1e-8, 1); }},
      {"quantile", [](T x) { return at::quantile(x, 0.3, 1); }},
      {"take_along_dim", [](T x) { return at::take_along_dim(x, x.argsort(1, false), 1); }},
      {"isclose", [](T x) { return at::isclose(x, x + 1e-9); }},
      {"bincount", [](T x) { return at::bincount(x.abs().mul(3).to(at::kLong).flatten()); }},
      {"nan_to_num", [](T x) { return at::nan_to_num(x / x.floor()); }},
      {"outer", [](T x) { return at::outer(x.select(1, 0), x.select(1, 1)); }},
      {"trace", [](T x) { return at::trace(x); }},
      {"diagflat", [](T x) { return at::diagflat(x.select(1, 0)); }},
      {"fft", [](T x) { return at::real(at::fft_fft(x)); }},
      {"instance", [](T x) { return at::instance_norm(x.unsqueeze(0), {}, {}, {}, {}, true, 0.1, 1e-5, false); }},
  };
  on(2, [&](const DeviceMesh& mesh) {
    const at::Tensor full = numbers({4, 4});
    const ImplicitReplication replicated;
    for (const Placement& placement : {Placement(Shard(0)), Placement(Replicate())}) {
      for (const Call& call : calls) {
        at::Tensor result;
        const at::Tensor expected = call.run(full);
        const std::string error =
            error_of([&] { result = call.run(distribute_tensor(full, mesh, {placement})); }).substr(0, 300);
        EXPECT_EQ(error, "no error") << call.name << " " << placement.to_string();
        if (error != "no error") continue;
        EXPECT_TRUE(is_dtensor(result)) << call.name << " " << placement.to_string();
        if (!is_dtensor(result)) continue;
        const bool same = expected.sizes() == result.sizes() &&
                          at::allclose(whole(result).to(at::kDouble), expected.to(at::kDouble), 1e-6, 1e-8, true);
        EXPECT_TRUE(same) << call.name << " " << placement.to_string();
      }
    }
  });
}

TEST(Composites, PackedSequencesRunThroughALstm) {
  on(2, [](const DeviceMesh& mesh) {
    const at::Tensor full = numbers({3, 5, 4}).to(at::kFloat), lengths = at::tensor({5, 3, 2}, at::kLong);
    torch::manual_seed(1);
    torch::nn::LSTM plain(torch::nn::LSTMOptions(4, 6).batch_first(true));
    torch::manual_seed(1);
    torch::nn::LSTM ours(torch::nn::LSTMOptions(4, 6).batch_first(true));
    distribute_module(ours, mesh);
    const at::Tensor leaf = full.clone().requires_grad_(true);
    const auto run = [&](torch::nn::LSTM& lstm, T input) {
      namespace rnn = torch::nn::utils::rnn;
      const auto packed = rnn::pack_padded_sequence(input, lengths, true);
      const auto out = std::get<0>(lstm->forward_with_packed_input(packed));
      return std::get<0>(rnn::pad_packed_sequence(out, true));
    };
    const at::Tensor expected = run(plain, leaf);
    expected.sum().backward();
    const at::Tensor x = distribute_tensor(full, mesh, {Shard(0)}).requires_grad_(true);
    const at::Tensor got = run(ours, x);
    ASSERT_TRUE(is_dtensor(got));
    EXPECT_TRUE(at::allclose(whole(got), expected, 1e-5, 1e-6));
    got.sum().backward();
    EXPECT_TRUE(at::allclose(whole(x.grad()), leaf.grad(), 1e-5, 1e-6));
  });
}

// libtorch 1.13 has a path for channels_last that does not look at the scales, and takes one channel for it.
TEST(Upsample, ShardsOfOneChannelAreScaledAsTheWhole) {
  on(3, [](const DeviceMesh& mesh) {
    const at::Tensor full = numbers({1, 3, 5, 7});
    const std::vector<std::int64_t> sizes = {11, 15};
    const auto run = [&](T x) { return at::upsample_nearest2d(x, sizes, 2.3, 2.2); };
    EXPECT_TRUE(at::equal(whole(run(distribute_tensor(full, mesh, {Shard(1)}))), run(full)));
    const auto exact = [&](T x) { return at::_upsample_nearest_exact2d(x, sizes, 2.3, 2.2); };
    EXPECT_TRUE(at::equal(whole(exact(distribute_tensor(full, mesh, {Shard(1)}))), exact(full)));
    const auto bilinear = [&](T x) { return at::upsample_bilinear2d(x, sizes, false, 2.3, 2.2); };
    EXPECT_TRUE(at::allclose(whole(bilinear(distribute_tensor(full, mesh, {Shard(1)}))), bilinear(full)));
    const at::Tensor leaf = full.clone().requires_grad_(true);
    run(leaf).square().sum().backward();
    const at::Tensor x = distribute_tensor(full, mesh, {Shard(1)}).requires_grad_(true);
    run(x).square().sum().backward();
    EXPECT_TRUE(at::allclose(whole(x.grad()), leaf.grad()));
  });
}

// Statistics have the type that plain libtorch gives them, also on ranks that hold no rows.
TEST(MixedTypes, NormsTakeRanksWithoutRows) {
  on(3, [](const DeviceMesh& mesh) {
    for (const auto type : {at::kBFloat16, at::kFloat}) {
      for (const auto weights : {at::kBFloat16, at::kFloat}) {
        if (type == at::kFloat && weights == at::kBFloat16) continue;
        const at::Tensor full = numbers({2, 4, 3}).to(type), w = at::ones({3}, weights), c = at::ones({4}, weights);
        const auto train = [&](T input, T weight, T bias) {
          const at::Tensor leaf = input.detach().requires_grad_(true);
          at::layer_norm(leaf, {3}, weight, bias).square().sum().backward();
          return leaf.grad();
        };
        // libtorch 1.13 has no gradient for weights of another type.
        if (error_of([&] { train(full, w, w); }) != "no error") continue;
        const at::Tensor x = distribute_tensor(full, mesh, {Shard(0)});
        const auto spread = [&](T t) { return distribute_tensor(t, mesh, {Replicate()}); };
        const auto compare = [&](const auto& got, const auto& expected) {
          const auto one = [&](T mine, T plain) {
            EXPECT_EQ(mine.scalar_type(), plain.scalar_type());
            EXPECT_TRUE(at::allclose(whole(mine).to(at::kFloat), plain.to(at::kFloat), 2e-2, 2e-2));
          };
          one(std::get<0>(got), std::get<0>(expected));
          one(std::get<1>(got), std::get<1>(expected));
          one(std::get<2>(got), std::get<2>(expected));
        };
        compare(at::native_layer_norm(x, {3}, spread(w), spread(w), 1e-5),
                at::native_layer_norm(full, {3}, w, w, 1e-5));
        // libtorch 1.13 takes no other type of weights here.
        if (error_of([&] { at::native_batch_norm(full, c, c, {}, {}, true, 0.1, 1e-5); }) == "no error") {
          compare(at::native_batch_norm(x, spread(c), spread(c), {}, {}, true, 0.1, 1e-5),
                  at::native_batch_norm(full, c, c, {}, {}, true, 0.1, 1e-5));
        }
        EXPECT_TRUE(at::allclose(whole(train(x, spread(w), spread(w))).to(at::kFloat), train(full, w, w).to(at::kFloat),
                                 5e-2, 5e-2));
      }
    }
  });
}

TEST(Losses, MultiMarginTakesRanksWithoutRows) {
  on(3, [](const DeviceMesh& mesh) {
    const at::Tensor full = numbers({2, 4}), classes = at::tensor({1, 3}, at::kLong);
    for (const auto reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
      const auto run = [&](T x, T y) {
        const at::Tensor leaf = x.detach().requires_grad_(true);
        const at::Tensor loss = at::multi_margin_loss(leaf, y, 1, 1, {}, reduction);
        loss.sum().backward();
        return std::pair{loss.detach(), leaf.grad()};
      };
      const auto expected = run(full, classes);
      const auto got = run(distribute_tensor(full, mesh, {Shard(0)}), distribute_tensor(classes, mesh, {Shard(0)}));
      EXPECT_TRUE(at::allclose(whole(got.first), expected.first)) << reduction;
      EXPECT_TRUE(at::allclose(whole(got.second), expected.second)) << reduction;
    }
  });
}

// Decompositions of replicas are the same on all ranks, to the bit.
TEST(Replicas, OfDecompositionsAreEqual) {
  on(4, [](const DeviceMesh& mesh) {
    // Ranks have their tensors at different places in memory.
    const std::vector<at::Tensor> holes(static_cast<std::size_t>(mesh.rank()) + 1, at::empty({7 + mesh.rank()}));
    const auto check = [&](const char* name, const at::Tensor& replica) {
      const at::Tensor local = DTensor(replica).to_local().contiguous();
      const at::Tensor bits = local.view(at::kByte).reshape({1, -1}).to(at::kLong);
      const at::Tensor all = whole(from_local(bits, mesh, {Shard(0)}));
      for (std::int64_t r = 1; r < mesh.size(); ++r) EXPECT_TRUE(at::equal(all[r], all[0])) << name;
    };
    for (const std::int64_t n : {5, 17, 40}) {
      const at::Tensor a = distribute_tensor(numbers({n + 3, n}), mesh, {Replicate()});
      const at::Tensor b = distribute_tensor(numbers({n + 3, 2}, 0.6), mesh, {Replicate()});
      const at::Tensor s = distribute_tensor(numbers({n, n}) + numbers({n, n}).t(), mesh, {Replicate()});
      for (int repeat = 0; repeat < 3; ++repeat) {
        check("lstsq", std::get<0>(at::linalg_lstsq(a, b)));
        check("qr", std::get<0>(at::linalg_qr(a)));
        check("svd", std::get<1>(at::linalg_svd(a)));
        check("svd u", std::get<0>(at::linalg_svd(a, false)));
        check("eigh", std::get<1>(at::linalg_eigh(s)));
        check("eig", at::real(std::get<0>(at::linalg_eig(s))));
        check("solve", at::linalg_solve(s, b.narrow(0, 0, n)));
        check("cholesky",
              at::linalg_cholesky(at::mm(s, s.t()) + distribute_tensor(at::eye(n, at::kDouble), mesh, {Replicate()})));
      }
    }
  });
}

// A one-element operand, cut.
TEST(OneElement, VectorsGoThroughMatrixProducts) {
  for (const std::int64_t ranks : {3, 5}) {
    on(ranks, [](const DeviceMesh& mesh) {
      const at::Tensor one = numbers({1}), weight = numbers({4, 1}), row = numbers({1, 3}),
                       square = numbers({1, 1}, 0.8);
      const at::Tensor x = distribute_tensor(one, mesh, {Shard(0)});
      const auto spread = [&](T t) { return distribute_tensor(t, mesh, {Shard(0)}); };
      const auto compare = [&](const char* name, const std::function<at::Tensor()>& ours, T plain) {
        at::Tensor result;
        const std::string error = error_of([&] { result = ours(); }).substr(0, 250);
        EXPECT_EQ(error, "no error") << name;
        if (error != "no error") return;
        EXPECT_EQ(result.sizes(), plain.sizes()) << name;
        EXPECT_TRUE(at::allclose(whole(result), plain)) << name;
      };
      compare(
          "linear", [&] { return at::linear(x, spread(weight)); }, at::linear(one, weight));
      compare(
          "linear bias", [&] { return at::linear(x, spread(weight), spread(numbers({4}))); },
          at::linear(one, weight, numbers({4})));
      compare(
          "matmul", [&] { return at::matmul(x, spread(row)); }, at::matmul(one, row));
      compare(
          "matmul 2", [&] { return at::matmul(spread(weight), x); }, at::matmul(weight, one));
      compare(
          "matmul 3", [&] { return at::matmul(spread(square), x); }, at::matmul(square, one));
      compare(
          "matmul 4",
          [&] {
            return at::matmul(spread(numbers({2, 1, 1})), x);
          },
          at::matmul(numbers({2, 1, 1}), one));
      compare(
          "dot", [&] { return at::matmul(x, x); }, at::matmul(one, one));
      compare(
          "bilinear",
          [&] {
            return at::bilinear(spread(square), spread(square), spread(numbers({2, 1, 1})));
          },
          at::bilinear(square, square, numbers({2, 1, 1})));
      at::Tensor y = spread(one).clone();
      compare(
          "squeeze_", [&] { return y.squeeze_(); }, one.squeeze());
    });
  }
}

}  // namespace
}  // namespace dtensor
