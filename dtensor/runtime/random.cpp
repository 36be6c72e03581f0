#include "dtensor/runtime/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

#include <limits>
#include <mutex>

#include "dtensor/comm/world.h"
#include "dtensor/core/error.h"
#include "dtensor/runtime/factories.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/random_device.h"
#include "dtensor/runtime/random_impl.h"

namespace dtensor {
namespace {

RandomSource& source_of(const std::shared_ptr<RankContext>& context) { return context->part<RandomSource>(); }

std::shared_ptr<RankContext> context_of_mesh(const DeviceMesh& mesh) {
  if (!mesh.context()) {
    fail_invalid("random", {.what = "the mesh belongs to no world, which is where random numbers come from",
                            .got = mesh.to_string(),
                            .advice = "init_device_mesh(world, device, mesh)"});
  }
  return mesh.context();
}

std::uint64_t draw_of(at::Generator generator) {
  if (generator.device().type() != c10::DeviceType::CPU) {
    // A device's generator draws there, and is waited for.
    const at::Tensor word = at::empty({}, at::TensorOptions().dtype(at::kLong).device(generator.device()));
    word.random_(std::numeric_limits<std::int64_t>::min(), c10::nullopt, generator);
    return static_cast<std::uint64_t>(word.item<std::int64_t>());
  }
  const std::lock_guard lock(generator.mutex());
  return generator.get<at::CPUGeneratorImpl>()->random64();
}

bool is_row_major(const at::Tensor& local) { return local.is_contiguous() && !local.is_conj() && !local.is_neg(); }

void draw_into(const at::Tensor& local, const Spec& spec, const DeviceMesh& mesh, const RandomKey& key,
               const Draw& draw) {
  const Dims& at = *mesh.coordinate();
  if (!is_row_major(local)) {
    const at::Tensor dense = at::empty(local.sizes(), local.options());
    draw_into(dense, spec, mesh, key, draw);
    local.copy_(dense);
  } else if (local.is_cpu()) {
    draw_local(key, draw, spec, at, local.data_ptr());
  } else {
    draw_on_device(key, draw, spec, at, local);
  }
}

void check(const Spec& spec, const Draw& draw, std::string_view where) {
  if (spec.has_partial()) {
    fail_invalid(where, {.what = "random values into a Partial tensor: their sum would be another distribution",
                         .got = spec.to_string(),
                         .expected = "Shard and Replicate",
                         .advice = "redistribute it first"});
  }
  if (!can_draw(draw, spec.meta().dtype())) {
    fail_unsupported(where, {.what = "there are no such values of this type",
                             .got = draw.to_string() + " into " + spec.to_string()});
  }
}

at::TensorOptions as_integers(const at::TensorOptions& options) {
  return options.has_dtype() ? options : options.dtype(at::kLong);
}

DTensor drawn(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements,
              const at::TensorOptions& options, const MaybeGenerator& generator, const Draw& draw,
              std::string_view where) {
  const RandomKey key = next_random_key(mesh, generator);
  const DTensor result = empty(sizes, mesh, placements, options.requires_grad(c10::nullopt));
  fill_random(result, key, draw, where);
  Payload& payload = payload_of(result);
  payload.provenance.made = mix(mix(stable_hash(where), payload.spec.stable_hash()), provenance_word(key));
  if (options.requires_grad()) result.requires_grad_(true);
  return result;
}

}  // namespace

RandomKey next_random_key(const DeviceMesh& mesh, const MaybeGenerator& generator) {
  RandomSource& source = source_of(context_of_mesh(mesh));
  return generator && generator->defined() ? source.next_from(draw_of(*generator)) : source.next();
}

std::uint64_t provenance_word(const RandomKey& key) { return mix(mix(mix(key.key[0], key.key[1]), key.call), 0); }

void fill_random(const at::Tensor& tensor, const RandomKey& key, const Draw& draw, std::string_view where) {
  Payload& payload = payload_of(tensor);
  check(payload.spec, draw, where);
  if (payload.mesh->contains_me()) draw_into(payload.local(), payload.spec, *payload.mesh, key, draw);
}

at::Tensor random_local(const Spec& spec, const DeviceMesh& mesh, const at::Tensor& like, const RandomKey& key,
                        const Draw& draw) {
  if (!mesh.contains_me()) return {};
  const Dims shape = spec.local_shape(*mesh.coordinate());
  const at::Tensor local =
      at::empty({shape.data(), shape.size()},
                at::TensorOptions().dtype(scalar_type_of(spec.meta().dtype())).device(like.device()));
  draw_into(local, spec, mesh, key, draw);
  return local;
}

Draw integers_of(std::int64_t low, std::int64_t high, DType dtype, std::string_view where) {
  const auto refuse = [&](const char* what) {
    fail_invalid(where, {.what = what,
                         .got = "from " + std::to_string(low) + " to " + std::to_string(high) + " as " +
                                std::string(to_string(dtype))});
  };
  if (low >= high) refuse("the range of integers is empty");
  const bool is_signed = dtype == DType::kI8 || dtype == DType::kI16 || dtype == DType::kI32 || dtype == DType::kI64;
  if (is_integral(dtype)) {
    const std::int64_t bits = dtype == DType::kBool ? 1 : element_size(dtype) * 8 - (is_signed ? 1 : 0);
    const bool fits = bits >= 63
                          ? is_signed || low >= 0
                          : low >= (is_signed ? -(std::int64_t{1} << bits) : 0) && high - 1 < (std::int64_t{1} << bits);
    if (!fits) refuse("the type does not have all of these integers");
  }
  return Draw::integers(low, static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low));
}

