// Damaged checkpoints, and those without checksums of blocks, loaded by ranks that are threads.
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/version.h>

#include <mutex>
#include <set>

#include "dtensor/checkpoint/checkpoint.h"
#include "dtensor/comm/world.h"
#include "dtensor/core/text.h"
#include "dtensor/runtime/factories.h"
#include "dtensor/runtime/tensor.h"
#include "tests/checkpoint/store.h"

namespace dtensor {
namespace {

using testing::bytes_of;
using testing::error_of;
using testing::Folder;
using testing::write_bytes;

struct Layout {
  Dims mesh;
  Placements placements;
};
// The layout that was saved (two ranks, rows), and others: columns, replicated, other meshes, uneven, strided.
const std::vector<Layout>& layouts() {
  static const std::vector<Layout> all = {
      {{2}, {Shard(0)}}, {{2}, {Shard(1)}}, {{1}, {Replicate()}},           {{2}, {Replicate()}},
      {{3}, {Shard(0)}}, {{3}, {Shard(1)}}, {{2, 2}, {Shard(1), Shard(0)}}, {{2}, {StridedShard(0, 2)}}};
  return all;
}

// What all ranks are told when they load `w` (of these sizes) in a layout, and a plain tensor; one text if they agree.
std::set<std::string> errors_of_load(const std::string& dir, const Layout& layout, at::IntArrayRef sizes,
                                     const std::function<void(const at::Tensor&)>& look = {}) {
  std::int64_t ranks = 1;
  for (const std::int64_t size : layout.mesh) ranks *= size;
  std::mutex mutex;
  std::set<std::string> errors;
  run_ranks(ranks, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, layout.mesh);
    const DTensor w = zeros(sizes, mesh, layout.placements);
    const at::Tensor plain = at::zeros({5});
    const std::string error = error_of([&] { load_checkpoint(dir, {{"w", w}, {"plain", plain}}); });
    if (error == "no error" && look) look(w.full_tensor());
    const std::lock_guard lock(mutex);
    errors.insert(error);
  });
  return errors;
}

void save_rows(const std::string& dir, const at::Tensor& full, bool behind) {
  run_ranks(2, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2});
    const NamedTensors tensors = {{"w", distribute_tensor(full, mesh, {Shard(0)})},
                                  {"plain", at::arange(5, at::kFloat)}};
    if (behind) {
      save_checkpoint_async(dir, tensors, {.step = 1}).wait();
    } else {
      save_checkpoint(dir, tensors, {.step = 1});
    }
  });
}

TEST(Damage, IsTheSameErrorOnAllRanksOnAnyLayout) {
  const at::Tensor full = at::arange(600 * 501, at::kFloat).view({600, 501});
  for (const bool behind : {false, true}) {
    const Folder folder;
    save_rows(folder.path(), full, behind);
    const std::string where = folder / "step-00000001";
    for (const Layout& layout : layouts()) {
      EXPECT_EQ(errors_of_load(where, layout, {600, 501}, [&](const at::Tensor& w) { EXPECT_TRUE(w.equal(full)); }),
                std::set<std::string>{"no error"});
    }
    for (const char* name : {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}) {
      const std::string path = where + "/" + name;
      const std::string bytes = bytes_of(path);
      const StoredData data(path);
      const auto first = static_cast<std::size_t>(data.header().data_begin);
      // In the header; the first and the last byte of the data; on both sides of a block's end.
      for (const std::size_t at : {first / 2, first, first + (256 << 10) - 1, first + (256 << 10), bytes.size() - 1}) {
        std::string changed = bytes;
        changed[at] ^= 16;
        write_bytes(path, changed);
        for (const Layout& layout : layouts()) {
          const std::set<std::string> errors = errors_of_load(where, layout, {600, 501});
          ASSERT_EQ(errors.size(), 1u) << *errors.begin();
          EXPECT_NE(errors.begin()->find(path), std::string::npos) << "byte " << at << ": " << *errors.begin();
          if (at >= first) {
            EXPECT_NE(errors.begin()->find("its checksum is another; got bytes "), std::string::npos);
          }
        }
      }
      write_bytes(path, bytes);
    }
  }
}

