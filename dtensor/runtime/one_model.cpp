// One rank's values for all: what distribute_tensor, distribute_module, parallelize_module and fully_shard do before
// they cut anything.
#include "dtensor/runtime/one_model.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "dtensor/comm/world.h"
#include "dtensor/core/checksum.h"
#include "dtensor/core/error.h"
#include "dtensor/core/hash.h"
#include "dtensor/core/text.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/payload.h"
#include "dtensor/runtime/provenance.h"
#include "dtensor/runtime/redistribute.h"

namespace dtensor {
namespace {

using Words = std::vector<std::int64_t>;

at::IntArrayRef as_array(const Dims& dims) { return {dims.data(), dims.size()}; }

std::int64_t text_checksum(const std::string& text) {
  return static_cast<std::int64_t>(checksum(text.data(), text.size()));
}

// The group of the ranks of this rank's row, and what is sent over it.
class Row {
 public:
  explicit Row(const DeviceMesh& mesh)
      : ranks_(mesh.my_ranks()),
        group_(group_of(mesh, ranks_, "mesh")),
        device_(mesh.device() == DeviceKind::kCuda ? c10::DeviceType::CUDA : c10::DeviceType::CPU) {}

  std::int64_t size() const { return group_->size(); }
  std::int64_t rank() const { return group_->rank(); }
  std::int64_t world_rank(std::int64_t index) const { return ranks_[static_cast<std::size_t>(index)]; }
  c10::DeviceType device() const { return device_; }

  // Every rank's words, one rank after the other. All pass equally many.
  Words gather(const Words& mine) const {
    const auto n = static_cast<std::int64_t>(mine.size());
    const at::Tensor output = at::empty({n * size()}, at::TensorOptions(at::kLong).device(device_));
    group_->all_gather(output, tensor_of(mine), Words(static_cast<std::size_t>(size()), n))->wait();
    return words_of(output);
  }
  // The root's words on every rank.
  Words broadcast(const Words& mine, std::int64_t root) const {
    const at::Tensor buffer = tensor_of(mine);
    group_->broadcast(buffer, root)->wait();
    return words_of(buffer);
  }
  std::string broadcast(const std::string& mine, std::int64_t root) const {
    const Words length = broadcast(Words{static_cast<std::int64_t>(mine.size())}, root);
    Words words((static_cast<std::size_t>(length[0]) + 7) / 8 + 1);
    if (rank() == root) std::memcpy(words.data(), mine.data(), mine.size());
    words = broadcast(words, root);
    return std::string(reinterpret_cast<const char*>(words.data()), static_cast<std::size_t>(length[0]));
  }
  void broadcast(const at::Tensor& buffer, std::int64_t root) const { group_->broadcast(buffer, root)->wait(); }

 private:
  at::Tensor tensor_of(const Words& words) const {
    const at::Tensor result = at::empty({static_cast<std::int64_t>(words.size())}, at::kLong);
    std::memcpy(result.data_ptr(), words.data(), words.size() * sizeof(std::int64_t));
    return result.to(device_);
  }
  static Words words_of(const at::Tensor& tensor) {
    const at::Tensor here = tensor.cpu();
    const auto* begin = static_cast<const std::int64_t*>(here.data_ptr());
    return Words(begin, begin + here.numel());
  }

