// One rank of a world of processes: c10d_rank SCENARIO HOST PORT RANK SIZE TIMEOUT_MS [MORE…]. Prints what happened;
// exit code 0 when the scenario went as it should on this rank, 3 with `error after MS ms: TEXT` when a call failed.
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include "dtensor/comm/c10d.h"
#include "dtensor/core/error.h"
#include "tests/comm/c10d_adopt.h"
#include "tests/comm/contract.h"
#include "tests/comm/on_cuda.h"

namespace dtensor {
namespace {

using std::chrono::milliseconds;

// What `error after` counts from.
std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
void start_clock() { start = std::chrono::steady_clock::now(); }

struct Arguments {
  Rendezvous rendezvous;
  std::vector<std::string> more;
};

GroupOptions options(const Arguments& arguments) {
  GroupOptions result;
  result.name = "world";
  result.timeout = arguments.rendezvous.timeout;
  return result;
}

CommunicatorPtr everybody(Transport& transport, const Arguments& arguments) {
  std::vector<std::int64_t> ranks;
  for (std::int64_t rank = 0; rank < transport.size(); ++rank) ranks.push_back(rank);
  return transport.make_group(ranks, options(arguments));
}

// Where this process listens, as /proc shows it: `0100007F:1F90`.
std::vector<std::string> listening() {
  std::set<std::string> mine;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (target.starts_with("socket:[")) mine.insert(target.substr(8, target.size() - 9));
  }
  std::vector<std::string> result;
  for (const char* table : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream file(table);
    std::string line;
    std::getline(file, line);
    while (std::getline(file, line)) {
      std::istringstream words(line);
      std::vector<std::string> fields;
      for (std::string word; words >> word;) fields.push_back(word);
      if (fields.size() > 9 && fields[3] == "0A" && mine.count(fields[9]) != 0) result.push_back(fields[1]);
    }
  }
  return result;
}

void show_listening() {
  for (const std::string& where : listening()) std::cout << "listens at " << where << std::endl;
}

void contract(Transport& transport, const Arguments& arguments) { testing::run_contract(transport, arguments.more); }

void listen_scenario(Transport& transport, const Arguments& arguments) {
  show_listening();
  everybody(transport, arguments)->barrier()->wait();
  show_listening();
  everybody(transport, arguments)->barrier()->wait();  // nobody goes before everybody looked
}

// The rank named in `more` dies in the middle of large reductions.
void killed(Transport& transport, const Arguments& arguments) {
  const auto group = everybody(transport, arguments);
  const auto buffer = at::ones({1 << 20});
  group->all_reduce(buffer, ReduceOp::kMax)->wait();
  start_clock();
  if (std::to_string(transport.rank()) == arguments.more.at(0)) {
    std::thread([] {
      std::this_thread::sleep_for(milliseconds(100));
      raise(SIGKILL);
    }).detach();
  }
  while (true) group->all_reduce(buffer, ReduceOp::kMax)->wait();
}

// The rank named in `more` throws; its transport tells the others on the way out.
void thrower(Transport& transport, const Arguments& arguments) {
  const auto group = everybody(transport, arguments);
  group->barrier()->wait();
  start_clock();
  if (std::to_string(transport.rank()) == arguments.more.at(0)) {
    transport.leave("out of cheese");
    return;
  }
  group->all_reduce(at::ones({3}), ReduceOp::kSum)->wait();
}

void leaves_early(Transport& transport, const Arguments& arguments) {
  const auto group = everybody(transport, arguments);
  group->barrier()->wait();
  start_clock();
  if (std::to_string(transport.rank()) == arguments.more.at(0)) return;
  group->all_reduce(at::ones({3}), ReduceOp::kSum)->wait();
}

void diverges(Transport& transport, const Arguments& arguments) {
  const auto group = everybody(transport, arguments);
  const bool odd = transport.rank() == transport.size() - 1;
  const std::string& how = arguments.more.at(0);
  group->barrier()->wait();
  start_clock();
  if (how == "operation") {
    (odd ? group->barrier() : group->all_reduce(at::ones({4}), ReduceOp::kSum))->wait();
  } else if (how == "dtype") {
    group->all_reduce(at::ones({4}, odd ? at::kDouble : at::kFloat), ReduceOp::kSum)->wait();
  } else if (how == "size") {
    group->all_reduce(at::ones({odd ? 500000 : 400000}), ReduceOp::kSum)->wait();
  } else if (how == "order") {
    const auto buffer = at::ones({4});
    const auto first = odd ? group->broadcast(buffer, 0) : group->all_reduce(buffer, ReduceOp::kSum);
    const auto second = odd ? group->all_reduce(buffer, ReduceOp::kSum) : group->broadcast(buffer, 0);
    first->wait();
    second->wait();
  } else if (how == "message") {
    if (odd) {
      group->send(at::ones({7}), 0)->wait();
    } else if (group->rank() == 0) {
      group->receive(at::zeros({5}), group->size() - 1)->wait();
    } else {
      group->barrier()->wait();
      start_clock();
    }
  }
}

// The last rank does not take part; afterwards the group says that it is poisoned.
void late(Transport& transport, const Arguments& arguments) {
  const auto group = everybody(transport, arguments);
  group->barrier()->wait();
  start_clock();
  if (transport.rank() == transport.size() - 1) {
    std::this_thread::sleep_for(arguments.rendezvous.timeout + milliseconds(1500));
    return;
  }
  const auto buffer = at::ones({4});
  try {
    group->all_reduce(buffer, ReduceOp::kSum)->wait();
  } catch (const Error& error) {
    std::cout << "first: " << error.what() << std::endl;
    group->barrier()->wait();
    start_clock();
  }
}

// All but the last make a group with it.
void never_a_member(Transport& transport, const Arguments& arguments) {
  if (transport.rank() == transport.size() - 1) {
    std::this_thread::sleep_for(arguments.rendezvous.timeout + milliseconds(1500));
    return;
  }
  start_clock();
  everybody(transport, arguments)->barrier()->wait();
}

// Groups made in different orders; some ranks make groups that others know nothing of.
void orders(Transport& transport, const Arguments& arguments) {
  const std::int64_t rank = transport.rank(), size = transport.size();
  std::map<std::string, std::vector<std::int64_t>> lists;
  for (std::int64_t other = 0; other < size; ++other) {
    if (other != rank)
      lists[std::to_string(std::min(rank, other)) + "," + std::to_string(std::max(rank, other))] = {
          std::min(rank, other), std::max(rank, other)};
  }
  std::vector<std::vector<std::int64_t>> order;
  for (const auto& [name, ranks] : lists) order.push_back(ranks);
  if (rank % 2 == 1) std::reverse(order.begin(), order.end());
  std::vector<CommunicatorPtr> groups;
  for (const auto& ranks : order) groups.push_back(transport.make_group(ranks, options(arguments)));
  std::vector<at::Tensor> sums;
  std::vector<WorkPtr> works;
  for (const auto& group : groups) {
    sums.push_back(at::full({2}, static_cast<double>(rank)));
    works.push_back(group->all_reduce(sums.back(), ReduceOp::kSum));
  }
  for (std::size_t i = 0; i < groups.size(); ++i) {
    works[i]->wait();
    const auto expected = static_cast<double>(groups[i]->ranks()[0] + groups[i]->ranks()[1]);
    if (sums[i][0].item<double>() != expected) throw std::logic_error("wrong sum");
  }
}

// Nobody waits for the last sends, and the sender leaves at once.
void parting(Transport& transport, const Arguments& arguments) {
  const auto group = everybody(transport, arguments);
  if (transport.rank() == 0) {
    for (std::int64_t to = 1; to < transport.size(); ++to) group->send(at::full({1 << 18}, 7.0), to);
    return;
  }
  std::this_thread::sleep_for(milliseconds(300));
  const auto buffer = at::zeros({1 << 18});
  group->receive(buffer, 0)->wait();
  if (buffer.sum().item<double>() != 7.0 * (1 << 18)) throw std::logic_error("lost data");
}

// A collective that is under way holds up no messages, though its first waiter is the one that needs them.
void interleaved(Transport& transport, const Arguments& arguments) {
  const auto group = everybody(transport, arguments);
  const auto sum = at::ones({4}), message = at::zeros({4});
  if (transport.rank() == 0) {
    const auto pending = group->all_reduce(sum, ReduceOp::kSum);
    group->receive(message, 1, 5)->wait();
    group->send(message, 1, 6)->wait();
    pending->wait();
  } else {
    group->send(at::full({4}, 3.0), 0, 5)->wait();
    group->receive(message, 0, 6)->wait();
    group->all_reduce(sum, ReduceOp::kSum)->wait();
  }
  if (sum[0].item<double>() != 2.0 || message[0].item<double>() != 3.0) throw std::logic_error("wrong values");
}

using Scenario = void (*)(Transport&, const Arguments&);
const std::map<std::string, Scenario> kScenarios = {
    {"contract", contract}, {"listen", listen_scenario},   {"killed", killed},
    {"thrower", thrower},   {"leaves", leaves_early},      {"diverges", diverges},
    {"late", late},         {"no-member", never_a_member}, {"orders", orders},
    {"parting", parting},   {"interleaved", interleaved},  {"nccl", contract},
};

// The scenario "nccl" is the contract on GPUs; ranks may share one, which NCCL allows to ranks of different hosts.
TransportPtr make_transport(const std::string& name, const Arguments& arguments) {
  if (name != "nccl") return make_c10d_transport(arguments.rendezvous, "gloo");
  setenv("NCCL_HOSTID", ("rank" + std::to_string(arguments.rendezvous.rank)).c_str(), /*overwrite=*/1);
  setenv("NCCL_SOCKET_IFNAME", "lo", /*overwrite=*/1);
  return testing::on_cuda(make_c10d_transport(arguments.rendezvous, "nccl"));
}

int run(const std::string& name, const Arguments& arguments) {
  start_clock();
  const auto complain = [&](const std::exception& error) {
    const auto took = std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - start).count();
    std::cout << "error after " << took << " ms: " << error.what() << std::endl;
    return 3;
  };
  TransportPtr transport;
  try {
    if (name == "adopted") {
      testing::run_adopted(arguments.more.at(0), arguments.rendezvous.rank, arguments.rendezvous.size);
      return 0;
    }
    transport = make_transport(name, arguments);
    kScenarios.at(name)(*transport, arguments);
    return 0;
  } catch (const std::exception& error) {
    if (transport) transport->leave(error.what());
    return complain(error);
  }
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) {
  if (argc < 7) {
    std::cerr << "c10d_rank SCENARIO HOST PORT RANK SIZE TIMEOUT_MS [MORE…]\n";
    return 2;
  }
  alarm(120);  // never left behind
  dtensor::Arguments arguments;
  std::string name = argv[1];
  if (name.starts_with("agent:")) {
    arguments.rendezvous.agent_store = true;
    name = name.substr(6);
  }
  arguments.rendezvous.host = argv[2];
  if (const char* secret = std::getenv("DTENSOR_SECRET")) arguments.rendezvous.secret = secret;
  arguments.rendezvous.port = std::stoi(argv[3]);
  arguments.rendezvous.rank = std::stoll(argv[4]);
  arguments.rendezvous.size = std::stoll(argv[5]);
  arguments.rendezvous.timeout = std::chrono::milliseconds(std::stoll(argv[6]));
  arguments.more.assign(argv + 7, argv + argc);
  return dtensor::run(name, arguments);
}
