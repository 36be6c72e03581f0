#include "dtensor/core/random.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "dtensor/core/boxes.h"
#include "dtensor/core/error.h"
#include "dtensor/core/random_math.h"
#include "dtensor/core/random_plan.h"
#include "dtensor/core/random_store.h"

namespace dtensor {
namespace {

using Kind = Draw::Kind;

// The last word of the counter: what a block is for.
enum Use : std::uint32_t { kElements = 0, kShuffle = 1, kRoundKeys = 2, kKey = 3 };

std::uint32_t low_half(std::uint64_t x) { return static_cast<std::uint32_t>(x); }
std::uint32_t high_half(std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); }

[[noreturn]] void refuse(const char* where, const std::string& what, double got) {
  fail_invalid(where, {.what = what, .got = std::to_string(got)});
}

// log(1 + x), for x in (-1, 0], where 1 + x is rounded.
double log_one_plus(double x) {
  const double y = 1.0 + x;
  return y == 1.0 ? x : random_math::log_of(y) * (x / (y - 1.0));
}

DType real_of(DType dtype) {
  switch (dtype) {
    case DType::kC32:
      return DType::kF16;
    case DType::kC64:
      return DType::kF32;
    case DType::kC128:
      return DType::kF64;
    default:
      return dtype;
  }
}

bool is_small(DType dtype) { return dtype == DType::kF8E4M3 || dtype == DType::kF8E5M2; }

// ---- permutations

// Element by element; the work for one does not grow with n, but for a table where n is small and it is exact.
class Permutation {
 public:
  Permutation(const RandomKey& key, std::uint64_t n) : n_(n) {
    if (n <= kTable) {
      shuffle(key);
      return;
    }
    std::uint32_t bits = 0;
    while (bits < 63 && (std::uint64_t{1} << bits) < n) ++bits;
    low_bits_ = bits / 2;
    high_bits_ = bits - low_bits_;
    for (std::uint32_t r = 0; r < kRounds; r += 2) {
      const auto block = philox4x32({r, 0, key.call, kRoundKeys}, key.key);
      keys_[r] = block[0] | (static_cast<std::uint64_t>(block[1]) << 32);
      keys_[r + 1] = block[2] | (static_cast<std::uint64_t>(block[3]) << 32);
    }
  }

  std::uint64_t operator()(std::uint64_t i) const {
    if (!table_.empty()) return table_[i];
    // A permutation of 2^bits numbers; what falls outside is sent on until it falls inside.
    do i = permuted(i);
    while (i >= n_);
    return i;
  }

 private:
  static constexpr std::uint64_t kTable = 4096;
  static constexpr std::uint32_t kRounds = 10;

  void shuffle(const RandomKey& key) {
    table_.resize(n_);
    for (std::uint64_t i = 0; i < n_; ++i) table_[i] = i;
    for (std::uint64_t i = n_; i-- > 1;) {
      const auto block = philox4x32({low_half(i), 0, key.call, kShuffle}, key.key);
      std::swap(table_[i], table_[random_math::scaled(block[0] | (std::uint64_t{block[1]} << 32), i + 1)]);
    }
  }

  static std::uint64_t mixed(std::uint64_t x) {
    x *= 0x9E3779B97F4A7C15u;
    x ^= x >> 29;
    x *= 0xD6E8FEB86659FD93u;
    return x ^ (x >> 32);
  }

  // A Feistel network: one part is changed by what depends on the other alone, and so on in turns.
  std::uint64_t permuted(std::uint64_t i) const {
    const std::uint64_t low_mask = (std::uint64_t{1} << low_bits_) - 1;
    const std::uint64_t high_mask = (std::uint64_t{1} << high_bits_) - 1;
    std::uint64_t low = i & low_mask;
    std::uint64_t high = i >> low_bits_;
    for (std::uint32_t r = 0; r < kRounds; r += 2) {
      low = (low + mixed(high ^ keys_[r])) & low_mask;
      high = (high + mixed(low ^ keys_[r + 1])) & high_mask;
    }
    return (high << low_bits_) | low;
  }

