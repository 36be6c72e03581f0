#include "tests/comm/c10d_processes.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <stdexcept>

extern char** environ;

namespace dtensor::testing {

Processes::~Processes() {
  for (Process& process : processes_) {
    if (process.reaped) continue;
    ::kill(process.pid, SIGKILL);
    waitpid(process.pid, nullptr, 0);
    close(process.output);
  }
}

void Processes::start(const std::vector<std::string>& arguments) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  Process process;
  process.started = std::chrono::steady_clock::now();
  const int problem = posix_spawnp(&process.pid, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  if (problem != 0) {
    close(ends[0]);
    throw std::runtime_error("cannot start " + arguments.front());
  }
  process.output = ends[0];
  processes_.push_back(process);
}

void Processes::kill(std::size_t index, int signal) { ::kill(processes_.at(index).pid, signal); }

std::vector<Ended> Processes::finish(std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::size_t open = processes_.size();
  while (open > 0) {
    std::vector<pollfd> entries;
    std::vector<Process*> order;
    for (Process& process : processes_) {
      if (process.reaped) continue;
      entries.push_back({process.output, POLLIN, 0});
      order.push_back(&process);
    }
    poll(entries.data(), entries.size(), 20);
    const bool over = std::chrono::steady_clock::now() >= deadline;
    for (std::size_t i = 0; i < order.size(); ++i) {
      Process& process = *order[i];
      char buffer[4096];
      ssize_t got = entries[i].revents != 0 ? read(process.output, buffer, sizeof buffer) : -1;
      if (got > 0) {
        process.ended.output.append(buffer, static_cast<std::size_t>(got));
        continue;
      }
      if (over && got != 0 && !process.ended.late) {
        process.ended.late = true;
        ::kill(process.pid, SIGKILL);
        continue;
      }
      if (got != 0) continue;
      int status = 0;
      waitpid(process.pid, &status, 0);
      close(process.output);
      process.reaped = true;
      process.ended.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - process.started).count();
      if (WIFEXITED(status)) process.ended.code = WEXITSTATUS(status);
      if (WIFSIGNALED(status)) process.ended.signal = WTERMSIG(status);
      --open;
    }
  }
  std::vector<Ended> result;
  for (Process& process : processes_) result.push_back(std::move(process.ended));
  processes_.clear();
  return result;
}

}  // namespace dtensor::testing
