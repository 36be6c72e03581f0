"""What of op_db is not compared, and why. A name may end in '*'."""

from fnmatch import fnmatchcase

SKIPPED = {
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

# What is known to fail, and why. Listed in the summary, but no failure of the run.
KNOWN = {
    "__getitem__": "indexing by a Python list makes a plain index tensor",
    "as_strided*": "its backward writes through as_strided, which is a copy here",
    "fft.hfft*": "view_as_real of a part that is yet to be conjugated",
    "istft": "libtorch makes a plain window and multiplies by it",
    "linalg.householder_product": "its backward writes through as_strided, which is a copy here",
    "linalg.matrix_rank*": "libtorch mixes plain tensors in",
    "masked.std": "its Python code mixes plain tensors in",
    "masked.var": "its Python code mixes plain tensors in",
    "nn.functional.ctc_loss": "libtorch reads the lengths' data before it calls an operator",
    "nn.functional.linear_cross_entropy": "squeeze_ of a cut dim of size 1 would have to move the tensor",
    "nn.functional.pad.circular": "its backward writes through as_strided, which is a copy here",
    "ormqr": "its backward writes through as_strided, which is a copy here",
    "unravel_index": "its Python code mixes plain tensors in",
}


def _find(table, name):
    for pattern, reason in table.items():
        if fnmatchcase(name, pattern):
            return reason
    return None


def why_known(name):
    return _find(KNOWN, name)


def is_refusal(text):
    return any(part in text for part in REFUSED)


def why_skipped(name):
    """None when it is compared."""
    return _find(SKIPPED, name)
