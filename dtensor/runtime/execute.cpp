#include "dtensor/runtime/execute.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>

#include <utility>

#include "dtensor/comm/fingerprint.h"
#include "dtensor/comm/reduce.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"
#include "dtensor/runtime/identity.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/program_impl.h"
#include "dtensor/runtime/record.h"

namespace dtensor {
namespace {

at::IntArrayRef as_array(const Dims& dims) { return {dims.data(), dims.size()}; }

// All elements of a dense tensor in the order of its memory.
at::Tensor flat(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return tensor;
  return tensor.as_strided({tensor.numel()}, {1}, tensor.storage_offset());
}

char* bytes_of(const at::Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); }

void play_copies(const Copies& copies, const at::Tensor& from, const at::Tensor& to) {
  if (copies.empty()) return;
  if (from.device().is_cpu()) {
    play(copies, from.data_ptr(), to.data_ptr(), static_cast<std::int64_t>(from.element_size()));
    return;
  }
  for (const Copy& copy : copies) {
    Dims sizes, from_strides, to_strides;
    for (const Copy::Dim& dim : copy.dims) {
      sizes.push_back(dim.size);
      from_strides.push_back(dim.from);
      to_strides.push_back(dim.to);
    }
    to.as_strided(as_array(sizes), as_array(to_strides), to.storage_offset() + copy.to)
        .copy_(from.as_strided(as_array(sizes), as_array(from_strides), from.storage_offset() + copy.from));
  }
}

void meet(const ScheduledCall::Meeting& meeting, ReduceOp op, const at::Tensor& buffer) {
  if (meeting.count == 0) return;
  if (buffer.device().is_cpu()) {
    std::vector<const void*> parts;
    for (const std::int64_t at : meeting.parts) parts.push_back(bytes_of(buffer) + at * buffer.element_size());
    reduce_parts(op, buffer.scalar_type(), const_cast<void*>(parts[0]), parts, meeting.count);
    return;
  }
  std::vector<at::Tensor> parts;
  for (const std::int64_t at : meeting.parts) parts.push_back(buffer.narrow(0, at, meeting.count));
  parts[0].copy_(reduce_tensors(op, parts));
}

// What a read takes, given where the members' local tensors begin.
void play_read(const ScheduledRead& read, std::optional<ReduceOp> op, const std::int64_t* addresses,
               const at::Tensor& out) {
  const auto size = static_cast<std::int64_t>(out.element_size());
  const auto base = [&](std::int64_t member) {
    return reinterpret_cast<const char*>(static_cast<std::uintptr_t>(addresses[member]));
  };
  if (read.members.size() == 1) {
    play(read.copies, base(read.members[0]), out.data_ptr(), size);
    return;
  }
  std::vector<const void*> parts(read.members.size());
  for (const Copy& copy : read.copies) {
    for_each_run(copy, [&](std::int64_t from, std::int64_t to, std::int64_t n) {
      for (std::size_t i = 0; i < parts.size(); ++i) parts[i] = base(read.members[i]) + from * size;
      reduce_parts(*op, out.scalar_type(), bytes_of(out) + to * size, parts, n);
    });
  }
}

bool lies_as(const at::Tensor& tensor, const Dims& stride) {
  for (std::int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1 && tensor.stride(d) != stride[static_cast<std::size_t>(d)]) return false;
  }
  return true;
}

[[noreturn]] void refuse_local(const Program& program, const at::Tensor& local) {
  const Spec& from = program.plan.from();
  if (!program.source) {
    fail_invalid("redistribute", {.what = "this rank is not in the mesh of the tensor, and holds nothing of it",
                                  .got = "a local tensor, with " + from.to_string(),
                                  .expected = "an undefined one"});
  }
  const std::string expected =
      TensorMeta(program.source_shape, from.meta().dtype()).to_string() + " of " + from.to_string();
  if (!local.defined()) {
    fail_invalid("redistribute", {.what = "the local tensor is undefined", .got = "nothing", .expected = expected});
  }
  const TensorMeta got(Dims(local.sizes().begin(), local.sizes().end()), dtype_of(local.scalar_type()));
  fail_invalid("redistribute",
               {.what = "the local tensor is not this rank's part", .got = got.to_string(), .expected = expected});
}

void check_local(const Program& program, const at::Tensor& local) {
  const bool right = program.source ? local.defined() && local.sizes() == as_array(program.source_shape) &&
                                          local.scalar_type() == program.type
                                    : !local.defined();
  if (!right) refuse_local(program, local);
}

