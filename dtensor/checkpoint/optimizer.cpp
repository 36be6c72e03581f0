#include <ATen/ops/zeros_like.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/version.h>

#include <charconv>
#include <functional>
#include <limits>

#include "dtensor/checkpoint/party_impl.h"
#include "dtensor/checkpoint/save_impl.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

namespace optim = torch::optim;
constexpr std::string_view kOptimizer = "optimizer.";

// What the state of each optimizer consists of.
template <class V>
void visit(optim::SGDParamState& state, V&& v) {
  v("momentum_buffer", state.momentum_buffer());
}
template <class State, class V>
void visit_adam(State& state, V&& v) {
  v("step", state.step());
  v("exp_avg", state.exp_avg());
  v("exp_avg_sq", state.exp_avg_sq());
  v("max_exp_avg_sq", state.max_exp_avg_sq());
}
template <class V>
void visit(optim::AdamParamState& state, V&& v) {
  visit_adam(state, v);
}
template <class V>
void visit(optim::AdamWParamState& state, V&& v) {
  visit_adam(state, v);
}
template <class V>
void visit(optim::RMSpropParamState& state, V&& v) {
  v("step", state.step());
  v("square_avg", state.square_avg());
  v("momentum_buffer", state.momentum_buffer());
  v("grad_avg", state.grad_avg());
}
template <class V>
void visit(optim::AdagradParamState& state, V&& v) {
  v("step", state.step());
  v("sum", state.sum());
}

template <class V>
void visit(optim::SGDOptions& options, V&& v) {
  v("lr", options.lr());
  v("momentum", options.momentum());
  v("dampening", options.dampening());
  v("weight_decay", options.weight_decay());
  v("nesterov", options.nesterov());
}
template <class Options, class V>
void visit_adam_options(Options& options, V&& v) {
  v("lr", options.lr());
  v("beta1", std::get<0>(options.betas()));
  v("beta2", std::get<1>(options.betas()));
  v("eps", options.eps());
  v("weight_decay", options.weight_decay());
  v("amsgrad", options.amsgrad());
}
template <class V>
void visit(optim::AdamOptions& options, V&& v) {
  visit_adam_options(options, v);
}
template <class V>
void visit(optim::AdamWOptions& options, V&& v) {
  visit_adam_options(options, v);
}
template <class V>
void visit(optim::RMSpropOptions& options, V&& v) {
  v("lr", options.lr());
  v("alpha", options.alpha());
  v("eps", options.eps());
  v("weight_decay", options.weight_decay());
  v("momentum", options.momentum());
  v("centered", options.centered());
}
template <class V>
void visit(optim::AdagradOptions& options, V&& v) {
  v("lr", options.lr());
  v("lr_decay", options.lr_decay());
  v("weight_decay", options.weight_decay());
  v("eps", options.eps());
}

// Numbers as text that reads back as the same bits.
template <class Number>
std::string print_number(Number value) {
  char text[64];
  const auto end = std::to_chars(text, text + sizeof text, value);
  return {text, end.ptr};
}
std::string print_number(bool value) { return value ? "1" : "0"; }

template <class Number>
void parse_number(const std::string& name, const std::string& text, Number& value) {
  const auto end = std::from_chars(text.data(), text.data() + text.size(), value);
  if (end.ec == std::errc() && end.ptr == text.data() + text.size()) return;
  fail_invalid("load_checkpoint", {.what = "not a number in the state of the optimizer",
                                   .got = in_quotes(text) + " for " + in_quotes(name)});
}
void parse_number(const std::string& name, const std::string& text, bool& value) {
  int number = 0;
  parse_number(name, text, number);
  value = number != 0;
}

// libtorch's key of a parameter's state.
auto state_key(const at::Tensor& parameter) {
#if TORCH_VERSION_MAJOR >= 2
  return static_cast<void*>(parameter.unsafeGetTensorImpl());
#else
  return c10::guts::to_string(parameter.unsafeGetTensorImpl());
#endif
}

// One optimizer class at a time: its word, options and state.
template <class OptionsType, class StateType>
struct Kind {
  using Options = OptionsType;
  using State = StateType;
  const char* name;
};

