// `dtensor checkpoint` as a person runs it.
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "tests/checkpoint/store.h"
#include "tests/tools/run_tool.h"

namespace {

namespace fs = std::filesystem;
using namespace dtensor;
using dtensor::testing::Folder;

std::vector<SaveItem> items() {
  return {{"layer.weight", Spec::parse("f32[8,6] @ 2x3(dp,tp) : R,S(0)")},
          {"layer.bias", Spec::parse("f32[6] @ 2x3(dp,tp) : R,R")},
          {"optimizer.layer.weight.exp_avg", Spec::parse("f32[8,6] @ 2x3(dp,tp) : R,S(0)")}};
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(CheckpointCommand, ShowsTensorsLayoutsAndChecksums) {
  const Folder folder;
  dtensor::testing::save_all(folder.path(), items(), 6,
                             {.step = 12, .random = "seed 7, stream 0, calls 0:3", .metadata = {{"who", "me"}}});
  const Outcome got = run("checkpoint show " + folder.path());
  EXPECT_EQ(got.code, 0) << got.output;
  EXPECT_TRUE(contains(got.output, "step-00000012: 3 tensors, 408 B, ")) << got.output;
  EXPECT_TRUE(contains(got.output, "\nstep 12\nrandom seed 7, stream 0, calls 0:3\n'who' 'me'\n")) << got.output;
  EXPECT_TRUE(contains(got.output, "layer.weight ")) << got.output;
  EXPECT_TRUE(contains(got.output, "f32[8,6] @ 2x3(dp,tp) : R,S(0)  in 3 pieces\n")) << got.output;
  EXPECT_TRUE(contains(got.output, "f32[6] @ 2x3(dp,tp) : R,R  in model-0000")) << got.output;
  const Outcome json = run("checkpoint show --json " + folder.path());
  const auto root = nlohmann::json::parse(json.output);
  EXPECT_EQ(root["step"], 12);
  EXPECT_EQ(root["tensors"]["layer.weight"]["pieces"].size(), 3u);
  EXPECT_EQ(root["tensors"]["layer.weight"]["pieces"][2]["box"], "6:8/8,0:6/6");
  EXPECT_EQ(root["tensors"]["layer.bias"]["pieces"][0]["checksum"].get<std::string>().size(), 8u);
}

TEST(CheckpointCommand, VerifiesOrSaysWhatIsWrong) {
  const Folder folder;
  const std::string where = dtensor::testing::save_all(folder.path(), items(), 6, {.step = 12});
  const Outcome fine = run("checkpoint verify " + folder.path());
  EXPECT_EQ(fine.code, 0);
  EXPECT_TRUE(contains(fine.output, "3 tensors, 408 B: as they were saved\n")) << fine.output;
  std::string file;
  for (const auto& entry : fs::directory_iterator(where)) {
    if (entry.path().extension() == ".safetensors" && entry.path().filename() > file) file = entry.path().filename();
  }
  std::string bytes = dtensor::testing::bytes_of(where + "/" + file);
  bytes.back() ^= 1;
  dtensor::testing::write_bytes(where + "/" + file, bytes);
  const Outcome bad = run("checkpoint verify " + folder.path());
  EXPECT_EQ(bad.code, 2);
  EXPECT_TRUE(contains(bad.output, "its checksum is another; got ")) << bad.output;
  EXPECT_TRUE(contains(bad.output, "dtensor: [checkpoint verify] the checkpoint is damaged; got 1 faults in "))
      << bad.output;
  EXPECT_EQ(run("checkpoint verify /nowhere").code, 2);
}

TEST(CheckpointCommand, MergesAndReshards) {
  const Folder folder;
  dtensor::testing::save_all(folder / "a", items(), 6, {.step = 12, .metadata = {{"who", "me"}}});
  const std::string file = folder / "model.safetensors";
  ASSERT_EQ(run("checkpoint convert " + folder / "a" + " " + file + " --only 'layer.*'").code, 0);
  Checkpoint merged = Checkpoint::open(file);
  EXPECT_EQ(merged.tensors().size(), 2u);
  EXPECT_EQ(merged.info().metadata.at("who"), "me");
  EXPECT_EQ(merged.info().step, 12);
  EXPECT_TRUE(merged.verify().empty());
  dtensor::testing::expect_reads(merged, "layer.weight", Spec::parse("f32[8,6] @ 4(x) : S(1)"));
  const Outcome got =
      run("checkpoint convert " + file + " " + folder / "b" + " --mesh x=2,y=2 --place '*.weight=S(1),R'");
  ASSERT_EQ(got.code, 0) << got.output;
  EXPECT_EQ(got.output, folder / "b" + "/step-00000012\n");
  Checkpoint resharded = Checkpoint::open(folder / "b");
  EXPECT_EQ(resharded.tensors().at("layer.weight").spec.to_string(), "f32[8,6] @ 2x2(x,y) : S(1),R");
  EXPECT_TRUE(resharded.verify().empty());
  dtensor::testing::expect_reads(resharded, "layer.weight", Spec::parse("f32[8,6] @ 3(x) : S(0)"));
  dtensor::testing::expect_reads(resharded, "layer.bias", Spec::parse("f32[6] @ 3(x) : S(0)"));
  const Outcome nothing = run("checkpoint convert " + file + " " + folder / "c" + " --only nothing --weights");
  EXPECT_EQ(nothing.code, 2);
  EXPECT_TRUE(
      contains(nothing.output, "no tensor of the checkpoint is left to convert; got --only 'nothing' --weights"))
      << nothing.output;
  EXPECT_EQ(run("checkpoint convert " + file + " " + folder / "c" + " --place 'x'").code, 2);
}

// A model whose parameters have names like those of the optimizer's state.
std::vector<SaveItem> tied_items() {
  const Spec spec = Spec::parse("f32[8,6] @ 2(x) : S(0)");
  return {{"output.weight", spec},
          {"optimizer.output.weight.exp_avg", spec},
          {"optimizer.output.weight.exp_avg_sq", spec},
          {"optimizer.gate", spec},  // a module of the model that has this name
          {"layers.0.weight", spec},
          {"layers.0.bias", spec}};
}

std::set<std::string> names_of(const std::string& path) {
  std::set<std::string> names;
  const Checkpoint checkpoint = Checkpoint::open(path);
  for (const auto& [name, tensor] : checkpoint.tensors()) names.insert(name);
  return names;
}

TEST(CheckpointCommand, TakesTheWeightsAlone) {
  const Folder folder;
  const std::map<std::string, std::string> numbers = {{"optimizer.kind", "Adam"}, {"epoch", "3"}};
  dtensor::testing::save_all(folder / "a", tied_items(), 2, {.step = 4, .state = numbers});
  const std::string file = folder / "model.safetensors";
  const std::set<std::string> weights = {"output.weight", "optimizer.gate", "layers.0.weight", "layers.0.bias"};
  ASSERT_EQ(run("checkpoint convert --weights " + folder / "a" + " " + file).code, 0);
  EXPECT_EQ(names_of(file), weights);
  EXPECT_EQ(Checkpoint::open(file).info().state, (std::map<std::string, std::string>{{"epoch", "3"}}));
  ASSERT_EQ(run("checkpoint convert " + folder / "a" + " " + folder / "b" + " --weights --mesh x=2").code, 0);
  EXPECT_EQ(names_of(folder / "b"), weights);
  EXPECT_FALSE(Checkpoint::open(folder / "b").info().state.contains("optimizer.kind"));
  // All of it takes the optimizer's numbers along.
  ASSERT_EQ(run("checkpoint convert " + folder / "a" + " " + folder / "c").code, 0);
  EXPECT_EQ(names_of(folder / "c").size(), 6u);
  EXPECT_EQ(Checkpoint::open(folder / "c").info().state, numbers);
}

TEST(CheckpointCommand, ExcludesNames) {
  const Folder folder;
  dtensor::testing::save_all(folder / "a", tied_items(), 2, {.step = 4, .state = {{"optimizer.kind", "Adam"}}});
  const std::string file = folder / "model.safetensors";
  ASSERT_EQ(
      run("checkpoint convert --exclude 'optimizer.output.*' --exclude '*.bias' " + folder / "a" + " " + file).code, 0);
  EXPECT_EQ(names_of(file), (std::set<std::string>{"output.weight", "optimizer.gate", "layers.0.weight"}));
  EXPECT_TRUE(Checkpoint::open(file).info().state.empty());  // who resumes from it is told that there is no optimizer
  ASSERT_EQ(run("checkpoint convert " + folder / "a" + " " + file + " --only 'o*' --exclude 'optimizer.*'").code, 0);
  EXPECT_EQ(names_of(file), std::set<std::string>{"output.weight"});
  EXPECT_EQ(run("checkpoint convert " + folder / "a" + " " + file + " --exclude '*'").code, 2);
  // The help says how to take the weights, and its example does.
  const Outcome help = run("checkpoint --help");
  EXPECT_TRUE(contains(help.output, "model.safetensors --weights\n")) << help.output;
  EXPECT_FALSE(contains(help.output, "[!o]*")) << help.output;
}

TEST(CheckpointCommand, WarnsWhereNothingIsVerified) {
  const Folder folder;
  const Outcome got = run("checkpoint convert " VERSION1_FOLDER " " + folder / "new");
  EXPECT_EQ(got.code, 0);
  EXPECT_TRUE(contains(got.output, "warning: '" VERSION1_FOLDER "' was written by an older version of dtensor: "))
      << got.output;
  const Outcome again = run("checkpoint convert " + folder / "new" + " " + folder / "newer");
  EXPECT_EQ(again.code, 0);
  EXPECT_FALSE(contains(again.output, "warning")) << again.output;
}

}  // namespace
