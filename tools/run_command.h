#pragma once

namespace CLI {
class App;
}

namespace dtensor {

// Adds `run` to the command line: starts one process per rank. When the command was given, parsing ends in
// CLI::RuntimeError with the ranks' exit code if that is not 0, and in dtensor::Error if nothing could be started.
void add_run_command(CLI::App& app);

}  // namespace dtensor
