#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "dtensor/core/mesh.h"
#include "dtensor/core/provenance.h"
#include "dtensor/core/spec.h"
#include "dtensor/runtime/execute.h"

namespace dtensor {

// The backend key of distributed tensors; PrivateUse1 is left to makers of accelerators.
inline constexpr c10::DispatchKey kDTensorKey = c10::DispatchKey::PrivateUse3;

class GradientBucket;

// Of weights that have a style (see styled.cpp). libtorch keeps it for wrappers in its own tests, and uses it nowhere.
inline constexpr c10::DispatchKey kStyledKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

// What a parameter asks of the operators that use it: set by parallel styles.
class ParameterStyle {
 public:
  virtual ~ParameterStyle() = default;
  // What goes into an operator whose weight the parameter is, and what comes out of it.
  virtual at::Tensor input(const at::Tensor& x) = 0;
  virtual at::Tensor output(const at::Tensor& y) = 0;
};

class Payload;

// Parameters that are gathered together before they are used, and let go afterwards: set by fully_shard.
class GatherUnit {
 public:
  virtual ~GatherUnit() = default;
  // What is about to be done with `tensor`, a parameter of the unit or what was taken from one while it was gathered:
  // an operator reads it, or writes it; its value is looked at as it lies; the program takes its part, or asks for its
  // layout. The tensor may have another payload afterwards.
  enum class Use : std::uint8_t { kRead, kWrite, kLook, kMemory, kLayout };
  virtual void before_use(const at::Tensor& tensor, Use use) = 0;
  // The gathered tensor that an operator without gradients reads in place of `tensor`, which keeps its own layout and
  // type; `tensor` itself where nothing is gathered for it.
  virtual at::Tensor gathered(const at::Tensor& tensor) = 0;
  // Is it a view that was taken of a gathered parameter? Its memory goes when the unit is written.
  virtual bool comes_and_goes(const at::Tensor& tensor) = 0;

  // While it lives, this thread brings together the operands of one operator: what is gathered for one of them stays
  // when another unit is gathered for the next.
  class OneCall {
   public:
    OneCall() : before_(std::exchange(now(), ++counter())) {}
    ~OneCall() { now() = before_; }
    OneCall(const OneCall&) = delete;
    OneCall& operator=(const OneCall&) = delete;
    static std::uint64_t current() { return now(); }  // 0: none

   private:
    static std::uint64_t& now() {
      thread_local std::uint64_t value = 0;
      return value;
    }
    static std::atomic<std::uint64_t>& counter() {
      static std::atomic<std::uint64_t> value = 0;
      return value;
    }
    const std::uint64_t before_;
  };
};

// What a parameter has beside its value; stays when its payload is exchanged.
struct ParameterTraits {
  std::optional<Spec> home;                // of its gradient, where that is not home_of its spec
  std::shared_ptr<GradientBucket> bucket;  // with whom its gradient is reduced
  std::shared_ptr<ParameterStyle> style;
  std::shared_ptr<ParameterStyle> lookup;  // of the embedding, where another module shares its weight
};

// Memory whose writes are counted as long as somebody watches it. libtorch counts the writes to tensors, but not in
// inference mode, nor through data().
class WatchedMemory {
 public:
  static std::shared_ptr<const WatchedMemory> of(const at::Tensor& part);
  // A part is about to be written.
  static void before_write(const at::Tensor& part) {
    if (alive_.load(std::memory_order_relaxed) > 0) count(part);
  }
  std::uint64_t writes() const { return writes_.load(std::memory_order_relaxed); }
  ~WatchedMemory();

 private:
  explicit WatchedMemory(const c10::Storage& storage);
  static void count(const at::Tensor& part);

  inline static std::atomic<std::int64_t> alive_ = 0;
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage_;  // so that no other comes to lie where it did
  std::atomic<std::uint64_t> writes_ = 0;
};

// A result that would be an alias of its operand, had that not been moved for it: writing to it would be lost, and once
// its operand is written it is out of date. Both are errors.
class LostAlias {
 public:
  // `part`: of the operand, where its memory is watched, too.
  explicit LostAlias(const at::Tensor& operand, const at::Tensor& part = {});
  bool out_of_date() const {
    return (counter_.enabled() && counter_.current_version() != version_) || (memory_ && memory_->writes() != writes_);
  }

 private:
  c10::VariableVersion counter_;  // the operand's
  std::uint32_t version_ = 0;
  std::shared_ptr<const WatchedMemory> memory_;
  std::uint64_t writes_ = 0;
};

// A tensor whose part others still have to read. It is held, so that autograd does not give its memory away; written
// meanwhile, it is an error.
class Source {
 public:
  Source() = default;
  explicit Source(const at::Tensor& tensor) : tensor_(tensor), unwritten_(LostAlias(tensor)) {}
  void check() const;
  // Nobody but this has it.
  bool is_alone() const { return tensor_.use_count() <= 1; }