  const std::vector<std::int64_t> ranks_;
  const CommunicatorPtr group_;
  const c10::DeviceType device_;
};

// The values, in memory without gaps: the tensor itself or a copy.
at::Tensor dense_value(const at::Tensor& tensor) {
  at::Tensor value = tensor.detach();
  if (value.is_meta()) return value;
  if (value._is_zerotensor()) return value.clone();
  value = value.resolve_conj().resolve_neg();
  return value.is_non_overlapping_and_dense() ? value : value.contiguous();
}

// All bytes of a dense tensor, in the order of its memory.
at::Tensor flat_bytes(const at::Tensor& dense) {
  return dense.as_strided({dense.numel()}, {1}, dense.storage_offset()).view(at::kByte);
}

// Of a dense tensor's bytes; on a device, piece by piece.
std::int64_t value_checksum(const at::Tensor& dense) {
  if (dense.is_meta() || dense.numel() == 0) return 0;
  if (dense.is_cpu()) return static_cast<std::int64_t>(checksum(dense.data_ptr(), dense.nbytes()));
  const at::Tensor bytes = flat_bytes(dense);
  Hasher hasher;
  for (std::int64_t at = 0; at < bytes.numel(); at += kSendBytes) {
    const at::Tensor piece = bytes.narrow(0, at, std::min(kSendBytes, bytes.numel() - at)).cpu();
    hasher.add(checksum(piece.data_ptr(), static_cast<std::size_t>(piece.numel())));
  }
  return static_cast<std::int64_t>(hasher.value());
}

std::string line_of(const NamedTensor& named) {
  if (!named.tensor.defined()) return "\"" + named.name + "\", undefined";
  const at::Tensor& tensor = named.tensor;
  const TensorMeta meta(Dims(tensor.sizes().begin(), tensor.sizes().end()), dtype_of(tensor.scalar_type()));
  return "\"" + named.name + "\", " + meta.to_string() + (tensor.requires_grad() ? ", requires a gradient" : "");
}

class Sharing {
 public:
  Sharing(std::string_view where, std::vector<NamedTensor>& tensors, const DeviceMesh& mesh,
          const DistributeOptions& options)
      : where_(where), tensors_(tensors), row_(mesh), options_(options), source_(options.source.value_or(0)) {
    for (const NamedTensor& named : tensors_) {
      own_.push_back(named.may_overwrite && named.tensor.defined() && !named.tensor.is_meta() &&
                     named.tensor.has_storage() && named.tensor.storage().use_count() == 1 &&
                     !named.tensor.is_inference());
    }
  }

  std::vector<std::int64_t> run() {
    const Words said = row_.gather(first_words());
    compare_lines(said);
    for (NamedTensor& named : tensors_) {
      if (!named.tensor.defined()) fail_invalid(where_, {.what = "the tensor is undefined"});
    }
    const bool same_meta = agree_on_meta(said);
    const bool same_order = agree_on_order(said);
    if (options_.source) {
      std::vector<std::size_t> all(tensors_.size());
      for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
      send(all);
      return {};
    }
    if (!same_meta || !same_order) {
      checksums_ = checksums();
    } else if (alike(said, kValues)) {
      return {};
    }
    return take_what_differs();
  }

 private:
  enum : std::size_t { kLines, kMeta, kOrder, kValues, kCount };

  Words first_words() {
    std::string lines, meta;
    for (const NamedTensor& named : tensors_) {
      lines += line_of(named) + '\n';
      meta += named.tensor.defined() && named.tensor.is_meta() ? 'm' : '-';
    }
    const Words order = order_of_all();
    Words words(kCount, 0);
    words[kLines] = text_checksum(lines_ = lines);
    words[kMeta] = text_checksum(meta);
    words[kOrder] = static_cast<std::int64_t>(checksum(order.data(), order.size() * sizeof(std::int64_t)));
    if (!options_.source) {
      checksums_ = checksums();
      words[kValues] = static_cast<std::int64_t>(checksum(checksums_.data(), checksums_.size() * sizeof(std::int64_t)));
    }
    return words;
  }

  Words order_of_all() const {
    Words order;
    for (const NamedTensor& named : tensors_) {
      if (!named.tensor.defined()) continue;
      const TensorMeta meta = dense_meta(named.tensor);
      order.insert(order.end(), meta.stride().begin(), meta.stride().end());
    }
    return order;
  }

  Words checksums() const {
    Words result;
    for (const NamedTensor& named : tensors_) {
      result.push_back(named.tensor.defined() ? value_checksum(dense_value(named.tensor)) : 0);
    }
    return result;
  }

