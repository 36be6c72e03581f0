#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "dtensor/comm/c10d_backend_impl.h"
#include "dtensor/comm/c10d_compat_impl.h"
#include "dtensor/comm/c10d_store_impl.h"

namespace dtensor {
namespace {

using c10d::ProcessGroupGloo;

class GlooBackend final : public C10dBackend {
 public:
  explicit GlooBackend(const std::string& address) : device_(ProcessGroupGloo::createDeviceForHostname(address)) {}

  std::string name() const override { return "gloo"; }

  std::pair<CommunicatorPtr, std::shared_ptr<messages::Abortable>> make_group(const C10dGroupPlan& plan) override {
    messages::MessageGroupConfig config{
        .backend = name(),
        .key = plan.key,
        .rank = plan.rank,
        .ranks = plan.ranks,
        .options = plan.options,
        .connect = [plan,
                    device = device_](messages::Clock::time_point deadline) { return connect(plan, device, deadline); },
        .liveness = plan.liveness,
        .report = plan.report};
    const auto group = std::make_shared<messages::MessageGroup>(std::move(config));
    return {group, group};
  }

 private:
  static messages::MessengerPtr connect(const C10dGroupPlan& plan,
                                        const std::shared_ptr<gloo::transport::Device>& device,
                                        messages::Clock::time_point deadline) {
    plan.gather(deadline);
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - messages::Clock::now());
    auto options = ProcessGroupGloo::Options::create(std::max(left, std::chrono::milliseconds(1)));
    options->devices.push_back(device);
    options->threads = 1;  // for its own collectives, which are not used
    auto store = make_rendezvous_store(plan.client, plan.key + "/gloo/", deadline, plan.check);
    return std::make_unique<messages::SenderMessenger>(c10::make_intrusive<ProcessGroupGloo>(
        store, static_cast<int>(plan.rank), static_cast<int>(plan.ranks.size()), options));
  }

  const std::shared_ptr<gloo::transport::Device> device_;
};

}  // namespace

std::unique_ptr<C10dBackend> make_gloo_backend(const std::string& address) {
  return std::make_unique<GlooBackend>(address);
}

}  // namespace dtensor
