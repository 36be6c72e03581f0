"""How a sample's tensors are laid out over a mesh, as text.

A layout such as 'P(sum),S(0)|R,S(0)' has one entry for each tensor of the call, in order; the last one holds for all
further tensors. Each entry is a list of placements, one for each mesh dim. A tensor that lacks the dim, or is of a type
that cannot be reduced so, is replicated there. An entry N leaves the tensor plain.
"""

import re

import torch

import dtensor

LAYOUTS = {
    (4,): [
        "R",
        "S(0)",
        "S(1)",
        "S(2)",
        "S(-1)",
        "P(sum)|R",
        "P(sum)|P(sum)",
        "R|P(sum)",
        "S(0)|R",
        "R|S(0)",
        "S(1)|S(0)",
        "S(0)|P(sum)",
        "S(-1)|R|S(0)",
    ],
    (2, 2): [
        "S(0),S(1)",
        "S(0),S(0)",
        "S(1),S(0)",
        "R,S(0)",
        "S(-1),R",
        "P(sum),S(0)|R,S(0)",
        "P(sum),P(sum)|R,R",
        "S(0),R|R,S(0)",
        "S(1),P(sum)|P(sum),S(0)|S(-1),R",
    ],
}


def layouts_for(mesh_shape, partials=("sum",)):
    """Layouts for any mesh, with these kinds of Partial; meshes of more dims get those of two with a dim more."""
    known = {len(shape): texts for shape, texts in LAYOUTS.items()}
    if len(mesh_shape) in known:
        texts = known[len(mesh_shape)]
    else:
        more = ["R"] * (len(mesh_shape) - 2)
        texts = []
        for k, text in enumerate(known[2]):
            extra = [("R", "S(0)", "S(1)", "P(sum)")[(k + i) % 4] for i in range(len(more))]
            texts.append("|".join(",".join([entry] + _compatible(entry, extra)) for entry in text.split("|")))
    result = []
    for kind in partials:
        result += [text.replace("P(sum)", f"P({kind})") for text in texts]
    return list(dict.fromkeys(result))


def _compatible(entry, extra):
    """Further placements for an entry: one kind of Partial only."""
    return [p if not p.startswith("P") or "P(sum)" in entry or "P" not in entry else "R" for p in extra]


def with_one_plain(layouts, tensors):
    """Each layout with one tensor after the other left plain; another one stays distributed."""
    if len(tensors) < 2:
        return []
    return ["|".join("N" if j == i else p for j, p in enumerate(effective(layout, tensors)))
            for layout in layouts for i in range(len(tensors))]


def _fits(placement, tensor):
    if placement in ("R", "N"):
        return True
    if placement.startswith("P"):
        kind = placement[2:-1]
        if tensor.dtype == torch.bool or (kind in ("max", "min") and tensor.dtype.is_complex):
            return False
        return kind != "avg" or tensor.dtype.is_floating_point or tensor.dtype.is_complex
    dim = int(re.match(r"S\((-?\d+)", placement).group(1))
    return -tensor.dim() <= dim < tensor.dim()


def _positive(placement, tensor):
    """S(-1) as S(1), so that layouts that are the same are seen to be."""
    dim = re.match(r"S\((-\d+)\)", placement)
    return f"S({int(dim.group(1)) + tensor.dim()})" if dim else placement


def effective(layout, tensors):
    """The placements of each tensor under a layout."""
    entries = layout.split("|")
    result = []
    for i, tensor in enumerate(tensors):
        entry = entries[min(i, len(entries) - 1)].split(",")
        fitting = [p if _fits(p, tensor) else "R" for p in entry]
        result.append(",".join(_positive(p, tensor) for p in fitting))
    return result


def _parts(value, count):
    """Summands of a tensor that add up to it exactly, in order: none is zero, no two are alike. [2v, -v, -v, v, -v, v]"""
    if value.dtype.is_floating_point or value.dtype.is_complex:
        plain = torch.isfinite(value * 2) & (value != 0)
        none = torch.full_like(value, -0.0)
        double, minus = torch.where(plain, value * 2, value), torch.where(plain, -value, none)
        same = torch.where(plain, value, none)
    else:
        double, minus, same = value * 2, -value, value
    return ([double, minus] + [minus if i % 2 == 0 else same for i in range(count - 2)]) if count > 1 else [value]


def _extremes(value, count, sign):
    """Parts whose largest (sign 1) or smallest (sign -1) is the value: each rank holds it at some places."""
    places = torch.arange(value.numel()).view(value.shape) % count
    if value.dtype.is_floating_point:
        less = torch.where(torch.isfinite(value), value - sign * (value.abs() + 1), value)
    else:
        less = value - sign
    return [torch.where(places == k, value, less) for k in range(count)]


def distribute(full, mesh, placements):
    """This rank's handle to a distributed copy of a plain tensor that all ranks have; nothing is sent."""
    entries = placements.split(",")
    value = full.detach().clone()
    if entries[0] == "N":
        return value
    kinds = {p for p in entries if p.startswith("P")}
    if not kinds:
        return dtensor.distribute_tensor(value, mesh, placements)
    kind = kinds.pop()[2:-1]
    dims = [m for m, p in enumerate(entries) if p.startswith("P")]
    counts = [mesh.shape[m] for m in dims]
    index, total = 0, 1
    for m, count in zip(dims, counts):
        index = index * count + mesh.coordinate[m]
        total *= count
    if kind in ("max", "min"):
        parts = _extremes(value, total, 1 if kind == "max" else -1)
    else:
        parts = [part * total if kind == "avg" else part for part in _parts(value, total)]
    # distribute_tensor takes one rank's values: every rank distributes every part, and keeps its own.
    cut = ",".join("R" if p.startswith("P") else p for p in entries)
    local = [dtensor.to_local(dtensor.distribute_tensor(part, mesh, cut)) for part in parts][index]
    local = local.clone(memory_format=torch.contiguous_format)
    return dtensor.from_local(local, mesh, placements, shape=list(full.shape))


def home(placements):
    """Where a gradient lies whose tensor lies so; replicated where only factors can say it."""
    if re.search(r"[.\[]", placements):
        return ",".join("R" for _ in re.findall(r"[SRP](?:\([^)]*\))?(?:\[\d+\])?", placements))
    return re.sub(r"P\(\w+\)", "R", placements)