template <class Use>
void with_kind(const optim::Optimizer& optimizer, Use use) {
  const optim::OptimizerOptions& options = optimizer.defaults();
  const auto is = [&](auto kind) {
    if (!dynamic_cast<const typename decltype(kind)::Options*>(&options)) return false;
    use(kind);
    return true;
  };
  if (is(Kind<optim::SGDOptions, optim::SGDParamState>{"SGD"})) return;
  if (is(Kind<optim::AdamOptions, optim::AdamParamState>{"Adam"})) return;
  if (is(Kind<optim::AdamWOptions, optim::AdamWParamState>{"AdamW"})) return;
  if (is(Kind<optim::RMSpropOptions, optim::RMSpropParamState>{"RMSprop"})) return;
  if (is(Kind<optim::AdagradOptions, optim::AdagradParamState>{"Adagrad"})) return;
  fail_unsupported("checkpoint", {.what = "the state of this optimizer is not known here",
                                  .expected = "SGD, Adam, AdamW, RMSprop or Adagrad",
                                  .advice = "its tensors as a map of names, with save_checkpoint(dir, tensors)"});
}

NamedTensors module_tensors(const torch::nn::Module& module, std::string_view where) {
  NamedTensors tensors;
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (name.starts_with(kOptimizer)) {
      fail_invalid(where, {.what = "a name that belongs to optimizers", .got = in_quotes(name)});
    }
    tensors.emplace(name, tensor);
  };
  for (const auto& item : module.named_parameters()) add(item.key(), item.value());
  for (const auto& item : module.named_buffers()) add(item.key(), item.value());
  return tensors;
}

// A name for every parameter of an optimizer: the module's, or its place where the module does not have it.
template <class Fn>
void each_parameter(const torch::nn::Module& module, const optim::Optimizer& optimizer, Fn fn) {
  std::map<const c10::TensorImpl*, std::string> names;
  for (const auto& item : module.named_parameters()) {
    names.emplace(item.value().unsafeGetTensorImpl(), item.key());
  }
  const auto& groups = optimizer.param_groups();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (std::size_t i = 0; i < groups[g].params().size(); ++i) {
      const at::Tensor& parameter = groups[g].params()[i];
      const auto known = names.find(parameter.unsafeGetTensorImpl());
      fn(known != names.end() ? known->second : "parameter." + std::to_string(g) + "." + std::to_string(i), parameter);
    }
  }
}

std::string group_name(std::size_t group) { return "optimizer.group." + std::to_string(group) + "."; }

// Adds an optimizer's tensors, and what is not a tensor as text.
void add_optimizer(const torch::nn::Module& module, const optim::Optimizer& optimizer, NamedTensors& tensors,
                   std::map<std::string, std::string>& numbers) {
  with_kind(optimizer, [&](auto kind) {
    using Options = typename decltype(kind)::Options;
    using State = typename decltype(kind)::State;
    numbers["optimizer.kind"] = kind.name;
    const auto& groups = optimizer.param_groups();
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const optim::OptimizerOptions& options = groups[g].has_options() ? groups[g].options() : optimizer.defaults();
      Options copy = dynamic_cast<const Options&>(options);
      visit(copy, [&](const char* what, auto& value) { numbers[group_name(g) + what] = print_number(value); });
    }
    each_parameter(module, optimizer, [&](const std::string& name, const at::Tensor& parameter) {
      const auto found = optimizer.state().find(state_key(parameter));
      if (found == optimizer.state().end()) return;
      auto& state = dynamic_cast<State&>(*found->second);
      const std::string prefix = std::string(kOptimizer) + name + ".";
      visit(state, [&](const char* what, auto& value) {
        if constexpr (std::is_same_v<std::decay_t<decltype(value)>, at::Tensor>) {
          if (value.defined()) tensors.emplace(prefix + what, value);
        } else {
          numbers[prefix + what] = print_number(value);
        }
      });
    });
  });
}

