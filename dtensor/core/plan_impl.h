#pragma once

#include "dtensor/core/plan.h"

namespace dtensor {

// A plan before it is interned: found by its key, and emptied when it is the first with it.
struct PlanDraft {
  PlanData& made;
  friend bool operator==(const PlanKey& key, const PlanDraft& draft) { return key == draft.made.key(); }
};

// The mesh dims of a step on one mesh, by what they do before and after.
struct StepRoles {
  MeshDims holders;   // Replicate, then cut: any index has it
  MeshDims takers;    // cut, then Replicate: every index wants it
  MeshDims common;    // neither changes what is held: talk within one's own index
  MeshDims parts;     // Partial, reduced: every index has a part
  MeshDims everyone;  // those of `parts` that are Replicate afterwards
  std::int64_t num_holders = 1;
  std::int64_t num_takers = 1;
  std::int64_t num_parts = 1;
};
StepRoles roles_of(const Step& step);

// The mesh dims that cut a tensor dim (any tensor dim) into more than one piece, as a mask.
std::uint32_t cut_mask(const DimLayout& dim);
std::uint32_t cut_mask(const Spec& spec);

MeshDims dims_of(std::uint32_t mask);
std::int64_t size_along(const Dims& shape, const MeshDims& dims);
// The row-major index of a coordinate among the chosen dims, and back.
std::int64_t index_along(const Dims& at, const Dims& shape, const MeshDims& dims);
void place_along(Dims& at, const Dims& shape, const MeshDims& dims, std::int64_t index);

// One exchange from spec to spec, on one mesh or across two; Partial mesh dims that end are reduced on the way.
Step direct_step(const Spec& from, const Spec& to);
// The mesh dims that matter between two specs of one mesh: those that cut a dim whose layout changes, or whose Partial
// ends.
MeshDims changed_dims(const Spec& from, const Spec& to);
// The reduction of the mesh dims whose Partial ends.
void set_reduction(Step& step);

void set_traffic(Step& step);

// The cheapest sequence of collectives, if one is cheaper than `below` and no step needs more than `memory` bytes
// (-1: no limit). Both specs on one mesh.
std::optional<std::vector<Step>> search_steps(const Spec& from, const Spec& to, const CostModel& cost,
                                              std::int64_t below, std::int64_t memory);

// Bytes that the fullest rank holds: the one at coordinate 0, by the chunk rule.
std::int64_t most_bytes(const Spec& spec);

}  // namespace dtensor
