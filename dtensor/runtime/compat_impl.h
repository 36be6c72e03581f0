#pragma once

// Where the supported versions of libtorch differ, as far as distributed tensors are concerned.

#include <c10/core/AutogradState.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <torch/version.h>

namespace dtensor {

inline constexpr const char* kNoRawData =
    "a distributed tensor has no data of its own to point to or to save; try to_local(), full_tensor() or "
    "save_checkpoint";

// What hangs on a storage, past all checks.
inline void* context_of(const c10::TensorImpl& impl) {
#if TORCH_VERSION_MAJOR >= 2
  return impl.unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get_context();
#else
  return impl.unsafe_storage().data_ptr().get_context();
#endif
}

// Reading raw data, and saving it, is an error from now on; without this a file would be written without data.
inline void forbid_raw_data(c10::TensorImpl& impl) {
#if TORCH_VERSION_MAJOR >= 2
  impl.unsafe_storage().unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(kNoRawData);
#else
  impl.set_storage_access_should_throw();
#endif
}

// While it lives, new tensors have autograd keys, also in inference mode: for values that parameters are given there.
class NotInferenceMode {
 public:
  NotInferenceMode() : before_(c10::AutogradState::get_tls_state()) {
    c10::AutogradState now = before_;
    now.set_inference_mode(false);
    c10::AutogradState::set_tls_state(now);
  }
  ~NotInferenceMode() { c10::AutogradState::set_tls_state(before_); }
  NotInferenceMode(const NotInferenceMode&) = delete;
  NotInferenceMode& operator=(const NotInferenceMode&) = delete;

 private:
  const c10::AutogradState before_;
};

}  // namespace dtensor
