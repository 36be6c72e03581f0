#include "dtensor/comm/c10d_group.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "dtensor/comm/c10d_compat_impl.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

CommunicatorPtr adopt(c10::intrusive_ptr<messages::Sender> sender, const std::vector<std::int64_t>& ranks,
                      const GroupOptions& options) {
  if (sender->getSize() != static_cast<int>(ranks.size())) {
    fail_invalid("adopt_group", {.what = "there must be one world rank per member of the process group",
                                 .got = "{" + join_numbers(ranks) + "}",
                                 .expected = std::to_string(sender->getSize()) + " ranks"});
  }
  const std::int64_t rank = sender->getRank();
  const std::int64_t self = ranks[static_cast<std::size_t>(rank)];
  check_group_ranks(ranks, self, *std::max_element(ranks.begin(), ranks.end()) + 1);
  const std::string name = sender->getBackendName();
  if (name != "gloo") {
    fail_unsupported("adopt_group",
                     {.what = "messages between CPU tensors need Gloo", .got = dtensor::in_quotes(name)});
  }
  messages::MessageGroupConfig config{.backend = name,
                                      .key = {},
                                      .rank = rank,
                                      .ranks = ranks,
                                      .options = options,
                                      .connect = [sender](messages::Clock::time_point) -> messages::MessengerPtr {
                                        return std::make_unique<messages::SenderMessenger>(sender);
                                      },
                                      .liveness = nullptr,
                                      .report = nullptr};
  return std::make_shared<messages::MessageGroup>(std::move(config));
}

}  // namespace

CommunicatorPtr adopt_group(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::vector<std::int64_t>& ranks,
                            const GroupOptions& options) {
  if (!group) fail_invalid("adopt_group", {.what = "there is no process group", .got = "null"});
  return adopt(messages::sender_of(group, c10::DeviceType::CPU), ranks, options);
}

CommunicatorPtr adopt_group(const c10::intrusive_ptr<c10d::ProcessGroupGloo>& group,
                            const std::vector<std::int64_t>& ranks, const GroupOptions& options) {
  if (!group) fail_invalid("adopt_group", {.what = "there is no process group", .got = "null"});
  return adopt(group, ranks, options);
}

}  // namespace dtensor
