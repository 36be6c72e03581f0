// Random chains of operators against the plain run: DTENSOR_CHAINS=10000 for many, DTENSOR_CHAIN=123 for one.
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <map>

#include "tests/testing/chain.h"

namespace dtensor::testing {
namespace {

std::int64_t number_from(const char* name, std::int64_t otherwise) {
  const char* given = std::getenv(name);
  return given ? std::atoll(given) : otherwise;
}

TEST(Chains, AgreeWithThePlainRun) {
  const std::int64_t one = number_from("DTENSOR_CHAIN", -1);
  const std::int64_t first = one >= 0 ? one : number_from("DTENSOR_CHAINS_FROM", 0);
  const std::int64_t count = one >= 0 ? 1 : number_from("DTENSOR_CHAINS", 300);
  std::int64_t refused = 0, backward = 0, wrong = 0;
  std::map<std::string, std::int64_t> refusals;
  for (std::int64_t seed = first; seed < first + count && wrong < 20; ++seed) {
    const Chain chain = make_chain(static_cast<std::uint64_t>(seed));
    if (one >= 0) std::cout << chain.to_string();
    const ChainResult result = play(chain);
    if (!result.wrong.empty()) {
      ++wrong;
      ADD_FAILURE() << chain.to_string() << "  " << result.wrong;
    }
    if (!result.refused.empty()) {
      ++refused;
      ++refusals[result.refused.substr(0, 60)];
      if (one >= 0) std::cout << "  refused: " << result.refused << '\n';
    }
    backward += result.backward ? 1 : 0;
  }
  if (one >= 0) return;
  if (count > 1000) {
    for (const auto& [text, times] : refusals) std::cout << times << "  " << text << '\n';
  }
  std::cout << count << " chains, " << backward << " with gradients, " << refused << " refused\n";
  EXPECT_LT(refused, count / 10);
  EXPECT_GT(backward, count / 4);
}

}  // namespace
}  // namespace dtensor::testing
