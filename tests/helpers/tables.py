"""A test of many cases: one row each."""

import pytest


def cases(names, *rows):
    """Runs a test once for each row, which has a value for each of its arguments' names."""
    return pytest.mark.parametrize(names, rows)
