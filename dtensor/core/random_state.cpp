#include "dtensor/core/random_state.h"

#include "dtensor/core/hash.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

// The stream of calls that have a generator of their own.
constexpr std::uint64_t kGenerated = ~std::uint64_t{0};

// 64 bits print as the signed number that they are, too.
std::string printed(std::uint64_t bits) { return std::to_string(static_cast<std::int64_t>(bits)); }

}  // namespace

std::string RandomState::to_string() const {
  std::string text = "seed " + printed(seed) + ", stream " + printed(stream) + ", calls";
  for (const auto& [of, count] : calls) text += ' ' + printed(of) + ':' + printed(count);
  return text;
}

RandomState RandomState::parse(std::string_view text) {
  Scanner scanner(text, "RandomState", "seed 7, stream 0, calls 0:12 5:3");
  RandomState state;
  scanner.expect("seed");
  state.seed = static_cast<std::uint64_t>(scanner.integer());
  scanner.expect(",");
  scanner.expect("stream");
  state.stream = static_cast<std::uint64_t>(scanner.integer());
  scanner.expect(",");
  scanner.expect("calls");
  while (!scanner.at_end()) {
    const auto of = static_cast<std::uint64_t>(scanner.integer());
    scanner.expect(":");
    const auto count = static_cast<std::uint64_t>(scanner.integer());
    if (!state.calls.emplace(of, count).second) scanner.fail_here("a stream is there twice");
  }
  return state;
}

RandomSource::RandomSource() : progress_(std::make_shared<std::atomic<std::uint64_t>>(0)) { publish(); }

RandomKey RandomSource::next() {
  const std::lock_guard lock(mutex_);
  const RandomKey key = random_key(state_.seed, state_.stream, state_.calls[state_.stream]++);
  publish();
  return key;
}

RandomKey RandomSource::next_from(std::uint64_t bits) {
  const std::lock_guard lock(mutex_);
  Hasher hasher;
  hasher.add(drawn_);
  hasher.add(bits);
  drawn_ = hasher.value();
  publish();
  return random_key(bits, kGenerated, 0);
}

void RandomSource::seed(std::uint64_t seed) {
  const std::lock_guard lock(mutex_);
  state_ = {.seed = seed, .stream = state_.stream, .calls = {}};
  drawn_ = 0;
  publish();
}

RandomState RandomSource::state() const {
  const std::lock_guard lock(mutex_);
  return state_;
}

void RandomSource::set_state(const RandomState& state) {
  const std::lock_guard lock(mutex_);
  state_ = state;
  publish();
}

void RandomSource::publish() {
  Hasher hasher;
  hasher.add(state_.seed);
  hasher.add(drawn_);
  const auto common = state_.calls.find(0);
  const std::uint64_t calls = common == state_.calls.end() ? 0 : common->second;
  progress_->store((hasher.value() << 40) | calls_of(calls), std::memory_order_relaxed);
}

}  // namespace dtensor
