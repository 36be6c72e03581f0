// Checkpoints of real tensors, on ranks that are threads.
#include "dtensor/checkpoint/checkpoint.h"

#include <ATen/Context.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cstring>
#include <mutex>

#include "dtensor/comm/world.h"
#include "dtensor/runtime/factories.h"
#include "dtensor/runtime/random.h"
#include "dtensor/runtime/tensor.h"
#include "tests/checkpoint/store.h"

namespace dtensor {
namespace {

using testing::bytes_of;
using testing::error_of;
using testing::Folder;

// Any bits, NaNs included: only data that is moved, never computed with, keeps them.
at::Tensor numbers(at::IntArrayRef sizes, at::ScalarType type, std::int64_t salt) {
  std::int64_t n = 1;
  for (const std::int64_t size : sizes) n *= size;
  if (type == at::kBool) return at::arange(n).remainder(3).eq(salt % 3).view(sizes);
  return at::arange(n, at::kDouble)
      .mul(0.37)
      .add(static_cast<double>(salt))
      .sin()
      .mul(100)
      .to(type)
      .view(sizes)
      .clone();
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.contiguous();
  const at::Tensor y = b.contiguous();
  return x.sizes() == y.sizes() && x.scalar_type() == y.scalar_type() &&
         (x.numel() == 0 || std::memcmp(x.data_ptr(), y.data_ptr(), static_cast<std::size_t>(x.nbytes())) == 0);
}

struct Case {
  std::vector<std::int64_t> sizes;
  at::ScalarType type;
};
const std::vector<Case>& cases() {
  static const std::vector<Case> all = {{{8, 6}, at::kFloat},    {{7, 5}, at::kDouble},  {{13}, at::kHalf},
                                        {{9, 4}, at::kBFloat16}, {{1, 4, 3}, at::kLong}, {{}, at::kFloat},
                                        {{0, 4}, at::kFloat},    {{2}, at::kBool},       {{5, 3}, at::kComplexFloat}};
  return all;
}

// All words for a mesh dim: cut along each dim, plainly or strided, or replicated.
std::vector<Placements> placements_of(std::int64_t dims, std::int64_t mesh_ndim) {
  std::vector<Placement> words{Replicate()};
  for (std::int64_t d = 0; d < dims; ++d) {
    words.push_back(Shard(d));
    words.push_back(StridedShard(d, 2));
  }
  std::vector<Placements> all{{}};
  for (std::int64_t m = 0; m < mesh_ndim; ++m) {
    std::vector<Placements> longer;
    for (const Placements& one : all) {
      for (const Placement& word : words) {
        longer.push_back(one);
        longer.back().push_back(word);
      }
    }
    all = std::move(longer);
  }
  return all;
}

std::optional<Spec> spec_of(const Case& c, const DeviceMesh& mesh, const Placements& placements) {
  try {
    return Spec::make(TensorMeta(Dims(c.sizes.begin(), c.sizes.end()), DType::kF32), mesh, placements);
  } catch (const Error&) {
    return std::nullopt;  // two strided shards that cannot be said
  }
}

// Every case in every layout of the mesh, by names that say the number alone.
NamedTensors tensors_on(const DeviceMesh& mesh, bool filled, std::size_t turn) {
  NamedTensors tensors;
  for (std::size_t i = 0; i < cases().size(); ++i) {
    const Case& c = cases()[i];
    const at::Tensor full = numbers(c.sizes, c.type, static_cast<std::int64_t>(i));
    const auto all = placements_of(static_cast<std::int64_t>(c.sizes.size()), mesh.ndim());
    for (std::size_t k = 0; k < 25; ++k) {
      const Placements& placements = all[(k * (turn + 1)) % all.size()];
      if (!spec_of(c, mesh, placements)) continue;
      const std::string name = "t" + std::to_string(i) + "." + std::to_string(k);
      tensors[name] = distribute_tensor(filled ? full : at::zeros_like(full), mesh, placements);
    }
  }
  return tensors;
}

TEST(Checkpoint, AnyMeshInAnyMeshOut) {
  const Folder folder;
  run_ranks(6, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2, 3}, {"dp", "tp"});
    save_checkpoint(folder.path(), tensors_on(mesh, true, 0), {.step = 1});
  });
  EXPECT_TRUE(Checkpoint::open(folder.path()).verify().empty());
  const std::vector<Dims> meshes = {{4}, {2, 2}, {1}, {3, 2}, {6}};
  for (std::size_t turn = 0; turn < meshes.size(); ++turn) {
    std::int64_t ranks = 1;
    for (const std::int64_t size : meshes[turn]) ranks *= size;
    run_ranks(ranks, [&](World& world) {
      const DeviceMesh mesh = init_device_mesh(world, at::kCPU, meshes[turn]);
      const NamedTensors tensors = tensors_on(mesh, false, turn);
      const LoadReport report = load_checkpoint(folder.path(), tensors, {.strict = false});
      EXPECT_GE(report.bytes_read, report.bytes_needed);  // exactly which: Stored.AnyLayoutInAnyLayoutOut
      EXPECT_EQ(report.loaded.size() + report.missing.size(), tensors.size());
      EXPECT_GT(report.loaded.size(), 50u);
      std::int64_t bytes = 0;
      for (const std::string& name : report.loaded) {
        const auto i = static_cast<std::size_t>(name[1] - '0');
        const DTensor tensor = tensors.at(name);
        const at::Tensor full = numbers(cases()[i].sizes, cases()[i].type, static_cast<std::int64_t>(i));
        EXPECT_TRUE(
            same_bits(tensor.to_local(), DTensor(distribute_tensor(full, mesh, tensor.placements())).to_local()))
            << name << " " << tensor.spec().to_string();
        bytes += tensor.to_local().nbytes();
      }
      EXPECT_EQ(report.bytes_needed, bytes);
    });
  }
}

