#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>
#include <vector>

#include "dtensor/comm/launch.h"

namespace dtensor::launch_impl {

inline constexpr std::string_view kWhere = "dtensor run";
inline constexpr std::size_t kLongestLine = std::size_t{1} << 20;

// One process to start.
struct RankPlan {
  std::string host;                // empty: this machine
  std::string program;             // the file to execute
  std::vector<std::string> words;  // argv
  std::vector<std::string> environment;
  std::string input = {};  // the first line of ssh's stdin: the job's secret, which must not be seen in a command line
};

// Checks the options and says what each rank is started with.
std::vector<RankPlan> plan_ranks(const LaunchOptions& options);

// How many ranks each host takes; adds up to options.ranks where that is given.
std::vector<std::int64_t> spread_ranks(const LaunchOptions& options);

// `text` as one word of a POSIX shell.
std::string shell_quoted(std::string_view text);

// Puts a prefix before every line of a stream that comes in pieces.
class LinePrefixer {
 public:
  explicit LinePrefixer(std::string prefix) : prefix_(std::move(prefix)) {}
  // Appends the lines that `bytes` completes to `out`.
  void feed(std::string_view bytes, std::string& out);
  // The stream has ended: a last line without its end gets one.
  void finish(std::string& out);

 private:
  std::string prefix_;
  std::string partial_;
};

// Runs the plans; returns what launch() returns.
int run_plans(const std::vector<RankPlan>& plans, const LaunchOptions& options);

}  // namespace dtensor::launch_impl
