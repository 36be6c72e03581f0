#pragma once

// What differs between libtorch's versions of c10d, and the messenger over its process groups. Seconds to compile: for
// the few files that need it.

#include <ATen/ops/from_blob.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <utility>
#include <vector>

#include "dtensor/comm/c10d_impl.h"

namespace dtensor::messages {

// What sends and receives. Up to 1.13 that is a ProcessGroup itself; later a ProcessGroup has a Backend per device.
#if TORCH_VERSION_MAJOR >= 2
using Sender = c10d::Backend;
inline c10::intrusive_ptr<Sender> sender_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::DeviceType type) {
  return group->getBackend(type);
}
#else
using Sender = c10d::ProcessGroup;
inline c10::intrusive_ptr<Sender> sender_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::DeviceType) {
  return group;
}
#endif

class SenderMessage final : public Message {
 public:
  explicit SenderMessage(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}

  void wait(Clock::time_point deadline) override {
    // 0 would mean the group's own timeout.
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    if (!work_->wait(std::max(left, std::chrono::milliseconds(1)))) throw std::runtime_error("aborted");
  }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
};

class SenderMessenger final : public Messenger {
 public:
  explicit SenderMessenger(c10::intrusive_ptr<Sender> sender) : sender_(std::move(sender)) {}

  MessagePtr send(std::int64_t to, int slot, Slice from) override {
    auto buffer = wrap(from);
    const std::lock_guard lock(issue_);
    return std::make_unique<SenderMessage>(sender_->send(buffer, static_cast<int>(to), slot));
  }

  MessagePtr receive(std::int64_t from, int slot, Slice to) override {
    auto buffer = wrap(to);
    const std::lock_guard lock(issue_);
    return std::make_unique<SenderMessage>(sender_->recv(buffer, static_cast<int>(from), slot));
  }

  void close() noexcept override {
    try {
      // A receive that times out closes all connections of a Gloo group: nothing else of its surface does.
      std::byte nothing{};
      const std::int64_t peer = sender_->getRank() == 0 ? 1 : 0;
      receive(peer, kNeverUsed, {&nothing, 1})->wait(Clock::now());
    } catch (const std::exception&) {
      // It must fail.
    }
  }

 private:
  static constexpr int kNeverUsed = (1 << 30) + (1 << 27);

  static std::vector<at::Tensor> wrap(Slice slice) {
    return {at::from_blob(slice.data, {static_cast<std::int64_t>(slice.bytes)}, at::TensorOptions(at::kByte))};
  }

  const c10::intrusive_ptr<Sender> sender_;
  std::mutex issue_;
};

}  // namespace dtensor::messages
