#include "dtensor/checkpoint/convert.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "dtensor/core/error.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

constexpr std::int64_t kWindow = 64 << 20;

// A layout of the same piece in `count` runs of its rows, on one more mesh dim; no value when its rows cannot be cut
// so.
std::optional<Spec> in_windows(const Spec& spec, const Dims& coordinate, std::int64_t count) {
  const Dims shape = spec.local_shape(coordinate);
  std::size_t d = 0;
  while (d < shape.size() && shape[d] == 1) ++d;  // the first dim that has rows: each run is one of the piece's memory
  if (d == shape.size() || spec.dims()[d].size() != 1 || has_virtual(spec.dims()[d][0])) return std::nullopt;
  Dims mesh_shape = spec.mesh().shape();
  const auto extra = static_cast<std::int32_t>(mesh_shape.size());
  count = std::min(count, shape[d]);
  mesh_shape.push_back(count);
  DimLayouts dims = spec.dims();
  dims[d][0].cuts.push_back({extra, count});
  const auto cut = Spec::from_dims(spec.meta(), Mesh::make(mesh_shape), dims, Partials(mesh_shape.size()));
  return cut ? std::optional(*cut) : std::nullopt;
}

// The bytes of one piece of a layout, read as they are asked for, from its first to its last.
class PieceStream {
 public:
  PieceStream(Checkpoint& from, std::string name, const Spec& spec, Dims coordinate)
      : from_(from), name_(std::move(name)), spec_(spec), coordinate_(std::move(coordinate)) {
    const std::int64_t bytes = spec.local_bytes(coordinate_);
    if (bytes <= kWindow) return;
    const auto cut = in_windows(spec, coordinate_, ceil_div(bytes, kWindow));
    if (!cut) return;
    windows_ = cut->mesh().shape().back();
    spec_ = *cut;
    coordinate_.push_back(0);
  }

  const void* bytes(std::int64_t begin, std::int64_t end, std::vector<char>& scratch) {
    scratch.resize(static_cast<std::size_t>(end - begin));
    for (std::int64_t at = begin; at < end;) {
      while (at >= window_end_) next_window();
      const std::int64_t n = std::min(end, window_end_) - at;
      const std::int64_t window_begin = window_end_ - static_cast<std::int64_t>(window_.size());
      std::memcpy(scratch.data() + (at - begin), window_.data() + (at - window_begin), static_cast<std::size_t>(n));
      at += n;
    }
    return scratch.data();
  }

 private:
  void next_window() {
    if (windows_ > 0) coordinate_.back() = next_;
    ++next_;
    window_.resize(static_cast<std::size_t>(spec_.local_bytes(coordinate_)));
    from_.read(name_, spec_, coordinate_, row_major_stride(spec_.local_shape(coordinate_)), window_.data());
    window_end_ += static_cast<std::int64_t>(window_.size());
  }

  Checkpoint& from_;
  const std::string name_;
  Spec spec_;
  Dims coordinate_;
  std::int64_t windows_ = 0;  // 0: the piece is one
  std::int64_t next_ = 0;
  std::int64_t window_end_ = 0;
  std::vector<char> window_;
};

EntryData stream_of(Checkpoint& from, const std::string& name, const Spec& spec, const Dims& coordinate) {
  auto stream = std::make_shared<PieceStream>(from, name, spec, coordinate);
  return [stream](std::int64_t begin, std::int64_t end, std::vector<char>& scratch) {
    return stream->bytes(begin, end, scratch);
  };
}

constexpr std::string_view kOptimizer = "optimizer.";

bool is_selected(const Checkpoint& from, const std::string& name, const Selection& selection) {
  if (selection.chosen && !selection.chosen(name)) return false;
  return selection.optimizer || !is_optimizer_state(from, name);
}

CheckpointInfo selected_info(const Checkpoint& from, const Selection& selection) {
  CheckpointInfo info = from.info();
  const bool all = selection.optimizer && std::all_of(from.tensors().begin(), from.tensors().end(), [&](const auto& t) {
                     return !is_optimizer_state(from, t.first) || is_selected(from, t.first, selection);
                   });
  if (!all) std::erase_if(info.state, [](const auto& number) { return number.first.starts_with(kOptimizer); });
  return info;
}

}  // namespace

bool is_optimizer_state(const Checkpoint& checkpoint, const std::string& name) {
  const std::size_t dot = name.rfind('.');
  return name.starts_with(kOptimizer) && dot >= kOptimizer.size() &&
         checkpoint.tensors().contains(name.substr(kOptimizer.size(), dot - kOptimizer.size()));
}

std::int64_t merge_checkpoint(Checkpoint& from, const std::string& file, const Selection& selection) {
  std::vector<WriteEntry> entries;
  std::int64_t bytes = 0;
  const Mesh one = Mesh::make({1});
  for (const auto& [name, tensor] : from.tensors()) {
    if (!is_selected(from, name, selection)) continue;
    const Spec whole = Spec::make(tensor.spec.meta(), one, {Replicate()});
    bytes += whole.meta().nbytes();
    WriteEntry& entry = entries.emplace_back();
    entry.name = name;
    entry.dtype = whole.meta().dtype();
    entry.shape = whole.meta().shape();
    entry.data = stream_of(from, name, whole, {0});
  }
  const std::size_t slash = file.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : file.substr(0, slash);
  const std::string unfinished = folder + "/." + file.substr(slash + 1) + ".part";
  std::remove(unfinished.c_str());
  FileWords words;
  words.id = from.index().id;
  const CheckpointInfo info = selected_info(from, selection);
  write_file(unfinished, std::move(entries), std::move(words), &info);
  if (std::rename(unfinished.c_str(), file.c_str()) != 0) fail_system("cannot give a file its name", file, errno);
  return bytes;
}

std::string reshard_checkpoint(Checkpoint& from, const std::string& root, std::int64_t ranks, const PlaceStored& place,
                               const Selection& selection) {
  std::vector<SaveItem> items;
  for (const auto& [name, tensor] : from.tensors()) {
    if (is_selected(from, name, selection)) items.push_back({name, place(name, tensor.spec.meta())});
  }
  const SavePlan plan = plan_save(items, ranks);
  const CheckpointInfo info = selected_info(from, selection);
  Commit commit(root, info.step, 10'000);
  std::vector<std::optional<StoredFile>> files;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    files.push_back(write_rank(
        commit.folder(), commit.id(), items, plan, rank, info,
        [&](std::size_t i, const Dims& at) { return stream_of(from, items[i].name, plan.tensors[i].spec, at); }));
  }
  commit.finish(index_of(commit.id(), items, plan, std::move(files), info), 0);
  return commit.target();
}

}  // namespace dtensor
