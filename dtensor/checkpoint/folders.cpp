#include "dtensor/checkpoint/folders.h"

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <memory>

#include "dtensor/checkpoint/files.h"

namespace dtensor {

bool path_exists(const std::string& path) {
  struct stat status;
  return ::stat(path.c_str(), &status) == 0;
}

bool is_folder(const std::string& path) {
  struct stat status;
  return ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

std::string name_of_path(const std::string& path) { return path.substr(path.rfind('/') + 1); }

std::string folder_of_path(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  const std::unique_ptr<DIR, int (*)(DIR*)> open(::opendir(folder.c_str()), ::closedir);
  if (!open) return names;
  while (const dirent* const entry = ::readdir(open.get())) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

void make_folders(const std::string& path) {
  for (std::size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    const std::string part = path.substr(0, end);
    if (::mkdir(part.c_str(), 0777) != 0) {
      const int error = errno;
      if (!is_folder(part)) fail_system("cannot make a folder", part, error == EEXIST ? ENOTDIR : error);
    }
    if (end == std::string::npos) return;
  }
}

bool remove_all(const std::string& path) {
  struct stat status;
  if (::lstat(path.c_str(), &status) != 0) return errno == ENOENT;
  if (S_ISDIR(status.st_mode)) {
    for (const std::string& name : names_in(path)) remove_all(path + "/" + name);
  }
  return std::remove(path.c_str()) == 0;
}

}  // namespace dtensor
