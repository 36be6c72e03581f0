#include "tools/checkpoint_command.h"

#include <fnmatch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "dtensor/checkpoint/checksum.h"
#include "dtensor/checkpoint/convert.h"
#include "dtensor/core/error.h"
#include "dtensor/core/plan.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

using Json = nlohmann::ordered_json;

struct CheckpointArguments {
  std::string from;
  std::string to;
  std::string mesh;
  std::vector<std::string> place;
  std::vector<std::string> only;
  std::vector<std::string> exclude;
  bool weights = false;
  bool json = false;
};

bool matches(const std::string& pattern, const std::string& name) {
  return ::fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
}

// Who wrote the pieces of a tensor, and under which checksum.
struct PieceLine {
  std::string file;
  std::string entry;
  std::string box;
  std::string checksum;
  std::int64_t bytes;
};

std::vector<PieceLine> pieces_of(Checkpoint& checkpoint, const std::string& name, const StoredTensor& tensor) {
  std::vector<PieceLine> lines;
  for (std::int64_t rank = 0; rank < static_cast<std::int64_t>(checkpoint.index().files.size()); ++rank) {
    const auto at = written_by(tensor, rank);
    if (!at) continue;
    const StoredData& data = checkpoint.file(rank);
    const std::string entry = entry_name(name, tensor, *at);
    const StoredEntry* found = data.find(entry);
    if (!found) fail_invalid("checkpoint", {.what = "a piece is not in its file", .got = in_quotes(entry)});
    PieceLine line{checkpoint.index().files[static_cast<std::size_t>(rank)]->name, entry,
                   box_text(box_of(tensor.spec, *at)), "", found->bytes()};
    const auto sum = data.words() ? entry_checksum(*data.words(), *found) : std::nullopt;
    if (sum) line.checksum = checksum_text(*sum);
    lines.push_back(std::move(line));
  }
  return lines;
}

Json json_of(Checkpoint& checkpoint) {
  Json root = {{"path", checkpoint.path()}};
  if (checkpoint.info().step) root["step"] = *checkpoint.info().step;
  if (!checkpoint.info().random.empty()) root["random"] = checkpoint.info().random;
  root["metadata"] = checkpoint.info().metadata;
  root["state"] = checkpoint.info().state;
  root["tensors"] = Json::object();
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    Json pieces = Json::array();
    for (const PieceLine& line : pieces_of(checkpoint, name, tensor)) {
      pieces.push_back({{"file", line.file},
                        {"entry", line.entry},
                        {"box", line.box},
                        {"bytes", line.bytes},
                        {"checksum", line.checksum}});
    }
    root["tensors"][name] = {
        {"spec", tensor.spec.to_string()}, {"bytes", tensor.spec.meta().nbytes()}, {"pieces", pieces}};
  }
  return root;
}

void show(const CheckpointArguments& arguments) {
  Checkpoint checkpoint = Checkpoint::open(arguments.from);
  if (arguments.json) {
    std::cout << json_of(checkpoint).dump(2) << "\n";
    return;
  }
  std::size_t width = 4;
  std::int64_t bytes = 0;
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    width = std::max(width, name.size());
    bytes += tensor.spec.meta().nbytes();
  }
  std::cout << checkpoint.path() << ": " << checkpoint.tensors().size() << " tensors, " << bytes_text(bytes) << ", "
            << std::count_if(checkpoint.index().files.begin(), checkpoint.index().files.end(),
                             [](const auto& file) { return file.has_value(); })
            << " files\n";
  if (checkpoint.info().step) std::cout << "step " << *checkpoint.info().step << "\n";
  if (!checkpoint.info().random.empty()) std::cout << "random " << checkpoint.info().random << "\n";
  for (const auto& [key, value] : checkpoint.info().metadata)
    std::cout << in_quotes(key) << " " << in_quotes(value) << "\n";
  std::cout << "\n";
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    const std::vector<PieceLine> pieces = pieces_of(checkpoint, name, tensor);
    std::printf("%-*s  %9s  %s", static_cast<int>(std::min<std::size_t>(width, 60)), name.c_str(),
                bytes_text(tensor.spec.meta().nbytes()).c_str(), tensor.spec.to_string().c_str());
    if (pieces.size() == 1) {
      std::printf("  in %s%s%s\n", pieces[0].file.c_str(), pieces[0].checksum.empty() ? "" : ", crc32c ",
                  pieces[0].checksum.c_str());
    } else {
      std::printf("  in %zu pieces\n", pieces.size());
    }
  }
}

void verify(const CheckpointArguments& arguments) {
  Checkpoint checkpoint = Checkpoint::open(arguments.from);
  const std::vector<std::string> wrong = checkpoint.verify();
  for (const std::string& line : wrong) std::cerr << line << "\n";
  if (!wrong.empty()) {
    fail_invalid("checkpoint verify",
                 {.what = "the checkpoint is damaged",
                  .got = std::to_string(wrong.size()) + " faults in " + in_quotes(checkpoint.path()),
                  .advice = "an earlier checkpoint"});
  }
  std::int64_t bytes = 0;
  for (const auto& [name, tensor] : checkpoint.tensors()) bytes += tensor.spec.meta().nbytes();
  std::cout << checkpoint.path() << ": " << checkpoint.tensors().size() << " tensors, " << bytes_text(bytes)
            << (checkpoint.has_checksums() ? ": as they were saved\n" : ": readable; there are no checksums in it\n");
}

