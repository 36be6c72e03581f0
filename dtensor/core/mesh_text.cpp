#include "dtensor/core/checked.h"
#include "dtensor/core/mesh.h"
#include "dtensor/core/mesh_impl.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

constexpr std::string_view kGrammar = "a mesh such as 2x3(dp,tp), dp=2,tp=3 or 3(tp):[1] of 6";

// `4`, or `(2*2)` for a dim that is not evenly spaced.
std::string dim_text(const Layout& dim, std::int64_t Layout::Mode::*field) {
  const std::string text =
      join(dim.modes(), "*", [&](const Layout::Mode& mode) { return std::to_string(mode.*field); });
  return dim.size() == 1 ? text : "(" + text + ")";
}

Dims parse_dim(Scanner& in) {
  if (!in.take("(")) return {in.size()};
  Dims sizes = {in.size()};
  while (in.take("*")) sizes.push_back(in.size());
  in.expect(")");
  return sizes;
}

// `[2:3=1]`: digit of size 2 and stride 3 held at 1.
InlineVec<FixedDigit, 4> parse_fixed(Scanner& in) {
  InlineVec<FixedDigit, 4> fixed;
  in.expect("[");
  do {
    FixedDigit digit{};
    digit.size = in.size();
    in.expect(":");
    digit.stride = in.size();
    in.expect("=");
    digit.value = in.size();
    if (digit.size < 1 || digit.stride < 1 || digit.value >= digit.size) in.fail_here("a digit that cannot be");
    Layout({digit.size}, {digit.stride});  // refuses what overflows
    fixed.push_back(digit);
  } while (in.take(","));
  in.expect("]");
  return fixed;
}

std::shared_ptr<const RankMap> parse_ranks(Scanner& in) {
  if (!in.take("[")) {
    const std::int64_t size = in.size();
    if (size < 1) in.fail_here("no ranks");
    return RankMap::consecutive(0, size);
  }
  const std::int64_t first = in.size();
  if (in.take("..")) {
    const std::int64_t last = in.size();
    if (last < first || last == kInt64Max) in.fail_here("an empty or endless range of ranks");
    in.expect("]");
    return RankMap::consecutive(first, last - first + 1);
  }
  std::vector<std::int64_t> ranks = {first};
  while (in.take(",")) ranks.push_back(in.size());
  in.expect("]");
  return RankMap::from_list(std::move(ranks), "parse_mesh");
}

// `dp=2,tp=3`
Mesh parse_assignments(Scanner& in) {
  Dims shape;
  std::vector<std::string> names;
  do {
    names.emplace_back(in.name());
    if (names.back().empty()) in.fail_here("missing name");
    in.expect("=");
    shape.push_back(in.size());
  } while (in.take(","));
  in.expect_end();
  return Mesh::make(shape, names);
}

}  // namespace

std::string Mesh::to_string() const {
  const MeshParts& parts = data_->parts();
  const auto print_dims = [&](std::int64_t Layout::Mode::*field, std::string_view separator) {
    return join(parts.dims, separator, [&](const Layout& dim) { return dim_text(dim, field); });
  };
  std::string text = print_dims(&Layout::Mode::size, "x");
  if (!parts.names.empty()) text += "(" + join(parts.names, ",", [](const auto& name) { return name; }) + ")";

  const Layout plain = Layout::row_major(shape());
  bool whole = size() == parts.map->size && parts.fixed.empty();
  for (std::size_t i = 0; i < parts.dims.size(); ++i) {
    whole = whole && parts.dims[i] == coalesce(Layout({plain.modes()[i]}));
  }
  if (!whole) {
    text += ":[" + print_dims(&Layout::Mode::stride, ",") + "]";
    if (!parts.fixed.empty()) {
      text += " at [" +
              join(parts.fixed, ",",
                   [](const FixedDigit& digit) {
                     return std::to_string(digit.size) + ":" + std::to_string(digit.stride) + "=" +
                            std::to_string(digit.value);
                   }) +
              "]";
    }
  }
  const RankMap& map = *parts.map;
  if (!map.list.empty()) {
    text += " of [" + join_numbers(map.list) + "]";
  } else if (map.first != 0) {
    text += " of [" + std::to_string(map.first) + ".." + std::to_string(map.max_rank()) + "]";
  } else if (!whole) {
    text += " of " + std::to_string(map.size);
  }
  return text;
}

Mesh Mesh::parse(std::string_view text) {
  Scanner in(text, "parse_mesh", kGrammar);
  if (Scanner look = in; !look.name().empty()) return parse_assignments(in);

  InlineVec<Dims, 4> sizes = {parse_dim(in)};
  while (in.take("x")) sizes.push_back(parse_dim(in));
  MeshParts parts;
  if (in.take("(")) {
    do {
      parts.names.emplace_back(in.name());
      if (parts.names.back().empty()) in.fail_here("missing name");
    } while (in.take(","));
    in.expect(")");
  }
  InlineVec<Dims, 4> strides;
  if (in.take(":")) {
    in.expect("[");
    do strides.push_back(parse_dim(in));
    while (in.take(","));
    in.expect("]");
    if (strides.size() != sizes.size()) in.fail_here("sizes and strides differ in number");
    if (in.take("at")) parts.fixed = parse_fixed(in);
  } else {
    Dims shape;
    for (const Dims& size : sizes) {
      if (size.size() != 1) in.fail_here("a dim of several parts needs strides");
      shape.push_back(size[0]);
    }
    const Mesh plain = make(shape, parts.names);
    for (const Layout& dim : plain.data_->parts().dims) strides.push_back({dim.modes()[0].stride});
    parts.map = plain.data_->parts().map;
  }
  const bool needs_ranks = parts.map == nullptr;
  if (in.take("of")) {
    const auto map = parse_ranks(in);
    if (parts.map && parts.map->size != map->size) in.fail_here("the rank list does not fill the mesh");
    parts.map = map;
  } else if (needs_ranks) {
    in.fail_here("missing 'of' and the ranks that the strides run over");
  }
  in.expect_end();
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i].size() != strides[i].size()) in.fail_here("sizes and strides differ in number");
    for (std::int64_t stride : strides[i]) {
      if (stride == 0) in.fail_here("a stride of 0");
    }
    parts.dims.push_back(Layout(sizes[i], strides[i]));
  }
  return from_parts(parts, "parse_mesh");
}

}  // namespace dtensor
