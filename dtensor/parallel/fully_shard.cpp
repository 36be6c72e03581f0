#include "dtensor/parallel/fully_shard.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <set>

#include "dtensor/comm/world.h"
#include "dtensor/core/error.h"
#include "dtensor/parallel/mesh_dim.h"
#include "dtensor/runtime/buckets.h"
#include "dtensor/runtime/compat_impl.h"
#include "dtensor/runtime/meta.h"
#include "dtensor/runtime/module.h"
#include "dtensor/runtime/one_model.h"
#include "dtensor/runtime/payload.h"
#include "dtensor/runtime/record.h"
#include "dtensor/runtime/redistribute.h"
#include "dtensor/runtime/tensor.h"

namespace dtensor {
namespace {

class Unit;

// All units of one rank: which are gathered, and in which order they came last time.
struct Units {
  std::vector<std::weak_ptr<Unit>> gathered;
  const Unit* current = nullptr;
  std::vector<std::weak_ptr<Unit>> order;  // of the last forward pass
  std::shared_ptr<GradientBucket::Group> buckets = std::make_shared<GradientBucket::Group>();
  GatheredBytes bytes;

  // Nothing stays gathered, or on its way, when a backward pass has ended.
  void release();
};

// A rank's context is where its units meet; they end with it.
std::shared_ptr<Units> units_of(const DeviceMesh& mesh) {
  static std::mutex mutex;
  static auto* known = new std::map<std::weak_ptr<RankContext>, std::weak_ptr<Units>, std::owner_less<>>();
  const std::lock_guard lock(mutex);
  std::erase_if(*known, [](const auto& entry) { return entry.second.expired(); });
  auto& entry = (*known)[mesh.context()];
  auto units = entry.lock();
  if (!units) entry = units = std::make_shared<Units>();
  return units;
}

std::int64_t numel_of(const Dims& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

at::Tensor empty_like(const Dims& shape, const at::Tensor& like, c10::ScalarType type) {
  return at::empty({shape.data(), shape.size()}, like.options().dtype(type));
}

// The memory of a tensor that others look at: let go, and got again.
void drop_memory(const at::Tensor& tensor) {
  tensor.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(nullptr, tensor.device()));
}
void get_memory(const at::Tensor& tensor) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(storage->allocator()->allocate(storage->nbytes()));
}

class Unit final : public GatherUnit, public std::enable_shared_from_this<Unit> {
 public:
  Unit(const std::vector<at::Tensor>& parameters, const MeshDim& at, const FullyShardOptions& options,
       std::set<const Unit*> inner, std::shared_ptr<const int> call)
      : mesh_(std::make_shared<const DeviceMesh>(at.mesh)),
        dim_(at.dim),
        options_(options),
        inner_(std::move(inner)),
        made_by_(std::move(call)),
        units_(units_of(at.mesh)) {
    for (const at::Tensor& parameter : parameters) add(parameter);
  }

  // The parts become pieces of one buffer, which is what is sent. Once, before the first use.
  void adopt() {
    const at::NoGradGuard no_grad;
    const NotInferenceMode keeps_autograd;
    room_ = 0;
    for (Member& member : members_) {
      member.at = room_;
      room_ += numel_of(member.sharded.local_shape(origin()));
    }
    if (mesh_->contains_me()) make_room();
    // Ranks outside the mesh hold nothing, and yet decide as the others do.
    for (const Member& member : members_) show(member, held(member), false);
  }

  void before_use(const at::Tensor& tensor, Use wanted) override {
    const bool of_gathered = is_gathered_form(payload_of(tensor));
    if (wanted == Use::kRead && (of_gathered || is_parameter(tensor))) {
      if ((gathered_ || on_its_way_) && is_out_of_date(tensor)) {
        forget_gather();
        reshard();
      }
      return use();
    }
    if (wanted == Use::kLook && of_gathered) return look(tensor);
    if (wanted == Use::kLayout && of_gathered && !comes_and_goes(tensor)) return look(tensor);
    if (wanted == Use::kRead || wanted == Use::kLook || wanted == Use::kLayout) return;
    forget_gather();
    // Its part, by a handle from before: what was gathered of it is out of date then.
    if (!of_gathered) return reshard();
    for (const Member& member : members_) {
      // The parameter, or the same detached: an optimizer's p.data().
      const at::Tensor parameter = handle(member);
      if (!parameter.defined() || &payload_of(parameter) != &payload_of(tensor)) continue;
      reshard();
      if (!parameter.is_same(tensor)) lay_out(tensor, member.part, member.sharded);
      return;
    }
    fail_invalid("fully_shard",
                 {.what = "a view of a gathered parameter is written, or its part taken: its memory does not stay",
                  .got = payload_of(tensor).spec.to_string(),
                  .advice = "the parameter itself, or clone()"});
  }

