#include "dtensor/core/mesh.h"

#include <algorithm>

#include "dtensor/core/checked.h"
#include "dtensor/core/coordinates.h"
#include "dtensor/core/hash.h"
#include "dtensor/core/mesh_impl.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

InternTable<MeshParts, MeshData>& mesh_table() {
  static auto* table = new InternTable<MeshParts, MeshData>(4096);  // never destroyed: handles may outlive main
  return *table;
}

std::size_t hash_text(std::string_view text) {
  Hasher hasher;
  for (char c : text) hasher.add(static_cast<unsigned char>(c));
  return hasher.value();
}

std::string name_list(const std::vector<std::string>& names) {
  return "(" + join(names, ",", [](const std::string& name) { return name; }) + ")";
}

void check_names(const std::vector<std::string>& names, std::size_t ndim, std::string_view where) {
  if (names.empty()) return;
  if (names.size() != ndim) {
    fail_invalid(where, {.what = "names and mesh dims differ in number",
                         .got = std::to_string(names.size()) + " names " + name_list(names) + " for " +
                                std::to_string(ndim) + " mesh dims",
                         .expected = "one name for each mesh dim, or none at all"});
  }
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (!is_name(names[i])) {
      fail_invalid(where, {.what = "a mesh dim's name cannot be printed",
                           .got = in_quotes(names[i]),
                           .expected = "a letter or '_', then letters, digits, '_', '.' or '-'"});
    }
    if (std::find(names.begin(), names.begin() + i, names[i]) != names.begin() + i) {
      fail_invalid(where, {.what = "two mesh dims have the same name",
                           .got = "'" + names[i] + "' twice in " + name_list(names),
                           .expected = "distinct names"});
    }
  }
}

void check_shape(const Dims& shape, std::string_view where) {
  const bool positive = std::all_of(shape.begin(), shape.end(), [](std::int64_t size) { return size >= 1; });
  if (shape.empty() || shape.size() > kMaxMeshDims || !positive || !checked_product(shape)) {
    fail_invalid(where, {.what = "a mesh cannot have this shape",
                         .got = shape.empty() ? "no dims" : join_numbers(shape, "x"),
                         .expected = "1 to " + std::to_string(kMaxMeshDims) +
                                     " dims of size 1 or more with a product below 2^63"});
  }
}

Layout all_dims(const MeshParts& parts) {
  Layout all;
  for (const Layout& dim : parts.dims) all = concat(all, dim);
  return all;
}

// Every digit of the positions that the mesh speaks of.
Layout all_digits(const MeshParts& parts) {
  Layout::Modes fixed;
  for (const FixedDigit& digit : parts.fixed) fixed.push_back({digit.size, digit.stride});
  return concat(all_dims(parts), Layout(std::move(fixed)));
}

InlineVec<FixedDigit, 4> coalesce_fixed(InlineVec<FixedDigit, 4> digits) {
  std::sort(digits.begin(), digits.end(), [](const auto& a, const auto& b) { return a.stride > b.stride; });
  InlineVec<FixedDigit, 4> result;
  for (const FixedDigit& digit : digits) {
    if (digit.size == 1) continue;
    if (!result.empty() && result.back().stride == digit.size * digit.stride) {
      FixedDigit& outer = result.back();
      outer = {outer.size * digit.size, digit.stride, outer.value * digit.size + digit.value};
    } else {
      result.push_back(digit);
    }
  }
  return result;
}

// Holds a dim at one index.
void fix_dim(MeshParts& parts, const Layout& dim, std::int64_t index) {
  const Dims digits = dim.coordinate(index);
  for (std::size_t i = 0; i < dim.size(); ++i) {
    parts.fixed.push_back({dim.modes()[i].size, dim.modes()[i].stride, digits[i]});
  }
}

}  // namespace

std::shared_ptr<const RankMap> RankMap::consecutive(std::int64_t first, std::int64_t size) {
  auto map = std::make_shared<RankMap>();
  map->size = size;
  map->first = first;
  Hasher hasher;
  hasher.add(static_cast<std::uint64_t>(size));
  hasher.add(static_cast<std::uint64_t>(first));
  map->hash = hasher.value();
  return map;
}

