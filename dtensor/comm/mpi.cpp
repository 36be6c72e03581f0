#include "dtensor/comm/mpi.h"

#include <cstring>

#include "dtensor/comm/mpi_impl.h"
#include "dtensor/comm/reduce.h"
#include "dtensor/core/error.h"

namespace dtensor {
namespace mpi_impl {
namespace {

// Up to so many bytes in all, every rank gets everything and reduces it, which takes one round instead of two.
constexpr std::int64_t kSmallReduce = 16 * 1024;

class MpiWork final : public Work {
 public:
  MpiWork(std::shared_ptr<Engine> engine, CallPtr call) : engine_(std::move(engine)), call_(std::move(call)) {}
  void wait() override { engine_->wait(call_); }
  bool done() override { return engine_->done(call_); }

 private:
  std::shared_ptr<Engine> engine_;
  CallPtr call_;
};

char* data_of(const at::Tensor& tensor) { return tensor.numel() > 0 ? static_cast<char*>(tensor.data_ptr()) : nullptr; }

// A rank's own part, once the operation begins: input and output may be the same memory.
void append_copy(Schedule& schedule, char* to, const char* from, std::int64_t bytes) {
  if (bytes == 0 || to == from) return;
  Round round;
  round.after = [=] { std::memmove(to, from, static_cast<std::size_t>(bytes)); };
  schedule.push_back(std::move(round));
}

}  // namespace

Group::Group(std::shared_ptr<Engine> engine, std::int64_t rank, std::vector<std::int64_t> ranks,
             const GroupOptions& options, std::int64_t id)
    : Communicator("mpi", options.name, rank, std::move(ranks)),
      engine_(std::move(engine)),
      timeout_(options.timeout),
      fingerprint_(options.fingerprint),
      id_(id),
      peer_ids_(static_cast<std::size_t>(size()), -1) {
  peer_ids_[rank] = id;
}

// `written` and `read` are the buffers as the operation uses them on this rank; each may be undefined.
CallPtr Group::new_call(const Fingerprint& what, const at::Tensor& written, const at::Tensor& read, Eager eager) {
  auto call = std::make_shared<Call>();
  call->group = shared_from_this();
  call->what = what;
  const auto use = [&](const at::Tensor& tensor, std::vector<Memory>& memory) {
    if (!tensor.defined()) return;
    if (!tensor.device().is_cpu()) {
      fail_unsupported(to_string(what.operation), {.what = describe() + " moves memory of the CPU alone",
                                                   .got = "a tensor on " + tensor.device().str(),
                                                   .advice = "the backend nccl"});
    }
    call->tensors.push_back(tensor);
    if (tensor.numel() > 0) memory.push_back({data_of(tensor), data_of(tensor) + tensor.nbytes()});
  };
  use(written, call->writes);
  use(read, call->reads);
  if (fingerprint_ && size() > 1 && what.operation != Operation::kSend && what.operation != Operation::kReceive) {
    append_frames(*call, std::move(eager));
  }
  return call;
}

WorkPtr Group::issue(const CallPtr& call) {
  engine_->issue(call);
  return std::make_shared<MpiWork>(engine_, call);
}

// Frames go from everybody to everybody before data moves: always of one size, with the fingerprint and, where they
// fit, the data themselves. The sequence number is known when the call is issued: a round of no messages writes the
// frame.
void Group::append_frames(Call& call, Eager eager) {
  char* all = call.new_scratch(kFrameBytes * size());
  Round write;
  write.after = [&call, all, rank = rank(), data = eager.data, bytes = eager.bytes] {
    const auto words = call.what.words();
    char* frame = all + kFrameBytes * rank;
    std::memcpy(frame, words.data(), kFingerprintBytes);
    if (bytes > 0) std::memcpy(frame + kFingerprintBytes, data, static_cast<std::size_t>(bytes));
  };
  call.rounds.push_back(std::move(write));
  append_all_gather(call.rounds, place(), all, Parts(std::vector<std::int64_t>(size(), kFrameBytes), 1));
  call.rounds.back().after = [this, &call, all, take = std::move(eager.take)] {
    std::array<std::uint64_t, Fingerprint::kWords> words;
    InlineVec<Fingerprint, 8> sides;
    for (std::int64_t peer = 0; peer < size(); ++peer) {
      std::memcpy(words.data(), all + kFrameBytes * peer, kFingerprintBytes);
      sides.push_back(Fingerprint::from_words(words));
    }
    const std::span<const Fingerprint> seen(sides.begin(), sides.size());
    if (const auto both = find_divergence(seen, ranks())) return exchange_reports(call, *both, diverging_member(seen));
    if (take) take(all + kFingerprintBytes);
  };
}

// Everybody has seen that the ranks diverged: in place of what was to come they tell each other what they did last.
void Group::exchange_reports(Call& call, const std::string& both, std::size_t other) {
  const auto size_of_one = static_cast<std::int64_t>(kReportBytes);
  char* all = call.new_scratch(size_of_one * size());
  const std::string mine = divergence_report(*this, call.what);
  std::memcpy(all + size_of_one * rank(), mine.data(), mine.size());
  call.rounds.resize(call.next_round);
  append_all_gather(call.rounds, place(), all, Parts(std::vector<std::int64_t>(size(), size_of_one), 1));
  call.rounds.back().after = [this, &call, all, both, other] {
    const auto report = [&](std::size_t member) {
      return ReportOf::read(ranks()[member], std::string_view(all + kReportBytes * member, kReportBytes));
    };
    fail_diverged(*this, call.what, both + explain_divergence(report(0), report(other)));
  };
}

// output = my part of the reduction of the members' inputs, which may be in place.
void Group::append_reduce(Call& call, char* output, char* input, const std::vector<std::int64_t>& counts) {
  const std::int64_t item = call.tensors.front().element_size();
  const Parts in(counts, item);
  const std::int64_t mine = counts[rank()];
  const Parts out(std::vector<std::int64_t>(size(), mine), item);
  char* gathered = call.new_scratch(out.total);
  append_all_to_all(call.rounds, place(), gathered, out, input, in);
  Round reduce;
  reduce.after = [&call, output, input = input + in.offsets[rank()], gathered, mine, out, place = place()] {
    std::vector<const void*> parts;
    for (std::int64_t peer = 0; peer < place.size; ++peer) {
      parts.push_back(peer == place.rank ? input : gathered + out.offsets[peer]);
    }
    if (mine > 0) reduce_parts(*call.what.op, call.what.dtype, output, parts, mine);
  };
  call.rounds.push_back(std::move(reduce));
}

WorkPtr Group::all_reduce(const at::Tensor& buffer, ReduceOp op) {
  const Fingerprint what = check_all_reduce(*this, buffer, op);
  char* data = data_of(buffer);
  const auto bytes = static_cast<std::int64_t>(buffer.nbytes());
  const bool eager = fits_into_frame(bytes);
  const auto take = [data, op, type = buffer.scalar_type(), count = buffer.numel(), size = size()](const char* frames) {
    InlineVec<const void*, 8> sides;
    for (std::int64_t peer = 0; peer < size; ++peer) sides.push_back(frames + kFrameBytes * peer);
    reduce_parts(op, type, data, sides, count);
  };
  const CallPtr call = new_call(what, buffer, {}, eager ? Eager{data, bytes, take} : Eager{});
  if (size() == 1 || buffer.numel() == 0 || eager) return issue(call);
  if (bytes * size() > kSmallReduce) {
    const std::vector<std::int64_t> counts = even_counts(buffer.numel(), size());
    const Parts parts(counts, buffer.element_size());
    append_reduce(*call, data + parts.offsets[rank()], data, counts);
    append_all_gather(call->rounds, place(), data, parts);
    return issue(call);
  }
  const Parts parts(std::vector<std::int64_t>(size(), bytes), 1);
  char* all = call->new_scratch(parts.total);
  append_copy(call->rounds, all + parts.offsets[rank()], data, bytes);
  append_all_gather(call->rounds, place(), all, parts);
  call->rounds.back().after = [call = call.get(), all, parts, data, count = buffer.numel()] {
    std::vector<const void*> sides;
    for (const std::int64_t offset : parts.offsets) sides.push_back(all + offset);
    reduce_parts(*call->what.op, call->what.dtype, data, sides, count);
  };
  return issue(call);
}

WorkPtr Group::all_gather(const at::Tensor& output, const at::Tensor& input, const std::vector<std::int64_t>& counts) {
  const Fingerprint what = check_all_gather(*this, output, input, counts);
  const Parts parts(counts, output.element_size());
  char* base = data_of(output);
  const bool eager = fits_into_frame(*std::max_element(parts.bytes.begin(), parts.bytes.end()));
  const auto take = [base, parts](const char* frames) {
    for (std::size_t peer = 0; peer < parts.bytes.size(); ++peer) {
      if (parts.bytes[peer] == 0) continue;
      std::memcpy(base + parts.offsets[peer], frames + kFrameBytes * static_cast<std::int64_t>(peer),
                  static_cast<std::size_t>(parts.bytes[peer]));
    }
  };
  const CallPtr call =
      new_call(what, output, input, eager ? Eager{data_of(input), parts.bytes[rank()], take} : Eager{});
  if (eager) return issue(call);
  append_copy(call->rounds, base + parts.offsets[rank()], data_of(input), parts.bytes[rank()]);
  append_all_gather(call->rounds, place(), base, parts);
  return issue(call);
}

WorkPtr Group::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                              const std::vector<std::int64_t>& counts, ReduceOp op) {
  const CallPtr call = new_call(check_reduce_scatter(*this, output, input, counts, op), output, input);
  append_reduce(*call, data_of(output), data_of(input), counts);
  return issue(call);
}

WorkPtr Group::all_to_all(const at::Tensor& output, const at::Tensor& input,
                          const std::vector<std::int64_t>& recv_counts, const std::vector<std::int64_t>& send_counts) {
  const CallPtr call = new_call(check_all_to_all(*this, output, input, recv_counts, send_counts), output, input);
  const Parts out(recv_counts, output.element_size()), in(send_counts, input.element_size());
  if (out.bytes[rank()] != in.bytes[rank()]) {
    fail_invalid("all_to_all", {.what = "a rank sends itself another count than it receives in " + describe(),
                                .got = std::to_string(send_counts[rank()]) + " sent and " +
                                       std::to_string(recv_counts[rank()]) + " received"});
  }
  char* to = data_of(output);
  char* from = data_of(input);
  append_copy(call->rounds, to + out.offsets[rank()], from + in.offsets[rank()], in.bytes[rank()]);
  append_all_to_all(call->rounds, place(), to, out, from, in);
  return issue(call);
}

WorkPtr Group::broadcast(const at::Tensor& buffer, std::int64_t root) {
  const bool is_root = rank() == root;
  const at::Tensor none;
  const CallPtr call = new_call(check_broadcast(*this, buffer, root), is_root ? none : buffer, is_root ? buffer : none);
  append_broadcast(call->rounds, place(), data_of(buffer), static_cast<std::int64_t>(buffer.nbytes()), root);
  return issue(call);
}

WorkPtr Group::scatter(const at::Tensor& output, const at::Tensor& input, const std::vector<std::int64_t>& counts,
                       std::int64_t root) {
  const bool is_root = rank() == root;
  const CallPtr call =
      new_call(check_scatter(*this, output, input, counts, root), output, is_root ? input : at::Tensor());
  const Parts parts(counts, output.element_size());
  char* from = is_root ? data_of(input) : nullptr;
  if (is_root) append_copy(call->rounds, data_of(output), from + parts.offsets[rank()], parts.bytes[rank()]);
  append_scatter(call->rounds, place(), data_of(output), from, parts, root);
  return issue(call);
}

// With fingerprints, the receiver compares the sender's with its own before it takes the data.
WorkPtr Group::point_to_point(Operation operation, const at::Tensor& buffer, std::int64_t peer, std::int64_t tag) {
  const bool sends = operation == Operation::kSend;
  const at::Tensor none;
  const CallPtr call =
      new_call(check_point_to_point(*this, operation, buffer, peer, tag), sends ? none : buffer, sends ? buffer : none);
  if (tag < 0 || tag >= kTagSpan) {
    fail_invalid(to_string(operation), {.what = "the tag is out of range in " + describe(),
                                        .got = std::to_string(tag),
                                        .expected = "0 to " + std::to_string(kTagSpan - 1)});
  }
  call->peer = peer;
  call->low = tag;
  const auto way = sends ? Transfer::Way::kSend : Transfer::Way::kReceive;
  if (fingerprint_) {
    constexpr std::int64_t kBytes = Fingerprint::kWords * sizeof(std::uint64_t);
    char* header = call->new_scratch(kBytes);
    Round round{{{way, peer, header, kBytes}}};
    if (sends) {
      const auto words = call->what.words();
      std::memcpy(header, words.data(), kBytes);
    } else {
      round.after = [this, call = call.get(), header, peer] {
        std::array<std::uint64_t, Fingerprint::kWords> words;
        std::memcpy(words.data(), header, kBytes);
        const Fingerprint sent = Fingerprint::from_words(words);
        Fingerprint mine = call->what;
        mine.operation = Operation::kSend;
        if (sent.agrees_with(mine)) return;
        fail_diverged(*this, call->what,
                      "rank " + std::to_string(ranks()[peer]) + ": " + sent.to_string() + ", rank " +
                          std::to_string(ranks()[rank()]) + ": " + call->what.to_string());
      };
    }
    call->rounds.push_back(std::move(round));
  }
  call->rounds.push_back({{{way, peer, data_of(buffer), static_cast<std::int64_t>(buffer.nbytes())}}});
  return issue(call);
}

WorkPtr Group::send(const at::Tensor& buffer, std::int64_t to, std::int64_t tag) {
  return point_to_point(Operation::kSend, buffer, to, tag);
}

WorkPtr Group::receive(const at::Tensor& buffer, std::int64_t from, std::int64_t tag) {
  return point_to_point(Operation::kReceive, buffer, from, tag);
}

WorkPtr Group::barrier() {
  const CallPtr call = new_call({.operation = Operation::kBarrier, .op = {}}, {}, {});
  append_barrier(call->rounds, place());
  return issue(call);
}

namespace {

class MpiTransport final : public Transport {
 public:
  explicit MpiTransport(std::chrono::milliseconds timeout) : engine_(Engine::get(timeout)), timeout_(timeout) {}
  std::int64_t rank() const override { return engine_->rank(); }
  std::int64_t size() const override { return engine_->size(); }
  std::string backend() const override { return "mpi"; }
  CommunicatorPtr make_group(const std::vector<std::int64_t>& ranks, const GroupOptions& options) override {
    return engine_->make_group(ranks, options);
  }
  void leave(const std::string& why) override { engine_->leave(why, timeout_); }

 private:
  std::shared_ptr<Engine> engine_;
  std::chrono::milliseconds timeout_;
};

}  // namespace
}  // namespace mpi_impl

bool mpi_was_built() { return true; }

TransportPtr make_mpi_transport(std::chrono::milliseconds timeout) {
  return std::make_shared<mpi_impl::MpiTransport>(timeout);
}

}  // namespace dtensor
