#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <memory>
#include <string>

#include "dtensor/comm/rendezvous.h"

namespace dtensor {

// The rendezvous as libtorch's process groups want it. `prefix` goes before every key; no wait goes past `deadline`,
// and while waiting `check` is called now and then, which may throw.
c10::intrusive_ptr<c10d::Store> make_rendezvous_store(std::shared_ptr<RendezvousClient> client, std::string prefix,
                                                      std::chrono::steady_clock::time_point deadline,
                                                      std::function<void()> check);

}  // namespace dtensor