at::Tensor dense(const at::Tensor& local, const Place& place, const Dims& shape) {
  if (local.numel() == 0 || lies_as(local, place.stride)) return local;
  const auto copy = at::empty_strided(as_array(shape), as_array(place.stride), local.options());
  copy.copy_(local);
  return copy;
}

}  // namespace

// One step after the other, each as calls; a call is issued, then finished.
class Execution::Player {
 public:
  Player(const Program& program, at::Tensor local, c10::TensorOptions options, const Provenance& provenance)
      : program_(program),
        options_(options),
        provenance_(provenance),
        outer_(CommTagGuard::current().provenance),
        cause_(current_cause()),
        now_(std::move(local)) {}

  // Goes on until something has been sent that must be waited for, or to the end.
  void issue_next() {
    while (!work_ && at_ < program_.parts.size()) {
      if (call_ == 0) begin_step();
      if (call_ < num_calls()) {
        issue();
      } else {
        end_step();
      }
    }
  }

  bool ended() const { return at_ == program_.parts.size(); }

  // Is there anything to send after what is under way?
  bool sends_later() const {
    if (ended()) return false;
    if (call_ + 1 < num_calls() || reads_memory()) return true;
    for (std::size_t part = at_ + 1; part < program_.parts.size(); ++part) {
      if (!program_.parts[part].step.ranks.empty()) return true;
    }
    return false;
  }

  void finish_call() {
    work_->wait();
    work_.reset();
    finish();
    ++call_;
    send_ = at::Tensor();
    receive_ = at::Tensor();
  }

  bool arrived() { return !work_ || work_->done(); }
  const at::Tensor& now() const { return now_; }
  std::int64_t received() const { return received_; }

 private:
  const Program::Part& part() const { return program_.parts[at_]; }
  const ScheduledStep& step() const { return part().step; }
  const ScheduledCall& call() const { return step().calls[call_]; }
  Communicator& group() const { return *part().group; }

  // Members read each other's memory, and meet when they have.
  bool reads_memory() const {
    return !step().ranks.empty() && step().kind != StepKind::kBroadcast && step().calls.empty();
  }

  std::size_t num_calls() const {
    if (step().ranks.empty()) return 0;
    if (step().kind == StepKind::kBroadcast) return step().broadcasts.size();
    return step().calls.empty() ? 1 : step().calls.size();  // one: reading
  }

  // An all-reduce of memory that nobody else knows of happens where it lies.
  bool reduces_in_place() const {
    return step().kind == StepKind::kAllReduce && step().calls.size() == 1 && step().copies.empty() && now_.defined() &&
           now_.use_count() == 1 && now_.storage().use_count() == 1 && now_.sizes() == as_array(step().shape) &&
           lies_as(now_, step().stride) && is_identity(step().calls[0].pack, now_.numel());
  }

  void begin_step() {
    if (reduces_in_place()) {
      out_ = std::move(now_);
      now_ = at::Tensor();
      return;
    }
    out_ = at::Tensor();
    if (step().target) out_ = at::empty_strided(as_array(step().shape), as_array(step().stride), options_);
    if (is_local(step().kind) && step().target && !step().keeps) {
      fill_identity(out_, *step().op);
    } else if (step().target && now_.defined()) {
      play_copies(step().copies, now_, out_);
    }
  }

  void end_step() {
    if (step().op && step().scale != 1 && out_.defined()) out_.mul_(step().scale);
    received_ += step().received() * static_cast<std::int64_t>(options_.dtype().itemsize());
    now_ = std::move(out_);
    ++at_;
    call_ = 0;
  }

