#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <random>
#include <thread>

#include "dtensor/checkpoint/files.h"
#include "dtensor/checkpoint/folders.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

constexpr std::string_view kSaving = ".saving-";
constexpr std::string_view kRemoving = ".removing-";
constexpr std::string_view kFailed = ".failed-";

std::string fresh_id() {
  std::random_device device;
  char text[24];
  std::snprintf(text, sizeof text, "%08x%08x", device(), device());
  return text;
}

// What was renamed or made in a folder stays so after a power cut.
void sync_folder(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail_system("cannot open a folder", path, errno);
  const int result = ::fsync(fd);
  const int error = errno;
  ::close(fd);
  // Some file systems have nothing to sync for folders.
  if (result != 0 && error != EINVAL) fail_system("cannot bring a folder to the disk", path, error);
}

// Checkpoints lose their name first: what is half removed is not one.
void remove_step(const std::string& root, const std::string& path, const std::string& id) {
  const std::string away = root + "/" + std::string(kRemoving) + id + "-" + name_of_path(path);
  if (std::rename(path.c_str(), away.c_str()) == 0) remove_all(away);  // else the next save tries again
}

int take_lock(const std::string& root, std::int64_t patience_ms) {
  const std::string path = root + "/.lock";
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (fd < 0) fail_system("cannot write to the folder", path, errno);
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(patience_ms);
  while (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) {
      const int error = errno;
      ::close(fd);
      fail_system("cannot lock the folder", path, error);
    }
    if (std::chrono::steady_clock::now() >= end) {
      ::close(fd);
      fail(ErrorKind::kInvalidArgument, "checkpoint",
           {.what = "another save has not ended", .got = in_quotes(root), .advice = "one program per folder"});
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return fd;
}

}  // namespace

std::string step_name(std::int64_t number) {
  char name[40];
  std::snprintf(name, sizeof name, "step-%08lld", static_cast<long long>(number));
  return name;
}

std::optional<std::int64_t> step_of(std::string_view name) {
  if (!name.starts_with("step-") || name.size() < 13 || name.size() > 23) return std::nullopt;
  std::int64_t number = 0;
  for (const char c : name.substr(5)) {
    if (c < '0' || c > '9') return std::nullopt;
    number = number * 10 + (c - '0');
  }
  return step_name(number) == name ? std::optional(number) : std::nullopt;
}

std::vector<std::int64_t> list_steps(const std::string& root) {
  std::vector<std::int64_t> steps;
  for (const std::string& name : names_in(root)) {
    const auto number = step_of(name);
    if (number && path_exists(root + "/" + name + "/" + kIndexName)) steps.push_back(*number);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

Commit::Commit(const std::string& root, std::optional<std::int64_t> number, std::int64_t patience_ms)
    : root_(root), id_(fresh_id()) {
  if (root.empty()) fail_invalid("checkpoint", {.what = "no folder", .got = "''"});
  if (number && *number < 0) {
    fail_invalid("checkpoint", {.what = "a step below 0", .got = std::to_string(*number)});
  }
  make_folders(root);
  lock_ = take_lock(root, patience_ms);
  for (const std::string& name : names_in(root)) {
    if (name.starts_with(kSaving) || name.starts_with(kRemoving) || name.starts_with(kFailed)) {
      remove_all(root + "/" + name);
    }
  }
  if (!number) {
    const std::vector<std::int64_t> steps = list_steps(root);
    number = steps.empty() ? 0 : steps.back() + 1;
  }
  folder_ = root + "/" + std::string(kSaving) + id_;
  target_ = root + "/" + step_name(*number);
  if (::mkdir(folder_.c_str(), 0777) != 0) {
    const int why = errno;
    ::close(lock_);
    fail_system("cannot make a folder", folder_, why);
  }
}

void Commit::fail(const std::string& why) {
  try {
    const File file = File::create(failure_path(root_, id_));
    file.write_at(why.data(), static_cast<std::int64_t>(why.size()), 0);
  } catch (const Error&) {  // the disk may be full: they will miss the folder and the checkpoint
  }
}

std::string failure_path(const std::string& root, const std::string& id) {
  return root + "/" + std::string(kFailed) + id;
}

Commit::~Commit() {
  if (!finished_) remove_all(folder_);
  if (lock_ >= 0) ::close(lock_);
}

void Commit::finish(const CheckpointIndex& index, std::int64_t keep) {
  const std::string text = print_index(index);
  {
    const File file = File::create(folder_ + "/" + kIndexName);
    file.write_at(text.data(), static_cast<std::int64_t>(text.size()), 0);
    file.sync();
  }
  sync_folder(folder_);
  if (::rename(folder_.c_str(), target_.c_str()) == 0) {
    finished_ = true;
  } else if (errno == EEXIST || errno == ENOTEMPTY) {
    // The step was saved before: the two change places in one step, and the old one goes.
    if (::renameat2(AT_FDCWD, folder_.c_str(), AT_FDCWD, target_.c_str(), RENAME_EXCHANGE) != 0) {
      fail_system("cannot take the place of the checkpoint that is there", target_, errno);
    }
    finished_ = true;
    remove_step(root_, folder_, id_);
  } else {
    fail_system("cannot give a checkpoint its name", target_, errno);
  }
  sync_folder(root_);
  if (keep <= 0) return;
  const std::vector<std::int64_t> steps = list_steps(root_);
  for (std::size_t i = 0; i + static_cast<std::size_t>(keep) < steps.size(); ++i) {
    const std::string old = root_ + "/" + step_name(steps[i]);
    if (old != target_) remove_step(root_, old, id_ + std::to_string(i));
  }
}

}  // namespace dtensor
