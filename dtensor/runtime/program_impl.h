#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "dtensor/comm/communicator.h"
#include "dtensor/core/schedule.h"

namespace dtensor {

// A plan as one rank plays it, with the groups it talks in.
struct Program {
  Plan plan;
  // What the local tensor must be; none where the rank is not in the source mesh.
  std::optional<Place> source;
  Dims source_shape;
  c10::ScalarType type;
  struct Part {
    ScheduledStep step;
    CommunicatorPtr group;
    std::vector<CommunicatorPtr> broadcast_groups;
  };
  std::vector<Part> parts;
  std::int64_t rank = 0;
  std::uint64_t plan_hash = 0;  // of its two specs, the same on all ranks
};

// The programs that a rank has made; lives in its context. Bounded.
class ProgramCache {
 public:
  std::shared_ptr<const Program> find_or_make(const DeviceMesh& mesh, const Plan& plan);

 private:
  struct PlanHash {
    std::size_t operator()(const Plan& plan) const noexcept { return plan.hash(); }
  };
  static constexpr std::size_t kMostPrograms = 4096;
  std::mutex mutex_;
  std::unordered_map<Plan, std::shared_ptr<const Program>, PlanHash> programs_;
};

}  // namespace dtensor
