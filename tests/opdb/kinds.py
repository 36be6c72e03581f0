"""What can become of a case, the gravest first."""

KINDS = ["wrong value", "replicas differ", "crash", "hang", "ranks disagree", "error", "no rule"]

# What an operator that is known to fail may fail with.
EXCUSED = {"error", "no rule"}
