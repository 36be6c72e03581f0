#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <memory>
#include <optional>

#include "dtensor/comm/launch_impl.h"
#include "dtensor/comm/launch_report_impl.h"
#include "dtensor/comm/rank_list_impl.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"

namespace dtensor::launch_impl {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::array kEndingSignals = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};
constexpr std::array kPassedSignals = {SIGUSR1, SIGUSR2};
constexpr std::size_t kBacklog = std::size_t{1} << 20;  // of our own output, before the ranks' output waits
constexpr std::size_t kSureWrite = 4096;                // what a writable pipe takes without blocking (PIPE_BUF)
constexpr milliseconds kDrain{500};                     // for output of processes that left their rank's group
constexpr milliseconds kSshGrace{2000};                 // for ssh to end after it was told to kill its rank
constexpr milliseconds kSettle{5000};                   // for a rank that left its world to end, and say how
constexpr int kLowestReport = 100;                      // the descriptor's number: none that shell scripts use
constexpr int kTimedOut = 124;                          // as timeout(1)

[[noreturn]] void fail_system(const std::string& what, int error) {
  fail(ErrorKind::kInternal, kWhere,
       {.what = what,
        .got = std::strerror(error),
        .advice = error == EMFILE ? "a higher limit of open files (ulimit -n), or fewer ranks" : ""});
}

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { reset(); }
  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  void reset() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }

 private:
  int fd_ = -1;
};

struct Pipe {
  Fd read;
  Fd write;
};

Pipe make_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) fail_system("no pipe could be made", errno);
  return {Fd(ends[0]), Fd(ends[1])};
}

void write_all(int fd, const void* bytes, std::size_t size) {
  const char* at = static_cast<const char*>(bytes);
  while (size > 0) {
    const ssize_t written = write(fd, at, size);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;  // the reader is gone, and with it the need
    at += written;
    size -= static_cast<std::size_t>(written);
  }
}

// Takes the signals of this process as a file while it lives, and puts everything back.
class SignalWatch {
 public:
  SignalWatch() {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    for (const int number : kEndingSignals) sigaddset(&set, number);
    for (const int number : kPassedSignals) sigaddset(&set, number);
    struct sigaction plain {};
    plain.sa_handler = SIG_DFL;
    sigaction(SIGCHLD, &plain, &child_);  // an ignored SIGCHLD would reap the ranks before us
    plain.sa_handler = SIG_IGN;
    sigaction(SIGPIPE, &plain, &pipe_);
    pthread_sigmask(SIG_BLOCK, &set, &mask_);
    fd_ = Fd(signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
    if (!fd_.is_open()) {
      const int error = errno;
      restore();
      fail_system("signals cannot be watched", error);
    }
  }
  ~SignalWatch() {
    signalfd_siginfo info;
    while (read(fd_.get(), &info, sizeof(info)) == sizeof(info)) {
    }
    restore();
  }
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

  int fd() const { return fd_.get(); }
  // Also called by a child before it becomes the program.
  void restore() const {
    sigaction(SIGCHLD, &child_, nullptr);
    sigaction(SIGPIPE, &pipe_, nullptr);
    pthread_sigmask(SIG_SETMASK, &mask_, nullptr);
  }

 private:
  Fd fd_;
  sigset_t mask_{};
  struct sigaction child_ {};
  struct sigaction pipe_ {};
};

// A process that kills the ranks' groups should this one be killed: a rank dies with its parent by itself
// (PR_SET_PDEATHSIG), what the rank has started does not. It learns of groups through a pipe and acts when that closes.
class Guard {
 public:
  explicit Guard(std::size_t ranks) {
    std::vector<pid_t> groups;
    groups.reserve(ranks);
    Pipe pipe = make_pipe();
    pid_ = fork();
    if (pid_ < 0) fail_system("no process could be started", errno);
    if (pid_ == 0) {
      pipe.write.reset();
      watch(pipe.read.get(), groups);
      _exit(0);
    }
    write_ = std::move(pipe.write);
  }
  ~Guard() {
    write_.reset();
    while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  void add(pid_t group) { write_all(write_.get(), &group, sizeof(group)); }
  void remove(pid_t group) { add(-group); }

 private:
  static void watch(int fd, std::vector<pid_t>& groups) {
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, nullptr);
    setpgid(0, 0);
    const int null = open("/dev/null", O_RDWR);
    for (int standard = 0; standard <= 2 && null >= 0; ++standard) dup2(null, standard);
    pid_t group = 0;
    for (ssize_t got = read(fd, &group, sizeof(group)); got != 0; got = read(fd, &group, sizeof(group))) {
      if (got != sizeof(group)) continue;
      if (group > 0) {
        groups.push_back(group);
      } else {
        std::erase(groups, -group);
      }
    }
    for (const pid_t left : groups) kill(-left, SIGKILL);
  }

