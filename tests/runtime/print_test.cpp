// Printing a distributed tensor, through any handle: this rank's values, and no communication.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>

#include "dtensor/comm/world.h"
#include "dtensor/runtime/module.h"
#include "dtensor/runtime/record.h"
#include "dtensor/runtime/tensor.h"
#include "tests/runtime/helpers.h"

namespace dtensor::testing {
namespace {

template <class T>
std::string text_of(const T& value) {
  std::ostringstream stream;
  stream << value;
  return stream.str();
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// One rank alone prints: it would wait for the other, were anything sent.
template <class Fn>
void on_first_of_two(Fn fn) {
  WorldOptions options;
  options.timeout = std::chrono::seconds(20);
  run_ranks(
      2, [&](World& world) { fn(world, init_device_mesh(world, at::kCPU, {2}, {"x"})); }, options);
}

TEST(Print, ShowsSpecAndLocalValuesOfAnyHandle) {
  on_first_of_two([](World& world, const DeviceMesh& mesh) {
    const at::Tensor full = torch::arange(12.0).view({4, 3});
    const DTensor x = distribute_tensor(full, mesh, {Shard(0)});
    if (world.rank() == 1) return;
    const std::string expected = "DTensor f32[4,3] @ 2(x) : S(0), on rank 0\n" + text_of(full.narrow(0, 0, 2));
    EXPECT_EQ(text_of(x), expected);
    EXPECT_EQ(text_of(static_cast<const at::Tensor&>(x)), expected);
    const at::Tensor handle = x;
    EXPECT_EQ(text_of(handle), expected);
    EXPECT_EQ(text_of(handle.detach()), expected);
    std::ostringstream stream;
    at::print(stream, handle, 80);
    EXPECT_EQ(stream.str(), expected);
    std::ostringstream wide;
    wide << std::hex << handle << 255;
    EXPECT_EQ(wide.str(), expected + "ff") << "the stream's own format stays";
  });
}

TEST(Print, ShowsEveryLayoutAndType) {
  on_first_of_two([](World& world, const DeviceMesh& mesh) {
    for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kLong, at::kBool, at::kBFloat16}) {
      for (const Dims& shape : {Dims{}, Dims{3}, Dims{2, 3}, Dims{2, 2, 3}, Dims{0, 2}}) {
        const at::Tensor full = numbers({shape.data(), shape.size()}).to(type);
        const DTensor whole = distribute_tensor(full, mesh, {Replicate()});
        const DTensor partial = type == at::kBool ? whole : distribute_tensor(full, mesh, {Partial()});
        if (world.rank() == 1) continue;
        for (const DTensor& x : {whole, partial}) {
          EXPECT_EQ(text_of(static_cast<const at::Tensor&>(x)),
                    "DTensor " + x.spec().to_string() + ", on rank 0\n" + text_of(full));
        }
      }
    }
    const DTensor w = distribute_tensor(numbers({4, 3}).requires_grad_(true), mesh, {Shard(1)});
    const at::Tensor y = w * 2;
    if (world.rank() == 1) return;
    EXPECT_TRUE(contains(text_of(y), "f64[4,3] @ 2(x) : S(1), on rank 0\n")) << text_of(y);
    EXPECT_TRUE(contains(text_of(w.t()), "@ 2(x) : S(0), on rank 0\n")) << text_of(w.t());
  });
}

TEST(Print, LeavesPlainTensorsToLibtorch) {
  EXPECT_TRUE(contains(text_of(torch::ones({2})), "[ CPUFloatType{2} ]"));
  EXPECT_TRUE(contains(text_of(at::Tensor()), "undefined"));
  EXPECT_EQ(text_of(DTensor()), "DTensor (undefined)");
}

// What is still on its way stays there.
TEST(Print, NeverWaits) {
  on_first_of_two([](World& world, const DeviceMesh& mesh) {
    const DTensor x = distribute_tensor(numbers({4, 3}), mesh, {Shard(0)});
    const at::Tensor later = x.redistribute({Replicate()}, {.async = true});
    if (world.rank() == 0) {
      EXPECT_EQ(
          text_of(later),
          "DTensor f64[4,3] @ 2(x) : R, on rank 0 (its values are still on their way, or to be reduced: the first "
          "use waits for them)");
    }
    const at::Tensor there = DTensor(later).to_local();
    if (world.rank() == 0) {
      EXPECT_TRUE(contains(text_of(later), text_of(there)));
    }
    // A gradient that is not reduced yet.
    const DTensor w = distribute_tensor(numbers({3}).requires_grad_(true), mesh, {Replicate()});
    (x * w).sum().backward();
    CommRecorder recorder;
    const std::string text = text_of(w.grad());
    EXPECT_TRUE(recorder.events().empty()) << recorder.to_string();
    EXPECT_TRUE(contains(text, "f64[3] @ 2(x) : R, on rank ")) << text;
  });
}

TEST(Print, SaysWhatIsNotThere) {
  run_ranks(3, [](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    const at::Tensor x = distribute_tensor(numbers({4, 6}), mesh, {Shard(0)});
    if (world.rank() == 2) {
      EXPECT_EQ(text_of(x),
                "DTensor f64[4,6] @ 2(x) : S(0), on rank 2 (it has nothing of it: the rank is outside the mesh)");
    }
    // A view that had to be copied, and is out of date.
    const at::Tensor view = x.select(0, 0);
    x.add_(1);
    if (DTensor(view).placements() != Placements{Replicate()}) return;
    if (world.rank() == 0) {
      EXPECT_TRUE(contains(text_of(view), "out of date")) << text_of(view);
    }
  });
}

TEST(Print, WorksForModules) {
  on_first_of_two([](World& world, const DeviceMesh& mesh) {
    torch::nn::Linear linear(3, 2);
    distribute_module(linear, mesh);
    if (world.rank() == 1) return;
    std::ostringstream stream;
    for (const auto& item : linear->named_parameters()) stream << item.key() << ": " << item.value() << '\n';
    EXPECT_TRUE(contains(stream.str(), "weight: DTensor f32[2,3] @ 2(x) : R, on rank 0\n")) << stream.str();
    EXPECT_TRUE(contains(text_of(linear), "torch::nn::Linear"));
  });
}

}  // namespace
}  // namespace dtensor::testing
