// Headers, what our files say of themselves, and indexes, from any bytes: an Error, or something that can be looked at.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "dtensor/checkpoint/index.h"
#include "dtensor/core/error.h"

namespace {

using namespace dtensor;

void header(std::string_view bytes) {
  const auto size = static_cast<std::int64_t>(bytes.size());
  const std::int64_t json = parse_header_size(bytes.substr(0, 8), size, "fuzz");
  if (json > size - 8) std::abort();
  const StoredHeader read = parse_header(bytes.substr(8, static_cast<std::size_t>(json)), size, "fuzz");
  std::int64_t total = 0;
  for (const StoredEntry& entry : read.entries) total += entry.bytes();
  if (total != read.data_bytes) std::abort();
  (void)parse_info(read.metadata, "fuzz");
  if (const auto words = parse_words(read, "fuzz"); words && words->version >= 2) {
    if (!is_block_size(words->block)) std::abort();
    for (const StoredEntry& entry : read.entries) {
      const auto count = static_cast<std::int64_t>(words->entries.at(entry.name).blocks.size());
      if (count != num_blocks(entry.bytes(), words->block)) std::abort();
      (void)entry_checksum(*words, entry);
    }
    check_seal(bytes.substr(0, static_cast<std::size_t>(8 + json)), "fuzz");
  }
  // What is printed of it reads as the same.
  std::vector<StoredEntry> entries = read.entries;
  const std::string text = print_header(entries, read.metadata);
  if (parse_header(std::string_view(text).substr(8), static_cast<std::int64_t>(text.size()) + total, "fuzz").metadata !=
      read.metadata) {
    std::abort();
  }
}

void index(std::string_view text) {
  const ParsedIndex parsed = parse_index(text, "fuzz");
  if (!parsed.ours) return;
  if (!parse_index(print_index(*parsed.ours), "fuzz").ours) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  for (void (*read)(std::string_view) : {&header, &index}) {
    try {
      read(bytes);
    } catch (const Error&) {
    }
  }
  return 0;
}
