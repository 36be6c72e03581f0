#pragma once

namespace CLI {
class App;
}

namespace dtensor {

// `dtensor plan`: how a tensor gets from one layout to another, and what it costs.
void add_plan_command(CLI::App& app);

}  // namespace dtensor