  static std::int64_t word(const Words& said, std::int64_t rank, std::size_t which) {
    return said[static_cast<std::size_t>(rank) * kCount + which];
  }
  bool alike(const Words& said, std::size_t which) const {
    for (std::int64_t r = 0; r < row_.size(); ++r) {
      if (word(said, r, which) != word(said, source_, which)) return false;
    }
    return true;
  }

  // Names, shapes and types: an error on all ranks that names the first rank which differs, and what it has.
  void compare_lines(const Words& said) const {
    for (std::int64_t r = 0; r < row_.size(); ++r) {
      if (word(said, r, kLines) == word(said, source_, kLines)) continue;
      const std::string mine = row_.broadcast(lines_, source_), other = row_.broadcast(lines_, r);
      std::size_t from = 0;  // the first line in which they differ
      for (std::size_t i = 0; i < std::min(mine.size(), other.size()) && mine[i] == other[i]; ++i) {
        if (mine[i] == '\n') from = i + 1;
      }
      const auto line = [&](const std::string& text) {
        return from < text.size() ? text.substr(from, text.find('\n', from) - from) : std::string("nothing more");
      };
      fail_invalid(where_, {.what = "the ranks pass different tensors",
                            .got = line(mine) + " on rank " + std::to_string(row_.world_rank(source_)) + ", " +
                                   line(other) + " on rank " + std::to_string(row_.world_rank(r)),
                            .expected = "the same names, shapes and types on all ranks",
                            .advice = tensors_.size() == 1
                                          ? "from_local where each rank has its own part, or a source: {.source = 0}"
                                          : "the same model on all ranks"});
    }
  }

  // Which tensors are on the meta device: as on the source. False where ranks differ.
  bool agree_on_meta(const Words& said) {
    if (alike(said, kMeta)) return true;
    Words meta;
    for (const NamedTensor& named : tensors_) meta.push_back(named.tensor.is_meta() ? 1 : 0);
    const Words theirs = row_.gather(meta);
    const auto n = tensors_.size();
    for (std::size_t i = 0; i < n; ++i) {
      const bool source_is_meta = theirs[static_cast<std::size_t>(source_) * n + i] != 0;
      for (std::int64_t r = 0; r < row_.size() && !options_.source; ++r) {
        if ((theirs[static_cast<std::size_t>(r) * n + i] != 0) == source_is_meta) continue;
        const auto place = [&](bool meta_there) {
          return meta_there ? "on the meta device on rank " : "with values on rank ";
        };
        fail_invalid(where_, {.what = "a tensor without values on some ranks",
                              .got = "\"" + tensors_[i].name + "\" " + place(source_is_meta) +
                                     std::to_string(row_.world_rank(source_)) + ", " + place(!source_is_meta) +
                                     std::to_string(row_.world_rank(r)),
                              .expected = "the same on all ranks",
                              .advice = "a source that has the values: {.source = 0}"});
      }
      at::Tensor& tensor = tensors_[i].tensor;
      if (tensor.is_meta() == source_is_meta) continue;
      const TensorMeta meta_now = dense_meta(tensor);
      tensor = at::empty_strided(as_array(meta_now.shape()), as_array(meta_now.stride()),
                                 tensor.options().device(source_is_meta ? c10::DeviceType::Meta : row_.device()));
      own_[i] = true;
    }
    return false;
  }

  // The order in memory: as on the source. False where ranks differ.
  bool agree_on_order(const Words& said) {
    const bool same = alike(said, kOrder);
    const Words order = same ? Words() : row_.broadcast(order_of_all(), source_);
    std::size_t at = 0;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      at::Tensor& tensor = tensors_[i].tensor;
      const auto dims = static_cast<std::size_t>(tensor.dim());
      const at::Tensor value = dense_value(tensor);
      own_[i] = own_[i] || !value.is_alias_of(tensor);
      const at::Tensor before = std::exchange(tensor, value);
      if (same) continue;
      const Dims stride(order.begin() + static_cast<std::ptrdiff_t>(at),
                        order.begin() + static_cast<std::ptrdiff_t>(at + dims));
      at += dims;
      if (dense_meta(before).stride() == stride) continue;
      tensor = at::empty_strided(value.sizes(), as_array(stride), value.options());
      if (!value.is_meta()) tensor.copy_(value);
      own_[i] = true;
    }
    return same;
  }

