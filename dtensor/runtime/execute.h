#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>

#include "dtensor/core/mesh.h"
#include "dtensor/core/plan.h"
#include "dtensor/core/provenance.h"

namespace dtensor {

struct Program;
class EarlierPlan;

// A plan being played by one rank. Made by start(): the first message is on its way. What follows happens when the
// result is asked for, or when this rank starts the next plan, whichever comes first: all ranks of the plan start plans
// in the same order, but not all of them need to ask for the result.
class Execution {
 public:
  Execution(std::shared_ptr<const Program> program, at::Tensor local, c10::DeviceType device,
            const Provenance& provenance);
  ~Execution();
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;

  // This rank's local tensor under the target; undefined when it holds none. Waits for what is still under way.
  const at::Tensor& result();
  bool done() const noexcept;
  // Is there more to send than what is under way?
  bool sends_later() const;
  // Bytes that have come from other ranks so far.
  std::int64_t received() const noexcept { return received_; }

 private:
  class Player;
  friend class EarlierPlan;
  void advance();

  mutable std::mutex mutex_;  // of the player
  std::shared_ptr<const Program> program_;
  at::Tensor now_;
  std::int64_t received_ = 0;
  std::unique_ptr<Player> player_;  // until the end
  std::weak_ptr<EarlierPlan> waits_in_;
};

// Finishes the plan that this rank started before and that still has to send: later messages of a plan go out at points
// that all ranks reach. start() calls it. So does every other communication of the library.
void finish_earlier_plan(const DeviceMesh& mesh);

// Plays a plan on this rank's local tensor (undefined where the source has none on this rank). `mesh` says who this
// rank is and which world it talks in: the source's mesh, the target's or any other of that world. The result is dense
// and never shares memory with `local`, unless nothing had to be done; a tensor that is moved in, and that nobody else
// holds, may be worked on where it lies.
// An error before anything is sent: a local tensor that is not what the source spec says.
// The ranks compare `provenance`, that of the tensor which the plan serves, before data moves.
std::shared_ptr<Execution> start(const DeviceMesh& mesh, const Plan& plan, at::Tensor local,
                                 const Provenance& provenance = {});
at::Tensor execute(const DeviceMesh& mesh, const Plan& plan, const at::Tensor& local,
                   const Provenance& provenance = {});

}  // namespace dtensor
