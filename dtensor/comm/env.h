#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace dtensor {

enum class Launcher : std::uint8_t { kNone, kTorchrun, kOpenMpi, kSlurm };

// How this program was started, as its environment says.
//   torchrun (and `dtensor run`)  RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
//   Open MPI's mpirun             OMPI_COMM_WORLD_RANK, …_SIZE, …_LOCAL_RANK, …_LOCAL_SIZE
//   Slurm's srun                  SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_NODELIST, SLURM_JOB_ID
// The first that is there counts. MASTER_ADDR, MASTER_PORT, DTENSOR_BACKEND, DTENSOR_SECRET and DTENSOR_ALLOW_NO_SECRET
// are read under all of them.
struct LaunchEnvironment {
  Launcher launcher = Launcher::kNone;
  std::int64_t rank = 0;
  std::int64_t size = 1;
  std::int64_t local_rank = 0;
  // Where rank 0 can be met. Loopback when all ranks are on this host; empty when nothing says where.
  std::string master_address = "127.0.0.1";
  std::optional<int> master_port;
  // torchrun's agent keeps a store at that port; which restart this is.
  bool torchelastic = false;  // torchrun itself, and not only its variables
  bool agent_store = false;
  std::string attempt = "0";
  std::string backend;  // "threads", "gloo", "nccl", "mpi"; empty when nothing is said
  // What all ranks of the job know and nobody else (DTENSOR_SECRET; `dtensor run` makes one); empty: there is none.
  std::string secret;
  bool allow_no_secret = false;  // DTENSOR_ALLOW_NO_SECRET=1: without a secret too, rank 0 may be on another host
};

// A variable's value, or null.
using Variables = std::function<const char*(const char* name)>;

// Everything is checked; an error names the variable: `[environment] RANK is not a number; got 'abc'; …`.
LaunchEnvironment read_environment(const Variables& variables);
LaunchEnvironment read_environment();

// An error that lists the backends unless this is the name of one.
void check_backend_name(const std::string& where, const std::string& backend);

}  // namespace dtensor
