// Ways in which libtorch breaks a tensor type, most of them silently.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/version.h>

#include <sstream>

#include "dtensor/comm/world.h"
#include "dtensor/core/error.h"
#include "dtensor/runtime/dispatch.h"
#include "dtensor/runtime/module.h"
#include "dtensor/runtime/payload.h"
#include "dtensor/runtime/record.h"
#include "dtensor/runtime/tensor.h"
#include "tests/runtime/helpers.h"

namespace dtensor {
namespace {

using testing::error_of;
using testing::numbers;

// On two ranks, with a mesh.
void on_two(const std::function<void(const DeviceMesh&)>& body) {
  run_ranks(2, [&](World& world) { body(init_device_mesh(world, at::kCPU, {2}, {"x"})); });
}

at::Tensor rows(const at::Tensor& full, const DeviceMesh& mesh) { return distribute_tensor(full, mesh, {Shard(0)}); }
at::Tensor whole(const at::Tensor& tensor) { return DTensor(tensor).full_tensor(); }

// A gradient that is a view of another tensor must not be added into.
TEST(Traps, GradientBuffersDoNotWriteIntoViews) {
  on_two([](const DeviceMesh& mesh) {
    const at::Tensor x = rows(numbers({4, 6}).requires_grad_(true), mesh);
    const at::Tensor gradient = rows(at::full({4, 6}, 6.0, at::kDouble), mesh);
    const at::Tensor y = x.view({24}).view({4, 6}) + x.view({24}).view({4, 6});
    y.backward(gradient);
    EXPECT_TRUE(at::equal(whole(gradient), at::full({4, 6}, 6.0, at::kDouble)));
    EXPECT_TRUE(at::equal(whole(x.grad()), at::full({4, 6}, 12.0, at::kDouble)));
  });
}

TEST(Traps, InferenceModeTakesViews) {
  on_two([](const DeviceMesh& mesh) {
    const at::Tensor full = numbers({4, 6});
    const at::Tensor x = rows(full, mesh);
    torch::nn::Linear linear(torch::nn::LinearOptions(6, 3));
    linear->to(at::kDouble);
    distribute_module(linear, mesh, {}, {.source = 0});
    const c10::InferenceMode guard;
    EXPECT_TRUE(at::equal(whole(x.view({24})), full.view({24})));
    EXPECT_TRUE(at::equal(whole(x.t()), full.t()));
    EXPECT_EQ(linear(x).sizes(), at::IntArrayRef({4, 3}));
    EXPECT_TRUE(at::allclose(whole(rows(full, mesh).view({24}).add(1)), full.view({24}) + 1));
  });
}

// A full tensor in column-major or channels_last order is distributed in that order, also from one rank alone.
TEST(Traps, WhatLiesByColumnsIsDistributedSo) {
  on_two([](const DeviceMesh& mesh) {
    const at::Tensor real = numbers({4, 6}).t(), complex = at::complex(real, real).conj();
    const at::Tensor images = numbers({4, 3, 2, 5}).contiguous(at::MemoryFormat::ChannelsLast);
    for (const Placement& placement :
         {Placement(Replicate()), Placement(Shard(0)), Placement(Shard(1)), Placement(Partial())}) {
      for (const at::Tensor& full : {real, complex, images}) {
        const DTensor x = distribute_tensor(full, mesh, {placement});
        EXPECT_EQ(x.strides(), full.strides());
        EXPECT_TRUE(at::equal(whole(x), full));
        EXPECT_TRUE(at::equal(whole(x.reshape({-1})), full.reshape({-1})));
        EXPECT_TRUE(at::equal(whole(x.transpose(0, 1).contiguous().view({-1})), full.transpose(0, 1).reshape({-1})));
        EXPECT_FALSE(x.to_local().is_alias_of(full));
        const DTensor sent = distribute_tensor(full, mesh, {placement}, {.source = 0});
        EXPECT_EQ(sent.strides(), full.strides());
        EXPECT_EQ(sent.to_local().strides(), x.to_local().strides());
        EXPECT_TRUE(at::equal(whole(sent.reshape({-1})), full.reshape({-1})));
      }
      const DTensor x = distribute_tensor(images, mesh, {placement});
      EXPECT_TRUE(x.is_contiguous(at::MemoryFormat::ChannelsLast));
      EXPECT_TRUE(x.to_local().is_contiguous(at::MemoryFormat::ChannelsLast));
      const at::Tensor kernel = numbers({2, 3, 1, 1});
      EXPECT_TRUE(at::allclose(whole(at::conv2d(x, distribute_tensor(kernel, mesh, {Replicate()}))),
                               at::conv2d(images, kernel)));
    }
    EXPECT_TRUE(distribute_tensor(real.expand({3, 6, 4}), mesh, {Shard(1)}).is_contiguous());
  });
}

// Parts that are expanded stay so until somebody looks at their memory, on some ranks only it may be.
TEST(Traps, ExpandedPartsAreViewed) {
  on_two([](const DeviceMesh& mesh) {
    const at::Tensor row = numbers({1, 3, 4}), part = row.expand({mesh.rank() == 0 ? 2 : 1, 3, 4});
    const at::Tensor x = from_local(part, mesh, {Shard(0)}, {.shape = Dims{3, 3, 4}}), plain = row.expand({3, 3, 4});
    const at::Tensor weight = numbers({2, 4}, 5), all = distribute_tensor(weight, mesh, {Replicate()});
    EXPECT_TRUE(at::allclose(whole(at::linear(x, all)), at::linear(plain, weight)));
    EXPECT_TRUE(at::equal(whole(x.flatten()), plain.flatten()));
    EXPECT_TRUE(at::equal(whole(x.view({9, 4}).t()), plain.reshape({9, 4}).t()));
    const at::Tensor y = from_local(part, mesh, {Shard(0)}, {.shape = Dims{3, 3, 4}});
    EXPECT_TRUE(at::equal(whole(y.add_(1)), plain + 1));
  });
}

// What means memory cannot look between the elements of a view.
TEST(Traps, MemoryWithGapsIsRefused) {
  on_two([](const DeviceMesh& mesh) {
    const at::Tensor gaps = rows(numbers({4, 6}), mesh).slice(1, 0, 2);
    for (const std::string& error : {error_of([&] {
                                       gaps.as_strided({2, 2}, {6, 1});
                                     }),
                                     error_of([&] {
                                       at::as_strided_copy(gaps, {2, 2}, {6, 1});
                                     }),
                                     error_of([&] {
                                       at::as_strided_scatter(gaps, gaps, {4, 2}, {6, 1});
                                     })}) {
      EXPECT_NE(error.find("a view of memory with gaps"), std::string::npos) << error;
    }
  });
}

TEST(Traps, SavingAndRawDataAreErrors) {
  on_two([](const DeviceMesh& mesh) {
    const at::Tensor x = rows(numbers({4, 6}), mesh);
    const auto refused = [](const std::string& error) {
      return error.find("distributed tensor has no data of its own") != std::string::npos;
    };
    std::ostringstream stream;
    EXPECT_TRUE(refused(error_of([&] { torch::save(x, stream); }))) << error_of([&] { torch::save(x, stream); });
    torch::nn::Linear linear(4, 4);
    distribute_module(linear, mesh, {}, {.source = 0});
    for (const at::Tensor& tensor : {x, at::Tensor(linear->weight), rows(numbers({4, 6}), mesh).t()}) {
      const void* data = nullptr;
      const std::string error = error_of([&] { data = tensor.data_ptr(); });
      // A handle that became distributed in place keeps its class, and libtorch 1.13 asks that: no pointer, no text of
      // ours.
      const bool converted = tensor.is_same(linear->weight);
      EXPECT_TRUE(refused(error) || (TORCH_VERSION_MAJOR < 2 && converted && data == nullptr)) << error;
    }
    EXPECT_TRUE(refused(error_of([&] { static_cast<void>(*x.data_ptr<double>()); })));
    EXPECT_TRUE(refused(error_of([&] { static_cast<void>(x.accessor<double, 2>()[0][0]); })));
    const std::string saved = error_of([&] { torch::save(linear, stream); });
    EXPECT_TRUE(refused(saved) || (TORCH_VERSION_MAJOR < 2 && saved.find("Cannot access storage") == 0)) << saved;
    for (const std::string& error : {error_of([&] { linear->clone(); }), error_of([&] {
                                       torch::nn::Sequential net(linear);
                                       net->clone();
                                     })}) {
      EXPECT_NE(error.find("[set_data] a plain tensor cannot take over a distributed value"), std::string::npos)
          << error;
      EXPECT_NE(error.find("load_checkpoint"), std::string::npos) << error;
    }
    EXPECT_NE(error_of([&] {
                x.set_data(at::ones({4, 6}, at::kDouble));
              }).find("copy_ into the parameter"),
              std::string::npos);
  });
}

// t_ and its like on a tensor that shares its payload with a detached one.
TEST(Traps, MetadataChangesInPlaceStayWithTheirTensor) {
  on_two([](const DeviceMesh& mesh) {
    const at::Tensor full = numbers({4, 6});
    at::Tensor x = rows(full, mesh);
    const at::Tensor detached = x.detach();
    x.t_();
    EXPECT_TRUE(at::equal(whole(x), full.t()));
    EXPECT_EQ(DTensor(x).placements(), Placements{Shard(1)});
    EXPECT_TRUE(at::equal(whole(detached), full));
    x.unsqueeze_(0);
    EXPECT_TRUE(at::equal(whole(x), full.t().unsqueeze(0)));
    x.squeeze_();
    EXPECT_TRUE(at::equal(whole(x), full.t()));
    x.add_(1);
    EXPECT_TRUE(at::equal(whole(detached), full + 1)) << "they still share memory";
    EXPECT_EQ(error_of([&] { x.resize_({2, 2}); }).find("[aten::resize_] a distributed tensor's memory cannot be"), 0);
  });
}

TEST(Traps, ConversionBetweenForwardAndBackwardIsSeen) {
  on_two([](const DeviceMesh& mesh) {
    at::Tensor w = numbers({3, 4}).requires_grad_(true);
    const at::Tensor loss = (w * w).sum();
    distribute_in_place(w, mesh, {Shard(0)});
    EXPECT_NE(error_of([&] { loss.backward(); }).find("modified by an inplace operation"), std::string::npos);
  });
}

TEST(Traps, ConversionTakesTheGradientAlong) {
  on_two([](const DeviceMesh& mesh) {
    at::Tensor w = numbers({3, 4}).requires_grad_(true);
    w.pow(2).sum().backward();
    const at::Tensor before = w.grad().clone();
    distribute_in_place(w, mesh, {Shard(0)});
    EXPECT_EQ(DTensor(w.grad()).placements(), Placements{Shard(0)});
    w.pow(2).sum().backward();
    EXPECT_TRUE(at::allclose(whole(w.grad()), before * 2));
    // Other handles to the same memory stay plain, and keep the values.
    at::Tensor base = numbers({3, 4});
    const at::Tensor view = base.view({12}), other = base.view({4, 3});
    distribute_in_place(base, mesh, {Shard(0)});
    distribute_in_place(view, mesh, {Shard(0)});
    base.zero_();
    EXPECT_TRUE(at::equal(whole(view), numbers({12})) && at::equal(other, numbers({4, 3})));
  });
}

void autocast(bool on) {
#if TORCH_VERSION_MAJOR >= 2
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  at::autocast::set_autocast_enabled(at::kCPU, on);
#else
  at::autocast::set_autocast_cpu_dtype(at::kBFloat16);
  at::autocast::set_cpu_enabled(on);
#endif
}

TEST(Traps, AutocastCastsTheWholeTensor) {
  on_two([](const DeviceMesh& mesh) {
    const at::Tensor x = rows(numbers({4, 6}).to(at::kFloat).requires_grad_(true), mesh);
    const at::Tensor w = distribute_tensor(numbers({6, 3}).to(at::kFloat), mesh, {Replicate()});
    autocast(true);
    const at::Tensor y = at::mm(x, w);
    at::autocast::clear_cache();
    autocast(false);
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    EXPECT_EQ(DTensor(y).to_local().scalar_type(), at::kBFloat16);
    y.sum().backward();
    EXPECT_EQ(x.grad().scalar_type(), at::kFloat);
  });
}

TEST(Traps, ScalarTypesDecideTypes) {
  on_two([](const DeviceMesh& mesh) {
    const at::Tensor x = rows(at::arange(6, at::kLong).view({3, 2}), mesh);
    EXPECT_EQ((x + 1).scalar_type(), at::kLong);
    EXPECT_EQ((x + 1.5).scalar_type(), at::kFloat);
    EXPECT_EQ((x + 1).scalar_type(), at::kLong) << "not what the call before decided";
    EXPECT_EQ(DTensor(x + 1.5).to_local().scalar_type(), at::kFloat);
    EXPECT_EQ((x + at::scalar_tensor(2.5, at::kDouble)).scalar_type(), at::kDouble);
  });
}

// A rank without elements is not asked, whatever stands first in the call.
TEST(Traps, NumbersMeetEmptyParts) {
  run_ranks(3, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3});
    const at::Tensor full = numbers({1, 4});
    const at::Tensor x = rows(full, mesh);
    EXPECT_TRUE(at::equal(whole(at::mul(at::scalar_tensor(3.0, at::kDouble), x)), full * 3));
    // On an empty part the kernel itself would give one element.
    const at::Tensor mat = numbers({2, 5});
    const at::Tensor y = at::addmv(rows(numbers({1}), mesh), rows(mat, mesh), rows(numbers({5}), mesh));
    EXPECT_TRUE(at::allclose(whole(y), at::addmv(numbers({1}), mat, numbers({5}))));
  });
}