// Makes the state that the checkpoint has of the optimizer, its tensors still empty, and adds them to what is loaded.
// The optimizer has it when the function that is returned is called: what fails before leaves it as it was.
std::function<void()> prepare_optimizer(const torch::nn::Module& module, optim::Optimizer& optimizer,
                                        const Checkpoint& checkpoint, NamedTensors& tensors) {
  const auto& numbers = checkpoint.info().state;
  std::vector<std::function<void()>> steps;
  with_kind(optimizer, [&](auto kind) {
    using Options = typename decltype(kind)::Options;
    using State = typename decltype(kind)::State;
    const auto saved = numbers.find("optimizer.kind");
    if (saved == numbers.end() || saved->second != kind.name) {
      fail_invalid("load_checkpoint", {.what = "the checkpoint has no state of this optimizer",
                                       .got = saved == numbers.end() ? "none" : in_quotes(saved->second),
                                       .expected = kind.name});
    }
    const auto take = [&](const std::string& name, auto& value) {
      const auto found = numbers.find(name);
      if (found != numbers.end()) parse_number(name, found->second, value);
      return found != numbers.end();
    };
    auto& groups = optimizer.param_groups();
    for (std::size_t g = 0; g < groups.size(); ++g) {
      optim::OptimizerOptions& options = groups[g].has_options() ? groups[g].options() : optimizer.defaults();
      Options copy = dynamic_cast<Options&>(options);
      visit(copy, [&](const char* what, auto& value) { take(group_name(g) + what, value); });
      steps.push_back([&options, copy] { dynamic_cast<Options&>(options) = copy; });
    }
    const at::NoGradGuard no_grad;
    each_parameter(module, optimizer, [&](const std::string& name, const at::Tensor& parameter) {
      auto state = std::make_shared<std::unique_ptr<State>>(std::make_unique<State>());
      bool any = false;
      const std::string prefix = std::string(kOptimizer) + name + ".";
      visit(**state, [&](const char* what, auto& value) {
        if constexpr (std::is_same_v<std::decay_t<decltype(value)>, at::Tensor>) {
          if (!checkpoint.tensors().contains(prefix + what)) return;
          value = at::zeros_like(parameter.detach());
          tensors.emplace(prefix + what, value);
          any = true;
        } else {
          any = take(prefix + what, value) || any;
        }
      });
      steps.push_back([&optimizer, key = state_key(parameter), state, any] {
        optimizer.state().erase(key);
        if (any) optimizer.state()[key] = std::move(*state);
      });
    });
  });
  return [steps] {
    for (const auto& step : steps) step();
  };
}

bool is_optimizers(const std::string& name) { return name.starts_with(kOptimizer); }

}  // namespace

SaveReport save_checkpoint(const std::string& dir, const torch::nn::Module& module, const SaveOptions& options) {
  return save_tensors(dir, module_tensors(module, "save_checkpoint"), options, {});
}

SaveReport save_checkpoint(const std::string& dir, const torch::nn::Module& module,
                           const torch::optim::Optimizer& optimizer, const SaveOptions& options) {
  NamedTensors tensors = module_tensors(module, "save_checkpoint");
  std::map<std::string, std::string> numbers;
  add_optimizer(module, optimizer, tensors, numbers);
  return save_tensors(dir, tensors, options, numbers);
}

PendingSave save_checkpoint_async(const std::string& dir, const torch::nn::Module& module,
                                  const torch::optim::Optimizer& optimizer, const SaveOptions& options) {
  NamedTensors tensors = module_tensors(module, "save_checkpoint");
  std::map<std::string, std::string> numbers;
  add_optimizer(module, optimizer, tensors, numbers);
  return save_tensors_async(dir, tensors, options, numbers);
}

LoadReport load_checkpoint(const std::string& dir, torch::nn::Module& module, const LoadOptions& options) {
  const NamedTensors tensors = module_tensors(module, "load_checkpoint");
  const Party party = party_of(tensors, options.mesh, "load_checkpoint");
  Checkpoint checkpoint = open_together(dir, party);
  return load_tensors(checkpoint, party, tensors, options, is_optimizers);
}

LoadReport load_checkpoint(const std::string& dir, torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                           const LoadOptions& options) {
  NamedTensors tensors = module_tensors(module, "load_checkpoint");
  const Party party = party_of(tensors, options.mesh, "load_checkpoint");
  Checkpoint checkpoint = open_together(dir, party);
  const std::function<void()> give = prepare_optimizer(module, optimizer, checkpoint, tensors);
  LoadOptions resumed = options;
  if (!resumed.random) resumed.random = true;
  LoadReport report = load_tensors(checkpoint, party, tensors, resumed);
  give();
  return report;
}

}  // namespace dtensor