  std::uint64_t n_;
  std::vector<std::uint64_t> table_;
  std::uint32_t low_bits_ = 0;
  std::uint32_t high_bits_ = 0;
  std::array<std::uint64_t, kRounds> keys_ = {};
};

void check(const Draw& draw, DType dtype) {
  if (can_draw(draw, dtype)) return;
  fail_unsupported("random", {.what = "there are no such values of this type",
                              .got = draw.to_string() + " as " + std::string(to_string(dtype))});
}

// ---- bulk

template <class Real>
void set_uniform(RandomTask& task, double from, double to) {
  const auto first = static_cast<Real>(from);
  const auto end = static_cast<Real>(to);
  task.a = first;
  task.b = static_cast<Real>(end - first);
  task.c = first < end ? std::nextafter(end, first) : first;
}

// Collects runs of elements until there are enough blocks to be worth the while, makes them and stores what was asked.
class Writer {
 public:
  Writer(const RandomPlan& plan, void* out)
      : plan_(plan),
        size_(element_size(plan.stored)),
        out_(static_cast<unsigned char*>(out)),
        direct_(is_stored_as_is(plan.value, plan.stored)) {
    plan_.task.blocks = blocks_;
  }

  // Elements first … go to positions at … of `out`.
  void add(std::int64_t first, std::int64_t at, std::int64_t count) {
    const std::int64_t lanes = plan_.lanes;
    while (count > 0) {
      const std::int64_t lane = first % lanes;
      std::int64_t block = first / lanes;
      // The next run often starts in the block where the last one ended.
      const bool shared = used_ > 0 && blocks_[used_ - 1] == static_cast<std::uint64_t>(block);
      const int start = shared ? used_ - 1 : used_;
      const std::int64_t n = std::min(count, (RandomTask::kMaxBlocks - start) * lanes - lane);
      if (n <= 0) {
        flush();
        continue;
      }
      const auto blocks = static_cast<int>((lane + n + lanes - 1) / lanes);
      for (int i = shared ? 1 : 0; i < blocks; ++i) blocks_[start + i] = static_cast<std::uint64_t>(block + i);
      used_ = start + blocks;
      if (direct_ && start == 0 && lane == 0 && n == RandomTask::kMaxBlocks * lanes) {
        make(out_ + at * size_);
        used_ = 0;
      } else {
        pieces_.push_back({start * lanes + lane, at, n});
        if (used_ == RandomTask::kMaxBlocks) flush();
      }
      first += n;
      at += n;
      count -= n;
    }
  }

  void flush() {
    if (used_ == 0) return;
    make(values_);
    for (const Piece& piece : pieces_) {
      store_random(plan_.value, values_, piece.from, piece.count, plan_.stored, out_ + piece.to * size_);
    }
    pieces_.clear();
    used_ = 0;
  }

 private:
  struct Piece {
    std::int64_t from;  // in values_
    std::int64_t to;
    std::int64_t count;
  };

  void make(void* to) {
    RandomTask& task = plan_.task;
    while (used_ % RandomTask::kRound != 0) blocks_[used_++] = 0;
    task.count = used_;
    task.out = to;
    if (task.work == RandomWork::kBernoulli32 && task.range == 0) {
      std::memset(to, 0, static_cast<std::size_t>(used_ * plan_.lanes));
    } else {
      static const RandomKernel kernel = random_kernel();
      kernel(task);
    }
  }

  RandomPlan plan_;
  const std::int64_t size_;
  unsigned char* const out_;
  const bool direct_;
  int used_ = 0;
  std::uint64_t blocks_[RandomTask::kMaxBlocks];
  alignas(64) double values_[RandomTask::kMaxBlocks * 4];
  std::vector<Piece> pieces_;
};

// Calls each_run(fn) with fn(first element, place, count), in elements of `dtype`.
template <class EachRun>
void draw_runs(const RandomKey& key, const Draw& draw, DType dtype, void* out, EachRun each_run) {
  if (draw.kind == Kind::kPermutation) {
    check(draw, dtype);
    const Permutation permutation(key, draw.range);
    std::vector<std::int64_t> values;
    each_run([&](std::int64_t first, std::int64_t at, std::int64_t count) {
      values.resize(static_cast<std::size_t>(count));
      for (std::int64_t i = 0; i < count; ++i) {
        values[static_cast<std::size_t>(i)] =
            static_cast<std::int64_t>(permutation(static_cast<std::uint64_t>(first + i)));
      }
      store_random(RandomValue::kInt, values.data(), 0, count, dtype,
                   static_cast<unsigned char*>(out) + at * element_size(dtype));
    });
    return;
  }
  const RandomPlan plan = random_plan(key, draw, dtype);
  const std::int64_t unit = plan.per_element;
  Writer writer(plan, out);
  each_run([&](std::int64_t first, std::int64_t at, std::int64_t count) {
    writer.add(first * unit, at * unit, count * unit);
  });
  writer.flush();
}

}  // namespace

