#include "dtensor/checkpoint/index.h"

#include <algorithm>
#include <cstdio>
#include <set>

#include "dtensor/checkpoint/checksum.h"
#include "dtensor/checkpoint/strict_json_impl.h"
#include "dtensor/core/checked.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

constexpr int kVersion = 1;
constexpr std::int64_t kMaxVirtualPieces = 1 << 20;
constexpr const char* kPrefix = "dtensor.";

struct Words {
  std::string_view file;

  [[noreturn]] void refuse(const std::string& what, std::string got = {}, std::string expected = {}) const {
    fail_invalid("checkpoint",
                 {.what = in_quotes(file) + ": " + what, .got = std::move(got), .expected = std::move(expected)});
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

CheckpointIndex read_ours(const Json& json, const Words& words) {
  if (words.number(json, "version") != kVersion) {
    words.refuse("written by another version", std::to_string(words.number(json, "version")), std::to_string(kVersion));
  }
  Json rest = json;
  rest.erase("checksum");
  const std::string all = rest.dump();
  if (checksum(all.data(), all.size()) != words.sum(json, "checksum")) {
    words.refuse("the checksum is another: the file is damaged");
  }
  CheckpointIndex index;
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
  Json ours = {{"version", kVersion},
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
  const std::string all = ours.dump();
  ours["checksum"] = checksum_text(checksum(all.data(), all.size()));
  const Json json = {{"metadata", {{"total_size", total}, {"dtensor", std::move(ours)}}},
                     {"weight_map", std::move(weight_map)}};
  return json.dump(1) + "\n";
}

ParsedIndex parse_index(std::string_view text, std::string_view file) {
  const Words words{file};
  const Json root = parse_strict(text, "checkpoint");
  if (!root.is_object()) words.refuse("not an object");
  ParsedIndex parsed;
  parsed.weight_map = words.words(root, "weight_map");
  for (const auto& [name, where] : parsed.weight_map) check_file_name(where, file);
  const auto metadata = root.find("metadata");
  if (metadata != root.end() && metadata->is_object() && metadata->contains("dtensor")) {
    parsed.ours = read_ours((*metadata)["dtensor"], words);
  }
  return parsed;
}

std::map<std::string, std::string> print_words(const FileWords& words) {
  Json pieces = Json::object();
  Json sums = Json::object();
  for (const auto& [name, entry] : words.entries) {
    if (entry.checksum) sums[name] = checksum_text(*entry.checksum);
    if (entry.tensor.empty()) continue;
    pieces[name] = {{"tensor", entry.tensor},
                    {"box", entry.box},
                    {"shape", std::vector<std::int64_t>(entry.shape.begin(), entry.shape.end())}};
  }
  const std::string prefix = kPrefix;
  return {{"format", "pt"},
          {prefix + "version", std::to_string(kVersion)},
          {prefix + "id", words.id},
          {prefix + "rank", std::to_string(words.rank)},
          {prefix + "pieces", pieces.dump()},
          {prefix + "checksums", sums.dump()}};
}

std::optional<FileWords> parse_words(const StoredHeader& header, std::string_view file) {
  const std::string prefix = kPrefix;
  const Words words{file};
  if (!header.metadata.contains(prefix + "version")) return std::nullopt;
  const auto word = [&](const char* name) -> const std::string& {
    const auto found = header.metadata.find(prefix + name);
    if (found == header.metadata.end()) words.refuse("no " + prefix + name + " in its header");
    return found->second;
  };
  if (word("version") != std::to_string(kVersion))
    words.refuse("written by another version", in_quotes(word("version")));
  FileWords result;
  result.id = word("id");
  Scanner in(word("rank"), "checkpoint", "a rank");
  result.rank = in.size();
  in.expect_end();
  const Json sums = parse_strict(word("checksums"), "checkpoint");
  if (!sums.is_object()) words.refuse("the checksums are not an object");
  for (const auto& [name, value] : sums.items()) result.entries[name].checksum = words.sum(sums, name);
  const Json pieces = parse_strict(word("pieces"), "checkpoint");
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
    return words.words(Json{{"", parse_strict(text, "checkpoint")}}, "");
  };
  take("step", [&](const std::string& text) {
    Scanner in(text, "checkpoint", "a step");
    info.step = in.size();
    in.expect_end();
  });
  take("random", [&](const std::string& text) { info.random = text; });
  take("metadata", [&](const std::string& text) { info.metadata = read(text); });
  take("state", [&](const std::string& text) { info.state = read(text); });
  return info;
}

}  // namespace dtensor