  Fd write_;
  pid_t pid_ = -1;
};

// One of our two outputs. Never blocks: what the reader does not take yet waits in `queue`.
struct Sink {
  int fd;
  std::string queue = {};
  std::size_t written = 0;  // of the queue
  bool broken = false;

  std::size_t waiting() const { return queue.size() - written; }
  void write_some() {
    const ssize_t count = write(fd, queue.data() + written, std::min(waiting(), kSureWrite));
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) return;
    if (count < 0) {
      broken = true;
      queue.clear();
      written = 0;
      return;
    }
    written += static_cast<std::size_t>(count);
    if (waiting() == 0 || written > kBacklog) {
      queue.erase(0, written);
      written = 0;
    }
  }
};

struct Stream {
  Fd fd;
  LinePrefixer lines;
  Sink* sink;
};

struct Rank {
  pid_t pid = -1;         // -1: ended
  Fd control = {};        // ssh's stdin: names of signals for the rank
  std::int64_t left = 0;  // when it left its world, by its own report; 0: it did not, as far as we know
};

// How a rank ended, other than well.
struct Failure {
  std::size_t rank = 0;
  siginfo_t how{};
  std::int64_t when = 0;  // it left its world, or ended

  bool exited() const { return how.si_code == CLD_EXITED; }
  int code() const { return exited() ? how.si_status : 128 + how.si_status; }
};

// Where ranks of this host say that they leave their worlds.
class ReportPipe {
 public:
  ReportPipe() {
    Pipe ends = make_pipe();
    write_ = Fd(fcntl(ends.write.get(), F_DUPFD_CLOEXEC, kLowestReport));
    struct stat status {};
    // Without it everything works; only the order of failures is not known as well.
    if (!write_.is_open() || fstat(write_.get(), &status) != 0) return;
    for (const int fd : {ends.read.get(), write_.get()}) fcntl(fd, F_SETFL, O_NONBLOCK);
    name_ = std::to_string(write_.get()) + ":" + std::to_string(status.st_ino);
    read_ = std::move(ends.read);
  }
  int read_end() const { return read_.get(); }
  int write_end() const { return write_.get(); }
  bool is_open() const { return read_.is_open(); }
  // For the environment of a rank.
  std::string variable(std::size_t rank) const {
    return std::string(kReportVariable) + "=" + name_ + ":" + std::to_string(rank);
  }
  bool next(Report& report) const {
    return read_.is_open() && read(read_.get(), &report, sizeof(report)) == sizeof(report);
  }

 private:
  Fd read_, write_;
  std::string name_;
};

class Run {
 public:
  Run(const std::vector<RankPlan>& plans, const LaunchOptions& options)
      : plans_(plans), options_(options), guard_(plans.size()), ranks_(plans.size()) {}

  ~Run() {
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      if (ranks_[i].pid < 0) continue;
      kill(-ranks_[i].pid, SIGKILL);
      while (waitpid(ranks_[i].pid, nullptr, 0) < 0 && errno == EINTR) {
      }
    }
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  int run() {
    for (std::size_t i = 0; i < plans_.size(); ++i) start(i);
    if (options_.timeout.count() > 0) timeout_at_ = Clock::now() + options_.timeout;
    while (alive_ > 0 || (!streams_.empty() && Clock::now() < drain_until_)) step();
    for (Stream& stream : streams_) stream.lines.finish(stream.sink->queue);
    streams_.clear();
    while (out_.waiting() + err_.waiting() > 0 && !hurry_) step();
    return result_.value_or(0);
  }