 private:
  at::Tensor tensor_;
  std::optional<LostAlias> unwritten_;
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
    if (unsettled_.load(std::memory_order_acquire)) settle();
    return local_;
  }
  // The same without waiting: null where there is something to wait for or to reduce.
  const at::Tensor* local_if_settled() const { return unsettled_.load(std::memory_order_acquire) ? nullptr : &local_; }
  // What this rank's part will be, or what will be added to it where there is one.
  using Pending = std::function<at::Tensor()>;
  void set_pending(Pending pending) {
    pending_ = std::move(pending);
    unsettled_.store(true, std::memory_order_release);
  }

  // A gradient that is still as it was produced, while others may be added to it: its spec then, and its part. What was
  // reduced before stays beside it.
  struct Unreduced {
    Spec spec;
    at::Tensor local;
    std::shared_ptr<GradientBucket> bucket = {};
    Source source = {};  // whose part it is
  };
  void set_unreduced(Unreduced unreduced) {
    unreduced_ = std::move(unreduced);
    unsettled_.store(true, std::memory_order_release);
  }
  std::optional<Unreduced>& unreduced() { return unreduced_; }

  const Spec spec;
  const std::shared_ptr<const DeviceMesh> mesh;
  Provenance provenance;
  std::optional<LostAlias> lost_alias;
  // The part is expanded, and takes less memory than the spec says: it is laid out before it is viewed or written.
  bool expanded = false;
  void lay_out();
  // The autograd state for which the leaf's hook is installed.
  std::atomic<const void*> hooked = nullptr;
  std::shared_ptr<ParameterTraits> traits;
  // Whose parameter it is, or from whose gathered parameter it was taken.
  std::shared_ptr<GatherUnit> unit;

 private:
  void settle();
  void settle_one();

  // Several threads may read a tensor; whoever comes first settles it.
  std::atomic<bool> unsettled_ = false;
  std::recursive_mutex settling_;
  at::Tensor local_;
  Pending pending_;
  std::optional<Unreduced> unreduced_;
};

// An error where the payload is a lost alias that is out of date.
void check_alias(const Payload& payload, const std::string& where);

// Pre: is_dtensor(tensor).
Payload& payload_of(const at::Tensor& tensor);

// For what a parameter's unit has to do first. Every use of a payload that is not an operator's goes by here.
inline Payload& payload_for(const at::Tensor& tensor, GatherUnit::Use use) {
  if (const std::shared_ptr<GatherUnit> unit = payload_of(tensor).unit) unit->before_use(tensor, use);
  return payload_of(tensor);
}

inline bool has_payload(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->key_set().has(kDTensorKey);
}

// This rank's part as the spec says that it lies in memory, so that views of the whole are views of the part: itself,
// or a copy.
at::Tensor laid_out(const at::Tensor& local, const Spec& spec, const Dims& at);
at::Tensor copy_laid_out(const at::Tensor& local, const Spec& spec, const Dims& at);

struct WrapOptions {
  // Others hold the same memory: autograd must not add into it.
  bool shared = false;
  // What becomes of a parameter that has it.
  std::shared_ptr<ParameterTraits> traits = {};
  // A view of this tensor: takes over its keys, so that inference mode accepts it.
  const at::Tensor* base = nullptr;
  // How the tensor was made; the same value on all ranks.
  Provenance provenance = {};
  // Where the whole view would begin in the memory of the whole tensor: libtorch finds gradients of writes to views so.
  std::int64_t offset = 0;
};
// A distributed tensor of this rank's part; with autograd history of its own.
at::Tensor wrap(at::Tensor local, const Spec& spec, std::shared_ptr<const DeviceMesh> mesh,
                const WrapOptions& options = {});
at::Tensor wrap_pending(std::shared_ptr<Execution> execution, const Spec& spec, std::shared_ptr<const DeviceMesh> mesh,
                        const Provenance& provenance);

// A plain tensor that is the same on all ranks.
at::Tensor as_replica(const at::Tensor& plain, const std::shared_ptr<const DeviceMesh>& mesh,
                      const Provenance& provenance = {});

// The parameter's value is laid out otherwise, and is the same: its version, traits and autograd state stay.
void exchange(const at::Tensor& parameter, const at::Tensor& value);

// The handle, and all who hold it, now have `value`'s sizes and payload. Autograd state stays, the version is bumped.
void take_over(const at::Tensor& handle, const at::Tensor& value);

}  // namespace dtensor
