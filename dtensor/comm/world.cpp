#include "dtensor/comm/world.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <mutex>
#include <numeric>
#include <thread>
#include <tuple>
#include <utility>

#include "dtensor/comm/c10d.h"
#include "dtensor/comm/fingerprint.h"
#include "dtensor/comm/launch_report_impl.h"
#include "dtensor/comm/mpi.h"
#include "dtensor/comm/rank_list_impl.h"
#include "dtensor/comm/rendezvous_impl.h"
#include "dtensor/comm/threads.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

using Ranks = std::vector<std::int64_t>;

std::string default_backend(const LaunchEnvironment& environment) {
  if (environment.launcher == Launcher::kOpenMpi && mpi_was_built()) return "mpi";
  return environment.size == 1 ? "threads" : "gloo";
}

// torchrun and srun name rank 0's host by themselves: a job of theirs on several hosts works without a secret, with a
// warning. It comes from rank 0, which listens, and once.
bool asks_for_remote(const LaunchEnvironment& environment) {
  const bool counts = environment.launcher == Launcher::kSlurm || environment.torchelastic;
  if (!counts || environment.size == 1 || !environment.secret.empty() || environment.allow_no_secret) return false;
  if (environment.rank == 0 && !rendezvous::is_loopback(environment.master_address)) {
    TORCH_WARN_ONCE("dtensor: this job has no secret, so anyone who can reach ", environment.master_address,
                    " may join it; try export DTENSOR_SECRET=$(openssl rand -hex 32) before the ranks start, or "
                    "DTENSOR_ALLOW_NO_SECRET=1 where nobody else can reach that address");
  }
  return true;
}

// Was this process started by an MPI launcher? Open MPI's mpirun, PMIx (srun, prun), PMI (srun, Hydra).
bool started_by_mpi() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_ID"}) {
    const char* value = std::getenv(name);
    if (value != nullptr && *value != '\0') return true;
  }
  return false;
}

// Outside mpirun MPI makes every process a world of one.
TransportPtr join_mpi(const LaunchEnvironment& environment, std::chrono::milliseconds timeout) {
  const auto refuse = [&](const std::string& got) {
    fail_invalid("World", {.what = "the backend mpi joins processes that mpirun started",
                           .got = got,
                           .expected = "mpirun, also for one rank",
                           .advice = "mpirun -n " + std::to_string(environment.size) +
                                     " program, or another backend (DTENSOR_BACKEND)"});
  };
  if (mpi_was_built() && !started_by_mpi()) {
    refuse(environment.size == 1 ? "a process that was started without it"
                                 : "rank " + std::to_string(environment.rank) + " of " +
                                       std::to_string(environment.size) + ", started by something else");
  }
  auto transport = make_mpi_transport(timeout);
  if (transport->size() == 1 && environment.size > 1) {
    refuse("an MPI world of one rank, and " + std::to_string(environment.size) + " ranks in the environment");
  }
  return transport;
}

Rendezvous rendezvous_of(const LaunchEnvironment& environment, std::chrono::milliseconds timeout) {
  if (environment.size > 1 && !environment.master_port) {
    fail_invalid("World", {.what = "nothing says where the ranks meet",
                           .got = "no MASTER_PORT",
                           .expected = "MASTER_ADDR and MASTER_PORT, alike on all ranks",
                           .advice = "dtensor run, torchrun, or mpirun with the mpi backend"});
  }
  if (environment.master_address.empty()) {
    fail_invalid("World", {.what = "nothing says where the ranks meet",
                           .got = "several hosts and no MASTER_ADDR",
                           .expected = "MASTER_ADDR and MASTER_PORT, alike on all ranks"});
  }
  return {.host = environment.master_address,
          .port = environment.master_port.value_or(0),
          .rank = environment.rank,
          .size = environment.size,
          .timeout = timeout,
          .agent_store = environment.agent_store,
          .attempt = environment.attempt,
          .secret = environment.secret,
          .allow_no_secret = environment.allow_no_secret || asks_for_remote(environment)};
}

// Ranks of one host take its GPUs in turn; a program that wants another sets it after World::from_env.
void choose_gpu(std::int64_t local_rank) {
  const c10::impl::VirtualGuardImpl gpus(c10::DeviceType::CUDA);
  const auto count = static_cast<std::int64_t>(gpus.deviceCount());
  if (count > 0) gpus.setDevice({c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(local_rank % count)});
}

