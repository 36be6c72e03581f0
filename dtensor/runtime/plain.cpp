// Plain tensors among distributed ones.
#include "dtensor/runtime/plain_impl.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <unordered_map>

#include "dtensor/core/error.h"
#include "dtensor/runtime/backward.h"
#include "dtensor/runtime/dispatch.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/provenance.h"
#include "dtensor/runtime/sub_mesh.h"
#include "dtensor/runtime/tensor.h"

namespace dtensor {
namespace {

std::atomic<PlainOperands> process_mode = PlainOperands::kReplicate;
thread_local int thread_mode = -1;  // -1: as the process

bool are_refused() {
  const PlainOperands mode =
      thread_mode < 0 ? process_mode.load(std::memory_order_relaxed) : static_cast<PlainOperands>(thread_mode);
  return mode == PlainOperands::kRefuse;
}

[[noreturn]] void refuse_plain(const LocalCall& call, const at::Tensor& plain, const OpInfo::Arg& arg) {
  const bool written = arg.written;
  fail_invalid(call.info.name,
               {.what = written ? "a plain tensor would have to be written with a distributed result"
                                : "a plain tensor among distributed ones",
                .got = meta_of(plain).to_string() + " as argument \"" + arg.name + "\"",
                .expected = "distributed tensors or numbers, since this program refuses plain operands",
                .advice = written ? "full_tensor() of the result, or PlainOperandsGuard(PlainOperands::kReplicate)"
                                  : "distribute_tensor(tensor, mesh, placements), or "
                                    "PlainOperandsGuard(PlainOperands::kReplicate) where it is equal on all ranks"});
}

// The tensors that have the hook. A weak reference keeps the address from being used again.
class HookedTensors {
 public:
  // Was it not there yet?
  bool insert(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    if (all_.size() >= next_purge_) purge();
    return all_.try_emplace(tensor.unsafeGetTensorImpl(), WeakTensor(tensor.getIntrusivePtr())).second;
  }

 private:
  void purge() {
    std::erase_if(all_, [](const auto& entry) { return entry.second.expired(); });
    next_purge_ = std::max<std::size_t>(1024, 2 * all_.size());
  }
  std::mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, WeakTensor> all_;
  std::size_t next_purge_ = 1024;
};

// A plain tensor's gradient is plain, too: the full one.
void keep_gradient_plain(const at::Tensor& plain) {
  if (!plain.requires_grad() || !at::GradMode::is_enabled() || in_backward()) return;
  static auto* hooked = new HookedTensors;
  if (!hooked->insert(plain)) return;
  plain.register_hook(
      [](const at::Tensor& gradient) { return has_payload(gradient) ? DTensor(gradient).full_tensor() : gradient; });
}

}  // namespace

void take_plain(LocalCall& call, Operand& operand) {
  const OpInfo::Arg& arg = call.info.args[operand.arg];
  keep_gradient_plain(operand.tensor);
  if (operand.tensor.dim() == 0 && !arg.written) return;
  const bool inside = in_backward();  // libtorch made it
  if (!inside && are_refused() && !(call.info.name == "aten::copy_" && !arg.written)) {
    refuse_plain(call, operand.tensor, arg);
  }
  Provenance provenance;
  if (!inside && call.info.reads(operand.arg)) {
    provenance.made = mix(call.info.identity, values_of_plain(operand.tensor));
    note_made(*call.mesh, provenance.made, call.info.plain_names[operand.arg], 0, 0);
  }
  operand.plain = operand.tensor;
  operand.tensor = as_replica(operand.tensor, call.mesh, provenance);
  operand.payload = &payload_of(operand.tensor);
}

void choose_mesh(LocalCall& call) {
  for (const Operand& operand : call.operands) {
    if (!operand.payload || operand.payload->mesh == call.mesh || operand.payload->mesh->ndim() <= call.mesh->ndim() ||
        operand.payload->mesh->context() != call.mesh->context()) {
      continue;
    }
    if (dims_within(*call.mesh, *operand.payload->mesh)) call.mesh = operand.payload->mesh;
  }
}

void take_from_other_mesh(const LocalCall& call, Operand& operand) {
  if (operand.payload->mesh->context() == call.mesh->context()) {
    if (*operand.payload->mesh == *call.mesh) return;
    const auto dims = dims_within(*operand.payload->mesh, *call.mesh);
    if (!dims) return;  // the rules say what is wrong
    operand.plain = operand.tensor;
    operand.tensor = lift(operand.tensor, call.mesh, *dims);
    operand.payload = &payload_of(operand.tensor);
    return;
  }
  const bool other_rank = operand.payload->mesh->rank() != call.mesh->rank();
  fail_invalid(
      call.info.name,
      {.what = other_rank ? "the operands belong to different ranks" : "the operands belong to different worlds",
       .got = "argument \"" + call.info.args[operand.arg].name + "\" of rank " +
              std::to_string(operand.payload->mesh->rank()) + " beside one of rank " +
              std::to_string(call.mesh->rank()),
       .expected = "tensors of one rank of one world",
       .advice = "each rank works on the tensors that it made itself; redistribute moves data between ranks"});
}

bool is_number_in_key(KeyUse use, const c10::IValue& value) {
  return use == KeyUse::kPlain && !value.isDouble() && !value.isComplexDouble();
}

bool is_one(const c10::IValue& value) {
  return (value.isInt() && value.toInt() == 1) || (value.isDouble() && value.toDouble() == 1);
}

PlainOperands set_plain_operands(PlainOperands mode) { return process_mode.exchange(mode); }

PlainOperandsGuard::PlainOperandsGuard(PlainOperands mode)
    : before_(std::exchange(thread_mode, static_cast<int>(mode))) {}
PlainOperandsGuard::~PlainOperandsGuard() { thread_mode = before_; }

}  // namespace dtensor
