"""Prints what failed in a run as Markdown: grouped by cause, the gravest kind first, with a command for each group.

    python report.py opdb.json
"""

import json
import re
import sys

from kinds import KINDS


def cause_of(text):
    """An error's text without what differs from case to case."""
    text = re.sub(r"(?:f|i|u|c|bf)\d+\[[^ ]*\] @ \S+ : \S+", "SPEC", text)
    text = re.sub(r"rank \d+, (result|gradient|argument) \d+", r"\1", text)
    text = re.sub(r"\[[\d, x]*\]|\([\d, ]*\)", "[…]", text)
    text = re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "N", text)
    return text.split("; got")[0][:140]


def groups_of(operators):
    """{(kind, cause): [(operator, failure), …]}, one failure of each operator."""
    groups = {}
    for operator in operators:
        seen = set()
        for failure in operator["failures"]:
            key = (failure["kind"], cause_of(failure["text"]))
            if key not in seen:
                seen.add(key)
                groups.setdefault(key, []).append((operator["op"], failure))
    return groups


def print_report(run):
    operators = run["operators"]
    count = {s: sum(o["status"] == s for o in operators) for s in ("PASS", "FAIL", "KNOWN", "NOTHING")}
    cases = sum(o["cases"] for o in operators)
    print(f"# op_db on distributed tensors: torch {run['torch']}\n")
    print(f"{len(operators)} operators, {cases} cases: " + ", ".join(f"{n} {s}" for s, n in count.items()))
    print(f"; {len(run['skipped'])} not compared.\n")
    fallbacks = sorted({f for o in operators for f in o["fallbacks"]})
    print(f"No rule, run on replicas ({len(fallbacks)}): {' '.join(f.removeprefix('aten::') for f in fallbacks)}\n")
    groups = groups_of(operators)
    for kind in KINDS + sorted({k for k, _ in groups} - set(KINDS)):
        mine = sorted((g for g in groups.items() if g[0][0] == kind), key=lambda g: -len(g[1]))
        if not mine:
            continue
        print(f"## {kind}: {len({o for _, found in mine for o, _ in found})} operators\n")
        for (_, cause), found in mine:
            print(f"- **{len(found)}** `{cause}`")
            print(f"  - {' '.join(sorted(op for op, _ in found))}")
            print(f"  - {found[0][1]['text'][:400]}")
            print(f"  - `{found[0][1].get('command', '')}`")
        print()


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        print_report(json.load(file))