TEST(Traps, TransposeInPlaceChangesTheTensor) {
  on_two([](const DeviceMesh& mesh) {
    const at::Tensor full = numbers({4, 6});
    at::Tensor x = rows(full, mesh);
    x.transpose_(0, 1);
    EXPECT_EQ(x.sizes(), (std::vector<std::int64_t>{6, 4}));
    EXPECT_TRUE(at::equal(whole(x), full.t()));
  });
}

TEST(Traps, VersionsAndLeavesAreWatchedAsEver) {
  on_two([](const DeviceMesh& mesh) {
    const at::Tensor x = rows(numbers({4, 6}).requires_grad_(true), mesh);
    EXPECT_NE(error_of([&] { x.add_(1); }).find("a leaf Variable that requires grad"), std::string::npos);
    const at::Tensor y = x.exp();
    const at::Tensor z = y.sum();
    y.add_(1);
    EXPECT_NE(error_of([&] { z.backward(); }) + error_of([&] { y.exp().sum().backward(); }), "no errorno error");
    const at::Tensor a = x.exp();
    a.detach().mul_(2);
    EXPECT_NE(error_of([&] { a.sum().backward(); }).find("modified by an inplace operation"), std::string::npos);
  });
}

TEST(Traps, DoubleBackwardAndAccumulation) {
  on_two([](const DeviceMesh& mesh) {
    const at::Tensor full = numbers({4, 6}).requires_grad_(true);
    const at::Tensor x = rows(full, mesh);
    const auto second = [](const at::Tensor& t) {
      const at::Tensor first = torch::autograd::grad({t.pow(3).sum()}, {t}, {}, true, true)[0];
      first.pow(2).sum().backward();
      t.pow(2).sum().backward();
      return t.grad();
    };
    EXPECT_TRUE(at::allclose(whole(second(x)), second(full)));
    EXPECT_EQ(DTensor(x.grad()).placements(), Placements{Shard(0)});
  });
}

