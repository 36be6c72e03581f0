#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dtensor/checkpoint/blocks.h"
#include "dtensor/checkpoint/safetensors.h"
#include "dtensor/checkpoint/stored.h"

namespace dtensor {

// What a checkpoint says beside its tensors.
struct CheckpointInfo {
  std::optional<std::int64_t> step = {};
  std::string random = {};                           // RandomState as text; empty: not saved
  std::map<std::string, std::string> metadata = {};  // the program's own words
  std::map<std::string, std::string> state = {};     // numbers of optimizers and the like, by name
  friend bool operator==(const CheckpointInfo&, const CheckpointInfo&) = default;
};

struct StoredFile {
  std::string name;
  std::int64_t bytes = 0;
  std::uint32_t header = 0;  // checksum of the length and the JSON
  friend bool operator==(const StoredFile&, const StoredFile&) = default;
};

// What we write. Version 1 had one checksum for each entry; version 2 has one for each block of an entry, and its index
// and headers have checksums over all of themselves.
inline constexpr std::int64_t kCheckpointVersion = 2;

// model.safetensors.index.json: `weight_map` for all readers (of the tensors that are whole in a file), and all that is
// ours under metadata.dtensor.
struct CheckpointIndex {
  std::int64_t version = kCheckpointVersion;
  std::string id;                                // of this save: the files have the same
  std::vector<std::optional<StoredFile>> files;  // by rank
  std::map<std::string, StoredTensor> tensors;
  CheckpointInfo info;
};

inline constexpr const char* kIndexName = "model.safetensors.index.json";
inline constexpr std::int64_t kMaxIndexBytes = 1 << 30;

// In the version that we write, whatever index.version is.
std::string print_index(const CheckpointIndex& index);

// An index file: ours, or (when `ours` has no value) the weight_map that others write. Checked: names of files are
// names and not paths, layouts lie on ranks that have a file and are not finer than their tensors, the checksum over
// the whole index (version 1: over our part of it). An index of a newer version is refused.
struct ParsedIndex {
  std::optional<CheckpointIndex> ours;
  std::map<std::string, std::string> weight_map;
};
ParsedIndex parse_index(std::string_view text, std::string_view file);

// `model-00002-of-00006.safetensors`
std::string file_name_of(std::int64_t rank, std::int64_t ranks);
// An error unless this is the plain name of a .safetensors file, in the folder of the index.
void check_file_name(const std::string& name, std::string_view where);

// What one file says of its entries, in its __metadata__.
struct FileWords {
  std::int64_t version = kCheckpointVersion;
  std::string id;
  std::int64_t rank = 0;
  std::int64_t ranks = 0;            // how many saved together; 0 for a file that stands alone
  std::int64_t block = kBlockBytes;  // see blocks.h; of no meaning in version 1
  struct Entry {
    std::string tensor;  // whose piece it is, with box and shape of the whole; empty for a whole tensor
    std::string box;
    Dims shape;
    std::vector<std::uint32_t> blocks;      // a checksum for each block
    std::optional<std::uint32_t> checksum;  // version 1: of the whole entry
  };
  std::map<std::string, Entry> entries;
};
std::map<std::string, std::string> print_words(const FileWords& words);
// No value where the file is not one of ours. Checked from version 2 on: the size of blocks, and that every entry has
// exactly as many checksums as it has blocks.
std::optional<FileWords> parse_words(const StoredHeader& header, std::string_view file);
// The checksum of a whole entry; no value where the file has none.
std::optional<std::uint32_t> entry_checksum(const FileWords& words, const StoredEntry& entry);

// A header (its length and its JSON) has a checksum of itself under `dtensor.header`, computed with eight zeros in its
// place. Puts it in; refuses a header, of words of version 2, in which it is another.
std::string seal_header(std::string header);
void check_seal(std::string_view header, std::string_view file);

// An error unless it can be written: text is UTF-8.
void check_info(const CheckpointInfo& info);
// Info as the first file has it too, for who reads files alone.
void add_info(const CheckpointInfo& info, std::map<std::string, std::string>& metadata);
CheckpointInfo parse_info(const std::map<std::string, std::string>& metadata, std::string_view file);

}  // namespace dtensor
