#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dtensor/core/placement.h"
#include "dtensor/core/provenance.h"
#include "dtensor/core/random_state.h"

namespace dtensor {

// An operation under way. It keeps its buffers alive until it has ended, even when a wait timed out or nobody waits.
class Work {
 public:
  virtual ~Work() = default;
  // Returns when the operation has ended on this rank (on CUDA: when it is ordered before what the current stream does
  // next). Throws Error(kCommunication) naming the group, the operation and the rank at fault when it failed or the
  // group's timeout passed; the group is poisoned then, and every later call on it says so at once.
  virtual void wait() = 0;
  virtual bool done() = 0;
};
using WorkPtr = std::shared_ptr<Work>;

// A group of ranks that talk to each other. All members make the same calls in the same order.
//
// Buffers are contiguous tensors on the group's device. `counts` are elements, one per group rank, and add up to the
// buffer's numel; they may differ and may be 0. Contract, on every backend:
//   * the result of a reduction is bit-identical on all ranks and from run to run;
//   * min and max propagate NaN as at::amax does; avg never overflows where the average does not;
//   * a reduction that the dtype does not have (dtensor::can_reduce) is refused on all ranks before anything is sent;
//   * calls on one group may come from several threads: they are issued one after the other.
class Communicator {
 public:
  virtual ~Communicator() = default;

  // My place in the group and the members' world ranks.
  std::int64_t rank() const noexcept { return rank_; }
  std::int64_t size() const noexcept { return static_cast<std::int64_t>(ranks_.size()); }
  const std::vector<std::int64_t>& ranks() const noexcept { return ranks_; }
  // As it stands in errors: `threads group "tp" {0,2}`.
  std::string describe() const;
  // How far this rank is in its random numbers; 0 where nobody said. All members must be equally far at a collective.
  std::uint64_t random_progress() const noexcept { return random_ ? random_->load(std::memory_order_relaxed) : 0; }
  void watch_random(RandomSource::Progress progress) { random_ = std::move(progress); }
  // What this rank did last, to tell where ranks parted; null where nobody said.
  const History* history() const noexcept { return history_.get(); }
  virtual void watch_history(std::shared_ptr<const History> history) { history_ = std::move(history); }
  // Can the members read each other's memory? Then who knows an address may copy from it, between two collectives.
  virtual bool shares_memory() const noexcept { return false; }

  virtual WorkPtr all_reduce(const at::Tensor& buffer, ReduceOp op) = 0;
  // output = the members' inputs one after the other; counts[r] elements come from rank r.
  virtual WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input,
                             const std::vector<std::int64_t>& counts) = 0;
  // output = my counts[rank()] elements of the reduction of the members' inputs.
  virtual WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                 const std::vector<std::int64_t>& counts, ReduceOp op) = 0;
  // send_counts[r] elements of input go to rank r, recv_counts[r] elements of output come from rank r.
  virtual WorkPtr all_to_all(const at::Tensor& output, const at::Tensor& input,
                             const std::vector<std::int64_t>& recv_counts,
                             const std::vector<std::int64_t>& send_counts) = 0;
  virtual WorkPtr broadcast(const at::Tensor& buffer, std::int64_t root) = 0;
  // counts[r] elements of the root's input go to rank r's output; elsewhere input is undefined.
  virtual WorkPtr scatter(const at::Tensor& output, const at::Tensor& input, const std::vector<std::int64_t>& counts,
                          std::int64_t root) = 0;
  virtual WorkPtr send(const at::Tensor& buffer, std::int64_t to, std::int64_t tag = 0) = 0;
  virtual WorkPtr receive(const at::Tensor& buffer, std::int64_t from, std::int64_t tag = 0) = 0;
  virtual WorkPtr barrier() = 0;

 protected:
  Communicator(std::string backend, std::string name, std::int64_t rank, std::vector<std::int64_t> ranks);

 private:
  std::string backend_;
  std::string name_;
  std::int64_t rank_;
  std::vector<std::int64_t> ranks_;
  RandomSource::Progress random_;
  std::shared_ptr<const History> history_;
};
using CommunicatorPtr = std::shared_ptr<Communicator>;

struct GroupOptions {
  std::string name;  // of the mesh dim, for messages
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  bool fingerprint = true;  // compare what the ranks are about to do before data moves
};

// One rank's way to its peers: makes groups. A group is made by its members alone, on first use: no other rank takes
// part, and making groups in different orders on different ranks cannot deadlock.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::int64_t rank() const = 0;
  virtual std::int64_t size() const = 0;
  // "threads", "gloo", "nccl", "mpi".
  virtual std::string backend() const = 0;
  // `ranks` are world ranks, distinct, in group order, and contain this one. Calls with the same ranks make new,
  // independent groups; the n-th call for a rank list on one member meets the n-th call on the others.
  virtual CommunicatorPtr make_group(const std::vector<std::int64_t>& ranks, const GroupOptions& options) = 0;
  // This rank is leaving: `why` is empty when it finished, else the error that its peers will be told.
  virtual void leave(const std::string& why) = 0;
};
using TransportPtr = std::shared_ptr<Transport>;

}  // namespace dtensor
