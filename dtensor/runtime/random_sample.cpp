// Values whose distribution stands in other tensors: Bernoulli, normal, multinomial.
#include <ATen/ExpandUtils.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/nextafter.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros_like.h>

#include "dtensor/core/error.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/random_impl.h"
#include "dtensor/runtime/record.h"
#include "dtensor/runtime/redistribute.h"

namespace dtensor {
namespace {

// A tensor that broadcasts to the shape of `like`, laid out as it is, row-major.
at::Tensor laid_out_as(const at::Tensor& tensor, const Spec& like, const RandomCall& call) {
  const at::Tensor whole = tensor.expand({like.meta().shape().data(), like.meta().shape().size()});
  const TensorMeta meta(like.meta().shape(), payload_of(tensor).spec.meta().dtype());
  const Spec spec = expect_spec(Spec::from_dims(meta, like.mesh(), like.dims(), like.partials()), call.name());
  return redistribute_now(whole, spec, call.shared_mesh(), {});
}

Spec replicated(const Dims& shape, DType dtype, const Mesh& mesh) {
  return Spec::make({shape, dtype}, mesh, Placements(static_cast<std::size_t>(mesh.ndim()), Replicate()));
}

at::Tensor new_tensor(const Spec& spec, const RandomCall& call, const at::Tensor& like) {
  at::Tensor local;
  if (call.mesh().contains_me()) {
    const Dims shape = spec.local_shape(*call.mesh().coordinate());
    local = at::empty({shape.data(), shape.size()},
                      at::TensorOptions().dtype(scalar_type_of(spec.meta().dtype())).device(like.device()));
  }
  return wrap(std::move(local), spec, call.shared_mesh());
}

void give(RandomCall& call, const at::Tensor& result) {
  call.finish({call.has("out") ? call.tensor("out").copy_(result) : result});
}

// The values of whole rows: [rows, n] indices of this rank's rows of probabilities.
at::Tensor without_replacement(const at::Tensor& weights, const Spec& spec, const RandomCall& call, std::int64_t n) {
  // Of exponential arrival times with these rates the first ones are such a sample.
  const at::Tensor times = random_local(spec, call.mesh(), weights, call.key(), Draw::exponential(1));
  const at::Tensor race = weights.div(times);
  return n == 1 ? at::argmax(race, -1, true) : std::get<1>(at::topk(race, n, -1));
}

at::Tensor with_replacement(const at::Tensor& weights, const Spec& result, const RandomCall& call) {
  const at::Tensor units =
      random_local(with_dtype(result, at::kDouble), call.mesh(), weights, call.key(), Draw::uniform(0, 1));
  const at::Tensor sums = at::cumsum(weights.to(at::kDouble), -1);
  const at::Tensor total = sums.narrow(-1, sums.size(-1) - 1, 1);
  // Below the total even where the product is rounded up to it.
  const at::Tensor at = at::minimum(units.mul(total), at::nextafter(total, at::zeros_like(total)));
  return at::searchsorted(sums, at, /*out_int32=*/false, /*right=*/true);
}

}  // namespace

void run_bernoulli_of(RandomCall& call) {
  const at::Tensor self = call.tensor("self");
  const at::Tensor p = call.has("p") ? call.tensor("p") : self;
  at::Tensor target;
  if (call.is_in_place()) {
    target = self;
  } else {
    target = call.has("out") ? call.tensor("out") : at::empty_like(self);
  }
  const Spec& spec = payload_of(target).spec;
  if (spec.has_partial()) {
    fail_invalid(call.name(), {.what = "random values into a Partial tensor: their sum would be another distribution",
                               .got = spec.to_string(),
                               .advice = "redistribute it first"});
  }
  static const std::string reason = "each value beside its probability";
  const CommCause cause(call.name(), reason);
  const at::Tensor probabilities = laid_out_as(p, spec, call);
  const at::Tensor& local = payload_of(probabilities).local();
  if (local.defined()) {
    const at::Tensor units = random_local(with_dtype(payload_of(probabilities).spec, at::kDouble), call.mesh(), local,
                                          call.key(), {.kind = Draw::Kind::kUnit32});
    payload_of(target).local().copy_(units.lt(local.to(at::kDouble)));
  }
  call.finish({target});
}

void run_normal_of(RandomCall& call) {
  const bool mean_is_tensor = call.at("mean").isTensor();
  const bool std_is_tensor = call.at("std").isTensor();
  const at::Tensor first = call.tensor(mean_is_tensor ? "mean" : "std");
  const at::Tensor second = call.tensor(std_is_tensor ? "std" : "mean");
  const auto sizes = at::infer_size(first.sizes(), second.sizes());
  const Dims shape(sizes.begin(), sizes.end());
  // Where an operand lies that has the result's shape.
  const DType dtype = dtype_of(first.scalar_type());
  Spec spec = replicated(shape, dtype, call.mesh());
  for (const at::Tensor& operand : {second, first}) {
    const Spec& known = payload_of(operand).spec;
    if (known.meta().shape() != shape) continue;
    spec = expect_spec(Spec::from_dims({shape, dtype}, known.mesh(), known.dims(), Partials(known.partials().size())),
                       call.name());
  }
  at::Tensor result = new_tensor(spec, call, payload_of(first).local().defined() ? payload_of(first).local() : first);
  fill_random(result, call.key(), Draw::normal(0, 1), call.name());
  result = std_is_tensor ? result.mul(call.tensor("std")) : result.mul(call.number("std"));
  result = mean_is_tensor ? result.add(call.tensor("mean")) : result.add(call.number("mean"));
  give(call, result);
}

void run_multinomial(RandomCall& call) {
  const at::Tensor self = call.tensor("self");
  const std::int64_t n = call.integer("num_samples");
  const bool replacement = call.at("replacement").toBool();
  const Spec& spec = payload_of(self).spec;
  const Dims& shape = spec.meta().shape();
  const auto refuse = [&](const char* what, const std::string& expected) {
    fail_invalid(call.name(),
                 {.what = what, .got = std::to_string(n) + " of " + spec.to_string(), .expected = expected});
  };
  if (shape.empty() || shape.size() > 2) refuse("probabilities are a row or rows of numbers", "1 or 2 dims");
  if (!is_floating(spec.meta().dtype())) refuse("probabilities are floating numbers", "a floating type");
  if (n <= 0) refuse("cannot draw so few", "at least 1");
  if (shape.back() == 0) refuse("there is nothing to draw from", "at least 1 column");
  if (!replacement && n > shape.back())
    refuse("cannot draw more than there are without replacement", "at most as many");
  // Whole rows; the rows lie as they do.
  DimLayouts dims = spec.dims();
  dims.back() = DimLayout{Factor{shape.back(), {}}};
  const Partials none(spec.partials().size());
  const Spec whole = expect_spec(Spec::from_dims({shape, spec.meta().dtype()}, spec.mesh(), dims, none), call.name());
  Dims drawn = shape;
  drawn.back() = n;
  dims.back() = DimLayout{Factor{n, {}}};
  const Spec out = expect_spec(Spec::from_dims({drawn, DType::kI64}, spec.mesh(), dims, none), call.name());
  static const std::string reason = "a sample needs all of its row's probabilities";
  const CommCause cause(call.name(), reason);
  at::Tensor local = payload_of(redistribute_now(self, whole, call.shared_mesh(), {})).local();
  if (local.defined()) {
    // The race is run in single precision at least.
    const bool wide = spec.meta().dtype() == DType::kF64;
    const auto type = wide ? at::kDouble : at::kFloat;
    if (local.numel() == 0) {
      local = at::empty({0, n}, local.options().dtype(at::kLong));
    } else if (replacement && n > 1) {
      local = with_replacement(local, out, call);
    } else {
      local = without_replacement(local.to(type), with_dtype(whole, type), call, n);
    }
  }
  give(call, wrap(std::move(local), out, call.shared_mesh()));
}

}  // namespace dtensor
