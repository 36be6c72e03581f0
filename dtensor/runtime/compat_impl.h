#pragma once

// Where the supported versions of libtorch differ, as far as distributed tensors are concerned.

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <torch/version.h>
#if TORCH_VERSION_MAJOR >= 2
#include <torch/csrc/autograd/graph_task.h>
#endif

namespace dtensor {

inline constexpr const char* kNoRawData =
    "a distributed tensor has no data of its own to point to or to save; try to_local(), full_tensor() or save_checkpoint";

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

// Is this thread running a backward pass? libtorch mixes plain tensors in there. Version 1 cannot say.
inline bool in_backward() {
#if TORCH_VERSION_MAJOR >= 2
  return torch::autograd::get_current_graph_task_id() != -1;
#else
  return false;
#endif
}

}  // namespace dtensor
