#pragma once

namespace CLI {
class App;
}

namespace dtensor {

// `dtensor show`: a picture of who holds what.
void add_show_command(CLI::App& app);

}  // namespace dtensor
