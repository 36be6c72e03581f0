#pragma once

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "dtensor/core/plan.h"
#include "tests/core/sweep.h"

// Plays a plan on lists of elements: what every rank holds is a map from an element's index to the parts of its value
// (each part a name for what one place of the Partial source mesh dims contributed). No arithmetic is shared with the
// planner but the messages it claims to send.
namespace dtensor::play {

using Parts = std::multiset<std::int64_t>;
using Content = std::map<std::int64_t, Parts>;
using Ranks = std::map<std::int64_t, Content>;  // by rank

// Which part a coordinate holds of a Partial spec: its digits on the Partial mesh dims.
inline std::int64_t part_name(const Spec& spec, const Dims& at) {
  std::int64_t name = 0;
  for (std::int64_t m = 0; m < spec.mesh().ndim(); ++m) {
    name = name * spec.mesh().shape()[m] + (spec.partials()[m] ? at[m] : 0);
  }
  return name;
}

inline Ranks start(const Spec& spec, std::int64_t row) {
  Ranks ranks;
  sweep::for_each_coordinate(spec.mesh(), [&](const Dims& at) {
    Content& content = ranks[spec.mesh().rank_at(at, row)];
    for (std::int64_t i : sweep::elements_of(box_of(spec, at), spec.meta().shape())) {
      content[i] = {part_name(spec, at)};
    }
  });
  return ranks;
}

struct Counted {
  Volume received;
  Volume sent;
};

using MessageList = std::vector<std::tuple<std::int64_t, std::int64_t, std::vector<std::int64_t>>>;

inline bool outside_group(const Step& step, const Dims& a, const Dims& b) {
  for (std::size_t m = 0; m < a.size(); ++m) {
    const auto& group = step.mesh_dims;
    if (a[m] != b[m] && std::find(group.begin(), group.end(), static_cast<std::int64_t>(m)) == group.end()) return true;
  }
  return false;
}

inline void play_local(const Step& step, const Ranks& before, Ranks& after, std::int64_t row) {
  sweep::for_each_coordinate(step.after.mesh(), [&](const Dims& at) {
    const std::int64_t rank = step.after.mesh().rank_at(at, row);
    Content& content = after[rank];
    bool keeps = true;
    for (std::int64_t m = 0; step.kind == StepKind::kEmbed && m < step.after.mesh().ndim(); ++m) {
      const auto op = step.after.partials()[m];
      const bool same = step.before.mesh() == step.after.mesh() && step.before.partials()[m];
      keeps = keeps && (!op || same || *op == ReduceOp::kAvg || at[m] == 0);
    }
    for (std::int64_t i : sweep::elements_of(box_of(step.after, at), step.after.meta().shape())) {
      ASSERT_TRUE(before.count(rank) && before.at(rank).count(i)) << "element " << i << " is not on rank " << rank;
      content[i] = keeps ? before.at(rank).at(i) : Parts{};
    }
  });
}

// The bytes that the messages carry, and what arrives where.
inline void play_messages(const Step& step, const Ranks& before, Ranks& after, Counted& counted, std::int64_t row) {
  const Mesh& source = step.before.mesh();
  const Mesh& target = step.after.mesh();
  const Dims& shape = step.before.meta().shape();
  const std::int64_t size = element_size(step.before.meta().dtype());
  MessageList received;
  MessageList sent;
  sweep::for_each_coordinate(target, [&](const Dims& at) {
    const std::int64_t rank = target.rank_at(at, row);
    std::int64_t bytes = 0;
    for_each_receive(step, at, [&](const Transfer& transfer) {
      const std::int64_t peer = source.rank_at(transfer.peer, row);
      ASSERT_EQ(transfer.self, peer == rank);
      ASSERT_FALSE(source == target && outside_group(step, at, transfer.peer)) << "a message leaves the group";
      const sweep::Indices elements = sweep::elements_of(transfer.box, shape);
      for (std::int64_t i : elements) {
        ASSERT_TRUE(before.at(peer).count(i)) << "rank " << peer << " has no element " << i;
        const Parts& parts = before.at(peer).at(i);
        after[rank][i].insert(parts.begin(), parts.end());
      }
      if (!transfer.self) bytes += static_cast<std::int64_t>(elements.size()) * size;
      received.emplace_back(peer, rank, elements);
    });
    after[rank];
    counted.received.max = std::max(counted.received.max, bytes);
    counted.received.total += bytes;
  });
  sweep::for_each_coordinate(source, [&](const Dims& at) {
    std::int64_t bytes = 0;
    for_each_send(step, at, [&](const Transfer& transfer) {
      const sweep::Indices elements = sweep::elements_of(transfer.box, shape);
      if (!transfer.self) bytes += static_cast<std::int64_t>(elements.size()) * size;
      sent.emplace_back(source.rank_at(at, row), target.rank_at(transfer.peer, row), elements);
    });
    counted.sent.max = std::max(counted.sent.max, bytes);
    counted.sent.total += bytes;
  });
  std::sort(received.begin(), received.end());
  std::sort(sent.begin(), sent.end());
  ASSERT_EQ(received.size(), sent.size()) << "the two ends disagree";
  ASSERT_TRUE(received == sent) << "the two ends disagree";
}

inline void check_bytes(const Step& step, const Counted& counted) {
  if (step.kind == StepKind::kAllReduce) {
    // Ranks reduce a share each and hand it round: said by the formula, checked here against its definition.
    std::int64_t k = 1;
    for (std::int64_t m : step.mesh_dims) k *= step.before.mesh().shape()[m];
    std::int64_t total = 0;
    std::int64_t most = 0;
    sweep::for_each_coordinate(step.before.mesh(), [&](const Dims& at) {
      const std::int64_t n = step.before.local_bytes(at);
      total += n;
      most = std::max(most, n);
    });
    EXPECT_EQ(step.received.total, total / k * 2 * (k - 1));
    EXPECT_GE(step.received.max, 2 * (k - 1) * most / k);
    return;
  }
  EXPECT_EQ(step.received, counted.received);
  if (step.kind == StepKind::kBroadcast) return;
  EXPECT_EQ(step.sent.total, counted.sent.total);
  if (step.before.mesh() == step.after.mesh()) {
    EXPECT_EQ(step.sent.max, counted.sent.max);
  } else {
    EXPECT_GE(step.sent.max, counted.sent.max);
  }
}

// Every rank (of one row) ends with exactly its boxes, every value with exactly its parts, and the bytes are the
// plan's.
inline void check(const Plan& plan, std::int64_t row = 0) {
  SCOPED_TRACE(plan.to_string());
  Ranks now = start(plan.from(), row);
  Spec spec = plan.from();
  for (const Step& step : plan.steps()) {
    ASSERT_EQ(step.before, spec);
    Ranks next;
    Counted counted;
    if (is_local(step.kind)) {
      play_local(step, now, next, row);
    } else {
      play_messages(step, now, next, counted, row);
    }
    check_bytes(step, counted);
    if (::testing::Test::HasFailure()) return;
    now = std::move(next);
    spec = step.after;
  }
  // What a value must be: the parts of all places that end, those of one's own place that stay.
  sweep::for_each_coordinate(plan.to().mesh(), [&](const Dims& at) {
    const std::int64_t rank = plan.to().mesh().rank_at(at, row);
    Parts expected;
    bool identity = false;
    const bool one_mesh = plan.from().mesh() == plan.to().mesh();
    sweep::for_each_coordinate(plan.from().mesh(), [&](const Dims& other) {
      for (std::int64_t m = 0; m < plan.from().mesh().ndim(); ++m) {
        const bool partial = plan.from().partials()[m].has_value();
        if (!partial && other[m] != 0) return;
        if (partial && one_mesh && plan.to().partials()[m] && other[m] != at[m]) return;
      }
      expected.insert(part_name(plan.from(), other));
    });
    for (std::int64_t m = 0; m < plan.to().mesh().ndim(); ++m) {
      const auto op = plan.to().partials()[m];
      const bool kept = one_mesh && plan.from().partials()[m];
      identity = identity || (op && *op != ReduceOp::kAvg && !kept && at[m] != 0);
    }
    Content content;
    for (std::int64_t i : sweep::elements_of(box_of(plan.to(), at), plan.to().meta().shape())) {
      content[i] = identity ? Parts{} : expected;
    }
    ASSERT_EQ(now[rank], content) << "rank " << rank;
  });
}

}  // namespace dtensor::play
