#include "dtensor/core/schedule.h"

#include <algorithm>
#include <tuple>

#include "dtensor/core/coordinates.h"
#include "dtensor/core/plan_impl.h"

namespace dtensor {
namespace {

// From this size on, two collectives more (addresses before, a barrier after) are cheaper than packing.
constexpr std::int64_t kWorthReading = 64 << 10;

// Who talks in a step, and where they stand.
class StepGroup {
 public:
  StepGroup(const Step& step, std::int64_t rank)
      : step_(step), source_(step.before.mesh()), target_(step.after.mesh()) {
    one_mesh_ = source_ == target_;
    // Rows of two meshes pair by their index.
    const auto row = source_.row_of(rank);
    row_ = row ? *row : target_.row_of(rank).value_or(0);
    if (one_mesh_) {
      list_along(*source_.coordinate(rank));
    } else {
      for (const Mesh* mesh : {&source_, &target_}) {
        const auto some = mesh->ranks(row_);
        ranks_.insert(ranks_.end(), some.begin(), some.end());
      }
      std::sort(ranks_.begin(), ranks_.end());
      ranks_.erase(std::unique(ranks_.begin(), ranks_.end()), ranks_.end());
    }
  }

  const std::vector<std::int64_t>& ranks() const { return ranks_; }
  std::size_t size() const { return ranks_.size(); }
  // Of a coordinate in the source (target) mesh.
  std::size_t source_member(const Dims& at) const { return member(at, source_); }
  std::size_t target_member(const Dims& at) const { return member(at, target_); }
  std::int64_t target_rank(const Dims& at) const { return target_.rank_at(at, row_); }
  std::int64_t source_rank(const Dims& at) const { return source_.rank_at(at, row_); }

 private:
  void list_along(Dims at) {
    for (const std::int64_t m : step_.mesh_dims) at[m] = 0;
    const auto& dims = step_.mesh_dims;
    for (bool more = true; more;) {
      ranks_.push_back(source_.rank_at(at, row_));
      more = next_coordinate(at, source_.shape(), dims);
    }
  }

  std::size_t member(const Dims& at, const Mesh& mesh) const {
    if (!one_mesh_) {
      return static_cast<std::size_t>(std::lower_bound(ranks_.begin(), ranks_.end(), mesh.rank_at(at, row_)) -
                                      ranks_.begin());
    }
    std::int64_t index = 0;
    for (const std::int64_t m : step_.mesh_dims) index = index * mesh.shape()[m] + at[m];
    return static_cast<std::size_t>(index);
  }

  const Step& step_;
  const Mesh& source_;
  const Mesh& target_;
  bool one_mesh_ = true;
  std::int64_t row_ = 0;
  std::vector<std::int64_t> ranks_;
};

std::int64_t numel(const Copies& copies) {
  std::int64_t n = 0;
  for (const Copy& copy : copies) n += copy.numel();
  return n;
}

// A message within a call. Both ends sort those of a pair by their first element.
struct Message {
  std::size_t member = 0;
  std::int64_t first = 0;
  std::size_t piece = 0;
  Box box;
};

class StepScheduler {
 public:
  // `from`: what the local tensor before the step really is; more than step.before where a slice is read in place.
  StepScheduler(const Step& step, const Spec& from, std::int64_t rank)
      : step_(step),
        from_(from),
        shape_(step.before.meta().shape()),
        order_(packing_order(step.before.meta())),
        rank_(rank),
        source_(step.before.mesh().coordinate(rank)),
        target_(step.after.mesh().coordinate(rank)) {
    if (source_) source_place_ = local_place(from_, *source_);
    result_.kind = step.kind;
    result_.target = target_.has_value();
    if (!target_) return;
    target_place_ = local_place(step.after, *target_);
    result_.shape = step.after.local_shape(*target_);
    result_.stride = target_place_.stride;
  }