std::shared_ptr<const RankMap> RankMap::from_list(std::vector<std::int64_t> ranks, std::string_view where) {
  std::vector<std::pair<std::int64_t, std::int64_t>> by_rank;
  by_rank.reserve(ranks.size());
  bool in_order = true;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] < 0 || ranks[i] == kInt64Max) {
      fail_invalid(where, {.what = "a rank is out of range", .got = std::to_string(ranks[i]), .expected = "0 or more"});
    }
    in_order = in_order && ranks[i] == ranks[0] + static_cast<std::int64_t>(i);
    by_rank.emplace_back(ranks[i], static_cast<std::int64_t>(i));
  }
  if (in_order) return consecutive(ranks[0], static_cast<std::int64_t>(ranks.size()));
  std::sort(by_rank.begin(), by_rank.end());
  for (std::size_t i = 1; i < by_rank.size(); ++i) {
    if (by_rank[i].first == by_rank[i - 1].first) {
      fail_invalid(where, {.what = "ranks overlap",
                           .got = "rank " + std::to_string(by_rank[i].first) + " twice",
                           .expected = "distinct ranks"});
    }
  }
  auto map = std::make_shared<RankMap>();
  map->size = static_cast<std::int64_t>(ranks.size());
  map->list = std::move(ranks);
  map->by_rank = std::move(by_rank);
  Hasher hasher;
  hasher.add_all(map->list);
  map->hash = hasher.value();
  return map;
}

std::optional<std::int64_t> RankMap::position(std::int64_t rank) const {
  if (list.empty()) {
    if (rank < first || rank - first >= size) return std::nullopt;
    return rank - first;
  }
  const auto it = std::lower_bound(by_rank.begin(), by_rank.end(), std::pair<std::int64_t, std::int64_t>(rank, 0));
  if (it == by_rank.end() || it->first != rank) return std::nullopt;
  return it->second;
}

std::size_t MeshParts::hash() const {
  Hasher hasher;
  hasher.add(map->hash);
  for (const std::string& name : names) hasher.add(hash_text(name));
  for (const Layout& dim : dims) {
    for (const Layout::Mode& mode : dim.modes()) {
      hasher.add(static_cast<std::uint64_t>(mode.size));
      hasher.add(static_cast<std::uint64_t>(mode.stride));
    }
  }
  for (const FixedDigit& digit : fixed) {
    hasher.add(static_cast<std::uint64_t>(digit.stride));
    hasher.add(static_cast<std::uint64_t>(digit.value));
  }
  return hasher.value();
}

MeshData::MeshData(const MeshParts& parts) : parts_(parts) {
  for (const Layout& dim : parts_.dims) {
    shape_.push_back(dim.numel());
    size_ *= dim.numel();
  }
  for (const FixedDigit& digit : parts_.fixed) base_ += digit.value * digit.stride;
  rows_ = *complement(all_digits(parts_), parts_.map->size);
}

std::int64_t MeshData::position(const Dims& coordinate, std::int64_t row) const {
  std::int64_t result = base_ + rows_(row);
  for (std::size_t i = 0; i < coordinate.size(); ++i) result += parts_.dims[i](coordinate[i]);
  return result;
}

std::int64_t index_at(const Layout& dim, std::int64_t position) {
  std::int64_t index = 0;
  for (const Layout::Mode& mode : dim.modes()) index = index * mode.size + position / mode.stride % mode.size;
  return index;
}

Mesh Mesh::from_parts(const MeshParts& given, std::string_view where) {
  MeshParts parts = given;
  Dims shape;
  for (Layout& dim : parts.dims) {
    shape.push_back(dim.numel());
    dim = coalesce(dim);
  }
  check_shape(shape, where);
  check_names(parts.names, shape.size(), where);
  parts.fixed = coalesce_fixed(parts.fixed);
  const Layout all = all_digits(parts);
  if (const auto rows = complement(all, parts.map->size); !rows) {
    fail_invalid(where, {.what = all.injective() ? "the mesh dims do not tile the ranks" : "mesh dims overlap",
                         .got = rows.reason(),
                         .expected = "every rank in exactly one row"});
  }
  return Mesh(mesh_table().intern(parts, parts.hash()));
}