// libtorch finds the gradient of what was there before by strides and an offset within the whole memory.
TEST(Traps, WritesToViewsHaveGradients) {
  on_two([](const DeviceMesh& mesh) {
    using Write = std::function<void(at::Tensor&, const at::Tensor&)>;
    const std::vector<Write> writes = {
        [](at::Tensor& y, const at::Tensor&) { y.slice(0, 1).mul_(2); },
        [](at::Tensor& y, const at::Tensor&) { y.select(1, 2).zero_(); },
        [](at::Tensor& y, const at::Tensor& w) { y.slice(1, 1, 4).slice(0, 2).copy_(w.slice(1, 1, 4).slice(0, 2)); },
        [](at::Tensor& y, const at::Tensor&) { y.t().select(0, 3).mul_(3); },
        [](at::Tensor& y, const at::Tensor& w) {
          const at::Tensor row = y.select(0, 1);
          y.mul_(w);  // the view's history is made anew
          y = row * row;
        },
    };
    int compared = 0;
    for (std::size_t i = 0; i < writes.size(); ++i) {
      for (const Placement& placement : {Placement(Replicate()), Placement(Shard(0)), Placement(Shard(1))}) {
        const auto gradients = [&](const at::Tensor& x, const at::Tensor& w) {
          at::Tensor y = x * x;
          writes[i](y, w);
          return torch::autograd::grad({(y * y).sum()}, {x, w}, {}, false, false, true);
        };
        const auto make = [&](double shift, bool whole) {
          const at::Tensor plain = numbers({4, 6}) + shift;
          return (whole ? plain : at::Tensor(distribute_tensor(plain, mesh, {placement}))).requires_grad_(true);
        };
        const auto expected = gradients(make(0, true), make(1, true));
        std::vector<at::Tensor> got;
        const std::string error = error_of([&] { got = gradients(make(0, false), make(1, false)); });
        if (error.find("a view that had to be copied") != std::string::npos) {
          EXPECT_NE(placement, Placement(Replicate())) << i;
          continue;
        }
        EXPECT_EQ(error, "no error") << i << " " << placement.to_string();
        ++compared;
        for (std::size_t k = 0; k < 2; ++k) {
          if (got.size() != 2) break;
          ASSERT_EQ(got[k].defined(), expected[k].defined()) << i;
          if (!got[k].defined()) continue;
          EXPECT_TRUE(at::allclose(whole(got[k]), expected[k])) << i << " " << placement.to_string() << " " << k;
        }
      }
    }
    EXPECT_GE(compared, 6);  // the others would have to write to a copy, and are refused
  });
}

