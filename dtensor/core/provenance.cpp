#include "dtensor/core/provenance.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <unordered_set>

#include "dtensor/core/error.h"
#include "dtensor/core/hash.h"

namespace dtensor {

std::uint64_t stable_hash(std::string_view text) noexcept {
  Hasher hasher;
  hasher.add(text.size());
  for (std::size_t at = 0; at < text.size(); at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, text.data() + at, std::min<std::size_t>(8, text.size() - at));
    hasher.add(word);
  }
  return hasher.value();
}

History::History() : entries_(new Entry[kEntries]) {}

std::vector<History::Step> History::steps() const {
  std::vector<Step> steps;
  const std::uint64_t end = next_.load(std::memory_order_acquire);
  const std::uint64_t begin = end > kEntries ? end - kEntries : 0;
  steps.reserve(static_cast<std::size_t>(end - begin));
  for (std::uint64_t i = begin; i < end; ++i) {
    const Entry& entry = entries_[i % kEntries];
    const std::string* name = entry.name.load(std::memory_order_relaxed);
    steps.push_back({entry.result.load(std::memory_order_relaxed), entry.first.load(std::memory_order_relaxed),
                     entry.second.load(std::memory_order_relaxed), name ? *name : std::string()});
  }
  return steps;
}

// Bytes: the number of steps; for each its three hashes and the number of its name; then the names, each with its
// length.
std::string History::to_bytes(std::size_t size) const {
  const std::vector<Step> all = steps();
  std::map<std::string, std::uint64_t> numbers;
  std::vector<const std::string*> names;
  std::size_t used = 16;
  std::size_t first = all.size();
  while (first > 0) {
    const Step& step = all[first - 1];
    const bool known = numbers.count(step.name) > 0;
    const std::size_t more = 32 + (known ? 0 : 8 + step.name.size());
    if (used + more > size) break;
    used += more;
    if (!known) {
      const auto entry = numbers.emplace(step.name, names.size()).first;
      names.push_back(&entry->first);
    }
    --first;
  }
  std::string bytes;
  const auto put = [&](std::uint64_t word) { bytes.append(reinterpret_cast<const char*>(&word), 8); };
  put(all.size() - first);
  for (std::size_t i = first; i < all.size(); ++i) {
    put(all[i].result);
    put(all[i].first);
    put(all[i].second);
    put(numbers.at(all[i].name));
  }
  put(names.size());
  for (const std::string* name : names) {
    put(name->size());
    bytes += *name;
  }
  return bytes;
}

std::vector<History::Step> History::from_bytes(std::string_view bytes) {
  std::size_t at = 0;
  bool valid = true;
  const auto take = [&]() -> std::uint64_t {
    std::uint64_t word = 0;
    valid = valid && bytes.size() - at >= 8;
    if (!valid) return 0;
    std::memcpy(&word, bytes.data() + at, 8);
    at += 8;
    return word;
  };
  const std::uint64_t count = take();
  if (!valid || count > kEntries) return {};
  std::vector<Step> steps(static_cast<std::size_t>(count));
  std::vector<std::uint64_t> numbers(steps.size());
  for (std::size_t i = 0; i < steps.size(); ++i) {
    steps[i].result = take();
    steps[i].first = take();
    steps[i].second = take();
    numbers[i] = take();
  }
  const std::uint64_t num_names = take();
  if (!valid || num_names > kEntries) return {};
  std::vector<std::string> names;
  for (std::uint64_t i = 0; i < num_names; ++i) {
    const std::uint64_t length = take();
    if (!valid || length > bytes.size() - at) return {};
    names.emplace_back(bytes.substr(at, static_cast<std::size_t>(length)));
    at += static_cast<std::size_t>(length);
  }
  for (std::size_t i = 0; i < steps.size(); ++i) {
    if (numbers[i] < names.size()) steps[i].name = names[static_cast<std::size_t>(numbers[i])];
  }
  return steps;
}

namespace {

using Steps = std::vector<History::Step>;
using Hashes = std::unordered_set<std::uint64_t>;

Hashes results_of(const Steps& steps) {
  Hashes results;
  for (const History::Step& step : steps) results.insert(step.result);
  return results;
}

// The tensor and what it comes from, as far as the history goes.
Hashes ancestors_of(std::uint64_t tensor, const Steps& steps) {
  Hashes all = {tensor};
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    if (!all.count(step->result)) continue;
    all.insert(step->first);
    all.insert(step->second);
  }
  return all;
}

std::string first_without(const Steps& steps, const Steps& others, const Hashes* among) {
  const Hashes theirs = results_of(others), mine = results_of(steps);
  // An operand that neither history has is older than both.
  const auto shared = [&](std::uint64_t operand) {
    return operand == 0 || theirs.count(operand) || !mine.count(operand);
  };
  for (const History::Step& step : steps) {
    if (among && !among->count(step.result)) continue;
    if (!theirs.count(step.result) && shared(step.first) && shared(step.second)) return step.name;
  }
  return {};
}

}  // namespace

FirstDifference first_difference(const Steps& mine, std::uint64_t my_tensor, const Steps& theirs,
                                 std::uint64_t their_tensor) {
  const Hashes my_ancestors = ancestors_of(my_tensor, mine), their_ancestors = ancestors_of(their_tensor, theirs);
  FirstDifference parted{first_without(mine, theirs, &my_ancestors), first_without(theirs, mine, &their_ancestors)};
  if (!parted.mine.empty() || !parted.theirs.empty()) return parted;
  return {first_without(mine, theirs, nullptr), first_without(theirs, mine, nullptr)};
}

std::uint64_t RankProvenance::number_of_leaf(std::uint64_t kind) {
  if (std::this_thread::get_id() != owner_) return 0;
  // A program that makes leaves of ever new shapes must not fill memory: all ranks start again at the same number.
  if (numbers_.size() >= 65536 && !numbers_.count(kind)) numbers_.clear();
  return ++numbers_[kind];
}

void RankProvenance::add_mesh(std::uint64_t mesh, std::vector<std::int64_t> ranks) {
  const std::lock_guard lock(written_mutex_);
  for (Written& written : written_) {
    const std::uint64_t known = written.mesh.load(std::memory_order_relaxed);
    if (known == mesh) return;
    if (known != 0) continue;
    written.ranks = std::move(ranks);
    written.mesh.store(mesh, std::memory_order_release);
    return;
  }
}

std::vector<std::pair<std::vector<std::int64_t>, std::uint64_t>> RankProvenance::replicas_written() const {
  std::vector<std::pair<std::vector<std::int64_t>, std::uint64_t>> all;
  for (const Written& written : written_) {
    if (written.mesh.load(std::memory_order_acquire) == 0) break;
    all.emplace_back(written.ranks, written.sum.load(std::memory_order_relaxed));
  }
  return all;
}

namespace {

std::optional<CheckLevel> level_from_environment() {
  const char* text = std::getenv("DTENSOR_CHECK");
  const std::string_view value = text ? text : "on";
  if (value == "off" || value == "0") return CheckLevel::kOff;
  if (value == "values") return CheckLevel::kValues;
  if (value == "on" || value == "1" || value.empty()) return CheckLevel::kOn;
  return std::nullopt;
}

}  // namespace

std::atomic<CheckLevel> detail::check_level = level_from_environment().value_or(CheckLevel::kOn);

void check_environment_level() {
  if (level_from_environment()) return;
  fail_invalid("World", {.what = "DTENSOR_CHECK has an unknown value",
                         .got = std::getenv("DTENSOR_CHECK"),
                         .expected = "off, on or values"});
}

}  // namespace dtensor
