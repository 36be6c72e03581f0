#include "dtensor/checkpoint/index.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <set>

#include "dtensor/checkpoint/checksum.h"
#include "dtensor/checkpoint/strict_json_impl.h"
#include "dtensor/core/checked.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

constexpr std::int64_t kMaxVirtualPieces = 1 << 20;
constexpr const char* kPrefix = "dtensor.";
constexpr std::string_view kSeal = "\"dtensor.header\":\"";
constexpr std::size_t kSealDigits = 8;

struct Words {
  std::string_view file;

  [[noreturn]] void refuse(const std::string& what, std::string got = {}, std::string expected = {},
                           std::string advice = {}) const {
    fail_invalid("checkpoint", {.what = in_quotes(file) + ": " + what,
                                .got = std::move(got),
                                .expected = std::move(expected),
                                .advice = std::move(advice)});
  }
  [[noreturn]] void refuse_damage(const std::string& what, std::string got = {}, std::string expected = {}) const {
    refuse(what, std::move(got), std::move(expected), "an earlier checkpoint, or an undamaged copy of this file");
  }
  void check_version(std::int64_t version) const {
    if (version > kCheckpointVersion) {
      refuse("written by a newer version of dtensor", "version " + std::to_string(version),
             "at most " + std::to_string(kCheckpointVersion), "a newer dtensor to read it");
    }
    if (version < 1) refuse_damage("there is no such version", std::to_string(version));
  }
  const Json& member(const Json& json, const std::string& name) const {
    const auto found = json.is_object() ? json.find(name) : json.end();
    if (!json.is_object() || found == json.end()) refuse("no " + name);
    return *found;
  }
  const std::string& text(const Json& json, const std::string& name) const {
    const Json& value = member(json, name);
    if (!value.is_string()) refuse(name + " is not text", in_quotes(value.dump()));
    return value.get_ref<const std::string&>();
  }
  std::int64_t number(const Json& json, const std::string& name) const {
    const Json& value = member(json, name);
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() > static_cast<std::uint64_t>(kInt64Max)) {
      refuse(name + " is not a number from 0 on", in_quotes(value.dump()));
    }
    return static_cast<std::int64_t>(value.get<std::uint64_t>());
  }
  std::int64_t digits(const std::string& text, const std::string& name) const {
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < 0) {
      refuse(name + " is not a number from 0 on", in_quotes(text));
    }
    return value;
  }
  std::map<std::string, std::string> words(const Json& json, const std::string& name) const {
    std::map<std::string, std::string> result;
    const Json& value = member(json, name);
    if (!value.is_object()) refuse(name + " is not an object");
    for (const auto& [key, word] : value.items()) {
      if (!word.is_string()) refuse(name + " has something else than text under " + in_quotes(key));
      result.emplace(key, word.get_ref<const std::string&>());
    }
    return result;
  }
  std::uint32_t sum(const Json& json, const std::string& name) const {
    const auto value = parse_checksum(text(json, name));
    if (!value) refuse(name + " is not a checksum", in_quotes(text(json, name)));
    return *value;
  }
};

// How a layout may be outside what a file can mean although it is a spec.
void check_stored(const StoredTensor& tensor, const CheckpointIndex& index, const std::string& name,
                  const Words& words) {
  const Spec& spec = tensor.spec;
  const std::string of = "the tensor " + in_quotes(name);
  if (spec.has_partial()) words.refuse(of + " is Partial", spec.to_string());
  if (!(spec.meta().stride() == row_major_stride(spec.meta().shape()))) words.refuse(of + " is not row-major");
  if (!stored_name(spec.meta().dtype())) words.refuse(of + " has a type that files do not have");
  if (spec.mesh().max_rank() >= static_cast<std::int64_t>(index.files.size())) {
    words.refuse(of + " lies on ranks that have no file", spec.to_string(),
                 "ranks below " + std::to_string(index.files.size()));
  }
  if (tensor.writer < 0 || tensor.writer >= num_replicas(spec)) {
    words.refuse(of + " has a writer that is none of its replicas", std::to_string(tensor.writer),
                 "below " + std::to_string(num_replicas(spec)));
  }
  for (const DimLayout& dim : spec.dims()) {
    for (const Factor& factor : dim) {
      std::int64_t pieces = 1;
      for (const Cut& cut : factor.cuts) {
        if (!cut.is_virtual()) continue;
        const auto more = checked_mul(pieces, cut.count);
        if (!more || *more > kMaxVirtualPieces) words.refuse(of + " is in too many pieces", spec.to_string());
        pieces = *more;
      }
    }
  }
}

