// The memory order of results: a distributed tensor shows the strides that plain libtorch gives, and its local tensor
// lies in that order, so that what looks like a view of the whole is one of the local tensor.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>
#include <set>

#include "dtensor/comm/world.h"
#include "dtensor/runtime/payload.h"
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

// Alike along all dims that have more than one element.
bool same_strides(at::IntArrayRef sizes, at::IntArrayRef a, at::IntArrayRef b) {
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] > 1 && a[d] != b[d]) return false;
  }
  return true;
}

std::string text(at::IntArrayRef list) {
  std::string result = "{";
  for (const std::int64_t i : list) result += (result.size() > 1 ? "," : "") + std::to_string(i);
  return result + "}";
}

// What is wrong with a result, or nothing.
std::string problem_of(const at::Tensor& got, const at::Tensor& expected, const DeviceMesh& mesh) {
  if (!is_dtensor(got)) return "a plain result";
  const DTensor result(got);
  if (result.sizes() != expected.sizes()) return "sizes " + text(result.sizes()) + " not " + text(expected.sizes());
  if (result.scalar_type() != expected.scalar_type()) return "another type";
  if (expected.numel() > 0 && !same_strides(expected.sizes(), result.strides(), expected.strides())) {
    return "strides " + text(result.strides()) + " not " + text(expected.strides());
  }
  const at::Tensor local = result.to_local();
  const Dims stride = result.spec().local_stride(*mesh.coordinate());
  if (local.numel() > 0 && !same_strides(local.sizes(), local.strides(), {stride.data(), stride.size()})) {
    return "local strides " + text(local.strides()) + " not " + text({stride.data(), stride.size()}) + " of " +
           result.spec().to_string();
  }
  if (local.scalar_type() != result.scalar_type()) return "a local tensor of another type";
  if (!at::allclose(whole(result).to(at::kDouble), expected.to(at::kDouble), 1e-5, 1e-5, true)) return "another value";
  const at::Tensor flat = result.contiguous().view({-1});
  if (!at::allclose(whole(flat).to(at::kDouble), expected.reshape({-1}).to(at::kDouble), 1e-5, 1e-5, true)) {
    return "another order";
  }
  return {};
}

using List = std::vector<at::Tensor>;
struct Call {
  std::string name;
  std::function<List(const at::Tensor&)> run;
};

template <class... T>
List listed(const std::tuple<T...>& results) {
  return std::apply([](const auto&... one) { return List{one...}; }, results);
}

struct Lie {
  const char* name;
  at::Tensor tensor;
};

// One tensor in several orders.
std::vector<Lie> orders(const at::Tensor& x) {
  std::vector<Lie> result = {{"contiguous", x}};
  if (x.dim() == 4) {
    result.push_back({"channels_last", x.contiguous(at::MemoryFormat::ChannelsLast)});
    result.push_back({"permuted", x.permute({0, 3, 2, 1}).contiguous().permute({0, 3, 2, 1})});
    result.push_back({"batch inside", x.permute({1, 2, 3, 0}).contiguous().permute({3, 0, 1, 2})});
  } else if (x.dim() == 3) {
    result.push_back({"permuted", x.transpose(1, 2).contiguous().transpose(1, 2)});
    result.push_back({"batch inside", x.permute({1, 2, 0}).contiguous().permute({2, 0, 1})});
  } else if (x.dim() == 2) {
    result.push_back({"transposed", x.t().contiguous().t()});
  }
  return result;
}

