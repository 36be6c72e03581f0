#include "dtensor/comm/env.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <string_view>

#include "dtensor/comm/secret_impl.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

constexpr std::string_view kWhere = "environment";
constexpr std::int64_t kMostRanks = 1 << 24;

// An unset variable and an empty one are the same.
std::optional<std::string_view> text_of(const Variables& variables, const char* name) {
  const char* value = variables(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

std::optional<std::int64_t> number_of(const Variables& variables, const char* name, std::int64_t least,
                                      std::int64_t most) {
  const auto text = text_of(variables, name);
  if (!text) return std::nullopt;
  const std::string range = "a number from " + std::to_string(least) + " to " + std::to_string(most);
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  if (error == std::errc::invalid_argument || end != text->data() + text->size()) {
    fail_invalid(kWhere, {.what = std::string(name) + " is not a number", .got = in_quotes(*text), .expected = range});
  }
  if (error != std::errc() || value < least || value > most) {
    fail_invalid(kWhere, {.what = std::string(name) + " is out of range", .got = in_quotes(*text), .expected = range});
  }
  return value;
}

std::int64_t require_number(const Variables& variables, const char* name, const char* companion, std::int64_t least,
                            std::int64_t most) {
  const auto value = number_of(variables, name, least, most);
  if (!value) {
    fail_invalid(kWhere, {.what = std::string(companion) + " is set and " + name + " is not", .expected = "both"});
  }
  return *value;
}

// rank and size, where `rank_name` is set.
bool read_ranks(const Variables& variables, const char* rank_name, const char* size_name, const char* local_name,
                LaunchEnvironment& result) {
  if (!text_of(variables, rank_name)) return false;
  result.size = require_number(variables, size_name, rank_name, 1, kMostRanks);
  result.rank = *number_of(variables, rank_name, 0, kMostRanks);
  if (result.rank >= result.size) {
    fail_invalid(kWhere, {.what = std::string(rank_name) + " is not below " + size_name,
                          .got = std::to_string(result.rank) + " of " + std::to_string(result.size)});
  }
  result.local_rank = number_of(variables, local_name, 0, result.size - 1).value_or(0);
  return true;
}

void check_address(std::string_view address) {
  const auto fits = [](unsigned char c) { return std::isalnum(c) || c == '.' || c == '-' || c == ':' || c == '_'; };
  if (address.size() > 255 || !std::all_of(address.begin(), address.end(), fits)) {
    fail_invalid(kWhere, {.what = "MASTER_ADDR is not the name or address of a host", .got = in_quotes(address)});
  }
}

// The first of `a[03-05,9],b`: `a03`.
std::string first_host(std::string_view list) {
  std::string host(list.substr(0, list.find_first_of(",[")));
  if (host.size() < list.size() && list[host.size()] == '[') {
    const auto inside = list.substr(host.size() + 1);
    host += inside.substr(0, inside.find_first_of(",-]"));
    const auto close = inside.find(']');
    if (close != std::string_view::npos) {
      const auto rest = inside.substr(close + 1);
      host += rest.substr(0, rest.find_first_of(",["));
    }
  }
  return host;
}

// srun says who runs where, but has no port: the job's number gives one that its ranks agree on.
void read_slurm_meeting_place(const Variables& variables, LaunchEnvironment& result) {
  if (number_of(variables, "SLURM_STEP_NUM_NODES", 1, kMostRanks).value_or(1) > 1) {
    result.master_address = first_host(text_of(variables, "SLURM_STEP_NODELIST").value_or(""));
  }
  const std::int64_t job = number_of(variables, "SLURM_JOB_ID", 0, INT64_MAX / 64).value_or(0);
  const std::int64_t step = number_of(variables, "SLURM_STEP_ID", 0, INT64_MAX / 64).value_or(0);
  constexpr std::int64_t kFirstPort = 20000, kPorts = 12000;
  result.master_port = static_cast<int>(kFirstPort + (job * 31 + step) % kPorts);
}

}  // namespace

void check_backend_name(const std::string& where, const std::string& backend) {
  constexpr std::array<std::string_view, 4> kBackends = {"threads", "gloo", "nccl", "mpi"};
  if (std::find(kBackends.begin(), kBackends.end(), backend) != kBackends.end()) return;
  fail_invalid(
      where, {.what = "there is no such backend", .got = in_quotes(backend), .expected = "threads, gloo, nccl or mpi"});
}

LaunchEnvironment read_environment(const Variables& variables) {
  LaunchEnvironment result;
  if (read_ranks(variables, "RANK", "WORLD_SIZE", "LOCAL_RANK", result)) {
    result.launcher = Launcher::kTorchrun;
    result.torchelastic = text_of(variables, "TORCHELASTIC_RUN_ID").has_value();
    result.agent_store = text_of(variables, "TORCHELASTIC_USE_AGENT_STORE") == "True";
    result.attempt = std::to_string(number_of(variables, "TORCHELASTIC_RESTART_COUNT", 0, kMostRanks).value_or(0));
  } else if (read_ranks(variables, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                        result)) {
    result.launcher = Launcher::kOpenMpi;
    const auto local = number_of(variables, "OMPI_COMM_WORLD_LOCAL_SIZE", 1, kMostRanks);
    if (local != result.size) result.master_address.clear();
  } else if (text_of(variables, "SLURM_STEP_NUM_TASKS") &&
             read_ranks(variables, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", result)) {
    result.launcher = Launcher::kSlurm;
    read_slurm_meeting_place(variables, result);
  } else if (text_of(variables, "WORLD_SIZE")) {
    require_number(variables, "RANK", "WORLD_SIZE", 0, kMostRanks);
  }
  if (const auto address = text_of(variables, "MASTER_ADDR")) {
    check_address(*address);
    result.master_address = *address;
  }
  if (const auto port = number_of(variables, "MASTER_PORT", 1, 65535)) result.master_port = static_cast<int>(*port);
  if (const auto backend = text_of(variables, "DTENSOR_BACKEND")) {
    result.backend = *backend;
    check_backend_name("environment: DTENSOR_BACKEND", result.backend);
  }
  result.secret = text_of(variables, "DTENSOR_SECRET").value_or("");
  secrets::check_secret(kWhere, "DTENSOR_SECRET", result.secret);
  result.allow_no_secret = number_of(variables, "DTENSOR_ALLOW_NO_SECRET", 0, 1).value_or(0) == 1;
  return result;
}

LaunchEnvironment read_environment() {
  return read_environment([](const char* name) { return std::getenv(name); });
}

}  // namespace dtensor
