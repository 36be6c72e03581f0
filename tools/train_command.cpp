#include "train_command.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <string>
#include <vector>

#include "dtensor/core/error.h"

namespace dtensor {

void add_train_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("train", "Train a transformer on any mesh; dtensor train --help");
  command->prefix_command();
  command->set_help_flag();
  command->callback([command] {
    const std::filesystem::path program =
        std::filesystem::read_symlink("/proc/self/exe").parent_path() / "dtensor-train";
    std::vector<std::string> words = command->remaining();
    words.insert(words.begin(), program.string());
    std::vector<char*> pointers;
    for (std::string& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    execv(program.c_str(), pointers.data());
    fail_unsupported("dtensor train", {.what = "the program that trains cannot be started",
                                       .got = program.string(),
                                       .advice = "a build with libtorch, and DTENSOR_TOOLS"});
  });
}

}  // namespace dtensor
