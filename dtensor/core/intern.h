#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace dtensor {

struct InternStats {
  std::uint64_t hits = 0;
  std::uint64_t misses = 0;
  std::size_t entries = 0;  // live ones, and dead ones kept for the next look-up
};

// What every entry of a table has, whatever it holds.
struct InternNode {
  explicit InternNode(std::size_t full_hash) : hash(full_hash) {}
  const std::size_t hash;
  InternNode* next = nullptr;
  std::atomic<std::int64_t> refs{0};  // handles outside the table
};

// An interned, immutable Value: equal values are one object, so comparing and hashing a handle is comparing a pointer.
// Empty by default and after a move.
template <class Value>
class Interned {
 public:
  Interned() = default;
  Interned(const Interned& other) noexcept : node_(other.node_) {
    if (node_) node_->refs.fetch_add(1, std::memory_order_relaxed);
  }
  Interned(Interned&& other) noexcept : node_(std::exchange(other.node_, nullptr)) {}
  Interned& operator=(Interned other) noexcept {
    std::swap(node_, other.node_);
    return *this;
  }
  // Never frees: the table holds a reference of its own until it sweeps.
  ~Interned() {
    if (node_) node_->refs.fetch_sub(1, std::memory_order_release);
  }

  explicit operator bool() const noexcept { return node_ != nullptr; }
  const Value& operator*() const noexcept { return static_cast<const Node*>(node_)->value; }
  const Value* operator->() const noexcept { return &**this; }
  std::size_t hash() const noexcept { return reinterpret_cast<std::uintptr_t>(node_) >> 6; }
  friend bool operator==(const Interned& a, const Interned& b) noexcept { return a.node_ == b.node_; }

 private:
  template <class, class>
  friend class InternTable;
  struct Node : InternNode {
    template <class Key>
    Node(const Key& key, std::size_t full_hash) : InternNode(full_hash), value(key) {}
    const Value value;
  };
  explicit Interned(InternNode* node) noexcept : node_(node) { node_->refs.fetch_add(1, std::memory_order_relaxed); }

  InternNode* node_ = nullptr;
};

// The table behind Interned<Value>. `Key` is what is hashed and compared; Value is built from it once, on a miss
// (`Value(key)`), and gives it back as `value.key()`. Safe from many threads. Bounded: when the number of entries
// passes the capacity, those without a handle are dropped, so at most max(capacity, twice the live ones) are kept. A
// look-up that needs no key to be built goes through find: anything that hashes alike and can say "that one".
template <class Key, class Value>
class InternTable {
 public:
  explicit InternTable(std::size_t capacity) : shard_capacity_(capacity / kShards + 1) {
    for (Shard& shard : shards_) shard.sweep_at = shard_capacity_;
  }
  // Pre: no handle outlives the table.
  ~InternTable() {
    for (Shard& shard : shards_) {
      for (InternNode* node : shard.buckets) {
        while (node) delete static_cast<Node*>(std::exchange(node, node->next));
      }
    }
  }
  InternTable(const InternTable&) = delete;
  InternTable& operator=(const InternTable&) = delete;

  // hash must be a function of the key alone.
  Interned<Value> intern(const Key& key, std::size_t hash) {
    Shard& shard = shards_[hash % kShards];
    std::lock_guard lock(shard.mutex);
    if (InternNode* node = shard.find(hash, [&](const Value& value) { return value.key() == key; })) {
      ++shard.stats.hits;
      return Interned<Value>(node);
    }
    ++shard.stats.misses;
    Node* node = new Node(key, hash);
    if (shard.stats.entries + 1 > shard.sweep_at) sweep(shard);
    if (shard.stats.entries + 1 > shard.buckets.size())
      shard.rehash(std::max<std::size_t>(16, 2 * shard.buckets.size()));
    shard.insert(node);
    ++shard.stats.entries;
    return Interned<Value>(node);
  }

  // The entry with this hash that matches, or an empty handle; matches(const Value&) runs under the table's lock.
  template <class Matches>
  Interned<Value> find(std::size_t hash, Matches matches) {
    Shard& shard = shards_[hash % kShards];
    std::lock_guard lock(shard.mutex);
    InternNode* node = shard.find(hash, matches);
    if (!node) return {};
    ++shard.stats.hits;
    return Interned<Value>(node);
  }

  InternStats stats() const {
    InternStats total;
    for (const Shard& shard : shards_) {
      std::lock_guard lock(shard.mutex);
      total.hits += shard.stats.hits;
      total.misses += shard.stats.misses;
      total.entries += shard.stats.entries;
    }
    return total;
  }

 private:
  using Node = typename Interned<Value>::Node;
  static constexpr std::size_t kShards = 16;

  struct Shard {
    mutable std::mutex mutex;
    std::vector<InternNode*> buckets;
    InternStats stats;
    std::size_t sweep_at = 0;

    template <class Matches>
    InternNode* find(std::size_t hash, Matches matches) const {
      if (buckets.empty()) return nullptr;
      for (InternNode* node = buckets[bucket_of(hash)]; node; node = node->next) {
        if (node->hash == hash && matches(static_cast<const Node*>(node)->value)) return node;
      }
      return nullptr;
    }
    // The number of buckets is a power of two.
    std::size_t bucket_of(std::size_t hash) const { return hash / kShards & (buckets.size() - 1); }
    void insert(InternNode* node) {
      InternNode*& bucket = buckets[bucket_of(node->hash)];
      node->next = std::exchange(bucket, node);
    }
    void rehash(std::size_t n) {
      std::vector<InternNode*> old(n, nullptr);
      old.swap(buckets);
      for (InternNode* node : old) {
        while (node) insert(std::exchange(node, node->next));
      }
    }
  };

  // Without the lock nobody can get a handle to an entry that has none, so zero here means nobody ever will.
  void sweep(Shard& shard) {
    for (InternNode*& bucket : shard.buckets) {
      for (InternNode** link = &bucket; *link;) {
        InternNode* node = *link;
        if (node->refs.load(std::memory_order_acquire) == 0) {
          *link = node->next;
          delete static_cast<Node*>(node);
          --shard.stats.entries;
        } else {
          link = &node->next;
        }
      }
    }
    shard.sweep_at = shard.stats.entries * 2 > shard_capacity_ ? shard.stats.entries * 2 : shard_capacity_;
  }

  std::array<Shard, kShards> shards_;
  const std::size_t shard_capacity_;
};

}  // namespace dtensor
