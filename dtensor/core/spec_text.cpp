#include <algorithm>

#include "dtensor/core/placement_impl.h"
#include "dtensor/core/spec.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

constexpr std::string_view kGrammar = "a spec such as f32[8,6] @ 2x2(dp,tp) : S(0),R";

// Cuts in mesh order, none virtual: nothing to say beyond S(d).
bool in_plain_order(const Factor& factor) {
  return !has_virtual(factor) && std::is_sorted(factor.cuts.begin(), factor.cuts.end(),
                                                [](const Cut& a, const Cut& b) { return a.mesh_dim < b.mesh_dim; });
}

// `5`, or `9~2@0`: cut virtually into 2, before all other cuts.
std::string factor_text(const Factor& factor) {
  std::string text = std::to_string(factor.size);
  for (std::size_t i = 0; i < factor.cuts.size(); ++i) {
    if (factor.cuts[i].is_virtual()) text += "~" + std::to_string(factor.cuts[i].count) + "@" + std::to_string(i);
  }
  return text;
}

std::string dim_text(const DimLayout& dim) {
  if (dim.size() == 1) return factor_text(dim[0]);
  return "(" + join(dim, "*", factor_text) + ")";
}

// A factor as read: its virtual cuts by position, its real ones by position where one was given.
struct FactorDraft {
  std::int64_t size = 0;
  std::vector<std::pair<std::int64_t, Cut>> placed;
  PublicCuts plain;
};

FactorDraft parse_factor(Scanner& in) {
  FactorDraft result;
  result.size = in.size();
  while (in.take("~")) {
    Cut cut;
    cut.count = in.size();
    if (cut.count < 1 || cut.count > std::max<std::int64_t>(result.size, 1))
      in.fail_here("a virtual cut without pieces");
    in.expect("@");
    result.placed.emplace_back(in.size(), cut);
  }
  return result;
}

std::vector<FactorDraft> parse_dim(Scanner& in) {
  std::vector<FactorDraft> result;
  if (!in.take("(")) {
    result.push_back(parse_factor(in));
    return result;
  }
  do result.push_back(parse_factor(in));
  while (in.take("*"));
  in.expect(")");
  return result;
}

// The factor with its cuts in order. Positions must be 0, 1, 2, … once any is given.
OrReason<DimLayout> finish_factor(FactorDraft& draft) {
  if (draft.placed.empty()) {
    auto dim = read_public(draft.size, draft.plain);
    return dim;
  }
  if (!draft.plain.empty()) return Reason{"some cuts of a factor have a position and some have none"};
  std::sort(draft.placed.begin(), draft.placed.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  Factor factor{draft.size, {}};
  for (std::size_t i = 0; i < draft.placed.size(); ++i) {
    if (draft.placed[i].first != static_cast<std::int64_t>(i))
      return Reason{"the positions of a factor's cuts have gaps"};
    factor.cuts.push_back(draft.placed[i].second);
  }
  return DimLayout{factor};
}

}  // namespace

std::string Spec::to_string() const {
  std::string text = std::string(dtensor::to_string(meta().dtype())) + "[" + join(dims(), ",", dim_text) + "]";
  if (!(meta().stride() == row_major_stride(meta().shape()))) text += "{" + join_numbers(meta().stride()) + "}";
  text += " @ " + mesh().to_string() + " : ";
  std::vector<std::string> entries(static_cast<std::size_t>(mesh().ndim()), "R");
  for (std::size_t m = 0; m < entries.size(); ++m) {
    if (partials()[m]) entries[m] = Partial(*partials()[m]).to_string();
  }
  for (std::size_t d = 0; d < dims().size(); ++d) {
    for (std::size_t f = 0; f < dims()[d].size(); ++f) {
      const Factor& factor = dims()[d][f];
      for (std::size_t i = 0; i < factor.cuts.size(); ++i) {
        if (factor.cuts[i].is_virtual()) continue;
        std::string& entry = entries[factor.cuts[i].mesh_dim];
        entry = "S(" + std::to_string(d) + (dims()[d].size() > 1 ? "." + std::to_string(f) : "") + ")";
        if (!in_plain_order(factor)) entry += "[" + std::to_string(i) + "]";
      }
    }
  }
  return text + join(entries, ",", [](const std::string& entry) { return entry; });
}

