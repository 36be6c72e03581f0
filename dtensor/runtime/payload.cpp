#include "dtensor/runtime/payload.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "dtensor/core/error.h"
#include "dtensor/runtime/buckets.h"
#include "dtensor/runtime/compat_impl.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/record.h"
#include "dtensor/runtime/register.h"

namespace dtensor {
namespace {

// Memory of objects that come and go with every call: what was given back on a thread is taken again there. malloc is
// the largest part of what a wrapped result costs otherwise.
template <class Of>
class Recycled {
 public:
  static void* operator new(std::size_t size) {
    return mine.count > 0 ? mine.blocks[--mine.count] : ::operator new(size);
  }
  static void operator delete(void* block) noexcept {
    if (mine.count == 0) static_cast<void>(last());
    if (mine.ended || mine.count == mine.blocks.size()) return ::operator delete(block);
    mine.blocks[mine.count++] = block;
  }

 private:
  struct Blocks {
    std::array<void*, 256> blocks;
    std::size_t count;
    bool ended;  // the thread did: others may still let go of tensors on it
  };
  struct Last {
    ~Last() {
      mine.ended = true;
      while (mine.count > 0) ::operator delete(mine.blocks[--mine.count]);
    }
  };
  static const Last& last() {
    thread_local const Last instance;
    return instance;
  }
  static constinit thread_local Blocks mine;
};
template <class Of>
constinit thread_local typename Recycled<Of>::Blocks Recycled<Of>::mine = {};

// A storage without memory that is the payload's home: one allocation for both. The payload is found through the
// context of the data pointer, which owns nothing.
class PayloadStorage final : public c10::StorageImpl, public Recycled<PayloadStorage> {
 public:
  PayloadStorage(at::Tensor local, const Spec& spec, std::shared_ptr<const DeviceMesh> mesh, c10::Device device)
      : StorageImpl(use_byte_size_t(), 0, c10::DataPtr(nullptr, &payload_, &keep, device), nullptr, false) {
    payload_.emplace(std::move(local), spec, std::move(mesh));
  }
  Payload& payload() { return *payload_; }
  // Weak references may keep the storage, but nothing in it.
  void release_resources() override {
    StorageImpl::release_resources();
    payload_.reset();
  }

 private:
  static void keep(void*) {}
  std::optional<Payload> payload_;
};

// Adds to TensorImpl that memory is shared: libtorch's gradient buffers add in place into a tensor whose storage has
// one owner, and a view's payload has a storage of its own.
class WrapperImpl final : public c10::TensorImpl, public Recycled<WrapperImpl> {
 public:
  WrapperImpl(c10::Storage&& storage, c10::DispatchKeySet keys, caffe2::TypeMeta type)
      : TensorImpl(std::move(storage), keys, type) {}
  WrapperImpl(ImplType view, c10::Storage&& storage, c10::DispatchKeySet keys, caffe2::TypeMeta type)
      : TensorImpl(view, std::move(storage), keys, type) {}

  void mark_shared() { second_owner_ = unsafe_storage(); }

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version,
                                                         bool allow_metadata_change) const override {
    return copy(version, allow_metadata_change);
  }
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version,
                                                         bool allow_metadata_change) const override {
    return copy(std::move(version), allow_metadata_change);
  }
#if TORCH_VERSION_MAJOR < 2
  // Asked before a data pointer is given, and by nothing that distributed tensors are used for. Later versions have an
  // error for it (forbid_raw_data).
  bool has_storage() const override {
    TORCH_CHECK(false, kNoRawData);
    return false;
  }
#endif
  // What libtorch says it cannot do with.
  const char* tensorimpl_type_name() const override { return kNoRawData; }
  void release_resources() override {
    second_owner_ = {};
    TensorImpl::release_resources();
  }

 private:
  template <class Version>
  c10::intrusive_ptr<TensorImpl> copy(Version&& version, bool allow_metadata_change) const {
    auto impl = c10::make_intrusive<WrapperImpl>(c10::Storage(unsafe_storage()), key_set_, data_type_);
    copy_tensor_metadata(this, impl.get(), std::forward<Version>(version), allow_metadata_change);
    impl->refresh_numel();
    impl->refresh_contiguous();
    if (second_owner_) impl->mark_shared();
    return impl;
  }

  c10::Storage second_owner_;
};

