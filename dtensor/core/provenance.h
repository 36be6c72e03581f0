#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace dtensor {

// One more word of a hash.
inline std::uint64_t mix(std::uint64_t hash, std::uint64_t word) noexcept {
  hash = (hash ^ word) * 0x9E3779B97F4A7C15ull;
  return hash ^ (hash >> 29);
}

// The same in every process.
std::uint64_t stable_hash(std::string_view text) noexcept;

// How a tensor was made, as hashes that are equal on all ranks of its mesh in a right program.
//
// `made`: the operators, their arguments, layouts and leaves that the tensor comes from.
// `values`: for the first mesh dims, checksums of leaves that are replicated along that mesh dim but not along all.
// Equal only among ranks that differ in that mesh dim alone: a batch {Shard(0), Replicate()} has other bytes for every
// index of the first mesh dim. Zeros on 1-D meshes.
struct Provenance {
  static constexpr std::size_t kValues = 3;

  std::uint64_t made = 0;
  std::array<std::uint64_t, kValues> values = {};

  bool has_values() const noexcept { return (values[0] | values[1] | values[2]) != 0; }
  void mix_in(const Provenance& operand) noexcept {
    made = mix(made, operand.made);
    if (!operand.has_values()) return;
    for (std::size_t m = 0; m < kValues; ++m) {
      if (operand.values[m] != 0) values[m] = mix(values[m], operand.values[m]);
    }
  }
  // A sum of two tensors, in any order.
  void add(const Provenance& other) noexcept {
    made += other.made;
    for (std::size_t m = 0; m < kValues; ++m) values[m] += other.values[m];
  }
};

// What a rank did last: a ring of results, each with the operator that made it and the hashes of two of its operands.
// Entries are written by the rank's threads and may be read by other ranks of the process at any time.
class History {
 public:
  static constexpr std::size_t kEntries = 4096;

  History();

  // `name` must live as long as the program.
  void add(std::uint64_t result, const std::string* name, std::uint64_t first, std::uint64_t second) noexcept {
    const std::uint64_t next = next_.load(std::memory_order_relaxed);
    Entry& entry = entries_[next % kEntries];
    entry.result.store(result, std::memory_order_relaxed);
    entry.name.store(name, std::memory_order_relaxed);
    entry.first.store(first, std::memory_order_relaxed);
    entry.second.store(second, std::memory_order_relaxed);
    next_.store(next + 1, std::memory_order_release);
  }

  struct Step {
    std::uint64_t result = 0, first = 0, second = 0;
    std::string name;
  };
  // The entries, oldest first.
  std::vector<Step> steps() const;

  // As bytes to be sent, of at most `size`: the newest entries that fit. Reading takes any bytes.
  std::string to_bytes(std::size_t size) const;
  static std::vector<Step> from_bytes(std::string_view bytes);

 private:
  struct Entry {
    std::atomic<std::uint64_t> result{0};
    std::atomic<const std::string*> name{nullptr};
    std::atomic<std::uint64_t> first{0}, second{0};
  };
  std::unique_ptr<Entry[]> entries_;
  std::atomic<std::uint64_t> next_{0};
};

// Where two histories part: the first entry on each side whose result the other does not have, while the other has its
// operands. Among those that the two tensors come from, if there is one; else among all. Empty where a side has none.
struct FirstDifference {
  std::string mine, theirs;
};
FirstDifference first_difference(const std::vector<History::Step>& mine, std::uint64_t my_tensor,
                                 const std::vector<History::Step>& theirs, std::uint64_t their_tensor);

// A rank's own part of provenance; one for each RankContext. The thread that makes it is the rank's own.
class RankProvenance {
 public:
  RankProvenance() : owner_(std::this_thread::get_id()), history_(std::make_shared<History>()) {}

  History& history() noexcept { return *history_; }
  // Groups keep it: other ranks may look at it when this one has gone.
  std::shared_ptr<const History> shared_history() const { return history_; }

  // How many leaves of this kind the rank's own thread has made before; 0 on other threads, whose order is not fixed.
  std::uint64_t number_of_leaf(std::uint64_t kind);

  // A replicated parameter on this mesh was written, and is this now. Sums of such hashes must agree at the next
  // collective over the mesh, whatever it sends, and at the end of the world. False: the mesh is new.
  bool note_replica_written(std::uint64_t mesh, std::uint64_t made) noexcept {
    for (Written& written : written_) {
      const std::uint64_t known = written.mesh.load(std::memory_order_acquire);
      if (known == 0) return false;
      if (known != mesh) continue;
      written.sum.store(written.sum.load(std::memory_order_relaxed) + mix(made, mesh), std::memory_order_relaxed);
      return true;
    }
    return true;  // only the first few meshes count
  }
  void add_mesh(std::uint64_t mesh, std::vector<std::int64_t> ranks);
  std::uint64_t replicas_written(std::uint64_t mesh) const noexcept {
    for (const Written& written : written_) {
      const std::uint64_t known = written.mesh.load(std::memory_order_acquire);
      if (known == mesh) return written.sum.load(std::memory_order_relaxed);
      if (known == 0) break;
    }
    return 0;
  }
  // All of them, with the ranks that must agree.
  std::vector<std::pair<std::vector<std::int64_t>, std::uint64_t>> replicas_written() const;

 private:
  const std::thread::id owner_;
  const std::shared_ptr<History> history_;
  std::unordered_map<std::uint64_t, std::uint64_t> numbers_;  // of the rank's own thread
  std::mutex written_mutex_;
  struct Written {
    std::atomic<std::uint64_t> mesh{0}, sum{0};
    std::vector<std::int64_t> ranks;  // constant once the mesh is there
  };
  std::array<Written, 8> written_;
};

// Are provenance and checksums kept? DTENSOR_CHECK: off | on (default) | values, which also compares the replicas of
// every result.
enum class CheckLevel : std::uint8_t { kOff, kOn, kValues };
namespace detail {
extern std::atomic<CheckLevel> check_level;
}
inline CheckLevel check_level() noexcept { return detail::check_level.load(std::memory_order_relaxed); }
// Changes it for the whole process, alike on all ranks; returns what it was.
inline CheckLevel set_check_level(CheckLevel level) noexcept { return detail::check_level.exchange(level); }
// An error where the environment has an unknown value.
void check_environment_level();

}  // namespace dtensor