 private:
  void start(std::size_t index);
  void step();
  void read_stream(Stream& stream);
  void take_signals();
  void read_reports();
  void reap(std::size_t index);
  void name_first_failure();
  void pass_deadlines();
  void signal_rank(std::size_t index, int number);
  void signal_all(int number);
  void begin_end(int number);
  void kill_all();
  int poll_timeout() const;
  void say(const Complaint& complaint) { err_.queue += format_complaint(kWhere, complaint) + "\n"; }

  const std::vector<RankPlan>& plans_;
  const LaunchOptions& options_;
  SignalWatch signals_;
  Guard guard_;
  ReportPipe reports_;
  std::vector<Rank> ranks_;
  std::vector<Stream> streams_;
  Sink out_{STDOUT_FILENO};
  Sink err_{STDERR_FILENO};
  std::size_t alive_ = 0;
  std::optional<int> result_;
  std::optional<Failure> failure_;  // the first by cause, so far
  Clock::time_point settle_until_;
  std::optional<Clock::time_point> timeout_at_, kill_at_, kill_ssh_at_;
  Clock::time_point drain_until_;
  bool asked_ = false;  // a signal asked us to end
  bool hurry_ = false;  // a second one did
};

// Only calls that are safe between fork and exec.
[[noreturn]] void become_program(const char* program, char* const* words, char* const* environment, pid_t parent,
                                 std::array<int, 3> standard, int failure, int report, const SignalWatch& signals) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(127);
  for (int fd = 0; fd < 3; ++fd) dup2(standard[fd], fd);
  if (report >= 0) fcntl(report, F_SETFD, 0);  // the program's too
  signals.restore();
  execve(program, words, environment);
  const int error = errno;
  write_all(failure, &error, sizeof(error));
  _exit(127);
}

std::vector<char*> pointers(const std::vector<std::string>& words) {
  std::vector<char*> result;
  for (const std::string& word : words) result.push_back(const_cast<char*>(word.c_str()));
  result.push_back(nullptr);
  return result;
}

// A descriptor that is none of 0 to 2, which the child overwrites one after the other.
Fd above_standard(Fd fd) {
  if (fd.get() > 2) return fd;
  Fd moved(fcntl(fd.get(), F_DUPFD_CLOEXEC, 3));
  if (!moved.is_open()) fail_system("no pipe could be made", errno);
  return moved;
}

void Run::start(std::size_t index) {
  const RankPlan& plan = plans_[index];
  Pipe out = make_pipe(), err = make_pipe(), failure = make_pipe(), control;
  Fd input;
  if (plan.host.empty()) {
    input = above_standard(Fd(open("/dev/null", O_RDONLY | O_CLOEXEC)));
  } else {
    control = make_pipe();
    input = above_standard(std::move(control.read));
  }
  out.write = above_standard(std::move(out.write));
  err.write = above_standard(std::move(err.write));
  failure.write = above_standard(std::move(failure.write));
  std::vector<std::string> variables = plan.environment;
  std::erase_if(variables, [](const std::string& entry) { return entry.starts_with(kReportVariable); });
  const bool reports = plan.host.empty() && reports_.is_open();
  if (reports) variables.push_back(reports_.variable(index));
  const std::vector<char*> words = pointers(plan.words), environment = pointers(variables);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) fail_system("rank " + std::to_string(index) + " could not be started", errno);
  if (pid == 0) {
    become_program(plan.program.c_str(), words.data(), environment.data(), parent,
                   {input.get(), out.write.get(), err.write.get()}, failure.write.get(),
                   reports ? reports_.write_end() : -1, signals_);
  }
  setpgid(pid, pid);  // the child does it too: whoever comes first
  ranks_[index] = {pid, std::move(control.write)};
  // A pipe takes more than this at once.
  if (!plan.input.empty()) write_all(ranks_[index].control.get(), plan.input.data(), plan.input.size());
  ++alive_;
  guard_.add(pid);
  failure.write.reset();
  int error = 0;
  ssize_t got = 0;
  do got = read(failure.read.get(), &error, sizeof(error));
  while (got < 0 && errno == EINTR);
  if (got == sizeof(error)) {
    fail_invalid(kWhere, {.what = "the program cannot be run",
                          .got = in_quotes(plan.program) + " (" + std::strerror(error) + ")",
                          .expected = "a program, or a script that names its interpreter"});
  }
  const std::string prefix = "[" + std::to_string(index) + "] ";
  for (const auto& [end, sink] : {std::pair{&out.read, &out_}, std::pair{&err.read, &err_}}) {
    fcntl(end->get(), F_SETFL, O_NONBLOCK);
    streams_.push_back({std::move(*end), LinePrefixer(prefix), sink});
  }
}

