"""Decisions of policies do not change unintentionally.

If a row changes on purpose, `python tests/unit/replay/golden.py` shows the difference, and --store
saves it.
"""

import json

import pytest
from golden import DECISIONS, ROWS, RUN, decided

from orchestrator.lab.replay.file import read_trace
from orchestrator.policy import POLICIES

STORED = json.loads(DECISIONS.read_text())


@pytest.mark.parametrize("row", ROWS)
def test_decisions_are_those_that_were_stored(library, row):
    assert decided(library, read_trace(RUN), row) == STORED[row]


def test_every_policy_has_a_row_and_every_row_is_stored():
    assert {name for name, *_ in ROWS.values()} == set(POLICIES)
    assert set(STORED) == set(ROWS)
