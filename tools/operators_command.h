#pragma once

namespace CLI {
class App;
}

namespace dtensor {

// Adds `operators` to the command line: the tables of rules as a page (docs/operators.md), or the rows of one operator.
void add_operators_command(CLI::App& app);

}  // namespace dtensor
