#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

namespace dtensor::testing {

// How a process ended and all that it printed.
struct Ended {
  int code = -1;      // its exit code, or -1
  int signal = 0;     // that ended it, or 0
  bool late = false;  // it was still there at the deadline, and was killed
  double seconds = 0;
  std::string output;
};

// Programs running at once, started by fork and exec. None outlives the object.
class Processes {
 public:
  Processes() = default;
  ~Processes();
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  void start(const std::vector<std::string>& arguments);
  void kill(std::size_t index, int signal);
  // Waits for all, and kills those still there at the deadline.
  std::vector<Ended> finish(std::chrono::milliseconds timeout);

 private:
  struct Process {
    pid_t pid = -1;
    int output = -1;
    bool reaped = false;
    std::chrono::steady_clock::time_point started;
    Ended ended;
  };
  std::vector<Process> processes_;
};

}  // namespace dtensor::testing