  ScheduledStep make(const SharesMemory& shared) {
    if (!source_ && !target_) return std::move(result_);
    if (is_local(step_.kind)) {
      make_local();
      return std::move(result_);
    }
    const StepGroup group(step_, rank_);
    result_.ranks = group.ranks();
    result_.me =
        static_cast<std::size_t>(std::find(result_.ranks.begin(), result_.ranks.end(), rank_) - result_.ranks.begin());
    set_reduction();
    if (step_.kind == StepKind::kBroadcast) {
      make_broadcasts(group);
    } else if (step_.kind == StepKind::kAllReduce) {
      make_all_reduce();
    } else if (step_.received.max >= kWorthReading && shared(result_.ranks)) {
      make_reads(group);
    } else {
      make_calls(group);
    }
    return std::move(result_);
  }

 private:
  void make_local() {
    if (!target_) return;
    add_copies(target_place_.held, source_place_, target_place_, result_.copies);
    if (step_.kind != StepKind::kEmbed) return;
    const Mesh& mesh = step_.after.mesh();
    for (std::int64_t m = 0; m < mesh.ndim(); ++m) {
      const auto op = step_.after.partials()[m];
      if (!op || step_.before.partials()[m] || mesh.shape()[m] == 1) continue;
      if (*op == ReduceOp::kAvg) continue;  // the average of equal values
      result_.op = op;
      if ((*target_)[m] != 0) result_.keeps = false;
    }
  }

  // A sum divided by some of the mesh dims' sizes is an average times the others': it overflows no earlier.
  void set_reduction() {
    if (!step_.op) return;
    result_.op = step_.op;
    if (step_.divisor == 1) return;
    result_.op = ReduceOp::kAvg;
    result_.scale = num_parts() / step_.divisor;
  }

  std::int64_t num_parts() const {
    std::int64_t parts = 1;
    for (std::int64_t m = 0; m < step_.before.mesh().ndim(); ++m) {
      if (step_.before.partials()[m] && !step_.after.partials()[m]) parts *= step_.before.mesh().shape()[m];
    }
    return parts;
  }

  void make_all_reduce() {
    ScheduledCall call;
    add_copies(target_place_.held, source_place_, target_place_, call.pack);
    result_.calls.push_back(std::move(call));
  }

  // ---- calls: packed messages

  void make_calls(const StepGroup& group) {
    std::vector<Message> sends;
    std::vector<Message> receives;
    if (target_) {
      for_each_receive(step_, *target_, [&](const Transfer& transfer) {
        receives.push_back(
            {group.source_member(transfer.peer), first_element(transfer.box, shape_), receives.size(), transfer.box});
      });
    }
    if (source_ && step_.kind == StepKind::kAllGather) {
      const Box mine = box_of(step_.before, *source_);
      if (mine.numel() > 0) sends.push_back({group.source_member(*source_), 0, 0, mine});
    } else if (source_) {
      for_each_send(step_, *source_, [&](const Transfer& transfer) {
        sends.push_back({group.target_member(transfer.peer), first_element(transfer.box, shape_), 0, transfer.box});
      });
    }
    const auto by_member = [](const Message& a, const Message& b) {
      return std::tie(a.member, a.first) < std::tie(b.member, b.first);
    };
    std::sort(sends.begin(), sends.end(), by_member);
    std::sort(receives.begin(), receives.end(), by_member);
    for (std::int64_t part = 0; part < step_.chunks; ++part) {
      result_.calls.push_back(make_call(group.size(), sends, receives, part));
    }
  }

