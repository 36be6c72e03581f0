#include "dtensor/checkpoint/safetensors.h"

#include <algorithm>
#include <set>

#include "dtensor/checkpoint/strict_json_impl.h"
#include "dtensor/core/checked.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

constexpr std::pair<DType, std::string_view> kTypes[] = {
    {DType::kBool, "BOOL"}, {DType::kU8, "U8"},          {DType::kU16, "U16"},        {DType::kU32, "U32"},
    {DType::kU64, "U64"},   {DType::kI8, "I8"},          {DType::kI16, "I16"},        {DType::kI32, "I32"},
    {DType::kI64, "I64"},   {DType::kF8E4M3, "F8_E4M3"}, {DType::kF8E5M2, "F8_E5M2"}, {DType::kBF16, "BF16"},
    {DType::kF16, "F16"},   {DType::kF32, "F32"},        {DType::kF64, "F64"},        {DType::kC64, "C64"}};
constexpr std::size_t kMaxDims = 64;

// One file's header, and how to complain about it.
struct HeaderReader {
  std::string_view file;

  [[noreturn]] void refuse(const std::string& what, std::string got = {}, std::string expected = {}) const {
    fail_invalid("safetensors",
                 {.what = in_quotes(file) + ": " + what, .got = std::move(got), .expected = std::move(expected)});
  }

  std::int64_t number(const Json& json, const std::string& of) const {
    if (!json.is_number_unsigned() || json.get<std::uint64_t>() > static_cast<std::uint64_t>(kInt64Max)) {
      refuse(of + " is not a size", in_quotes(json.dump()));
    }
    return static_cast<std::int64_t>(json.get<std::uint64_t>());
  }

  const Json& member(const Json& json, const std::string& name, const std::string& of) const {
    const auto found = json.find(name);
    if (found == json.end()) refuse(of + " has no " + name);
    return *found;
  }

  StoredEntry entry(const std::string& name, const Json& json) const {
    const std::string of = "the entry " + in_quotes(name);
    if (!json.is_object()) refuse(of + " is not an object");
    StoredEntry entry;
    entry.name = name;
    const Json& dtype = member(json, "dtype", of);
    const auto known = dtype.is_string() ? stored_dtype(dtype.get_ref<const std::string&>()) : std::nullopt;
    if (!known) refuse(of + " is of a type that is not known here", in_quotes(dtype.dump()));
    entry.dtype = *known;
    const Json& shape = member(json, "shape", of);
    if (!shape.is_array() || shape.size() > kMaxDims) refuse(of + " has no list of sizes as its shape");
    for (const Json& size : shape) entry.shape.push_back(number(size, of + "'s shape"));
    const Json& offsets = member(json, "data_offsets", of);
    if (!offsets.is_array() || offsets.size() != 2) refuse(of + " has no two data_offsets");
    entry.begin = number(offsets[0], of + "'s offset");
    entry.end = number(offsets[1], of + "'s offset");
    if (json.size() != 3) refuse(of + " has more than dtype, shape and data_offsets");
    const auto numel = checked_product(entry.shape);
    const auto bytes = numel ? checked_mul(*numel, element_size(entry.dtype)) : std::nullopt;
    if (!bytes || entry.begin > entry.end || entry.end - entry.begin != *bytes) {
      refuse(of + " does not have the bytes of its type and shape",
             std::string(to_string(entry.dtype)) + "[" + join_numbers(entry.shape) + "] at " +
                 std::to_string(entry.begin) + " to " + std::to_string(entry.end));
    }
    return entry;
  }

  void metadata(const Json& json, std::map<std::string, std::string>& to) const {
    if (!json.is_object()) refuse("__metadata__ is not an object");
    for (const auto& [key, value] : json.items()) {
      if (!value.is_string()) refuse("__metadata__ has something else than text under " + in_quotes(key));
      to.emplace(key, value.get_ref<const std::string&>());
    }
  }

  void check_cover(StoredHeader& header) const {
    std::sort(header.entries.begin(), header.entries.end(), [](const StoredEntry& a, const StoredEntry& b) {
      return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    });
    std::int64_t at = 0;
    for (const StoredEntry& entry : header.entries) {
      if (entry.begin != at) {
        refuse("the entry " + in_quotes(entry.name) + (entry.begin < at ? " overlaps another" : " leaves a gap"),
               "it begins at " + std::to_string(entry.begin), std::to_string(at));
      }
      at = entry.end;
    }
    if (at != header.data_bytes) {
      refuse(at > header.data_bytes ? "the file ends before its entries do" : "the file goes on after its entries",
             std::to_string(header.data_bytes) + " bytes of data", std::to_string(at));
    }
  }
};

}  // namespace