std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key) {
  const auto block = random_math::philox({{counter[0], counter[1], counter[2], counter[3]}}, key[0], key[1]);
  return {block.word[0], block.word[1], block.word[2], block.word[3]};
}

RandomKey random_key(std::uint64_t seed, std::uint64_t stream, std::uint64_t call) {
  const auto mixed =
      philox4x32({low_half(stream), high_half(stream), high_half(call), kKey}, {low_half(seed), high_half(seed)});
  return {{mixed[0], mixed[1]}, low_half(call)};
}

RandomPlan random_plan(const RandomKey& key, const Draw& draw, DType whole) {
  check(draw, whole);
  const DType dtype = real_of(whole);
  RandomPlan plan;
  plan.stored = dtype;
  plan.per_element = dtype == whole ? 1 : 2;
  RandomTask& task = plan.task;
  task.key[0] = key.key[0];
  task.key[1] = key.key[1];
  task.call = key.call;
  task.a = draw.a;
  task.b = draw.b;
  const bool wide = dtype == DType::kF64;
  const auto choose = [&](RandomWork narrow_work, RandomWork wide_work) { task.work = wide ? wide_work : narrow_work; };
  if (wide) plan.lanes = 2;
  switch (draw.kind) {
    case Kind::kUniform:
      choose(RandomWork::kUniform32, RandomWork::kUniform64);
      if (wide) {
        set_uniform<double>(task, draw.a, draw.b);
      } else {
        set_uniform<float>(task, rounded_to(dtype, draw.a), rounded_to(dtype, draw.b));
        plan.value = dtype == DType::kF32 ? RandomValue::kFloat : RandomValue::kFloatDown;
      }
      break;
    case Kind::kNormal:
      choose(RandomWork::kNormal32, RandomWork::kNormal64);
      if (!wide) plan.value = RandomValue::kFloat;
      if (dtype != whole) task.b *= 0.70710678118654752440;
      break;
    case Kind::kLogNormal:
      choose(RandomWork::kLogNormal32, RandomWork::kLogNormal64);
      break;
    case Kind::kExponential:
      choose(RandomWork::kExponential32, RandomWork::kExponential64);
      task.a = 1.0 / draw.a;
      task.c = dtype == DType::kF16 ? 0x1p-24 : 0;  // what would be rounded to 0
      break;
    case Kind::kCauchy:
      choose(RandomWork::kCauchy32, RandomWork::kCauchy64);
      break;
    case Kind::kGeometric:
      task.work = RandomWork::kGeometric64;
      task.a = 1.0 / log_one_plus(-draw.a);
      plan.lanes = 2;
      break;
    case Kind::kBernoulli:
      task.work = RandomWork::kBernoulli32;
      task.range = static_cast<std::uint64_t>(std::ceil(draw.a * 0x1p32));
      plan.lanes = 4;
      plan.value = RandomValue::kByte;
      break;
    case Kind::kUnit32:
      task.work = RandomWork::kUnit32;
      plan.lanes = 4;
      break;
    case Kind::kIntegers:
    case Kind::kPermutation:
      task.work = RandomWork::kIntegers64;
      task.low = static_cast<std::uint64_t>(draw.low);
      task.range = draw.range;
      plan.lanes = 2;
      plan.value = RandomValue::kInt;
      break;
  }
  return plan;
}

RandomKernel random_kernel() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return &random_kernel_avx512;
  }
  if (__builtin_cpu_supports("avx2")) return &random_kernel_avx2;
