#pragma once

#include <cstdint>
#include <vector>

#include "dtensor/comm/fingerprint.h"
#include "dtensor/core/inline_vec.h"

namespace dtensor {

// One member's part in an operation of a group whose members see each other's memory.
struct Post {
  Fingerprint fingerprint = {};
  at::Tensor output = {};  // the buffer, where there is one for both
  at::Tensor input = {};
  std::vector<std::int64_t> recv_counts = {};  // the counts, where there is one list
  std::vector<std::int64_t> send_counts = {};
  bool here = false;    // has this member issued it?
  bool behind = false;  // has its collective before this one yet to end in the group's lane?
};

// What an operation does to memory, cut into tasks that any thread may run, in any order, at the same time. A stretch
// of `count` elements is reduced (or copied, when there is one source) into every destination: the same element is read
// and written by one task only, so results do not depend on who runs what.
class Moves {
 public:
  Moves() = default;
  // Of a collective: one post per member, which agree.
  static Moves of(const std::vector<Post>& posts);
  // Of a send that met its receive.
  static Moves of_pair(const Post& send, const Post& receive);

  std::int64_t tasks() const noexcept { return tasks_; }
  // Too little to be shared with anybody.
  bool small() const noexcept { return bytes_ <= kSmallBytes; }
  void run(std::int64_t task) const;

 private:
  static constexpr std::int64_t kSmallBytes = 64 << 10;  // read and written
  static constexpr std::int64_t kTaskBytes = 32 << 10;   // of one source

  using Sources = InlineVec<const void*, 4>;
  using Destinations = InlineVec<void*, 4>;

  struct Stretch {
    Sources sources;
    Destinations destinations;
    std::int64_t count = 0;
    std::int64_t first_task = 0;
  };

  void add(Sources sources, Destinations destinations, std::int64_t count);
  void add_gather(const std::vector<Post>& posts);
  void add_reduce_scatter(const std::vector<Post>& posts);
  void add_all_to_all(const std::vector<Post>& posts);
  void add_scatter(const std::vector<Post>& posts);

  Fingerprint what_;
  std::int64_t element_ = 1;   // bytes
  std::int64_t per_task_ = 1;  // elements
  std::int64_t tasks_ = 0;
  std::int64_t bytes_ = 0;
  InlineVec<Stretch, 1> stretches_;
};

}  // namespace dtensor
