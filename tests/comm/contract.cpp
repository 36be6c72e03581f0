#include "tests/comm/contract.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/real.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <complex>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <thread>

#include "dtensor/comm/reduce.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"

namespace dtensor::testing {
namespace {

using Counts = std::vector<std::int64_t>;
using Value = std::complex<double>;
// The value of element i on a rank.
using Values = std::function<Value(std::int64_t rank, std::int64_t i)>;

constexpr auto kTypes =
    std::to_array<c10::ScalarType>({at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort,
                                    at::kChar, at::kByte, at::kBool, at::kComplexFloat, at::kComplexDouble});
constexpr auto kOps = std::to_array<ReduceOp>({ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax,
                                               ReduceOp::kProduct, ReduceOp::kAnd, ReduceOp::kOr, ReduceOp::kXor});

[[noreturn]] void give_up(const std::string& text) { throw ContractFailure(text); }

void require(bool holds, const std::string& text) {
  if (!holds) give_up(text);
}

// Values as a tensor of any type; integers wrap, bool is "not 0", real types drop the imaginary part.
at::Tensor tensor_of(c10::ScalarType dtype, const std::vector<Value>& values) {
  auto wide = at::empty({static_cast<std::int64_t>(values.size())}, at::kComplexDouble);
  if (!values.empty()) std::memcpy(wide.data_ptr(), values.data(), values.size() * sizeof(Value));
  if (c10::isComplexType(dtype)) return wide.to(dtype);
  const auto real = at::real(wide).contiguous();
  return c10::isIntegralType(dtype, /*includeBool=*/true) ? real.to(at::kLong).to(dtype) : real.to(dtype);
}

at::Tensor make(c10::ScalarType dtype, std::int64_t rank, std::int64_t begin, std::int64_t count,
                const Values& values) {
  std::vector<Value> list;
  for (std::int64_t i = begin; i < begin + count; ++i) list.push_back(values(rank, i));
  return tensor_of(dtype, list);
}

void require_equal(const at::Tensor& got, const at::Tensor& want, const std::string& context) {
  require(got.scalar_type() == want.scalar_type() && got.numel() == want.numel(), context + ": shape or type");
  const auto size = static_cast<std::size_t>(got.numel()) * got.element_size();
  if (size == 0 || std::memcmp(got.data_ptr(), want.data_ptr(), size) == 0) return;
  const auto g = got.reshape({-1}), w = want.reshape({-1});
  for (std::int64_t i = 0; i < g.numel(); ++i) {
    const auto a = g[i].to(at::kComplexDouble).item<c10::complex<double>>();
    const auto b = w[i].to(at::kComplexDouble).item<c10::complex<double>>();
    if (a == b) continue;
    give_up(context + ": element " + std::to_string(i) + " of " + std::to_string(g.numel()) + " is (" +
            std::to_string(a.real()) + "," + std::to_string(a.imag()) + "), not (" + std::to_string(b.real()) + "," +
            std::to_string(b.imag()) + ")");
  }
  give_up(context + ": equal values, other bits");
}

template <class Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

Counts all_ranks(std::int64_t size) {
  Counts ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

CommunicatorPtr whole(Transport& transport, const std::string& name = "all") {
  return transport.make_group(all_ranks(transport.size()), {.name = name, .timeout = std::chrono::minutes(2)});
}

std::int64_t sum_of(const Counts& counts) { return std::accumulate(counts.begin(), counts.end(), std::int64_t{0}); }
std::int64_t before(const Counts& counts, std::int64_t rank) {
  return std::accumulate(counts.begin(), counts.begin() + rank, std::int64_t{0});
}

// Even, uneven, with empty places, nearly and wholly empty.
std::vector<Counts> count_lists(std::int64_t n) {
  std::vector<Counts> lists(5, Counts(static_cast<std::size_t>(n), 0));
  for (std::int64_t r = 0; r < n; ++r) {
    const auto i = static_cast<std::size_t>(r);
    lists[0][i] = 6;
    lists[1][i] = 2 * r + 1;
    lists[2][i] = r % 2 == 0 ? 0 : 300 + r;
    lists[3][i] = r == n - 1 ? 5 : 0;
  }
  return lists;
}

// Values whose reductions are exact in every type: small integers, some negative; the averages are integers.
Values values_for(ReduceOp op, std::int64_t n) {
  switch (op) {
    case ReduceOp::kProduct:
      return
          [](std::int64_t r, std::int64_t i) { return Value(static_cast<double>((r + i) % 2 + 1), (r + i) % 3 == 0); };
    case ReduceOp::kAvg:
      return [n](std::int64_t r, std::int64_t i) {
        return Value(static_cast<double>(n * ((3 * r + i) % 5 - 2)), static_cast<double>(n * ((r + i) % 3)));
      };
    case ReduceOp::kAnd:
    case ReduceOp::kOr:
    case ReduceOp::kXor:
      return [](std::int64_t r, std::int64_t i) { return Value(static_cast<double>((5 * r + 3 * i) % 16)); };
    default:
      return [](std::int64_t r, std::int64_t i) {
        return Value(static_cast<double>((3 * r + i) % 5 - 2), static_cast<double>((r + 2 * i) % 4));
      };
  }
}

Value combine(ReduceOp op, c10::ScalarType dtype, Value a, Value b) {
  const auto bits = [](Value v) { return static_cast<std::int64_t>(v.real()); };
  const bool unsigned_type = dtype == at::kByte;
  const auto order = [&](Value v) { return unsigned_type ? static_cast<double>(bits(v) & 0xFF) : v.real(); };
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return a + b;
    case ReduceOp::kProduct:
      return c10::isComplexType(dtype) ? a * b : Value(a.real() * b.real());
    case ReduceOp::kMin:
      return order(a) < order(b) ? a : b;
    case ReduceOp::kMax:
      return order(a) > order(b) ? a : b;
    case ReduceOp::kAnd:
      return static_cast<double>(bits(a) & bits(b));
    case ReduceOp::kOr:
      return static_cast<double>(bits(a) | bits(b));
    case ReduceOp::kXor:
      return static_cast<double>(bits(a) ^ bits(b));
  }
  return a;
}

// The reduction over n ranks of elements [begin, begin + count).
at::Tensor reduced(ReduceOp op, c10::ScalarType dtype, std::int64_t n, std::int64_t begin, std::int64_t count,
                   const Values& values) {
  const auto at = [&](std::int64_t r, std::int64_t i) {
    const Value v = values(r, i);
    return dtype == at::kBool ? Value(v.real() != 0) : v;
  };
  std::vector<Value> list;
  for (std::int64_t i = begin; i < begin + count; ++i) {
    Value value = at(0, i);
    for (std::int64_t r = 1; r < n; ++r) value = combine(op, dtype, value, at(r, i));
    list.push_back(op == ReduceOp::kAvg ? value / static_cast<double>(n) : value);
  }
  return tensor_of(dtype, list);
}

std::string name_of(const char* what, ReduceOp op, c10::ScalarType dtype, std::int64_t count) {
  return std::string(what) + " " + std::string(to_string(op)) + " of " + c10::toString(dtype) + " x " +
         std::to_string(count);
}

void all_reduce_every_type(Transport& transport) {
  const auto group = whole(transport);
  const std::int64_t n = group->size();
  for (const auto dtype : kTypes) {
    for (const auto op : kOps) {
      if (!can_reduce(dtype, op)) continue;
      const auto values = values_for(op, n);
      for (const std::int64_t count : {0, 1, 7, 1000}) {
        const auto buffer = make(dtype, group->rank(), 0, count, values);
        group->all_reduce(buffer, op)->wait();
        require_equal(buffer, reduced(op, dtype, n, 0, count, values), name_of("all_reduce", op, dtype, count));
      }
    }
  }
}

void all_reduce_large_and_0d(Transport& transport) {
  const auto group = whole(transport);
  const auto n = static_cast<double>(group->size());
  for (const std::int64_t count : {100'003, 1'000'000}) {
    const auto buffer = at::full({count}, static_cast<double>(group->rank() + 1), at::kFloat);
    group->all_reduce(buffer, ReduceOp::kSum)->wait();
    require_equal(buffer, at::full({count}, n * (n + 1) / 2, at::kFloat), "large all_reduce");
  }
  const auto scalar = at::full({}, static_cast<double>(group->rank()), at::kDouble);
  group->all_reduce(scalar, ReduceOp::kMax)->wait();
  require_equal(scalar, at::full({}, n - 1, at::kDouble), "0-d all_reduce");
  const auto gathered = at::zeros({group->size()}, at::kDouble);
  const auto mine = at::full({}, static_cast<double>(group->rank()), at::kDouble);
  group->all_gather(gathered, mine, Counts(static_cast<std::size_t>(group->size()), 1))->wait();
  for (std::int64_t r = 0; r < group->size(); ++r) {
    require(gathered[r].item<double>() == static_cast<double>(r), "0-d all_gather");
  }
}

void reductions_of_special_values(Transport& transport) {
  const auto group = whole(transport);
  const std::int64_t n = group->size();
  for (const auto dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16}) {
    for (const auto op : {ReduceOp::kMin, ReduceOp::kMax}) {
      for (std::int64_t odd = 0; odd < n; ++odd) {
        const auto buffer =
            at::full({3}, group->rank() == odd ? std::nan("") : static_cast<double>(group->rank()), dtype);
        group->all_reduce(buffer, op)->wait();
        require(std::isnan(buffer[1].item<double>()), name_of("NaN in", op, dtype, 3));
      }
    }
    const double largest = dtype == at::kDouble ? std::numeric_limits<double>::max()
                           : dtype == at::kHalf ? 65504.0
                                                : at::full({}, 3.3e38, dtype).item<double>();
    const auto buffer = at::full({2000}, largest, dtype);
    group->all_reduce(buffer, ReduceOp::kAvg)->wait();
    const double got = buffer[1999].item<double>();
    require(std::isfinite(got) && got >= largest * 0.999, name_of("overflowing", ReduceOp::kAvg, dtype, 2000));
  }
}

void reductions_have_the_same_bits(Transport& transport) {
  const auto group = whole(transport);
  const std::int64_t n = group->size(), count = 3001;
  const auto values = [](std::int64_t r, std::int64_t i) {
    return Value(std::sin(static_cast<double>(i * 37 + r * 101)) * std::pow(10.0, static_cast<double>((i + r) % 7)));
  };
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    at::Tensor earlier;
    for (int run = 0; run < 3; ++run) {
      const auto buffer = make(dtype, group->rank(), 0, count, values);
      group->all_reduce(buffer, ReduceOp::kSum)->wait();
      if (earlier.defined()) require_equal(buffer, earlier, "all_reduce, run to run");
      earlier = buffer;
    }
    const auto everyone = at::empty({n * count}, dtype);
    group->all_gather(everyone, earlier, Counts(static_cast<std::size_t>(n), count))->wait();
    for (std::int64_t r = 0; r < n; ++r) {
      require_equal(everyone.slice(0, r * count, (r + 1) * count).contiguous(), earlier, "all_reduce, rank to rank");
    }
    if (transport.backend() == "nccl") continue;  // it adds in an order of its own, though always the same one
    std::vector<at::Tensor> parts;
    std::vector<const void*> pointers;
    for (std::int64_t r = 0; r < n; ++r) parts.push_back(make(dtype, r, 0, count, values));
    for (const auto& part : parts) pointers.push_back(part.data_ptr());
    const auto ordered = at::empty({count}, dtype);
    reduce_parts(ReduceOp::kSum, dtype, ordered.data_ptr(), pointers, count);
    require_equal(earlier, ordered, "all_reduce in rank order");
  }
}

void impossible_reductions_are_refused(Transport& transport) {
  const auto group = whole(transport);
  for (const auto dtype : kTypes) {
    for (const auto op : kOps) {
      if (can_reduce(dtype, op)) continue;
      const auto buffer = at::zeros({4}, dtype);
      const std::string text = error_of([&] { group->all_reduce(buffer, op)->wait(); });
      require(text.find("values of this type have no such reduction") != std::string::npos,
              name_of("refusal of", op, dtype, 4) + ": " + text);
    }
  }
  const auto buffer = at::full({1}, 1.0, at::kFloat);
  group->all_reduce(buffer, ReduceOp::kSum)->wait();
  require(buffer.item<float>() == static_cast<float>(group->size()), "a refusal harmed the group");
}

void all_gather_uneven(Transport& transport) {
  const auto group = whole(transport);
  const std::int64_t me = group->rank();
  const Values values = [](std::int64_t r, std::int64_t i) { return Value(static_cast<double>((31 * r + i) % 97), 1); };
  for (const auto dtype : kTypes) {
    for (const Counts& counts : count_lists(group->size())) {
      std::vector<Value> list;
      for (std::int64_t r = 0; r < group->size(); ++r) {
        for (std::int64_t i = 0; i < counts[static_cast<std::size_t>(r)]; ++i) list.push_back(values(r, i));
      }
      const auto want = tensor_of(dtype, list);
      const auto input = make(dtype, me, 0, counts[static_cast<std::size_t>(me)], values);
      const auto output = at::zeros({sum_of(counts)}, dtype);
      group->all_gather(output, input, counts)->wait();
      require_equal(output, want, "all_gather [" + join_numbers(counts) + "] of " + c10::toString(dtype));
      // In place: the input is its own place in the output.
      const auto shared = at::zeros({sum_of(counts)}, dtype);
      const std::int64_t begin = before(counts, me);
      const auto place = shared.slice(0, begin, begin + counts[static_cast<std::size_t>(me)]);
      place.copy_(input);
      group->all_gather(shared, place, counts)->wait();
      require_equal(shared, want, "all_gather in place [" + join_numbers(counts) + "]");
    }
  }
}

void reduce_scatter_uneven(Transport& transport) {
  const auto group = whole(transport);
  const std::int64_t n = group->size(), me = group->rank();
  for (const auto dtype : kTypes) {
    for (const auto op : kOps) {
      if (!can_reduce(dtype, op)) continue;
      const auto values = values_for(op, n);
      for (const Counts& counts : count_lists(n)) {
        const std::int64_t mine = counts[static_cast<std::size_t>(me)];
        const auto input = make(dtype, me, 0, sum_of(counts), values);
        const auto kept = input.clone();
        const auto output = at::zeros({mine}, dtype);
        group->reduce_scatter(output, input, counts, op)->wait();
        require_equal(output, reduced(op, dtype, n, before(counts, me), mine, values),
                      name_of("reduce_scatter", op, dtype, mine));
        require_equal(input, kept, "the input of reduce_scatter");
      }
    }
  }
}

void all_to_all_uneven(Transport& transport) {
  const auto group = whole(transport);
  const std::int64_t n = group->size(), me = group->rank();
  // What rank s sends to rank d: uneven, some of it nothing, more for some than for others.
  const auto sent = [](std::int64_t s, std::int64_t d, int kind) -> std::int64_t {
    return kind == 0 ? 4 : kind == 1 ? (s + 2 * d) % 4 : (s == 0 && d != 0 ? 0 : 500 * ((s + d) % 2) + s);
  };
  const auto value = [](std::int64_t s, std::int64_t d, std::int64_t i) {
    return Value(static_cast<double>((17 * s + 5 * d + i) % 101), static_cast<double>(d));
  };
  for (const auto dtype : kTypes) {
    for (int kind = 0; kind < 3; ++kind) {
      Counts send, receive;
      std::vector<Value> out, in;
      for (std::int64_t peer = 0; peer < n; ++peer) {
        send.push_back(sent(me, peer, kind));
        receive.push_back(sent(peer, me, kind));
        for (std::int64_t i = 0; i < send.back(); ++i) out.push_back(value(me, peer, i));
        for (std::int64_t i = 0; i < receive.back(); ++i) in.push_back(value(peer, me, i));
      }
      const auto output = at::zeros({sum_of(receive)}, dtype);
      group->all_to_all(output, tensor_of(dtype, out), receive, send)->wait();
      require_equal(output, tensor_of(dtype, in), std::string("all_to_all of ") + c10::toString(dtype));
    }
  }
}

void broadcast_and_scatter(Transport& transport) {
  const auto group = whole(transport);
  const std::int64_t n = group->size(), me = group->rank();
  const Values values = [](std::int64_t r, std::int64_t i) { return Value(static_cast<double>((13 * r + i) % 50), 2); };
  for (const auto dtype : kTypes) {
    for (std::int64_t root = 0; root < n; ++root) {
      for (const std::int64_t count : {0, 1, 33}) {
        const auto buffer = make(dtype, me, 0, count, values);
        group->broadcast(buffer, root)->wait();
        require_equal(buffer, make(dtype, root, 0, count, values), "broadcast from " + std::to_string(root));
      }
      for (const Counts& counts : count_lists(n)) {
        const std::int64_t mine = counts[static_cast<std::size_t>(me)];
        const auto output = at::zeros({mine}, dtype);
        const auto input = me == root ? make(dtype, root, 0, sum_of(counts), values) : at::Tensor();
        group->scatter(output, input, counts, root)->wait();
        require_equal(output, make(dtype, root, before(counts, me), mine, values),
                      "scatter from " + std::to_string(root));
      }
    }
  }
}

// A ring in both directions, several messages and tags under way, received in another order than sent.
void send_and_receive(Transport& transport) {
  const auto group = whole(transport);
  const std::int64_t n = group->size(), me = group->rank();
  if (n == 1) return;
  const std::int64_t next = (me + 1) % n, previous = (me + n - 1) % n;
  const auto message = [](std::int64_t from, std::int64_t tag, std::int64_t k, std::int64_t count) {
    return at::full({count}, static_cast<double>(1000 * from + 100 * tag + k), at::kInt);
  };
  for (const std::int64_t count : {0, 1, 5, 70'000}) {
    std::vector<WorkPtr> works;
    std::vector<std::pair<at::Tensor, at::Tensor>> expected;
    for (const std::int64_t tag : {0, 7}) {
      for (std::int64_t k = 0; k < 3; ++k) {
        // The group keeps a buffer alive; nobody else does.
        works.push_back(group->send(message(me, tag, k, count), next, tag));
      }
    }
    for (const std::int64_t tag : {7, 0}) {
      for (std::int64_t k = 0; k < 3; ++k) {
        const auto buffer = at::zeros({count}, at::kInt);
        works.push_back(group->receive(buffer, previous, tag));
        expected.emplace_back(buffer, message(previous, tag, k, count));
      }
    }
    for (const auto& work : works) work->wait();
    for (const auto& [got, want] : expected) require_equal(got, want, "receive x " + std::to_string(count));
  }
}

// Every rank leaves the barrier after the last one came; the ranks of a test share one host and so its clock.
void barrier_waits_for_the_last(Transport& transport) {
  const auto group = whole(transport);
  const auto now = [] { return std::chrono::steady_clock::now().time_since_epoch().count(); };
  std::this_thread::sleep_for(std::chrono::milliseconds(15) * group->rank());
  const auto came = at::full({1}, static_cast<std::int64_t>(now()), at::kLong);
  group->barrier()->wait();
  const std::int64_t left = now();
  group->all_reduce(came, ReduceOp::kMax)->wait();
  require(left >= came.item<std::int64_t>(), "the barrier opened too early");
}

void many_in_flight(Transport& transport) {
  const auto group = whole(transport);
  const std::int64_t n = group->size(), me = group->rank();
  std::vector<std::pair<WorkPtr, at::Tensor>> works;
  for (std::int64_t k = 0; k < 120; ++k) {
    const auto buffer = at::full({k % 3 == 0 ? 20'000 : k}, static_cast<double>(me + k), at::kLong);
    works.emplace_back(group->all_reduce(buffer, ReduceOp::kSum), buffer);
  }
  // Waited for from the last to the first, some of them by asking.
  for (std::int64_t k = 119; k >= 0; --k) {
    const auto& [work, buffer] = works[static_cast<std::size_t>(k)];
    if (k % 4 == 0) {
      while (!work->done()) std::this_thread::yield();
    }
    work->wait();
    work->wait();
    require_equal(buffer, at::full(buffer.sizes(), static_cast<double>(n * (n - 1) / 2 + n * k), at::kLong),
                  "all_reduce " + std::to_string(k) + " in flight");
  }
}

// A chain without waits: each operation reads what the one before it wrote.
void operations_take_effect_in_order(Transport& transport) {
  const auto group = whole(transport);
  const auto n = static_cast<double>(group->size());
  for (const std::int64_t count : {3, 50'000}) {
    const auto buffer = at::full({count}, 1.0, at::kDouble);
    const auto sum = group->all_reduce(buffer, ReduceOp::kSum);
    const auto again = group->all_reduce(buffer, ReduceOp::kSum);
    const auto last = group->all_reduce(buffer, ReduceOp::kMax);
    last->wait();
    again->wait();
    sum->wait();
    require_equal(buffer, at::full({count}, n * n, at::kDouble), "a chain of reductions");
  }
}

void several_groups(Transport& transport) {
  const std::int64_t n = transport.size(), me = transport.rank();
  const auto options = [](const char* name) { return GroupOptions{.name = name, .timeout = std::chrono::minutes(2)}; };
  Counts parity, backwards = all_ranks(n);
  for (std::int64_t r = me % 2; r < n; r += 2) parity.push_back(r);
  std::reverse(backwards.begin(), backwards.end());
  CommunicatorPtr same, reversed, alone, all;
  // Made in another order on every other rank.
  const std::vector<std::function<void()>> makers = {
      [&] { same = transport.make_group(parity, options("parity")); },
      [&] { reversed = transport.make_group(backwards, options("backwards")); },
      [&] { alone = transport.make_group({me}, options("alone")); },
      [&] { all = whole(transport); },
  };
  for (std::size_t i = 0; i < makers.size(); ++i) makers[(i + static_cast<std::size_t>(me)) % makers.size()]();
  require(reversed->rank() == n - 1 - me && reversed->ranks() == backwards, "the order of a group's ranks");

  for (int round = 0; round < 10; ++round) {
    const auto mine = [&] { return at::full({700}, static_cast<double>(me), at::kDouble); };
    const auto in_parity = mine(), in_all = mine(), by_myself = mine(), gathered = at::zeros({n}, at::kLong);
    const auto my_rank = at::full({1}, static_cast<double>(me), at::kLong);
    std::vector<WorkPtr> works = {
        same->all_reduce(in_parity, ReduceOp::kSum),
        reversed->all_gather(gathered, my_rank, Counts(static_cast<std::size_t>(n), 1)),
        alone->all_reduce(by_myself, ReduceOp::kSum),
        all->all_reduce(in_all, ReduceOp::kSum),
    };
    if (me % 2 == 1) std::reverse(works.begin(), works.end());
    for (const auto& work : works) work->wait();
    const auto parity_sum = static_cast<double>(sum_of(parity));
    require_equal(in_parity, at::full({700}, parity_sum, at::kDouble), "sum over the ranks of my parity");
    require_equal(in_all, at::full({700}, static_cast<double>(n * (n - 1) / 2), at::kDouble), "sum over all ranks");
    require_equal(by_myself, mine(), "sum over one rank");
    for (std::int64_t r = 0; r < n; ++r) require(gathered[r].item<std::int64_t>() == n - 1 - r, "gather backwards");
  }
}

void groups_of_the_same_ranks_are_independent(Transport& transport) {
  const auto first = whole(transport, "first"), second = whole(transport, "second");
  const auto a = at::full({10}, 1.0, at::kFloat), b = at::full({10}, 2.0, at::kFloat);
  // Issued in another order on every other rank: two groups, so this is no divergence.
  WorkPtr wa, wb;
  if (transport.rank() % 2 == 0) {
    wa = first->all_reduce(a, ReduceOp::kSum);
    wb = second->all_reduce(b, ReduceOp::kProduct);
  } else {
    wb = second->all_reduce(b, ReduceOp::kProduct);
    wa = first->all_reduce(a, ReduceOp::kSum);
  }
  wa->wait();
  wb->wait();
  const auto n = static_cast<double>(transport.size());
  require_equal(a, at::full({10}, n, at::kFloat), "the first group");
  require_equal(b, at::full({10}, std::pow(2.0, n), at::kFloat), "the second group");
}

void one_group_from_several_threads(Transport& transport) {
  const auto group = whole(transport);
  std::vector<std::string> failures(3);
  std::vector<std::thread> threads;
  for (std::string& failure : failures) {
    threads.emplace_back([&] {
      try {
        for (int round = 0; round < 40; ++round) {
          const auto buffer = at::full({64}, 1.0, at::kFloat);
          group->all_reduce(buffer, ReduceOp::kSum)->wait();
          require_equal(buffer, at::full({64}, static_cast<double>(group->size()), at::kFloat), "from a thread");
        }
      } catch (const std::exception& error) {
        failure = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& failure : failures) require(failure.empty(), failure);
}

void wrong_arguments_are_refused(Transport& transport) {
  const auto group = whole(transport);
  const auto buffer = at::zeros({4}, at::kFloat);
  const auto refused = [&](const char* part, const std::function<void()>& call) {
    const std::string text = error_of(call);
    require(text.find(part) != std::string::npos && text.find(group->describe()) != std::string::npos,
            std::string("expected an error with '") + part + "', got '" + text + "'");
  };
  refused("not contiguous", [&] { group->all_reduce(at::zeros({4, 4}).t(), ReduceOp::kSum); });
  refused("is undefined", [&] { group->broadcast({}, 0); });
  refused("is not a rank of the group", [&] { group->broadcast(buffer, group->size()); });
  refused("one count per rank",
          [&] { group->all_gather(buffer, buffer, Counts(static_cast<std::size_t>(group->size()) + 1, 4)); });
  refused("cannot send to itself", [&] { group->send(buffer, group->rank()); });
  group->barrier()->wait();
}

}  // namespace

const std::vector<ContractCheck>& contract_checks() {
  static const std::vector<ContractCheck> checks = {
      {"all_gather_uneven", all_gather_uneven},
      {"all_reduce_every_type", all_reduce_every_type},
      {"all_reduce_large_and_0d", all_reduce_large_and_0d},
      {"all_to_all_uneven", all_to_all_uneven},
      {"barrier_waits_for_the_last", barrier_waits_for_the_last},
      {"broadcast_and_scatter", broadcast_and_scatter},
      {"groups_of_the_same_ranks_are_independent", groups_of_the_same_ranks_are_independent},
      {"impossible_reductions_are_refused", impossible_reductions_are_refused},
      {"many_in_flight", many_in_flight},
      {"one_group_from_several_threads", one_group_from_several_threads},
      {"operations_take_effect_in_order", operations_take_effect_in_order},
      {"reduce_scatter_uneven", reduce_scatter_uneven},
      {"reductions_have_the_same_bits", reductions_have_the_same_bits},
      {"reductions_of_special_values", reductions_of_special_values},
      {"send_and_receive", send_and_receive},
      {"several_groups", several_groups},
      {"wrong_arguments_are_refused", wrong_arguments_are_refused},
  };
  return checks;
}

void run_contract(Transport& transport, const std::vector<std::string>& names) {
  for (const ContractCheck& check : contract_checks()) {
    if (!names.empty() && std::find(names.begin(), names.end(), check.name) == names.end()) continue;
    try {
      check.run(transport);
    } catch (const std::exception& error) {
      give_up(check.name + ", rank " + std::to_string(transport.rank()) + " of " + std::to_string(transport.size()) +
              " on " + transport.backend() + ": " + error.what());
    }
  }
}

}  // namespace dtensor::testing