int Run::poll_timeout() const {
  Clock::time_point next = Clock::now() + std::chrono::hours(1);
  for (const auto& at : {timeout_at_, kill_at_, kill_ssh_at_}) next = at ? std::min(next, *at) : next;
  if (alive_ == 0 && !streams_.empty()) next = std::min(next, drain_until_);
  if (failure_ && !result_) next = std::min(next, settle_until_);
  const auto left = std::chrono::ceil<milliseconds>(next - Clock::now()).count();
  return static_cast<int>(std::max<std::int64_t>(0, left));
}

void Run::step() {
  std::vector<pollfd> fds = {{signals_.fd(), POLLIN, 0}};
  for (const Sink* sink : {&out_, &err_}) fds.push_back({sink->waiting() > 0 ? sink->fd : -1, POLLOUT, 0});
  for (const Stream& stream : streams_) {
    fds.push_back({stream.sink->waiting() < kBacklog ? stream.fd.get() : -1, POLLIN, 0});
  }
  fds.push_back({reports_.read_end(), POLLIN, 0});
  if (poll(fds.data(), fds.size(), poll_timeout()) < 0 && errno != EINTR) fail_system("poll", errno);
  for (std::size_t i = 0; i < streams_.size(); ++i) {
    if ((fds[3 + i].revents & (POLLIN | POLLHUP | POLLERR)) != 0) read_stream(streams_[i]);
  }
  std::erase_if(streams_, [](const Stream& stream) { return !stream.fd.is_open(); });
  for (std::size_t i = 0; Sink * sink : {&out_, &err_}) {
    if (fds[1 + i++].revents == 0) continue;
    sink->write_some();
    if (!sink->broken || sink != &out_ || result_) continue;
    result_ = 128 + SIGPIPE;  // nobody reads us any more: end as any program at the head of a pipe
    begin_end(SIGTERM);
  }
  read_reports();
  if (fds[0].revents != 0) take_signals();
  name_first_failure();
  pass_deadlines();
}

void Run::read_stream(Stream& stream) {
  char bytes[65536];
  const ssize_t got = read(stream.fd.get(), bytes, sizeof(bytes));
  if (got < 0 && (errno == EINTR || errno == EAGAIN)) return;
  std::string lines;
  if (got > 0) {
    stream.lines.feed({bytes, static_cast<std::size_t>(got)}, lines);
  } else {
    stream.lines.finish(lines);
    stream.fd.reset();
  }
  if (!stream.sink->broken) stream.sink->queue += lines;
}

void Run::take_signals() {
  signalfd_siginfo info;
  while (read(signals_.fd(), &info, sizeof(info)) == sizeof(info)) {
    const int number = static_cast<int>(info.ssi_signo);
    if (number == SIGCHLD) {
      // Several ends may share one signal, which then tells of the first of them: that one is looked at first.
      for (std::size_t i = 0; i < ranks_.size(); ++i) {
        if (ranks_[i].pid == static_cast<pid_t>(info.ssi_pid)) reap(i);
      }
      for (std::size_t i = 0; i < ranks_.size(); ++i) reap(i);
    } else if (std::find(kPassedSignals.begin(), kPassedSignals.end(), number) != kPassedSignals.end()) {
      signal_all(number);
    } else if (!asked_) {
      asked_ = true;
      begin_end(number);
    } else {
      hurry_ = true;
      kill_all();
    }
  }
}

void Run::read_reports() {
  for (Report report; reports_.next(report);) {
    if (report.rank < 0 || report.rank >= static_cast<std::int64_t>(ranks_.size())) continue;
    const auto index = static_cast<std::size_t>(report.rank);
    // Ranks of this host speak for themselves; of the others we hear from these, and the first to say it knows best.
    const bool remote = !plans_[index].host.empty();
    if (remote ? ranks_[index].left == 0 : report.from == report.rank) ranks_[index].left = report.left;
  }
}

