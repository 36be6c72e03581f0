#include "dtensor/checkpoint/reader.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>

#include "dtensor/checkpoint/checksum.h"
#include "dtensor/checkpoint/folders.h"
#include "dtensor/core/checked.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

constexpr std::int64_t kReadRun = 4096;     // shorter runs come out of the map: the system reads whole pages anyway
constexpr std::int64_t kMapped = 1 << 20;   // pieces from here on are copied out of the map if they are in memory
constexpr std::int64_t kChunk = 256 << 10;  // stays in the cache between read and checksum

// The bytes of the shortest run that a copy is made of.
std::int64_t run_bytes(const Copy& copy, std::int64_t element) {
  if (copy.dims.empty()) return element;
  const Copy::Dim& last = copy.dims.back();
  return last.from == 1 && last.to == 1 ? last.size * element : element;
}

// Are these `n` elements that follow each other on both ends?
bool is_run(const Copy& copy, std::int64_t n) {
  if (copy.dims.empty()) return n == 1;
  return copy.dims.size() == 1 && copy.dims[0] == Copy::Dim{n, 1, 1};
}

// Plays one copy out of bytes that need not be aligned, as they may not be in other programs' files.
void copy_out(const Copy& copy, const char* from, char* to, std::int64_t element) {
  if (reinterpret_cast<std::uintptr_t>(from) % static_cast<std::uintptr_t>(element) == 0) {
    play({copy}, from, to, element);
    return;
  }
  for_each_run(copy, [&](std::int64_t f, std::int64_t t, std::int64_t n) {
    std::memcpy(to + t * element, from + f * element, static_cast<std::size_t>(n * element));
  });
}

}  // namespace

StoredData::StoredData(const std::string& path) : file_(File::open(path)), bytes_(file_.bytes()) {
  std::string text(static_cast<std::size_t>(std::min<std::int64_t>(8, bytes_)), '\0');
  file_.read_at(text.data(), static_cast<std::int64_t>(text.size()), 0);
  const std::int64_t size = parse_header_size(text, bytes_, path);
  text.resize(static_cast<std::size_t>(8 + size));
  file_.read_at(text.data() + 8, size, 8);
  header_ = parse_header(std::string_view(text).substr(8), bytes_, path);
  header_checksum_ = checksum(text.data(), text.size());
  words_ = parse_words(header_, path);
  if (has_blocks()) check_seal(text, path);
  for (std::size_t i = 0; i < header_.entries.size(); ++i) by_name_[header_.entries[i].name] = i;
}

StoredData::~StoredData() {
  if (mapped_) ::munmap(mapped_, static_cast<std::size_t>(bytes_));
}

const char* StoredData::map() const {
  if (!mapped_) {
    void* const at = ::mmap(nullptr, static_cast<std::size_t>(bytes_), PROT_READ, MAP_SHARED, file_.descriptor(), 0);
    if (at == MAP_FAILED) fail_system("cannot map a file", path(), errno);
    mapped_ = at;
  }
  return static_cast<const char*>(mapped_);
}

bool StoredData::lies_in_memory(std::int64_t offset, std::int64_t bytes) const {
  if (bytes < kMapped) return false;
  const auto page = static_cast<std::int64_t>(::sysconf(_SC_PAGESIZE));
  const std::int64_t begin = offset / page * page;
  char* const at = const_cast<char*>(map()) + begin;
  const auto length = static_cast<std::size_t>(offset + bytes - begin);
  std::vector<unsigned char> pages((length + static_cast<std::size_t>(page) - 1) / static_cast<std::size_t>(page));
  if (::mincore(at, length, pages.data()) != 0) return false;
  if (!std::all_of(pages.begin(), pages.end(), [](unsigned char state) { return (state & 1) != 0; })) return false;
#ifdef MADV_POPULATE_READ
  ::madvise(at, length, MADV_POPULATE_READ);  // all pages at once; without it they come one by one
#endif
  return true;
}

const StoredEntry* StoredData::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &header_.entries[found->second];
}

