"""The fixed part of op_db that the tests run."""

CI_SAMPLES = 2
CI_LAYOUTS = 3


def is_in_ci(index, name):
    return index % 6 == 0