  // Fixed when the plan started: later steps are issued elsewhere. Values of leaves that are replicated along one mesh
  // dim are compared along it: as they are in a group along that dim, and in a larger group by sums that must cancel
  // out.
  CommTag tag() const {
    if (provenance_.made == 0) return {outer_, cause_, outer_, 0};
    CommTag tag{mix(provenance_.made, program_.plan_hash), cause_, provenance_.made, 0};
    const Step& planned = program_.plan.steps()[step().index];
    const MeshDims& dims = planned.mesh_dims;
    if (!provenance_.has_values() || dims.empty()) return tag;
    if (dims.size() == 1) {
      const auto m = static_cast<std::size_t>(dims[0]);
      if (m < Provenance::kValues && provenance_.values[m] != 0)
        tag.provenance = mix(tag.provenance, provenance_.values[m]);
      return tag;
    }
    const Mesh& mesh = planned.before.mesh();
    const auto at = mesh.coordinate(program_.rank);
    for (const std::int64_t m : dims) {
      const auto index = static_cast<std::size_t>(m);
      if (!at || index >= Provenance::kValues || provenance_.values[index] == 0) continue;
      std::uint64_t row = provenance_.values[index];
      for (std::int64_t d = 0; d < mesh.ndim(); ++d) row = mix(row, d == m ? 0 : static_cast<std::uint64_t>((*at)[d]));
      const auto others = static_cast<std::uint64_t>(mesh.size(m) - 1);
      tag.balance += (*at)[m] == 0 ? others * row : 0 - row;
    }
    return tag;
  }

  void issue() {
    const CommTagGuard tagged(tag());
    if (step().kind == StepKind::kBroadcast) {
      issue_broadcast();
    } else if (step().calls.empty()) {
      issue_read();
    } else if (step().kind == StepKind::kAllReduce) {
      if (now_.defined()) play_copies(call().pack, now_, out_);
      work_ = group().all_reduce(flat(out_), *step().op);
    } else {
      issue_packed();
    }
  }

  void issue_packed() {
    if (call().sends_in_place && now_.defined()) {
      send_ = flat(now_);
    } else {
      send_ = at::empty({call().send_size}, options_);
      if (now_.defined()) play_copies(call().pack, now_, send_);
    }
    receive_ = call().receives_in_place && out_.defined() ? flat(out_) : at::empty({call().recv_size}, options_);
    if (step().kind == StepKind::kAllGather) {
      work_ = group().all_gather(receive_, send_, call().recv_counts);
    } else if (step().kind == StepKind::kReduceScatter) {
      work_ = group().reduce_scatter(receive_, send_, call().send_counts, *step().op);
    } else {
      work_ = group().all_to_all(receive_, send_, call().recv_counts, call().send_counts);
    }
  }

  void issue_read() {
    const auto k = static_cast<std::int64_t>(step().ranks.size());
    const auto address = now_.defined() ? reinterpret_cast<std::uintptr_t>(now_.data_ptr()) : 0;
    send_ = at::full({1}, static_cast<std::int64_t>(address), at::kLong);
    receive_ = at::empty({k}, at::kLong);
    work_ = group().all_gather(receive_, send_, std::vector<std::int64_t>(static_cast<std::size_t>(k), 1));
  }

  void issue_broadcast() {
    const ScheduledBroadcast& broadcast = step().broadcasts[call_];
    send_ = at::empty({broadcast.count}, options_);
    if (broadcast.sends) play_copies(broadcast.copies, now_, send_);
    work_ = part().broadcast_groups[call_]->broadcast(send_, 0);
  }

  void finish() {
    if (step().kind == StepKind::kAllReduce) return;
    if (step().kind == StepKind::kBroadcast) {
      const ScheduledBroadcast& broadcast = step().broadcasts[call_];
      if (!broadcast.sends) play_copies(broadcast.copies, send_, out_);
    } else if (step().calls.empty()) {
      for (const ScheduledRead& read : step().reads) {
        play_read(read, step().op, static_cast<const std::int64_t*>(receive_.data_ptr()), out_);
      }
      group().barrier()->wait();  // until then my own tensor is being read
    } else {
      for (const auto& meeting : call().meetings) meet(meeting, *step().op, receive_);
      if (!call().receives_in_place && out_.defined()) play_copies(call().unpack, receive_, out_);
    }
  }

  const Program& program_;
  const c10::TensorOptions options_;
  const Provenance provenance_;
  const std::uint64_t outer_;  // of the operator whose algorithm plays the plan
  const std::string* const cause_;
  at::Tensor now_;
  at::Tensor out_;
  at::Tensor send_, receive_;
  WorkPtr work_;
  std::size_t at_ = 0;
  std::size_t call_ = 0;
  std::int64_t received_ = 0;
};

Execution::Execution(std::shared_ptr<const Program> program, at::Tensor local, c10::DeviceType device,
                     const Provenance& provenance)
    : program_(std::move(program)) {
  check_local(*program_, local);
  if (program_->parts.empty()) {
    now_ = std::move(local);
    return;
  }
  const auto options = local.defined() ? local.options() : c10::TensorOptions().dtype(program_->type).device(device);
  if (local.defined()) local = dense(local, *program_->source, program_->source_shape);
  player_ = std::make_unique<Player>(*program_, std::move(local), options, provenance);
  player_->issue_next();
}

