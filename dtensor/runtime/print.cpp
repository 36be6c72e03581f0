// `std::cout << tensor`, for any handle. libtorch's operator<< is an inline function that calls at::print, and
// at::print reads memory, which a distributed tensor does not have. So at::print is defined here too: the linker finds
// this one first, and it hands everything that is not distributed on to libtorch's.
#include <ATen/core/Formatting.h>
#include <dlfcn.h>

#include <ostream>

#include "dtensor/runtime/payload.h"
#include "dtensor/runtime/print_impl.h"
#include "dtensor/runtime/tensor.h"

namespace dtensor {
namespace {

using Print = std::ostream& (*)(std::ostream&, const at::Tensor&, std::int64_t);

// libtorch's at::print: the next one after ours.
Print libtorch_print() {
  static const Print found = [] {
    // int64_t is `long` on Linux, `long long` elsewhere.
    void* function = dlsym(RTLD_NEXT, "_ZN2at5printERSoRKNS_6TensorEl");
    if (!function) function = dlsym(RTLD_NEXT, "_ZN2at5printERSoRKNS_6TensorEx");
    return reinterpret_cast<Print>(function);
  }();
  return found;
}

std::ostream& print_plain(std::ostream& out, const at::Tensor& tensor, std::int64_t line_size) {
  if (const Print print = libtorch_print()) return print(out, tensor, line_size);
  return out << "[ " << tensor.toString() << tensor.sizes() << " ]";
}

// Empty where the values can be printed.
std::string why_no_values(Payload& payload) {
  if (payload.lost_alias && payload.lost_alias->out_of_date()) {
    return "a copy of a view, out of date: what it was taken from has been written since";
  }
  const at::Tensor* local = payload.local_if_settled();
  if (!local) return "its values are still on their way, or to be reduced: the first use waits for them";
  if (!local->defined()) return "it has nothing of it: the rank is outside the mesh";
  if (local->numel() > 0 && local->has_storage() && local->storage().data() == nullptr) {
    return "its values were gathered for an operator, and are let go";
  }
  return "";
}

std::ostream& print_distributed(std::ostream& out, const at::Tensor& tensor, std::int64_t line_size) {
  Payload& payload = payload_of(tensor);
  out << "DTensor " << payload.spec.to_string() << ", on rank " << payload.mesh->rank();
  if (const std::string reason = why_no_values(payload); !reason.empty()) return out << " (" << reason << ")";
  return print_plain(out << '\n', payload.local_if_settled()->detach(), line_size);
}

}  // namespace

std::ostream& print_local(std::ostream& out, const at::Tensor& tensor) {
  if (!tensor.defined()) return out << "DTensor (undefined)";
  return print_distributed(out, tensor, 80);
}

}  // namespace dtensor

namespace at {

std::ostream& print(std::ostream& stream, const Tensor& tensor, std::int64_t linesize) {
  return dtensor::has_payload(tensor) ? dtensor::print_distributed(stream, tensor, linesize)
                                      : dtensor::print_plain(stream, tensor, linesize);
}

}  // namespace at
