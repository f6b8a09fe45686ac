"""Tests with a table of cases."""

import pytest


def cases(names, *rows):
    """Run a test once for each row. names: the arguments of the test."""
    return pytest.mark.parametrize(names, rows)
