"""What can become of a case, the gravest first."""

KINDS = ["wrong value", "replicas differ", "crash", "hang", "ranks disagree", "error", "no rule"]