Execution::~Execution() = default;

// The last plan of a rank that has to send more; lives in its context. There is never more than one: the next start()
// finishes it.
class EarlierPlan : public std::enable_shared_from_this<EarlierPlan> {
 public:
  void set(const std::shared_ptr<Execution>& execution) {
    execution->waits_in_ = weak_from_this();
    const std::lock_guard lock(mutex_);
    execution_ = execution;
  }
  void clear(const Execution* done) {
    std::shared_ptr<Execution> last;  // let go without the lock
    const std::lock_guard lock(mutex_);
    if (execution_.get() == done) last = std::move(execution_);
  }
  void finish() {
    std::shared_ptr<Execution> execution;
    {
      const std::lock_guard lock(mutex_);
      execution = std::move(execution_);  // an error is thrown once here, and to those who ask for the result
      execution_ = nullptr;
    }
    if (execution) static_cast<void>(execution->result());
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<Execution> execution_;
};

namespace {

// A context's part is no shared object by itself.
struct EarlierPlanOfRank {
  const std::shared_ptr<EarlierPlan> plan = std::make_shared<EarlierPlan>();
};

}  // namespace

void finish_earlier_plan(const DeviceMesh& mesh) {
  if (mesh.context()) mesh.context()->part<EarlierPlanOfRank>().plan->finish();
}

bool Execution::done() const noexcept {
  const std::lock_guard lock(mutex_);
  return !player_;
}

bool Execution::sends_later() const { return player_ && player_->sends_later(); }

const at::Tensor& Execution::result() {
  const std::lock_guard lock(mutex_);
  if (player_) advance();
  return now_;
}

void Execution::advance() {
  while (player_) {
    if (!player_->ended()) {
      player_->finish_call();
      player_->issue_next();
      continue;
    }
    now_ = player_->now();
    received_ = player_->received();
    player_.reset();
  }
  if (const auto earlier = waits_in_.lock()) earlier->clear(this);
}

namespace {

void watch(const Program& program) {
  std::vector<std::pair<const Step*, std::int64_t>> steps;
  const std::int64_t size = element_size(program.plan.from().meta().dtype());
  for (const Program::Part& part : program.parts) {
    if (is_local(part.step.kind)) continue;
    steps.emplace_back(&program.plan.steps()[part.step.index], part.step.received() * size);
  }
  watch_communication(program.plan, steps);
}

}  // namespace

namespace {

// With the replicated parameters of the mesh that were written so far, which need not be sent for long.
Provenance compared(RankContext& context, const Plan& plan, Provenance provenance) {
  if (check_level() == CheckLevel::kOff) return {};
  const Mesh& mesh = plan.from().mesh();
  if (!(mesh == plan.to().mesh())) return provenance;
  if (const std::uint64_t written = context.provenance().replicas_written(mesh.stable_hash())) {
    provenance.made = mix(provenance.made, written);
  }
  return provenance;
}

}  // namespace

std::shared_ptr<Execution> start(const DeviceMesh& mesh, const Plan& plan, at::Tensor local,
                                 const Provenance& provenance) {
  if (!mesh.context()) {
    fail_invalid("redistribute", {.what = "the mesh belongs to no world, so nothing can be sent over it",
                                  .got = mesh.to_string(),
                                  .advice = "init_device_mesh(world, device, mesh)"});
  }
  const auto earlier = mesh.context()->part<EarlierPlanOfRank>().plan;
  earlier->finish();
  const auto device = mesh.device() == DeviceKind::kCuda ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
  auto program = mesh.context()->part<ProgramCache>().find_or_make(mesh, plan);
  if (communication_is_watched()) watch(*program);
  // What is sent are the values, not memory that is yet to be conjugated or negated, or zeros that have none.
  const bool lazy = local.defined() && (local.is_conj() || local.is_neg() || local._is_zerotensor());
  auto execution = std::make_shared<Execution>(std::move(program), lazy ? local.clone() : std::move(local), device,
                                               compared(*mesh.context(), plan, provenance));
  if (execution->sends_later()) earlier->set(execution);
  return execution;
}

at::Tensor execute(const DeviceMesh& mesh, const Plan& plan, const at::Tensor& local, const Provenance& provenance) {
  return start(mesh, plan, local, provenance)->result();
}

}  // namespace dtensor