// Every call on every order and placement; `like` gives a tensor of the call's own the layout that it needs.
void sweep(const at::Tensor& base,
           const std::function<std::vector<Call>(std::function<at::Tensor(const at::Tensor&)>)>& calls) {
  std::mutex mutex;
  std::set<std::string> wrong;
  for (const std::int64_t ranks : {3}) {
    on(ranks, [&](const DeviceMesh& mesh) {
      const auto plain_calls = calls([](const at::Tensor& t) { return t; });
      const auto our_calls = calls([&](const at::Tensor& t) { return distribute_tensor(t, mesh, {Replicate()}); });
      std::vector<Placement> placements = {Replicate(), Partial()};
      for (std::int64_t d = 0; d < base.dim(); ++d) placements.push_back(Shard(d));
      for (const Lie& lie : orders(base)) {
        for (const Placement& placement : placements) {
          for (std::size_t c = 0; c < plain_calls.size(); ++c) {
            List expected, got;
            const std::string what = plain_calls[c].name + " of " + lie.name + " " + to_string(Placements{placement});
            const std::string plain_error = error_of([&] { expected = plain_calls[c].run(lie.tensor); });
            const std::string error =
                error_of([&] { got = our_calls[c].run(distribute_tensor(lie.tensor, mesh, {placement})); });
            std::string problem;
            if ((plain_error == "no error") != (error == "no error"))
              problem = plain_error.substr(0, 60) + " / " + error.substr(0, 200);
            for (std::size_t i = 0; i < expected.size() && problem.empty(); ++i) {
              std::string found;
              const std::string thrown = error_of([&] { found = problem_of(got[i], expected[i], mesh); });
              if (thrown != "no error") found = thrown;
              if (!found.empty()) problem = "result " + std::to_string(i) + ": " + found.substr(0, 250);
            }
            const std::lock_guard lock(mutex);
            if (!problem.empty()) wrong.insert(what + ": " + problem);
          }
        }
      }
    });
  }
  std::size_t shown = 0;
  for (const std::string& one : wrong) {
    if (++shown <= 60) ADD_FAILURE() << one;
  }
  EXPECT_EQ(wrong.size(), 0u);
}

using Like = std::function<at::Tensor(const at::Tensor&)>;
using T = const at::Tensor&;

TEST(MemoryOrder, OfNormsIsThatOfPlain) {
  sweep(numbers({4, 6, 4, 5}), [](const Like& like) {
    const at::Tensor w = like(numbers({6}, 0.3).abs() + 1), b = like(numbers({6}, 0.7)), w5 = like(numbers({5}, 0.3));
    const at::Tensor mean = like(numbers({6}, 0.2)), var = like(numbers({6}, 0.3).abs() + 1);
    return std::vector<Call>{
        {"batch_norm", [=](T x) { return List{at::batch_norm(x, w, b, {}, {}, true, 0.1, 1e-5, false)}; }},
        {"batch_norm eval", [=](T x) { return List{at::batch_norm(x, w, b, mean, var, false, 0.1, 1e-5, false)}; }},
        {"native_batch_norm", [=](T x) { return listed(at::native_batch_norm(x, w, b, {}, {}, true, 0.1, 1e-5)); }},
        {"group_norm", [=](T x) { return List{at::group_norm(x, 2, w, b)}; }},
        {"layer_norm", [=](T x) { return List{at::layer_norm(x, {5}, w5, w5)}; }},
        {"instance_norm", [=](T x) { return List{at::instance_norm(x, w, b, {}, {}, true, 0.1, 1e-5, false)}; }},
        {"softmax",
         [=](T x) {
           return List{x.softmax(1), x.softmax(3)};
         }},
        {"log_softmax",
         [=](T x) {
           return List{x.log_softmax(1), x.log_softmax(-1)};
         }},
    };
  });
}

TEST(MemoryOrder, OfNormsOfSequencesIsThatOfPlain) {
  sweep(numbers({4, 6, 8}), [](const Like& like) {
    const at::Tensor w = like(numbers({6}, 0.3).abs() + 1), b = like(numbers({6}, 0.7)), w8 = like(numbers({8}, 0.3));
    return std::vector<Call>{
        {"batch_norm", [=](T x) { return List{at::batch_norm(x, w, b, {}, {}, true, 0.1, 1e-5, false)}; }},
        {"group_norm", [=](T x) { return List{at::group_norm(x, 2, w, b)}; }},
        {"layer_norm", [=](T x) { return List{at::layer_norm(x, {8}, w8, w8)}; }},
        {"softmax",
         [=](T x) {
           return List{x.softmax(1), x.softmax(-1)};
         }},
        {"glu",
         [=](T x) {
           return List{at::glu(x, 1), at::glu(x, 2)};
         }},
    };
  });
}