// An operator on lists is one call for each tensor: those of an optimizer lie as they like, and send nothing.
TEST(Traps, ListsOfTensors) {
  on_two([](const DeviceMesh& mesh) {
    const auto step = [](std::vector<at::Tensor> p, const std::vector<at::Tensor>& g) {
      at::_foreach_mul_(p, 0.9);
      at::_foreach_add_(p, g, 0.1);
      const std::vector<at::Tensor> squares = at::_foreach_mul(g, g);
      at::_foreach_addcdiv_(p, g, at::_foreach_add(at::_foreach_sqrt(squares), 1), -0.01);
      return p;
    };
    std::vector<at::Tensor> plain, ours, plain_g, ours_g;
    for (const Placement& placement : {Placement(Shard(0)), Placement(Shard(1)), Placement(Replicate())}) {
      plain.push_back(numbers({5, 3}));
      plain_g.push_back(numbers({5, 3}).cos());
      ours.push_back(distribute_tensor(plain.back(), mesh, {placement}));
      ours_g.push_back(distribute_tensor(plain_g.back(), mesh, {placement}));
    }
    const auto expected = step(plain, plain_g);
    {
      const CommPolicyGuard nothing(CommPolicy::kForbid);
      step(ours, ours_g);
    }
    for (std::size_t i = 0; i < ours.size(); ++i) {
      EXPECT_TRUE(at::allclose(whole(ours[i]), expected[i])) << i;
      EXPECT_TRUE(at::allclose(whole(at::_foreach_norm(ours)[i]), expected[i].norm())) << i;
    }
  });
}