  std::vector<std::int64_t> take_what_differs() {
    const Words all = row_.gather(checksums_);
    const std::size_t n = tensors_.size();
    std::vector<std::size_t> differ;
    std::vector<std::int64_t> ranks;
    for (std::int64_t r = 0; r < row_.size(); ++r) {
      bool any = false;
      for (std::size_t i = 0; i < n; ++i) {
        if (all[static_cast<std::size_t>(r) * n + i] == all[static_cast<std::size_t>(source_) * n + i]) continue;
        any = true;
        if (std::find(differ.begin(), differ.end(), i) == differ.end()) differ.push_back(i);
      }
      if (any) ranks.push_back(row_.world_rank(r));
    }
    if (options_.equal_copies && !differ.empty()) {
      std::string names;
      for (std::size_t k = 0; k < std::min<std::size_t>(differ.size(), 3); ++k) {
        names += (k > 0 ? ", \"" : "\"") + tensors_[differ[k]].name + "\"";
      }
      if (differ.size() > 3) names += " and " + std::to_string(differ.size() - 3) + " more";
      fail_invalid(where_, {.what = "equal_copies, and yet the ranks have different values",
                            .got = names + " of rank" + (ranks.size() > 1 ? "s " : " ") + join_numbers(ranks) +
                                   " differ from those of rank " + std::to_string(row_.world_rank(source_)),
                            .expected = "the same bits on all ranks",
                            .advice = "without equal_copies all ranks take the values of one"});
    }
    std::sort(differ.begin(), differ.end());
    send(differ);
    return ranks;
  }

  // The source's bytes, through one buffer.
  void send(const std::vector<std::size_t>& which) {
    const at::NoGradGuard no_grad;
    std::int64_t total = 0;
    std::vector<at::Tensor> bytes;
    for (const std::size_t i : which) {
      at::Tensor& tensor = tensors_[i].tensor;
      if (tensor.is_meta() || tensor.numel() == 0) continue;
      if (!own_[i] && row_.rank() != source_) tensor = tensor.clone(at::MemoryFormat::Preserve);
      bytes.push_back(flat_bytes(tensor));
      total += bytes.back().numel();
    }
    if (total == 0) return;
    const at::Tensor buffer =
        at::empty({std::min(total, kSendBytes)}, at::TensorOptions(at::kByte).device(row_.device()));
    struct Piece {
      std::size_t tensor;
      std::int64_t at;
      std::int64_t size;
    };
    std::vector<Piece> pieces;
    std::int64_t filled = 0;
    const auto flush = [&] {
      const at::Tensor part = buffer.narrow(0, 0, filled);
      std::int64_t at = 0;
      const auto each = [&](bool out) {
        at = 0;
        for (const Piece& piece : pieces) {
          const at::Tensor here = part.narrow(0, at, piece.size);
          const at::Tensor there = bytes[piece.tensor].narrow(0, piece.at, piece.size);
          (out ? there : here).copy_(out ? here : there);
          at += piece.size;
        }
      };
      if (row_.rank() == source_) each(/*out=*/false);
      row_.broadcast(part, source_);
      if (row_.rank() != source_) each(/*out=*/true);
      pieces.clear();
      filled = 0;
    };
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      for (std::int64_t at = 0; at < bytes[i].numel();) {
        const std::int64_t size = std::min(bytes[i].numel() - at, buffer.numel() - filled);
        pieces.push_back({i, at, size});
        at += size;
        filled += size;
        if (filled == buffer.numel()) flush();
      }
    }
    if (filled > 0) flush();
  }