TEST(Checkpoint, FromGpuToCpuAndBack) {
  if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no GPU";
  const Folder folder;
  const at::Tensor whole = numbers({700, 600}, at::kFloat, 3);  // large enough to come out of a map
  const auto save = [&](World& world, at::DeviceType device, std::int64_t step) {
    const DeviceMesh mesh = init_device_mesh(world, device, {world.size()});
    const at::Tensor tensor = distribute_tensor(whole.to(device), mesh, {Shard(0)});
    if (step == 0) {
      save_checkpoint(folder.path(), {{"t", tensor}}, {.step = step});
    } else {
      save_checkpoint_async(folder.path(), {{"t", tensor}}, {.step = step}).wait();
    }
  };
  const auto load = [&](World& world, at::DeviceType device) {
    const DeviceMesh mesh = init_device_mesh(world, device, {world.size()});
    for (const Placement placement : {Placement(Shard(0)), Placement(Shard(1)), Placement(Replicate())}) {
      const DTensor tensor = zeros({700, 600}, mesh, {placement});
      load_checkpoint(folder.path(), {{"t", tensor}});
      EXPECT_TRUE(same_bits(tensor.full_tensor().cpu(), whole)) << placement.to_string();
    }
  };
  run_ranks(1, [&](World& world) { save(world, at::kCUDA, 0); });
  run_ranks(3, [&](World& world) { load(world, at::kCPU); });
  run_ranks(2, [&](World& world) { save(world, at::kCPU, 1); });
  run_ranks(1, [&](World& world) { load(world, at::kCUDA); });
  run_ranks(1, [&](World& world) { save(world, at::kCUDA, 2); });
  run_ranks(2, [&](World& world) { load(world, at::kCPU); });
}

TEST(Checkpoint, IntoPlainTensorsAndAlone) {
  const Folder folder;
  const at::Tensor full = numbers({6, 4}, at::kFloat, 3);
  run_ranks(3, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3}, {"x"});
    // A plain tensor is the same on all ranks; it is written once.
    const SaveReport report = save_checkpoint(
        folder.path(), {{"w", distribute_tensor(full, mesh, {Shard(1)})}, {"plain", numbers({5}, at::kFloat, 1)}},
        {.metadata = {{"who", "me"}}});
    EXPECT_EQ(report.total, 6 * 4 * 4 + 5 * 4);
    EXPECT_EQ(report.path, folder / "step-00000000");
  });
  const at::Tensor w = at::zeros({4, 6}).t();  // not row-major
  const at::Tensor plain = at::zeros({5}, at::kDouble);
  const LoadReport report = load_checkpoint(folder.path(), {{"w", w}, {"plain", plain}});
  EXPECT_TRUE(same_bits(w, full));
  EXPECT_TRUE(plain.equal(numbers({5}, at::kFloat, 1).to(at::kDouble)));
  EXPECT_EQ(report.converted, (std::vector<std::string>{"plain"}));
  EXPECT_EQ(report.metadata.at("who"), "me");
  EXPECT_EQ(report.step, 0);
  // Alone, without any world.
  save_checkpoint(folder.path(), {{"w", w}});
  const at::Tensor again = at::zeros({6, 4});
  EXPECT_EQ(load_checkpoint(folder.path(), {{"w", again}}).path, folder / "step-00000001");
  EXPECT_TRUE(same_bits(again, full));
}

