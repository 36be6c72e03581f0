#include <ATen/core/grad_mode.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <cstdlib>

#include "dtensor/comm/c10d.h"
#include "dtensor/comm/c10d_backend_impl.h"
#include "dtensor/comm/c10d_store_impl.h"
#include "dtensor/comm/reduce.h"
#include "dtensor/core/error.h"

namespace dtensor {
namespace {

using messages::Clock;
using messages::MessageGroup;
using Counts = std::vector<std::int64_t>;
using Tensors = std::vector<at::Tensor>;

// A call that the group's thread launches on the group's stream.
class NcclCall final : public Work {
 public:
  WorkPtr launched;           // the members agreed, and NCCL has the call
  at::cuda::CUDAEvent ready;  // what the caller's stream had to do before
  at::cuda::CUDAEvent ended;
  c10::Device device{c10::DeviceType::CUDA, 0};

  void wait() override {
    launched->wait();
    ended.block(c10::cuda::getCurrentCUDAStream(device.index()));
  }
  bool done() override { return launched->done() && ended.query(); }
};

c10d::ReduceOp nccl_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::kProduct:
      return c10d::ReduceOp::PRODUCT;
    case ReduceOp::kMin:
      return c10d::ReduceOp::MIN;
    case ReduceOp::kMax:
      return c10d::ReduceOp::MAX;
    default:
      return c10d::ReduceOp::SUM;
  }
}

// Does NCCL's own reduction keep the contract? Its min and max lose NaNs, its avg rounds before it adds, and it has no
// bitwise operators, no short and no complex product.
bool nccl_reduces(c10::ScalarType type, ReduceOp op) {
  if (type == at::kLong || type == at::kInt || type == at::kChar || type == at::kByte) {
    return op == ReduceOp::kSum || op == ReduceOp::kProduct || op == ReduceOp::kMin || op == ReduceOp::kMax;
  }
  return c10::isFloatingType(type) && op == ReduceOp::kSum;
}

// The rows of `parts`, reduced in order.
at::Tensor reduce_rows(ReduceOp op, const at::Tensor& parts) { return reduce_tensors(op, parts.unbind(0)); }

Tensors pieces_of(const at::Tensor& buffer, const Counts& counts) { return buffer.view({-1}).split_with_sizes(counts); }

class NcclGroup final : public Communicator, public messages::Abortable {
 public:
  // `control` is a group of the same ranks over Gloo: there they agree on each call before it is launched, and find out
  // who is missing; NCCL itself would wait for ever.
  NcclGroup(C10dGroupPlan plan, std::shared_ptr<MessageGroup> control)
      : Communicator("nccl", plan.options.name, plan.rank, plan.ranks),
        plan_(std::move(plan)),
        control_(std::move(control)) {}
  ~NcclGroup() override { control_->drain(); }

  WorkPtr all_reduce(const at::Tensor& buffer, ReduceOp op) override {
    const Fingerprint fingerprint = check_all_reduce(*this, buffer, op);
    return submit(fingerprint, {buffer}, [this, buffer, op] {
      if (nccl_reduces(buffer.scalar_type(), op)) {
        Tensors tensors = {buffer.view({-1})};
        c10d::AllreduceOptions options;
        options.reduceOp = nccl_op(op);
        return finish(group().allreduce(tensors, options));
      }
      // Parts of one size: rank r reduces the r-th and sends it to all.
      const std::int64_t part = (buffer.numel() + size() - 1) / size();
      auto padded = at::zeros({part * size()}, buffer.options());
      padded.narrow(0, 0, buffer.numel()).copy_(buffer.view({-1}));
      auto parts = at::empty({size(), part}, buffer.options());
      exchange(pieces_of(parts, Counts(ranks().size(), part)), pieces_of(padded, Counts(ranks().size(), part)));
      auto mine = as_bytes(reduce_rows(op, parts));
      auto all = as_bytes(padded);
      finish(group()._allgather_base(all, mine));
      buffer.view({-1}).copy_(padded.narrow(0, 0, buffer.numel()));
    });
  }

  WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input, const Counts& counts) override {
    const Fingerprint fingerprint = check_all_gather(*this, output, input, counts);
    return submit(fingerprint, {output, input}, [this, output, input, counts] {
      exchange(pieces_of(output, counts), Tensors(counts.size(), input.view({-1})));
    });
  }

  WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input, const Counts& counts,
                         ReduceOp op) override {
    const Fingerprint fingerprint = check_reduce_scatter(*this, output, input, counts, op);
    return submit(fingerprint, {output, input}, [this, output, input, counts, op] {
      const bool even = std::equal(counts.begin() + 1, counts.end(), counts.begin());
      if (even && nccl_reduces(input.scalar_type(), op)) {
        c10d::ReduceScatterOptions options;
        options.reduceOp = nccl_op(op);
        auto to = output.view({-1});
        auto from = input.view({-1});
        return finish(group()._reduce_scatter_base(to, from, options));
      }
      auto parts = at::empty({size(), output.numel()}, input.options());
      exchange(pieces_of(parts, Counts(ranks().size(), output.numel())), pieces_of(input, counts));
      output.view({-1}).copy_(reduce_rows(op, parts));
    });
  }

  WorkPtr all_to_all(const at::Tensor& output, const at::Tensor& input, const Counts& recv_counts,
                     const Counts& send_counts) override {
    const Fingerprint fingerprint = check_all_to_all(*this, output, input, recv_counts, send_counts);
    return submit(fingerprint, {output, input}, [this, output, input, recv_counts, send_counts] {
      exchange(pieces_of(output, recv_counts), pieces_of(input, send_counts));
    });
  }

  WorkPtr broadcast(const at::Tensor& buffer, std::int64_t root) override {
    const Fingerprint fingerprint = check_broadcast(*this, buffer, root);
    return submit(fingerprint, {buffer}, [this, buffer, root] {
      Tensors tensors = {as_bytes(buffer)};
      if (tensors[0].numel() == 0) return;
      c10d::BroadcastOptions options;
      options.rootRank = root;
      finish(group().broadcast(tensors, options));
    });
  }

  WorkPtr scatter(const at::Tensor& output, const at::Tensor& input, const Counts& counts, std::int64_t root) override {
    const Fingerprint fingerprint = check_scatter(*this, output, input, counts, root);
    return submit(fingerprint, {output, input}, [this, output, input, counts, root] {
      Tensors from =
          rank() == root ? pieces_of(input, counts) : Tensors(counts.size(), at::empty({0}, output.options()));
      Tensors to(counts.size(), at::empty({0}, output.options()));
      to[static_cast<std::size_t>(root)] = output.view({-1});
      exchange(std::move(to), std::move(from));
    });
  }

  // NCCL has no tags, and two ranks that both send first wait for each other: messages go by way of the host.
  WorkPtr send(const at::Tensor& buffer, std::int64_t to, std::int64_t tag) override {
    check_point_to_point(*this, Operation::kSend, buffer, to, tag);
    return control_->send(buffer.cpu(), to, tag);
  }

  WorkPtr receive(const at::Tensor& buffer, std::int64_t from, std::int64_t tag) override {
    check_point_to_point(*this, Operation::kReceive, buffer, from, tag);
    return std::make_shared<Arriving>(buffer, at::empty(buffer.sizes(), buffer.options().device(at::kCPU)),
                                      [&](const at::Tensor& host) { return control_->receive(host, from, tag); });
  }

  WorkPtr barrier() override { return control_->barrier(); }

  const std::vector<std::int64_t>& members() const override { return ranks(); }
  void drain() override { control_->drain(); }
  void abort(const std::string& why) override {
    control_->abort(why);
    const std::lock_guard lock(mutex_);
    if (group_) group_->abort();
  }

 private:
  // A message that is in host memory when it ends, and is copied when it is waited for.
  class Arriving final : public Work {
   public:
    template <class Start>
    Arriving(at::Tensor buffer, at::Tensor host, Start start)
        : buffer_(std::move(buffer)), host_(std::move(host)), work_(start(host_)) {}
    void wait() override {
      work_->wait();
      const std::lock_guard lock(mutex_);
      if (!copied_) buffer_.copy_(host_);
      copied_ = true;
    }
    bool done() override { return work_->done(); }

   private:
    at::Tensor buffer_;
    at::Tensor host_;
    WorkPtr work_;
    std::mutex mutex_;
    bool copied_ = false;
  };

  // A contiguous tensor of one element may have any stride, but bytes must have stride 1.
  static at::Tensor as_bytes(const at::Tensor& buffer) {
    return buffer.as_strided({buffer.numel()}, {1}).view(at::kByte);
  }

  // The group's stream takes over when NCCL's has ended; nothing waits on the host.
  static void finish(const c10::intrusive_ptr<c10d::Work>& work) { work->wait(); }

  void exchange(Tensors to, Tensors from) {
    for (auto& tensor : to) tensor = as_bytes(tensor);
    for (auto& tensor : from) tensor = as_bytes(tensor);
    finish(group().alltoall(to, from));
  }

  c10d::ProcessGroupNCCL& group() {
    const std::lock_guard lock(mutex_);
    if (!group_) {
      auto options = c10d::ProcessGroupNCCL::Options::create();
      options->timeout = plan_.options.timeout;
      c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
      if (plan_.client) {
        store = make_rendezvous_store(plan_.client, plan_.key + "/nccl/", Clock::now() + plan_.options.timeout,
                                      plan_.check);
      }
      group_ = c10::make_intrusive<c10d::ProcessGroupNCCL>(store, static_cast<int>(rank()), static_cast<int>(size()),
                                                           options);
    }
    return *group_;
  }

  WorkPtr submit(const Fingerprint& fingerprint, const Tensors& buffers, std::function<void()> launch) {
    const c10::Device device = buffers.front().device();
    for (const at::Tensor& buffer : buffers) {
      if (buffer.defined() && (!buffer.is_cuda() || buffer.device() != device)) {
        fail_invalid(to_string(fingerprint.operation),
                     {.what = "the buffer is not in this group's memory, " + describe(),
                      .got = buffer.device().str(),
                      .expected = "CUDA tensors on one device"});
      }
    }
    auto call = std::make_shared<NcclCall>();
    call->device = device;
    call->ready.record(c10::cuda::getCurrentCUDAStream(device.index()));
    call->launched =
        control_->agree_then(fingerprint, buffers, [this, call, buffers, device, launch = std::move(launch)] {
          const at::NoGradGuard no_grad;
          const c10::cuda::CUDAGuard on(device);
          if (!stream_) stream_ = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index());
          const c10::cuda::CUDAStreamGuard guard(*stream_);
          call->ready.block(*stream_);
          for (const at::Tensor& buffer : buffers) {
            if (buffer.defined() && buffer.numel() > 0) {
              c10::cuda::CUDACachingAllocator::recordStream(buffer.storage().data_ptr(), *stream_);
            }
          }
          launch();
          call->ended.record(*stream_);
        });
    return call;
  }

  const C10dGroupPlan plan_;
  const std::shared_ptr<MessageGroup> control_;
  std::optional<c10::cuda::CUDAStream> stream_;  // of whoever runs the control group's calls
  std::mutex mutex_;
  c10::intrusive_ptr<c10d::ProcessGroupNCCL> group_;
};

class NcclBackend final : public C10dBackend {
 public:
  explicit NcclBackend(const std::string& address) : gloo_(make_gloo_backend(address)) {
    // A failed call is our error to raise: by default libtorch's watchdog would end the process. What the user has set
    // stays.
    setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", /*overwrite=*/0);
    setenv("TORCH_NCCL_ENABLE_MONITORING", "0", /*overwrite=*/0);
  }
  std::string name() const override { return "nccl"; }
  std::pair<CommunicatorPtr, std::shared_ptr<messages::Abortable>> make_group(const C10dGroupPlan& plan) override {
    auto control = std::dynamic_pointer_cast<MessageGroup>(gloo_->make_group(plan).first);
    const auto group = std::make_shared<NcclGroup>(plan, std::move(control));
    return {group, group};
  }

 private:
  const std::unique_ptr<C10dBackend> gloo_;
};

}  // namespace

bool nccl_was_built() { return true; }

std::unique_ptr<C10dBackend> make_nccl_backend(const std::string& address) {
  return std::make_unique<NcclBackend>(address);
}

}  // namespace dtensor