Json info_json(const CheckpointInfo& info) {
  Json json = {{"metadata", info.metadata}, {"state", info.state}, {"random", info.random}};
  if (info.step) json["step"] = *info.step;
  return json;
}

// Over the whole index without the checksum itself; in version 1 over our part of it.
std::uint32_t index_checksum(Json root, std::int64_t version) {
  Json& ours = root["metadata"]["dtensor"];
  ours.erase("checksum");
  const std::string all = version == 1 ? ours.dump() : root.dump();
  return checksum(all.data(), all.size());
}

CheckpointIndex read_ours(const Json& root, const Words& words) {
  const Json& json = root["metadata"]["dtensor"];
  CheckpointIndex index;
  index.version = words.number(json, "version");
  words.check_version(index.version);
  if (index_checksum(root, index.version) != words.sum(json, "checksum")) {
    words.refuse_damage("the checksum is another: the file is damaged");
  }
  index.id = words.text(json, "id");
  std::set<std::string> names;
  const Json& files = words.member(json, "files");
  if (!files.is_array()) words.refuse("files is not a list");
  for (const Json& file : files) {
    if (file.is_null()) {
      index.files.emplace_back();
      continue;
    }
    const std::string& name = words.text(file, "name");
    check_file_name(name, words.file);
    if (!names.insert(name).second) words.refuse("a file stands twice", in_quotes(name));
    index.files.push_back(StoredFile{name, words.number(file, "bytes"), words.sum(file, "header")});
  }
  const Json& tensors = words.member(json, "tensors");
  if (!tensors.is_object()) words.refuse("tensors is not an object");
  for (const auto& [name, value] : tensors.items()) {
    StoredTensor tensor{Spec::parse(words.text(value, "spec")), words.number(value, "writer")};
    check_stored(tensor, index, name, words);
    index.tensors.emplace(name, std::move(tensor));
  }
  const Json& info = words.member(json, "info");
  index.info.metadata = words.words(info, "metadata");
  index.info.state = words.words(info, "state");
  index.info.random = words.text(info, "random");
  if (info.contains("step")) index.info.step = words.number(info, "step");
  return index;
}

// The checksums of all blocks of all entries, eight digits each.
void read_blocks(const Json& sums, const StoredHeader& header, const Words& words, FileWords& result) {
  for (const StoredEntry& entry : header.entries) {
    const std::string_view text = words.text(sums, entry.name);
    const std::int64_t count = num_blocks(entry.bytes(), result.block);
    if (text.size() % 8 != 0 || static_cast<std::int64_t>(text.size() / 8) != count) {
      words.refuse("the entry " + in_quotes(entry.name) + " has another number of checksums than of blocks",
                   std::to_string(text.size()) + " digits",
                   "8 for each of " + std::to_string(count) + " blocks of " + std::to_string(result.block) + " bytes");
    }
    std::vector<std::uint32_t>& blocks = result.entries[entry.name].blocks;
    blocks.reserve(static_cast<std::size_t>(count));
    for (std::size_t at = 0; at < text.size(); at += 8) {
      const auto sum = parse_checksum(text.substr(at, 8));
      if (!sum) words.refuse("a block of " + in_quotes(entry.name) + " has no checksum", in_quotes(text.substr(at, 8)));
      blocks.push_back(*sum);
    }
  }
  if (sums.size() != header.entries.size()) words.refuse("checksums of an entry that is not there");
}

}  // namespace

std::string file_name_of(std::int64_t rank, std::int64_t ranks) {
  char name[80];
  std::snprintf(name, sizeof name, "model-%05lld-of-%05lld.safetensors", static_cast<long long>(rank + 1),
                static_cast<long long>(ranks));
  return name;
}

void check_file_name(const std::string& name, std::string_view where) {
  constexpr std::string_view kEnd = ".safetensors";
  const bool fine = name.size() > kEnd.size() && name.size() <= 255 && name.ends_with(kEnd) && name[0] != '.' &&
                    std::none_of(name.begin(), name.end(),
                                 [](char c) { return c == '/' || c == '\\' || static_cast<unsigned char>(c) < 0x20; });
  if (fine) return;
  fail_invalid("checkpoint", {.what = in_quotes(where) + ": not the name of a file beside it",
                              .got = in_quotes(name),
                              .expected = "a plain name that ends in .safetensors"});
}