// Every byte of small files: an error on all ranks, or (never) a value that was not saved.
TEST(Damage, AnyByteOfSmallFilesIsAnErrorOnAllRanks) {
  const Folder folder;
  const at::Tensor full = at::arange(35, at::kFloat).view({7, 5});
  save_rows(folder.path(), full, false);
  const std::string where = folder / "step-00000001";
  for (const std::string& name : names_in(where)) {
    const std::string path = where + "/" + name;
    const std::string bytes = bytes_of(path);
    for (std::size_t at = 0; at < bytes.size(); at += 5) {
      std::string changed = bytes;
      changed[at] = static_cast<char>(changed[at] ^ (1 << (at % 8)));
      write_bytes(path, changed);
      const std::set<std::string> errors = errors_of_load(where, layouts()[at % layouts().size()], {7, 5});
      EXPECT_EQ(errors.size(), 1u);
      EXPECT_NE(errors.begin()->find(path), std::string::npos) << name << " byte " << at << ": " << *errors.begin();
    }
    write_bytes(path, bytes);
  }
}

// The warnings of all ranks while this is alive in each of them.
class Warnings : public c10::WarningHandler {
 public:
#if TORCH_VERSION_MAJOR >= 2
  void process(const c10::Warning& warning) override { add(warning.msg()); }
#else
  void process(const c10::SourceLocation&, const std::string& text, const bool) override { add(text); }
#endif
  const std::vector<std::string>& texts() const { return texts_; }

 private:
  void add(const std::string& text) {
    const std::lock_guard lock(mutex_);
    texts_.push_back(text);
  }

  std::mutex mutex_;
  std::vector<std::string> texts_;
};
#if TORCH_VERSION_MAJOR >= 2
using WarningGuard = c10::WarningUtils::WarningHandlerGuard;
#else
using WarningGuard = c10::Warning::WarningHandlerGuard;
#endif

// Written by version 1, which had no checksums of blocks: tests/checkpoint/version1.
TEST(Version1, LoadsWithOneWarning) {
  Warnings warnings;
  run_ranks(3, [&](World& world) {
    const WarningGuard guard(&warnings);
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {3});
    for (const Placement placement : {Placement(Shard(0)), Placement(Shard(1)), Placement(Replicate())}) {
      const DTensor cut = zeros({6, 4}, mesh, {placement});
      const DTensor whole = zeros({5, 3}, mesh, {placement});
      const LoadReport report = load_checkpoint(VERSION1_FOLDER, {{"cut", cut}, {"whole", whole}}, {.strict = false});
      EXPECT_EQ(report.step, 7);
      EXPECT_EQ(report.bytes_read, report.bytes_needed);
      EXPECT_TRUE(cut.full_tensor().equal(at::arange(24, at::kFloat).view({6, 4})));
      EXPECT_TRUE(whole.full_tensor().equal(at::arange(15, at::kFloat).view({5, 3})));
    }
  });
  ASSERT_EQ(warnings.texts().size(), 3u);  // one for each of three loads
  EXPECT_EQ(
      warnings.texts()[0],
      "dtensor: load_checkpoint: '" VERSION1_FOLDER
      "' was written by an older version of dtensor: damaged data is noticed only where a piece is read as it was "
      "saved, not on another layout; save it again, or run dtensor checkpoint convert, to have every block "
      "verified");
}

TEST(OtherPrograms, FilesLoadWithOneWarning) {
  const Folder folder;
  std::vector<StoredEntry> entries(1);
  entries[0].name = "w";
  entries[0].shape = {4, 3};
  const at::Tensor full = at::arange(12, at::kFloat).view({4, 3});
  const std::string data(static_cast<const char*>(full.data_ptr()), 48);
  write_bytes(folder / "model.safetensors", print_header(entries, {{"format", "pt"}}) + data);
  Warnings warnings;
  run_ranks(2, [&](World& world) {
    const WarningGuard guard(&warnings);
    const DeviceMesh mesh = init_device_mesh(world, at::kCPU, {2});
    const DTensor w = zeros({4, 3}, mesh, {Shard(1)});
    load_checkpoint(folder.path(), {{"w", w}});
    EXPECT_TRUE(w.full_tensor().equal(full));
    // Saved by us, there is nothing to warn of.
    save_checkpoint(folder / "ours", {{"w", w}});
    load_checkpoint(folder / "ours", {{"w", w}});
    EXPECT_TRUE(w.full_tensor().equal(full));
  });
  ASSERT_EQ(warnings.texts().size(), 1u);
  EXPECT_EQ(warnings.texts()[0],
            "dtensor: load_checkpoint: " + in_quotes(folder / "model.safetensors") +
                " was not written by dtensor, and has no checksums: damaged data is not noticed; save it again, or run "
                "dtensor checkpoint convert, to have every block verified");
}

}  // namespace
}  // namespace dtensor
