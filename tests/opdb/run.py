"""PyTorch's operator database on distributed tensors: every operator, its samples, laid out in many ways over thread
ranks, forward and backward, beside the plain run.

    python run.py                                  all of it; the summary goes to opdb.json
    python run.py --op add --op 'linalg.*'         some operators
    python run.py --op mm --dtype float64 --sample 2 --mesh 2x2 --layout 'S(0),R|R,S(0)'      one case
    python run.py --seed 7 --dtype bfloat16 --dtype int64 --mesh 3 --mesh 2x3 --noncontiguous --partial avg --layouts 4
                                                   samples and layouts drawn from a seed, other types, orders and Partials
    python run.py --plain --layouts 2              one operand at a time is left plain
    python run.py --part ci                        the fixed part that the tests run
    python run.py --part sweep --seed 7            every mesh, type, order and Partial in turn, one sample of each operator

Each operator runs in a process of its own, so that a hang or a crash is one case's result. Fails if anything does.
"""

import argparse
import fnmatch
import json
import os
import random
import selectors
import signal
import sys
import time
import traceback

import torch
from torch.testing._internal.common_methods_invocations import op_db

import check
import exclusions
from kinds import EXCUSED, KINDS

SILENCE = 60  # seconds without a word from an operator's process, until it counts as hanging
MOST_RESTARTS = 4


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", help="a name with its variant, such as std.unbiased; may have *")
    parser.add_argument("--dtype", action="append", help="float64, float32, bfloat16, …; default: float64 and float32")
    parser.add_argument("--seed", type=int, help="draw samples, their values and layouts from it; default: fixed ones")
    parser.add_argument("--noncontiguous", action="store_true", help="samples that are not contiguous in memory")
    parser.add_argument("--partial", action="append", choices=["sum", "avg", "max", "min"], help="kinds of Partial; default: sum")
    parser.add_argument("--plain", action="store_true", help="leave one operand at a time plain")
    parser.add_argument("--seconds", type=float, help="begin no further operator after so long")
    parser.add_argument("--sample", type=int, help="the index of one sample")
    parser.add_argument("--samples", type=int, default=6, help="most samples of an operator (a fourth for float32)")
    parser.add_argument("--mesh", action="append", help="4, 2x2, …; default: 4 and 2x2")
    parser.add_argument("--layout", "--placements", help="one layout, such as 'P(sum)|R' (see layouts.py)")
    parser.add_argument("--layouts", type=int, default=0, help="most layouts of a sample on a mesh; 0: all")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--part", choices=["ci", "sweep"], help="a fixed part, or one of all combinations")
    parser.add_argument("--out", default="opdb.json")
    parser.add_argument("--here", action="store_true", help="no process of its own: for a debugger; takes one --op")
    options = parser.parse_args()
    options.meshes = [tuple(int(n) for n in text.split("x")) for text in options.mesh or ["4", "2x2"]]
    options.partials = options.partial or ["sum"]
    if options.part == "ci":
        options.samples, options.layouts = 2, 3  # of every operator
    if options.part == "sweep":
        options.seed = options.seed if options.seed is not None else int(time.time())
        options.samples, options.layouts = min(options.samples, 2), options.layouts or 3
        options.meshes = [(3,), (5,), (2, 3), (2, 2, 2)]
        options.dtype = ["float64", "float32", "bfloat16", "complex64", "int64"]
        options.partials = ["sum", "avg", "max", "min"]
    if options.seed is not None:
        print(f"seed {options.seed}")
    return options


def key_of(case):
    return "/".join(map(str, case.values()))


