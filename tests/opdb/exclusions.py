"""What of op_db is not compared, and why. A name may end in '*'."""

from fnmatch import fnmatchcase

# Cannot be compared with a plain run.
SKIPPED = {
    "empty": "its values are whatever the memory held",
    "empty_like": "its values are whatever the memory held",
    "empty_permuted": "its values are whatever the memory held",
    "empty_strided": "its values are whatever the memory held",
    "nn.functional.linear_cross_entropy.chunked*": "its Python code holds a lock while it computes: threads cannot be ranks",
    "new_empty": "its values are whatever the memory held",
    "new_empty_strided": "its values are whatever the memory held",
    "resize_*": "a distributed tensor's memory cannot be given another shape: refused",
    "sparse.*": "its samples are sparse tensors, which cannot be distributed",
    "to_sparse": "its result is a sparse tensor, which cannot be distributed",
}

# Draws random numbers: to be compared by shape and type once random operators have rules.
RANDOM = {
    "bernoulli": "random",
    "cauchy": "random",
    "exponential": "random",
    "geometric": "random",
    "log_normal": "random",
    "multinomial": "random",
    "nn.functional.alpha_dropout": "random",
    "nn.functional.dropout*": "random",
    "nn.functional.feature_alpha_dropout*": "random",
    "nn.functional.fractional_max_pool*": "random",
    "normal*": "random",
    "pca_lowrank": "random",
    "rand*": "random",
    "svd_lowrank": "random",
    "uniform": "random",
}


def _find(table, name):
    for pattern, reason in table.items():
        if fnmatchcase(name, pattern):
            return reason
    return None


def why_skipped(name):
    return _find(SKIPPED, name)


def why_random(name):
    return _find(RANDOM, name)
