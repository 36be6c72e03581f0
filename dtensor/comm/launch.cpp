#include "dtensor/comm/launch.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <thread>

#include "dtensor/comm/launch_impl.h"
#include "dtensor/comm/launch_report_impl.h"
#include "dtensor/comm/secret_impl.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"

extern "C" char** environ;

namespace dtensor {

using namespace launch_impl;

namespace {

constexpr std::int64_t kMostRanks = 65'536;
constexpr const char* kSecretVariable = "DTENSOR_SECRET";
using Environment = std::map<std::string, std::string>;

bool is_host_name(std::string_view name) {
  const auto plain = [](std::string_view part) {
    return !part.empty() && part.front() != '-' && std::all_of(part.begin(), part.end(), [](unsigned char c) {
      return std::isalnum(c) != 0 || c == '.' || c == '_' || c == '-';
    });
  };
  const std::size_t at = name.find('@');
  if (at == std::string_view::npos) return plain(name);
  return plain(name.substr(0, at)) && plain(name.substr(at + 1));
}

std::string this_host() {
  char name[256] = {};
  if (gethostname(name, sizeof(name) - 1) != 0 || name[0] == '\0') return "localhost";
  return name;
}

bool is_local(std::string_view name) { return name == "localhost" || name == "127.0.0.1" || name == this_host(); }

std::string_view without_user(std::string_view name) {
  const std::size_t at = name.find('@');
  return at == std::string_view::npos ? name : name.substr(at + 1);
}

void check_options(const LaunchOptions& options) {
  if (options.command.empty() || options.command.front().empty()) {
    fail_invalid(kWhere, {.what = "there is no program to run",
                          .expected = "a program and its arguments after --",
                          .advice = "dtensor run -n 4 -- ./program"});
  }
  const bool ranks_from_hosts = options.ranks == 0 && !options.hosts.empty();
  if (!ranks_from_hosts && (options.ranks < 1 || options.ranks > kMostRanks)) {
    fail_invalid(kWhere, {.what = "the number of ranks is out of range",
                          .got = "-n " + std::to_string(options.ranks),
                          .expected = "1 to " + std::to_string(kMostRanks)});
  }
  if (options.backend == "mpi") {
    fail_invalid(kWhere, {.what = "ranks over mpi are started by mpirun",
                          .got = "--backend mpi",
                          .expected = "gloo or nccl",
                          .advice = "mpirun -n " + std::to_string(options.ranks) + " " + options.command.front()});
  }
  if (!options.backend.empty() && options.backend != "gloo" && options.backend != "nccl") {
    fail_invalid(kWhere, {.what = "this backend does not join processes",
                          .got = "--backend " + dtensor::in_quotes(options.backend),
                          .expected = "gloo or nccl"});
  }
  if (options.master_port < 0 || options.master_port > 65'535) {
    fail_invalid(kWhere, {.what = "the port is out of range",
                          .got = "--master-port " + std::to_string(options.master_port),
                          .expected = "1 to 65535, or 0 for a free one"});
  }
  if (!options.master_address.empty() &&
      (!is_host_name(options.master_address) || options.master_address.find('@') != std::string::npos)) {
    fail_invalid(kWhere, {.what = "this is not an address",
                          .got = "--master-addr " + dtensor::in_quotes(options.master_address),
                          .expected = "a host name or an IPv4 address"});
  }
  if (options.timeout.count() < 0 || options.grace.count() < 0) {
    fail_invalid(kWhere, {.what = "a time is negative",
                          .got = "--timeout " + std::to_string(options.timeout.count()) + " ms, --grace " +
                                 std::to_string(options.grace.count()) + " ms",
                          .expected = "0 or more"});
  }
  for (const LaunchHost& host : options.hosts) {
    if (!is_host_name(host.name) || host.ranks < 0) {
      fail_invalid(kWhere, {.what = "this is not a host",
                            .got = dtensor::in_quotes(host.name) + ":" + std::to_string(host.ranks),
                            .expected = "a host name, or a name and a number of ranks such as b:2"});
    }
    if (std::count_if(options.hosts.begin(), options.hosts.end(),
                      [&](const LaunchHost& other) { return other.name == host.name; }) > 1) {
      fail_invalid(
          kWhere,
          {.what = "a host is listed twice", .got = dtensor::in_quotes(host.name), .expected = "each host once"});
    }
  }
}

// The file that execution of `name` takes, searched as a shell does; nothing, and errno, when there is none.
std::optional<std::string> find_program(const std::string& name) {
  const auto runnable = [](const std::string& path) {
    std::error_code ignored;
    if (std::filesystem::is_directory(path, ignored)) {
      errno = EISDIR;
      return false;
    }
    return access(path.c_str(), X_OK) == 0;
  };
  if (name.find('/') != std::string::npos) {
    if (runnable(name)) return name;
    return std::nullopt;
  }
  const char* path = std::getenv("PATH");
  std::string_view rest = path != nullptr ? path : "/usr/local/bin:/usr/bin:/bin";
  while (!rest.empty()) {
    const std::size_t end = rest.find(':');
    const std::string folder(rest.substr(0, end));
    const std::string file = (folder.empty() ? "." : folder) + "/" + name;
    if (runnable(file)) return file;
    rest = end == std::string_view::npos ? std::string_view() : rest.substr(end + 1);
  }
  errno = ENOENT;
  return std::nullopt;
}

int free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  const bool found = fd >= 0 && bind(fd, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                     getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  const int error = errno;
  if (fd >= 0) close(fd);
  if (!found) {
    fail(ErrorKind::kCommunication, kWhere,
         {.what = "no free port was found", .got = std::strerror(error), .advice = "--master-port with one"});
  }
  return ntohs(address.sin_port);
}

Environment own_environment() {
  Environment variables;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::size_t equals = text.find('=');
    if (equals != std::string_view::npos) variables.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return variables;
}

// What a program on another host should see of this environment, in ssh's command line.
bool travels(std::string_view name) {
  if (name == kSecretVariable || name == kReportVariable) return false;
  for (const std::string_view start : {"DTENSOR_", "NCCL_", "GLOO_", "OMP_", "TORCH_"}) {
    if (name.starts_with(start)) return true;
  }
  return name == "LD_LIBRARY_PATH";
}

// The program on another host. sshd gives a command a session of its own, so that the shell's number is that of its
// group. The shell outlives the signals that the group gets, to say by which of them the program ended: ssh does not.
// Beside it runs a watcher that sends the group the signals whose names it reads from the connection; when that ends,
// the program goes with it.
// The first line of the connection is the job's secret: a command line could be read by everybody on that host.
std::string remote_script(const LaunchOptions& options, const Environment& variables) {
  std::string words;
  for (const auto& [name, value] : variables) words += " " + shell_quoted(name + "=" + value);
  for (const std::string& word : options.command) words += " " + shell_quoted(word);
  const std::int64_t grace = (options.grace.count() + 999) / 1000;
  std::error_code ignored;
  const std::string folder = std::filesystem::current_path(ignored).string();
  const std::string watcher =
      "while read -r name; do kill -s \"$name\" -- \"-$1\"; done\n"
      "kill -s TERM -- \"-$1\"\n"
      "left=" +
      std::to_string(grace) +
      "\n"
      "while [ $left -gt 0 ] && kill -s 0 -- \"-$1\"; do sleep 1; left=$((left - 1)); done\n"
      "kill -s KILL -- \"-$1\"";
  const std::string script = "cd " + shell_quoted(folder.empty() ? "/" : folder) +
                             " || exit 127\n"
                             "IFS= read -r DTENSOR_SECRET || exit 127\n"
                             "export DTENSOR_SECRET\n"
                             "exec 3<&0\n"
                             "setsid sh -c " +
                             shell_quoted(watcher) +
                             " sh $$ <&3 3<&- >/dev/null 2>&1 &\n"
                             "trap : HUP INT QUIT TERM USR1 USR2\n"
                             "env" +
                             words + " </dev/null 3<&-\nexit $?";
  return "exec sh -c " + shell_quoted(script);
}

std::vector<std::string> as_entries(const Environment& variables) {
  std::vector<std::string> entries;
  entries.reserve(variables.size());
  for (const auto& [name, value] : variables) entries.push_back(name + "=" + value);
  return entries;
}

// Finds the local program and ssh, each only where it is needed.
struct Programs {
  std::string local;
  std::string ssh;