  at::Tensor gathered(const at::Tensor& tensor) override {
    if (!gathered_ || !shows_parts_) return tensor;
    for (const Member& member : members_) {
      if (member.parameter._unsafe_get_target() != tensor.unsafeGetTensorImpl()) continue;
      const NotInferenceMode as_the_parameter;  // libtorch takes views of it for views of the parameter
      return wrap_value(member.full, member.whole, payload_of(tensor).traits);
    }
    return tensor;
  }

  // The parameter itself, or the same detached, shows its part: what is gathered stays for those who read it whole.
  void look(const at::Tensor& tensor) {
    for (const Member& member : members_) {
      const at::Tensor parameter = handle(member);
      if (!parameter.defined() || &payload_of(parameter) != &payload_of(tensor)) continue;
      if (!parameter.is_same(tensor)) return lay_out(tensor, member.part, member.sharded);
      shows_parts_ = true;
      return show(member, parameter, false);
    }
    if (!gathered_) use();
  }

  bool comes_and_goes(const at::Tensor& tensor) override {
    return is_gathered_form(payload_of(tensor)) &&
           std::none_of(members_.begin(), members_.end(), [&](const Member& member) {
             const at::Tensor parameter = handle(member);
             return parameter.defined() && &payload_of(parameter) == &payload_of(tensor);
           });
  }

  void reshard() {
    if (!gathered_) return;
    gathered_ = used_ = shows_parts_ = false;
    units_->bytes.now -= full_bytes_;
    for (const Member& member : members_) {
      const at::Tensor parameter = handle(member);
      if (parameter.defined()) show(member, parameter, false);
      if (member.full.defined()) drop_memory(member.full);
    }
  }

  // One that was started ahead and never needed has the values of that time.
  void forget_gather() {
    if (const auto unneeded = std::exchange(on_its_way_, nullptr)) static_cast<void>(unneeded->result());
  }

  bool contains(const Unit* other) const { return inner_.count(other) > 0; }

 private:
  struct Member {
    WeakTensor parameter;
    Spec sharded;
    Spec whole;
    std::int64_t at = 0;  // of its part in the buffer
    at::Tensor part = {};
    at::Tensor full = {};
    std::uint32_t version = 0;               // of the parameter, when it was gathered
    mutable const Payload* shown = nullptr;  // what the parameter was given last
  };

  void make_room() {
    const c10::ScalarType type = scalar_type_of(members_[0].sharded.meta().dtype());
    flat_ = at::empty({1, room_}, payload_of(held(members_[0])).local().options().dtype(type)).zero_();
    for (Member& member : members_) {
      const at::Tensor part = payload_of(held(member)).local();
      member.part = flat_.view({-1}).narrow(0, member.at, part.numel()).view(part.sizes());
      member.part.copy_(part);
      member.full =
          empty_like(member.whole.local_shape(*mesh_->coordinate()), part, scalar_type_of(member.whole.meta().dtype()));
      drop_memory(member.full);
      full_bytes_ += static_cast<std::int64_t>(member.full.nbytes());
    }
  }

  void add(const at::Tensor& parameter) {
    const Spec& sharded = payload_of(parameter).spec;
    Spec whole = with_placement_on(sharded, dim_, Replicate());
    if (options_.param_dtype) whole = with_dtype(whole, *options_.param_dtype);
    members_.push_back({WeakTensor(parameter.getIntrusivePtr()), sharded, whole});
  }

  Dims origin() const { return Dims(static_cast<std::size_t>(mesh_->ndim()), 0); }

  static at::Tensor held(const Member& member) {
    auto impl = member.parameter.lock();
    return impl ? at::Tensor(std::move(impl)) : at::Tensor();
  }
  // None where it is gone, or has been given another value (set_data, Module::to): that one is not this unit's.
  at::Tensor handle(const Member& member) const {
    const at::Tensor parameter = held(member);
    const bool mine =
        has_payload(parameter) && payload_of(parameter).unit.get() == this && &payload_of(parameter) == member.shown;
    return mine ? parameter : at::Tensor();
  }
  void show(const Member& member, const at::Tensor& parameter, bool whole) {
    lay_out(parameter, whole ? member.full : member.part, whole ? member.whole : member.sharded);
    member.shown = &payload_of(parameter);
  }

  bool is_parameter(const at::Tensor& tensor) const {
    const auto* impl = tensor.unsafeGetTensorImpl();
    return std::any_of(members_.begin(), members_.end(),
                       [&](const Member& m) { return m.parameter._unsafe_get_target() == impl; });
  }