Mesh Mesh::make(const Dims& shape, const std::vector<std::string>& names) {
  check_shape(shape, "mesh");
  MeshParts parts{.map = RankMap::consecutive(0, *checked_product(shape)), .names = names, .dims = {}, .fixed = {}};
  const Layout rows = Layout::row_major(shape);
  for (const Layout::Mode& mode : rows.modes()) parts.dims.push_back(Layout(Layout::Modes{mode}));
  return from_parts(parts, "mesh");
}

Mesh Mesh::from_ranks(const Dims& shape, const std::vector<std::int64_t>& ranks,
                      const std::vector<std::string>& names) {
  check_shape(shape, "mesh");
  const std::int64_t size = *checked_product(shape);
  if (size != static_cast<std::int64_t>(ranks.size())) {
    fail_invalid("mesh", {.what = "the rank list does not fill the mesh",
                          .got = std::to_string(ranks.size()) + " ranks for " + join_numbers(shape, "x"),
                          .expected = std::to_string(size) + " ranks"});
  }
  MeshParts parts = make(shape, names).data_->parts();
  parts.map = RankMap::from_list(ranks, "mesh");
  return from_parts(parts, "mesh");
}

std::uint64_t Mesh::stable_hash() const noexcept { return data_->stable_hash(); }
std::int64_t Mesh::ndim() const noexcept { return static_cast<std::int64_t>(data_->shape().size()); }
std::int64_t Mesh::size() const noexcept { return data_->size(); }
std::int64_t Mesh::size(std::int64_t dim) const { return shape()[check_dim(dim, "mesh.size")]; }
std::int64_t Mesh::size(std::string_view name) const { return shape()[dim_index(name)]; }
const Dims& Mesh::shape() const noexcept { return data_->shape(); }
const std::vector<std::string>& Mesh::names() const noexcept { return data_->parts().names; }
std::int64_t Mesh::rows() const noexcept { return data_->rows().numel(); }
std::int64_t Mesh::max_rank() const noexcept { return data_->parts().map->max_rank(); }

std::int64_t Mesh::check_dim(std::int64_t dim, std::string_view where) const {
  const std::int64_t normal = dim < 0 ? dim + ndim() : dim;
  if (normal < 0 || normal >= ndim()) {
    fail_invalid(where, {.what = "no such mesh dim",
                         .got = "dim " + std::to_string(dim) + " of " + to_string(),
                         .expected = "0 to " + std::to_string(ndim() - 1)});
  }
  return normal;
}

std::int64_t Mesh::dim_index(std::string_view name) const {
  if (names().empty()) {
    fail_invalid("mesh", {.what = "the mesh dims have no names",
                          .got = in_quotes(name) + " of " + to_string(),
                          .expected = "a mesh with names",
                          .advice = "naming the dims when the mesh is made"});
  }
  const auto it = std::find(names().begin(), names().end(), name);
  if (it == names().end()) {
    fail_invalid("mesh", {.what = "no mesh dim of this name",
                          .got = in_quotes(name) + " of " + to_string(),
                          .expected = "one of " + name_list(names())});
  }
  return it - names().begin();
}

std::optional<Dims> Mesh::coordinate(std::int64_t rank) const {
  const MeshParts& parts = data_->parts();
  const auto position = parts.map->position(rank);
  if (!position) return std::nullopt;
  for (const FixedDigit& digit : parts.fixed) {
    if (*position / digit.stride % digit.size != digit.value) return std::nullopt;
  }
  Dims result;
  for (const Layout& dim : parts.dims) result.push_back(index_at(dim, *position));
  return result;
}

