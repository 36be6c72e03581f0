#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>
#include <torch/library.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <typeinfo>
#include <utility>

#include "dtensor/comm/rank_generator_impl.h"

namespace dtensor {
namespace {

// libtorch keeps this mode key for its own tests, and uses it nowhere.
constexpr c10::DispatchKey kRankGeneratorKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

constinit thread_local const at::Generator* generator_of_thread = nullptr;

at::CPUGeneratorImpl* impl_of_thread() {
  return generator_of_thread ? generator_of_thread->get<at::CPUGeneratorImpl>() : nullptr;
}

// The class that libtorch's default generator gets. It has no state beside its base's: threads without a generator of
// their own use the base's functions, and so libtorch's state.
class RoutedGenerator final : public at::CPUGeneratorImpl {
 public:
  void set_current_seed(std::uint64_t seed) override {
    at::CPUGeneratorImpl* mine = impl_of_thread();
    if (!mine) return CPUGeneratorImpl::set_current_seed(seed);
    const std::lock_guard lock(mine->mutex_);
    mine->set_current_seed(seed);
  }
  std::uint64_t current_seed() const override {
    at::CPUGeneratorImpl* mine = impl_of_thread();
    return mine ? mine->current_seed() : CPUGeneratorImpl::current_seed();
  }
  std::uint64_t seed() override {
    at::CPUGeneratorImpl* mine = impl_of_thread();
    if (!mine) return CPUGeneratorImpl::seed();
    const std::lock_guard lock(mine->mutex_);
    return mine->seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    at::CPUGeneratorImpl* mine = impl_of_thread();
    if (!mine) return CPUGeneratorImpl::set_state(state);
    const std::lock_guard lock(mine->mutex_);
    mine->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::CPUGeneratorImpl* mine = impl_of_thread();
    return mine ? mine->get_state() : CPUGeneratorImpl::get_state();
  }

 private:
  at::CPUGeneratorImpl* clone_impl() const override {
    at::CPUGeneratorImpl* mine = impl_of_thread();
    auto* from = mine ? mine : const_cast<RoutedGenerator*>(this);  // engine() is not const
    auto copy = std::make_unique<at::CPUGeneratorImpl>();
    copy->set_engine(from->engine());
    copy->set_next_float_normal_sample(from->next_float_normal_sample());
    copy->set_next_double_normal_sample(from->next_double_normal_sample());
    return copy.release();
  }
};

// The default generator stays the object that it is, because programs (and Python) hold it: only its class changes.
// That is its first word, in the C++ ABI of every platform that libtorch is built for.
void route_default_generator() {
  static_assert(sizeof(RoutedGenerator) == sizeof(at::CPUGeneratorImpl));
  c10::GeneratorImpl* shared = at::detail::getDefaultCPUGenerator().unsafeGetGeneratorImpl();
  // Some other library has put its own there: seeds are left to it.
  if (typeid(*shared) != typeid(at::CPUGeneratorImpl)) return;
  static const auto* prototype = new RoutedGenerator;
  const std::lock_guard lock(shared->mutex_);
  std::memcpy(static_cast<void*>(shared), static_cast<const void*>(prototype), sizeof(void*));
}

bool takes_generator(const c10::Argument& argument) {
  const auto optional = argument.type()->cast<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

class DrawFromThread final : public c10::OperatorKernel {
 public:
  explicit DrawFromThread(std::size_t from_end) : from_end_(from_end) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) const {
    // Of plain CPU tensors only: distributed ones and those on other devices have generators of their own.
    if (generator_of_thread && keys.highestBackendKey() == c10::BackendComponent::CPUBit) {
      c10::IValue& generator = (*stack)[stack->size() - from_end_];
      const bool is_default = generator.isNone() || (generator.isGenerator() &&
                                                     generator.toGenerator().unsafeGetGeneratorImpl() ==
                                                         at::detail::getDefaultCPUGenerator().unsafeGetGeneratorImpl());
      if (is_default) generator = *generator_of_thread;
    }
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kRankGeneratorKey), stack);
  }

 private:
  const std::size_t from_end_;  // where the generator is on the stack
};

void register_draws() {
  // Never destroyed: other threads may still call operators when main ends.
  auto* any = new torch::Library(torch::Library::IMPL, "_", kRankGeneratorKey, __FILE__, __LINE__);
  any->fallback(torch::CppFunction::makeFallthrough());
  auto* aten = new torch::Library(torch::Library::IMPL, "aten", kRankGeneratorKey, __FILE__, __LINE__);
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op) continue;
    const auto& arguments = op->schema().arguments();
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      if (!takes_generator(arguments[i])) continue;
      const std::string text = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
      aten->impl(text.c_str(),
                 torch::CppFunction::makeFromBoxedFunctor(std::make_unique<DrawFromThread>(arguments.size() - i)));
      break;
    }
  }
}

c10::DispatchKey registered_key() {
  static std::once_flag once;
  std::call_once(once, [] {
    register_draws();
    route_default_generator();
  });
  return kRankGeneratorKey;
}

}  // namespace

RankGenerator::RankGenerator()
    : generator_(at::make_generator<at::CPUGeneratorImpl>()),
      before_(std::exchange(generator_of_thread, &generator_)),
      key_(registered_key()) {}

RankGenerator::~RankGenerator() { generator_of_thread = before_; }

}  // namespace dtensor