const StoredEntry* StoredHeader::find(std::string_view name) const {
  const auto found =
      std::find_if(entries.begin(), entries.end(), [&](const StoredEntry& entry) { return entry.name == name; });
  return found == entries.end() ? nullptr : &*found;
}

std::optional<std::string_view> stored_name(DType dtype) {
  for (const auto& [type, name] : kTypes) {
    if (type == dtype) return name;
  }
  return std::nullopt;
}

std::optional<DType> stored_dtype(std::string_view name) {
  for (const auto& [type, known] : kTypes) {
    if (known == name) return type;
  }
  return std::nullopt;
}

std::int64_t parse_header_size(std::string_view first_bytes, std::int64_t file_bytes, std::string_view file) {
  const HeaderReader reader{file};
  if (first_bytes.size() < 8 || file_bytes < 8) {
    reader.refuse("too short for a safetensors file", std::to_string(file_bytes) + " bytes");
  }
  std::uint64_t size = 0;
  for (std::size_t i = 8; i-- > 0;) size = size << 8 | static_cast<unsigned char>(first_bytes[i]);
  const std::int64_t most = std::min(kMaxHeaderBytes, file_bytes - 8);
  if (size > static_cast<std::uint64_t>(most)) {
    reader.refuse("not a safetensors file: its header does not fit", std::to_string(size) + " bytes of header",
                  "at most " + std::to_string(most));
  }
  return static_cast<std::int64_t>(size);
}

StoredHeader parse_header(std::string_view json, std::int64_t file_bytes, std::string_view file) {
  const HeaderReader reader{file};
  StoredHeader header;
  header.data_begin = 8 + static_cast<std::int64_t>(json.size());
  header.data_bytes = file_bytes - header.data_begin;
  if (header.data_bytes < 0) reader.refuse("the file ends inside its header");
  if (json.empty() || json[0] != '{') reader.refuse("not a safetensors file: its header is not an object");
  const Json root = parse_strict(json, "safetensors", file);
  for (const auto& [name, value] : root.items()) {
    if (name == "__metadata__") {
      reader.metadata(value, header.metadata);
    } else {
      header.entries.push_back(reader.entry(name, value));
    }
  }
  reader.check_cover(header);
  return header;
}

std::string print_header(std::vector<StoredEntry>& entries, const std::map<std::string, std::string>& metadata) {
  std::sort(entries.begin(), entries.end(), [](const StoredEntry& a, const StoredEntry& b) {
    const std::int64_t size_a = element_size(a.dtype);
    const std::int64_t size_b = element_size(b.dtype);
    return size_a != size_b ? size_a > size_b : a.name < b.name;
  });
  // Written in the order of the data, which a JSON object of nlohmann's would not keep.
  const Json words = metadata;
  std::string text = "{\"__metadata__\":" + words.dump();
  std::int64_t at = 0;
  for (StoredEntry& entry : entries) {
    const auto type = stored_name(entry.dtype);
    if (!type) {
      fail_unsupported("safetensors", {.what = "the format has no such type",
                                       .got = std::string(to_string(entry.dtype)) + " for " + in_quotes(entry.name),
                                       .advice = "view_as_real"});
    }
    std::int64_t bytes = element_size(entry.dtype);
    for (const std::int64_t size : entry.shape) bytes *= size;
    entry.begin = at;
    entry.end = at += bytes;
    text += "," + Json(entry.name).dump() + ":{\"dtype\":\"" + std::string(*type) + "\",\"shape\":[" +
            join_numbers(entry.shape) + "],\"data_offsets\":[" + std::to_string(entry.begin) + "," +
            std::to_string(entry.end) + "]}";
  }
  text += "}";
  text.resize((text.size() + 7) / 8 * 8, ' ');
  if (static_cast<std::int64_t>(text.size()) > kMaxHeaderBytes) {
    fail_unsupported("safetensors", {.what = "the header is larger than readers take",
                                     .got = std::to_string(text.size()) + " bytes",
                                     .expected = "at most " + std::to_string(kMaxHeaderBytes)});
  }
  std::string size(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) size[i] = static_cast<char>(text.size() >> (8 * i));
  return size + text;
}

}  // namespace dtensor
