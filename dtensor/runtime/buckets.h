#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "dtensor/runtime/backward.h"

namespace dtensor {

struct BucketOptions {
  std::optional<std::int64_t> scatter_dim = {};  // the mesh dim that cuts the gradients' dim 0 when they are reduced
  std::optional<c10::ScalarType> reduce_dtype = {};
  std::function<void()> after_backward = {};
};

// Gradients that are reduced together, by one collective: those of a module's neighbouring parameters, or of a unit
// that is fully sharded. They wait unreduced until the last has come, or until one of them is touched.
class GradientBucket : public std::enable_shared_from_this<GradientBucket> {
 public:
  // Buckets made by one call are started in their order: one that is complete when the next gradient comes, so that
  // what was accumulated before is in it; what is left when the backward pass ends.
  using Group = std::vector<std::weak_ptr<GradientBucket>>;
  GradientBucket(const std::vector<at::Tensor>& leaves, std::shared_ptr<Group> group,
                 const BucketOptions& options = {});

  // Is it a sum that is only to be reduced (and cut, when the bucket scatters) to be at home?
  bool takes(const at::Tensor& gradient, const Spec& home) const;
  // A leaf's gradient has come; what libtorch is to add to the leaf's. Pre: takes(gradient, home).
  at::Tensor arrived(const at::Tensor& gradient, const Spec& home);
  // Starts the reduction of all that is there. Those who are touched then wait for it.
  void reduce();

 private:
  struct Member;
  void reduce_alike(const std::vector<Member>& members);

  std::vector<WeakTensor> leaves_;
  std::shared_ptr<Group> group_;
  BucketOptions options_;
  std::size_t arrived_ = 0;
};

// Buckets of at most so many bytes for leaves in the order in which a backward pass comes by them, the reverse of
// theirs. Gradients of a megabyte and more have one each. Without effect on leaves that have one already.
void make_buckets(const std::vector<at::Tensor>& leaves, std::int64_t bytes);

}  // namespace dtensor