// Tensors that lie alike are joined as they lie, without a lookup for each; others, and joins along a cut dim, go the
// general way. Both are right, again and again, with gradients.
TEST(Traps, CatOfMany) {
  on_two([](const DeviceMesh& mesh) {
    const std::vector<std::vector<Placement>> ways = {{Shard(0), Shard(0), Shard(0)},
                                                      {Shard(1), Shard(1), Shard(1)},
                                                      {Partial(), Partial(), Partial()},
                                                      {Shard(0), Replicate(), Shard(1)}};
    for (int again = 0; again < 3; ++again) {
      for (const auto& way : ways) {
        for (const std::int64_t dim : {0, 1, -1}) {
          std::vector<at::Tensor> plain, ours;
          for (std::size_t i = 0; i < way.size(); ++i) {
            plain.push_back((numbers({5, 3}) + static_cast<double>(i)).requires_grad_(true));
            ours.push_back(distribute_tensor(plain.back().detach(), mesh, {Replicate()}));
            ours.back() = DTensor(ours.back()).redistribute({way[i]}).detach().requires_grad_(true);
          }
          const at::Tensor expected = at::cat(plain, dim);
          const at::Tensor got = at::cat(ours, dim);
          EXPECT_TRUE(at::allclose(whole(got), expected)) << dim;
          (expected * expected).sum().backward();
          (got * got).sum().backward();
          for (std::size_t i = 0; i < ours.size(); ++i) {
            EXPECT_TRUE(at::allclose(whole(ours[i].grad()), plain[i].grad())) << dim << " " << i;
          }
        }
      }
    }
  });
}

