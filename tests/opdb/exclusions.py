"""What of op_db is not compared, and why. A name may end in '*'."""

from fnmatch import fnmatchcase

SKIPPED = {
    "__getitem__": "computes under Python's lock, and its lists are plain index tensors: threads cannot be ranks",
    "empty": "its values are whatever the memory held",
    "empty_like": "its values are whatever the memory held",
    "empty_permuted": "its values are whatever the memory held",
    "empty_strided": "its values are whatever the memory held",
    "nn.functional.fractional_max_pool*": "its Python code makes a plain random tensor",
    "nn.functional.linear_cross_entropy.chunked*": "its Python code holds a lock while it computes: threads cannot be ranks",
    "pca_lowrank": "its Python code makes a plain random tensor",
    "svd_lowrank": "its Python code makes a plain random tensor",
    "new_empty": "its values are whatever the memory held",
    "new_empty_strided": "its values are whatever the memory held",
    "resize_*": "a distributed tensor's memory cannot be given another shape: refused",
    "sparse.*": "its samples are sparse tensors, which cannot be distributed",
    "to_sparse": "its result is a sparse tensor, which cannot be distributed",
}

# Errors that are meant: the call is refused, on all ranks alike, rather than done wrongly.
REFUSED = {
    "no view without moving data": "a view shares memory with its tensor; what must move is a copy (reshape)",
    "random values into a Partial tensor": "a sum of random values is of another distribution",
}

# Code of op_db or of libtorch that mixes plain tensors in, of its own making: as a user's would, it runs under
# ImplicitReplication, which says that they are the same on all ranks.
MIXED = {
    "istft": "libtorch makes a plain window and multiplies by it",
    "linalg.matrix_rank*": "libtorch makes a plain tolerance",
    "masked.std": "its Python code makes a plain count",
    "masked.var": "its Python code makes a plain count",
    "unravel_index": "its Python code makes a plain tensor of sizes",
}

# What is known to fail, and why. Listed in the summary, but no failure of the run.
KNOWN = {
    "linalg.householder_product": "its backward writes to slices of cut tensors, which would be copies",
    "nn.functional.linear_cross_entropy": "squeeze_ of a cut dim of size 1 would have to move the tensor",
    "ormqr": "its backward writes to slices of cut tensors, which would be copies",
}


def _find(table, name):
    for pattern, reason in table.items():
        if fnmatchcase(name, pattern):
            return reason
    return None


def why_known(name):
    return _find(KNOWN, name)


def is_mixed(name):
    return _find(MIXED, name) is not None


def is_refusal(text):
    return any(part in text for part in REFUSED)


def why_skipped(name):
    """None when it is compared."""
    return _find(SKIPPED, name)
