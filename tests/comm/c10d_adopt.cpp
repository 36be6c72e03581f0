#include "tests/comm/c10d_adopt.h"

#include <torch/version.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <algorithm>
#include <map>

#include "dtensor/comm/c10d_group.h"
#include "dtensor/comm/fingerprint.h"
#include "dtensor/core/text.h"
#include "tests/comm/contract.h"

namespace dtensor::testing {
namespace {

#if TORCH_VERSION_MAJOR >= 2
c10::intrusive_ptr<c10d::ProcessGroup> as_process_group(const c10::intrusive_ptr<c10d::ProcessGroupGloo>& gloo,
                                                        const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                        int size) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO, gloo);
  return group;
}
#else
c10::intrusive_ptr<c10d::ProcessGroup> as_process_group(const c10::intrusive_ptr<c10d::ProcessGroupGloo>& gloo,
                                                        const c10::intrusive_ptr<c10d::Store>&, int, int) {
  return gloo;
}
#endif

class Adopted final : public Transport {
 public:
  Adopted(std::string folder, std::int64_t rank, std::int64_t size)
      : folder_(std::move(folder)), rank_(rank), size_(size) {}
  std::int64_t rank() const override { return rank_; }
  std::int64_t size() const override { return size_; }
  std::string backend() const override { return "gloo"; }
  void leave(const std::string&) override {}

  CommunicatorPtr make_group(const std::vector<std::int64_t>& ranks, const GroupOptions& options) override {
    check_group_ranks(ranks, rank_, size_);
    const std::string name = join_numbers(ranks, "-");
    const auto count = static_cast<int>(ranks.size());
    auto store =
        c10::make_intrusive<c10d::FileStore>(folder_ + "/" + name + "." + std::to_string(made_[name]++), count);
    auto settings = c10d::ProcessGroupGloo::Options::create(std::chrono::seconds(20));
    settings->threads = 1;
    settings->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
    const auto index = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin());
    const auto gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(store, index, count, settings);
    // Both forms that a program may have.
    return made_[name] % 2 == 0 ? adopt_group(gloo, ranks, options)
                                : adopt_group(as_process_group(gloo, store, index, count), ranks, options);
  }

 private:
  const std::string folder_;
  const std::int64_t rank_;
  const std::int64_t size_;
  std::map<std::string, int> made_;
};

}  // namespace

void run_adopted(const std::string& folder, std::int64_t rank, std::int64_t size) {
  Adopted transport(folder, rank, size);
  // All but the check that makes groups in different orders: libtorch's constructor waits for the other members, so no
  // program can do that with groups of its own.
  std::vector<std::string> names;
  for (const ContractCheck& check : contract_checks()) {
    if (check.name != "several_groups") names.push_back(check.name);
  }
  run_contract(transport, names);
}

}  // namespace dtensor::testing
