"""What of op_db is not compared, and why. A name may end in '*'."""

from fnmatch import fnmatchcase

SKIPPED = {
    "empty": "its values are whatever the memory held",
    "empty_like": "its values are whatever the memory held",
    "empty_permuted": "its values are whatever the memory held",
    "empty_strided": "its values are whatever the memory held",
    "nn.functional.fractional_max_pool*": "its Python code makes a plain random tensor",
    "nn.functional.linear_cross_entropy.chunked*": "its Python code holds a lock while it computes: threads cannot be ranks",
    "new_empty": "its values are whatever the memory held",
    "new_empty_strided": "its values are whatever the memory held",
    "resize_*": "a distributed tensor's memory cannot be given another shape: refused",
    "sparse.*": "its samples are sparse tensors, which cannot be distributed",
    "to_sparse": "its result is a sparse tensor, which cannot be distributed",
}

# Draw random numbers from a seed of their own, so that the plain run gives the same values again.
RANDOM = [
    "bernoulli",
    "cauchy",
    "exponential",
    "geometric",
    "log_normal",
    "multinomial",
    "nn.functional.*dropout*",
    "nn.functional.rrelu",
    "normal*",
    "pca_lowrank",
    "rand*",
    "svd_lowrank",
    "uniform",
]


def is_random(name):
    return any(fnmatchcase(name, pattern) for pattern in RANDOM)


def why_skipped(name):
    """None when it is compared."""
    for pattern, reason in SKIPPED.items():
        if fnmatchcase(name, pattern):
            return reason
    return None
