#pragma once

namespace CLI {
class App;
}

namespace dtensor {

// `dtensor checkpoint show|verify|convert`: what is in a checkpoint, whether it is what was saved, and other forms of
// it.
void add_checkpoint_command(CLI::App& app);

}  // namespace dtensor
