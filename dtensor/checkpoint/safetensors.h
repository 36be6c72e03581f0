#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dtensor/core/tensor_meta.h"

namespace dtensor {

// The header of a .safetensors file: eight bytes with the length of a JSON text, that text, then the data. Every entry
// is row-major; together they cover the data without gaps or overlaps.
//
//   {"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
struct StoredEntry {
  std::string name;
  DType dtype = DType::kF32;
  Dims shape = {};
  std::int64_t begin = 0;  // in the data
  std::int64_t end = 0;
  std::int64_t bytes() const noexcept { return end - begin; }
  friend bool operator==(const StoredEntry&, const StoredEntry&) = default;
};

struct StoredHeader {
  std::vector<StoredEntry> entries;  // in the order of the data
  std::map<std::string, std::string> metadata;
  std::int64_t data_begin = 0;  // in the file
  std::int64_t data_bytes = 0;

  const StoredEntry* find(std::string_view name) const;
};

inline constexpr std::int64_t kMaxHeaderBytes = 100'000'000;  // as the reference library has it

// As safetensors spells it; no value where it has none (c32, c128).
std::optional<std::string_view> stored_name(DType dtype);
std::optional<DType> stored_dtype(std::string_view name);

// The length of the header's JSON, from a file's first eight bytes. Refused: what does not fit in the file, and more
// than kMaxHeaderBytes.
std::int64_t parse_header_size(std::string_view first_bytes, std::int64_t file_bytes, std::string_view file);

// Reads a header's JSON and checks all of it: known types, sizes that fit in 64 bits, byte counts that are those of
// type and shape, offsets inside the file that leave no gap and do not overlap, no name twice. `file` is named in
// errors.
StoredHeader parse_header(std::string_view json, std::int64_t file_bytes, std::string_view file);

// Gives entries their offsets, the largest types first so that all are aligned, and prints the header (length and JSON,
// padded to 8 bytes) that goes before the data. Names are distinct.
std::string print_header(std::vector<StoredEntry>& entries, const std::map<std::string, std::string>& metadata);

}  // namespace dtensor
