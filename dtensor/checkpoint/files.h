#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dtensor/checkpoint/index.h"

namespace dtensor {

// An open file. Errors say which file, what was tried and what the system answered.
class File {
 public:
  static File open(const std::string& path);    // to read; refuses what is not a regular file
  static File create(const std::string& path);  // to write; must not be there yet
  File(File&& other) noexcept;
  File& operator=(File&&) = delete;
  ~File();

  const std::string& path() const noexcept { return path_; }
  std::int64_t bytes() const;
  void read_at(void* to, std::int64_t bytes, std::int64_t offset) const;
  void write_at(const void* from, std::int64_t bytes, std::int64_t offset) const;
  // Takes the room for so many bytes at once, where the file system can: a full disk says so before anything is
  // written.
  void reserve(std::int64_t bytes) const;
  // Starts to bring what was written to the disk, without waiting.
  void start_sync(std::int64_t offset, std::int64_t bytes) const;
  void sync() const;
  int descriptor() const noexcept { return fd_; }

 private:
  File(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  int fd_;
  std::string path_;
};

std::string read_text(const std::string& path, std::int64_t most);

// Bytes [begin, end) of an entry: a pointer that holds until the next call, into `scratch` if need be.
using EntryData = std::function<const void*(std::int64_t begin, std::int64_t end, std::vector<char>& scratch)>;
EntryData data_at(const void* memory);

// One entry to be written.
struct WriteEntry {
  std::string name;
  DType dtype = DType::kF32;
  Dims shape = {};
  FileWords::Entry words = {};
  EntryData data = {};
};

using WriteProgress = std::function<void(std::int64_t bytes)>;

// Writes a .safetensors file with checksums, and waits until it is on the disk. `progress` is told of every few MiB.
// Cost: one pass over the data; the header is written last, so a file that was not finished does not look like one.
StoredFile write_file(const std::string& path, std::vector<WriteEntry> entries, FileWords words,
                      const CheckpointInfo* info, const WriteProgress& progress = {});

// Writes what a plan gives to a rank into `folder`; no value where that is nothing (rank 0 always writes, for the
// info). `data(item, coordinate)` is asked for the piece of tensor number `item` at that coordinate of its stored
// layout.
using PieceData = std::function<EntryData(std::size_t item, const Dims& coordinate)>;
std::optional<StoredFile> write_rank(const std::string& folder, const std::string& id,
                                     const std::vector<SaveItem>& items, const SavePlan& plan, std::int64_t rank,
                                     const CheckpointInfo& info, const PieceData& data,
                                     const WriteProgress& progress = {});
// The index of what was written so.
CheckpointIndex index_of(const std::string& id, const std::vector<SaveItem>& items, const SavePlan& plan,
                         std::vector<std::optional<StoredFile>> files, const CheckpointInfo& info);

// Where checkpoints are: folders `step-00000012` in one place. A checkpoint that is being written has another name, and
// gets this one, complete, by one rename.
std::string step_name(std::int64_t number);
std::optional<std::int64_t> step_of(std::string_view name);
// The numbers of the checkpoints in a folder, ascending; none when there is no such folder.
std::vector<std::int64_t> list_steps(const std::string& root);

// One checkpoint on its way to be one. Who makes it holds the folder's lock: others wait, up to `patience`.
class Commit {
 public:
  // Makes the folder if need be, removes what earlier programs left unfinished, and makes the place to write to.
  Commit(const std::string& root, std::optional<std::int64_t> number, std::int64_t patience_ms);
  Commit(const Commit&) = delete;
  Commit& operator=(const Commit&) = delete;
  // Removes what was written, unless it was finished.
  ~Commit();

  const std::string& id() const noexcept { return id_; }
  // Where the files are to be written.
  const std::string& folder() const noexcept { return folder_; }
  // What it will be called. A checkpoint that has this name already is replaced, in one step too.
  const std::string& target() const noexcept { return target_; }
  // Writes the index, renames, and removes all but the last `keep` checkpoints (0: removes none).
  void finish(const CheckpointIndex& index, std::int64_t keep);
  // Leaves word of what went wrong for those who look at the folder; see failure_path.
  void fail(const std::string& why);

 private:
  std::string root_;
  std::string id_;
  std::string folder_;
  std::string target_;
  int lock_ = -1;
  bool finished_ = false;
};

std::string failure_path(const std::string& root, const std::string& id);

// With what the system answered: `No space left on device`.
[[noreturn]] void fail_system(std::string_view what, const std::string& path, int error);

}  // namespace dtensor