TEST(MemoryOrder, OfPlanesIsThatOfPlain) {
  sweep(numbers({4, 6, 6, 5}), [](const Like& like) {
    const at::Tensor kernel = like(numbers({4, 6, 3, 3})), bias = like(numbers({4})),
                     depth = like(numbers({6, 1, 3, 3}));
    const at::Tensor up = like(numbers({6, 4, 2, 2}));
    return std::vector<Call>{
        {"conv2d", [=](T x) { return List{at::conv2d(x, kernel, bias, 1, 1)}; }},
        {"conv2d stride", [=](T x) { return List{at::conv2d(x, kernel, bias, 2)}; }},
        {"conv2d depthwise", [=](T x) { return List{at::conv2d(x, depth, {}, 1, 1, 1, 6)}; }},
        {"conv_transpose2d", [=](T x) { return List{at::conv_transpose2d(x, up, bias, 2)}; }},
        {"max_pool2d",
         [=](T x) {
           return List{at::max_pool2d(x, {2, 2})};
         }},
        {"max_pool2d_with_indices",
         [=](T x) {
           return listed(at::max_pool2d_with_indices(x, {2, 2}));
         }},
        {"avg_pool2d",
         [=](T x) {
           return List{at::avg_pool2d(x, {2, 2})};
         }},
        {"adaptive_avg_pool2d",
         [=](T x) {
           return List{at::adaptive_avg_pool2d(x, {2, 3})};
         }},
        {"adaptive_avg_pool2d 1",
         [=](T x) {
           return List{at::adaptive_avg_pool2d(x, {1, 1})};
         }},
        {"adaptive_max_pool2d",
         [=](T x) {
           return listed(at::adaptive_max_pool2d(x, {2, 3}));
         }},
        {"upsample_nearest2d",
         [=](T x) {
           return List{at::upsample_nearest2d(x, {12, 10})};
         }},
        {"upsample_bilinear2d",
         [=](T x) {
           return List{at::upsample_bilinear2d(x, {12, 10}, false)};
         }},
        {"pixel_shuffle", [=](T x) { return List{at::pixel_shuffle(x.narrow(1, 0, 4), 2)}; }},
        {"pad",
         [=](T x) {
           return List{at::constant_pad_nd(x, {1, 1, 1, 1}, 0.5)};
         }},
        {"reflection_pad2d",
         [=](T x) {
           return List{at::reflection_pad2d(x, {1, 1, 1, 1})};
         }},
        {"head",
         [=](T x) {
           return List{at::max_pool2d(at::conv2d(x, kernel, bias, 1, 1).relu(), {2, 2}).flatten(1)};
         }},
        {"head 1",
         [=](T x) {
           return List{at::adaptive_avg_pool2d(at::conv2d(x, kernel, bias), {1, 1}).flatten(1)};
         }},
    };
  });
}

