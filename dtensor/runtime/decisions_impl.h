#pragma once

#include <array>
#include <memory>
#include <vector>

#include "dtensor/core/hash.h"
#include "dtensor/runtime/dispatch.h"
#include "dtensor/runtime/dispatch_impl.h"

namespace dtensor {

// What a call's decision depends on, word by word: the operator, this rank and the default type, how the operands lie,
// then the static arguments that matter.
class CallKey {
 public:
  // One at a time on a thread: they share their memory.
  CallKey(const OpInfo& info, std::int64_t rank);

  void add_operand(std::size_t arg, std::size_t item, const Payload& payload) {
    add(arg * 65536 + item);
    add(payload.spec.hash());
    partial_ = partial_ || payload.spec.has_partial();
  }
  void add_number(std::size_t arg, std::size_t item, const at::Tensor& plain);
  void add_static(KeyUse use, const c10::IValue& value);
  // Of a list that is not boxed, as of one that is.
  void add_static(KeyUse use, at::IntArrayRef ints);

  const std::vector<std::uint64_t>& words() const { return words_; }
  std::size_t hash() const {
    Hasher hasher;
    for (const std::uint64_t word : words_) hasher.add(word);
    return hasher.value();
  }

 private:
  void add(std::uint64_t word) { words_.push_back(word); }
  void add_value(const c10::IValue& value);
  void add_magnitude(const StaticArg& number);

  std::vector<std::uint64_t>& words_;
  const bool scales_;
  bool partial_ = false;  // some operand is: whether a factor is finite decides
};

// What was decided before; each thread has its own, which saves a lock.
class Decisions {
 public:
  static Decisions& of_this_thread();

  // Null where there is none.
  std::shared_ptr<const Prepared> find(std::size_t hash, const std::vector<std::uint64_t>& words) {
    for (const auto& entry : bucket(hash)) {
      if (entry && entry->hash == hash && entry->words == words) return entry;
    }
    return nullptr;
  }
  // Where the few places of a hash are taken, the oldest goes.
  void insert(std::shared_ptr<const Prepared> prepared);
  void clear();

  void count_found() { ++stats_.hits; }
  void count_made() { ++stats_.misses; }
  DispatchStats stats() const { return stats_; }

 private:
  static constexpr std::size_t kBuckets = 4096;
  using Bucket = std::array<std::shared_ptr<const Prepared>, 4>;
  Bucket& bucket(std::size_t hash) {
    if (buckets_.empty()) buckets_.resize(kBuckets);
    return buckets_[hash % kBuckets];
  }
  std::vector<Bucket> buckets_;
  DispatchStats stats_;
};

}  // namespace dtensor
