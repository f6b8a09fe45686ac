"""What a decode step asks of the GPU, counted on the emulated one."""

import json

from orchestrator.lab.bench.counts import count_rows

from .conftest import HERE

GOLDEN = HERE / "counts.json"
RETENTION = 0.75


def test_every_run_counts_the_same(device, emulated):
    """counts.json holds what count_rows returned. A wanted change of the counts replaces it."""
    assert count_rows(device.library, RETENTION, print) == json.loads(GOLDEN.read_text())
