#include "tools/show_command.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>

#include "dtensor/core/boxes.h"
#include "dtensor/core/coordinates.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"
#include "dtensor/debug/draw.h"
#include "tools/tensor_text.h"

namespace dtensor {
namespace {

struct ShowOptions {
  std::string mesh;
  std::string tensor;
  std::string placements;
  std::string spec;
  std::string svg;
  std::string color = "auto";
  bool json = false;
};

Spec read_spec(const ShowOptions& options) {
  if (!options.spec.empty()) return Spec::parse(options.spec);
  const TensorMeta meta = TensorMeta::parse(tensor_text(options.tensor));
  const Mesh mesh = Mesh::parse(options.mesh);
  return Spec::parse(meta.to_string() + " @ " + mesh.to_string() + " : " + options.placements);
}

nlohmann::ordered_json json_of(const Spec& spec) {
  constexpr std::int64_t kMostRanks = 65'536;
  constexpr std::size_t kMostRuns = 1'000;
  if (spec.mesh().size() > kMostRanks) {
    fail_unsupported("show", {.what = "too many ranks to list",
                              .got = spec.mesh().to_string(),
                              .expected = "at most " + std::to_string(kMostRanks)});
  }
  const auto list = [](const auto& values) { return std::vector<std::int64_t>(values.begin(), values.end()); };
  nlohmann::ordered_json root;
  root["spec"] = spec.to_string();
  root["tensor"] = {{"dtype", std::string(to_string(spec.meta().dtype()))},
                    {"shape", list(spec.meta().shape())},
                    {"stride", list(spec.meta().stride())},
                    {"bytes", spec.meta().nbytes()}};
  root["mesh"] = {{"shape", list(spec.mesh().shape())}, {"names", spec.mesh().names()}};
  for (const Placement& placement : spec.placements()) root["placements"].push_back(placement.to_string());
  std::vector<std::int64_t> dims(static_cast<std::size_t>(spec.mesh().ndim()));
  std::iota(dims.begin(), dims.end(), 0);
  Dims at(dims.size());
  do {
    const Spec::Local local = spec.local(at);
    nlohmann::ordered_json entry = {{"rank", spec.mesh().rank_at(at)}, {"coordinate", list(at)},
                                    {"shape", list(local.shape)},      {"offset", list(local.offset)},
                                    {"bytes", spec.local_bytes(at)},   {"replicas", replicas_of(spec, at)}};
    entry["runs"] = nlohmann::ordered_json::array();
    for (const DimSet& set : box_of(spec, at).dims) {
      const std::vector<Interval> runs = runs_of(set);
      nlohmann::ordered_json shown = nlohmann::ordered_json::array();
      for (std::size_t i = 0; i < std::min(runs.size(), kMostRuns); ++i) shown.push_back({runs[i].begin, runs[i].end});
      entry["runs"].push_back(shown);
      if (runs.size() > kMostRuns) entry["runs_cut_off"] = true;
    }
    root["ranks"].push_back(entry);
  } while (next_coordinate(at, spec.mesh().shape(), dims));
  return root;
}

void write_file(const std::string& path, const std::string& content) {
  std::ofstream file(path, std::ios::binary);
  file << content;
  file.close();
  if (!file) {
    fail_invalid("show", {.what = "the file could not be written",
                          .got = in_quotes(path),
                          .advice = "a folder that exists and may be written to"});
  }
}

void show(const ShowOptions& options) {
  const Spec spec = read_spec(options);
  if (!options.svg.empty()) {
    write_file(options.svg, draw_svg(spec));
    std::cerr << "wrote " << options.svg << "\n";
  }
  if (options.json) {
    std::cout << json_of(spec).dump(2) << "\n";
    return;
  }
  const bool color = options.color == "always" ||
                     (options.color == "auto" && isatty(STDOUT_FILENO) && std::getenv("NO_COLOR") == nullptr);
  std::cout << draw_text(spec, {.color = color});
}

}  // namespace

void add_show_command(CLI::App& app) {
  auto options = std::make_shared<ShowOptions>();
  CLI::App* command = app.add_subcommand("show", "Shows which rank holds what of a tensor");
  command->footer(
      "Examples:\n"
      "  dtensor show --mesh dp=2,tp=3 --tensor 7x5 --placements \"S(0),S(1)\"\n"
      "  dtensor show --mesh fsdp=2,tp=2 --tensor bf16[10,4] --placements \"S(0,2),S(0)\" --svg picture.svg\n"
      "  dtensor show --spec \"f32[(3*5),8] @ 2(tp) : S(0.1)\" --json");
  auto* mesh = command->add_option("--mesh", options->mesh, "The mesh: dp=2,tp=3 or 2x3(dp,tp)");
  auto* tensor = command->add_option("--tensor", options->tensor, "The tensor: 7x5 or bf16[7,5]");
  auto* placements = command->add_option("--placements", options->placements,
                                         "One for each mesh dim: S(0), S(0,2) strided, R, P(sum)");
  auto* spec = command->add_option("--spec", options->spec, "All three in one: f32[7,5] @ 2x3(dp,tp) : S(0),S(1)");
  spec->excludes(mesh)->excludes(tensor)->excludes(placements);
  command->add_option("--svg", options->svg, "Also write the picture to this file");
  command->add_flag("--json", options->json, "For machines");
  command->add_option("--color", options->color, "auto, always or never")
      ->check(CLI::IsMember({"auto", "always", "never"}));
  command->callback([options] {
    if (options->spec.empty() && (options->mesh.empty() || options->tensor.empty() || options->placements.empty())) {
      fail_invalid("show", {.what = "nothing to show",
                            .expected = "--mesh, --tensor and --placements, or --spec",
                            .advice = "dtensor show --mesh dp=2,tp=3 --tensor 7x5 --placements \"S(0),S(1)\""});
    }
    show(*options);
  });
}

}  // namespace dtensor