std::string StoredData::damage_text(const StoredEntry& entry, Interval bytes) const {
  const auto found = words_->entries.find(entry.name);
  const bool piece = found != words_->entries.end() && !found->second.tensor.empty();
  const std::int64_t base = header_.data_begin + entry.begin;
  return format_complaint(
      "checkpoint",
      {.what = "the data is not what was saved: its checksum is another",
       .got = "bytes " + std::to_string(base + bytes.begin) + " to " + std::to_string(base + bytes.end) + " of " +
              in_quotes(path()) + ", which hold " + in_quotes(piece ? found->second.tensor : entry.name) +
              (piece ? " (as " + in_quotes(entry.name) + ")" : ""),
       .advice =
           "an earlier checkpoint, or an undamaged copy of this file; dtensor checkpoint verify lists all damage"});
}

std::int64_t StoredData::read(const StoredEntry& entry, const Copies& copies, void* to) const {
  return has_blocks() ? read_blocks(entry, copies, to) : read_unchecked(entry, copies, to);
}

std::int64_t StoredData::read_blocks(const StoredEntry& entry, const Copies& copies, void* to) const {
  const std::int64_t element = element_size(entry.dtype);
  const std::int64_t base = header_.data_begin + entry.begin;
  const std::int64_t block = words_->block;
  const std::vector<std::uint32_t>& sums = words_->entries.at(entry.name).blocks;
  auto* const out = static_cast<char*>(to);

  // The copies by where they begin: one block after the other is read, with those that it has something of.
  struct Span {
    Interval elements;
    const Copy* copy;
  };
  std::vector<Span> spans;
  Interval all{entry.bytes() / element, 0};
  for (const Copy& copy : copies) {
    spans.push_back({source_span(copy), &copy});
    all.begin = std::min(all.begin, spans.back().elements.begin);
    all.end = std::max(all.end, spans.back().elements.end);
  }
  std::sort(spans.begin(), spans.end(),
            [](const Span& a, const Span& b) { return a.elements.begin < b.elements.begin; });
  if (all.empty()) return 0;
  const Interval range{all.begin * element / block * block,
                       std::min(entry.bytes(), ceil_div(all.end * element, block) * block)};
  const bool in_memory = lies_in_memory(base + range.begin, range.size());

  std::int64_t bytes = 0;
  std::vector<char> buffer;
  std::vector<Span> open;
  Copies parts;
  auto next = spans.begin();
  for (std::int64_t begin = range.begin; begin < range.end; begin += block) {
    const std::int64_t end = std::min(begin + block, range.end);
    const Interval elements{begin / element, end / element};
    while (next != spans.end() && next->elements.begin < elements.end) open.push_back(*next++);
    std::erase_if(open, [&](const Span& span) { return span.elements.end <= elements.begin; });
    parts.clear();
    for (const Span& span : open) clip_copy(*span.copy, elements, parts);
    if (parts.empty()) continue;
    const auto size = static_cast<std::size_t>(end - begin);
    bytes += end - begin;
    const std::uint32_t expected = sums[static_cast<std::size_t>(begin / block)];
    const auto check = [&](std::uint32_t sum) {
      if (sum != expected) throw Error(ErrorKind::kInvalidArgument, damage_text(entry, {begin, end}));
    };
    if (parts.size() == 1 && is_run(parts[0], elements.size())) {
      char* const place = out + parts[0].to * element;
      if (in_memory) {
        check(copy_with_checksum(place, map() + base + begin, size));
      } else {
        file_.read_at(place, end - begin, base + begin);
        check(checksum(place, size));
      }
      continue;
    }
    const char* data = in_memory ? map() + base + begin : nullptr;
    if (!data) {
      buffer.resize(size);
      file_.read_at(buffer.data(), end - begin, base + begin);
      data = buffer.data();
    }
    check(checksum(data, size));
    for (Copy& part : parts) {
      part.from -= elements.begin;
      copy_out(part, data, out, element);
    }
  }
  return bytes;
}

