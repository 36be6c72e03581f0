#include "dtensor/checkpoint/stored.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "dtensor/core/coordinates.h"
#include "dtensor/core/text.h"
#include "tests/checkpoint/store.h"

namespace dtensor {
namespace {

using testing::error_of;

std::vector<SaveItem> items_of(const std::vector<std::string>& specs) {
  std::vector<SaveItem> items;
  for (const std::string& spec : specs) items.push_back({"t" + std::to_string(items.size()), Spec::parse(spec)});
  return items;
}

// Everything that a placement can be: even, uneven, empty, strided, ordered, factored, virtual, on parts of the ranks.
std::vector<std::string> layouts() {
  return {"f32[8,6] @ 2x3(dp,tp) : S(0),R",
          "f32[8,6] @ 2x3(dp,tp) : R,S(1)",
          "f32[7,5] @ 2x3(dp,tp) : S(0),S(1)",
          "f32[7,5] @ 2x3(dp,tp) : S(1),S(0)",
          "f32[13,3] @ 2x3(dp,tp) : S(0),S(0)",
          "f32[13,3] @ 2x3(dp,tp) : S(0)[1],S(0)[0]",
          "bf16[9,4] @ 6(x) : S(0,2)",
          "i64[9,4] @ 3(x) of [5,3,1] : S(0,2)",
          "f32[(3*5),8] @ 2(tp) : S(0.1)",
          "u8[4,1] @ 6(x) : S(1)",
          "bool[2] @ 6(x) : S(0)",
          "f64[] @ 6(x) : R",
          "f32[0,4] @ 6(x) : S(0)",
          "f32[3,0] @ 2x3(a,b) : R,S(0)",
          "c64[5,2] @ 3(x):[1] of 6 : S(0)",
          "f16[6,6]{1,6} @ 6(x) : S(1)",
          "f32[4,4] @ 2x3(dp,tp) : R,R"};
}

TEST(SavePlan, EveryElementIsWrittenOnce) {
  const std::vector<SaveItem> items = items_of(layouts());
  const SavePlan plan = plan_save(items, 6);
  std::vector<std::int64_t> bytes(6);
  for (std::size_t i = 0; i < items.size(); ++i) {
    const StoredTensor& tensor = plan.tensors[i];
    std::vector<int> written(static_cast<std::size_t>(tensor.spec.meta().numel()));
    std::set<std::string> names;
    for (std::int64_t rank = 0; rank < 6; ++rank) {
      const auto at = written_by(tensor, rank);
      if (!at) continue;
      EXPECT_EQ(writer_of(tensor, *at), rank);
      EXPECT_TRUE(names.insert(entry_name(items[i].name, tensor, *at)).second);
      const Box box = box_of(tensor.spec, *at);
      bytes[static_cast<std::size_t>(rank)] += box.numel() * element_size(tensor.spec.meta().dtype());
      for_each_run(box, tensor.spec.meta().shape(), [&](std::int64_t global, std::int64_t, std::int64_t n) {
        for (std::int64_t e = 0; e < n; ++e) ++written[static_cast<std::size_t>(global + e)];
      });
    }
    EXPECT_FALSE(names.empty()) << items[i].spec.to_string();
    EXPECT_EQ(std::count(written.begin(), written.end(), 1), tensor.spec.meta().numel()) << items[i].spec.to_string();
  }
  EXPECT_EQ(bytes, plan.bytes);
}

TEST(SavePlan, ReplicasShareTheWork) {
  // Many tensors: they stay whole, and go round.
  std::vector<SaveItem> items;
  for (int i = 0; i < 40; ++i) items.push_back({"t" + std::to_string(i), Spec::parse("f32[1024,1024] @ 4(x) : R")});
  SavePlan plan = plan_save(items, 4);
  EXPECT_EQ(plan.bytes, (std::vector<std::int64_t>(4, 40 << 20)));
  for (const StoredTensor& tensor : plan.tensors) EXPECT_EQ(tensor.spec.to_string(), "f32[1024,1024] @ 4(x) : R");
  // One tensor: it is cut.
  items = items_of({"f32[1024,65536] @ 2x2(a,b) : R,S(1)", "f32[3] @ 2x2(a,b) : R,R"});
  plan = plan_save(items, 4);
  EXPECT_EQ(plan.tensors[0].spec.to_string(), "f32[1024,65536] @ 2x2(a,b) : S(0),S(1)");
  EXPECT_EQ(plan.tensors[1].spec.to_string(), "f32[3] @ 2x2(a,b) : R,R");
  EXPECT_EQ(*std::max_element(plan.bytes.begin(), plan.bytes.end()), (64 << 20) + 12);
  // Whole rows of a sub-mesh hold the same: one of them writes.
  items = items_of({"f32[6,2] @ 3(tp):[1] of 6 : S(0)"});
  plan = plan_save(items, 6);
  EXPECT_EQ(std::accumulate(plan.bytes.begin(), plan.bytes.end(), std::int64_t{0}), 48);
}

TEST(SavePlan, Refuses) {
  EXPECT_EQ(error_of([] { plan_save(items_of({"f32[4] @ 2(x) : P(sum)"}), 2); }),
            "[save_checkpoint] a Partial tensor is not saved or loaded: what ranks hold of it are not its values; got "
            "f32[4] @ 2(x) : P(sum); expected Shard and Replicate; try redistribute it first");
  EXPECT_EQ(
      error_of([] { plan_save(items_of({"f32[4] @ 4(x) : S(0)"}), 2); }),
      "[save_checkpoint] a tensor lies on ranks that do not save; got 't0' of f32[4] @ 4(x) : S(0); expected ranks "
      "below 2");
  const Spec spec = Spec::parse("f32[4] @ 2(x) : R");
  EXPECT_EQ(error_of([&] {
              plan_save({{"a", spec}, {"a", spec}}, 2);
            }),
            "[save_checkpoint] two tensors of one name; got 'a'");
  for (const char* name : {"", "__metadata__", "w@0", "w@12"}) {
    EXPECT_EQ(error_of([&] {
                plan_save({{name, spec}}, 2);
              }),
              "[save_checkpoint] a tensor cannot have this name in a checkpoint; got " + in_quotes(name) +
                  "; expected not empty, not __metadata__, not ending in @ and a number");
  }
  EXPECT_EQ(error_of([&] {
              plan_save({{"\xff", spec}}, 2);
            }).substr(0, 43),
            "[save_checkpoint] text that is not UTF-8; g");
  EXPECT_EQ(
      error_of([] { plan_save(items_of({"c128[4] @ 2(x) : R"}), 2); }),
      "[save_checkpoint] safetensors files have no such type; got 't0' of c128[4] @ 2(x) : R; try at::view_as_real");
}

TEST(Stored, SaysBoxesInWords) {
  const Spec spec = Spec::parse("f32[(3*5),8] @ 2(tp) : S(0.1)");
  EXPECT_EQ(box_text(box_of(spec, {1})), "0:3/3*3:5/5,0:8/8");
  EXPECT_EQ(box_text(box_of(Spec::parse("f32[9,4] @ 4(x) : S(0,2)"), {0})), "0:2+5:6/9,0:4/4");
  EXPECT_EQ(box_text(box_of(Spec::parse("f32[] @ 2(x) : R"), {0})), "");
}

// Saved on 6 ranks, read in every layout of other meshes: each rank gets its bytes, and reads no other blocks.
TEST(Stored, AnyLayoutInAnyLayoutOut) {
  const testing::Folder folder;
  const std::vector<SaveItem> items = items_of(layouts());
  testing::save_all(folder.path(), items, 6, {.step = 3});
  const char* meshes[] = {"4(x)", "2x2(dp,tp)", "1(x)", "3x2(a,b)", "6(x)", "2x3(dp,tp)"};
  std::mt19937 random(1);
  for (const char* mesh : meshes) {
    const std::int64_t ndim = Mesh::parse(mesh).ndim();
    Checkpoint checkpoint = Checkpoint::open(folder.path());
    EXPECT_EQ(checkpoint.info().step, 3);
    for (const SaveItem& item : items) {
      const auto dims = static_cast<std::int64_t>(item.spec.meta().ndim());
      for (int round = 0; round < 12; ++round) {
        std::vector<std::string> words;
        for (std::int64_t m = 0; m < ndim; ++m) {
          const auto pick = static_cast<std::int64_t>(random() % static_cast<unsigned>(dims + 1));
          const bool strided = random() % 4 == 0;
          words.push_back(pick == dims ? "R" : "S(" + std::to_string(pick) + (strided ? ",2)" : ")"));
        }
        const TensorMeta meta(item.spec.meta().shape(), item.spec.meta().dtype());
        std::optional<Spec> wants;
        try {
          wants =
              Spec::parse(meta.to_string() + " @ " + mesh + " : " + join(words, ",", [](const auto& w) { return w; }));
        } catch (const Error&) {
          continue;  // two strided shards of one dim
        }
        testing::expect_reads(checkpoint, item.name, *wants);
      }
    }
  }
  EXPECT_TRUE(Checkpoint::open(folder.path()).verify().empty());
}

TEST(Stored, ReadsIntoAnyStrides) {
  const testing::Folder folder;
  const Spec saved = Spec::parse("i32[6,4] @ 3(x) : S(0)");
  testing::save_all(folder.path(), {{"t", saved}}, 3);
  const Spec wants = Spec::parse("i32[6,4] @ 2(y) : S(1)");
  Checkpoint checkpoint = Checkpoint::open(folder.path());
  std::vector<std::int32_t> columns(12);
  EXPECT_EQ(checkpoint.read("t", wants, {1}, {1, 6}, columns.data()), 96);  // half of each of three blocks
  for (std::int64_t i = 0; i < 6; ++i) {
    for (std::int64_t j = 0; j < 2; ++j) {
      std::int32_t expected = 0;
      testing::put_element(reinterpret_cast<char*>(&expected), 4, i * 4 + j + 2, testing::salt_of("t"));
      EXPECT_EQ(columns[static_cast<std::size_t>(i + 6 * j)], expected);
    }
  }
}

// Large pieces are copied out of the map when the system has them in its memory.
TEST(Stored, LargePieces) {
  const testing::Folder folder;
  testing::save_all(folder.path(), {{"t", Spec::parse("u8[1200,3001] @ 2(x) : S(0)")}}, 2);
  for (const char* layout : {"2(x) : S(0)", "1(x) : R", "2(x) : S(1)", "3(x) : S(0)", "3(x) : S(0,2)"}) {
    Checkpoint checkpoint = Checkpoint::open(folder.path());
    testing::expect_reads(checkpoint, "t", Spec::parse(std::string("u8[1200,3001] @ ") + layout));
  }
  const std::string file = folder / "step-00000000/" + Checkpoint::open(folder.path()).index().files[1]->name;
  std::string bytes = testing::bytes_of(file);
  bytes[bytes.size() / 2] ^= 1;
  testing::write_bytes(file, bytes);
  Checkpoint damaged = Checkpoint::open(folder.path());
  std::vector<char> half(600 * 3001);
  EXPECT_NE(testing::error_of([&] {
              damaged.read("t", Spec::parse("u8[1200,3001] @ 2(x) : S(0)"), {1}, {3001, 1}, half.data());
            }).find("its checksum is another"),
            std::string::npos);
}

TEST(Stored, OpensOnlyTheFilesThatItNeeds) {
  const testing::Folder folder;
  testing::save_all(folder.path(), items_of({"f32[12,4] @ 6(x) : S(0)"}), 6);
  Checkpoint checkpoint = Checkpoint::open(folder.path());
  const Spec wants = Spec::parse("f32[12,4] @ 3(x) : S(0)");
  std::vector<float> rows(16);
  EXPECT_EQ(checkpoint.read("t0", wants, {1}, {4, 1}, rows.data()), 64);
  EXPECT_EQ(checkpoint.files_opened(), 2);
}

TEST(Stored, InfoAndMetadataComeBack) {
  const testing::Folder folder;
  const CheckpointInfo info{
      .step = 41, .random = "seed 7, stream 0, calls 0:12", .metadata = {{"a", "b \"c\""}}, .state = {{"x", "1"}}};
  const std::string where =
      testing::save_all(folder.path(), items_of({"f32[3] @ 2(x) : R", "f32[3] @ 2(x) : S(0)"}), 2, info);
  EXPECT_EQ(where, folder / "step-00000041");
  Checkpoint checkpoint = Checkpoint::open(where);
  EXPECT_EQ(checkpoint.info(), info);
  const std::string index = testing::bytes_of(where + "/" + kIndexName);
  const ParsedIndex parsed = parse_index(index, "i");
  EXPECT_EQ(parsed.weight_map.size(), 1u);  // the one that is whole in a file
  EXPECT_TRUE(parsed.weight_map.contains("t0"));
  // The first file says it too.
  const auto& metadata = checkpoint.file(0).header().metadata;
  EXPECT_EQ(metadata.at("dtensor.step"), "41");
  EXPECT_EQ(metadata.at("dtensor.random"), "seed 7, stream 0, calls 0:12");
  EXPECT_EQ(metadata.at("dtensor.metadata"), R"({"a":"b \"c\""})");
  EXPECT_EQ(metadata.at("format"), "pt");
}

}  // namespace
}  // namespace dtensor