  // Was its part written since it was gathered, through a local tensor that the program has? And a pass with gradients
  // gathers again what was gathered without: the program may have written in between, through data(), where nobody
  // counts.
  bool is_out_of_date(const at::Tensor& tensor) const {
    if (gathered_ && gathered_without_gradients_ && at::GradMode::is_enabled() && !in_backward()) return true;
    const auto* impl = tensor.unsafeGetTensorImpl();
    return std::any_of(members_.begin(), members_.end(), [&](const Member& m) {
      return m.parameter._unsafe_get_target() == impl && m.version != version_of(tensor);
    });
  }
  static std::uint32_t version_of(const at::Tensor& tensor) {
    return tensor.is_inference() ? 0 : static_cast<std::uint32_t>(tensor._version());
  }

  // A gathered parameter, or what was taken from one: it looks at the memory that comes and goes.
  bool is_gathered_form(Payload& payload) const {
    const at::Tensor& local = payload.local();
    if (!local.defined()) {
      return std::none_of(members_.begin(), members_.end(), [&](const Member& m) { return m.sharded == payload.spec; });
    }
    return std::any_of(members_.begin(), members_.end(),
                       [&](const Member& m) { return local.storage().is_alias_of(m.full.storage()); });
  }

  at::Tensor wrap_value(const at::Tensor& local, const Spec& spec, const std::shared_ptr<ParameterTraits>& traits) {
    at::Tensor value = wrap(local, spec, mesh_, {.shared = true, .traits = traits});
    payload_of(value).unit = shared_from_this();
    return value;
  }

  void lay_out(const at::Tensor& parameter, const at::Tensor& local, const Spec& spec) {
    const NotInferenceMode keeps_autograd;
    exchange(parameter, wrap_value(local, spec, payload_of(parameter).traits));
  }

  // How the parts lie in one row, for each part of the mesh that is not asked.
  Spec row_spec(bool whole) const {
    Placements placements(static_cast<std::size_t>(mesh_->ndim()), Shard(0));
    placements[static_cast<std::size_t>(dim_)] = whole ? Placement(Replicate()) : Placement(Shard(1));
    const std::int64_t n = mesh_->size(dim_);
    return Spec::make(TensorMeta(Dims{mesh_->size() / n, n * room_}, members_[0].whole.meta().dtype()), *mesh_,
                      placements);
  }

  void start_gather() {
    if (gathered_ || on_its_way_) return;
    static const std::string* op = new std::string("fully_shard");
    static const std::string* reason = new std::string("a unit's parameters are gathered before they are used");
    const CommCause cause(*op, *reason, /*asked=*/true);
    for (Member& member : members_) {
      const at::Tensor parameter = handle(member);
      if (parameter.defined()) member.version = version_of(parameter);
    }
    const Spec from = row_spec(false);
    at::Tensor mine = flat_;
    if (mine.defined() && options_.param_dtype) mine = mine.to(*options_.param_dtype);
    on_its_way_ = start(*mesh_, make_plan(from, row_spec(true)), mine);
  }

  void finish_gather() {
    start_gather();
    const at::Tensor row = on_its_way_->result();
    on_its_way_.reset();
    gathered_ = shows_parts_ = true;
    units_->gathered.push_back(weak_from_this());
    units_->bytes.now += full_bytes_;
    units_->bytes.peak = std::max(units_->bytes.peak, units_->bytes.now);
    if (mesh_->contains_me()) {
      Dims coordinate = *mesh_->coordinate();
      const std::int64_t n = mesh_->size(dim_);
      for (const Member& member : members_) {
        get_memory(member.full);
        std::int64_t begin = 0;
        for (std::int64_t part = 0; part < n; ++part) {
          coordinate[static_cast<std::size_t>(dim_)] = part;
          const Dims shape = member.sharded.local_shape(coordinate);
          member.full.narrow(0, begin, shape[0])
              .copy_(row.view({-1})
                         .narrow(0, part * room_ + member.at, numel_of(shape))
                         .view({shape.data(), shape.size()}));
          begin += shape[0];
        }
      }
    }
  }

  void show_whole() {
    shows_parts_ = false;
    for (const Member& member : members_) {
      const at::Tensor parameter = handle(member);
      if (parameter.defined()) show(member, parameter, true);
    }
  }