std::int64_t StoredData::read_unchecked(const StoredEntry& entry, const Copies& copies, void* to) const {
  const std::int64_t element = element_size(entry.dtype);
  const std::int64_t base = header_.data_begin + entry.begin;
  auto* const out = static_cast<char*>(to);
  const bool in_memory = lies_in_memory(base, entry.bytes());
  const auto sum = words_ ? entry_checksum(*words_, entry) : std::nullopt;
  if (sum && is_identity(copies, entry.bytes() / element)) {
    std::uint32_t found = 0;
    if (in_memory) found = copy_with_checksum(out, map() + base, static_cast<std::size_t>(entry.bytes()));
    for (std::int64_t at = in_memory ? entry.bytes() : 0; at < entry.bytes(); at += kChunk) {
      const std::int64_t n = std::min(kChunk, entry.bytes() - at);
      file_.read_at(out + at, n, base + at);
      found = checksum(out + at, static_cast<std::size_t>(n), found);
    }
    if (found != *sum) throw Error(ErrorKind::kInvalidArgument, damage_text(entry, {0, entry.bytes()}));
    return entry.bytes();
  }
  std::int64_t bytes = 0;
  for (const Copy& copy : copies) {
    bytes += copy.numel() * element;
    if (!in_memory && run_bytes(copy, element) >= kReadRun) {
      for_each_run(copy, [&](std::int64_t f, std::int64_t t, std::int64_t n) {
        file_.read_at(out + t * element, n * element, base + f * element);
      });
    } else {
      copy_out(copy, map() + base, out, element);
    }
  }
  return bytes;
}

std::vector<std::string> StoredData::verify(const StoredEntry& entry) const {
  std::vector<std::string> wrong;
  const auto sum = words_ ? entry_checksum(*words_, entry) : std::nullopt;
  if (!sum) return wrong;
  const std::int64_t step = has_blocks() ? words_->block : kChunk;
  std::vector<char> buffer(static_cast<std::size_t>(std::min(step, entry.bytes())));
  std::uint32_t found = 0;
  Interval damaged{0, 0};  // neighbours as one
  const auto tell = [&] {
    if (!damaged.empty()) wrong.push_back(damage_text(entry, damaged));
    damaged = {0, 0};
  };
  for (std::int64_t at = 0; at < entry.bytes(); at += step) {
    const std::int64_t n = std::min(step, entry.bytes() - at);
    file_.read_at(buffer.data(), n, header_.data_begin + entry.begin + at);
    if (!has_blocks()) {
      found = checksum(buffer.data(), static_cast<std::size_t>(n), found);
    } else if (checksum(buffer.data(), static_cast<std::size_t>(n)) ==
               words_->entries.at(entry.name).blocks[static_cast<std::size_t>(at / step)]) {
      tell();
    } else {
      damaged = {damaged.empty() ? at : damaged.begin, at + n};
    }
  }
  if (!has_blocks() && found != *sum) damaged = {0, entry.bytes()};
  tell();
  return wrong;
}

Checkpoint Checkpoint::open(const std::string& path) {
  Checkpoint checkpoint;
  checkpoint.path_ = path;
  if (!path_exists(path)) fail_system("no checkpoint", path, errno);
  std::string file;
  if (!is_folder(path)) {
    file = path;
  } else if (!path_exists(path + "/" + kIndexName)) {
    if (const auto steps = list_steps(path); !steps.empty()) return open(path + "/" + step_name(steps.back()));
    std::vector<std::string> files;
    for (const std::string& name : names_in(path)) {
      if (name.ends_with(".safetensors")) files.push_back(path + "/" + name);
    }
    if (files.size() != 1) {
      fail_invalid(
          "checkpoint",
          {.what = "no checkpoint in the folder",
           .got = in_quotes(path) + " with " + std::to_string(files.size()) + " .safetensors files",
           .expected = std::string("folders step-00000000 and on, ") + kIndexName + ", or one .safetensors file"});
    }
    file = files[0];
  }
  if (!file.empty()) {
    checkpoint.path_ = folder_of_path(file);
    checkpoint.index_.files.push_back(StoredFile{name_of_path(file)});
    checkpoint.data_.resize(1);
    checkpoint.add_whole(0);
    checkpoint.index_.info = parse_info(checkpoint.data_[0]->header().metadata, file);
    checkpoint.path_ = file;
    return checkpoint;
  }
  const std::string index_path = path + "/" + kIndexName;
  ParsedIndex parsed = parse_index(read_text(index_path, kMaxIndexBytes), index_path);
  if (parsed.ours) {
    checkpoint.index_ = std::move(*parsed.ours);
    checkpoint.data_.resize(checkpoint.index_.files.size());
    return checkpoint;
  }
  std::set<std::string> names;
  for (const auto& [name, where] : parsed.weight_map) names.insert(where);
  for (const std::string& name : names) checkpoint.index_.files.push_back(StoredFile{name});
  checkpoint.data_.resize(names.size());
  for (std::size_t i = 0; i < names.size(); ++i) checkpoint.add_whole(static_cast<std::int64_t>(i));
  for (const auto& data : checkpoint.data_) {
    if (!data->words() || data->words()->ranks == 0) continue;
    fail_invalid("checkpoint", {.what = in_quotes(index_path) + ": the part that save_checkpoint writes is missing",
                                .got = "no metadata.dtensor, which " + in_quotes(data->path()) + " was saved with",
                                .advice = "an earlier checkpoint, or an undamaged copy of the index"});
  }
  for (const auto& [name, where] : parsed.weight_map) {
    const auto found = checkpoint.index_.tensors.find(name);
    const auto at = std::distance(names.begin(), names.find(where));
    if (found == checkpoint.index_.tensors.end() || found->second.spec.mesh().max_rank() != at) {
      fail_invalid("checkpoint", {.what = "a tensor is not in the file that the index names",
                                  .got = in_quotes(name) + " in " + in_quotes(where)});
    }
  }
  return checkpoint;
}

