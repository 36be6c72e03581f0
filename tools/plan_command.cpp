#include "tools/plan_command.h"

#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "dtensor/core/checked.h"
#include "dtensor/core/plan.h"
#include "dtensor/core/text.h"
#include "tools/tensor_text.h"

namespace dtensor {
namespace {

using Json = nlohmann::ordered_json;

struct PlanArguments {
  std::string mesh;
  std::string to_mesh;
  std::string tensor;
  std::string from;
  std::string to;
  std::string memory;
  std::string staging;
  std::int64_t latency_ns = 2'000;
  std::int64_t gigabytes = 50;
  bool json = false;
};

// `64MB`, `512KiB`, `1000`.
std::int64_t read_bytes(const std::string& text) {
  Scanner in(text, "plan", "bytes such as 64MB, 32MiB or 4096");
  std::int64_t unit = 1;
  const std::int64_t value = in.size();
  const std::string_view name = in.name();
  constexpr std::pair<std::string_view, std::int64_t> kUnits[] = {
      {"", 1},          {"B", 1},         {"kB", 1'000},   {"KB", 1'000}, {"MB", 1'000'000}, {"GB", 1'000'000'000},
      {"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}};
  const auto known = std::find_if(std::begin(kUnits), std::end(kUnits), [&](const auto& u) { return u.first == name; });
  if (known == std::end(kUnits)) in.fail_here("unknown unit " + in_quotes(name));
  unit = known->second;
  in.expect_end();
  const auto bytes = checked_mul(value, unit);
  if (!bytes) in.fail_here("more bytes than fit in 64 bits");
  return *bytes;
}

// A full spec, or placements of the tensor on the mesh.
Spec read_end(const PlanArguments& arguments, const std::string& mesh, const std::string& text) {
  if (text.find('@') != std::string::npos) return Spec::parse(text);
  const TensorMeta meta = TensorMeta::parse(tensor_text(arguments.tensor));
  return Spec::parse(meta.to_string() + " @ " + Mesh::parse(mesh).to_string() + " : " + text);
}

Json json_of(const Volume& volume) { return {{"max", volume.max}, {"total", volume.total}}; }

Json json_of(const Step& step) {
  Json json = {{"kind", std::string(to_string(step.kind))},
               {"mesh_dims", std::vector<std::int64_t>(step.mesh_dims.begin(), step.mesh_dims.end())},
               {"before", step.before.to_string()},
               {"after", step.after.to_string()},
               {"received", json_of(step.received)},
               {"sent", json_of(step.sent)},
               {"messages", step.messages},
               {"chunks", step.chunks},
               {"staging", step.staging},
               {"time_ps", step.time}};
  if (step.op) {
    json["op"] = std::string(to_string(*step.op));
    json["divisor"] = step.divisor;
  }
  return json;
}

Json json_of(const Plan& plan) {
  Json json = {{"from", plan.from().to_string()},
               {"to", plan.to().to_string()},
               {"steps", Json::array()},
               {"received", json_of(plan.received())},
               {"received_bound", json_of(plan.received_bound())},
               {"sent", json_of(plan.sent())},
               {"peak_bytes", plan.peak_bytes()},
               {"memory_bound", plan.memory_bound()},
               {"time_ps", plan.time()},
               {"exact", plan.exact()},
               {"rejected", Json::array()}};
  for (const Step& step : plan.steps()) json["steps"].push_back(json_of(step));
  for (const Route& route : plan.rejected()) {
    Json entry = {{"why", route.refused}, {"steps", Json::array()}};
    if (!route.steps.empty()) {
      entry["time_ps"] = route.time;
      entry["peak_bytes"] = route.peak;
    }
    for (const Step& step : route.steps) entry["steps"].push_back(json_of(step));
    json["rejected"].push_back(entry);
  }
  return json;
}

void print_plan(const PlanArguments& arguments) {
  const Spec from = read_end(arguments, arguments.mesh, arguments.from);
  const Spec to = read_end(arguments, arguments.to_mesh.empty() ? arguments.mesh : arguments.to_mesh, arguments.to);
  CostConstants constants;
  constants.link = {arguments.latency_ns * 1'000, 1'024'000 / arguments.gigabytes};
  PlanOptions options{.cost = CostModel(constants), .explain = true};
  if (!arguments.memory.empty()) options.memory = read_bytes(arguments.memory);
  if (!arguments.staging.empty()) options.staging = read_bytes(arguments.staging);
  const Plan plan = make_plan(from, to, options);
  if (arguments.json) {
    std::cout << json_of(plan).dump(2) << "\n";
  } else {
    std::cout << plan.to_string();
  }
}

}  // namespace

void add_plan_command(CLI::App& app) {
  auto arguments = std::make_shared<PlanArguments>();
  CLI::App* command = app.add_subcommand("plan", "Plans how a tensor gets from one layout to another");
  command->footer(
      "Examples:\n"
      "  dtensor plan --mesh dp=2,tp=4 --tensor 4096x4096 --from \"S(0),R\" --to \"R,S(1)\"\n"
      "  dtensor plan --mesh dp=2,tp=4 --to-mesh tp=2 --tensor bf16[4096,4096] --from \"P,S(0)\" --to \"S(1)\" --json\n"
      "  dtensor plan --from \"f32[9,4] @ 4(x) : S(0,2)\" --to \"f32[9,4] @ 4(x) : R\"");
  command->add_option("--mesh", arguments->mesh, "The mesh: dp=2,tp=4 or 2x4(dp,tp)");
  command->add_option("--to-mesh", arguments->to_mesh, "The target's mesh, if it is another one");
  command->add_option("--tensor", arguments->tensor, "The tensor: 4096x4096 or bf16[4096,4096]");
  command->add_option("--from", arguments->from, "The source: placements, or a whole spec")->required();
  command->add_option("--to", arguments->to, "The target: placements, or a whole spec")->required();
  command->add_option("--memory", arguments->memory, "The most that a rank may use: 64MB, 32MiB");
  command->add_option("--staging", arguments->staging, "What packed messages may use of it; 32MiB unless said");
  command->add_option("--latency", arguments->latency_ns, "Nanoseconds a message costs")->check(CLI::Range(0, 1 << 30));
  command->add_option("--bandwidth", arguments->gigabytes, "GB/s of a link")->check(CLI::Range(1, 100'000));
  command->add_flag("--json", arguments->json, "For machines");
  command->callback([arguments] {
    const bool whole = arguments->from.find('@') != std::string::npos && arguments->to.find('@') != std::string::npos;
    if (!whole && (arguments->mesh.empty() || arguments->tensor.empty())) {
      fail_invalid("plan", {.what = "no tensor or no mesh",
                            .expected = "--mesh and --tensor, or whole specs as --from and --to",
                            .advice = "dtensor plan --mesh dp=2,tp=4 --tensor 4096x4096 --from \"S(0),R\" --to "
                                      "\"R,S(1)\""});
    }
    print_plan(*arguments);
  });
}

}  // namespace dtensor
