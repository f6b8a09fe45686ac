"""No policy decides otherwise than it did, unless somebody means it to.

Where a row is to change, `python tests/unit/replay/golden.py` says what became of it, and stores it
with --store.
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