void Run::reap(std::size_t index) {
  const pid_t pid = ranks_[index].pid;
  siginfo_t info{};
  if (pid < 0 || waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) {
    return;
  }
  kill(-pid, SIGKILL);  // what it started; the number is not free for others before the next line
  waitpid(pid, nullptr, 0);
  guard_.remove(pid);
  ranks_[index].pid = -1;
  ranks_[index].control.reset();
  if (--alive_ == 0) drain_until_ = Clock::now() + kDrain;
  read_reports();
  const std::int64_t left = ranks_[index].left;
  const Failure failure{index, info, left != 0 ? left : now_in_nanoseconds()};
  if (failure.code() == 0 || result_) return;
  if (!failure_) settle_until_ = Clock::now() + kSettle;
  if (!failure_ || failure.when < failure_->when) failure_ = failure;
}

// A rank that left its world before the first failure, and has not ended yet, may be the cause of it.
void Run::name_first_failure() {
  if (!failure_ || result_) return;
  const bool settled = std::none_of(ranks_.begin(), ranks_.end(), [this](const Rank& rank) {
    return rank.pid >= 0 && rank.left != 0 && rank.left < failure_->when;
  });
  if (!settled && !asked_ && Clock::now() < settle_until_) return;
  const int code = failure_->code();
  result_ = code;
  const std::string& host = plans_[failure_->rank].host;
  std::string what = "rank " + std::to_string(failure_->rank);
  if (!host.empty()) what += " on " + host;
  const int status = failure_->how.si_status;
  what += failure_->exited() ? " failed with exit code " + std::to_string(code)
                             : " was ended by signal " + std::to_string(status) + " (" + strsignal(status) + ")";
  if (!host.empty() && code == 255) what += ", which is also what ssh says when it cannot connect";
  if (alive_ > 0 && !asked_) what += "; ending the other ranks";
  say({.what = what});
  if (alive_ > 0 && !asked_) begin_end(SIGTERM);
}

void Run::pass_deadlines() {
  const Clock::time_point now = Clock::now();
  if (alive_ == 0) return;
  if (timeout_at_ && now >= *timeout_at_) {
    timeout_at_.reset();
    settle_until_ = now;
    if (!result_ && !failure_) {
      result_ = kTimedOut;
      std::vector<std::int64_t> late;
      for (std::size_t i = 0; i < ranks_.size(); ++i) {
        if (ranks_[i].pid >= 0) late.push_back(static_cast<std::int64_t>(i));
      }
      say({.what = "the ranks did not end in time, ending them",
           .got = rank_list(std::move(late)) + " running after " + std::to_string(options_.timeout.count()) + " ms",
           .advice = "a longer --timeout"});
      begin_end(SIGTERM);
    }
  }
  if (kill_at_ && now >= *kill_at_) kill_all();
  if (kill_ssh_at_ && now >= *kill_ssh_at_) {
    kill_ssh_at_.reset();
    for (const Rank& rank : ranks_) {
      if (rank.pid >= 0) kill(-rank.pid, SIGKILL);
    }
  }
}

void Run::signal_rank(std::size_t index, int number) {
  Rank& rank = ranks_[index];
  if (rank.pid < 0) return;
  if (plans_[index].host.empty()) {
    kill(-rank.pid, number);
    return;
  }
  if (!rank.control.is_open()) return;
  const std::string line = std::string(sigabbrev_np(number)) + "\n";
  write_all(rank.control.get(), line.data(), line.size());
}

void Run::signal_all(int number) {
  for (std::size_t i = 0; i < ranks_.size(); ++i) signal_rank(i, number);
}

void Run::begin_end(int number) {
  signal_all(number);
  if (!kill_at_) kill_at_ = Clock::now() + options_.grace;
}

void Run::kill_all() {
  signal_all(SIGKILL);
  for (Rank& rank : ranks_) rank.control.reset();
  kill_at_.reset();
  if (!kill_ssh_at_) kill_ssh_at_ = Clock::now() + kSshGrace;
}

}  // namespace

int run_plans(const std::vector<RankPlan>& plans, const LaunchOptions& options) { return Run(plans, options).run(); }

}  // namespace dtensor::launch_impl