  void use() {
    call_ = OneCall::current();
    const bool backward = in_backward();
    // Without gradients operators are given what was gathered, and the parameters keep what they show.
    const bool shows_whole = backward || at::GradMode::is_enabled();
    if (gathered_ && shows_parts_ && shows_whole) show_whole();
    if (gathered_ && units_->current == this) return;
    const at::NoGradGuard no_grad;
    units_->current = this;
    used_ = true;
    used_backward_ = used_backward_ || backward;
    release_others(backward);
    if (!gathered_) {
      finish_gather();
      gathered_without_gradients_ = !shows_whole;
      if (shows_whole) show_whole();
    }
    if (backward) torch::autograd::Engine::get_default_engine().queue_callback([units = units_] { units->release(); });
    prefetch_after(backward);
  }

  // Those who were used and do not contain this one.
  void release_others(bool backward) {
    std::vector<std::weak_ptr<Unit>> stay;
    for (const auto& weak : std::exchange(units_->gathered, {})) {
      const auto unit = weak.lock();
      if (!unit || !unit->gathered_) continue;
      const bool keep = unit.get() == this || unit->contains(this) || !unit->used_ || unit->made_by_ == made_by_ ||
                        (call_ != 0 && unit->call_ == call_) || (!backward && !unit->options_.reshard_after_forward);
      if (keep) {
        stay.push_back(weak);
      } else {
        unit->reshard();
      }
    }
    for (const auto& weak : units_->gathered) stay.push_back(weak);
    units_->gathered = std::move(stay);
  }

  // The order is the last forward pass's; a backward pass goes it back, past those that it does not need (a first
  // layer, an embedding).
  void prefetch_after(bool backward) {
    auto& order = units_->order;
    const auto me =
        std::find_if(order.begin(), order.end(), [&](const auto& weak) { return weak.lock().get() == this; });
    const auto index = me - order.begin();
    if (me == order.end()) order.push_back(weak_from_this());
    const std::int64_t next = backward ? index - 1 : index + 1;
    if (!options_.prefetch || next < 0 || next >= static_cast<std::int64_t>(order.size())) return;
    const auto unit = order[static_cast<std::size_t>(next)].lock();
    if (!unit || (backward && !unit->used_backward_)) return;
    if (unit->options_.prefetch && !unit->shares_memory()) unit->start_gather();
  }

  bool shares_memory() const {
    if (!mesh_->contains_me()) return true;
    return group_of(*mesh_, mesh_->my_group(dim_), mesh_->names().empty() ? "dp" : mesh_->names()[dim_])
        ->shares_memory();
  }

  const std::shared_ptr<const DeviceMesh> mesh_;
  const std::int64_t dim_;
  const FullyShardOptions options_;
  const std::set<const Unit*> inner_;
  const std::shared_ptr<const int> made_by_;  // the call of fully_shard: its units, one for each type, stay together
  const std::shared_ptr<Units> units_;
  std::vector<Member> members_;
  std::int64_t room_ = 0;        // elements of one rank's parts, the largest of any rank
  std::int64_t full_bytes_ = 0;  // of the gathered parameters on this rank
  at::Tensor flat_;              // this rank's parts
  std::shared_ptr<Execution> on_its_way_;
  bool gathered_ = false;
  bool shows_parts_ = false;  // some of its parameters, although it is gathered
  bool gathered_without_gradients_ = false;
  bool used_ = false;           // since it was gathered
  bool used_backward_ = false;  // ever
  std::uint64_t call_ = 0;      // the operator that it was used by last
};

// What goes into a layer has the type that its parameters are gathered in.
class CastInput final : public ParameterStyle {
 public:
  CastInput(c10::ScalarType type, std::shared_ptr<ParameterStyle> style) : type_(type), style_(std::move(style)) {}

  at::Tensor input(const at::Tensor& x) override {
    const at::Tensor moved = style_ ? style_->input(x) : x;
    const bool casts = moved.defined() && moved.is_floating_point() && moved.scalar_type() != type_;
    return casts ? moved.to(type_) : moved;
  }
  at::Tensor output(const at::Tensor& y) override { return style_ ? style_->output(y) : y; }

