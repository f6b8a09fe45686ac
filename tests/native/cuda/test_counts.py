"""CUDA calls of a decode step, counted on the emulated GPU."""

import json

import pytest

from orchestrator.lab.bench.counts import SHAPE, UPSTREAM, count_rows

from .conftest import HERE

GOLDEN = HERE / "counts.json"
RETENTION = 0.75
ROUTE_NODE = 2  # launches of the route node: pack its inputs, write the ids of all products
PRODUCTS = 2  # gate and up are one launch
LOOK_AHEAD = (SHAPE.n_layer - 1) / SHAPE.n_layer  # the last layer has no next layer


def test_counts_of_calls(device, emulated):
    """The counts of calls per step equal counts.json, an earlier result of count_rows.

    An intended change replaces the file.
    """
    assert count_rows(device.library, RETENTION, print) == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize(
    ("name", "launches"),
    [
        ("--policy dymoe --prefetch off, all experts on the GPU", 0),
        ("--policy dymoe --prefetch on, all experts on the GPU", LOOK_AHEAD),
        ("row 2: cache", PRODUCTS),
        ("row 3: cache + prefetch", PRODUCTS + LOOK_AHEAD),
        ("row 4: cache + 4/2", 2 * PRODUCTS),
        ("row 5: 4/2 + prefetch", 2 * PRODUCTS + LOOK_AHEAD),
        ("row 6: 4/0 + prefetch", 2 * PRODUCTS + LOOK_AHEAD),
        ("dynaexq 4/2", 2 * PRODUCTS),
    ],
)
def test_budgets(name, launches):
    """A decision costs one wait and two launches per layer, and prefetching one launch.

    Misses and a second precision cost one launch for each product, and no wait.
    """
    rows = {row["name"]: row for row in json.loads(GOLDEN.read_text())}
    upstream, found = rows[UPSTREAM], rows[name]
    assert found["waits"] == upstream["waits"] + 1
    assert found["launches"] <= upstream["launches"] + ROUTE_NODE + launches + 1e-3