// Neither of leaves nor of inner tensors, and with a graph behind it.
TEST(Traps, GradReturnsNoPartial) {
  on_two([](const DeviceMesh& mesh) {
    const at::Tensor full = numbers({4, 6}), weight = numbers({6, 3}), scale = numbers({3});
    const auto gradients = [](const at::Tensor& x, const at::Tensor& w, const at::Tensor& s) {
      w.requires_grad_(true);
      s.requires_grad_(true);
      const at::Tensor inner = s * 2;
      std::vector<at::Tensor> results =
          torch::autograd::grad({(x.mm(w) * inner).pow(2).sum()}, {w, inner, s}, {}, true, true);
      results.push_back(torch::autograd::grad({results[0].pow(2).sum()}, {w})[0]);
      return results;
    };
    const std::vector<at::Tensor> plain = gradients(full, weight.clone(), scale.clone());
    const std::vector<at::Tensor> ours = gradients(rows(full, mesh), distribute_tensor(weight, mesh, {Replicate()}),
                                                   distribute_tensor(scale, mesh, {Replicate()}));
    for (std::size_t i = 0; i < plain.size(); ++i) {
      EXPECT_EQ(DTensor(ours[i]).placements(), Placements{Replicate()}) << i;
      EXPECT_TRUE(at::allclose(whole(ours[i]), plain[i])) << i;
    }
  });
}

// The gradient of sgn is a tensor of zeros that has no memory.
TEST(Traps, ZerosWithoutMemoryAreGradients) {
  on_two([](const DeviceMesh& mesh) {
    const at::Tensor x = rows(numbers({5, 3}).requires_grad_(true), mesh);
    at::sgn(x).sum().backward();
    EXPECT_EQ(DTensor(x.grad()).placements(), Placements{Shard(0)});
    EXPECT_TRUE(at::equal(whole(x.grad()), at::zeros({5, 3}, at::kDouble)));
  });
}

TEST(Traps, OutForms) {
  on_two([](const DeviceMesh& mesh) {
    const at::Tensor a = numbers({4, 6}), b = numbers({4, 6}, 0.7);
    const at::Tensor x = rows(a, mesh), y = rows(b, mesh);
    at::Tensor out = rows(at::zeros({4, 6}, at::kDouble), mesh);
    at::add_out(out, x, y);
    EXPECT_TRUE(at::equal(whole(out), a + b));
    at::Tensor columns = distribute_tensor(at::zeros({4, 6}, at::kDouble), mesh, {Shard(1)});
    at::mul_out(columns, x, y);
    EXPECT_TRUE(at::equal(whole(columns), a * b));
    EXPECT_EQ(DTensor(columns).placements(), Placements{Shard(1)});
  });
}

// Where the operands are replicated, the result has its own shape, not theirs.
TEST(Traps, OutFormsOfOperatorsThatRunOnReplicas) {
  on_two([](const DeviceMesh& mesh) {
    const at::Tensor x = numbers({2, 3, 9, 7}), w = numbers({4, 3, 3, 3});
    at::Tensor out = rows(at::zeros({2, 4, 7, 5}, at::kDouble), mesh);
    at::convolution_out(out, rows(x, mesh), rows(w, mesh), {}, {1, 1}, {0, 0}, {1, 1}, false, {0, 0}, 1);
    EXPECT_TRUE(at::allclose(whole(out), at::conv2d(x, w)));
  });
}

// Ranks that have nothing to reduce give what there is without it.
TEST(Traps, OutFormsOfEmptyParts) {
  run_ranks(4, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {4}, {"x"});
    const at::Tensor a = numbers({2, 6});
    at::Tensor sums = distribute_tensor(at::zeros({6}, at::kDouble), mesh, {Replicate()});
    at::sum_out(sums, rows(a, mesh), at::IntArrayRef{0});
    EXPECT_TRUE(at::allclose(whole(sums), a.sum(0)));
    at::Tensor product = rows(at::zeros({6, 6}, at::kDouble), mesh);
    at::mm_out(product, rows(a, mesh).t(), rows(a, mesh));
    EXPECT_TRUE(at::allclose(whole(product), a.t().mm(a)));
  });
}

TEST(Traps, RanksOutsideTheMeshTakePartInNothing) {
  run_ranks(3, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    const at::Tensor full = numbers({4, 6});
    const at::Tensor x = rows(full, mesh);
    const at::Tensor y = (x * 2 + x.t().t()).sum();
    EXPECT_EQ(y.dim(), 0);
    EXPECT_EQ(DTensor(x).to_local().defined(), world.rank() < 2);
    if (world.rank() < 2) {
      EXPECT_TRUE(at::allclose(whole(y), (full * 3).sum()));
    } else {
      EXPECT_FALSE(whole(y).defined());
    }
  });
}

}  // namespace
}  // namespace dtensor
