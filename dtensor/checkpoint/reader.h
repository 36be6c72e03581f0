#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "dtensor/checkpoint/files.h"

namespace dtensor {

// A .safetensors file, ours or another's, with its header read and checked.
class StoredData {
 public:
  explicit StoredData(const std::string& path);
  ~StoredData();
  StoredData(const StoredData&) = delete;
  StoredData& operator=(const StoredData&) = delete;

  const std::string& path() const noexcept { return file_.path(); }
  std::int64_t bytes() const noexcept { return bytes_; }
  const StoredHeader& header() const noexcept { return header_; }
  std::uint32_t header_checksum() const noexcept { return header_checksum_; }
  // What it says of itself; null where it is not one of ours.
  const FileWords* words() const noexcept { return words_ ? &*words_ : nullptr; }
  // Null when there is none, or (with words) it is a piece.
  const StoredEntry* find(const std::string& name) const;

  // Copies elements of an entry to a memory. Returns the bytes read.
  // A file of version 2 on: reads every block that has such an element, as a whole, and compares its checksum before
  // anything is copied out of it; a block that goes to the memory as one run is read there directly. Needs a buffer of
  // one block.
  // Other files: reads the elements alone; compares the checksum, if there is one, when they are all of the entry in
  // its own order.
  std::int64_t read(const StoredEntry& entry, const Copies& copies, void* to) const;
  // Reads all of an entry and compares its checksums. What is wrong, in words; nothing where it has no checksums.
  std::vector<std::string> verify(const StoredEntry& entry) const;
  // Has every block of it a checksum?
  bool has_blocks() const noexcept { return words_ && words_->version >= 2; }

 private:
  std::int64_t read_blocks(const StoredEntry& entry, const Copies& copies, void* to) const;
  std::int64_t read_unchecked(const StoredEntry& entry, const Copies& copies, void* to) const;
  const char* map() const;
  // Has the system these bytes in its memory? Then they are best copied from where they lie.
  bool lies_in_memory(std::int64_t offset, std::int64_t bytes) const;
  // That these bytes of an entry are damaged.
  std::string damage_text(const StoredEntry& entry, Interval bytes) const;

  File file_;
  std::int64_t bytes_ = 0;
  StoredHeader header_;
  std::uint32_t header_checksum_ = 0;
  std::optional<FileWords> words_;
  std::unordered_map<std::string, std::size_t> by_name_;
  mutable void* mapped_ = nullptr;
};

// A checkpoint to read from. Nothing in it is trusted: every piece is found where the index says, with the box, type
// and shape that the index says, or it is an error that names the file.
class Checkpoint {
 public:
  // A checkpoint's folder; a folder of checkpoints, of which the newest is taken; a folder with an index or one file
  // written by others; a .safetensors file.
  static Checkpoint open(const std::string& path);

  const std::string& path() const noexcept { return path_; }
  const std::map<std::string, StoredTensor>& tensors() const noexcept { return index_.tensors; }
  const CheckpointInfo& info() const noexcept { return index_.info; }
  const CheckpointIndex& index() const noexcept { return index_; }
  // Did we write it? Then it has an id, checksums and all the rest.
  bool is_ours() const noexcept { return !index_.id.empty(); }

  // One of our files alone has no id, but checksums.
  bool has_checksums() const noexcept;
  // Is everything that read() reads verified? Not in checkpoints of version 1, and not in other programs' files.
  bool has_blocks() const noexcept;
  // Says so, for a warning; empty where everything is verified.
  std::string unverified_text() const;

  // The part of a tensor that the wanted layout gives to this coordinate, of the type that the files have. Opens only
  // the files that have some of it. Returns the bytes read: those of the blocks that the part touches (see
  // StoredData::read).
  std::int64_t read(const std::string& name, const Spec& wants, const Dims& coordinate, const Dims& stride, void* to);
  // A file by its number; an error that names it when it is not the one that was saved.
  const StoredData& file(std::int64_t rank);
  // Looks at everything: all pieces are there, each once, with the right bytes. What is wrong, in words.
  std::vector<std::string> verify();
  std::int64_t files_opened() const noexcept { return opened_; }

 private:
  void add_whole(std::int64_t file);
  const StoredEntry& entry_of(const std::string& name, const StoredTensor& tensor, const Dims& coordinate,
                              const StoredData& data) const;

  std::string path_;
  CheckpointIndex index_;
  std::vector<std::unique_ptr<StoredData>> data_;
  std::int64_t opened_ = 0;
};

}  // namespace dtensor