std::string print_index(const CheckpointIndex& index) {
  Json ours = {{"version", kCheckpointVersion},
               {"id", index.id},
               {"files", Json::array()},
               {"tensors", Json::object()},
               {"info", info_json(index.info)}};
  for (const auto& file : index.files) {
    ours["files"].push_back(
        file ? Json{{"name", file->name}, {"bytes", file->bytes}, {"header", checksum_text(file->header)}} : Json());
  }
  Json weight_map = Json::object();
  std::int64_t total = 0;
  for (const auto& [name, tensor] : index.tensors) {
    ours["tensors"][name] = {{"spec", tensor.spec.to_string()}, {"writer", tensor.writer}};
    total += tensor.spec.meta().nbytes();
    const Dims first(static_cast<std::size_t>(tensor.spec.mesh().ndim()));
    if (entry_name(name, tensor, first) != name) continue;
    const auto& file = index.files[static_cast<std::size_t>(writer_of(tensor, first))];
    if (file) weight_map[name] = file->name;
  }
  Json json = {{"metadata", {{"total_size", total}, {"dtensor", std::move(ours)}}},
               {"weight_map", std::move(weight_map)}};
  json["metadata"]["dtensor"]["checksum"] = checksum_text(index_checksum(json, kCheckpointVersion));
  return json.dump(1) + "\n";
}

ParsedIndex parse_index(std::string_view text, std::string_view file) {
  const Words words{file};
  const Json root = parse_strict(text, "checkpoint", file);
  if (!root.is_object()) words.refuse("not an object");
  ParsedIndex parsed;
  parsed.weight_map = words.words(root, "weight_map");
  for (const auto& [name, where] : parsed.weight_map) check_file_name(where, file);
  const auto metadata = root.find("metadata");
  if (metadata != root.end() && metadata->is_object() && metadata->contains("dtensor")) {
    parsed.ours = read_ours(root, words);
  }
  return parsed;
}

std::map<std::string, std::string> print_words(const FileWords& words) {
  Json pieces = Json::object();
  Json sums = Json::object();
  for (const auto& [name, entry] : words.entries) {
    sums[name] = join(entry.blocks, "", checksum_text);
    if (entry.tensor.empty()) continue;
    pieces[name] = {{"tensor", entry.tensor},
                    {"box", entry.box},
                    {"shape", std::vector<std::int64_t>(entry.shape.begin(), entry.shape.end())}};
  }
  const std::string prefix = kPrefix;
  return {{"format", "pt"},
          {prefix + "version", std::to_string(kCheckpointVersion)},
          {prefix + "header", std::string(kSealDigits, '0')},
          {prefix + "block", std::to_string(words.block)},
          {prefix + "ranks", std::to_string(words.ranks)},
          {prefix + "id", words.id},
          {prefix + "rank", std::to_string(words.rank)},
          {prefix + "pieces", pieces.dump()},
          {prefix + "checksums", sums.dump()}};
}

