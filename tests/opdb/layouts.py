"""How a sample's tensors are laid out over a mesh, as text.

A layout such as 'P(sum),S(0)|R,S(0)' has one entry for each tensor of the call, in order; the last one holds for all
further tensors. Each entry is a list of placements, one for each mesh dim. A tensor that lacks the dim, or is of a type
that cannot be summed, is replicated there.
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


def layouts_for(mesh_shape):
    """Layouts for any mesh; those of another number of ranks are made from the placements of a mesh dim."""
    known = {len(shape): texts for shape, texts in LAYOUTS.items()}
    if len(mesh_shape) in known:
        return known[len(mesh_shape)]
    return [",".join(["R"] * (len(mesh_shape) - 1) + [p]) for p in ("R", "S(0)", "S(1)", "P(sum)")]


def _fits(placement, tensor):
    if placement == "R":
        return True
    if placement.startswith("P"):
        return tensor.dtype != torch.bool
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


def distribute(full, mesh, placements):
    """This rank's handle to a distributed copy of a plain tensor that all ranks have; nothing is sent."""
    entries = placements.split(",")
    value = full.detach().clone()
    if "P(sum)" not in entries:
        return dtensor.distribute_tensor(value, mesh, placements)
    dims = [m for m, p in enumerate(entries) if p == "P(sum)"]
    counts = [mesh.shape[m] for m in dims]
    index, total = 0, 1
    for m, count in zip(dims, counts):
        index = index * count + mesh.coordinate[m]
        total *= count
    part = _parts(value, total)[index]
    cut = ",".join("R" if p == "P(sum)" else p for p in entries)
    local = dtensor.to_local(dtensor.distribute_tensor(part, mesh, cut)).clone(memory_format=torch.contiguous_format)
    return dtensor.from_local(local, mesh, placements, shape=list(full.shape))


def home(placements):
    """Where a gradient lies whose tensor lies so; replicated where only factors can say it."""
    if re.search(r"[.\[]", placements):
        return ",".join("R" for _ in re.findall(r"[SRP](?:\([^)]*\))?(?:\[\d+\])?", placements))
    return re.sub(r"P\(\w+\)", "R", placements)