class Job:
    """One operator: its process, and what it has said."""

    def __init__(self, op, options):
        self.op, self.options = op, options
        self.results, self.fallbacks, self.unfit = [], set(), []
        self.skip, self.restarts = set(), 0
        self.start()

    def start(self):
        self.current, self.buffer, self.heard = None, b"", time.monotonic()
        self.reader, writer = os.pipe()
        sys.stdout.flush()
        check.Round.times_apart = 0
        self.pid = os.fork()
        if self.pid:
            os.close(writer)
            return
        code = 1
        try:
            os.close(self.reader)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)

            def report(case, kind, text):
                os.write(writer, (json.dumps([case, kind, text[:600]]) + "\n").encode())

            try:
                check.check_op(self.op, self.options, report, self.skip)
                report({}, "end", "")
                code = 0
            except Exception:  # noqa: BLE001
                report({}, "harness", " ".join(traceback.format_exc().split())[-500:])
        finally:
            os._exit(code)

    def hear(self):
        """False when the process has closed its end."""
        data = os.read(self.reader, 1 << 16)
        self.heard = time.monotonic()
        self.buffer += data
        *lines, self.buffer = self.buffer.split(b"\n")
        for line in lines:
            case, kind, text = json.loads(line)
            if kind == "start":
                self.current = case
            elif kind == "fallback":
                self.fallbacks.add(text)
            elif kind == "plain run fails":
                self.unfit.append(text)
            elif kind == "end":
                self.current = None
            elif kind == "harness":
                self.current = None
                self.results.append({"kind": "error", "text": f"harness: {text}"})
            else:
                self.add(case, kind, text)
        return bool(data)

    def add(self, case, kind, text):
        self.current = None
        self.skip.add(key_of(case))
        self.results.append({**case, "kind": kind, "text": text})

    def close(self, hung):
        """True when the operator is done; else its process was started anew for what is left."""
        if hung:
            os.kill(self.pid, signal.SIGKILL)
        os.close(self.reader)
        _, status = os.waitpid(self.pid, 0)
        if os.WIFEXITED(status) and not hung:
            return True
        text = "" if hung else signal.Signals(os.WTERMSIG(status)).name
        self.add(self.current or {}, "hang" if hung else "crash", text)
        self.restarts += 1
        if self.restarts > MOST_RESTARTS:
            return True
        self.start()
        return False


def command_of(name, result):
    parts = [f"--op {name}"]
    for key in ("dtype", "sample", "mesh"):
        if key in result:
            parts.append(f"--{key} {result[key]}")
    if "layout" in result:
        parts.append(f"--layout '{result['layout']}'")
    if result.get("order"):
        parts.append("--noncontiguous")
    if result.get("seed") is not None:
        parts.append(f"--seed {result['seed']}")
    return "tests/opdb/run.py " + " ".join(parts)


def summary_of(job):
    name = job.op.full_name
    failed = [r for r in job.results if r["kind"] not in ("pass", "refused")]
    kinds = sorted({r["kind"] for r in failed}, key=lambda k: KINDS.index(k) if k in KINDS else 0)
    # What is known to fail does so by an error that says why; nothing excuses a wrong value, a crash or a hang.
    known = exclusions.why_known(name) and set(kinds) <= EXCUSED
    status = ("KNOWN" if known else "FAIL") if failed else "PASS" if job.results else "NOTHING"
    for result in failed:
        result["command"] = command_of(name, result)
    return {
        "op": name,
        "status": status,
        "kinds": kinds,
        "cases": len(job.results),
        "failed": len(failed),
        "refused": sum(r["kind"] == "refused" for r in job.results),
        "random": sum(r["text"] == "random" for r in job.results),
        "fallbacks": sorted(job.fallbacks),
        "unfit": job.unfit[:1],
        "failures": failed,
    }


