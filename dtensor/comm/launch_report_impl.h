#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

// When ranks leave their worlds, for the launcher. A rank that leaves early makes the others fail, and those may end
// before it does: the order in which processes end does not say which of them was the cause.
namespace dtensor::launch_impl {

// "FD:INODE:RANK": a pipe, and the rank that this process is. A program may have put something else in the descriptor's
// place: then nothing is written.
inline constexpr const char* kReportVariable = "DTENSOR_LAUNCH_REPORT";

struct Report {
  std::int64_t from = 0;  // the rank that says so
  std::int64_t rank = 0;  // of whom
  std::int64_t left = 0;  // nanoseconds of the steady clock, which all processes of a host share; 0: it has a world
};

inline std::int64_t now_in_nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Tells the launcher, where there is one, that a rank (this one: -1) left its world at `left`, or (0) that it has one.
inline void report_world(std::int64_t left, std::int64_t rank = -1) {
  const char* text = std::getenv(kReportVariable);
  if (text == nullptr) return;
  int fd = -1;
  unsigned long inode = 0;
  Report report{.left = left};
  if (std::sscanf(text, "%d:%lu:%ld", &fd, &inode, &report.from) != 3) return;
  report.rank = rank < 0 ? report.from : rank;
  struct stat status {};
  if (fstat(fd, &status) != 0 || !S_ISFIFO(status.st_mode) || status.st_ino != inode) return;
  [[maybe_unused]] const auto written = ::write(fd, &report, sizeof report);  // never blocks; a loss only costs a hint
}

}  // namespace dtensor::launch_impl