std::optional<FileWords> parse_words(const StoredHeader& header, std::string_view file) {
  const std::string prefix = kPrefix;
  const Words words{file};
  if (!header.metadata.contains(prefix + "version")) {
    const auto other = header.metadata.lower_bound(prefix);
    if (other == header.metadata.end() || !other->first.starts_with(prefix)) return std::nullopt;
    words.refuse_damage("the header has no " + prefix + "version", in_quotes(other->first));
  }
  const auto word = [&](const char* name) -> const std::string& {
    const auto found = header.metadata.find(prefix + name);
    if (found == header.metadata.end()) words.refuse("no " + prefix + name + " in its header");
    return found->second;
  };
  const auto number = [&](const char* name) { return words.digits(word(name), prefix + name); };
  FileWords result;
  result.version = number("version");
  words.check_version(result.version);
  result.id = word("id");
  result.rank = number("rank");
  const Json sums = parse_strict(word("checksums"), "checkpoint", file);
  if (!sums.is_object()) words.refuse("the checksums are not an object");
  if (result.version == 1) {
    if (header.metadata.contains(prefix + "header") || header.metadata.contains(prefix + "block")) {
      words.refuse_damage("the header is of version 1 and has words of a later one");
    }
    for (const auto& [name, value] : sums.items()) result.entries[name].checksum = words.sum(sums, name);
  } else {
    result.ranks = number("ranks");
    result.block = number("block");
    if (!is_block_size(result.block)) {
      words.refuse("blocks cannot be of this size", std::to_string(result.block) + " bytes",
                   "a multiple of " + std::to_string(kLeastBlockBytes) + ", at most " + std::to_string(kMaxBlockBytes));
    }
    read_blocks(sums, header, words, result);
  }
  const Json pieces = parse_strict(word("pieces"), "checkpoint", file);
  if (!pieces.is_object()) words.refuse("the pieces are not an object");
  for (const auto& [name, value] : pieces.items()) {
    FileWords::Entry& entry = result.entries[name];
    entry.tensor = words.text(value, "tensor");
    if (entry.tensor.empty()) words.refuse("a piece of a tensor without a name");
    entry.box = words.text(value, "box");
    const Json& shape = words.member(value, "shape");
    if (!shape.is_array() || shape.size() > 64) words.refuse("a piece has no list of sizes as its shape");
    for (const Json& size : shape) {
      if (!size.is_number_unsigned()) words.refuse("a piece has no list of sizes as its shape");
      entry.shape.push_back(static_cast<std::int64_t>(size.get<std::uint64_t>()));
    }
  }
  std::set<std::string_view> there;
  for (const StoredEntry& entry : header.entries) there.insert(entry.name);
  for (const auto& [name, entry] : result.entries) {
    if (!there.contains(name)) words.refuse("words about an entry that is not there", in_quotes(name));
  }
  return result;
}

std::optional<std::uint32_t> entry_checksum(const FileWords& words, const StoredEntry& entry) {
  const auto found = words.entries.find(entry.name);
  if (found == words.entries.end()) return std::nullopt;
  if (words.version == 1) return found->second.checksum;
  return join_checksums(found->second.blocks, entry.bytes(), words.block);
}

std::string seal_header(std::string header) {
  const std::size_t at = header.find(kSeal) + kSeal.size();
  return header.replace(at, kSealDigits, checksum_text(checksum(header.data(), header.size())));
}

void check_seal(std::string_view header, std::string_view file) {
  const Words words{file};
  const std::size_t found = header.find(kSeal);
  if (found == std::string_view::npos || header.size() - found < kSeal.size() + kSealDigits) {
    words.refuse_damage("the header has no checksum of itself");
  }
  const std::size_t at = found + kSeal.size();
  const std::string_view text = header.substr(at, kSealDigits);
  std::uint32_t sum = checksum(header.data(), at);
  sum = checksum("00000000", kSealDigits, sum);
  sum = checksum(header.data() + at + kSealDigits, header.size() - at - kSealDigits, sum);
  if (parse_checksum(text) != sum) {
    words.refuse_damage("the header is not what was saved: its checksum is another", checksum_text(sum),
                        in_quotes(text));
  }
}

void check_info(const CheckpointInfo& info) {
  for (const auto* words : {&info.metadata, &info.state}) {
    for (const auto& [key, value] : *words) {
      check_text(key, "save_checkpoint");
      check_text(value, "save_checkpoint");
    }
  }
}

void add_info(const CheckpointInfo& info, std::map<std::string, std::string>& metadata) {
  const std::string prefix = kPrefix;
  if (info.step) metadata[prefix + "step"] = std::to_string(*info.step);
  if (!info.random.empty()) metadata[prefix + "random"] = info.random;
  metadata[prefix + "metadata"] = Json(info.metadata).dump();
  metadata[prefix + "state"] = Json(info.state).dump();
}

CheckpointInfo parse_info(const std::map<std::string, std::string>& metadata, std::string_view file) {
  const Words words{file};
  CheckpointInfo info;
  const auto take = [&](const char* name, auto use) {
    const auto found = metadata.find(kPrefix + std::string(name));
    if (found != metadata.end()) use(found->second);
  };
  const auto read = [&](const std::string& text) {
    return words.words(Json{{"", parse_strict(text, "checkpoint", file)}}, "");
  };
  take("step", [&](const std::string& text) { info.step = words.digits(text, std::string(kPrefix) + "step"); });
  take("random", [&](const std::string& text) { info.random = text; });
  take("metadata", [&](const std::string& text) { info.metadata = read(text); });
  take("state", [&](const std::string& text) { info.state = read(text); });
  return info;
}

}  // namespace dtensor
