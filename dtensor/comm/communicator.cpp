#include "dtensor/comm/communicator.h"

#include <utility>

#include "dtensor/comm/rank_list_impl.h"

namespace dtensor {

Communicator::Communicator(std::string backend, std::string name, std::int64_t rank, std::vector<std::int64_t> ranks)
    : backend_(std::move(backend)), name_(std::move(name)), rank_(rank), ranks_(std::move(ranks)) {}

std::string Communicator::describe() const {
  return backend_ + " group " + (name_.empty() ? "" : "\"" + name_ + "\" ") + member_list(ranks_);
}

}  // namespace dtensor