  Programs(const LaunchOptions& options, bool any_local, bool any_remote) {
    if (any_local) {
      const std::optional<std::string> file = find_program(options.command.front());
      if (!file) {
        const int error = errno;
        fail_invalid(kWhere, {.what = "the program cannot be run",
                              .got = dtensor::in_quotes(options.command.front()) + " (" + std::strerror(error) + ")",
                              .expected = "a file that may be executed",
                              .advice = "./program for one in this folder"});
      }
      local = *file;
    }
    if (any_remote) {
      const std::optional<std::string> file = find_program("ssh");
      if (!file) {
        fail(ErrorKind::kNotSupported, kWhere,
             {.what = "ranks on other hosts are started through ssh, and there is none in PATH",
              .expected = "OpenSSH's client",
              .advice = "installing openssh-client, or starting each host's ranks there"});
      }
      ssh = *file;
    }
  }
};

// The caller's, so that several launchers can start parts of one job; else a new one.
std::string job_secret() {
  const char* given = std::getenv(kSecretVariable);
  if (given == nullptr || *given == '\0') return secrets::make_secret();
  secrets::check_secret(kWhere, kSecretVariable, given);
  return given;
}

std::string master_address(const LaunchOptions& options, const std::vector<LaunchHost>& hosts, bool any_remote) {
  if (!options.master_address.empty()) return options.master_address;
  if (!any_remote) return "127.0.0.1";
  return is_local(hosts.front().name) ? this_host() : std::string(without_user(hosts.front().name));
}

}  // namespace

std::vector<LaunchHost> parse_hosts(std::string_view text) {
  std::vector<LaunchHost> hosts;
  std::string_view rest = text;
  while (true) {
    const std::size_t comma = rest.find(',');
    const std::string_view item = rest.substr(0, comma);
    const std::size_t colon = item.find(':');
    LaunchHost host{.name = std::string(item.substr(0, colon))};
    const std::string_view digits = colon == std::string_view::npos ? "1" : item.substr(colon + 1);
    const bool number = !digits.empty() && digits.size() <= 6 && digits.find_first_not_of("0123456789") == digits.npos;
    const std::int64_t ranks = number ? std::stoll(std::string(digits)) : 0;
    if (!is_host_name(host.name) || ranks < 1) {
      fail_invalid(kWhere, {.what = "the list of hosts has an entry that is none",
                            .got = dtensor::in_quotes(item) + " in " + dtensor::in_quotes(text),
                            .expected = "names, or names and numbers of ranks, such as a,b:2"});
    }
    if (colon != std::string_view::npos) host.ranks = ranks;
    hosts.push_back(std::move(host));
    if (comma == std::string_view::npos) return hosts;
    rest = rest.substr(comma + 1);
  }
}

namespace launch_impl {

std::vector<std::int64_t> spread_ranks(const LaunchOptions& options) {
  if (options.hosts.empty()) return {options.ranks};
  std::vector<std::int64_t> counts;
  std::int64_t said = 0;
  std::int64_t open = 0;
  for (const LaunchHost& host : options.hosts) {
    counts.push_back(host.ranks);
    said += host.ranks;
    open += host.ranks == 0 ? 1 : 0;
  }
  const std::int64_t total = options.ranks != 0 ? options.ranks : said + open;
  const std::int64_t rest = total - said;
  if (rest < open || (open == 0 && rest != 0) || total > kMostRanks) {
    fail_invalid(kWhere, {.what = "the ranks do not fit the hosts",
                          .got = "-n " + std::to_string(total) + ", " + std::to_string(said) + " by number and " +
                                 std::to_string(open) + " hosts without one",
                          .expected = open == 0 ? "-n " + std::to_string(said)
                                                : "-n " + std::to_string(said + open) + " or more",
                          .advice = "leaving out -n"});
  }
  std::int64_t index = 0;
  for (std::int64_t& count : counts) {
    if (count != 0) continue;
    count = rest / open + (index < rest % open ? 1 : 0);
    ++index;
  }
  return counts;
}

std::string shell_quoted(std::string_view text) {
  std::string word = "'";
  for (const char c : text) {
    if (c == '\'') {
      word += "'\\''";
    } else {
      word += c;
    }
  }
  return word + "'";
}

std::vector<RankPlan> plan_ranks(const LaunchOptions& options) {
  check_options(options);
  const std::vector<LaunchHost> hosts = options.hosts.empty() ? std::vector<LaunchHost>{{"localhost"}} : options.hosts;
  const std::vector<std::int64_t> counts = spread_ranks(options);
  std::int64_t total = 0;
  bool any_local = false;
  bool any_remote = false;
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    total += counts[i];
    (is_local(hosts[i].name) ? any_local : any_remote) = true;
  }
  const Programs programs(options, any_local, any_remote);

