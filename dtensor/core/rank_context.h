#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <typeindex>

#include "dtensor/core/provenance.h"

namespace dtensor {

// What one rank has beside its meshes, reached through each of them: its groups, and the state that other folders keep
// per rank (caches, random numbers, recorders). There are no globals for these, so threads can be ranks.
class RankContext {
 public:
  RankContext() = default;
  RankContext(const RankContext&) = delete;
  RankContext& operator=(const RankContext&) = delete;
  virtual ~RankContext() = default;

  // The one T of this rank, made on first use. It lives as long as the context does, so it must not hold a DeviceMesh.
  template <class T>
  T& part() {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<void>& slot = parts_[std::type_index(typeid(T))];
    if (!slot) slot = std::make_shared<T>();
    return *static_cast<T*>(slot.get());
  }

  // What this rank made, to be compared with others. Made with the context, by the rank's own thread.
  RankProvenance& provenance() noexcept { return provenance_; }

 protected:
  // For those who own what the parts refer to.
  void drop_parts() {
    const std::lock_guard lock(mutex_);
    parts_.clear();
  }

 private:
  RankProvenance provenance_;
  std::mutex mutex_;
  std::map<std::type_index, std::shared_ptr<void>> parts_;
};

}  // namespace dtensor