std::optional<std::int64_t> Mesh::row_of(std::int64_t rank) const {
  const auto where = coordinate(rank);
  if (!where) return std::nullopt;
  return index_at(data_->rows(), *data_->parts().map->position(rank));
}

std::int64_t Mesh::rank_at(const Dims& coordinate, std::int64_t row) const {
  bool fits = coordinate.size() == shape().size() && row >= 0 && row < rows();
  for (std::size_t i = 0; fits && i < coordinate.size(); ++i) fits = coordinate[i] >= 0 && coordinate[i] < shape()[i];
  if (!fits) {
    fail_invalid("mesh.rank_at",
                 {.what = "no such coordinate",
                  .got = "(" + join_numbers(coordinate) + "), row " + std::to_string(row) + " of " + to_string(),
                  .expected = "one index below its size for each mesh dim"});
  }
  return data_->parts().map->rank(data_->position(coordinate, row));
}

std::vector<std::int64_t> Mesh::ranks(std::int64_t row) const {
  const std::int64_t first = data_->parts().map->position(rank_at(Dims(shape().size()), row)).value();
  std::vector<std::int64_t> result = all_dims(data_->parts()).offsets();
  for (std::int64_t& entry : result) entry = data_->parts().map->rank(first + entry);
  return result;
}

std::vector<std::int64_t> Mesh::group(std::int64_t dim, std::int64_t rank) const {
  const std::int64_t d = check_dim(dim, "mesh.group");
  auto where = coordinate(rank);
  if (!where) {
    fail_invalid("mesh.group", {.what = "the rank is not in this mesh",
                                .got = "rank " + std::to_string(rank) + " and " + to_string()});
  }
  const std::int64_t row = *row_of(rank);
  std::vector<std::int64_t> result;
  for ((*where)[d] = 0; (*where)[d] < shape()[d]; ++(*where)[d]) result.push_back(rank_at(*where, row));
  return result;
}

std::vector<std::vector<std::int64_t>> Mesh::groups(std::int64_t dim) const {
  const std::int64_t d = check_dim(dim, "mesh.groups");
  std::vector<std::int64_t> others;
  for (std::int64_t i = 0; i < ndim(); ++i) {
    if (i != d) others.push_back(i);
  }
  std::vector<std::vector<std::int64_t>> result;
  for (std::int64_t row = 0; row < rows(); ++row) {
    Dims where(shape().size());
    do result.push_back(group(d, rank_at(where, row)));
    while (next_coordinate(where, shape(), others));
  }
  return result;
}

Mesh Mesh::take_dims(const std::vector<std::int64_t>& dims) const {
  MeshParts parts{.map = data_->parts().map, .names = {}, .dims = {}, .fixed = data_->parts().fixed};
  for (std::int64_t dim : dims) {
    parts.dims.push_back(data_->parts().dims[dim]);
    if (!names().empty()) parts.names.push_back(names()[dim]);
  }
  return from_parts(parts, "mesh.slice");
}

Mesh Mesh::slice(const std::vector<std::string>& chosen) const {
  if (chosen.empty()) fail_invalid("mesh.slice", {.what = "no mesh dim was named", .expected = "one name or more"});
  std::vector<std::int64_t> dims;
  for (const std::string& name : chosen) {
    const std::int64_t dim = dim_index(name);
    if (!dims.empty() && dim == dims.back()) {
      fail_invalid("mesh.slice", {.what = "a mesh dim was named twice", .got = name_list(chosen)});
    }
    if (!dims.empty() && dim < dims.back()) {
      fail_invalid("mesh.slice", {.what = "names out of order",
                                  .got = name_list(chosen) + " of " + to_string(),
                                  .expected = "the order of the mesh, " + name_list(names())});
    }
    dims.push_back(dim);
  }
  return take_dims(dims);
}

Mesh Mesh::operator[](std::string_view name) const { return slice({std::string(name)}); }