TransportPtr make_transport(const std::string& backend, const LaunchEnvironment& environment,
                            std::chrono::milliseconds timeout) {
  check_backend_name("World", backend);
  if (backend == "mpi") return join_mpi(environment, timeout);
  if (backend != "threads") return make_c10d_transport(rendezvous_of(environment, timeout), backend);
  if (environment.size > 1) {
    fail_invalid("World", {.what = "processes cannot be joined by threads",
                           .got = "backend threads in a world of " + std::to_string(environment.size) + " processes",
                           .expected = "gloo, nccl or mpi",
                           .advice = "run_ranks, for ranks that are threads of one process"});
  }
  return make_thread_transports(1)[0];
}

}  // namespace

class World::Impl : public RankContext {
 public:
  Impl(TransportPtr transport, std::int64_t rank, std::int64_t size, const WorldOptions& options)
      : rank_(rank), size_(size), options_(options), exceptions_(std::uncaught_exceptions()) {
    check_environment_level();
    if (transport) {
      backend_ = transport->backend();
      transports_[backend_] = std::move(transport);
    }
  }

  ~Impl() override { drop_parts(); }

  void end() noexcept {
    try {
      leave(std::uncaught_exceptions() > exceptions_ ? "an exception ended it" : "");
    } catch (const Error& error) {
      if (std::string_view(error.what()).find("diverged") == std::string_view::npos) return;
      // Found at the very end, where nothing can be thrown any more: the program must not seem to have succeeded.
      std::cout.flush();
      std::fprintf(stderr, "%s\n", error.what());
      std::fflush(nullptr);
      std::_Exit(EXIT_FAILURE);
    } catch (const std::exception&) {
      // The others will notice by themselves.
    }
  }

  std::int64_t rank() const noexcept { return rank_; }
  std::int64_t size() const noexcept { return size_; }
  const std::string& backend() const noexcept { return backend_; }
  const WorldOptions& options() const noexcept { return options_; }

  // Made as the mesh dim with these ranks wants it, or as the world does.
  CommunicatorPtr group_of(const Ranks& ranks, const std::string& name) {
    const std::lock_guard lock(mutex_);
    const auto given = given_.find(ranks);
    if (given != given_.end()) return given->second;
    const auto wanted = wanted_.find(ranks);
    return find_or_make(ranks, name, wanted == wanted_.end() ? MeshDimOptions{} : wanted->second);
  }

  CommunicatorPtr everybody() {
    Ranks ranks(static_cast<std::size_t>(size_));
    std::iota(ranks.begin(), ranks.end(), 0);
    const std::lock_guard lock(mutex_);
    const auto given = given_.find(ranks);
    return given != given_.end() ? given->second : find_or_make(ranks, "world", {});
  }

  void use_group(CommunicatorPtr group) {
    check_group_ranks(group->ranks(), rank_, size_);
    const std::lock_guard lock(mutex_);
    if (!given_.try_emplace(group->ranks(), group).second) {
      fail_invalid("World::use_group", {.what = "these ranks have a group", .got = group->describe()});
    }
    group->watch_random(part<RandomSource>().progress());
    group->watch_history(provenance().shared_history());
  }

  void set_options(const Ranks& ranks, const MeshDimOptions& wanted) {
    const std::lock_guard lock(mutex_);
    const MeshDimOptions& known = wanted_.try_emplace(ranks, wanted).first->second;
    if (known.backend != wanted.backend || known.timeout != wanted.timeout) {
      fail_invalid("World::set_options", {.what = "the group of these ranks was given other options",
                                          .got = member_list(ranks),
                                          .expected = "the same options for every mesh that shares the group"});
    }
  }

  // All ranks of the world call this together when it is new.
  void need_transport(const std::string& backend) {
    {
      const std::lock_guard lock(mutex_);
      if (transports_.count(backend) > 0) return;
    }
    check_backend_name("init_device_mesh", backend);
    if (backend == "threads" || backend_ == "threads" || backend_.empty()) {
      fail_invalid("init_device_mesh", {.what = "this world cannot have groups of another backend",
                                        .got = backend + " in a world of " + (backend_.empty() ? "groups" : backend_),
                                        .advice = "processes started by dtensor run, torchrun or mpirun"});
    }
    auto environment = read_environment();
    environment.agent_store = false;
    if (backend != "mpi") environment.master_port = agree_on_port();
    add_transport(make_transport(backend, environment, options_.timeout));
  }

  // An error where replicas were written differently, and no collective has noticed.
  void leave(const std::string& why) {
    std::string diverged;
    if (why.empty()) diverged = compare_replicas();
    {
      const std::lock_guard lock(mutex_);
      if (std::exchange(left_, true)) return;
      // Before the others learn of it: what they do then is a consequence.
      if (backend_ != "threads") launch_impl::report_world(launch_impl::now_in_nanoseconds());
      for (const auto& [backend, transport] : transports_) transport->leave(diverged.empty() ? why : diverged);
    }
    if (!diverged.empty()) throw Error(ErrorKind::kCommunication, diverged);
  }