TEST(Checkpoint, RanksOutsideTheMesh) {
  const Folder folder;
  const at::Tensor full = numbers({6, 4}, at::kFloat, 3);
  run_ranks(4, [&](World& world) {
    const DeviceMesh two = init_device_mesh(world, at::kCPU, Mesh::from_ranks({2}, {1, 3}));
    const DeviceMesh all = init_device_mesh(world, at::kCPU, {2, 2}, {"a", "b"});
    save_checkpoint(folder.path(), {{"two", distribute_tensor(full, two, {Shard(0)})},
                                    {"rows", distribute_tensor(full, all["b"], {Shard(1)})}});
    const DTensor back = zeros({6, 4}, two, {Shard(1)});
    const DTensor rows = zeros({6, 4}, all, {Shard(0), Shard(1)});
    load_checkpoint(folder.path(), {{"two", back}, {"rows", rows}});
    if (two.contains_me()) {
      EXPECT_TRUE(same_bits(back.full_tensor(), full));
    }
    EXPECT_TRUE(same_bits(rows.full_tensor(), full));
  });
}

TEST(Checkpoint, BehindTheProgram) {
  const Folder folder;
  run_ranks(3, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3}, {"x"});
    const DTensor w = distribute_tensor(numbers({300, 70}, at::kFloat, 1), mesh, {Shard(0)});
    PendingSave first = save_checkpoint_async(folder.path(), {{"w", w}}, {.step = 1});
    w.mul_(2);  // what was saved is what was there
    PendingSave second = save_checkpoint_async(folder.path(), {{"w", w}}, {.step = 2, .keep = 1});
    w.zero_();
    EXPECT_EQ(second.wait().path, folder / "step-00000002");
    EXPECT_TRUE(second.done());
    first.wait();
    // Rank 0 removes old ones once the new one is complete, which is what the others wait for.
    if (world.rank() == 0) {
      EXPECT_EQ(list_steps(folder.path()), (std::vector<std::int64_t>{2}));
    }
    load_checkpoint(folder.path(), {{"w", w}});
    EXPECT_TRUE(same_bits(w.full_tensor(), numbers({300, 70}, at::kFloat, 1) * 2));
    // Nobody waits: the end of the world does.
    save_checkpoint_async(folder.path(), {{"w", w}}, {.step = 3});
  });
  EXPECT_EQ(list_steps(folder.path()), (std::vector<std::int64_t>{2, 3}));
  EXPECT_TRUE(Checkpoint::open(folder.path()).verify().empty());
}

// A rank that cannot write: the same error everywhere, and the checkpoint before is the newest.
TEST(Checkpoint, OneRankFails) {
  const Folder folder;
  std::mutex mutex;
  std::set<std::string> errors;
  run_ranks(3, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3}, {"x"});
    const DTensor w = distribute_tensor(numbers({30, 7}, at::kFloat, 1), mesh, {Shard(0)});
    save_checkpoint(folder.path(), {{"w", w}}, {.step = 1});
    const auto progress = [&](const SaveProgress& p) {
      EXPECT_EQ(p.total, 280);
      if (world.rank() == 1) fail_invalid("test", {.what = "the disk is full"});
    };
    const std::string at_once = error_of([&] {
      save_checkpoint(folder.path(), {{"w", w}}, {.step = 2, .progress = progress});
    });
    PendingSave pending = save_checkpoint_async(folder.path(), {{"w", w}}, {.step = 2, .progress = progress});
    const std::string behind = error_of([&] { pending.wait(); });
    EXPECT_EQ(list_steps(folder.path()), (std::vector<std::int64_t>{1}));
    const std::lock_guard lock(mutex);
    errors.insert(at_once);
    errors.insert(behind);
  });
  EXPECT_EQ(errors, (std::set<std::string>{"[test] the disk is full; it happened on rank 1"}));
  EXPECT_TRUE(Checkpoint::open(folder.path()).verify().empty());
}