TEST(MemoryOrder, OfElementwiseCallsIsThatOfPlain) {
  for (const at::Tensor& base : {numbers({4, 6, 6, 5}), numbers({4, 6, 8}), numbers({6, 5})}) {
    sweep(base, [&](const Like& like) {
      const at::Tensor other = like(numbers(base.sizes(), 0.9)), mask = like(numbers(base.sizes(), 0.4).gt(0));
      const at::Tensor last = like(numbers({base.size(-1)}, 0.9)), one = like(numbers({1}, 0.2));
      return std::vector<Call>{
          {"relu",
           [=](T x) {
             return List{x.relu(), at::gelu(x), x.sigmoid(),     x.exp(),          x.abs(),
                         x.neg(),  x.isnan(),   at::hardtanh(x), at::hardswish(x), at::silu(x)};
           }},
          {"logit",
           [=](T x) {
             return List{x.sigmoid().logit(), x.clamp(0, 1), x.pow(2), at::leaky_relu(x), at::elu(x)};
           }},
          {"add",
           [=](T x) {
             return List{x + other, other + x, x + last, x * 2, 1 - x, x - one, x.gt(0), x.logical_and(other)};
           }},
          {"where",
           [=](T x) {
             return List{at::where(mask, x, other), at::where(mask, other, x), at::where(x.gt(0), x, one),
                         x.masked_fill(mask, 1.0)};
           }},
          {"to",
           [=](T x) {
             return List{x.to(at::kFloat), x.clone(), x.contiguous(), at::zeros_like(x), at::ones_like(x)};
           }},
          {"slices",
           [=](T x) {
             return List{x.narrow(-1, 1, 3).relu(), x.narrow(-1, 1, 3).abs(), x.narrow(-1, 0, 2) * 2,
                         x.select(-1, 1).exp()};
           }},
          {"cat",
           [=](T x) {
             return List{at::cat({x, other}, 0), at::cat({x, x}, -1), at::stack({x, other}, 1)};
           }},
          {"reduce",
           [=](T x) {
             return List{x.sum(0), x.sum(-1),   x.mean(1, true), x.amax(-1),
                         x.std(1), x.argmax(1), x.cumsum(1),     x.logsumexp(-1)};
           }},
          {"index",
           [=](T x) {
             return List{x.flip({1}),
                         x.roll(1, 1),
                         x.tril(),
                         x.repeat(std::vector<std::int64_t>(x.dim(), 2)),
                         x.index_select(0, like(at::tensor({1, 0}, at::kLong))),
                         x.gather(1, like(at::zeros({2, 2, 2, 2}, at::kLong)
                                              .slice(0, 0, 1)
                                              .flatten()
                                              .narrow(0, 0, 1)
                                              .view(std::vector<std::int64_t>(x.dim(), 1))))};
           }},
          {"sort", [=](T x) { return listed(x.sort(1)); }},
          {"topk", [=](T x) { return listed(x.topk(2, -1)); }},
          {"mm",
           [=](T x) {
             return List{at::matmul(x, x.transpose(-1, -2)), at::linear(x, like(numbers({3, x.size(-1)}, 0.5)))};
           }},
          {"dropout",
           [=](T x) {
             return List{at::dropout(x, 0.5, false), at::feature_dropout(x, 0.5, false)};
           }},
      };
    });
  }
}

// Gradients lie as what they are gradients of.
TEST(MemoryOrder, OfGradientsIsThatOfPlain) {
  sweep(numbers({4, 6, 6, 5}), [](const Like& like) {
    const at::Tensor kernel = like(numbers({4, 6, 3, 3})), w = like(numbers({6}, 0.3).abs() + 1),
                     b = like(numbers({6}, 0.7));
    const auto grad = [](T x, const std::function<at::Tensor(T)>& f) {
      const at::Tensor leaf = x.detach().requires_grad_(true);
      const at::Tensor y = f(leaf);
      (y * y).sum().backward();
      return List{leaf.grad()};
    };
    return std::vector<Call>{
        {"grad relu", [=](T x) { return grad(x, [](T y) { return y.relu(); }); }},
        {"grad conv2d", [=](T x) { return grad(x, [=](T y) { return at::conv2d(y, kernel, {}, 1, 1); }); }},
        {"grad max_pool2d", [=](T x) { return grad(x, [=](T y) {
                                         return at::max_pool2d(y, {2, 2});
                                       }); }},
        {"grad avg_pool2d", [=](T x) { return grad(x, [=](T y) {
                                         return at::avg_pool2d(y, {2, 2});
                                       }); }},
        {"grad adaptive 1", [=](T x) { return grad(x, [=](T y) {
                                         return at::adaptive_avg_pool2d(y, {1, 1});
                                       }); }},
        {"grad batch_norm",
         [=](T x) { return grad(x, [=](T y) { return at::batch_norm(y, w, b, {}, {}, true, 0.1, 1e-5, false); }); }},
        {"grad group_norm", [=](T x) { return grad(x, [=](T y) { return at::group_norm(y, 2, w, b); }); }},
        {"grad upsample", [=](T x) { return grad(x, [=](T y) {
                                       return at::upsample_nearest2d(y, {12, 10});
                                     }); }},
    };
  });
}

