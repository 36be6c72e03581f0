#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace dtensor {

struct LaunchHost {
  std::string name;        // as ssh takes it: `b`, `user@b`, `10.0.0.2`
  std::int64_t ranks = 0;  // 0: not said
  friend bool operator==(const LaunchHost&, const LaunchHost&) = default;
};

// Reads `a,b:2`: two hosts, of which b takes two ranks.
std::vector<LaunchHost> parse_hosts(std::string_view text);

struct LaunchOptions {
  std::vector<std::string> command;         // the program and its arguments
  std::int64_t ranks = 0;                   // 0: as many as the hosts say, one for a host without a number
  std::string backend = {};                 // becomes DTENSOR_BACKEND; empty: the program's own choice
  std::vector<LaunchHost> hosts = {};       // empty: all ranks on this machine
  std::string master_address = {};          // empty: 127.0.0.1, or the first host's name when a host is remote
  int master_port = 0;                      // 0: one that is free on this machine
  std::chrono::milliseconds timeout{0};     // ends the ranks when they run longer; 0: never
  std::chrono::milliseconds grace{10'000};  // between SIGTERM and SIGKILL
};

// Runs one process per rank with torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
// MASTER_PORT), OMP_NUM_THREADS = cores / local ranks where it is not set, and DTENSOR_SECRET: the caller's, else a new
// random one, without which nobody may join the job. Returns when all have ended: 0, or the exit code of the rank that
// failed first, 128 + signal when a signal ended it, 124 after the timeout. First is the rank that left its world
// first: the others may fail as a consequence and end sooner. (Ranks on this host tell; without any, only ends are
// known.)
//   * Lines of a rank's output come out whole behind `[rank] `, on stdout or stderr as the rank wrote them. A line of
//     more than a mebibyte comes in pieces, each on a line of its own. Ranks read an empty stdin.
//   * The first failure ends the other ranks: SIGTERM, and SIGKILL after the grace.
//   * SIGINT, SIGTERM, SIGHUP and SIGQUIT are forwarded and start the grace, a second one kills at once; SIGUSR1 and
//     SIGUSR2 are forwarded.
//   * Every rank is a process group of its own and is killed with it, also when this process is killed.
//   * Ranks of other hosts run through ssh in this working directory, with the variables that start with DTENSOR_,
//     NCCL_, GLOO_, OMP_ or TORCH_, and LD_LIBRARY_PATH. When the connection goes, so do they. The secret goes through
//     ssh's standard input and stands in no command line.
// Throws Error before the first rank starts when an option makes no sense or the program is not there.
// Changes the signal handling of the process while it runs: call it from the main thread, once at a time.
int launch(const LaunchOptions& options);

}  // namespace dtensor
