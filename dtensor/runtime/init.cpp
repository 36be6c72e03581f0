#include "dtensor/runtime/init.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_qr.h>
#include <torch/nn/init.h>

#include <cmath>
#include <tuple>

#include "dtensor/core/error.h"
#include "dtensor/runtime/payload.h"
#include "dtensor/runtime/random.h"

namespace dtensor {
namespace {

// The same on every rank, drawn from the world's state.
using Drawn = DTensor (*)(at::IntArrayRef, const DeviceMesh&, const Placements&, const at::TensorOptions&,
                          const MaybeGenerator&);
at::Tensor drawn(Drawn draw, at::IntArrayRef sizes, const at::Tensor& like) {
  const DeviceMesh& mesh = *payload_of(like).mesh;
  const Placements everywhere(static_cast<std::size_t>(mesh.ndim()), Replicate());
  const at::ScalarType type = like.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return draw(sizes, mesh, everywhere, type, {}).to_local();
}

void check_dims(const at::Tensor& tensor, const char* where, bool more) {
  if (tensor.dim() == 2 || (more && tensor.dim() > 2)) return;
  fail_invalid(where, {.what = "a tensor that is no matrix",
                       .got = payload_of(tensor).spec.to_string(),
                       .expected = more ? "two dims or more" : "two dims"});
}

}  // namespace

void orthogonal_(const at::Tensor& tensor, double gain) {
  if (!has_payload(tensor)) {
    torch::nn::init::orthogonal_(tensor, gain);
    return;
  }
  check_dims(tensor, "orthogonal_", true);
  const at::NoGradGuard no_grad;
  const std::int64_t rows = tensor.size(0);
  if (tensor.numel() == 0) return;
  const std::int64_t columns = tensor.numel() / rows;
  at::Tensor flat = drawn(&randn, {rows, columns}, tensor);
  if (!flat.defined()) return;  // a rank outside the mesh
  if (rows < columns) flat = flat.t();
  at::Tensor q, r;
  std::tie(q, r) = at::linalg_qr(flat.contiguous());
  q = q * r.diagonal().sign();  // otherwise not all of them would be equally likely
  if (rows < columns) q = q.t();
  tensor.copy_((q * gain).contiguous().view(tensor.sizes()).to(tensor.scalar_type()));
}

void sparse_(const at::Tensor& tensor, double sparsity, double std) {
  if (!has_payload(tensor)) {
    torch::nn::init::sparse_(tensor, sparsity, std);
    return;
  }
  check_dims(tensor, "sparse_", false);
  if (!(sparsity >= 0 && sparsity <= 1)) {
    fail_invalid("sparse_",
                 {.what = "a part of the values", .got = std::to_string(sparsity), .expected = "from 0 to 1"});
  }
  const at::NoGradGuard no_grad;
  const auto zeros = static_cast<std::int64_t>(std::ceil(sparsity * static_cast<double>(tensor.size(0))));
  const at::Tensor values = drawn(&randn, tensor.sizes(), tensor);
  const at::Tensor keys = drawn(&rand, tensor.sizes(), tensor);
  if (!values.defined()) return;
  // The rows with the least keys of their column.
  const at::Tensor place = keys.argsort(std::int64_t{0}, false).argsort(std::int64_t{0}, false);
  tensor.copy_(values.mul(std).masked_fill(place.lt(zeros), 0).to(tensor.scalar_type()));
}

}  // namespace dtensor