def run_all(ops, skipped, options):
    waiting, running, summaries = list(ops), {}, []
    selector = selectors.DefaultSelector()
    began = written = time.monotonic()

    def watch(job):
        selector.register(job.reader, selectors.EVENT_READ, job)

    while waiting or running:
        if options.seconds and time.monotonic() - began > options.seconds and waiting:
            print(f"\r\033[K{len(waiting)} operators are left out: the time is over")
            waiting.clear()
        while waiting and len(running) < options.jobs:
            job = Job(waiting.pop(0), options)
            running[id(job)] = job
            watch(job)
        for key, _ in selector.select(timeout=1):
            job = key.data
            if not job.hear():
                selector.unregister(job.reader)
                finish(job, False, running, summaries, watch)
        for job in list(running.values()):
            if time.monotonic() - job.heard > SILENCE:
                selector.unregister(job.reader)
                finish(job, True, running, summaries, watch)
        if time.monotonic() - written > 20:
            write_json(summaries, skipped, options.out)
            written = time.monotonic()
        show_progress(len(summaries), len(ops), summaries, running, began)
    print()
    return summaries


def finish(job, hung, running, summaries, watch):
    if job.close(hung):
        del running[id(job)]
        summaries.append(summary_of(job))
        if summaries[-1]["status"] == "FAIL":
            worst = summaries[-1]["failures"][0]
            print(f"\r\033[K{summaries[-1]['op']}: {', '.join(summaries[-1]['kinds'])}: {worst['text'][:160]}")
    else:
        watch(job)


def show_progress(done, total, summaries, running, began):
    if not sys.stdout.isatty() and (done % 50 or done == show_progress.done):
        return
    show_progress.done = done
    failed = sum(s["status"] == "FAIL" for s in summaries)
    names = ", ".join(job.op.full_name for job in running.values())
    line = f"{done} of {total} operators, {failed} failed, {time.monotonic() - began:.0f} s: {names}"
    if line != show_progress.last:
        print(f"\r\033[K{line}"[:200], end="", flush=True)
        show_progress.last = line


show_progress.last, show_progress.done = "", -1


def write_json(summaries, skipped, path):
    with open(path, "w") as file:
        json.dump({"torch": torch.__version__, "skipped": skipped, "operators": summaries}, file, indent=1)


def print_summary(summaries, skipped):
    counts = {}
    for summary in summaries:
        counts[summary["status"]] = counts.get(summary["status"], 0) + 1
    cases = sum(s["cases"] for s in summaries)
    print(f"{len(summaries)} operators, {cases} cases: " + ", ".join(f"{n} {s}" for s, n in sorted(counts.items())))
    print(f"{sum(s['refused'] for s in summaries)} cases are refused as they should be")
    print(f"{len(skipped)} operators are not compared (exclusions.py); {sum(s['random'] for s in summaries)} cases draw "
          "random numbers and are compared by shape, type and among ranks")
    for kind in KINDS:
        names = [s["op"] + (" (known)" if s["status"] == "KNOWN" else "") for s in summaries if kind in s["kinds"]]
        if names:
            print(f"{kind} ({len(names)}): {' '.join(sorted(names))}")
    mended = [s["op"] for s in summaries if s["status"] == "PASS" and exclusions.why_known(s["op"])]
    if mended:
        print(f"known to fail, and passed here: {' '.join(mended)}")
    print(f"random: {' '.join(s['op'] for s in summaries if s['random'])}")
    fallbacks = sorted({f for s in summaries for f in s["fallbacks"]})
    print(f"no rule, run on replicas ({len(fallbacks)}): {' '.join(fallbacks)}")


def main():
    options = parse_arguments()
    chosen = [op for op in op_db if not options.op or any(fnmatch.fnmatchcase(op.full_name, p) for p in options.op)]
    skipped = {op.full_name: why for op in chosen if (why := exclusions.why_skipped(op.full_name))}
    ops = [op for op in chosen if op.full_name not in skipped]
    if options.seed is not None:
        random.Random(options.seed).shuffle(ops)
    if not ops:
        sys.exit("no operator of that name")
    if options.here:
        check.check_op(ops[0], options, lambda case, kind, text: print(case, kind, text, flush=True), set())
        return
    torch.set_num_threads(1)
    summaries = run_all(ops, skipped, options)
    print_summary(summaries, skipped)
    write_json(summaries, skipped, options.out)
    sys.exit(any(s["status"] == "FAIL" for s in summaries))


if __name__ == "__main__":
    main()
