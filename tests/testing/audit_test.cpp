// Every row of every table against the operator itself, in every way that it can run.
#include <gtest/gtest.h>
#include <torch/version.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>

#include "dtensor/core/rule.h"
#include "dtensor/testing/audit.h"
#include "tests/testing/calls.h"

namespace dtensor::testing {
namespace {

constexpr int kParts = 16;

// DTENSOR_AUDIT=aten::mm looks at one operator alone.
std::vector<Call> calls_of(int part) {
  const char* only = std::getenv("DTENSOR_AUDIT");
  std::vector<Call> result;
  int next = 0;
  for (const Call& call : sample_calls()) {
    if (only ? call.op == only && part == 0 : next++ % kParts == part) result.push_back(call);
  }
  return result;
}

// What is made up of memory that nobody wrote cannot be compared.
bool has_no_value(const std::string& op) { return op.find("empty") != std::string::npos; }

// How many layouts of the operands of every call: `make audit` takes more.
std::int64_t layouts_per_call() {
  const char* given = std::getenv("DTENSOR_AUDIT_LAYOUTS");
  return given ? std::max(6, std::atoi(given)) : 24;
}

// Kernels that trust the shapes and indices they are given, and write where those say: not to be tried on what is
// wrong.
bool trusts_operands(const std::string& op) {
  const auto has = [&](const char* part) { return op.find(part) != std::string::npos; };
  return has("max_pool") || has("max_unpool") || (has("_pad") && has("_backward")) ||
         (has("grid_sampler") && has("_backward")) || (has("_pool") && has("_backward")) || has("nll_loss2d");
}

class Audit : public ::testing::TestWithParam<int> {};

TEST_P(Audit, NoRowIsWrong) {
  const std::int64_t layouts = layouts_per_call();
  std::int64_t ways = 0;
  for (const Call& call : calls_of(GetParam())) {
    if (has_no_value(call.op)) continue;
    for (const Dims& mesh : {Dims{3}, Dims{2, 2}}) {
      const AuditReport report =
          audit(call.op, call.args, {.mesh = mesh, .most_layouts = mesh.size() == 1 ? layouts : layouts / 6});
      for (const std::string& wrong : report.wrong) ADD_FAILURE() << wrong;
      ways += report.ways;
    }
  }
  EXPECT_GT(ways, std::getenv("DTENSOR_AUDIT") ? -1 : 500);
}

std::map<std::string, std::size_t> committed_counts() {
  std::map<std::string, std::size_t> counts;
  std::ifstream file(DTENSOR_MISSING_ROWS);
  std::string op;
  for (std::size_t count = 0; file >> op >> count;) counts[op] = count;
  return counts;
}

// Rows that would be right and that nobody wrote: their number is committed, and may only fall.
TEST(MissingRows, AreNoMoreThanIsCommitted) {
  if (TORCH_VERSION_MAJOR > 1) GTEST_SKIP() << "counted on libtorch 1.13: others have other kernels";
  const char* only = std::getenv("DTENSOR_AUDIT");
  const char* write = std::getenv("DTENSOR_MISSING_OUT");
  std::map<std::string, std::vector<std::string>> missing;
  for (const Call& call : sample_calls()) {
    if (has_no_value(call.op) || trusts_operands(call.op) || call.again || (only && call.op != only)) continue;
    for (std::string& row : missing_rows(call.op, call.args)) missing[call.op].push_back(std::move(row));
  }
  if (write) {
    std::ofstream file(write);
    for (const auto& [op, rows] : missing) file << op << ' ' << rows.size() << '\n';
  }
  std::map<std::string, std::size_t> committed = committed_counts();
  EXPECT_FALSE(committed.empty());
  for (const auto& [op, rows] : missing) {
    std::string text;
    for (const std::string& row : rows) text += "  " + row + '\n';
    if (only) std::cout << op << '\n' << text;
    EXPECT_LE(rows.size(), committed[op]) << op << " lacks rows that are right:\n" << text;
    EXPECT_GE(rows.size(), committed[op]) << op << " has got better: write the new number into missing_rows.txt";
  }
}

INSTANTIATE_TEST_SUITE_P(Part, Audit, ::testing::Range(0, kParts));

}  // namespace
}  // namespace dtensor::testing
