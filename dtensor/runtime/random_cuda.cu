// Random values on a GPU, one thread for each: the arithmetic of the CPU's kernels, and so their bits. Compiled with
// -fmad=false.
#include <cuda_runtime.h>

#include "dtensor/core/random_half.h"
#include "dtensor/core/random_math.h"
#include "dtensor/runtime/random_cuda_impl.h"

namespace dtensor {
namespace {

using namespace random_math;

struct Value {
  double real;         // every kind but
  std::int64_t whole;  // integers and Bernoulli draws
};

__device__ std::uint64_t pair_of(const Block& block, int lane) {
  return block.word[2 * lane] | (static_cast<std::uint64_t>(block.word[2 * lane + 1]) << 32);
}

__device__ float normal32(const Block& block, int lane) {
  const Normals32 both = normals(block.word[lane & 2], block.word[(lane & 2) + 1]);
  return lane & 1 ? both.second : both.first;
}

__device__ double normal64(const Block& block, int lane) {
  const Normals64 both = normals(pair_of(block, 0), pair_of(block, 1));
  return lane & 1 ? both.second : both.first;
}

__device__ Value value_of(const RandomTask& task, const Block& block, int lane) {
  const double a = task.a, b = task.b, c = task.c;
  const auto fa = static_cast<float>(a), fb = static_cast<float>(b), fc = static_cast<float>(c);
  switch (task.work) {
    case RandomWork::kUniform32:
      return {uniform(block.word[lane], fa, fb, fc), 0};
    case RandomWork::kUniform64:
      return {uniform(pair_of(block, lane), a, b, c), 0};
    case RandomWork::kNormal32:
      return {normal32(block, lane) * fb + fa, 0};
    case RandomWork::kNormal64:
      return {normal64(block, lane) * b + a, 0};
    case RandomWork::kLogNormal32:
      return {exp_of(static_cast<double>(normal32(block, lane)) * b + a), 0};
    case RandomWork::kLogNormal64:
      return {exp_of(normal64(block, lane) * b + a), 0};
    case RandomWork::kExponential32:
      return {exponential(inside(block.word[lane]), a, c), 0};
    case RandomWork::kExponential64:
      return {exponential(inside(pair_of(block, lane)), a, c), 0};
    case RandomWork::kCauchy32:
      return {cauchy(block.word[lane], a, b), 0};
    case RandomWork::kCauchy64:
      return {cauchy(pair_of(block, lane), a, b), 0};
    case RandomWork::kGeometric64:
      return {geometric(inside(pair_of(block, lane)), a), 0};
    case RandomWork::kBernoulli32:
      return {0, block.word[lane] < task.range ? 1 : 0};
    case RandomWork::kUnit32:
      return {to_double(block.word[lane]) * 0x1p-32, 0};
    case RandomWork::kIntegers64:
      return {0, static_cast<std::int64_t>(task.low + scaled(pair_of(block, lane), task.range))};
  }
  return {0, 0};
}

template <class Out>
__device__ void store_integer(void* out, std::int64_t at, const Value& value, bool is_whole) {
  constexpr bool kSigned = static_cast<Out>(-1) < static_cast<Out>(0);
  constexpr auto kMost =
      static_cast<Out>(kSigned ? (std::uint64_t{1} << (sizeof(Out) * 8 - 1)) - 1 : ~std::uint64_t{0});
  auto result = static_cast<Out>(value.whole);
  if (!is_whole) result = value.real < static_cast<double>(kMost) ? static_cast<Out>(value.real) : kMost;
  static_cast<Out*>(out)[at] = result;
}

__device__ void store(void* out, std::int64_t at, const Value& value, RandomValue kind, DType dtype) {
  const bool is_whole = kind == RandomValue::kInt || kind == RandomValue::kByte;
  const bool down = kind == RandomValue::kFloatDown;
  // As the CPU does: integers become floats in one step.
  const auto narrow = is_whole ? static_cast<float>(value.whole) : static_cast<float>(value.real);
  switch (dtype) {
    case DType::kF64:
      static_cast<double*>(out)[at] = is_whole ? static_cast<double>(value.whole) : value.real;
      return;
    case DType::kF32:
      static_cast<float*>(out)[at] = narrow;
      return;
    case DType::kF16:
      static_cast<std::uint16_t*>(out)[at] = down ? half_down(narrow) : half_nearest(narrow);
      return;
    case DType::kBF16:
      static_cast<std::uint16_t*>(out)[at] = down ? bfloat_down(narrow) : bfloat_nearest(narrow);
      return;
    case DType::kBool:
      static_cast<bool*>(out)[at] = value.whole != 0;
      return;
    case DType::kU8:
      return store_integer<std::uint8_t>(out, at, value, is_whole);
    case DType::kI8:
      return store_integer<std::int8_t>(out, at, value, is_whole);
    case DType::kU16:
      return store_integer<std::uint16_t>(out, at, value, is_whole);
    case DType::kI16:
      return store_integer<std::int16_t>(out, at, value, is_whole);
    case DType::kU32:
      return store_integer<std::uint32_t>(out, at, value, is_whole);
    case DType::kI32:
      return store_integer<std::int32_t>(out, at, value, is_whole);
    case DType::kU64:
      return store_integer<std::uint64_t>(out, at, value, is_whole);
    case DType::kI64:
      return store_integer<std::int64_t>(out, at, value, is_whole);
    default:
      return;
  }
}

__global__ void draw(RandomPlan plan, const DeviceRun* runs, std::int64_t run_count, std::int64_t count, void* out) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    const std::int64_t element = i / plan.per_element;
    std::int64_t low = 0;
    std::int64_t high = run_count;  // the last run that starts at or before the element
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      if (runs[middle].local <= element) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const std::int64_t global =
        (runs[low].global + (element - runs[low].local)) * plan.per_element + i % plan.per_element;
    const auto block = static_cast<std::uint64_t>(global / plan.lanes);
    const Block words =
        philox({{static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32), plan.task.call, 0}},
               plan.task.key[0], plan.task.key[1]);
    store(out, i, value_of(plan.task, words, static_cast<int>(global % plan.lanes)), plan.value, plan.stored);
  }
}

}  // namespace

const char* launch_random(const RandomPlan& plan, const DeviceRun* runs, std::int64_t run_count, std::int64_t count,
                          void* out, void* stream) {
  const std::int64_t values = count * plan.per_element;
  if (values == 0) return nullptr;
  constexpr int kThreads = 256;
  const std::int64_t wanted = (values + kThreads - 1) / kThreads;
  const int blocks = static_cast<int>(wanted < 16384 ? wanted : 16384);
  draw<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(plan, runs, run_count, values, out);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace dtensor
