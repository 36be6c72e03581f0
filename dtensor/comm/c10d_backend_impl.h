#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dtensor/comm/c10d_impl.h"

namespace dtensor {

// All that a backend needs to make one group.
struct C10dGroupPlan {
  std::string key;  // of the group in the rendezvous
  std::int64_t rank = 0;
  std::vector<std::int64_t> ranks;
  GroupOptions options;
  std::shared_ptr<RendezvousClient> client;
  std::shared_ptr<messages::Liveness> liveness;
  // Returns when all members have come to make the group; throws, naming those that did not.
  std::function<void(std::chrono::steady_clock::time_point deadline)> gather;
  // Throws when a member is known to be gone.
  std::function<void()> check;
  std::function<void(const std::string& text)> report;
};

class C10dBackend {
 public:
  virtual ~C10dBackend() = default;
  virtual std::string name() const = 0;
  // Returns at once: the members meet on the group's own thread.
  virtual std::pair<CommunicatorPtr, std::shared_ptr<messages::Abortable>> make_group(const C10dGroupPlan& plan) = 0;
};

// `address` is this host's.
std::unique_ptr<C10dBackend> make_gloo_backend(const std::string& address);
// An error where this build has no NCCL.
std::unique_ptr<C10dBackend> make_nccl_backend(const std::string& address);

// Rank 0 leaves word of `port` in the store of the launcher's at rendezvous.host:port; the others read it there.
int agree_on_port(const Rendezvous& rendezvous, int port);

}  // namespace dtensor
