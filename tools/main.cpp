#include <CLI/CLI.hpp>
#include <iostream>

#include "dtensor/core/error.h"
#include "tools/checkpoint_command.h"
#include "tools/operators_command.h"
#include "tools/plan_command.h"
#include "tools/run_command.h"
#include "tools/show_command.h"
#include "tools/train_command.h"

int main(int argc, char** argv) {
  CLI::App app("Distributed tensors for C++ on libtorch", "dtensor");
  app.require_subcommand(1);
  dtensor::add_show_command(app);
  dtensor::add_plan_command(app);
  dtensor::add_run_command(app);
  dtensor::add_operators_command(app);
  dtensor::add_train_command(app);
  dtensor::add_checkpoint_command(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::RuntimeError& error) {  // the exit code of what `run` ran
    return error.get_exit_code();
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const dtensor::Error& error) {
    std::cerr << "dtensor: " << error.what() << "\n";
    return 2;
  }
  return 0;
}