  const std::string_view where_;
  std::vector<NamedTensor>& tensors_;
  const Row row_;
  const DistributeOptions options_;
  const std::int64_t source_;
  std::vector<bool> own_;  // memory that nobody else sees
  std::string lines_;
  Words checksums_;  // of my values
};

bool all_meta(const std::vector<NamedTensor>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [](const NamedTensor& named) { return named.tensor.defined() && named.tensor.is_meta(); });
}

}  // namespace

void check_source(std::string_view where, const DeviceMesh& mesh, const DistributeOptions& options) {
  if (!options.source) return;
  if (options.equal_copies) {
    fail_invalid(
        where, {.what = "a source and equal_copies: with a source nothing is compared", .expected = "one of the two"});
  }
  if (*options.source >= 0 && *options.source < mesh.size()) return;
  fail_invalid(where, {.what = "the source is an index in the mesh, 0 the first of its ranks",
                       .got = std::to_string(*options.source) + " on " + mesh.to_string(),
                       .expected = "0 to " + std::to_string(mesh.size() - 1)});
}

std::vector<std::int64_t> share_values(std::string_view where, std::vector<NamedTensor>& tensors,
                                       const DeviceMesh& mesh, const DistributeOptions& options) {
  check_source(where, mesh, options);
  const bool alone = !mesh.contains_me() || mesh.size() == 1 || !mesh.context();
  if (!alone && !tensors.empty() && (options.source || !all_meta(tensors))) {
    return Sharing(where, tensors, mesh, options).run();
  }
  for (NamedTensor& named : tensors) {
    if (!named.tensor.defined()) fail_invalid(where, {.what = "the tensor is undefined"});
    named.tensor = dense_value(named.tensor);
  }
  return {};
}

std::vector<std::int64_t> broadcast_words(const DeviceMesh& mesh, std::vector<std::int64_t> words,
                                          std::int64_t source) {
  return Row(mesh).broadcast(words, source);
}

TensorMeta dense_meta(const at::Tensor& tensor) {
  if (!tensor.is_contiguous() && tensor.is_non_overlapping_and_dense()) return meta_of(tensor);
  return TensorMeta(Dims(tensor.sizes().begin(), tensor.sizes().end()), dtype_of(tensor.scalar_type()));
}

at::Tensor distribute_replica(const at::Tensor& full, const Spec& spec, const DeviceMesh& mesh) {
  const Placements replicated(static_cast<std::size_t>(mesh.ndim()), Replicate());
  const Spec from = Spec::make(spec.meta(), mesh, replicated);
  at::Tensor local = execute(mesh, make_plan(from, spec), mesh.contains_me() ? full.detach() : at::Tensor());
  if (local.defined()) {
    const Dims& at = *mesh.coordinate();
    local = local.is_alias_of(full) ? copy_laid_out(local, spec, at) : laid_out(local, spec, at);
  }
  return wrap(std::move(local), spec, std::make_shared<const DeviceMesh>(mesh),
              {.provenance = of_numbered_leaf(distribute_name(), spec, mesh)});
}