Spec Spec::parse(std::string_view text) {
  // The mesh has a parser of its own: find its text between '@' (outside the brackets) and the last " : ".
  const std::size_t close = text.find(']');
  const std::size_t at = close == std::string_view::npos ? close : text.find('@', close);
  const std::size_t colon = text.rfind(" : ");
  if (at == std::string_view::npos || colon == std::string_view::npos || colon < at) {
    Scanner(text, "parse_spec", kGrammar).fail_here("not a spec");
  }
  const Mesh mesh = Mesh::parse(text.substr(at + 1, colon - at - 1));

  Scanner in(text.substr(0, at), "parse_spec", kGrammar);
  const std::string_view name = in.name();
  const auto dtype = dtype_from(name);
  if (!dtype) in.fail_here("unknown type " + in_quotes(name));
  std::vector<std::vector<FactorDraft>> drafts;
  in.expect("[");
  if (!in.take("]")) {
    do drafts.push_back(parse_dim(in));
    while (in.take(","));
    in.expect("]");
  }
  Dims shape;
  for (const auto& dim : drafts) {
    InlineVec<std::int64_t, 4> sizes;
    for (const FactorDraft& factor : dim) sizes.push_back(factor.size);
    const auto size = checked_product(sizes);
    if (!size) in.fail_here("sizes that overflow");
    shape.push_back(*size);
  }
  Dims stride;
  const bool strided = in.take("{");
  if (strided && !in.take("}")) {
    do stride.push_back(in.size());
    while (in.take(","));
    in.expect("}");
  }
  in.expect_end();
  const TensorMeta meta = strided ? TensorMeta(shape, stride, *dtype) : TensorMeta(shape, *dtype);

  Scanner places(text.substr(colon + 3), "parse_spec", kGrammar);
  Partials partials;
  do {
    const PlacementText entry = parse_placement(places);
    const auto m = static_cast<std::int32_t>(partials.size());
    if (m >= mesh.ndim()) places.fail_here("more placements than the mesh has dims");
    partials.push_back(entry.placement.is_partial() ? std::optional(entry.placement.op()) : std::nullopt);
    if (!entry.placement.is_shard()) continue;
    const std::int64_t dim = entry.placement.dim() < 0 ? entry.placement.dim() + meta.ndim() : entry.placement.dim();
    if (dim < 0 || dim >= meta.ndim()) places.fail_here("no such tensor dim");
    const std::int64_t f = entry.factor.value_or(0);
    if (f >= static_cast<std::int64_t>(drafts[dim].size()) || (!entry.factor && drafts[dim].size() > 1)) {
      places.fail_here("no such factor");
    }
    FactorDraft& draft = drafts[dim][f];
    if (entry.position) {
      if (entry.placement.split_factor() != 1) places.fail_here("an order and a strided shard together");
      draft.placed.emplace_back(*entry.position, Cut{m, mesh.shape()[m]});
    } else {
      draft.plain.push_back({m, mesh.shape()[m], entry.placement.split_factor()});
    }
  } while (places.take(","));
  places.expect_end();

  DimLayouts dims;
  for (auto& dim : drafts) {
    DimLayout layout;
    for (FactorDraft& draft : dim) {
      const auto factors = finish_factor(draft);
      if (!factors) fail_unsupported("parse_spec", {.what = factors.reason(), .got = in_quotes(text)});
      layout.append(factors->begin(), factors->end());
    }
    dims.push_back(std::move(layout));
  }
  return expect_spec(from_dims(meta, mesh, dims, partials), "parse_spec");
}

}  // namespace dtensor