  ScheduledCall make_call(std::size_t members, const std::vector<Message>& sends, const std::vector<Message>& receives,
                          std::int64_t part) const {
    ScheduledCall call;
    call.send_counts.resize(members);
    call.recv_counts.resize(members);
    for (const Message& message : sends) {
      const Box box = part_of(message.box, step_.chunks, part);
      add_copies(box, source_place_, packed(box, order_, call.send_size), call.pack);
      call.send_counts[message.member] += box.numel();
      call.send_size += box.numel();
    }
    if (source_) call.sends_in_place = is_identity(call.pack, source_place_.held.numel());
    if (step_.kind == StepKind::kReduceScatter) {
      receive_reduced(call, receives, part);
    } else if (step_.op) {
      receive_parts(call, receives, part);
    } else {
      receive_whole(call, receives, part);
    }
    if (target_) call.receives_in_place = is_identity(call.unpack, target_place_.held.numel()) && call.meetings.empty();
    return call;
  }

  void receive_whole(ScheduledCall& call, const std::vector<Message>& receives, std::int64_t part) const {
    for (const Message& message : receives) {
      const Box box = part_of(message.box, step_.chunks, part);
      add_copies(box, packed(box, order_, call.recv_size), target_place_, call.unpack);
      call.recv_counts[message.member] += box.numel();
      call.recv_size += box.numel();
    }
  }

  // The communicator reduces: what comes is my part, once.
  void receive_reduced(ScheduledCall& call, const std::vector<Message>& receives, std::int64_t part) const {
    if (receives.empty()) return;
    const Box box = part_of(receives[0].box, step_.chunks, part);
    add_copies(box, packed(box, order_), target_place_, call.unpack);
    call.recv_size = box.numel();
  }

  // The parts of a piece come one by one, as for_each_receive says them: together, in order.
  void receive_parts(ScheduledCall& call, const std::vector<Message>& receives, std::int64_t part) const {
    const auto parts = static_cast<std::size_t>(num_parts());
    call.meetings.resize(receives.size() / parts);
    for (ScheduledCall::Meeting& meeting : call.meetings) meeting.parts.resize(parts);
    for (const Message& message : receives) {
      const Box box = part_of(message.box, step_.chunks, part);
      ScheduledCall::Meeting& meeting = call.meetings[message.piece / parts];
      meeting.parts[message.piece % parts] = call.recv_size;
      meeting.count = box.numel();
      if (message.piece % parts == 0) add_copies(box, packed(box, order_, call.recv_size), target_place_, call.unpack);
      call.recv_counts[message.member] += box.numel();
      call.recv_size += box.numel();
    }
  }

  // ---- reads: straight from the others' local tensors

  void make_reads(const StepGroup& group) {
    if (!target_) return;
    const auto parts = static_cast<std::size_t>(step_.op ? num_parts() : 1);
    for_each_receive(step_, *target_, [&](const Transfer& transfer) {
      if (!result_.reads.empty() && result_.reads.back().members.size() < parts) {
        // The parts of one piece lie alike in all who have one.
        result_.reads.back().members.push_back(static_cast<std::int64_t>(group.source_member(transfer.peer)));
        return;
      }
      ScheduledRead read{{static_cast<std::int64_t>(group.source_member(transfer.peer))}, {}};
      add_copies(transfer.box, local_place(from_, transfer.peer), target_place_, read.copies);
      result_.reads.push_back(std::move(read));
    });
  }

  // ---- broadcasts

  void make_broadcasts(const StepGroup& group) {
    struct Planned {
      std::int64_t sender;
      std::int64_t first;
      ScheduledBroadcast broadcast;
    };
    std::vector<Planned> planned;
    if (source_) {
      for_each_group(group, *source_, [&](std::int64_t first, const Box& box, std::vector<std::int64_t> ranks) {
        ScheduledBroadcast broadcast{std::move(ranks), true, box.numel(), {}};
        add_copies(box, source_place_, packed(box, order_), broadcast.copies);
        planned.push_back({rank_, first, std::move(broadcast)});
      });
    }
    if (target_) {
      for_each_receive(step_, *target_, [&](const Transfer& transfer) {
        if (transfer.self) {
          add_copies(transfer.box, source_place_, target_place_, result_.copies);
          return;
        }
        const std::int64_t wanted = first_element(transfer.box, shape_);
        for_each_group(group, transfer.peer, [&](std::int64_t first, const Box& box, std::vector<std::int64_t> ranks) {
          if (first != wanted) return;
          ScheduledBroadcast broadcast{std::move(ranks), false, box.numel(), {}};
          add_copies(box, packed(box, order_), target_place_, broadcast.copies);
          planned.push_back({group.source_rank(transfer.peer), first, std::move(broadcast)});
        });
      });
    }
    // Everybody meets in this order, so nobody waits for one who waits for him.
    std::sort(planned.begin(), planned.end(), [](const Planned& a, const Planned& b) {
      return std::tie(a.sender, a.first) < std::tie(b.sender, b.first);
    });
    for (Planned& one : planned) result_.broadcasts.push_back(std::move(one.broadcast));
  }