namespace {

struct Range {
  const std::string* name;
  const c10::StorageImpl* storage;
  std::int64_t begin;
  std::int64_t end;
};

// Tensors of one module that share memory: what is written to the one would not reach the other any more.
void check_own_memory(std::string_view where, const std::vector<ToDistribute>& tensors) {
  std::vector<Range> ranges;
  for (const ToDistribute& item : tensors) {
    const at::Tensor& tensor = item.tensor;
    if (is_dtensor(tensor)) continue;
    if (tensor.is_view() && !tensor.is_leaf()) {
      fail_invalid(where, {.what = "a view that was computed from a tensor which requires a gradient",
                           .got = "\"" + item.name + "\", " + dense_meta(tensor).to_string(),
                           .expected = "a leaf",
                           .advice = "detach(), or clone() it, before it is registered"});
    }
    if (tensor.is_meta() || !tensor.has_storage() || tensor.numel() == 0) continue;
    std::int64_t last = 0;
    for (std::int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
    const auto size = static_cast<std::int64_t>(tensor.element_size());
    ranges.push_back({&item.name, tensor.storage().unsafeGetStorageImpl(), tensor.storage_offset() * size,
                      (tensor.storage_offset() + last + 1) * size});
  }
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    for (std::size_t k = 0; k < i; ++k) {
      const Range &a = ranges[k], &b = ranges[i];
      if (a.storage != b.storage || a.end <= b.begin || b.end <= a.begin) continue;
      fail_invalid(where, {.what = "two tensors of the module share memory, and would not any more",
                           .got = "\"" + *a.name + "\" and \"" + *b.name + "\"",
                           .expected = "one tensor that is registered twice, or memory of their own",
                           .advice = "clone() one of them"});
    }
  }
}

// A view has its base's count of writes, and autograd would look for its values there: as a distributed tensor it is
// no view any more.
void end_view(const at::Tensor& tensor) {
  if (!tensor.is_view()) return;
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const bool requires_grad = tensor.requires_grad();
  impl->set_autograd_meta(nullptr);
  if (!tensor.is_inference())
    impl->set_version_counter(c10::VariableVersion(impl->version_counter().current_version()));
  if (requires_grad) tensor.requires_grad_(true);
}

at::Tensor empty_local(const at::Tensor& like, const Spec& spec, const DeviceMesh& mesh) {
  if (!mesh.contains_me()) return {};
  const Dims shape = spec.local_shape(*mesh.coordinate()), stride = spec.local_stride(*mesh.coordinate());
  return at::empty_strided(
      as_array(shape), as_array(stride),
      like.options().requires_grad(c10::nullopt).device(mesh.device() == DeviceKind::kCuda ? at::kCUDA : at::kCPU));
}

Spec with_stride(const Spec& spec, const Dims& stride) {
  if (spec.meta().stride() == stride) return spec;
  const TensorMeta meta(spec.meta().shape(), stride, spec.meta().dtype());
  return expect_spec(Spec::from_dims(meta, spec.mesh(), spec.dims(), spec.partials()), "distribute_module");
}

}  // namespace

void distribute_all(std::string_view where, const std::vector<ToDistribute>& tensors, const DeviceMesh& mesh,
                    const DistributeOptions& options) {
  check_own_memory(where, tensors);
  std::vector<NamedTensor> values;
  for (const ToDistribute& item : tensors) {
    values.push_back({item.name, item.tensor, /*may_overwrite=*/true});
    if (const at::Tensor gradient = item.tensor.grad(); gradient.defined()) {
      values.push_back({item.name + ".grad", gradient, /*may_overwrite=*/true});
    }
  }
  static_cast<void>(share_values(where, values, mesh, options));
  const at::NoGradGuard no_grad;
  const auto shared = std::make_shared<const DeviceMesh>(mesh);
  auto value = values.begin();
  for (const ToDistribute& item : tensors) {
    const at::Tensor& tensor = item.tensor;
    const bool has_gradient = tensor.grad().defined();
    const at::Tensor full = std::exchange(value->tensor, {});
    ++value;
    const Spec spec = item.keeps_order ? item.spec : with_stride(item.spec, dense_meta(full).stride());
    const auto distributed = [&](const at::Tensor& plain, const Spec& to) -> at::Tensor {
      return plain.is_meta() ? wrap(empty_local(plain, to, mesh), to, shared,
                                    {.provenance = of_numbered_leaf(distribute_name(), to, mesh)})
                             : distribute_replica(plain, to, mesh);
    };
    const at::Tensor result = distributed(full, spec);
    end_view(tensor);
    take_over(tensor, result);
    if (!has_gradient) continue;
    const at::Tensor gradient = std::exchange(value->tensor, {});
    ++value;
    tensor.mutable_grad() = distributed(gradient, home_of(spec));
  }
}

}  // namespace dtensor
