#include "tests/comm/on_cuda.h"

#include <map>
#include <mutex>
#include <tuple>
#include <utility>

namespace dtensor::testing {
namespace {

// The device's copies of host buffers that calls are under way on: a call on a buffer that another one still works on
// must work on the same memory there, too.
class Copies {
 public:
  at::Tensor take(const at::Tensor& host) {
    const std::lock_guard lock(mutex_);
    Copy& copy = copies_[key(host)];
    if (copy.users++ == 0) copy.device = host.to(at::kCUDA);
    return copy.device;
  }
  void bring_back(const at::Tensor& host) {
    const std::lock_guard lock(mutex_);
    host.copy_(copies_.at(key(host)).device);
  }
  void release(const at::Tensor& host) {
    const std::lock_guard lock(mutex_);
    const auto entry = copies_.find(key(host));
    if (--entry->second.users == 0) copies_.erase(entry);
  }
  // For reading only.
  at::Tensor look(const at::Tensor& host) {
    if (!host.defined()) return host;
    const std::lock_guard lock(mutex_);
    const auto entry = copies_.find(key(host));
    return entry == copies_.end() ? host.to(at::kCUDA) : entry->second.device;
  }

 private:
  struct Copy {
    at::Tensor device;
    int users = 0;
  };
  using Key = std::tuple<const void*, std::int64_t, c10::ScalarType>;
  static Key key(const at::Tensor& host) { return {host.data_ptr(), host.numel(), host.scalar_type()}; }
  std::mutex mutex_;
  std::map<Key, Copy> copies_;
};

// Copies what arrived to where the caller looks for it.
class CopyBack final : public Work {
 public:
  CopyBack(std::shared_ptr<Copies> copies, WorkPtr work, at::Tensor host)
      : copies_(std::move(copies)), work_(std::move(work)), host_(std::move(host)) {}
  ~CopyBack() override { copies_->release(host_); }
  void wait() override {
    work_->wait();
    copies_->bring_back(host_);
  }
  bool done() override {
    if (!work_->done()) return false;
    wait();
    return true;
  }

 private:
  const std::shared_ptr<Copies> copies_;
  const WorkPtr work_;
  const at::Tensor host_;
};

class OnCudaGroup final : public Communicator {
 public:
  using Counts = std::vector<std::int64_t>;
  OnCudaGroup(CommunicatorPtr inner, std::shared_ptr<Copies> copies, const std::string& name)
      : Communicator("nccl", name, inner->rank(), inner->ranks()),
        inner_(std::move(inner)),
        copies_(std::move(copies)) {}

  WorkPtr all_reduce(const at::Tensor& buffer, ReduceOp op) override {
    return with(buffer, [&](const at::Tensor& device) { return inner_->all_reduce(device, op); });
  }
  WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input, const Counts& counts) override {
    return with(output, [&](const at::Tensor& device) {
      // Where input is a part of output, it must be so on the device.
      if (!input.defined() || !input.is_alias_of(output))
        return inner_->all_gather(device, copies_->look(input), counts);
      const std::int64_t begin = input.storage_offset() - output.storage_offset();
      return inner_->all_gather(device, device.view({-1}).narrow(0, begin, input.numel()), counts);
    });
  }
  WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input, const Counts& counts,
                         ReduceOp op) override {
    return with(output, [&](const at::Tensor& device) {
      return inner_->reduce_scatter(device, copies_->look(input), counts, op);
    });
  }
  WorkPtr all_to_all(const at::Tensor& output, const at::Tensor& input, const Counts& recv_counts,
                     const Counts& send_counts) override {
    return with(output, [&](const at::Tensor& device) {
      return inner_->all_to_all(device, copies_->look(input), recv_counts, send_counts);
    });
  }
  WorkPtr broadcast(const at::Tensor& buffer, std::int64_t root) override {
    return with(buffer, [&](const at::Tensor& device) { return inner_->broadcast(device, root); });
  }
  WorkPtr scatter(const at::Tensor& output, const at::Tensor& input, const Counts& counts, std::int64_t root) override {
    return with(output,
                [&](const at::Tensor& device) { return inner_->scatter(device, copies_->look(input), counts, root); });
  }
  WorkPtr send(const at::Tensor& buffer, std::int64_t to, std::int64_t tag) override {
    return inner_->send(copies_->look(buffer), to, tag);
  }
  WorkPtr receive(const at::Tensor& buffer, std::int64_t from, std::int64_t tag) override {
    return with(buffer, [&](const at::Tensor& device) { return inner_->receive(device, from, tag); });
  }
  WorkPtr barrier() override { return inner_->barrier(); }

 private:
  template <class Call>
  WorkPtr with(const at::Tensor& host, Call call) {
    if (!host.defined()) return call(host);  // to be refused
    const at::Tensor device = copies_->take(host);
    try {
      return std::make_shared<CopyBack>(copies_, call(device), host);
    } catch (...) {
      copies_->release(host);
      throw;
    }
  }
  const CommunicatorPtr inner_;
  const std::shared_ptr<Copies> copies_;
};

class OnCuda final : public Transport {
 public:
  explicit OnCuda(TransportPtr inner) : inner_(std::move(inner)) {}
  std::int64_t rank() const override { return inner_->rank(); }
  std::int64_t size() const override { return inner_->size(); }
  std::string backend() const override { return inner_->backend(); }
  CommunicatorPtr make_group(const std::vector<std::int64_t>& ranks, const GroupOptions& options) override {
    return std::make_shared<OnCudaGroup>(inner_->make_group(ranks, options), copies_, options.name);
  }
  void leave(const std::string& why) override { inner_->leave(why); }

 private:
  const TransportPtr inner_;
  const std::shared_ptr<Copies> copies_ = std::make_shared<Copies>();
};

}  // namespace

TransportPtr on_cuda(TransportPtr transport) { return std::make_shared<OnCuda>(std::move(transport)); }

}  // namespace dtensor::testing
