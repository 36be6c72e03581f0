#include "dtensor/comm/world.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/program_impl.h"
#include "dtensor/runtime/record.h"

namespace dtensor {

std::shared_ptr<const Program> ProgramCache::find_or_make(const DeviceMesh& mesh, const Plan& plan) {
  const std::lock_guard lock(mutex_);
  const auto known = programs_.find(plan);
  if (known != programs_.end()) return known->second;
  auto program =
      std::make_shared<Program>(Program{plan, {}, {}, scalar_type_of(plan.from().meta().dtype()), {}, mesh.rank(), 0});
  program->plan_hash = mix(plan.from().stable_hash(), plan.to().stable_hash());
  if (const auto at = plan.from().mesh().coordinate(mesh.rank())) {
    program->source = local_place(plan.from(), *at);
    program->source_shape = plan.from().local_shape(*at);
  }
  const auto shared = [&](const std::vector<std::int64_t>& ranks) {
    return group_of(mesh, ranks, {})->shares_memory();
  };
  for (ScheduledStep& step : schedule(plan, mesh.rank(), shared)) {
    Program::Part part{std::move(step), nullptr, {}};
    const Step& planned = plan.steps()[part.step.index];
    if (!part.step.ranks.empty() && part.step.kind != StepKind::kBroadcast) {
      part.group = group_of(mesh, part.step.ranks, group_name(planned.before.mesh(), planned.mesh_dims));
    }
    for (const ScheduledBroadcast& broadcast : part.step.broadcasts) {
      part.broadcast_groups.push_back(group_of(mesh, broadcast.ranks, "broadcast"));
    }
    program->parts.push_back(std::move(part));
  }
  if (programs_.size() >= kMostPrograms) programs_.clear();
  programs_.emplace(plan, program);
  return program;
}

}  // namespace dtensor
