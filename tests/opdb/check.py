"""One operator of op_db on distributed tensors, beside the plain run. Runs in a process of its own (see run.py)."""

import contextlib
import itertools
import random
import re
import threading
import warnings
import zlib

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import dtensor
from exclusions import is_mixed, is_refusal
from layouts import distribute, effective, home, layouts_for, with_one_plain

TOLERANCE = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 2e-4, torch.complex64: 2e-4,
             torch.bfloat16: 6e-2, torch.float16: 1e-2}
OTHER_TYPES = (torch.int64, torch.bool, torch.complex128, torch.complex64)
MOST_ELEMENTS = 20000
LIMIT = 20  # seconds that ranks may differ in reaching the end of a case
WAIT = 10  # seconds of every wait for other ranks
LIMIT_OF_ERROR = 3  # the same, where one has failed: the others may be waiting for it
MOST_APART = 4  # cases that leave the ranks apart, until an operator is given up


def types_of(op, wanted=None):
    """float64 and float32; where it has neither, the first that it has. Or those that are wanted and that it has."""
    supported = op.supported_dtypes("cpu")
    if wanted:
        return [t for t in (getattr(torch, name) for name in wanted) if t in supported]
    wanted = [t for t in (torch.float64, torch.float32) if t in supported]
    return wanted or [t for t in OTHER_TYPES if t in supported][:1]


def _tensors_of(tree):
    return [x for x in tree_flatten(tree)[0] if isinstance(x, torch.Tensor)]


def _fits(sample):
    tensors = _tensors_of((sample.input, sample.args, sample.kwargs))
    return bool(tensors) and all(t.layout == torch.strided and t.numel() <= MOST_ELEMENTS for t in tensors)