 private:
  const c10::ScalarType type_;
  const std::shared_ptr<ParameterStyle> style_;  // of parallelize_module, if any
};

void Units::release() {
  current = nullptr;
  for (const auto& weak : std::exchange(gathered, {})) {
    if (const auto unit = weak.lock()) unit->reshard();
  }
  for (const auto& weak : order) {
    if (const auto unit = weak.lock()) unit->forget_gather();
  }
}

Spec spec_for(const std::string& name, const at::Tensor& parameter, const MeshDim& at) {
  if (is_dtensor(parameter) && !(*payload_of(parameter).mesh == at.mesh)) {
    fail_invalid("fully_shard", {.what = "a parameter that is distributed over another mesh",
                                 .got = "\"" + name + "\" on " + payload_of(parameter).mesh->to_string(),
                                 .expected = at.mesh.to_string()});
  }
  if (parameter.dim() == 0) {
    fail_invalid("fully_shard", {.what = "a parameter without dims cannot be cut",
                                 .got = "\"" + name + "\", " + meta_of(parameter).to_string(),
                                 .advice = "a parameter of shape [1]"});
  }
  // In one buffer all lie by rows.
  const TensorMeta meta(Dims(parameter.sizes().begin(), parameter.sizes().end()), dtype_of(parameter.scalar_type()));
  const Placements whole(static_cast<std::size_t>(at.mesh.ndim()), Replicate());
  if (!is_dtensor(parameter)) return with_placement_on(Spec::make(meta, at.mesh, whole), at.dim, Shard(0));
  const Spec& now = payload_of(parameter).spec;
  const Spec by_rows = expect_spec(Spec::from_dims(meta, at.mesh, now.dims(), now.partials()), "fully_shard");
  return with_placement_on(by_rows, at.dim, Shard(0));
}

}  // namespace

void fully_shard(torch::nn::Module& module, const DeviceMesh& mesh, const FullyShardOptions& options) {
  const MeshDim at = mesh_dim_of(mesh, "fully_shard");
  std::vector<std::pair<at::Tensor, Spec>> mine;
  std::vector<std::pair<at::Tensor, Spec>> distributed;  // those of them that were before
  std::vector<ToDistribute> plain;
  std::set<const c10::TensorImpl*> seen;
  std::set<const Unit*> inner;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& parameter = item.value();
    if (!parameter.defined() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    if (is_dtensor(parameter) && payload_of(parameter).unit) {
      inner.insert(static_cast<const Unit*>(payload_of(parameter).unit.get()));
    } else {
      mine.emplace_back(parameter, spec_for(item.key(), parameter, at));
      if (is_dtensor(parameter)) {
        distributed.push_back(mine.back());
      } else {
        plain.push_back({item.key(), parameter, mine.back().second, /*keeps_order=*/true});
      }
    }
  }
  const Placements whole(static_cast<std::size_t>(at.mesh.ndim()), Replicate());
  for (const auto& item : module.named_buffers()) {
    if (!item.value().defined() || is_dtensor(item.value())) continue;
    if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    plain.push_back({item.key(), item.value(), Spec::make(dense_meta(item.value()), at.mesh, whole)});
  }
  distribute_all("fully_shard", plain, at.mesh, {.source = options.source, .equal_copies = options.equal_copies});
  for (const auto& [parameter, spec] : distributed) redistribute_in_place(parameter, spec);
  // Each unit has parameters of one type: they travel in one buffer.
  std::map<c10::ScalarType, std::vector<at::Tensor>> types;
  for (const auto& [parameter, spec] : mine) types[parameter.scalar_type()].push_back(parameter);
  const auto call = std::make_shared<const int>();
  for (const auto& [type, parameters] : types) {
    // Numbers and complex values would not be the same in a floating type.
    FullyShardOptions own = options;
    if (!c10::isFloatingType(type)) own.param_dtype = own.reduce_dtype = {};
    const auto units = units_of(at.mesh);
    const auto bucket = std::make_shared<GradientBucket>(
        parameters, units->buckets,
        BucketOptions{
            .scatter_dim = at.dim, .reduce_dtype = own.reduce_dtype, .after_backward = [weak = std::weak_ptr(units)] {
              if (const auto all = weak.lock()) all->release();
            }});
    units->buckets->push_back(bucket);
    for (const at::Tensor& parameter : parameters) {
      Payload& payload = payload_of(parameter);
      if (!payload.traits) payload.traits = std::make_shared<ParameterTraits>();
      payload.traits->bucket = bucket;
      payload.traits->home = payload.spec;
      if (own.param_dtype.value_or(type) == type) continue;
      payload.traits->style = std::make_shared<CastInput>(*own.param_dtype, payload.traits->style);
      if (payload.traits->lookup) {
        payload.traits->lookup = std::make_shared<CastInput>(*own.param_dtype, payload.traits->lookup);
      }
    }
    // Nothing to gather, and nothing to cast.
    if (at.mesh.size(at.dim) == 1 && own.param_dtype.value_or(type) == type) continue;
    std::make_shared<Unit>(parameters, at, own, inner, call)->adopt();
  }
}

GatheredBytes gathered_bytes(const DeviceMesh& mesh) { return units_of(mesh.root())->bytes; }

}  // namespace dtensor
