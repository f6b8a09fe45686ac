"""What a decode step asks of the GPU, counted on the emulated one."""

import json

from orchestrator.lab.bench.counts import count_rows

from .conftest import HERE

GOLDEN = HERE / "counts.json"
RETENTION = 0.75
TIMES = 2


def test_every_run_counts_the_same(device, emulated):
    """counts.json has the rows of `moe-edge bench gpu --emulated --counts --json`. A change of the
    counts that is wanted replaces it."""
    for _ in range(TIMES):
        assert count_rows(device.library, RETENTION, print) == json.loads(GOLDEN.read_text())
