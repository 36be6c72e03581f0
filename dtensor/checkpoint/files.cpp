#include "dtensor/checkpoint/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "dtensor/checkpoint/checksum.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

constexpr std::int64_t kSyncEvery = 32 << 20;  // the disk is kept busy while we go on

std::string advice_for(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return "to make room there, or to keep fewer checkpoints; the ones before are as they were";
    case EROFS:
    case EACCES:
    case EPERM:
      return "a folder that this program may write to";
    case ENOENT:
      return "a folder or file that is there";
    default:
      return {};
  }
}

}  // namespace

void fail_system(std::string_view what, const std::string& path, int error) {
  fail(ErrorKind::kInvalidArgument, "checkpoint",
       {.what = std::string(what),
        .got = in_quotes(path) + ": " + std::generic_category().message(error),
        .advice = advice_for(error)});
}

File File::open(const std::string& path) {
  // Without waiting, should it be a pipe.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) fail_system("cannot open a file", path, errno);
  File file(fd, path);
  struct stat about {};
  if (::fstat(fd, &about) != 0) fail_system("cannot look at a file", path, errno);
  if (!S_ISREG(about.st_mode)) {
    fail_invalid("checkpoint", {.what = "not a file", .got = in_quotes(path), .expected = "a regular file"});
  }
  (void)::posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);  // it is read from its beginning, mostly
  return file;
}

File File::create(const std::string& path) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd < 0) fail_system("cannot make a file", path, errno);
  return File(fd, path);
}

File::File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)) {}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

std::int64_t File::bytes() const {
  struct stat about {};
  if (::fstat(fd_, &about) != 0) fail_system("cannot look at a file", path_, errno);
  return about.st_size;
}

void File::read_at(void* to, std::int64_t bytes, std::int64_t offset) const {
  auto* at = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t n = ::pread(fd_, at, static_cast<std::size_t>(std::min<std::int64_t>(bytes, 1 << 30)), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_system("cannot read a file", path_, errno);
    if (n == 0) fail_system("a file ends too early", path_, EIO);
    at += n;
    offset += n;
    bytes -= n;
  }
}