// What was reported: norms of permuted inputs say another order than they have.
TEST(MemoryOrder, NormsOfPermutedInputsCanBeViewed) {
  on(2, [](const DeviceMesh& mesh) {
    const at::Tensor full = numbers({4, 6, 8}), images = numbers({4, 5, 6, 8});
    for (const Placement& placement :
         {Placement(Replicate()), Placement(Shard(0)), Placement(Shard(1)), Placement(Shard(2))}) {
      const auto run = [](T x) {
        return at::batch_norm(x.transpose(1, 2), {}, {}, {}, {}, true, 0.1, 1e-5, false)
            .transpose(1, 2)
            .contiguous()
            .view({-1, 8});
      };
      EXPECT_TRUE(at::allclose(whole(run(distribute_tensor(full, mesh, {placement}))), run(full)));
      const auto group = [](T x) {
        return at::group_norm(x.permute({0, 3, 1, 2}), 2).permute({0, 2, 3, 1}).contiguous().view({-1, 8});
      };
      EXPECT_TRUE(at::allclose(whole(group(distribute_tensor(images, mesh, {placement}))), group(images)));
    }
  });
}

// The strides of local tensors that are all of one shape say the order of the whole.
TEST(MemoryOrder, OfLocalTensorsIsInferred) {
  on(2, [](const DeviceMesh& mesh) {
    const at::Tensor columns = numbers({6, 4}).t(),
                     images = numbers({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast);
    for (const Placement& placement :
         {Placement(Replicate()), Placement(Shard(0)), Placement(Shard(1)), Placement(Partial())}) {
      for (const at::Tensor& local : {columns, images}) {
        const DTensor x = from_local(local, mesh, {placement});
        const std::int64_t d = placement.is_shard() ? placement.dim() : 0;
        const at::Tensor expected = placement.is_shard() ? at::cat({local, local}, d).contiguous() : local;
        EXPECT_TRUE(local.dim() == 4 || x.stride(0) == 1) << text(x.strides());
        EXPECT_TRUE(local.dim() == 2 || x.is_contiguous(at::MemoryFormat::ChannelsLast)) << text(x.strides());
        EXPECT_TRUE(x.to_local().is_alias_of(local));
        EXPECT_EQ(x.to_local().strides(), local.strides());
        EXPECT_TRUE(placement.is_partial() || at::equal(whole(x.contiguous().view({-1})), expected.reshape({-1})));
      }
    }
    const DTensor given = from_local(columns, mesh, {Shard(0)}, {.shape = Dims{8, 6}});
    EXPECT_TRUE(given.is_contiguous());
  });
}

// Also of a shard that has no elements.
TEST(MemoryOrder, OfEmptyShardsIsThatOfTheWhole) {
  on(4, [](const DeviceMesh& mesh) {
    const at::Tensor full = numbers({2, 3, 9, 4}).contiguous(at::MemoryFormat::ChannelsLast);
    const at::Tensor x = distribute_tensor(full, mesh, {Shard(2)}).requires_grad_(true);
    const at::Tensor y = x.relu();
    EXPECT_TRUE(DTensor(y).to_local().is_contiguous(at::MemoryFormat::ChannelsLast));
    (y * y).sum().backward();
    EXPECT_TRUE(x.grad().is_contiguous(at::MemoryFormat::ChannelsLast));
    EXPECT_TRUE(DTensor(x.grad()).to_local().is_contiguous(at::MemoryFormat::ChannelsLast));
    const at::Tensor pooled = at::avg_pool2d(x.detach(), {1, 1});
    EXPECT_TRUE(DTensor(pooled).to_local().is_contiguous(at::MemoryFormat::ChannelsLast));
  });
}

}  // namespace
}  // namespace dtensor