Mesh Mesh::flatten(const std::vector<std::string>& chosen, std::string_view name) const {
  const Mesh part = slice(chosen);
  const std::string joined = join(chosen, "_", [](const std::string& text) { return text; });
  const std::string result = name.empty() ? joined : std::string(name);
  if (part.ndim() == 1 && result == chosen[0]) return part;
  if (std::find(names().begin(), names().end(), result) != names().end()) {
    fail_invalid("mesh.flatten", {.what = "a mesh dim has this name already",
                                  .got = in_quotes(result) + " in " + to_string(),
                                  .expected = "a new name"});
  }
  MeshParts parts{.map = data_->parts().map, .names = {result}, .dims = {}, .fixed = data_->parts().fixed};
  parts.dims.push_back(all_dims(part.data_->parts()));
  return from_parts(parts, "mesh.flatten");
}

Mesh Mesh::flatten_all(std::string_view name) const {
  if (!names().empty()) return flatten(names(), name);
  MeshParts parts = data_->parts();
  parts.dims = {all_dims(parts)};
  if (!name.empty()) parts.names = {std::string(name)};
  return from_parts(parts, "mesh.flatten");
}

Mesh Mesh::unflatten(std::string_view dim, const Dims& sizes, const std::vector<std::string>& new_names) const {
  return unflatten(dim_index(dim), sizes, new_names);
}

Mesh Mesh::unflatten(std::int64_t dim, const Dims& sizes, const std::vector<std::string>& new_names) const {
  const std::int64_t d = check_dim(dim, "mesh.unflatten");
  check_shape(sizes, "mesh.unflatten");
  if (*checked_product(sizes) != shape()[d]) {
    fail_invalid("mesh.unflatten",
                 {.what = "the sizes do not multiply to the mesh dim",
                  .got = join_numbers(sizes, "x") + " for a dim of size " + std::to_string(shape()[d]),
                  .expected = "a product of " + std::to_string(shape()[d])});
  }
  if (new_names.size() != (names().empty() ? 0 : sizes.size())) {
    fail_invalid("mesh.unflatten",
                 {.what = "names and sizes differ in number",
                  .got = std::to_string(new_names.size()) + " names for " + std::to_string(sizes.size()) + " sizes",
                  .expected = names().empty() ? "no names: the mesh has none" : "one name each"});
  }
  const MeshParts& old = data_->parts();
  const Layout split = Layout::row_major(sizes);
  if (const auto whole = compose(old.dims[d], split); !whole) {
    fail_unsupported("mesh.unflatten", {.what = "the mesh dim does not split at these sizes", .got = whole.reason()});
  }
  MeshParts parts{.map = old.map, .names = {}, .dims = {}, .fixed = old.fixed};
  for (std::int64_t i = 0; i < ndim(); ++i) {
    if (i != d) {
      parts.dims.push_back(old.dims[i]);
      if (!names().empty()) parts.names.push_back(names()[i]);
      continue;
    }
    for (const Layout::Mode& mode : split.modes()) parts.dims.push_back(*compose(old.dims[d], Layout({mode})));
    parts.names.insert(parts.names.end(), new_names.begin(), new_names.end());
  }
  return from_parts(parts, "mesh.unflatten");
}

Mesh Mesh::concatenate(const std::vector<Mesh>& meshes) {
  if (meshes.empty()) fail_invalid("mesh.concatenate", {.what = "no mesh was given", .expected = "one mesh or more"});
  const MeshParts& first = meshes[0].data_->parts();
  MeshParts parts{.map = first.map, .names = {}, .dims = {}, .fixed = first.fixed};
  for (const Mesh& mesh : meshes) {
    const MeshParts& more = mesh.data_->parts();
    if (!(*more.map == *first.map && more.fixed == first.fixed)) {
      fail_invalid("mesh.concatenate", {.what = "the meshes are not parts of one mesh",
                                        .got = meshes[0].to_string() + " and " + mesh.to_string(),
                                        .expected = "sub-meshes of one mesh"});
    }
    parts.dims.append(more.dims.begin(), more.dims.end());
    parts.names.insert(parts.names.end(), more.names.begin(), more.names.end());
  }
  return from_parts(parts, "mesh.concatenate");
}

