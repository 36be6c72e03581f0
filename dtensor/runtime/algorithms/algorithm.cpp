#include "dtensor/runtime/algorithms/algorithm.h"

#include <ATen/OpMathType.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <numeric>

#include "dtensor/comm/world.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"
#include "dtensor/runtime/dispatch_impl.h"
#include "dtensor/runtime/execute.h"
#include "dtensor/runtime/identity.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/payload.h"
#include "dtensor/runtime/record.h"

namespace dtensor {
namespace {

bool cuts(const DimLayouts& dims, std::int64_t mesh_dim) {
  for (const auto& factors : dims) {
    for (const Factor& factor : factors) {
      for (const auto& cut : factor.cuts) {
        if (cut.mesh_dim == mesh_dim) return true;
      }
    }
  }
  return false;
}

}  // namespace

AlgorithmCall::AlgorithmCall(const LocalCall& call, const Prepared& prepared)
    : op_(call.info.name),
      decision_(prepared.decision),
      shapes_(prepared.output_shapes),
      mesh_(call.mesh),
      at_(*call.mesh->coordinate()),
      args_(call.stack.end() - static_cast<std::ptrdiff_t>(call.info.args.size()), call.stack.end()),
      specs_(call.info.args.size(), nullptr) {
  for (std::size_t i = 0; i < call.operands.size(); ++i) {
    const auto& spec = decision_.inputs[i];
    if (spec && call.operands[i].item == 0) specs_[call.operands[i].arg] = &*spec;
  }
}

at::Tensor AlgorithmCall::tensor(std::size_t i) const {
  return args_[i].isTensor() ? args_[i].toTensor() : at::Tensor();
}

std::vector<std::int64_t> AlgorithmCall::named_dims(std::size_t i) const {
  const std::int64_t ndim = tensor(0).dim();
  std::vector<std::int64_t> dims;
  if (args_[i].isInt()) dims = {args_[i].toInt()};
  if (args_[i].isIntList()) dims = args_[i].toIntVector();
  for (std::int64_t& dim : dims) dim = at::maybe_wrap_dim(dim, ndim);
  if (dims.empty()) {
    dims.resize(static_cast<std::size_t>(ndim));
    std::iota(dims.begin(), dims.end(), 0);
  }
  return dims;
}

at::Tensor AlgorithmCall::moved(const at::Tensor& part, const TensorMeta& meta, const DimLayouts& from_dims,
                                const Partials& from_partials, const DimLayouts& to_dims,
                                const Partials& to_partials) const {
  const Spec from = expect_spec(Spec::from_dims(meta, *mesh_, from_dims, from_partials), op_);
  const Spec to = expect_spec(Spec::from_dims(meta, *mesh_, to_dims, to_partials), op_);
  return from == to ? part : execute(*mesh_, make_plan(from, to), part);
}

at::Tensor AlgorithmCall::merged(const at::Tensor& part, std::size_t i, const std::vector<std::int64_t>& over,
                                 ReduceOp op) const {
  Dims shape = spec(i).meta().shape();
  DimLayouts dims = spec(i).dims();
  for (const std::int64_t d : over) {
    shape[d] = part.size(d);
    dims[d] = {Factor{part.size(d), {}}};
  }
  const Partials whole = spec(i).partials();
  Partials partial = whole;
  for (const std::int64_t m : decision_.local.algorithm_dims) {
    if (!cuts(dims, m)) partial[m] = op;
  }
  return moved(part, TensorMeta(shape, dtype_of(part.scalar_type())), dims, partial, dims, whole);
}

at::Tensor AlgorithmCall::merged_result(const at::Tensor& part, std::size_t k, ReduceOp op) const {
  const Spec& result = *decision_.outputs[k];
  Partials partial = result.partials();
  for (const std::int64_t m : decision_.local.algorithm_dims) partial[m] = op;
  return moved(part, TensorMeta(result.meta().shape(), dtype_of(part.scalar_type())), result.dims(), partial,
               result.dims(), result.partials());
}

at::Tensor AlgorithmCall::merged_numbers(const at::Tensor& parts, std::size_t k, ReduceOp op) const {
  const Partials& whole = decision_.outputs[k]->partials();
  Partials partial = whole;
  for (const std::int64_t m : decision_.local.algorithm_dims) partial[m] = op;
  DimLayouts dims;
  dims.push_back({Factor{parts.size(0), {}}});
  return moved(parts, TensorMeta(Dims{parts.size(0)}, dtype_of(parts.scalar_type())), dims, partial, dims, whole);
}

at::Tensor AlgorithmCall::gathered(const at::Tensor& piece, std::size_t i, std::int64_t dim) const {
  Factor factor{piece.size(dim), {}};
  for (const std::int64_t m : decision_.local.algorithm_dims) {
    factor.cuts.push_back({static_cast<std::int32_t>(m), mesh_->size(m)});
    factor.size *= mesh_->size(m);
  }
  Dims shape = spec(i).meta().shape();
  shape[dim] = factor.size;
  DimLayouts from = spec(i).dims();
  DimLayouts to = from;
  to[dim] = {Factor{factor.size, {}}};
  from[dim] = {std::move(factor)};
  const Partials& partials = spec(i).partials();
  return moved(piece, TensorMeta(shape, dtype_of(piece.scalar_type())), from, partials, to, partials);
}

std::vector<Dims> AlgorithmCall::pieces() const {
  std::vector<Dims> result = {at_};
  for (const std::int64_t m : decision_.local.algorithm_dims) {
    std::vector<Dims> next;
    for (const Dims& some : result) {
      for (std::int64_t index = 0; index < mesh_->size(m); ++index) {
        next.push_back(some);
        next.back()[m] = index;
      }
    }
    result = std::move(next);
  }
  return result;
}

std::vector<at::Tensor> AlgorithmCall::exchanged(const std::vector<at::Tensor>& sent,
                                                 const std::vector<std::int64_t>& counts, std::size_t i,
                                                 std::int64_t most) const {
  std::vector<std::int64_t> ranks, send_counts, recv_counts;
  std::vector<at::Tensor> flat;
  std::int64_t total = 0;
  std::size_t me = 0;
  const std::int64_t row = *mesh_->row_of(mesh_->rank());
  for (const Dims& at : pieces()) {
    const std::size_t p = ranks.size();
    ranks.push_back(mesh_->rank_at(at, row));
    const bool own = at == at_;
    if (own) me = p;
    flat.push_back(own ? sent[p].reshape({-1}).narrow(0, 0, 0) : sent[p].reshape({-1}));
    send_counts.push_back(flat.back().numel());
    recv_counts.push_back(own ? 0 : counts[p]);
    total += recv_counts.back();
  }
  const at::Tensor out = at::cat(flat), in = at::empty({total}, out.options());
  if (communication_is_watched()) {
    watch_exchange(spec(i), decision_.local.algorithm_dims, total * static_cast<std::int64_t>(in.element_size()), most);
  }
  finish_earlier_plan(*mesh_);
  group_of(*mesh_, ranks, group_name(*mesh_, decision_.local.algorithm_dims))
      ->all_to_all(in, out, recv_counts, send_counts)
      ->wait();
  std::vector<at::Tensor> result = in.split_with_sizes(recv_counts);
  result[me] = sent[me].reshape({-1});
  return result;
}

at::IntArrayRef AlgorithmCall::shape(std::size_t k) const { return {shapes_[k].data(), shapes_[k].size()}; }
at::Tensor AlgorithmCall::shaped(const at::Tensor& tensor, std::size_t k) const { return tensor.reshape(shape(k)); }
c10::ScalarType AlgorithmCall::type(std::size_t k) const {
  return scalar_type_of(decision_.outputs[k]->meta().dtype());
}

AlgorithmFn find_algorithm(std::string_view name) {
  for (const auto& table : {softmax_algorithms(), norm_algorithms(), order_algorithms(), index_algorithms(),
                            loss_algorithms(), product_algorithms(), window_algorithms()}) {
    for (const NamedAlgorithm& algorithm : table) {
      if (algorithm.name == name) return algorithm.run;
    }
  }
  fail_invalid("rule", {.what = "a row names an algorithm that there is not", .got = std::string(name)});
}

void run_algorithm(LocalCall& call, const Prepared& prepared) {
  const Decision& decision = prepared.decision;
  const AlgorithmCall what(call, prepared);
  std::vector<at::Tensor> results = prepared.algorithm(what);
  for (std::size_t k = 0; k < results.size(); ++k) {
    if (!decision.outputs[k]) {
      results[k] = at::Tensor();
    } else if (results[k].sizes() != what.shape(k)) {
      fail(ErrorKind::kInternal, call.info.name,
           {.what = "the algorithm gave a result of another shape",
            .got = "[" + join_numbers(results[k].sizes()) + "]",
            .expected = "[" + join_numbers(what.shape(k)) + "] of " + decision.outputs[k]->to_string()});
    } else {
      results[k] = laid_out(results[k].to(what.type(k)), *decision.outputs[k], what.at());
    }
  }
  if (call.info.in_place) {
    call.operands[0].payload->local().copy_(results[0]);
    results[0] = at::Tensor();
  }
  torch::jit::drop(call.stack, call.info.args.size());
  for (at::Tensor& result : results) call.stack.emplace_back(std::move(result));
}

// ---- what several families need

at::Tensor widened(const at::Tensor& tensor) { return tensor.to(at::toOpMathType(tensor.scalar_type())); }

std::vector<std::int64_t> slice_sizes(const at::Tensor& tensor, const std::vector<std::int64_t>& over) {
  std::vector<std::int64_t> sizes = tensor.sizes().vec();
  for (const std::int64_t d : over) sizes[static_cast<std::size_t>(d)] = 1;
  return sizes;
}

at::Tensor extreme(const at::Tensor& tensor, const std::vector<std::int64_t>& over, ReduceOp op) {
  if (tensor.numel() == 0) {
    const at::Tensor nothing = at::empty(slice_sizes(tensor, over), tensor.options());
    fill_identity(nothing, op);
    return nothing;
  }
  return op == ReduceOp::kMax ? tensor.amax(over, true) : tensor.amin(over, true);
}

}  // namespace dtensor
