#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "dtensor/core/mesh.h"
#include "dtensor/core/spec.h"
#include "dtensor/runtime/execute.h"

namespace dtensor {

// The backend key of distributed tensors; PrivateUse1 is left to makers of accelerators.
inline constexpr c10::DispatchKey kDTensorKey = c10::DispatchKey::PrivateUse3;

// A result that would be an alias of its operand, had that not been moved for it: writing to it would be lost, and once
// its operand is written it is out of date. Both are errors.
class LostAlias {
 public:
  explicit LostAlias(const at::Tensor& operand);
  bool out_of_date() const { return counter_.enabled() && counter_.current_version() != version_; }

 private:
  c10::VariableVersion counter_;  // the operand's
  std::uint32_t version_ = 0;
};

// What a distributed tensor carries. It hangs on the storage, which is what TensorImpl::shallow_copy_from copies: any
// tensor handle can take it over, and detached tensors share it.
class Payload {
 public:
  Payload(at::Tensor my_part, Spec whole, std::shared_ptr<const DeviceMesh> my_mesh)
      : spec(std::move(whole)), mesh(std::move(my_mesh)), local_(std::move(my_part)) {}

  // This rank's part; undefined where it is not in the mesh. Waits for a redistribution that is under way, and reduces
  // what was left unreduced.
  const at::Tensor& local() {
    if (pending_ || unreduced_) settle();
    return local_;
  }
  void set_pending(std::shared_ptr<Execution> pending) { pending_ = std::move(pending); }

  // A gradient that is still as it was produced, while others may be added to it: its spec then, and its part.
  struct Unreduced {
    Spec spec;
    at::Tensor local;
  };
  void set_unreduced(Unreduced unreduced) { unreduced_ = std::move(unreduced); }
  std::optional<Unreduced>& unreduced() { return unreduced_; }

  const Spec spec;
  const std::shared_ptr<const DeviceMesh> mesh;
  std::optional<LostAlias> lost_alias;
  // The autograd state for which the leaf's hook is installed.
  const void* hooked = nullptr;

 private:
  void settle();

  at::Tensor local_;
  std::shared_ptr<Execution> pending_;
  std::optional<Unreduced> unreduced_;
};

// An error where the payload is a lost alias that is out of date.
void check_alias(const Payload& payload, const std::string& where);

// Pre: is_dtensor(tensor).
Payload& payload_of(const at::Tensor& tensor);

inline bool has_payload(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->key_set().has(kDTensorKey);
}

struct WrapOptions {
  // Others hold the same memory: autograd must not add into it.
  bool shared = false;
  // A view of this tensor: takes over its keys, so that inference mode accepts it.
  const at::Tensor* base = nullptr;
};
// A distributed tensor of this rank's part; with autograd history of its own.
at::Tensor wrap(at::Tensor local, const Spec& spec, std::shared_ptr<const DeviceMesh> mesh,
                const WrapOptions& options = {});
at::Tensor wrap_pending(std::shared_ptr<Execution> execution, const Spec& spec, std::shared_ptr<const DeviceMesh> mesh);

// A plain tensor that is the same on all ranks.
at::Tensor as_replica(const at::Tensor& plain, const std::shared_ptr<const DeviceMesh>& mesh);

// The handle, and all who hold it, now have `value`'s sizes and payload. Autograd state stays, the version is bumped.
void take_over(const at::Tensor& handle, const at::Tensor& value);

}  // namespace dtensor
