#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "dtensor/core/mesh.h"
#include "dtensor/core/plan.h"

namespace dtensor {

struct Program;

// A plan being played by one rank. Made by start(): the first message is on its way, and what follows happens when the
// result is asked for. All ranks of the plan start it, and ask for its result, in the same order among their
// operations.
class Execution {
 public:
  Execution(std::shared_ptr<const Program> program, at::Tensor local, c10::DeviceType device);
  ~Execution();
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;

  // This rank's local tensor under the target; undefined when it holds none. Waits for what is still under way.
  const at::Tensor& result();
  bool done() const noexcept;
  // Bytes that have come from other ranks so far.
  std::int64_t received() const noexcept { return received_; }

 private:
  class Player;
  std::shared_ptr<const Program> program_;
  at::Tensor now_;
  std::int64_t received_ = 0;
  std::unique_ptr<Player> player_;  // until the end
};

// Plays a plan on this rank's local tensor (undefined where the source has none on this rank). `mesh` says who this
// rank is and which world it talks in: the source's mesh, the target's or any other of that world. The result is dense
// and never shares memory with `local`, unless nothing had to be done; a tensor that is moved in, and that nobody else
// holds, may be worked on where it lies.
// An error before anything is sent: a local tensor that is not what the source spec says.
std::shared_ptr<Execution> start(const DeviceMesh& mesh, const Plan& plan, at::Tensor local);
at::Tensor execute(const DeviceMesh& mesh, const Plan& plan, const at::Tensor& local);

}  // namespace dtensor
