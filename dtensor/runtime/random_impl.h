#pragma once

#include <optional>
#include <string_view>

#include "dtensor/runtime/dispatch_impl.h"
#include "dtensor/runtime/random.h"

namespace dtensor {

// The key of one logical call: the rank's next one, or one draw of the generator's.
RandomKey next_random_key(const DeviceMesh& mesh, const MaybeGenerator& generator);

// The seed and the call in one word.
std::uint64_t provenance_word(const RandomKey& key);

// Fills what this rank holds of a distributed tensor. Errors, on all ranks: a Partial tensor, a type without such
// values.
void fill_random(const at::Tensor& tensor, const RandomKey& key, const Draw& draw, std::string_view where);
// What this rank holds of a tensor with this spec; undefined on ranks outside the mesh. `like` says the device.
at::Tensor random_local(const Spec& spec, const DeviceMesh& mesh, const at::Tensor& like, const RandomKey& key,
                        const Draw& draw);

// Integers that a tensor of this type can hold. Errors: an empty range, values that the type does not have.
Draw integers_of(std::int64_t low, std::int64_t high, DType dtype, std::string_view where);

// A random operator's call, with its arguments by name.
class RandomCall {
 public:
  RandomCall(const OpInfo& info, const c10::OperatorHandle& op, torch::jit::Stack* stack);

  const std::string& name() const { return call_.info.name; }
  const DeviceMesh& mesh() const { return *call_.mesh; }
  const std::shared_ptr<const DeviceMesh>& shared_mesh() const { return call_.mesh; }
  bool is_in_place() const { return call_.info.in_place; }
  bool has(std::string_view arg) const;
  // Of an argument that is there; tensors among distributed ones are distributed.
  const c10::IValue& at(std::string_view arg) const;
  at::Tensor tensor(std::string_view arg) const;
  double number(std::string_view arg) const;
  std::int64_t integer(std::string_view arg) const;

  // Of this call, taken when it began.
  const RandomKey& key() const { return key_; }
  // Of the first result: the operator, seed and call, the operands and numbers.
  Provenance provenance() const;
  // Takes the arguments away and gives the results.
  void finish(std::initializer_list<at::Tensor> results);

 private:
  std::optional<std::size_t> index_of(std::string_view arg) const;
  LocalCall call_;
  RandomKey key_;
};

using RandomHandler = void (*)(RandomCall& call);
// The one of an operator with a random kernel of ours ("aten::uniform_"), or null.
RandomHandler random_handler(const std::string& name);
// Those that are made of several operators, in random_noise.cpp and random_sample.cpp.
void run_bernoulli_of(RandomCall& call);
void run_normal_of(RandomCall& call);
void run_multinomial(RandomCall& call);
void run_native_dropout(RandomCall& call);
void run_rrelu_with_noise(RandomCall& call);
// Kernels of dropout and its relatives.
void register_noise();

}  // namespace dtensor
