#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dtensor/comm/communicator.h"
#include "dtensor/comm/env.h"
#include "dtensor/core/mesh.h"

namespace dtensor {

struct WorldOptions {
  std::string backend =
      {};  // "threads", "gloo", "nccl", "mpi"; empty: DTENSOR_BACKEND, else as the program was started
  std::chrono::milliseconds timeout = std::chrono::minutes(10);  // of every wait
  // Compare what the ranks are about to do before data moves: the default. Threads always do.
  std::optional<bool> fingerprint = std::nullopt;
};

// How the groups of one mesh dim talk, where that is not as the world does.
struct MeshDimOptions {
  std::string backend = {};
  std::optional<std::chrono::milliseconds> timeout = std::nullopt;
};
using MeshOptions = std::map<std::string, MeshDimOptions>;  // by the mesh dim's name

// One rank's place among all ranks, and its groups. Destroying it is leaving: the others are told, and told that it was
// an error when an exception is under way. May be used from several threads.
class World {
 public:
  // torchrun's, mpirun's and srun's variables; a world of one without them. The default backend is mpi under mpirun (if
  // it was built), threads alone, gloo otherwise; mpi outside mpirun is an error. With nccl, makes the GPU of the local
  // rank current. Waits until all ranks have come. With DTENSOR_SECRET only processes that know it may join; without
  // one rank 0 listens on loopback addresses only (docs/communication.md, "Who may join").
  static World from_env(const WorldOptions& options = {});
  // Over any transport.
  explicit World(TransportPtr transport, const WorldOptions& options = {});
  // Over groups that the program already has (see c10d_group.h), to be given by use_group.
  World(std::int64_t rank, std::int64_t size, const WorldOptions& options = {});
  World(World&&) noexcept;
  World& operator=(World&&) noexcept;
  ~World();

  std::int64_t rank() const noexcept;
  std::int64_t size() const noexcept;
  // "threads", "gloo", "nccl", "mpi"; empty over given groups alone.
  const std::string& backend() const noexcept;
  const WorldOptions& options() const noexcept;
  // What this rank has beside its groups; its meshes refer to it.
  std::shared_ptr<RankContext> context() const noexcept;

  // My group along a mesh dim; over all ranks of (my row of) a mesh; over the world; over any ranks, mine among them.
  // Made on first use by its members alone, and kept. Meshes that share a group's ranks share the group and the options
  // that it was given; the group over the world is always made as the world's options say.
  CommunicatorPtr group(const Mesh& mesh, std::int64_t dim);
  CommunicatorPtr group(const Mesh& mesh, std::string_view dim);
  CommunicatorPtr group(const Mesh& mesh);
  CommunicatorPtr group();
  CommunicatorPtr group_of(const std::vector<std::int64_t>& ranks, const std::string& name);

  // From now on this is the group of its ranks, in their order. All its members do this, before its first use.
  void use_group(CommunicatorPtr group);
  // The groups along this dim of the mesh are to be made this way. Before their first use, alike on all members.
  void set_options(const Mesh& mesh, std::string_view dim, const MeshDimOptions& options);

  // As ~World does; `why` is the error that ended this rank, empty when it finished. Groups cannot be used any more.
  void leave(const std::string& why = {});

 private:
  friend DeviceMesh init_device_mesh(World& world, c10::DeviceType device, const Mesh& mesh,
                                     const MeshOptions& options);
  friend CommunicatorPtr group_of(const DeviceMesh& mesh, const std::vector<std::int64_t>& ranks,
                                  const std::string& name);
  class Impl;
  std::shared_ptr<Impl> impl_;  // meshes keep it too; what they find there after ~World has left
};

// Runs `body` as ranks 0 … n-1, each on its own thread of this process, and returns when all have ended. A rank that
// throws releases the others with an error naming it; the first error is thrown again. libtorch's thread counts are as
// they were, afterwards; in the ranks they share the cores. The caller's grad mode and the like hold in the ranks.
// Each rank has a default CPU generator of its own, as a process has: it starts from libtorch's default seed
// (c10::default_rng_seed_val), torch::manual_seed in the rank seeds it, and plain random operators without a generator
// draw from it. Threads that a rank starts itself draw from the generator that all threads share.
void run_ranks(std::int64_t n, const std::function<void(World&)>& body, const WorldOptions& options = {});

// Ranks 0 … product-1 of the world as a mesh; every rank calls it, those outside the mesh take part in nothing.
// Meshes of other ranks: Mesh::from_ranks. Threads cannot have a CUDA mesh. An option that names a backend which the
// world does not have yet needs all ranks of the world, here.
DeviceMesh init_device_mesh(World& world, c10::DeviceType device, const Dims& shape,
                            const std::vector<std::string>& names = {}, const MeshOptions& options = {});
DeviceMesh init_device_mesh(World& world, c10::DeviceType device, const Mesh& mesh, const MeshOptions& options = {});

// World::group_of, of the world that the mesh was made in.
CommunicatorPtr group_of(const DeviceMesh& mesh, const std::vector<std::int64_t>& ranks, const std::string& name);

}  // namespace dtensor
