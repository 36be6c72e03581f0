#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dtensor/core/plan.h"

namespace dtensor {

// One collective, as this rank saw it.
struct CommEvent {
  std::string collective;  // `all-gather`, `reduce-scatter`, …
  std::string group;       // the mesh dims, `dp_tp`
  std::int64_t ranks = 0;
  std::int64_t bytes = 0;  // that came to this rank
  std::string op;          // the operator that needed it; `redistribute` when it was asked for
  std::string reason;
};

enum class CommPolicy : std::uint8_t { kAllow, kWarn, kForbid };

class CommLog;

// Writes down every collective of this rank's program while it lives, also those of a backward pass that is started
// meanwhile, wherever that runs.
class CommRecorder {
 public:
  CommRecorder();
  std::vector<CommEvent> events() const;
  std::int64_t bytes() const;
  void clear();
  // One line per event.
  std::string to_string() const;

 private:
  std::shared_ptr<CommLog> log_;
  c10::DebugInfoGuard guard_;
};

// While it lives: communication that an operator needs (not what the program asks for by redistribute, full_tensor and
// the like) is allowed, warned of, or an error on all ranks before anything is sent.
class CommPolicyGuard {
 public:
  explicit CommPolicyGuard(CommPolicy policy);

 private:
  c10::DebugInfoGuard guard_;
};

// ---- for those who communicate

// Says, for as long as it lives on this thread, which operator what follows is for; whether the program asked for it,
// so that no policy applies.
class CommCause {
 public:
  CommCause(const std::string& op, const std::string& reason, bool asked = false);
  // Both are only pointed to.
  CommCause(const std::string& op, std::string&& reason, bool asked = false) = delete;
  CommCause(std::string&& op, const std::string& reason, bool asked = false) = delete;
  ~CommCause();
  CommCause(const CommCause&) = delete;
  CommCause& operator=(const CommCause&) = delete;

 private:
  const std::string* op_before_;
  const std::string* reason_before_;
  bool asked_before_;
};

// The operator that this thread communicates for; null: none.
const std::string* current_cause();

// `dp_tp`; `meshes` where there are no mesh dims.
std::string group_name(const Mesh& mesh, const MeshDims& mesh_dims);

// Applies the policy to a plan that is about to be played, and records it. bytes: what each step brings this rank.
bool communication_is_watched();
void watch_communication(const Plan& plan, const std::vector<std::pair<const Step*, std::int64_t>>& steps);
// The same of an exchange over mesh dims that is no plan's: the parts of `spec` to others that overlap. most: the bytes
// that come to the rank that gets most.
void watch_exchange(const Spec& spec, const MeshDims& mesh_dims, std::int64_t bytes, std::int64_t most);

}  // namespace dtensor
