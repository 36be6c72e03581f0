#pragma once

namespace CLI {
class App;
}

namespace dtensor {

// Starts dtensor-train, which lies beside this program and takes the arguments as they are.
void add_train_command(CLI::App& app);

}  // namespace dtensor