 private:
  // Of every mesh with replicated parameters that this rank wrote, with the others that do the same: the text of a
  // disagreement, or nothing. A rank that does not come within a few seconds is not waited for.
  std::string compare_replicas() {
    if (size_ == 1 || check_level() == CheckLevel::kOff || backend_.empty() || backend_ == "nccl") return {};
    {
      const std::lock_guard lock(mutex_);
      if (left_) return {};
    }
    static const std::string* const cause = new std::string("the last look at replicated parameters");
    for (const auto& [ranks, written] : provenance().replicas_written()) {
      if (ranks.size() < 2) continue;
      try {
        const CommTagGuard tagged({mix(written, 1), cause, 0, 0});
        const WorkPtr work = group_of(ranks, "mesh")->all_reduce(at::full({1}, 0, at::kLong), ReduceOp::kSum);
        const auto patience = std::chrono::steady_clock::now() +
                              std::min<std::chrono::milliseconds>(options_.timeout, std::chrono::seconds(5));
        while (!work->done() && std::chrono::steady_clock::now() < patience) {
          std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
        if (work->done()) work->wait();
      } catch (const Error& error) {
        if (std::string_view(error.what()).find("diverged") != std::string_view::npos) return error.what();
        return {};
      } catch (const std::exception&) {
        return {};
      }
    }
    return {};
  }

  using Key = std::tuple<Ranks, std::string, std::chrono::milliseconds>;  // with the backend and the timeout

  CommunicatorPtr find_or_make(const Ranks& ranks, const std::string& name, const MeshDimOptions& options) {
    const std::string& backend = options.backend.empty() ? backend_ : options.backend;
    const auto timeout = options.timeout.value_or(options_.timeout);
    const Key key(ranks, backend, timeout);
    const auto known = groups_.find(key);
    if (known != groups_.end()) return known->second;
    const auto transport = transports_.find(backend);
    if (transport == transports_.end()) {
      fail_invalid("World::group", {.what = "this world has no group of these ranks, and nothing to make one with",
                                    .got = member_list(ranks),
                                    .advice = "World::use_group first"});
    }
    if (left_) fail_invalid("World::group", {.what = "this rank has left its world"});
    const bool fingerprint = options_.fingerprint.value_or(true);
    const auto group =
        transport->second->make_group(ranks, {.name = name, .timeout = timeout, .fingerprint = fingerprint});
    group->watch_random(part<RandomSource>().progress());
    group->watch_history(provenance().shared_history());
    groups_.emplace(key, group);
    return group;
  }

  void add_transport(TransportPtr transport) {
    if (transport->rank() != rank_ || transport->size() != size_) {
      fail(ErrorKind::kCommunication, "init_device_mesh",
           {.what = "the two backends count ranks differently",
            .got = "rank " + std::to_string(transport->rank()) + " of " + std::to_string(transport->size()) + " on " +
                   transport->backend() + ", rank " + std::to_string(rank_) + " of " + std::to_string(size_) + " on " +
                   backend_});
    }
    const std::lock_guard lock(mutex_);
    transports_[transport->backend()] = std::move(transport);
  }

  // A port that is free on rank 0's host, told to all.
  int agree_on_port() {
    int port = 0;
    if (rank_ == 0) port = RendezvousServer("127.0.0.1", 0, 1).port();
    const auto message = at::full({1}, static_cast<double>(port),
                                  at::dtype(at::kLong).device(backend_ == "nccl" ? at::kCUDA : at::kCPU));
    everybody()->broadcast(message, 0)->wait();
    return static_cast<int>(message.item<std::int64_t>());
  }

  const std::int64_t rank_;
  const std::int64_t size_;
  const WorldOptions options_;
  const int exceptions_;
  std::string backend_;

  std::mutex mutex_;
  std::map<std::string, TransportPtr> transports_;
  std::map<Key, CommunicatorPtr> groups_;  // destroyed before the transports
  std::map<Ranks, CommunicatorPtr> given_;
  std::map<Ranks, MeshDimOptions> wanted_;
  bool left_ = false;
};

World World::from_env(const WorldOptions& options) {
  const LaunchEnvironment environment = read_environment();
  std::string backend = options.backend.empty() ? environment.backend : options.backend;
  if (backend.empty()) backend = default_backend(environment);
  if (backend == "nccl" && nccl_was_built()) choose_gpu(environment.local_rank);
  if (backend != "threads") launch_impl::report_world(0);
  return World(make_transport(backend, environment, options.timeout), options);
}

World::World(TransportPtr transport, const WorldOptions& options)
    : impl_(std::make_shared<Impl>(transport, transport->rank(), transport->size(), options)) {}

World::World(std::int64_t rank, std::int64_t size, const WorldOptions& options) {
  if (rank < 0 || rank >= size) {
    fail_invalid("World",
                 {.what = "the rank is not in the world", .got = std::to_string(rank) + " of " + std::to_string(size)});
  }
  impl_ = std::make_shared<Impl>(nullptr, rank, size, options);
}

World::World(World&&) noexcept = default;
World& World::operator=(World&& other) noexcept {
  if (impl_ && impl_ != other.impl_) impl_->end();
  impl_ = std::move(other.impl_);
  return *this;
}
World::~World() {
  if (impl_) impl_->end();
}

std::int64_t World::rank() const noexcept { return impl_->rank(); }
std::int64_t World::size() const noexcept { return impl_->size(); }
const std::string& World::backend() const noexcept { return impl_->backend(); }
const WorldOptions& World::options() const noexcept { return impl_->options(); }
std::shared_ptr<RankContext> World::context() const noexcept { return impl_; }
void World::use_group(CommunicatorPtr group) { impl_->use_group(std::move(group)); }
void World::leave(const std::string& why) { impl_->leave(why); }

CommunicatorPtr World::group_of(const Ranks& ranks, const std::string& name) {
  check_group_ranks(ranks, rank(), size());
  return impl_->group_of(ranks, name);
}

namespace {

void check_member(const World& world, const Mesh& mesh) {
  if (mesh.contains(world.rank())) return;
  fail_invalid("World::group", {.what = "this rank is not in the mesh, and has no group of it",
                                .got = "rank " + std::to_string(world.rank()) + " and " + mesh.to_string(),
                                .advice = "DeviceMesh::contains_me"});
}

}  // namespace

CommunicatorPtr World::group(const Mesh& mesh, std::int64_t dim) {
  check_member(*this, mesh);
  const Ranks ranks = mesh.group(dim, rank());
  const auto& names = mesh.names();
  return group_of(ranks, names.empty() ? "dim " + std::to_string(dim) : names[static_cast<std::size_t>(dim)]);
}

CommunicatorPtr World::group(const Mesh& mesh, std::string_view dim) { return group(mesh, mesh.dim_index(dim)); }

CommunicatorPtr World::group(const Mesh& mesh) {
  check_member(*this, mesh);
  return group_of(mesh.ranks(*mesh.row_of(rank())), "mesh");
}

CommunicatorPtr World::group() { return impl_->everybody(); }

void World::set_options(const Mesh& mesh, std::string_view dim, const MeshDimOptions& options) {
  const std::int64_t index = mesh.dim_index(dim);
  if (!options.backend.empty()) impl_->need_transport(options.backend);
  if (mesh.contains(rank())) impl_->set_options(mesh.group(index, rank()), options);
}

DeviceMesh init_device_mesh(World& world, c10::DeviceType device, const Dims& shape,
                            const std::vector<std::string>& names, const MeshOptions& options) {
  return init_device_mesh(world, device, Mesh::make(shape, names), options);
}

DeviceMesh init_device_mesh(World& world, c10::DeviceType device, const Mesh& mesh, const MeshOptions& options) {
  if (device != c10::DeviceType::CPU && device != c10::DeviceType::CUDA) {
    fail_unsupported("init_device_mesh", {.what = "meshes are made of CPUs or CUDA devices",
                                          .got = c10::DeviceTypeName(device, /*lower_case=*/true)});
  }
  const bool cuda = device == c10::DeviceType::CUDA;
  if (cuda && world.backend() == "threads" && world.size() > 1) {
    fail_unsupported("init_device_mesh",
                     {.what = "ranks that are threads cannot have a CUDA mesh: one thread of autograd serves a device",
                      .got = std::to_string(world.size()) + " thread ranks",
                      .expected = "one process per GPU",
                      .advice = "dtensor run --backend nccl"});
  }
  DeviceMesh result(mesh, cuda ? DeviceKind::kCuda : DeviceKind::kCpu, world.rank(), world.size(), world.impl_);
  for (const auto& [dim, wanted] : options) world.set_options(mesh, dim, wanted);
  return result;
}

CommunicatorPtr group_of(const DeviceMesh& mesh, const Ranks& ranks, const std::string& name) {
  auto* world = dynamic_cast<World::Impl*>(mesh.context().get());
  if (!world) {
    fail_invalid("group_of", {.what = "the mesh belongs to no world, so nothing can be sent over it",
                              .got = mesh.to_string(),
                              .advice = "init_device_mesh(world, device, mesh)"});
  }
  check_group_ranks(ranks, world->rank(), world->size());
  return world->group_of(ranks, name);
}

}  // namespace dtensor
