#pragma once

// Checkpoints without libtorch: tensors whose elements are their own row-major index, saved and read by pretended
// ranks.

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "dtensor/checkpoint/folders.h"
#include "dtensor/checkpoint/reader.h"

namespace dtensor::testing {

// A folder of its own that goes when the test ends.
class Folder {
 public:
  Folder() {
    const char* const where = std::getenv("TMPDIR");
    path_ = std::string(where != nullptr ? where : "/tmp") + "/dtensor-checkpoint-XXXXXX";
    if (::mkdtemp(path_.data()) == nullptr) ADD_FAILURE() << "no folder " << path_;
  }
  ~Folder() { remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// The bytes of element `index` of a tensor of this type, salted so that tensors differ.
inline void put_element(char* to, std::int64_t size, std::int64_t index, std::int64_t salt) {
  std::uint64_t value =
      static_cast<std::uint64_t>(index + 1) * 0x9e3779b97f4a7c15ull + static_cast<std::uint64_t>(salt);
  for (std::int64_t b = 0; b < size; ++b) to[b] = static_cast<char>(value >> (8 * (b % 8)));
}

// What the rank at this coordinate holds, row-major.
inline std::vector<char> part_of(const Spec& spec, const Dims& coordinate, std::int64_t salt) {
  const std::int64_t size = element_size(spec.meta().dtype());
  const Box box = box_of(spec, coordinate);
  std::vector<char> part(static_cast<std::size_t>(box.numel() * size));
  for_each_run(box, spec.meta().shape(), [&](std::int64_t global, std::int64_t local, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) put_element(part.data() + (local + i) * size, size, global + i, salt);
  });
  return part;
}

inline std::int64_t salt_of(const std::string& name) {
  std::uint64_t salt = 7;
  for (const char c : name) salt = salt * 31 + static_cast<unsigned char>(c);
  return static_cast<std::int64_t>(salt);
}

// All ranks' parts, one rank after the other; returns the checkpoint's folder.
inline std::string save_all(const std::string& root, const std::vector<SaveItem>& items, std::int64_t ranks,
                            const CheckpointInfo& info = {}, std::int64_t keep = 0) {
  const SavePlan plan = plan_save(items, ranks);
  Commit commit(root, info.step, 1000);
  std::vector<std::optional<StoredFile>> files;
  std::vector<std::vector<char>> parts;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    parts.clear();
    parts.reserve(items.size());
    files.push_back(
        write_rank(commit.folder(), commit.id(), items, plan, rank, info, [&](std::size_t i, const Dims& at) {
          parts.push_back(part_of(plan.tensors[i].spec, at, salt_of(items[i].name)));
          return data_at(parts.back().data());
        }));
  }
  commit.finish(index_of(commit.id(), items, plan, std::move(files), info), keep);
  return commit.target();
}

// The bytes of all blocks, in all files, that have an element of what the rank at this coordinate wants; counted
// element by element. Of files without checksums of blocks: the bytes of those elements.
inline std::int64_t touched_bytes(Checkpoint& checkpoint, const std::string& name, const Spec& wants,
                                  const Dims& coordinate) {
  const std::int64_t size = element_size(wants.meta().dtype());
  if (!checkpoint.has_blocks()) return box_of(wants, coordinate).numel() * size;
  const Dims& shape = wants.meta().shape();
  std::vector<bool> wanted(static_cast<std::size_t>(wants.meta().numel()));
  for_each_run(box_of(wants, coordinate), shape, [&](std::int64_t global, std::int64_t, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) wanted[static_cast<std::size_t>(global + i)] = true;
  });
  const StoredTensor& tensor = checkpoint.tensors().at(name);
  std::int64_t bytes = 0;
  for (std::int64_t rank = 0; rank < static_cast<std::int64_t>(checkpoint.index().files.size()); ++rank) {
    const auto at = written_by(tensor, rank);
    if (!at) continue;
    const std::int64_t block = checkpoint.file(rank).words()->block;
    const std::int64_t entry = checkpoint.file(rank).find(entry_name(name, tensor, *at))->bytes();
    std::vector<bool> touched(static_cast<std::size_t>(num_blocks(entry, block)));
    for_each_run(box_of(tensor.spec, *at), shape, [&](std::int64_t global, std::int64_t local, std::int64_t n) {
      for (std::int64_t i = 0; i < n; ++i) {
        if (wanted[static_cast<std::size_t>(global + i)])
          touched[static_cast<std::size_t>((local + i) * size / block)] = true;
      }
    });
    for (std::int64_t b = 0; b * block < entry; ++b) {
      if (touched[static_cast<std::size_t>(b)]) bytes += std::min(block, entry - b * block);
    }
  }
  return bytes;
}

// Reads a tensor in another layout on all its ranks and compares every byte; the bytes that were read, which are those
// of the blocks that the rank needs something of.
inline std::int64_t expect_reads(Checkpoint& checkpoint, const std::string& name, const Spec& wants) {
  std::int64_t total = 0;
  for (const std::int64_t rank : wants.mesh().ranks()) {
    const Dims at = *wants.mesh().coordinate(rank);
    const std::vector<char> expected = part_of(wants, at, salt_of(name));
    std::vector<char> got(expected.size(), 'x');
    const Dims stride = row_major_stride(wants.local_shape(at));
    const std::int64_t bytes = checkpoint.read(name, wants, at, stride, got.data());
    EXPECT_EQ(bytes, touched_bytes(checkpoint, name, wants, at)) << wants.to_string() << " on rank " << rank;
    EXPECT_TRUE(got == expected) << name << " as " << wants.to_string() << " on rank " << rank;
    total += bytes;
  }
  return total;
}

inline std::string bytes_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
inline void write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace dtensor::testing
