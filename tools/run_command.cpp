#include "run_command.h"

#include <CLI/CLI.hpp>
#include <cmath>
#include <memory>
#include <string>

#include "dtensor/comm/launch.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

// What the command line says, before it is checked.
struct RunArguments {
  LaunchOptions options;
  std::string hosts;
  double timeout = 0;
  double grace = 10;
};

std::chrono::milliseconds from_seconds(double seconds, const std::string& name) {
  constexpr double kYear = 365.0 * 24 * 3600;
  if (!(seconds >= 0 && seconds <= kYear)) {
    fail_invalid("dtensor run", {.what = "the time is out of range",
                                 .got = name + " " + std::to_string(seconds),
                                 .expected = "seconds, from 0 to a year"});
  }
  return std::chrono::milliseconds(std::llround(seconds * 1000));
}

int run(RunArguments& arguments) {
  LaunchOptions& options = arguments.options;
  if (!arguments.hosts.empty()) options.hosts = parse_hosts(arguments.hosts);
  options.timeout = from_seconds(arguments.timeout, "--timeout");
  options.grace = from_seconds(arguments.grace, "--grace");
  return launch(options);
}

}  // namespace

void add_run_command(CLI::App& app) {
  auto arguments = std::make_shared<RunArguments>();
  CLI::App* command = app.add_subcommand("run", "Start one process per rank: dtensor run -n 4 -- ./program args");
  command->add_option("-n,--ranks", arguments->options.ranks, "How many ranks");
  command->add_option("--backend", arguments->options.backend, "gloo or nccl; sets DTENSOR_BACKEND");
  command->add_option("--hosts", arguments->hosts, "Where: a,b:2. Other hosts are reached through ssh");
  command->add_option("--master-addr", arguments->options.master_address, "Where rank 0 listens");
  command->add_option("--master-port", arguments->options.master_port, "Its port; 0: a free one");
  command->add_option("--timeout", arguments->timeout, "End the ranks after so many seconds; 0: never");
  command->add_option("--grace", arguments->grace, "Seconds between SIGTERM and SIGKILL")->capture_default_str();
  command->add_option("command", arguments->options.command, "The program and its arguments, after --");
  command->callback([arguments] {
    const int code = run(*arguments);
    if (code != 0) throw CLI::RuntimeError(code);
  });
}

}  // namespace dtensor
