#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "dtensor/comm/communicator.h"

namespace dtensor::testing {

// What every backend must do, as checks that all ranks of a world run together: each is given its own rank's transport.
// Results are compared with closed forms, bit for bit. A check throws ContractFailure, so that it needs no test
// framework: helper processes run it as well as threads do.
class ContractFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct ContractCheck {
  std::string name;
  void (*run)(Transport& transport);
};

// Sorted by name. None of them leaves a group in use.
const std::vector<ContractCheck>& contract_checks();

// Runs the checks whose name is in `names` (all when it is empty); the failure names the check and the rank.
void run_contract(Transport& transport, const std::vector<std::string>& names = {});

}  // namespace dtensor::testing