def samples_of(op, dtype, limit, only=None, seed=None):
    """(index, sample) of at most `limit` samples, spread over all, always the same ones; or drawn from a seed."""
    name = f"{op.full_name} {dtype}" + (f" {seed}" if seed is not None else "")
    torch.manual_seed(zlib.crc32(name.encode()))
    grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    found = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), 300))
    usable = [(i, s) for i, s in enumerate(found) if _fits(s)]
    if only is not None:
        return [(i, s) for i, s in usable if i == only]
    if len(usable) <= limit:
        return usable
    if seed is not None:
        return sorted(random.Random(name).sample(usable, limit), key=lambda pair: pair[0])
    return [usable[i * len(usable) // limit] for i in range(limit)]


class Call:
    """A sample taken apart: its tensors, and how to put a call together again."""

    def __init__(self, op, sample):
        self.op = op
        self.finish = sample.output_process_fn_grad
        self.leaves, self.tree = tree_flatten((sample.input, sample.args, sample.kwargs))
        self.tensors = [x for x in self.leaves if isinstance(x, torch.Tensor)]

    def run(self, tensors, backward):
        """(outputs, inputs after the call, gradients): lists, gradients None where there is none."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(x, torch.Tensor) else x for x in self.leaves]
        first, args, kwargs = tree_unflatten(leaves, self.tree)
        result = self.op(first, *args, **kwargs)
        outputs = tree_flatten(result)[0]
        gradients = None
        if backward is not None:
            ends = [t for t in _tensors_of(self.finish(result)) if t.requires_grad]
            if ends:
                torch.autograd.backward(ends, [backward(i, t) for i, t in enumerate(ends)])
                gradients = [t.grad if t.is_leaf else None for t in tensors]
        return outputs, tensors, gradients


def _seed_gradient(i, shape, dtype):
    generator = torch.Generator().manual_seed(1000 + i)
    return torch.randn(tuple(shape), dtype=dtype, generator=generator)


def _fresh(tensor, value):
    return value.requires_grad_(True) if tensor.requires_grad else value


@contextlib.contextmanager
def _other_seeds():
    """Operators of op_db that draw random numbers set the seed first; here they get another one."""
    real = torch.manual_seed
    torch.manual_seed = lambda seed: real(seed + 1)
    try:
        yield
    finally:
        torch.manual_seed = real


class Plain:
    """What the operator does on plain tensors. Where a second run gives other values it draws random numbers: then only
    shapes and types can be compared."""

    def __init__(self, call):
        # A sum of an argument in float32 is as exact as that, whatever the result's type.
        self.tolerance = max((TOLERANCE.get(t.dtype, 0) for t in call.tensors), default=0)
        self._run(call)
        first = expected_values(self)
        with _other_seeds():
            again = Plain.__new__(Plain)
            again._run(call)
        self.random = any(_difference(a, b) for (_, a), (_, b) in zip(first, expected_values(again)))

    def _run(self, call):
        backward = lambda i, t: _seed_gradient(i, t.shape, t.dtype)  # noqa: E731
        before = [t.detach().clone() for t in call.tensors]
        self.outputs, after, self.gradients = call.run(
            [_fresh(t, t.detach().clone()) for t in call.tensors], backward)
        self.outputs = [o.detach() if isinstance(o, torch.Tensor) else o for o in self.outputs]
        self.after = [t.detach() for t in after]
        self.changed = [not _same_bits(a, b) for a, b in zip(self.after, before)]

    def looked_at(self, placements):
        """Arguments whose values are compared after the call: those that the plain run changed, and Partial ones, whose
        parts may change as long as their sum does not. All others must keep the bits of their parts."""
        return [i for i, p in enumerate(placements) if self.changed[i] or "P" in p]


def _same_bits(a, b):
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.numel() == 0:
        return True
    a, b = (torch.empty(x.numel(), dtype=x.dtype).copy_(x.detach().flatten()) for x in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _full(value):
    if not isinstance(value, torch.Tensor):
        return value
    whole = dtensor.full_tensor(value.detach()) if dtensor.is_dtensor(value) else value.detach()
    return whole.clone()


def run_rank(call, plain, mesh, layout):
    """A list of (name, value) that must be the same on all ranks and close to the plain run's."""
    placements = effective(layout, call.tensors)
    tensors = [_fresh(t, distribute(t, mesh, p)) for t, p in zip(call.tensors, placements)]
    local = lambda t: dtensor.to_local(t.detach()) if dtensor.is_dtensor(t) else t.detach()  # noqa: E731
    locals_before = [local(t).clone() for t in tensors]

    def backward(i, output):
        gradient = _seed_gradient(i, output.shape, output.dtype)
        if not dtensor.is_dtensor(output):
            return gradient
        return dtensor.distribute_tensor(gradient, mesh, home(dtensor.placements(output)))

    with dtensor.ImplicitReplication() if is_mixed(call.op.full_name) else contextlib.nullcontext():
        outputs, after, gradients = call.run(tensors, backward if plain.gradients is not None else None)
    values = [(f"result {i}", _full(o)) for i, o in enumerate(outputs)]
    for i, (tensor, old) in enumerate(zip(after, locals_before)):
        if i in plain.looked_at(placements):
            values.append((f"argument {i} afterwards", _full(tensor)))
        elif not _same_bits(local(tensor), old):
            raise AssertionError(f"argument {i} was changed; the plain run does not")
    for i, gradient in enumerate(gradients or []):
        values.append((f"gradient {i}", None if gradient is None else _full(gradient)))
    return values


def expected_values(plain, placements=()):
    values = [(f"result {i}", o) for i, o in enumerate(plain.outputs)]
    values += [(f"argument {i} afterwards", plain.after[i]) for i in plain.looked_at(placements)]
    values += [(f"gradient {i}", g) for i, g in enumerate(plain.gradients or [])]
    return values


def _difference(got, expected, random=False, least=0):
    """Why a value is not close to the plain run's; None when it is. Of random ones, only shape and type."""
    if random and isinstance(got, torch.Tensor) and isinstance(expected, torch.Tensor):
        same = (got.dtype, got.shape) == (expected.dtype, expected.shape)
        return None if same else f"{got.dtype} {list(got.shape)}, plain {expected.dtype} {list(expected.shape)}"
    if not isinstance(expected, torch.Tensor):
        same = got == expected or (got != got and expected != expected)
        close = isinstance(expected, float) and isinstance(got, float) and abs(got - expected) <= 1e-6 * abs(expected)
        return None if same or close else f"{got!r}, plain {expected!r}"
    if not isinstance(got, torch.Tensor):
        return f"{got!r}, plain a tensor"
    tolerance = TOLERANCE.get(expected.dtype, 0)
    tolerance = max(tolerance, least) if tolerance else 0
    try:
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True, check_stride=False)
    except AssertionError as error:
        return " ".join(str(error).split())[:300]
    return None


def judge(slots, plain, placements):
    """(kind, text) of what all ranks came to."""
    errors = [s[1] for s in slots if s[0] == "error"]
    if errors:
        if len(errors) < len(slots) or len({_without_rank(e) for e in errors}) > 1:
            texts = [s[1] if s[0] == "error" else "ok" for s in slots]
            return "ranks disagree", _joined(texts)
        return kind_of_error(errors[0]), errors[0]
    expected = expected_values(plain, placements)
    for rank, (_, values) in enumerate(slots):
        if [n for n, _ in values] != [n for n, _ in expected]:
            return "wrong value", f"rank {rank}: {[n for n, _ in values]}, plain {[n for n, _ in expected]}"
        for (name, got), (_, first), (_, want) in zip(values, slots[0][1], expected):
            difference = _difference(got, want, plain.random, plain.tolerance)
            if difference:
                return "wrong value", f"rank {rank}, {name}: {difference}"
            if isinstance(got, torch.Tensor) and isinstance(first, torch.Tensor) and not _same_bits(got, first):
                return "replicas differ", f"{name} of rank {rank} has other bits than that of rank 0"
    return "pass", "random" if plain.random else ""


def _joined(texts):
    """What ranks say, their own errors before those that follow from another rank's."""
    follows = lambda text: "left threads group" in text or text in ("ok", "did not come back")  # noqa: E731
    return " / ".join(sorted(dict.fromkeys(texts), key=follows))


def _without_rank(text):
    return re.sub(r"rank \d+", "rank N", text)


def kind_of_error(text):
    if is_refusal(text):
        return "refused"
    if "a random operator without a rule" in text or "without a rule whose result shares memory" in text:
        return "no rule"
    if "was changed; the plain run does not" in text:
        return "wrong value"
    return "error"


class Apart(Exception):
    """The ranks came to different ends; they start anew for the next case."""


class Round:
    """All layouts of one sample on one mesh: ranks start each case together and meet again at its end."""

    times_apart = 0

    def __init__(self, call, plain, mesh_shape, cases, report):
        self.call, self.plain, self.mesh_shape, self.cases, self.report = call, plain, mesh_shape, cases, report
        self.count = 1
        for size in mesh_shape:
            self.count *= size
        self.slots = [None] * self.count
        self.barrier = threading.Barrier(self.count)
        self.done = 0

    def run(self):
        """Starts the ranks anew where a case left them apart."""
        while self.done < len(self.cases) and self.times_apart < MOST_APART:
            self.apart = False
            self.barrier = threading.Barrier(self.count)
            try:
                dtensor.run_ranks(self.count, self._body, timeout=WAIT)
            except Apart:
                pass
            except Exception as error:  # noqa: BLE001: whatever it is, it is the case's result
                self._report_apart(error)

    def _report_apart(self, error):
        Round.times_apart += 1
        texts = [s[1] if s and s[0] == "error" else "ok" if s else "did not come back" for s in self.slots]
        text = _joined(texts) if len(set(texts)) > 1 else f"{type(error).__name__}: {error}"
        self.report(self.cases[self.done], "ranks disagree", text)
        self.done += 1

    def _body(self, world):
        mesh = dtensor.init_device_mesh(world, list(self.mesh_shape), [f"m{i}" for i in range(len(self.mesh_shape))])
        while self.done < len(self.cases):
            case = self.cases[self.done]
            if world.rank == 0:
                self.slots = [None] * self.count
                self.report(case, "start", "")
            self.barrier.wait(LIMIT)
            try:
                slot = ("ok", run_rank(self.call, self.plain, mesh, case["layout"]))
            except Exception as error:  # noqa: BLE001
                slot = ("error", " ".join(f"{type(error).__name__}: {error}".split()))
            self.slots[world.rank] = slot
            self.barrier.wait(LIMIT if slot[0] == "ok" else LIMIT_OF_ERROR)
            if world.rank == 0:
                kind, text = judge(self.slots, self.plain, effective(case["layout"], self.call.tensors))
                self.report(case, kind, text)
                self.apart = kind == "ranks disagree"
                self.done += 1
            self.barrier.wait(LIMIT)
            if self.apart:
                raise Apart


def check_op(op, options, report, skip):
    """Reports every case of an operator. options: samples, sample, dtype, meshes, layout. skip: keys of cases not to run."""
    fallbacks = set()

    def note(message, *_args, **_kwargs):
        found = re.search(r"dtensor: (\S+) has no rule", str(message))
        if found and found.group(1) not in fallbacks:
            fallbacks.add(found.group(1))
            report({}, "fallback", found.group(1))

    warnings.simplefilter("always")
    warnings.showwarning = note
    torch.set_num_threads(1)
    for dtype in types_of(op, options.dtype):
        limit = options.samples if dtype != torch.float32 or options.seed is not None else max(1, options.samples // 4)
        for index, sample in samples_of(op, dtype, limit, options.sample, options.seed):
            # In a sweep every other sample is not contiguous.
            other_order = options.noncontiguous or (options.part == "sweep" and (index + options.seed) % 2 == 1)
            try:
                call = Call(op, sample.noncontiguous() if other_order else sample)
                plain = Plain(call)
            except Exception as error:  # noqa: BLE001
                report({"dtype": str(dtype), "sample": index}, "plain run fails", str(error)[:200])
                continue
            for mesh_shape in options.meshes:
                cases = list(cases_of(op, call, dtype, index, mesh_shape, options, skip, other_order))
                Round(call, plain, mesh_shape, cases, report).run()


def cases_of(op, call, dtype, index, mesh_shape, options, skip, other_order):
    """Layouts that come to the same are tried once. Of `layouts` layouts, operators and samples begin at different ones."""
    most = options.layouts
    layouts = [options.layout] if options.layout else layouts_for(mesh_shape, options.partials)
    if options.seed is not None:
        random.Random(f"{op.full_name} {dtype} {index} {mesh_shape} {options.seed}").shuffle(layouts)
    elif most:
        first = zlib.crc32(f"{op.full_name} {index}".encode()) % len(layouts)
        layouts = layouts[first:] + layouts[:first]
    if options.plain and not options.layout:
        layouts = with_one_plain(layouts, call.tensors)
    seen = set()
    for layout in layouts:
        placements = tuple(effective(layout, call.tensors))
        if placements in seen:
            continue
        seen.add(placements)
        if most and len(seen) > most * (len(call.tensors) if options.plain else 1):
            return
        case = {"dtype": str(dtype)[6:], "sample": index, "mesh": "x".join(map(str, mesh_shape)), "layout": layout,
                "order": other_order, "seed": options.seed}
        if "/".join(map(str, case.values())) not in skip:
            yield case
