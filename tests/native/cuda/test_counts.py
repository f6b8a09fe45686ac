"""CUDA calls of a decode step, counted on the emulated GPU."""

import json

from orchestrator.lab.bench.counts import count_rows

from .conftest import HERE

GOLDEN = HERE / "counts.json"
RETENTION = 0.75


def test_counts_of_calls(device, emulated):
    """The counts of calls per step equal counts.json, an earlier result of count_rows.

    An intended change replaces the file.
    """
    assert count_rows(device.library, RETENTION, print) == json.loads(GOLDEN.read_text())