bool Checkpoint::has_checksums() const noexcept {
  return is_ours() ||
         std::all_of(data_.begin(), data_.end(), [](const auto& data) { return data && data->words() != nullptr; });
}

bool Checkpoint::has_blocks() const noexcept {
  if (is_ours()) return index_.version >= 2;
  return std::all_of(data_.begin(), data_.end(), [](const auto& data) { return data && data->has_blocks(); });
}

std::string Checkpoint::unverified_text() const {
  if (has_blocks()) return {};
  return in_quotes(path_) +
         (has_checksums() ? " was written by an older version of dtensor: damaged data is noticed only where a "
                            "piece is read as it was saved, not on another layout"
                          : " was not written by dtensor, and has no checksums: damaged data is not noticed") +
         "; save it again, or run dtensor checkpoint convert, to have every block verified";
}

void Checkpoint::add_whole(std::int64_t number) {
  const StoredData& data = file(number);
  const Mesh mesh = Mesh::from_ranks({1}, {number});
  for (const StoredEntry& entry : data.header().entries) {
    if (data.words()) {  // one of ours, alone: its pieces are no tensors
      const auto words = data.words()->entries.find(entry.name);
      if (words != data.words()->entries.end() && !words->second.tensor.empty()) continue;
    }
    const Spec spec = Spec::make(TensorMeta(entry.shape, entry.dtype), mesh, {Replicate()});
    if (!index_.tensors.emplace(entry.name, StoredTensor{spec, 0}).second) {
      fail_invalid("checkpoint", {.what = "a tensor is in two files", .got = in_quotes(entry.name)});
    }
  }
}

const StoredData& Checkpoint::file(std::int64_t rank) {
  auto& slot = data_[static_cast<std::size_t>(rank)];
  if (slot) return *slot;
  const auto& expected = index_.files[static_cast<std::size_t>(rank)];
  if (!expected) {
    fail_invalid("checkpoint", {.what = "a piece lies in a file that the index does not have",
                                .got = "rank " + std::to_string(rank) + " of " + in_quotes(path_)});
  }
  auto data = std::make_unique<StoredData>(path_ + "/" + expected->name);
  ++opened_;
  const FileWords* words = data->words();
  if (is_ours() && (data->bytes() != expected->bytes || data->header_checksum() != expected->header || !words ||
                    words->version != index_.version || words->id != index_.id || words->rank != rank)) {
    fail(ErrorKind::kInvalidArgument, "checkpoint",
         {.what = "not the file that was saved",
          .got = in_quotes(data->path()) + " of " + std::to_string(data->bytes()) + " bytes, header " +
                 checksum_text(data->header_checksum()),
          .expected = std::to_string(expected->bytes) + " bytes, header " + checksum_text(expected->header),
          .advice = "an earlier checkpoint"});
  }
  slot = std::move(data);
  return *slot;
}

