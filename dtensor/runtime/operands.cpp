// The operands of a call: parameters are gathered, plain tensors become replicas, and all are on one mesh.
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <set>

#include "dtensor/core/error.h"
#include "dtensor/runtime/backward.h"
#include "dtensor/runtime/dispatch_impl.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/plain_impl.h"

namespace dtensor {
namespace {

template <class Fn>
void for_each_tensor(const LocalCall& call, Fn fn) {
  for (const std::size_t i : call.info.tensor_args) {
    const c10::IValue& value = call.arg(i);
    switch (call.info.args[i].kind) {
      case OpInfo::ArgKind::kTensor:
        if (value.isTensor() && value.toTensor().defined()) fn(value.toTensor(), i, std::size_t{0});
        break;
      case OpInfo::ArgKind::kTensorList:
        if (value.isTensorList()) {
          const auto list = value.toTensorList();
          for (std::size_t k = 0; k < list.size(); ++k) fn(static_cast<at::Tensor>(list[k]), i, k);
        }
        break;
      case OpInfo::ArgKind::kOptionalTensorList:
        if (value.isList()) {
          const auto& list = value.toListRef();
          for (std::size_t k = 0; k < list.size(); ++k) {
            if (list[k].isTensor() && list[k].toTensor().defined()) fn(list[k].toTensor(), i, k);
          }
        }
        break;
      default:
        break;
    }
  }
}

// Operators on tensors of one shape, as an optimizer's are, read a parameter as it lies: no gathering helps them.
bool reads_as_it_lies(const LocalCall& call) {
  if (call.info.returns_alias) return false;
  const at::Tensor* first = nullptr;
  bool alike = true;
  for_each_tensor(call, [&](const at::Tensor& tensor, std::size_t, std::size_t) {
    if (tensor.dim() == 0) return;
    if (first && first->sizes() != tensor.sizes()) alike = false;
    if (!first) first = &tensor;
  });
  return alike;
}

// Is its part what is meant? What it is used with is of its own type then (activations are of the type that it is
// gathered in, where that is another); and where it is whole already, and no other for it, also lies as its part does.
bool means_its_part(const LocalCall& call, const at::Tensor& parameter) {
  const auto& traits = payload_of(parameter).traits;
  if (!traits || !traits->home) return true;
  const Spec &now = payload_of(parameter).spec, &home = *traits->home;
  bool own_type = true, lies_so = true;
  for_each_tensor(call, [&](const at::Tensor& tensor, std::size_t, std::size_t) {
    if (tensor.dim() == 0 || !has_payload(tensor) || payload_of(tensor).unit) return;
    const Spec& other = payload_of(tensor).spec;
    own_type = own_type && other.meta().dtype() == home.meta().dtype();
    lies_so = lies_so && other.dims() == home.dims();
  });
  return own_type && (lies_so || now == home || now.meta().dtype() != home.meta().dtype());
}

void replace_argument(LocalCall& call, std::size_t arg, std::size_t item, const at::Tensor& tensor) {
  c10::IValue& value = call.arg(arg);
  if (call.info.args[arg].kind == OpInfo::ArgKind::kTensor) {
    value = tensor;
  } else if (value.isTensorList()) {
    value = value.toTensorList().copy();
    value.toTensorList().set(item, tensor);
  }
}

// What is read of a unit that is written, too: parameters are read as they lie, views are copied while they are there.
void read_before_writing(LocalCall& call, const std::set<const GatherUnit*>& written) {
  struct View {
    at::Tensor tensor;
    std::size_t arg, item;
  };
  std::vector<View> views;
  for_each_tensor(call, [&](const at::Tensor& tensor, std::size_t arg, std::size_t item) {
    if (!has_payload(tensor) || call.info.args[arg].written) return;
    const std::shared_ptr<GatherUnit> unit = payload_of(tensor).unit;
    if (unit && written.count(unit.get()) && unit->comes_and_goes(tensor)) views.push_back({tensor, arg, item});
  });
  for (const View& view : views) replace_argument(call, view.arg, view.item, view.tensor.clone());
}

// All units that the call needs, before any payload is looked at: gathering one changes the payloads of others.
void gather_units(LocalCall& call) {
  using Use = GatherUnit::Use;
  std::set<const GatherUnit*> writes;
  for_each_tensor(call, [&](const at::Tensor& tensor, std::size_t arg, std::size_t) {
    if (has_payload(tensor) && call.info.args[arg].written) writes.insert(payload_of(tensor).unit.get());
  });
  writes.erase(nullptr);
  if (!writes.empty()) read_before_writing(call, writes);
  const GatherUnit::OneCall one_call;
  const bool may_look = reads_as_it_lies(call);
  struct Read {
    at::Tensor tensor;
    std::size_t arg, item;
  };
  std::vector<Read> reads;
  for (const bool written : {true, false}) {
    for_each_tensor(call, [&](const at::Tensor& tensor, std::size_t arg, std::size_t item) {
      if (!has_payload(tensor) || !payload_of(tensor).unit || call.info.args[arg].written != written) return;
      const bool as_it_lies =
          writes.count(payload_of(tensor).unit.get()) > 0 || (may_look && means_its_part(call, tensor));
      static_cast<void>(payload_for(tensor, written ? Use::kWrite : as_it_lies ? Use::kLook : Use::kRead));
      if (!written && !as_it_lies) reads.push_back({tensor, arg, item});
    });
  }
  for (const Read& read : reads) {
    const at::Tensor gathered = payload_of(read.tensor).unit->gathered(read.tensor);
    if (!gathered.is_same(read.tensor)) replace_argument(call, read.arg, read.item, gathered);
  }
}

}  // namespace

void collect(LocalCall& call) {
  bool units = false;
  for_each_tensor(call, [&](const at::Tensor& tensor, std::size_t, std::size_t) {
    units = units || (has_payload(tensor) && payload_of(tensor).unit);
  });
  if (units) gather_units(call);
  for_each_tensor(call, [&](const at::Tensor& tensor, std::size_t arg, std::size_t item) {
    Payload* payload = has_payload(tensor) ? &payload_of(tensor) : nullptr;
    if (payload && !call.mesh) call.mesh = payload->mesh;
    if (payload && (call.info.returns_alias || call.info.args[arg].written)) payload->lay_out();
    if (payload && at::GradMode::is_enabled()) bring_gradient_home(tensor, *payload);
    if (payload && payload->lost_alias && call.info.args[arg].written) {
      fail_invalid(call.info.name,
                   {.what = "writing to a view that had to be copied: what it was taken from would not see it",
                    .got = payload->spec.to_string(),
                    .advice = "redistribute before taking the view, or clone() it"});
    }
    if (payload && payload->lost_alias) check_alias(*payload, call.info.name);
    call.operands.push_back({tensor, payload, arg, item});
  });
  if (!call.mesh) return;
  choose_mesh(call);
  for (Operand& operand : call.operands) {
    if (!operand.payload) {
      take_plain(call, operand);
    } else if (operand.payload->mesh != call.mesh) {
      take_from_other_mesh(call, operand);
    }
  }
}

}  // namespace dtensor