  Environment ours = {{"WORLD_SIZE", std::to_string(total)},
                      {"MASTER_ADDR", master_address(options, hosts, any_remote)},
                      {"MASTER_PORT", std::to_string(options.master_port != 0 ? options.master_port : free_port())}};
  if (!options.backend.empty()) ours["DTENSOR_BACKEND"] = options.backend;

  const std::string secret = job_secret();
  std::vector<RankPlan> plans;
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    const bool local = is_local(hosts[i].name);
    for (std::int64_t local_rank = 0; local_rank < counts[i]; ++local_rank) {
      Environment variables = own_environment();
      if (!local) std::erase_if(variables, [](const auto& entry) { return !travels(entry.first); });
      for (const auto& [name, value] : ours) variables[name] = value;
      variables["RANK"] = std::to_string(plans.size());
      variables["LOCAL_RANK"] = std::to_string(local_rank);
      variables["LOCAL_WORLD_SIZE"] = std::to_string(counts[i]);
      if (local) {
        const std::int64_t cores = std::max(1U, std::thread::hardware_concurrency());
        variables.emplace("OMP_NUM_THREADS", std::to_string(std::max<std::int64_t>(1, cores / counts[i])));
        variables[kSecretVariable] = secret;
        plans.push_back({"", programs.local, options.command, as_entries(variables)});
      } else {
        Environment of_ssh = own_environment();
        of_ssh.erase(kSecretVariable);
        plans.push_back({hosts[i].name,
                         programs.ssh,
                         {"ssh", "-T", "-o", "BatchMode=yes", "--", hosts[i].name, remote_script(options, variables)},
                         as_entries(of_ssh),
                         secret + "\n"});
      }
    }
  }
  return plans;
}

void LinePrefixer::feed(std::string_view bytes, std::string& out) {
  for (std::size_t end = bytes.find('\n'); end != std::string_view::npos; end = bytes.find('\n')) {
    out.append(prefix_).append(partial_).append(bytes.substr(0, end + 1));
    partial_.clear();
    bytes.remove_prefix(end + 1);
  }
  partial_.append(bytes);
  if (partial_.size() > kLongestLine) finish(out);
}

void LinePrefixer::finish(std::string& out) {
  if (partial_.empty()) return;
  out.append(prefix_).append(partial_).push_back('\n');
  partial_.clear();
}

}  // namespace launch_impl

int launch(const LaunchOptions& options) { return run_plans(plan_ranks(options), options); }

}  // namespace dtensor
