#include <algorithm>
#include <bit>

#include "dtensor/core/checked.h"
#include "dtensor/core/propagate_impl.h"

namespace dtensor {

MoveFloor::MoveFloor(const Mesh& mesh, const CostModel& cost) : step_ps_(cost.constants().step_ps) {
  for (std::int64_t m = 0; m < mesh.ndim(); ++m) {
    const auto size = static_cast<std::uint64_t>(mesh.shape()[m]);
    const Link link = cost.link_of(mesh, m);
    rounds_ps_.push_back(scaled(std::bit_width(size) - 1, link.message_ps, 1));
    if (size == 1) continue;
    fastest_ = {std::min(fastest_.message_ps, link.message_ps), std::min(fastest_.kib_ps, link.kib_ps)};
  }
}

std::int64_t MoveFloor::time(const Dims& from, const Dims& to, std::int64_t element_size, bool reduces,
                             std::uint32_t merged) const {
  std::int64_t wanted = element_size;
  std::int64_t kept = reduces ? 0 : element_size;
  for (std::size_t d = 0; d < to.size(); ++d) {
    wanted *= to[d];
    kept *= std::min(from[d], to[d]);
  }
  if (wanted == kept) return 0;
  std::int64_t rounds = 0;
  for (std::size_t m = 0; m < rounds_ps_.size(); ++m) {
    if (merged >> m & 1) rounds = saturating_add(rounds, rounds_ps_[m]);
  }
  return saturating_add(saturating_add(step_ps_, std::max(rounds, fastest_.message_ps)),
                        scaled(wanted - kept, fastest_.kib_ps, 1024));
}

Dims first_local_shape(const Spec& spec) {
  return spec.local_shape(Dims(static_cast<std::size_t>(spec.mesh().ndim())));
}

std::vector<Spec> stops_between(const Spec& from, const Spec& to) {
  if (!why_not(from, to)) return {to};
  if (!(from.mesh() == to.mesh())) return {};
  Partials partials = to.partials();
  for (std::size_t m = 0; m < partials.size(); ++m) {
    if (partials[m] != from.partials()[m]) partials[m].reset();
  }
  const auto middle = Spec::from_dims(to.meta(), to.mesh(), to.dims(), partials);
  if (!middle || why_not(from, *middle) || why_not(*middle, to)) return {};
  return {*middle, to};
}

std::optional<Score> score_of(const OpCall& call, const Way& way, std::size_t index, const CallForm& form,
                              const CostModel& cost) {
  Score score{way.compute, 0, false, way.new_partials, way.output_bytes, index};
  const PlanOptions options{.cost = cost};
  const auto add_plan = [&](const Spec& from, const Spec& to, bool self) {
    if (from == to) return true;
    const std::vector<Spec> stops = stops_between(from, to);
    const Spec* at = &from;
    for (const Spec& stop : stops) {
      score.time = saturating_add(score.time, make_plan(*at, stop, options).time());
      at = &stop;
    }
    score.moved += 1;  // also where it is free: on one rank the choice is what it would be on more
    score.self_moved = score.self_moved || self;
    return !stops.empty();
  };
  for (std::size_t i = 0; i < call.operands.size(); ++i) {
    if (call.operands[i] && !add_plan(*call.operands[i], *way.decision.inputs[i], i == 0)) return std::nullopt;
  }
  const std::size_t written = form.out ? std::min(call.outputs.size(), call.operands.size()) : 0;
  for (std::size_t k = 0; k < written; ++k) {
    const auto& target = call.operands[call.operands.size() - written + k];
    const auto& result = way.decision.outputs[k];
    const bool alike = target && result && target->meta().shape() == result->meta().shape() &&
                       target->meta().dtype() == result->meta().dtype();
    if (alike && !add_plan(*result, *target, false)) return std::nullopt;
  }
  return score;
}

}  // namespace dtensor