const StoredEntry& Checkpoint::entry_of(const std::string& name, const StoredTensor& tensor, const Dims& coordinate,
                                        const StoredData& data) const {
  const std::string entry_name_here = entry_name(name, tensor, coordinate);
  const auto refuse = [&](const std::string& what, std::string got, std::string expected) {
    fail_invalid("checkpoint", {.what = what,
                                .got = in_quotes(entry_name_here) + " in " + in_quotes(data.path()) + got,
                                .expected = std::move(expected)});
  };
  const StoredEntry* entry = data.find(entry_name_here);
  if (!entry) refuse("a piece is not in its file", "", {});
  const Dims shape = entry_shape(tensor, coordinate);
  if (entry->dtype != tensor.spec.meta().dtype() || !(entry->shape == shape)) {
    refuse("a piece is of another type or shape than the index says",
           ": " + TensorMeta(entry->shape, entry->dtype).to_string(),
           TensorMeta(shape, tensor.spec.meta().dtype()).to_string());
  }
  if (!is_ours()) return *entry;
  const auto words = data.words()->entries.find(entry_name_here);
  const bool whole = entry_name_here == name;
  const std::string box = whole ? "" : box_text(box_of(tensor.spec, coordinate));
  const FileWords::Entry said = words == data.words()->entries.end() ? FileWords::Entry{} : words->second;
  if (said.tensor != (whole ? "" : name) || said.box != box ||
      (!whole && !(said.shape == tensor.spec.meta().shape()))) {
    refuse("a piece is of another box than the index says", ": " + in_quotes(said.box), in_quotes(box));
  }
  return *entry;
}

std::int64_t Checkpoint::read(const std::string& name, const Spec& wants, const Dims& coordinate, const Dims& stride,
                              void* to) {
  const auto found = index_.tensors.find(name);
  if (found == index_.tensors.end()) {
    fail_invalid("checkpoint", {.what = "no such tensor", .got = in_quotes(name) + " in " + in_quotes(path_)});
  }
  std::int64_t bytes = 0;
  for (const Read& read : plan_reads(found->second, wants, coordinate, stride)) {
    const StoredData& data = file(read.rank);
    bytes += data.read(entry_of(name, found->second, read.coordinate, data), read.copies, to);
  }
  return bytes;
}

std::vector<std::string> Checkpoint::verify() {
  std::vector<std::string> wrong;
  const auto attempt = [&](auto&& check) {
    try {
      check();
    } catch (const Error& error) {
      wrong.emplace_back(error.what());
    }
  };
  std::vector<std::set<std::string>> used(index_.files.size());
  std::set<std::int64_t> broken;
  for (std::size_t r = 0; r < index_.files.size(); ++r) {
    if (!index_.files[r]) continue;
    try {
      file(static_cast<std::int64_t>(r));
    } catch (const Error& error) {
      wrong.emplace_back(error.what());
      broken.insert(static_cast<std::int64_t>(r));
    }
  }
  for (const auto& item : index_.tensors) {
    const std::string& name = item.first;
    const StoredTensor& tensor = item.second;
    std::int64_t numel = 0;
    for (std::int64_t rank = 0; rank < static_cast<std::int64_t>(index_.files.size()); ++rank) {
      const auto at = written_by(tensor, rank);
      if (!at) continue;
      numel += checked_product(entry_shape(tensor, *at)).value_or(0);
      if (broken.contains(rank)) continue;
      attempt([&] {
        const StoredData& data = file(rank);
        const StoredEntry& entry = entry_of(name, tensor, *at, data);
        used[static_cast<std::size_t>(rank)].insert(entry.name);
        for (std::string& text : data.verify(entry)) wrong.push_back(std::move(text));
      });
    }
    if (numel != tensor.spec.meta().numel()) wrong.push_back("the pieces of " + in_quotes(name) + " are not all of it");
  }
  for (std::size_t r = 0; is_ours() && r < data_.size(); ++r) {
    if (!data_[r]) continue;
    for (const StoredEntry& entry : data_[r]->header().entries) {
      if (!used[r].contains(entry.name)) {
        wrong.push_back("an entry that belongs to no tensor: " + in_quotes(entry.name) + " in " +
                        in_quotes(data_[r]->path()));
      }
    }
  }
  return wrong;
}

}  // namespace dtensor