void manual_seed(World& world, std::uint64_t seed) { source_of(world.context()).seed(seed); }
RandomState random_state(const World& world) { return source_of(world.context()).state(); }
RandomState random_state(const DeviceMesh& mesh) { return source_of(context_of_mesh(mesh)).state(); }
void set_random_state(World& world, const RandomState& state) { source_of(world.context()).set_state(state); }

RandomStream::RandomStream(const World& world, std::uint64_t stream) : RandomStream(world.context(), stream) {}
RandomStream::RandomStream(const DeviceMesh& mesh, std::uint64_t stream)
    : RandomStream(context_of_mesh(mesh), stream) {}
RandomStream::RandomStream(std::shared_ptr<RankContext> context, std::uint64_t stream) : context_(std::move(context)) {
  RandomState state = source_of(context_).state();
  before_ = std::exchange(state.stream, stream);
  source_of(context_).set_state(state);
}
RandomStream::~RandomStream() {
  RandomState state = source_of(context_).state();
  state.stream = before_;
  source_of(context_).set_state(state);
}

RandomScope::RandomScope(const World& world, const RandomState& state) : RandomScope(world.context(), state) {}
RandomScope::RandomScope(const DeviceMesh& mesh, const RandomState& state)
    : RandomScope(context_of_mesh(mesh), state) {}
RandomScope::RandomScope(std::shared_ptr<RankContext> context, const RandomState& state)
    : context_(std::move(context)), before_(source_of(context_).state()) {
  source_of(context_).set_state(state);
}
RandomScope::~RandomScope() { source_of(context_).set_state(before_); }

DTensor rand(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements,
             const at::TensorOptions& options, const MaybeGenerator& generator) {
  return drawn(sizes, mesh, placements, options, generator, Draw::uniform(0, 1), "rand");
}

DTensor randn(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements,
              const at::TensorOptions& options, const MaybeGenerator& generator) {
  return drawn(sizes, mesh, placements, options, generator, Draw::normal(0, 1), "randn");
}

DTensor randint(std::int64_t low, std::int64_t high, at::IntArrayRef sizes, const DeviceMesh& mesh,
                const Placements& placements, const at::TensorOptions& options, const MaybeGenerator& generator) {
  const at::TensorOptions typed = as_integers(options);
  const Draw draw = integers_of(low, high, dtype_of(c10::typeMetaToScalarType(typed.dtype())), "randint");
  return drawn(sizes, mesh, placements, typed, generator, draw, "randint");
}

DTensor randperm(std::int64_t n, const DeviceMesh& mesh, const Placements& placements, const at::TensorOptions& options,
                 const MaybeGenerator& generator) {
  if (n < 0) fail_invalid("randperm", {.what = "not a number of elements", .got = std::to_string(n)});
  const at::TensorOptions typed = as_integers(options);
  if (n > 0) integers_of(0, n, dtype_of(c10::typeMetaToScalarType(typed.dtype())), "randperm");
  return drawn({n}, mesh, placements, typed, generator, Draw::permutation(n), "randperm");
}

}  // namespace dtensor