void File::write_at(const void* from, std::int64_t bytes, std::int64_t offset) const {
  const auto* at = static_cast<const char*>(from);
  while (bytes > 0) {
    const ssize_t n = ::pwrite(fd_, at, static_cast<std::size_t>(std::min<std::int64_t>(bytes, 1 << 30)), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_system("cannot write a file", path_, errno);
    if (n == 0) fail_system("cannot write a file", path_, ENOSPC);
    at += n;
    offset += n;
    bytes -= n;
  }
}

void File::reserve(std::int64_t bytes) const {
  if (bytes == 0 || ::fallocate(fd_, 0, 0, bytes) == 0) return;
  if (errno == ENOSPC || errno == EDQUOT || errno == EFBIG) fail_system("cannot write a file", path_, errno);
}

void File::start_sync(std::int64_t offset, std::int64_t bytes) const {
#ifdef SYNC_FILE_RANGE_WRITE
  (void)::sync_file_range(fd_, offset, bytes, SYNC_FILE_RANGE_WRITE);  // a hint: sync() says whether it worked
#else
  (void)offset, (void)bytes;
#endif
}

void File::sync() const {
  if (::fsync(fd_) != 0) fail_system("cannot bring a file to the disk", path_, errno);
}

std::string read_text(const std::string& path, std::int64_t most) {
  const File file = File::open(path);
  const std::int64_t bytes = file.bytes();
  if (bytes > most) {
    fail_invalid("checkpoint", {.what = "a file is too large",
                                .got = in_quotes(path) + " of " + std::to_string(bytes) + " bytes",
                                .expected = "at most " + std::to_string(most)});
  }
  std::string text(static_cast<std::size_t>(bytes), '\0');
  file.read_at(text.data(), bytes, 0);
  return text;
}

StoredFile write_file(const std::string& path, std::vector<WriteEntry> entries, FileWords words,
                      const CheckpointInfo* info, const WriteProgress& progress) {
  std::vector<StoredEntry> stored;
  std::map<std::string, WriteEntry*> by_name;
  for (WriteEntry& entry : entries) {
    stored.push_back({.name = entry.name, .dtype = entry.dtype, .shape = entry.shape});
    by_name[entry.name] = &entry;
    words.entries[entry.name] = entry.words;
  }
  const auto print = [&] {
    auto metadata = print_words(words);
    if (info) add_info(*info, metadata);
    return print_header(stored, metadata);
  };
  (void)print();  // gives the entries their places; then the blocks have zeros, as long as the real checksums
  for (const StoredEntry& entry : stored) {
    words.entries[entry.name].blocks.resize(static_cast<std::size_t>(num_blocks(entry.bytes(), words.block)));
  }
  const auto data_begin = static_cast<std::int64_t>(print().size());
  const File file = File::create(path);
  file.reserve(data_begin + (stored.empty() ? 0 : stored.back().end));
  std::vector<char> scratch;
  std::int64_t synced = data_begin;
  for (const StoredEntry& entry : stored) {
    WriteEntry& source = *by_name.at(entry.name);
    auto sum = words.entries[entry.name].blocks.begin();
    for (std::int64_t at = 0; at < entry.bytes();) {
      const std::int64_t end = std::min(at + words.block, entry.bytes());
      const void* data = source.data(at, end, scratch);
      *sum++ = checksum(data, static_cast<std::size_t>(end - at));
      const std::int64_t offset = data_begin + entry.begin + at;
      file.write_at(data, end - at, offset);
      if (progress) progress(end - at);
      at = end;
      if (offset - synced >= kSyncEvery) {
        file.start_sync(synced, offset - synced);
        synced = offset;
      }
    }
    source.data = {};  // and what it held
  }
  const std::string header = seal_header(print());
  file.write_at(header.data(), static_cast<std::int64_t>(header.size()), 0);
  file.sync();
  const std::int64_t bytes = data_begin + (stored.empty() ? 0 : stored.back().end);
  return {path.substr(path.rfind('/') + 1), bytes, checksum(header.data(), header.size())};
}

EntryData data_at(const void* memory) {
  return [at = static_cast<const char*>(memory)](std::int64_t begin, std::int64_t, std::vector<char>&) -> const void* {
    return at + begin;
  };
}

std::optional<StoredFile> write_rank(const std::string& folder, const std::string& id,
                                     const std::vector<SaveItem>& items, const SavePlan& plan, std::int64_t rank,
                                     const CheckpointInfo& info, const PieceData& data, const WriteProgress& progress) {
  std::vector<WriteEntry> entries;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const StoredTensor& tensor = plan.tensors[i];
    const auto at = written_by(tensor, rank);
    if (!at) continue;
    WriteEntry entry{.name = entry_name(items[i].name, tensor, *at),
                     .dtype = tensor.spec.meta().dtype(),
                     .shape = entry_shape(tensor, *at)};
    if (entry.name != items[i].name) {
      entry.words.tensor = items[i].name;
      entry.words.box = box_text(box_of(tensor.spec, *at));
      entry.words.shape = tensor.spec.meta().shape();
    }
    entry.data = data(i, *at);
    entries.push_back(std::move(entry));
  }
  if (entries.empty() && rank != 0) return std::nullopt;
  FileWords words;
  words.id = id;
  words.rank = rank;
  words.ranks = static_cast<std::int64_t>(plan.bytes.size());
  // It gets its name when it is complete: who waits for it needs to know no more.
  const std::string name = file_name_of(rank, static_cast<std::int64_t>(plan.bytes.size()));
  const std::string unfinished = folder + "/." + name + ".part";
  StoredFile file = write_file(unfinished, std::move(entries), std::move(words), rank == 0 ? &info : nullptr, progress);
  file.name = name;
  if (std::rename(unfinished.c_str(), (folder + "/" + name).c_str()) != 0) {
    fail_system("cannot give a file its name", folder + "/" + name, errno);
  }
  return file;
}

CheckpointIndex index_of(const std::string& id, const std::vector<SaveItem>& items, const SavePlan& plan,
                         std::vector<std::optional<StoredFile>> files, const CheckpointInfo& info) {
  CheckpointIndex index{.id = id, .files = std::move(files), .tensors = {}, .info = info};
  for (std::size_t i = 0; i < items.size(); ++i) index.tensors.emplace(items[i].name, plan.tensors[i]);
  return index;
}

}  // namespace dtensor