#endif
  return &random_kernel_portable;
}

Draw Draw::uniform(double from, double to) {
  if (!(from <= to)) {
    fail_invalid("uniform", {.what = "the interval ends before it starts",
                             .got = "from " + std::to_string(from) + " to " + std::to_string(to),
                             .expected = "from <= to"});
  }
  return {Kind::kUniform, from, to};
}
Draw Draw::normal(double mean, double deviation) {
  if (!(deviation >= 0)) refuse("normal", "a deviation is not negative", deviation);
  return {Kind::kNormal, mean, deviation};
}
Draw Draw::log_normal(double mean, double deviation) {
  if (!(deviation > 0)) refuse("log_normal", "the deviation must be positive", deviation);
  return {Kind::kLogNormal, mean, deviation};
}
Draw Draw::exponential(double rate) {
  if (!(rate > 0)) refuse("exponential", "the rate must be positive", rate);
  return {Kind::kExponential, rate};
}
Draw Draw::cauchy(double median, double sigma) {
  if (!(sigma > 0)) refuse("cauchy", "the scale must be positive", sigma);
  return {Kind::kCauchy, median, sigma};
}
Draw Draw::geometric(double p) {
  if (!(p > 0 && p < 1)) refuse("geometric", "the probability must be between 0 and 1, and neither of them", p);
  return {Kind::kGeometric, p};
}
Draw Draw::bernoulli(double p) {
  if (!(p >= 0 && p <= 1)) refuse("bernoulli", "not a probability", p);
  return {Kind::kBernoulli, p};
}
Draw Draw::integers(std::int64_t low, std::uint64_t range) { return {Kind::kIntegers, 0, 1, low, range}; }
Draw Draw::permutation(std::int64_t n) { return {Kind::kPermutation, 0, 1, 0, static_cast<std::uint64_t>(n)}; }

std::string Draw::to_string() const {
  const auto with = [&](const char* name) {
    return std::string(name) + "(" + std::to_string(a) + ", " + std::to_string(b) + ")";
  };
  switch (kind) {
    case Kind::kUniform:
      return with("uniform");
    case Kind::kNormal:
      return with("normal");
    case Kind::kLogNormal:
      return with("log_normal");
    case Kind::kExponential:
      return "exponential(" + std::to_string(a) + ")";
    case Kind::kCauchy:
      return with("cauchy");
    case Kind::kGeometric:
      return "geometric(" + std::to_string(a) + ")";
    case Kind::kBernoulli:
      return "bernoulli(" + std::to_string(a) + ")";
    case Kind::kUnit32:
      return "unit32";
    case Kind::kIntegers:
      return std::to_string(range) + " integers from " + std::to_string(low);
    case Kind::kPermutation:
      return "permutation(" + std::to_string(range) + ")";
  }
  return "unknown";
}

bool can_draw(const Draw& draw, DType dtype) {
  if (is_small(dtype)) return false;
  switch (draw.kind) {
    case Kind::kUniform:
    case Kind::kNormal:
      return is_floating(dtype) || is_complex(dtype);
    case Kind::kLogNormal:
    case Kind::kExponential:
    case Kind::kCauchy:
      return is_floating(dtype);
    case Kind::kUnit32:
      return dtype == DType::kF64;
    case Kind::kBernoulli:
    case Kind::kIntegers:
      return !is_complex(dtype);
    case Kind::kGeometric:
    case Kind::kPermutation:
      return !is_complex(dtype) && dtype != DType::kBool;
  }
  return false;
}

void draw_elements(const RandomKey& key, const Draw& draw, DType dtype, std::int64_t first, std::int64_t count,
                   void* out) {
  draw_runs(key, draw, dtype, out, [&](auto run) { run(first, std::int64_t{0}, count); });
}

void draw_local(const RandomKey& key, const Draw& draw, const Spec& spec, const Dims& coordinate, void* out) {
  draw_runs(key, draw, spec.meta().dtype(), out, [&](auto run) {
    for_each_run(box_of(spec, coordinate), spec.meta().shape(),
                 [&](std::int64_t global, std::int64_t local, std::int64_t count) { run(global, local, count); });
  });
}

}  // namespace dtensor