void convert(const CheckpointArguments& arguments) {
  Checkpoint checkpoint = Checkpoint::open(arguments.from);
  const auto any_matches = [](const std::vector<std::string>& patterns, const std::string& name) {
    return std::any_of(patterns.begin(), patterns.end(),
                       [&](const std::string& pattern) { return matches(pattern, name); });
  };
  Selection selection;
  selection.optimizer = !arguments.weights;
  selection.chosen = [&](const std::string& name) {
    return (arguments.only.empty() || any_matches(arguments.only, name)) && !any_matches(arguments.exclude, name);
  };
  if (std::none_of(checkpoint.tensors().begin(), checkpoint.tensors().end(), [&](const auto& t) {
        return selection.chosen(t.first) && (selection.optimizer || !is_optimizer_state(checkpoint, t.first));
      })) {
    std::string got;
    for (const std::string& pattern : arguments.only) got += " --only " + in_quotes(pattern);
    for (const std::string& pattern : arguments.exclude) got += " --exclude " + in_quotes(pattern);
    if (arguments.weights) got += " --weights";
    fail_invalid("checkpoint convert", {.what = "no tensor of the checkpoint is left to convert",
                                        .got = got.empty() ? "no tensors" : got.substr(1),
                                        .advice = "dtensor checkpoint show, which lists their names"});
  }
  if (!checkpoint.has_blocks()) std::cerr << "warning: " << checkpoint.unverified_text() << "\n";
  if (arguments.to.ends_with(".safetensors")) {
    if (!arguments.mesh.empty()) {
      fail_invalid("checkpoint convert",
                   {.what = "one file holds whole tensors", .got = "--mesh", .advice = "a folder, to reshard"});
    }
    const std::int64_t bytes = merge_checkpoint(checkpoint, arguments.to, selection);
    std::cout << arguments.to << ": " << bytes_text(bytes) << "\n";
    return;
  }
  const Mesh mesh = Mesh::parse(arguments.mesh.empty() ? "1(file)" : arguments.mesh);
  const auto place = [&](const std::string& name, const TensorMeta& meta) {
    for (const std::string& rule : arguments.place) {
      const std::size_t equals = rule.rfind('=');
      if (equals == std::string::npos) {
        fail_invalid(
            "checkpoint convert",
            {.what = "not a pattern and placements", .got = in_quotes(rule), .expected = "'layers.*.weight=S(0),R'"});
      }
      if (matches(rule.substr(0, equals), name)) {
        return Spec::parse(meta.to_string() + " @ " + mesh.to_string() + " : " + rule.substr(equals + 1));
      }
    }
    return Spec::make(meta, mesh, Placements(static_cast<std::size_t>(mesh.ndim()), Replicate()));
  };
  std::cout << reshard_checkpoint(checkpoint, arguments.to, mesh.max_rank() + 1, place, selection) << "\n";
}

}  // namespace

void add_checkpoint_command(CLI::App& app) {
  auto arguments = std::make_shared<CheckpointArguments>();
  CLI::App* command = app.add_subcommand("checkpoint", "Shows, verifies and converts checkpoints");
  command->require_subcommand(1);
  command->footer(
      "Examples:\n"
      "  dtensor checkpoint show runs/a\n"
      "  dtensor checkpoint verify runs/a/step-00000100\n"
      "  dtensor checkpoint convert runs/a model.safetensors --weights\n"
      "  dtensor checkpoint convert runs/a part.safetensors --only \"layers.*\" --exclude \"*.bias\"\n"
      "  dtensor checkpoint convert runs/a runs/b --mesh dp=2,tp=4 --place \"*.weight=R,S(0)\"");
  const auto add = [&](const char* name, const char* about, void (*run)(const CheckpointArguments&)) {
    CLI::App* sub = command->add_subcommand(name, about);
    sub->add_option("checkpoint", arguments->from,
                    "A checkpoint, a folder of them (the newest), or a .safetensors file")
        ->required();
    sub->callback([arguments, run] { run(*arguments); });
    return sub;
  };
  add("show", "Prints tensors, layouts, sizes and checksums", show)
      ->add_flag("--json", arguments->json, "For machines, with all pieces");
  add("verify", "Reads everything and compares checksums", verify);
  CLI::App* sub = add("convert", "Merges into one file, or saves again as other ranks would have", convert);
  sub->add_option("to", arguments->to, "A .safetensors file, or a folder of checkpoints")->required();
  sub->add_option("--mesh", arguments->mesh, "Into a folder: the mesh, dp=2,tp=4; one rank unless said");
  sub->add_option("--place", arguments->place, "PATTERN=PLACEMENTS, the first that fits; replicated unless said");
  sub->add_option("--only", arguments->only, "Patterns of the names to take; all unless given");
  sub->add_option("--exclude", arguments->exclude, "A pattern of names to leave out; may be given several times")
      ->allow_extra_args(false);
  sub->add_flag("--weights", arguments->weights, "Leave out the state of the optimizer (optimizer.*)");
}

}  // namespace dtensor