c10::DispatchKeySet keys_for(c10::DeviceType device) {
  const bool cuda = device == c10::DeviceType::CUDA;
  return c10::DispatchKeySet({kDTensorKey, cuda ? c10::DispatchKey::AutocastCUDA : c10::DispatchKey::AutocastCPU});
}

// The one that this rank works on.
c10::Device device_of(const DeviceMesh& mesh) {
  if (mesh.device() != DeviceKind::kCuda) return c10::DeviceType::CPU;
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice();
}

at::Tensor wrap_storage(c10::intrusive_ptr<PayloadStorage> home, c10::DeviceType device, const WrapOptions& options) {
  ensure_registered();
  home->payload().provenance = options.provenance;
  const TensorMeta& meta = home->payload().spec.meta();
  const auto type = c10::scalarTypeToTypeMeta(scalar_type_of(meta.dtype()));
  const at::IntArrayRef sizes(meta.shape().data(), meta.shape().size());
  const at::IntArrayRef strides(meta.stride().data(), meta.stride().size());
  c10::DispatchKeySet keys = options.base ? options.base->key_set() : keys_for(device);
  if (options.traits) {
    home->payload().traits = options.traits;
    if (options.traits->style) keys = keys.add(kStyledKey);
  }
  c10::Storage storage{c10::intrusive_ptr<c10::StorageImpl>(std::move(home))};
  auto impl = options.base ? c10::make_intrusive<WrapperImpl>(c10::TensorImpl::VIEW, std::move(storage), keys, type)
                           : c10::make_intrusive<WrapperImpl>(std::move(storage), keys, type);
  impl->set_sizes_and_strides(sizes, strides);
  if (options.offset != 0) impl->set_storage_offset(options.offset);
  if (options.shared || options.base) impl->mark_shared();
  forbid_raw_data(*impl);
  return at::Tensor(std::move(impl));
}

}  // namespace

void Payload::settle() {
  const std::lock_guard lock(settling_);
  while (pending_ || unreduced_) settle_one();
  unsettled_.store(false, std::memory_order_release);
}

void Payload::settle_one() {
  // With the others of its bucket, if it is still the gradient of one: then it is pending now.
  if (unreduced_ && unreduced_->bucket) unreduced_->bucket->reduce();
  at::Tensor value;
  if (pending_) {
    value = pending_();  // after an error it is still pending, and gives the same error again
    pending_ = nullptr;
  } else {
    const Unreduced from = *unreduced_;
    static const std::string* op = new std::string("gradient");
    static const std::string* reason = new std::string("what was accumulated is reduced at its first use");
    const CommCause cause(*op, *reason, /*asked=*/true);
    from.source.check();
    value = execute(*mesh, make_plan(from.spec, spec), from.local, provenance);
    unreduced_.reset();
  }
  if (local_.defined()) {
    local_.add_(value);
  } else {
    local_ = std::move(value);
  }
}

namespace {

struct Watched {
  std::mutex mutex;
  std::unordered_map<const c10::StorageImpl*, std::weak_ptr<WatchedMemory>> all;
};
Watched& watched() {
  static auto* table = new Watched;  // tensors may outlive main
  return *table;
}

}  // namespace

WatchedMemory::WatchedMemory(const c10::Storage& storage) : storage_(storage.getWeakStorageImpl()) {
  alive_.fetch_add(1, std::memory_order_relaxed);
}

WatchedMemory::~WatchedMemory() {
  alive_.fetch_sub(1, std::memory_order_relaxed);
  const std::lock_guard lock(watched().mutex);
  // Another may have begun to watch it meanwhile.
  const auto found = watched().all.find(storage_._unsafe_get_target());
  if (found != watched().all.end() && found->second.expired()) watched().all.erase(found);
}

std::shared_ptr<const WatchedMemory> WatchedMemory::of(const at::Tensor& part) {
  const std::lock_guard lock(watched().mutex);
  std::weak_ptr<WatchedMemory>& known = watched().all[part.storage().unsafeGetStorageImpl()];
  std::shared_ptr<WatchedMemory> memory = known.lock();
  if (!memory) known = memory = std::shared_ptr<WatchedMemory>(new WatchedMemory(part.storage()));
  return memory;
}

void WatchedMemory::count(const at::Tensor& part) {
  if (!part.defined()) return;
  std::shared_ptr<WatchedMemory> memory;  // let go without the lock, which its end takes
  const std::lock_guard lock(watched().mutex);
  const auto found = watched().all.find(part.storage().unsafeGetStorageImpl());
  if (found != watched().all.end()) memory = found->second.lock();
  if (memory) ++memory->writes_;
}

