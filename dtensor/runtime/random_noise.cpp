// Dropout and its relatives: a tensor times random noise.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/native_dropout.h>
#include <torch/library.h>

#include <cmath>

#include "dtensor/core/error.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/random_impl.h"
#include "dtensor/runtime/record.h"
#include "dtensor/runtime/redistribute.h"

namespace dtensor {
namespace {

void check_probability(const std::string& name, double p) {
  if (p >= 0 && p <= 1) return;
  fail_invalid(
      name,
      {.what = "the probability of dropping is not a probability", .got = std::to_string(p), .expected = "0 to 1"});
}

// One value for each sample and channel: [N, C, 1, …], cut as the input's first two dims are.
at::Tensor feature_noise(const at::Tensor& input) {
  const Payload& payload = payload_of(input);
  const DimLayouts& layouts = payload.spec.dims();
  if (layouts.size() < 2) {
    fail_invalid(
        "feature_dropout",
        {.what = "there are no channels to drop", .got = payload.spec.to_string(), .expected = "at least 2 dims"});
  }
  Dims shape(layouts.size(), 1);
  DimLayouts dims;
  for (std::size_t d = 0; d < layouts.size(); ++d) {
    if (d < 2) shape[d] = payload.spec.meta().shape()[d];
    dims.push_back(d < 2 ? layouts[d] : DimLayout{Factor{1, {}}});
  }
  const TensorMeta meta(shape, payload.spec.meta().dtype());
  const Spec spec = expect_spec(
      Spec::from_dims(meta, payload.spec.mesh(), dims, Partials(payload.spec.partials().size())), "dropout");
  at::Tensor local;
  if (payload.mesh->contains_me()) {
    const Dims mine = spec.local_shape(*payload.mesh->coordinate());
    local = at::empty({mine.data(), mine.size()}, payload_of(input).local().options());
  }
  return wrap(std::move(local), spec, payload.mesh);
}

struct Noisy {
  const char* name;
  bool feature;
  bool alpha;
  bool in_place;
};

// Written with operators that are differentiable; the noise is not.
at::Tensor with_noise(const Noisy& how, const at::Tensor& input, double p, bool train) {
  check_probability(how.name, p);
  if (!train || p == 0 || input.numel() == 0) return input;
  const auto times = [&](const auto& factor) { return how.in_place ? input.mul_(factor) : input.mul(factor); };
  if (!how.feature && !how.alpha && !how.in_place) return std::get<0>(at::native_dropout(input, p, true));
  if (p == 1) return times(0);
  at::Tensor noise;
  at::Tensor added;
  {
    const at::NoGradGuard no_grad;
    noise = how.feature ? feature_noise(input) : at::empty_like(input);
    noise.bernoulli_(1 - p);
    if (how.alpha) {
      // Keeps mean and variance of what a self-normalising network has: dropped values become -alpha.
      constexpr double kAlpha = 1.7580993408473766;
      const double a = 1 / std::sqrt((kAlpha * kAlpha * p + 1) * (1 - p));
      added = noise.add(-1).mul_(kAlpha * a).add_(kAlpha * a * p);
      noise.mul_(a);
    } else {
      noise.div_(1 - p);
    }
  }
  const at::Tensor result = times(noise);
  return added.defined() ? result.add_(added) : result;
}

template <const Noisy& how>
void noisy_kernel(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const bool train = torch::jit::pop(*stack).toBool();
  const double p = torch::jit::pop(*stack).toDouble();
  const at::Tensor input = torch::jit::pop(*stack).toTensor();
  stack->emplace_back(with_noise(how, input, p, train));
}

constexpr Noisy kDropout{"dropout", false, false, false};
constexpr Noisy kDropoutIn{"dropout_", false, false, true};
constexpr Noisy kFeature{"feature_dropout", true, false, false};
constexpr Noisy kFeatureIn{"feature_dropout_", true, false, true};
constexpr Noisy kAlpha{"alpha_dropout", false, true, false};
constexpr Noisy kAlphaIn{"alpha_dropout_", false, true, true};
constexpr Noisy kFeatureAlpha{"feature_alpha_dropout", true, true, false};
constexpr Noisy kFeatureAlphaIn{"feature_alpha_dropout_", true, true, true};

template <const Noisy& how>
void add_kernel(torch::Library& library) {
  library.impl(how.name, torch::CppFunction::makeFromBoxedFunction<&noisy_kernel<how>>());
}

}  // namespace

void run_native_dropout(RandomCall& call) {
  const at::Tensor input = call.tensor("input");
  const double p = call.number("p");
  check_probability(call.name(), p);
  const Spec spec = home_of(payload_of(input).spec);
  static const std::string reason = "what is dropped of a sum is dropped of the whole";
  const CommCause cause(call.name(), reason);
  const at::Tensor whole = redistribute_now(input, spec, call.shared_mesh(), {});
  const at::Tensor& local = payload_of(whole).local();
  const bool train = !call.has("train") || call.at("train").toBool();
  const at::Tensor mask =
      wrap(local.defined() ? at::empty_like(local, at::kBool) : local, with_dtype(spec, at::kBool), call.shared_mesh());
  fill_random(mask, call.key(), Draw::bernoulli(train ? 1 - p : 1), call.name());
  at::Tensor result;
  if (local.defined()) {
    result = train ? local.mul(payload_of(mask).local()).mul_(p == 1 ? 0 : 1 / (1 - p)) : local.clone();
  }
  const at::Tensor kept = wrap(std::move(result), spec, call.shared_mesh());
  if (call.has("out0")) {
    call.finish({call.tensor("out0").copy_(kept), call.tensor("out1").copy_(mask)});
  } else {
    call.finish({kept, mask});
  }
}

void run_rrelu_with_noise(RandomCall& call) {
  const at::Tensor self = call.tensor("self");
  const at::Tensor noise = call.tensor("noise");
  const double lower = call.number("lower");
  const double upper = call.number("upper");
  at::Tensor result;
  if (call.at("training").toBool()) {
    // The noise is written where it lies, so the work is done there.
    const Spec& spec = payload_of(noise).spec;
    static const std::string reason = "the noise lies otherwise";
    const CommCause cause(call.name(), reason);
    const at::Tensor input = redistribute_now(self, with_dtype(spec, self.scalar_type()), call.shared_mesh(), {});
    fill_random(noise, call.key(), Draw::uniform(lower, upper), call.name());
    at::Tensor local = payload_of(input).local();
    if (local.defined()) {
      const at::Tensor& factors = payload_of(noise).local();
      factors.masked_fill_(local.gt(0), 1);
      local = local.mul(factors);
    }
    result = wrap(std::move(local), payload_of(input).spec, call.shared_mesh());
  } else {
    result = at::leaky_relu(self, (lower + upper) / 2);
  }
  if (call.is_in_place()) {
    self.copy_(result);
    result = self;
  } else if (call.has("out")) {
    result = call.tensor("out").copy_(result);
  }
  call.finish({result});
}

void register_noise() {
  // With autograd above, and without it (inference mode).
  for (const auto key : {c10::DispatchKey::AutogradPrivateUse3, kDTensorKey}) {
    auto* library = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    add_kernel<kDropout>(*library);
    add_kernel<kDropoutIn>(*library);
    add_kernel<kFeature>(*library);
    add_kernel<kFeatureIn>(*library);
    add_kernel<kAlpha>(*library);
    add_kernel<kAlphaIn>(*library);
    add_kernel<kFeatureAlpha>(*library);
    add_kernel<kFeatureAlphaIn>(*library);
  }
}

}  // namespace dtensor
