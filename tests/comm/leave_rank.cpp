// A rank of a world in which rank 1 ends early, while the others wait for it: leave_rank HOW
//   returns  rank 1 returns 3 from main; the errors of the others are not caught
//   caught   the same, and the others return 1 for their errors
//   throws   rank 1 throws, and main returns 4 for it; the errors of the others are not caught
#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <thread>

#include "dtensor/comm/world.h"

namespace {

int run(const std::string& how) {
  auto world = dtensor::World::from_env({.timeout = std::chrono::seconds(20)});
  const auto group = world.group();
  group->barrier()->wait();
  if (world.rank() == 1) {
    if (how == "throws") throw std::runtime_error("rank 1 has an error of its own");
    return 3;
  }
  while (true) group->barrier()->wait();
}

// The rank that is the cause takes longer to end than the others, as a program does that has much to free.
int slowly(int code) {
  std::this_thread::sleep_for(std::chrono::milliseconds(800));
  return code;
}

}  // namespace

int main(int, char** argv) {
  const std::string how = argv[1];
  if (how == "returns") return slowly(run(how));
  try {
    return slowly(run(how));
  } catch (const std::runtime_error& error) {
    if (std::string(error.what()) == "rank 1 has an error of its own") return slowly(4);
    if (how == "caught") return 1;
    throw;
  }
}