LostAlias::LostAlias(const at::Tensor& operand, const at::Tensor& part)
    : counter_(operand.unsafeGetTensorImpl()->version_counter()) {
  if (counter_.enabled()) version_ = counter_.current_version();
  if (!part.defined()) return;
  memory_ = WatchedMemory::of(part);
  writes_ = memory_->writes();
}

void Source::check() const {
  if (!unwritten_ || !unwritten_->out_of_date()) return;
  fail_invalid("redistribute",
               {.what = "the tensor was written while others still had to read it",
                .got = payload_of(tensor_).spec.to_string(),
                .advice = "use what is made of it first (a gradient, for one), or clone() before writing"});
}

void check_alias(const Payload& payload, const std::string& where) {
  if (!payload.lost_alias || !payload.lost_alias->out_of_date()) return;
  fail_invalid(where, {.what = "a view that had to be copied, and what it was taken from has been written since",
                       .got = payload.spec.to_string(),
                       .advice = "take the view after writing, redistribute before taking it, or clone() it"});
}

Payload& payload_of(const at::Tensor& tensor) {
  return **static_cast<std::optional<Payload>*>(context_of(*tensor.unsafeGetTensorImpl()));
}

at::Tensor copy_laid_out(const at::Tensor& local, const Spec& spec, const Dims& at) {
  const Dims stride = spec.local_stride(at);
  return at::empty_strided(local.sizes(), {stride.data(), stride.size()}, local.options()).copy_(local);
}

at::Tensor laid_out(const at::Tensor& local, const Spec& spec, const Dims& at) {
  const TensorMeta& meta = spec.meta();
  if (local.is_contiguous() && meta.stride() == row_major_stride(meta.shape())) return local;
  const Dims stride = spec.local_stride(at);
  bool lies = true;
  for (std::int64_t d = 0; d < local.dim(); ++d) {
    lies = lies && (local.size(d) <= 1 || local.stride(d) == stride[static_cast<std::size_t>(d)]);
  }
  return lies || local.numel() == 0 ? local : copy_laid_out(local, spec, at);
}

void Payload::lay_out() {
  if (std::exchange(expanded, false)) local_ = laid_out(local_, spec, *mesh->coordinate());
}

at::Tensor wrap(at::Tensor local, const Spec& spec, std::shared_ptr<const DeviceMesh> mesh,
                const WrapOptions& options) {
  const c10::Device device = local.defined() ? local.device() : device_of(*mesh);
  return wrap_storage(c10::make_intrusive<PayloadStorage>(std::move(local), spec, std::move(mesh), device),
                      device.type(), options);
}

at::Tensor wrap_pending(std::shared_ptr<Execution> execution, const Spec& spec, std::shared_ptr<const DeviceMesh> mesh,
                        const Provenance& provenance) {
  const c10::Device device = device_of(*mesh);
  auto home = c10::make_intrusive<PayloadStorage>(at::Tensor(), spec, std::move(mesh), device);
  home->payload().set_pending([execution = std::move(execution)] { return execution->result(); });
  return wrap_storage(std::move(home), device.type(), {.provenance = provenance});
}

at::Tensor as_replica(const at::Tensor& plain, const std::shared_ptr<const DeviceMesh>& mesh,
                      const Provenance& provenance) {
  const Spec spec = Spec::make(meta_of(plain), *mesh, Placements(static_cast<std::size_t>(mesh->ndim()), Replicate()));
  if (!mesh->contains_me()) return wrap(at::Tensor(), spec, mesh, {.shared = true, .provenance = provenance});
  // Zeros without memory, which libtorch makes in backward passes, have nothing that could be sent.
  const at::Tensor local = plain._is_zerotensor() ? at::zeros(plain.sizes(), plain.options()) : plain;
  return wrap(local, spec, mesh, {.shared = true, .provenance = provenance});
}

void exchange(const at::Tensor& parameter, const at::Tensor& value) {
  payload_of(value).hooked = payload_of(parameter).hooked.load();
  payload_of(value).provenance = payload_of(parameter).provenance;
  parameter.unsafeGetTensorImpl()->shallow_copy_from(value.getIntrusivePtr());
}

void take_over(const at::Tensor& handle, const at::Tensor& value) {
  handle.unsafeGetTensorImpl()->shallow_copy_from(value.getIntrusivePtr());
  handle.unsafeGetTensorImpl()->bump_version();
}

}  // namespace dtensor
