#include "dtensor/runtime/record.h"

#include <c10/util/Exception.h>

#include <functional>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

#include "dtensor/core/error.h"

namespace dtensor {

class CommLog {
 public:
  void add(CommEvent event) {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
  }
  std::vector<CommEvent> events() const {
    const std::lock_guard lock(mutex_);
    return events_;
  }
  void clear() {
    const std::lock_guard lock(mutex_);
    events_.clear();
  }

 private:
  mutable std::mutex mutex_;
  std::vector<CommEvent> events_;
};

namespace {

// libtorch carries these into the threads of a backward pass; this kind is used by nothing in it.
c10::DebugInfoKind watch_kind() { return c10::DebugInfoKind::TEST_INFO_2; }

struct Watch : c10::DebugInfoBase {
  std::vector<std::shared_ptr<CommLog>> logs;
  CommPolicy policy = CommPolicy::kAllow;
};

const Watch* current() { return static_cast<const Watch*>(c10::ThreadLocalDebugInfo::get(watch_kind())); }

std::shared_ptr<Watch> copy_of_current() {
  return current() ? std::make_shared<Watch>(*current()) : std::make_shared<Watch>();
}

std::shared_ptr<Watch> with_log(std::shared_ptr<CommLog> log) {
  auto watch = copy_of_current();
  watch->logs.push_back(std::move(log));
  return watch;
}

std::shared_ptr<Watch> with_policy(CommPolicy policy) {
  auto watch = copy_of_current();
  watch->policy = policy;
  return watch;
}

thread_local const std::string* cause_op = nullptr;
thread_local const std::string* cause_reason = nullptr;
thread_local bool cause_asked = false;

std::int64_t group_size(const Mesh& mesh, const MeshDims& mesh_dims) {
  std::int64_t size = 1;
  for (const std::int64_t m : mesh_dims) size *= mesh.shape()[m];
  return size;
}

void apply_policy(const Watch& watch, const std::function<std::string()>& what) {
  if (!cause_op || cause_asked || watch.policy == CommPolicy::kAllow) return;
  const Complaint complaint{.what = "communication that the policy does not allow",
                            .got = what(),
                            .expected = "operands that need not be moved: " + *cause_reason,
                            .advice = "redistribute, where it is meant"};
  if (watch.policy == CommPolicy::kForbid) fail_invalid(*cause_op, complaint);
  TORCH_WARN("dtensor: ", format_complaint(*cause_op, complaint));
}

void write_down(const Watch& watch, StepKind kind, const Mesh& mesh, const MeshDims& mesh_dims, std::int64_t bytes) {
  for (const auto& log : watch.logs) {
    log->add({std::string(to_string(kind)), group_name(mesh, mesh_dims), group_size(mesh, mesh_dims), bytes,
              cause_op ? *cause_op : "redistribute", cause_reason ? *cause_reason : "asked for"});
  }
}

}  // namespace

std::string group_name(const Mesh& mesh, const MeshDims& mesh_dims) {
  if (mesh_dims.empty()) return "meshes";
  const auto& names = mesh.names();
  std::string name;
  for (const std::int64_t m : mesh_dims) {
    if (!name.empty()) name += '_';
    name += names.empty() ? std::to_string(m) : names[static_cast<std::size_t>(m)];
  }
  return name;
}

CommRecorder::CommRecorder() : log_(std::make_shared<CommLog>()), guard_(watch_kind(), with_log(log_)) {}
std::vector<CommEvent> CommRecorder::events() const { return log_->events(); }
void CommRecorder::clear() { log_->clear(); }

std::int64_t CommRecorder::bytes() const {
  std::int64_t sum = 0;
  for (const CommEvent& event : events()) sum += event.bytes;
  return sum;
}

std::string CommRecorder::to_string() const {
  std::string text;
  for (const CommEvent& event : events()) {
    text += event.collective + " over " + event.group + " (" + std::to_string(event.ranks) + " ranks), " +
            bytes_text(event.bytes) + ", for " + event.op + ": " + event.reason + '\n';
  }
  return text;
}

CommPolicyGuard::CommPolicyGuard(CommPolicy policy) : guard_(watch_kind(), with_policy(policy)) {}

CommCause::CommCause(const std::string& op, const std::string& reason, bool asked)
    : op_before_(std::exchange(cause_op, &op)),
      reason_before_(std::exchange(cause_reason, &reason)),
      asked_before_(std::exchange(cause_asked, asked)) {}
CommCause::~CommCause() {
  cause_op = op_before_;
  cause_reason = reason_before_;
  cause_asked = asked_before_;
}

// Names live as long as the program: errors print them long after the call.
const std::string* current_cause() {
  if (!cause_op) return nullptr;
  static std::mutex mutex;
  static auto* all = new std::set<std::string>;
  thread_local std::unordered_map<std::string, const std::string*> known;
  const std::string*& name = known[*cause_op];
  if (!name) {
    const std::lock_guard lock(mutex);
    name = &*all->insert(*cause_op).first;
  }
  return name;
}

bool communication_is_watched() { return current() != nullptr; }

void watch_communication(const Plan& plan, const std::vector<std::pair<const Step*, std::int64_t>>& steps) {
  const Watch* watch = current();
  if (!watch || steps.empty()) return;
  apply_policy(*watch, [&] {
    return "from " + plan.from().to_string() + " to " + plan.to().to_string() + ", " + bytes_text(plan.received().max);
  });
  for (const auto& [step, bytes] : steps) write_down(*watch, step->kind, step->before.mesh(), step->mesh_dims, bytes);
}

void watch_exchange(const Spec& spec, const MeshDims& mesh_dims, std::int64_t bytes, std::int64_t most) {
  const Watch* watch = current();
  if (!watch) return;
  apply_policy(*watch, [&] { return "what overlaps of " + spec.to_string() + ", " + bytes_text(most); });
  write_down(*watch, StepKind::kExchange, spec.mesh(), mesh_dims, bytes);
}

}  // namespace dtensor
