// Any bytes to any parser: an Error or a value, never anything else; and a value prints to a text that reads back to
// it.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "dtensor/core/boxes.h"
#include "dtensor/core/error.h"
#include "dtensor/core/random_state.h"
#include "dtensor/core/spec.h"

namespace {

using namespace dtensor;

void require(bool condition) {
  if (!condition) std::abort();
}

template <class Fn>
void tolerate_errors(Fn fn) {
  try {
    fn();
  } catch (const Error& error) {
    require(error.kind() != ErrorKind::kInternal);
  }
}

void use_spec(const Spec& spec) {
  require(Spec::parse(spec.to_string()) == spec);
  const auto first = spec.mesh().coordinate(spec.mesh().rank_at(Dims(static_cast<std::size_t>(spec.mesh().ndim()))));
  require(first.has_value());
  const Spec::Local local = spec.local(*first);
  for (std::size_t d = 0; d < local.shape.size(); ++d) {
    require(local.shape[d] >= 0 && local.shape[d] <= spec.meta().shape()[d]);
    require(local.offset[d] >= 0 && local.offset[d] <= spec.meta().shape()[d]);
  }
  if (spec.meta().numel() < 10'000) require(box_of(spec, *first).numel() <= spec.meta().numel());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size > 4096) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  tolerate_errors([&] { require(parse_placements(to_string(parse_placements(text))) == parse_placements(text)); });
  tolerate_errors([&] {
    const Mesh mesh = Mesh::parse(text);
    require(Mesh::parse(mesh.to_string()) == mesh);
  });
  tolerate_errors([&] { require(TensorMeta::parse(TensorMeta::parse(text).to_string()) == TensorMeta::parse(text)); });
  tolerate_errors(
      [&] { require(RandomState::parse(RandomState::parse(text).to_string()) == RandomState::parse(text)); });
  tolerate_errors([&] { use_spec(Spec::parse(text)); });
  return 0;
}