  // The pieces that leave a sender, each with all who get it: fn(first element, box, {sender, receivers…}).
  template <class Fn>
  void for_each_group(const StepGroup& group, const Dims& sender, Fn fn) const {
    struct Piece {
      std::int64_t first;
      Box box;
      std::vector<std::int64_t> receivers;
    };
    std::vector<Piece> pieces;
    for_each_send(step_, sender, [&](const Transfer& transfer) {
      if (transfer.self) return;
      const std::int64_t first = first_element(transfer.box, shape_);
      auto known = std::find_if(pieces.begin(), pieces.end(), [&](const Piece& piece) { return piece.first == first; });
      if (known == pieces.end()) known = pieces.insert(known, {first, transfer.box, {}});
      known->receivers.push_back(group.target_rank(transfer.peer));
    });
    for (Piece& piece : pieces) {
      std::sort(piece.receivers.begin(), piece.receivers.end());
      piece.receivers.insert(piece.receivers.begin(), group.source_rank(sender));
      fn(piece.first, piece.box, std::move(piece.receivers));
    }
  }

  const Step& step_;
  const Spec& from_;
  const Dims& shape_;
  const Dims order_;
  const std::int64_t rank_;
  const std::optional<Dims> source_;
  const std::optional<Dims> target_;
  Place source_place_;
  Place target_place_;
  ScheduledStep result_;
};

}  // namespace

std::int64_t ScheduledStep::received() const {
  const auto size = static_cast<std::int64_t>(ranks.size());
  std::int64_t sum = 0;
  for (const ScheduledCall& call : calls) {
    if (kind == StepKind::kAllReduce) {
      // Every member reduces a share of them and hands it round.
      const std::int64_t n = numel(call.pack);
      sum += n + (size - 2) * ceil_div(n, size);
    } else if (kind == StepKind::kReduceScatter) {
      sum += (size - 1) * call.recv_size;
    } else {
      for (std::size_t r = 0; r < ranks.size(); ++r) sum += r == me ? 0 : call.recv_counts[r];
    }
  }
  for (const ScheduledRead& read : reads) {
    for (const std::int64_t member : read.members)
      sum += static_cast<std::size_t>(member) == me ? 0 : numel(read.copies);
  }
  for (const ScheduledBroadcast& broadcast : broadcasts) sum += broadcast.sends ? 0 : broadcast.count;
  return sum;
}

std::vector<ScheduledStep> schedule(const Plan& plan, std::int64_t rank, const SharesMemory& shared) {
  std::vector<ScheduledStep> result;
  std::optional<Spec> lies = plan.from();
  for (std::size_t i = 0; i < plan.steps().size(); ++i) {
    const Step& step = plan.steps()[i];
    const bool one_mesh = step.before.mesh() == step.after.mesh();
    if (step.kind == StepKind::kSlice && one_mesh && i + 1 < plan.steps().size()) continue;
    result.push_back(StepScheduler(step, *lies, rank).make(shared));
    result.back().index = i;
    lies = step.after;
  }
  return result;
}

}  // namespace dtensor
