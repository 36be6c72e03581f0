#include <algorithm>
#include <utility>

#include "dtensor/comm/c10d_store_impl.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

class RendezvousStore final : public c10d::Store {
 public:
  RendezvousStore(std::shared_ptr<RendezvousClient> client, std::string prefix, Clock::time_point deadline,
                  std::function<void()> check)
      : c10d::Store(milliseconds_until(deadline)),
        client_(std::move(client)),
        prefix_(std::move(prefix)),
        deadline_(deadline),
        check_(std::move(check)) {}

  // In libtorch 2: a copy for another thread. This one may be used from several.
  c10::intrusive_ptr<c10d::Store> clone() {
    return c10::make_intrusive<RendezvousStore>(client_, prefix_, deadline_, check_);
  }

  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    client_->set(prefix_ + key, value);
  }

  std::vector<std::uint8_t> compareSet(const std::string& key, const std::vector<std::uint8_t>& expected,
                                       const std::vector<std::uint8_t>& desired) override {
    return client_->compare_set(prefix_ + key, expected, desired);
  }

  std::vector<std::uint8_t> get(const std::string& key) override {
    await({prefix_ + key}, timeout_);
    return client_->get(prefix_ + key, milliseconds(0));
  }

  std::int64_t add(const std::string& key, std::int64_t value) override { return client_->add(prefix_ + key, value); }
  bool deleteKey(const std::string& key) override { return client_->erase(prefix_ + key); }
  bool check(const std::vector<std::string>& keys) override { return client_->check(prefixed(keys)); }
  std::int64_t getNumKeys() override { return client_->key_count(); }
  void wait(const std::vector<std::string>& keys) override { await(prefixed(keys), timeout_); }
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override {
    await(prefixed(keys), timeout);
  }

 private:
  static milliseconds milliseconds_until(Clock::time_point when) {
    return std::max(milliseconds(1), std::chrono::ceil<milliseconds>(when - Clock::now()));
  }

  std::vector<std::string> prefixed(const std::vector<std::string>& keys) const {
    std::vector<std::string> result;
    for (const std::string& key : keys) result.push_back(prefix_ + key);
    return result;
  }

  void await(std::vector<std::string> keys, milliseconds timeout) {
    constexpr milliseconds kLook(200);
    const auto until =
        std::min(deadline_, Clock::now() + std::min<milliseconds>(timeout, std::chrono::hours(24 * 365)));
    while (true) {
      const auto left = std::chrono::ceil<milliseconds>(until - Clock::now());
      keys = client_->wait(keys, std::clamp(left, milliseconds(0), kLook));
      if (keys.empty()) return;
      if (check_) check_();
      if (left <= milliseconds(0)) {
        fail(ErrorKind::kCommunication, "rendezvous",
             {.what = "a member of the group did not set " + dtensor::in_quotes(keys.front()) + " in time"});
      }
    }
  }

  const std::shared_ptr<RendezvousClient> client_;
  const std::string prefix_;
  const Clock::time_point deadline_;
  const std::function<void()> check_;
};

}  // namespace

c10::intrusive_ptr<c10d::Store> make_rendezvous_store(std::shared_ptr<RendezvousClient> client, std::string prefix,
                                                      Clock::time_point deadline, std::function<void()> check) {
  return c10::make_intrusive<RendezvousStore>(std::move(client), std::move(prefix), deadline, std::move(check));
}

}  // namespace dtensor
