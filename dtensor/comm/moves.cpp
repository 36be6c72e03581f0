#include "dtensor/comm/moves.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "dtensor/comm/reduce.h"
#include "dtensor/core/checked.h"

namespace dtensor {
namespace {

template <class Pointer>
Pointer advance(Pointer pointer, std::int64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const char, char>;
  return static_cast<Byte*>(pointer) + bytes;
}

void* data_of(const at::Tensor& tensor) { return tensor.numel() == 0 ? nullptr : tensor.data_ptr(); }

}  // namespace

void Moves::add(Sources sources, Destinations destinations, std::int64_t count) {
  if (count == 0 || destinations.empty()) return;
  bytes_ += count * element_ * static_cast<std::int64_t>(sources.size() + destinations.size());
  stretches_.push_back({std::move(sources), std::move(destinations), count, tasks_});
  tasks_ += ceil_div(count, per_task_);
}

void Moves::add_gather(const std::vector<Post>& posts) {
  std::int64_t offset = 0;
  for (std::size_t from = 0; from < posts.size(); ++from) {
    const std::int64_t count = posts[from].recv_counts[from];
    Destinations destinations;
    for (const Post& post : posts) {
      if (count > 0) destinations.push_back(advance(data_of(post.output), offset * element_));
    }
    add({data_of(posts[from].input)}, std::move(destinations), count);
    offset += count;
  }
}

void Moves::add_reduce_scatter(const std::vector<Post>& posts) {
  std::int64_t offset = 0;
  for (std::size_t to = 0; to < posts.size(); ++to) {
    const std::int64_t count = posts[to].recv_counts[to];
    Sources sources;
    for (const Post& post : posts) {
      if (count > 0) sources.push_back(advance(data_of(post.input), offset * element_));
    }
    add(std::move(sources), {data_of(posts[to].output)}, count);
    offset += count;
  }
}

void Moves::add_all_to_all(const std::vector<Post>& posts) {
  std::vector<std::int64_t> sent(posts.size(), 0);
  for (std::size_t to = 0; to < posts.size(); ++to) {
    std::int64_t received = 0;
    for (std::size_t from = 0; from < posts.size(); ++from) {
      const std::int64_t count = posts[to].recv_counts[from];
      if (count > 0) {
        add({advance(data_of(posts[from].input), sent[from] * element_)},
            {advance(data_of(posts[to].output), received * element_)}, count);
      }
      received += count;
      sent[from] += count;
    }
  }
}

void Moves::add_scatter(const std::vector<Post>& posts) {
  const Post& root = posts[static_cast<std::size_t>(what_.root)];
  std::int64_t offset = 0;
  for (std::size_t to = 0; to < posts.size(); ++to) {
    const std::int64_t count = root.recv_counts[to];
    if (count > 0) add({advance(data_of(root.input), offset * element_)}, {data_of(posts[to].output)}, count);
    offset += count;
  }
}

Moves Moves::of(const std::vector<Post>& posts) {
  Moves moves;
  moves.what_ = posts[0].fingerprint;
  if (moves.what_.operation == Operation::kBarrier) return moves;
  moves.element_ = static_cast<std::int64_t>(c10::elementSize(moves.what_.dtype));
  moves.per_task_ = kTaskBytes / moves.element_;
  switch (moves.what_.operation) {
    case Operation::kAllReduce: {
      Sources sources;
      Destinations destinations;
      for (const Post& post : posts) {
        sources.push_back(data_of(post.output));
        destinations.push_back(data_of(post.output));
      }
      moves.add(std::move(sources), std::move(destinations), moves.what_.numel);
      break;
    }
    case Operation::kBroadcast: {
      Destinations destinations;
      for (const Post& post : posts) destinations.push_back(data_of(post.output));
      const void* source = destinations[static_cast<std::size_t>(moves.what_.root)];
      moves.add({source}, std::move(destinations), moves.what_.numel);
      break;
    }
    case Operation::kAllGather:
      moves.add_gather(posts);
      break;
    case Operation::kReduceScatter:
      moves.add_reduce_scatter(posts);
      break;
    case Operation::kAllToAll:
      moves.add_all_to_all(posts);
      break;
    case Operation::kScatter:
      moves.add_scatter(posts);
      break;
    case Operation::kSend:
    case Operation::kReceive:
    case Operation::kBarrier:
      break;
  }
  return moves;
}

Moves Moves::of_pair(const Post& send, const Post& receive) {
  Moves moves;
  moves.what_ = send.fingerprint;
  moves.element_ = static_cast<std::int64_t>(c10::elementSize(moves.what_.dtype));
  moves.per_task_ = kTaskBytes / moves.element_;
  moves.add({data_of(send.input)}, {data_of(receive.output)}, moves.what_.numel);
  return moves;
}

void Moves::run(std::int64_t task) const {
  auto after = std::upper_bound(stretches_.begin(), stretches_.end(), task,
                                [](std::int64_t t, const Stretch& stretch) { return t < stretch.first_task; });
  const Stretch& stretch = *--after;
  const std::int64_t begin = (task - stretch.first_task) * per_task_;
  const std::int64_t count = std::min(per_task_, stretch.count - begin);
  const auto bytes = static_cast<std::size_t>(count * element_);
  const void* result = advance(stretch.sources[0], begin * element_);
  std::size_t first = 0;
  if (what_.op) {
    Sources parts;
    for (const void* source : stretch.sources) parts.push_back(advance(source, begin * element_));
    void* out = advance(stretch.destinations[0], begin * element_);
    reduce_parts(*what_.op, what_.dtype, out, parts, count);
    result = out;
    first = 1;
  }
  for (std::size_t i = first; i < stretch.destinations.size(); ++i) {
    void* to = advance(stretch.destinations[i], begin * element_);
    if (to != result) std::memcpy(to, result, bytes);
  }
}

}  // namespace dtensor
