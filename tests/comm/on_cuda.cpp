#include "tests/comm/on_cuda.h"

#include <mutex>
#include <utility>

namespace dtensor::testing {
namespace {

at::Tensor to_device(const at::Tensor& tensor) { return tensor.defined() ? tensor.to(at::kCUDA) : tensor; }

// Copies what arrived to where the caller looks for it.
class CopyBack final : public Work {
 public:
  CopyBack(WorkPtr work, at::Tensor host, at::Tensor device)
      : work_(std::move(work)), host_(std::move(host)), device_(std::move(device)) {}
  void wait() override {
    work_->wait();
    const std::lock_guard lock(mutex_);
    if (host_.defined() && !std::exchange(copied_, true)) host_.copy_(device_);
  }
  bool done() override {
    if (!work_->done()) return false;
    wait();
    return true;
  }

 private:
  WorkPtr work_;
  at::Tensor host_;
  at::Tensor device_;
  std::mutex mutex_;
  bool copied_ = false;
};

class OnCudaGroup final : public Communicator {
 public:
  using Counts = std::vector<std::int64_t>;
  explicit OnCudaGroup(CommunicatorPtr inner)
      : Communicator("nccl", "on_cuda", inner->rank(), inner->ranks()), inner_(std::move(inner)) {}

  WorkPtr all_reduce(const at::Tensor& buffer, ReduceOp op) override {
    const at::Tensor device = to_device(buffer);
    return back(inner_->all_reduce(device, op), buffer, device);
  }
  WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input, const Counts& counts) override {
    // Where the contract lets input be a part of output, it must be so on the device too.
    const at::Tensor device = to_device(output);
    const bool shared = input.defined() && input.is_alias_of(output);
    const at::Tensor from =
        shared ? device.view({-1}).narrow(0, input.storage_offset() - output.storage_offset(), input.numel())
               : to_device(input);
    return back(inner_->all_gather(device, from, counts), output, device);
  }
  WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input, const Counts& counts,
                         ReduceOp op) override {
    const at::Tensor device = to_device(output);
    return back(inner_->reduce_scatter(device, to_device(input), counts, op), output, device);
  }
  WorkPtr all_to_all(const at::Tensor& output, const at::Tensor& input, const Counts& recv_counts,
                     const Counts& send_counts) override {
    const at::Tensor device = to_device(output);
    return back(inner_->all_to_all(device, to_device(input), recv_counts, send_counts), output, device);
  }
  WorkPtr broadcast(const at::Tensor& buffer, std::int64_t root) override {
    const at::Tensor device = to_device(buffer);
    return back(inner_->broadcast(device, root), buffer, device);
  }
  WorkPtr scatter(const at::Tensor& output, const at::Tensor& input, const Counts& counts, std::int64_t root) override {
    const at::Tensor device = to_device(output);
    return back(inner_->scatter(device, to_device(input), counts, root), output, device);
  }
  WorkPtr send(const at::Tensor& buffer, std::int64_t to, std::int64_t tag) override {
    return inner_->send(to_device(buffer), to, tag);
  }
  WorkPtr receive(const at::Tensor& buffer, std::int64_t from, std::int64_t tag) override {
    const at::Tensor device = to_device(buffer);
    return back(inner_->receive(device, from, tag), buffer, device);
  }
  WorkPtr barrier() override { return inner_->barrier(); }

 private:
  static WorkPtr back(WorkPtr work, const at::Tensor& host, const at::Tensor& device) {
    return std::make_shared<CopyBack>(std::move(work), host, device);
  }
  const CommunicatorPtr inner_;
};

class OnCuda final : public Transport {
 public:
  explicit OnCuda(TransportPtr inner) : inner_(std::move(inner)) {}
  std::int64_t rank() const override { return inner_->rank(); }
  std::int64_t size() const override { return inner_->size(); }
  std::string backend() const override { return inner_->backend(); }
  CommunicatorPtr make_group(const std::vector<std::int64_t>& ranks, const GroupOptions& options) override {
    return std::make_shared<OnCudaGroup>(inner_->make_group(ranks, options));
  }
  void leave(const std::string& why) override { inner_->leave(why); }

 private:
  const TransportPtr inner_;
};

}  // namespace

TransportPtr on_cuda(TransportPtr transport) { return std::make_shared<OnCuda>(std::move(transport)); }

}  // namespace dtensor::testing
