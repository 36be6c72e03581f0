// The command `run` alone, as the tests start it.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "dtensor/core/error.h"
#include "tools/run_command.h"

int main(int argc, char** argv) {
  CLI::App app("dtensor");
  app.require_subcommand(1);
  dtensor::add_run_command(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const dtensor::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
  return 0;
}
