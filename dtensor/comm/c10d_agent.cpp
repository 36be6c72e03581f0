#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <charconv>
#include <string>
#include <vector>

#include "dtensor/comm/c10d_backend_impl.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"

namespace dtensor {

int agree_on_port(const Rendezvous& rendezvous, int port) {
  std::string text;
  try {
    c10d::TCPStoreOptions options;
    options.port = static_cast<std::uint16_t>(rendezvous.port);
    options.isServer = false;
    options.waitWorkers = false;
    options.timeout = rendezvous.timeout;
    const auto store = c10::make_intrusive<c10d::TCPStore>(rendezvous.host, options);
    const std::string key = "dtensor/rendezvous/" + rendezvous.attempt;
    if (rendezvous.rank == 0) {
      text = std::to_string(port);
      store->set(key, std::vector<std::uint8_t>(text.begin(), text.end()));
    } else {
      const auto value = store->get(key);
      text.assign(value.begin(), value.end());
    }
  } catch (const std::exception& error) {
    fail(ErrorKind::kCommunication, "rendezvous",
         {.what = "the launcher's store did not help the ranks to meet",
          .got = rendezvous.host + ":" + std::to_string(rendezvous.port) + ", " + error.what()});
  }
  int agreed = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), agreed);
  if (problem != std::errc() || end != text.data() + text.size() || agreed < 1 || agreed > 65535) {
    fail(ErrorKind::kCommunication, "rendezvous",
         {.what = "the launcher's store holds no port", .got = dtensor::in_quotes(text), .expected = "1 to 65535"});
  }
  return agreed;
}

}  // namespace dtensor
