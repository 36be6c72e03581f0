#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace dtensor::testing {

// A program as the tests start it, in a process group of its own, its output collected.
class Process {
 public:
  using Environment = std::map<std::string, std::string>;
  struct Result {
    int code = -1;  // 128 + signal when a signal ended it
    std::string out, err;
    double seconds = 0;
    bool timed_out = false;
  };

  explicit Process(const std::vector<std::string>& command, const Environment& environment = {}) {
    int out[2], err[2];
    if (pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0) throw std::runtime_error("pipe2");
    std::vector<char*> words;
    for (const std::string& word : command) words.push_back(const_cast<char*>(word.c_str()));
    words.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      setpgid(0, 0);
      dup2(out[1], 1);
      dup2(err[1], 2);
      for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
      execvp(words[0], words.data());
      _exit(127);
    }
    setpgid(pid_, pid_);
    close(out[1]);
    close(err[1]);
    out_ = out[0];
    err_ = err[0];
  }
  ~Process() {
    if (pid_ > 0) kill_now();
    close(out_);
    close(err_);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int number) const { ::kill(pid_, number); }

  // Reads until `text` stands in the output; false when the program ends or the time is over before.
  bool wait_for(const std::string& text, double seconds = 20) {
    const auto until = now() + seconds;
    while (result_.out.find(text) == std::string::npos && result_.err.find(text) == std::string::npos) {
      if (now() > until || !read_some(0.05)) return false;
    }
    return true;
  }

  // Waits for its end and the end of its output; kills it when that takes longer than `seconds`.
  Result finish(double seconds = 60) {
    const auto until = now() + seconds;
    while (read_some(0.05)) {
      if (now() < until) continue;
      result_.timed_out = true;
      break;
    }
    int status = 0;
    while (!result_.timed_out && waitpid(pid_, &status, WNOHANG) == 0) {
      if (now() > until) result_.timed_out = true;
      usleep(1000);
    }
    result_.seconds = now() - start_;
    if (result_.timed_out) {
      kill_now();
    } else {
      result_.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      pid_ = -1;
    }
    return result_;
  }

 private:
  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  // False when both outputs have ended.
  bool read_some(double seconds) {
    pollfd fds[2] = {{out_open_ ? out_ : -1, POLLIN, 0}, {err_open_ ? err_ : -1, POLLIN, 0}};
    poll(fds, 2, static_cast<int>(seconds * 1000));
    const auto take = [](const pollfd& fd, std::string& text, bool& open) {
      if (fd.fd < 0 || fd.revents == 0) return;
      char bytes[65536];
      const ssize_t got = read(fd.fd, bytes, sizeof bytes);
      if (got > 0) text.append(bytes, static_cast<std::size_t>(got));
      if (got == 0) open = false;
    };
    take(fds[0], result_.out, out_open_);
    take(fds[1], result_.err, err_open_);
    return out_open_ || err_open_;
  }
  void kill_now() {
    ::kill(-pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

  pid_t pid_ = -1;
  int out_ = -1, err_ = -1;
  bool out_open_ = true, err_open_ = true;
  double start_ = now();
  Result result_;
};

// So many ranks of a program under mpirun, as root and on few cores too.
inline Process::Result under_mpirun(const std::string& mpirun, std::int64_t ranks, std::vector<std::string> command,
                                    double seconds) {
  command.insert(command.begin(), {mpirun, "--oversubscribe", "--bind-to", "none", "-n", std::to_string(ranks)});
  return Process(command, {{"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                           {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
                           {"OMPI_MCA_btl_base_warn_component_unused", "0"},
                           {"OMP_NUM_THREADS", "1"}})
      .finish(seconds);
}

}  // namespace dtensor::testing