TEST(Checkpoint, ErrorsAreTheSameOnAllRanks) {
  const Folder folder;
  run_ranks(2, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2}, {"x"});
    const DTensor w = ones({4, 2}, mesh, {Shard(0)});
    const DTensor n = zeros({4}, mesh, {Shard(0)}, at::kLong);
    save_checkpoint(folder.path(), {{"w", w}, {"n", n}});
    const std::string where = "'" + (folder / "step-00000000") + "'";
    EXPECT_EQ(
        error_of([&] {
          save_checkpoint(folder.path(), {{"p", zeros({4}, mesh, {Partial()})}});
        }),
        "[save_checkpoint] a Partial tensor is not saved or loaded: what ranks hold of it are not its values; got "
        "f32[4] @ 2(x) : P(sum); expected Shard and Replicate; try redistribute it first");
    EXPECT_EQ(error_of([&] {
                load_checkpoint(folder.path(), {{"w", w}, {"other", w}});
              }),
              "[load_checkpoint] the names are not those of the checkpoint " + where +
                  "; got not there: 'other'; not asked for: 'n'; try strict = false to load what is in both");
    const LoadReport report = load_checkpoint(folder.path(), {{"w", w}, {"other", w}}, {.strict = false});
    EXPECT_EQ(report.loaded, (std::vector<std::string>{"w"}));
    EXPECT_EQ(report.missing, (std::vector<std::string>{"other"}));
    EXPECT_EQ(report.unexpected, (std::vector<std::string>{"n"}));
    EXPECT_EQ(error_of([&] {
                load_checkpoint(folder.path(), {{"w", zeros({2, 4}, mesh, {Shard(0)})}, {"n", n}});
              }),
              "[load_checkpoint] the checkpoint has 'w' in another shape; got f32[4,2]; expected f32[2,4]");
    EXPECT_EQ(error_of([&] {
                load_checkpoint(folder.path(), {{"w", w}, {"n", zeros({4}, mesh, {Shard(0)})}});
              }),
              "[load_checkpoint] the checkpoint has 'n' of another type; got i64[4]; expected f32; try convert = "
              "Convert::kAll");
    load_checkpoint(folder.path(), {{"w", w}, {"n", zeros({4}, mesh, {Shard(0)})}}, {.convert = Convert::kAll});
    EXPECT_EQ(error_of([&] {
                load_checkpoint(folder.path(), {{"w", zeros({4, 2}, mesh, {Shard(0)}, at::kDouble)}, {"n", n}},
                                {.convert = Convert::kNone});
              }),
              "[load_checkpoint] the checkpoint has 'w' of another type; got f32[4,2]; expected f64; try convert = "
              "Convert::kAll");
    EXPECT_EQ(error_of([&] {
                load_checkpoint(folder / "x", {{"w", w}});
              }),
              "[checkpoint] no checkpoint; got '" + (folder / "x") +
                  "': No such file or directory; try a folder or file that is there; it happened on rank 0");
    const std::string differ = error_of([&] { save_checkpoint(folder.path(), {{world.rank() == 0 ? "a" : "b", w}}); });
    EXPECT_EQ(differ.substr(0, 57), "[save_checkpoint] the ranks disagree about what is saved;");
    EXPECT_EQ(
        error_of([&] {
          save_checkpoint(folder.path(), {{"u", at::Tensor()}}, {.mesh = mesh});
        }),
        "[save_checkpoint] not a tensor with values of its own; got 'u', undefined; expected a distributed tensor or "
        "a dense one");
    // A folder that is a file.
    EXPECT_EQ(error_of([&] {
                save_checkpoint(folder / "step-00000000" + "/" + kIndexName, {{"w", w}});
              }).substr(0, 36),
              "[checkpoint] cannot make a folder; g");
  });
}

TEST(Checkpoint, ReplicasShareTheWork) {
  const Folder folder;
  run_ranks(4, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {4}, {"x"});
    const at::Tensor full = at::arange(8 << 20, at::kFloat).view({2048, 4096});  // 32 MiB
    const SaveReport report = save_checkpoint(folder.path(), {{"w", distribute_tensor(full, mesh, {Replicate()})}});
    EXPECT_EQ(report.bytes, 8 << 20);
    const DTensor back = zeros({2048, 4096}, mesh, {Shard(1)});
    const LoadReport loaded = load_checkpoint(folder.path(), {{"w", back}});
    EXPECT_EQ(loaded.bytes_needed, 8 << 20);
    EXPECT_EQ(loaded.bytes_read, 32 << 20);  // rows were saved, columns are wanted: some of every block
    EXPECT_TRUE(same_bits(back.full_tensor(), full));
  });
}

}  // namespace
}  // namespace dtensor
