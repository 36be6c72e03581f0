#pragma once

// Folders by POSIX calls: some builds of libtorch carry and export a std::filesystem of another libstdc++, and a
// program that links both ends in the wrong one (docs/decisions.md).

#include <string>
#include <vector>

namespace dtensor {

bool path_exists(const std::string& path);
bool is_folder(const std::string& path);
// The last part of a path, and what is before it ("." if nothing is).
std::string name_of_path(const std::string& path);
std::string folder_of_path(const std::string& path);

// The names in a folder, sorted; none if it cannot be read.
std::vector<std::string> names_in(const std::string& folder);
// Makes a folder and those above it.
void make_folders(const std::string& path);
// Removes a file, or a folder with all in it; follows no links. False if something stayed.
bool remove_all(const std::string& path);

}  // namespace dtensor
