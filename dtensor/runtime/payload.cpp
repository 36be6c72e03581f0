#include "dtensor/runtime/payload.h"

#include <c10/core/TensorImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "dtensor/core/error.h"
#include "dtensor/runtime/compat_impl.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/register.h"

namespace dtensor {
namespace {

void delete_payload(void* payload) { delete static_cast<Payload*>(payload); }

// Adds to TensorImpl that memory is shared: libtorch's gradient buffers add in place into a tensor whose storage has
// one owner, and a view's payload has a storage of its own.
class WrapperImpl final : public c10::TensorImpl {
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

at::Tensor wrap_payload(std::unique_ptr<Payload> payload, c10::Device device, const WrapOptions& options) {
  ensure_registered();
  const TensorMeta& meta = payload->spec.meta();
  const auto type = c10::scalarTypeToTypeMeta(scalar_type_of(meta.dtype()));
  const at::IntArrayRef sizes(meta.shape().data(), meta.shape().size());
  const at::IntArrayRef strides(meta.stride().data(), meta.stride().size());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0,
                       c10::DataPtr(nullptr, payload.release(), &delete_payload, device), nullptr, false);
  auto impl = options.base ? c10::make_intrusive<WrapperImpl>(c10::TensorImpl::VIEW, std::move(storage),
                                                              options.base->key_set(), type)
                           : c10::make_intrusive<WrapperImpl>(std::move(storage), keys_for(device.type()), type);
  impl->set_sizes_and_strides(sizes, strides);
  if (options.shared || options.base) impl->mark_shared();
  forbid_raw_data(*impl);
  return at::Tensor(std::move(impl));
}

}  // namespace

Payload& payload_of(const at::Tensor& tensor) {
  return *static_cast<Payload*>(context_of(*tensor.unsafeGetTensorImpl()));
}

at::Tensor wrap(at::Tensor local, const Spec& spec, std::shared_ptr<const DeviceMesh> mesh,
                const WrapOptions& options) {
  const c10::Device device = local.defined() ? local.device() : device_of(*mesh);
  return wrap_payload(std::make_unique<Payload>(std::move(local), spec, std::move(mesh)), device, options);
}

at::Tensor wrap_pending(std::shared_ptr<Execution> execution, const Spec& spec,
                        std::shared_ptr<const DeviceMesh> mesh) {
  const c10::Device device = device_of(*mesh);
  auto payload = std::make_unique<Payload>(at::Tensor(), spec, std::move(mesh));
  payload->set_pending(std::move(execution));
  return wrap_payload(std::move(payload), device, {});
}

void take_over(const at::Tensor& handle, const at::Tensor& value) {
  handle.unsafeGetTensorImpl()->shallow_copy_from(value.getIntrusivePtr());
  handle.unsafeGetTensorImpl()->bump_version();
}

}  // namespace dtensor