Mesh Mesh::select(std::string_view dim, std::int64_t index) const {
  const std::int64_t d = dim_index(dim);
  if (index < 0 || index >= shape()[d]) {
    fail_invalid("mesh.select", {.what = "the index is out of range",
                                 .got = std::to_string(index) + " on " + in_quotes(dim),
                                 .expected = "0 to " + std::to_string(shape()[d] - 1)});
  }
  if (ndim() == 1) {
    fail_unsupported("mesh.select", {.what = "a mesh without dims would be left",
                                     .got = in_quotes(dim) + " of " + to_string(),
                                     .expected = "a mesh of two dims or more"});
  }
  MeshParts parts = data_->parts();
  fix_dim(parts, parts.dims[d], index);
  parts.dims.erase(static_cast<std::size_t>(d));
  parts.names.erase(parts.names.begin() + d);
  return from_parts(parts, "mesh.select");
}

std::vector<Mesh> Mesh::submeshes(std::string_view name) const {
  const Mesh family = operator[](name);
  std::vector<Mesh> result;
  for (std::int64_t row = 0; row < family.rows(); ++row) {
    MeshParts parts = family.data_->parts();
    fix_dim(parts, family.data_->rows(), row);
    result.push_back(from_parts(parts, "mesh.submeshes"));
  }
  return result;
}

InternStats mesh_intern_stats() { return mesh_table().stats(); }

std::string_view device_name(DeviceKind device) { return device == DeviceKind::kCpu ? "cpu" : "cuda"; }

DeviceMesh::DeviceMesh(Mesh mesh, DeviceKind device, std::int64_t rank, std::int64_t world_size,
                       std::shared_ptr<RankContext> context)
    : Mesh(std::move(mesh)), device_(device), rank_(rank), world_size_(world_size), context_(std::move(context)) {
  if (rank < 0 || rank >= world_size) {
    fail_invalid("device_mesh", {.what = "my rank is not in the world",
                                 .got = "rank " + std::to_string(rank) + " of " + std::to_string(world_size),
                                 .expected = "0 to the world's size minus 1"});
  }
  if (max_rank() >= world_size) {
    fail_invalid("device_mesh", {.what = "the mesh is larger than the world",
                                 .got = to_string() + " in a world of " + std::to_string(world_size),
                                 .expected = "ranks below " + std::to_string(world_size),
                                 .advice = "a smaller mesh, or starting " + std::to_string(max_rank() + 1) + " ranks"});
  }
  coordinate_ = Mesh::coordinate(rank);
}

DeviceMesh DeviceMesh::with(Mesh mesh) const {
  DeviceMesh result(std::move(mesh), device_, rank_, world_size_, context_);
  result.root_ = root_ ? root_ : std::make_shared<const DeviceMesh>(*this);
  return result;
}

std::int64_t DeviceMesh::local_rank() const {
  if (ndim() != 1) {
    fail_invalid(
        "mesh.local_rank",
        {.what = "which mesh dim?", .got = to_string(), .expected = "a dim or a name, as the mesh has several dims"});
  }
  return local_rank(0);
}

std::int64_t DeviceMesh::local_rank(std::int64_t dim) const {
  const std::int64_t normal = dim < 0 ? dim + ndim() : dim;
  size(dim);  // refuses a dim that is not there
  if (!coordinate_) {
    fail_invalid("mesh.local_rank", {.what = "this rank is not in the mesh",
                                     .got = "rank " + std::to_string(rank_) + " and " + to_string(),
                                     .advice = "asking contains_me() first"});
  }
  return (*coordinate_)[normal];
}

std::int64_t DeviceMesh::local_rank(std::string_view name) const { return local_rank(dim_index(name)); }

std::vector<std::int64_t> DeviceMesh::my_ranks() const {
  const auto row = row_of(rank_);
  return row ? ranks(*row) : std::vector<std::int64_t>{};
}

}  // namespace dtensor
